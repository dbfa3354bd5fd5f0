"""The gradient of each loss with respect to each token's log-probability, written out by hand."""

import math

import pytest
import torch

from pipelines.recipe.config import Grpo
from pipelines.training.losses import Kind, Level, averaged, estimate, per_token, ratios

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


# Two questions of two episodes, two tokens each; every ratio is 2, 1 or 1/2, so that all numbers below are fractions.
REWARDS = [3.0, 1.0, 2.0, 2.0]
RATIOS = [[2.0, 1.0], [1.0, 0.5], [1.0, 2.0], [0.5, 1.0]]
D = 1.41421356 + 1e-4  # deviation of the first group, sqrt(2), with TRL's epsilon
B = 0.81649658 + 1e-4  # of the whole generation, whose mean is 2: sqrt((1 + 1 + 0 + 0) / 3)
METHODS = {
    # -A * ratio / (2 tokens * 4 episodes), and 0 where it is clipped: 2 > 1.28 with A > 0, 0.5 < 0.8 with A < 0
    "grpo": ({}, {"loss": "grpo"}, [[0, -1 / D / 8], [1 / D / 8, 0], [0, 0], [0, 0]]),
    # -A * ratio / (8 tokens * 4 episodes), A = r - mean
    "dr_grpo": ({"scale": "none"}, {"loss": "dr_grpo"}, [[0, -1 / 32], [1 / 32, 0], [0, 0], [0, 0]]),
    # -A * ratio / 8 tokens in all
    "dapo": ({}, {"loss": "dapo"}, [[0, -1 / D / 8], [1 / D / 8, 0], [0, 0], [0, 0]]),
    # The geometric means of the ratios are sqrt(2) and sqrt(1/2): both are out of their bounds.
    "gspo": ({}, {"loss": "grpo", "level": "sequence"}, [[0, 0], [0, 0], [0, 0], [0, 0]]),
    # The same within bounds of 1/2 and 3/2: -A * mean ratio / (2 tokens * 4 episodes)
    "gspo, wide": (
        {},
        {"loss": "grpo", "level": "sequence", "low": 0.5, "high": 0.5},
        [[-1.41421356 / D / 8] * 2, [0.70710678 / D / 8] * 2, [0, 0], [0, 0]],
    ),
    # -A * min(ratio, 1.28) / 8: no token is without a gradient
    "cispo": ({}, {"loss": "cispo"}, [[-1.28 / D / 8, -1 / D / 8], [1 / D / 8, 0.5 / D / 8], [0, 0], [0, 0]]),
    # A = r - the other's: 2 and -2
    "rloo": ({"baseline": "others", "scale": "none"}, {"loss": "dapo"}, [[0, -2 / 8], [2 / 8, 0], [0, 0], [0, 0]]),
    # A = (r - 2) / deviation of all
    "reinforce++": (
        {"baseline": "batch", "scale": "batch"},
        {"loss": "dapo"},
        [[0, -1 / B / 8], [1 / B / 8, 0], [0, 0], [0, 0]],
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_from_its_rewards_to_its_gradient(name: str) -> None:
    estimator, options, wanted = METHODS[name]
    settings = Grpo(**estimator, loss=options["loss"], level=options.get("level", "token"))  # type: ignore[arg-type]
    advantages = estimate(torch.tensor(REWARDS), 2, settings.baseline, settings.scale).unsqueeze(1)
    old, mask = torch.tensor([[-1.0, -2.0]] * 4), torch.ones(4, 2)
    logps = (old + torch.tensor(RATIOS).log()).requires_grad_()
    ratio = ratios(logps, old, mask, settings.level)
    low, high = options.get("low", LOW), options.get("high", HIGH)
    losses = per_token(settings.loss, ratio, logps, advantages, low, high)
    averaged(settings.loss, losses, mask, items=mask.sum(), longest=8, parts=1, share=1.0).backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [pytest.approx(row, rel=1e-5, abs=1e-8) for row in wanted]
