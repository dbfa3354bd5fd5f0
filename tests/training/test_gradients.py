"""The gradient of each loss with respect to each token's log-probability, written out by hand."""

import math

import pytest
import torch

from pipelines.training.advantages import group_advantages
from pipelines.training.losses import Kind, Level, averaged, per_token, ratios

LOW, HIGH = 0.2, 0.28
# Two episodes of three and two tokens; the last place of the second is padding.
LOGPS = [[-1.0, -2.0, -0.5], [-1.5, -0.7, -9.0]]
OLD = [[-1.4, -2.22, -0.4], [-1.25, -1.2, -3.0]]  # ratios 1.49, 1.25, 0.90; and 0.78, 1.65
MASK = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
LENGTHS = [3, 2]
ADVANTAGES = [2.0, -1.0]
LONGEST, PARTS, SHARE, ITEMS = 8, 2, 4, 20


def weight(kind: str, row: int) -> float:
    """What one token of a row counts in the average."""
    return {
        "grpo": 1 / (LENGTHS[row] * 2 * PARTS),  # the mean over a row's tokens, over two rows, over the parts
        "bnpo": 1 / (sum(LENGTHS) * PARTS),
        "dr_grpo": 1 / (2 * LONGEST * PARTS),
        "dapo": SHARE / ITEMS,
        "cispo": SHARE / ITEMS,
    }[kind]


def slope(kind: str, ratio: float, advantage: float) -> float:
    """The derivative of one loss with respect to the logarithm of its ratio."""
    if kind == "cispo":
        return -min(ratio, 1 + HIGH) * advantage
    is_clipped = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
    return 0.0 if is_clipped else -ratio * advantage


def gradient(kind: Kind, level: Level) -> list[list[float]]:
    """The trainer's gradient on the two episodes."""
    logps = torch.tensor(LOGPS, requires_grad=True)
    old, mask, advantages = torch.tensor(OLD), torch.tensor(MASK), torch.tensor(ADVANTAGES).unsqueeze(1)
    ratio = ratios(logps, old, mask, level)
    losses = per_token(kind, ratio, logps, advantages, LOW, HIGH)
    averaged(kind, losses, mask, items=torch.tensor(float(ITEMS)), longest=LONGEST, parts=PARTS, share=SHARE).backward()
    assert logps.grad is not None
    found: list[list[float]] = logps.grad.tolist()
    return found


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_each_loss_has_the_gradient_of_its_formula(kind: Kind) -> None:
    wanted = [
        [
            MASK[row][at] * weight(kind, row) * slope(kind, math.exp(LOGPS[row][at] - OLD[row][at]), ADVANTAGES[row])
            for at in range(3)
        ]
        for row in range(2)
    ]
    assert gradient(kind, "token") == [pytest.approx(row, rel=1e-5, abs=1e-7) for row in wanted]


def test_clipped_tokens_have_no_gradient_but_under_cispo() -> None:
    assert gradient("dapo", "token")[0][0] == 0.0  # ratio 1.49 above 1.28, and the advantage is positive
    assert gradient("dapo", "token")[0][1] != 0.0  # 1.25 is below it
    assert gradient("dapo", "token")[1][0] == 0.0  # ratio 0.78 below 0.8, and the advantage is negative
    assert gradient("cispo", "token")[0][0] == pytest.approx(-1.28 * 2.0 * SHARE / ITEMS)
    assert gradient("dapo", "token")[1][1] == pytest.approx(math.exp(0.5) * SHARE / ITEMS)


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_the_sequence_level_is_gspos_gradient(kind: Kind) -> None:
    """GSPO, equation 7: the ratio is the geometric mean over an episode, so its tokens share one slope evenly."""
    wanted = []
    for row, length in enumerate(LENGTHS):
        ratio = math.exp(sum(LOGPS[row][at] - OLD[row][at] for at in range(length)) / length)
        share = length * weight(kind, row) * slope(kind, ratio, ADVANTAGES[row]) / length
        wanted.append([share * MASK[row][at] for at in range(3)])
    assert gradient(kind, "sequence") == [pytest.approx(row, rel=1e-5, abs=1e-7) for row in wanted]


def test_without_a_deviation_the_advantage_is_leave_one_out_times_a_constant() -> None:
    """RLOO takes the mean of the others off: (G - 1) / G of that is the reward less the mean of all."""
    rewards = [3.0, 1.0, 0.0, 0.0]
    others = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    found = group_advantages(torch.tensor(rewards), 4, "none").tolist()
    assert found == pytest.approx([value * 3 / 4 for value in others])


def test_reinforce_plus_plus_divides_by_the_deviation_of_the_whole_generation() -> None:
    rewards = [2.0, 0.0, 1.0, 1.0, 3.0, 1.0]  # groups of two: means 1, 1 and 2; the mean of all is 4/3
    spread = math.sqrt(sum((reward - 4 / 3) ** 2 for reward in rewards) / 5)
    wanted = [1 / (spread + 1e-4), -1 / (spread + 1e-4), 0.0, 0.0, 1 / (spread + 1e-4), -1 / (spread + 1e-4)]
    assert group_advantages(torch.tensor(rewards), 2, "batch").tolist() == pytest.approx(wanted, rel=1e-5)
