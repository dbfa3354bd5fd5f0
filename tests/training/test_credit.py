"""Advantages by hand, and credit for each turn: without bias on a small world whose every group is enumerated."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from pipelines.core.types import Action, ActionKind, StopReason, Trajectory, Turn
from pipelines.curation.filtering import broken_rule
from pipelines.rewards.panel import Rewards
from pipelines.training.advantages import estimate_advantages, has_signal, turn_advantages, zero_variance
from pipelines.training.rollouts import PaidEpisode, token_advantages, turn_payments

NAN = math.nan
# One question. Turn 1 answers at once, and is paid 0.2, or probes, and is paid -0.1. A probe shows x (one time in four)
# or y. Turn 2 then takes one of two actions: in x they are paid 1 and 0, in y 0 and 0.8. The policy has three
# parameters, all of them 0: the log-odds of a probe, of the first action in x, and of the first in y.
# Each episode: its probability, its turns' payments, and the derivatives of log pi of both turns by the parameters.
EPISODES = (
    (1 / 2, (0.2, NAN), ((-0.5, 0, 0), (0, 0, 0))),
    (1 / 16, (-0.1, 1.0), ((0.5, 0, 0), (0, 0.5, 0))),
    (1 / 16, (-0.1, 0.0), ((0.5, 0, 0), (0, -0.5, 0))),
    (3 / 16, (-0.1, 0.0), ((0.5, 0, 0), (0, 0, 0.5))),
    (3 / 16, (-0.1, 0.8), ((0.5, 0, 0), (0, 0, -0.5))),
)
# A probe is worth -0.1 + 1/4 * 1/2 + 3/4 * 1/2 * 0.8 = 0.325, an answer 0.2, and the derivative of a log-odd is 1/4;
# an action in x counts 1/2 * 1/4 of the time, one in y 1/2 * 3/4.
GRADIENT = (0.25 * (0.325 - 0.2), 1 / 2 * 1 / 4 * 0.25 * 1.0, -1 / 2 * 3 / 4 * 0.25 * 0.8)
GROUP = 3


def expected(estimator):
    groups = list(itertools.product(EPISODES, repeat=GROUP))
    payments = torch.tensor([paid for group in groups for _, paid, _ in group], dtype=torch.float64)
    slopes = torch.tensor([slope for group in groups for _, _, slope in group], dtype=torch.float64)
    chances = torch.tensor([math.prod(chance for chance, _, _ in group) for group in groups], dtype=torch.float64)
    gradients = (estimator(payments).unsqueeze(2) * slopes).sum(1).view(len(groups), GROUP, 3).mean(1)
    return (chances.unsqueeze(1) * gradients).sum(0).tolist()


def same_turn(values):
    """What the turns of one number have is taken for rewards of one state: their mean taken off, their deviation by."""
    columns = values.view(-1, GROUP, values.size(1)).transpose(1, 2).reshape(-1)
    return estimate_advantages(columns, GROUP).view(-1, values.size(1), GROUP).transpose(1, 2).reshape(values.shape)


def test_the_estimator_of_turns_has_no_bias():
    assert expected(lambda payments: turn_advantages(payments, GROUP)) == pytest.approx(GRADIENT, abs=1e-12)


def test_the_whole_episodes_advantage_has_no_bias_either_but_blames_turns_for_what_came_before():
    def whole(payments):
        return estimate_advantages(payments.nansum(1), GROUP, "others", "none").unsqueeze(1).expand_as(payments)

    assert expected(whole) == pytest.approx(GRADIENT, abs=1e-12)


def test_normalising_each_turns_own_payment_pushes_the_wrong_way():
    """A probe is paid less than an answer, though it is worth more: the policy would unlearn to probe."""
    assert GRADIENT[0] > 0
    assert expected(same_turn)[0] < 0


def test_what_a_turn_earns_is_held_against_the_others():
    """Two turns, one, and three of which the first costs 1; and an episode that was left out."""
    payments = torch.tensor([[0.0, 2.0, NAN], [4.0, NAN, NAN], [-1.0, 0.0, 3.0], [NAN] * 3])
    # From each turn on: 2 2 | 4 (also for later turns) | 2 3 3.
    expected = [[2 - 3.0, 2 - 3.5, 0.0], [4 - 2.0, 0.0, 0.0], [2 - 3.0, 3 - 3.0, 3 - 3.0], [0.0] * 3]
    assert turn_advantages(payments, 4).tolist() == expected
    assert turn_advantages(payments[2:], 2).tolist() == [[0.0] * 3] * 2  # alone, there is nothing to hold it against
    # Three times 1.1: in 32 bits (3.3 - 1.1) / 2 is 1.1000001, so each turn would earn -1.2e-7.
    assert turn_advantages(torch.tensor([[1.1]] * 3), 3).tolist() == [[0.0]] * 3


def test_paid_at_the_end_alone_it_is_leave_one_out():
    payments = torch.tensor([[0.0, 3.0, NAN], [1.0, NAN, NAN], [0.0, 0.0, 0.0], [0.0, 0.0, NAN]])
    whole = estimate_advantages(payments.nansum(1), 4, "others", "none")
    assert torch.equal(turn_advantages(payments, 4), whole.unsqueeze(1).expand(4, 3).where(~payments.isnan(), 0.0))


def episode(ids, ends, by_turn):
    """A prompt of two tokens, then turns and observations."""
    mask = tuple(int(place >= 2) for place in range(ids))
    tokens = {"token_ids": tuple(range(ids)), "agent_mask": mask, "turn_ends": ends}
    trajectory = Trajectory("q", 0, "p", "react", (), (), None, StopReason.SOLUTION, **tokens)
    return PaidEpisode(trajectory, None, Rewards(sum(by_turn), {}, {}, by_turn))


def test_each_token_has_the_advantage_of_its_turn():
    """Turns end before tokens 4 and 7, the observation between them belongs to the later one and is masked anyway."""
    episodes = [
        episode(7, (4, 7), (0.5, 1.0)),
        episode(3, (3,), (2.0,)),
        PaidEpisode(episode(3, (3,), ()).trajectory, None, None),
    ]
    assert turn_payments(episodes).nan_to_num(9.0).tolist() == [[0.5, 1.0], [2.0, 9.0], [9.0, 9.0]]
    values = torch.tensor([[1.0, -1.0], [0.25, 0.0], [0.0, 0.0]])
    assert token_advantages(values, episodes, 5).tolist() == [
        [1.0, 1.0, -1.0, -1.0, -1.0],
        [0.25, 0, 0, 0, 0],
        [0.0] * 5,
    ]
    episodes = [episode(3, (3,), (2.0,)), PaidEpisode(episode(7, (4, 7), ()).trajectory, None, None)]
    assert turn_payments(episodes).nan_to_num(9.0).tolist() == [[2.0], [9.0]]
    values = torch.tensor([[0.5], [0.0]])
    assert token_advantages(values, episodes, 5).tolist() == [[0.5, 0, 0, 0, 0], [0.0] * 5]


EPS = 1e-4  # TRL's
ALL = math.sqrt(4 / 3) + EPS
PAIR = math.sqrt(2) + EPS


@pytest.mark.parametrize(
    ("rewards", "group", "settings", "expected"),
    [
        # Group 1: mean 2, deviation sqrt((4 + 0 + 4) / 2) = 2. Group 2: mean 1, deviation 1.
        ([0.0, 2.0, 4.0, 0.0, 1.0, 2.0], 3, {}, [-2 / 2.0001, 0.0, 2 / 2.0001, -1 / 1.0001, 0.0, 1 / 1.0001]),
        # Without the left-out one: mean 3, deviation sqrt(2 * 1) = sqrt(2).
        ([2.0, NAN, 4.0], 3, {}, [-1 / PAIR, 0.0, 1 / PAIR]),
        # Reasoning-SQL: r - mean, no deviation.
        ([0.0, 1.0, 5.0], 3, {"scale": "none"}, [-2.0, -1.0, 3.0]),
        # REINFORCE++ with a group baseline, which leaves -1, 1, -1, 1: their deviation is sqrt(4 / 3).
        ([0.0, 2.0, 1.0, 3.0], 2, {"scale": "batch"}, [-1 / ALL, 1 / ALL] * 2),
        # RLOO: 3 - (1 + 0 + 0) / 3, 1 - 3 / 3, 0 - 4 / 3; and of 2 and 4, where a third is left out, 2 - 4.
        (
            [3.0, 1.0, 0.0, 0.0, 2.0, NAN, 4.0, NAN],
            4,
            {"baseline": "others", "scale": "none"},
            [8 / 3, 0.0, -4 / 3, -4 / 3, -2.0, 0.0, 2.0, 0.0],
        ),
        # REINFORCE++: of 1, 1, 3, 3 and one left out the mean is 2, the deviation sqrt(4 / 3); equal groups teach, too.
        (
            [1.0, 1.0, NAN, 3.0, 3.0, NAN],
            3,
            {"baseline": "batch", "scale": "batch"},
            [-1 / ALL, -1 / ALL, 0.0, 1 / ALL, 1 / ALL, 0.0],
        ),
        ([0.7] * 4, 2, {"baseline": "batch", "scale": "batch"}, [0.0] * 4),
    ],
)
def test_an_advantage_is_the_reward_less_a_baseline_by_a_deviation(rewards, group, settings, expected):
    assert estimate_advantages(torch.tensor(rewards), group, **settings).tolist() == pytest.approx(
        expected, rel=1e-6, abs=1e-7
    )


def test_groups_that_teach_nothing_and_rounding():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 3.0, NAN, NAN])
    assert zero_variance(rewards, 2).tolist() == [True, False, True, True]
    assert has_signal(torch.tensor([1.0, 1.0, NAN, 3.0, 3.0, NAN]), 3, "batch").tolist() == [True, True, False] * 2
    assert has_signal(rewards, 2).tolist() == [False, False, True, True, False, False, False, False]
    # Sixty equal rewards whose 32-bit mean is not quite their value give no gradient at all.
    rewards = torch.full((6,), 7.3) + torch.tensor([0.0, 1e-6, 0.0, 0.0, 0.0, 0.0])
    assert estimate_advantages(rewards, 6).tolist() == [0.0] * 6


def spoken(*kinds, error=None, final="SELECT 1"):
    turns = tuple(Turn("...", Action(kind, format_error=error)) for kind in kinds)
    return Trajectory("q", 0, "p", "react", (), turns, final, StopReason.SOLUTION)


@pytest.mark.parametrize(
    ("trajectory", "rule", "out"),
    [
        (spoken(ActionKind.SQL, ActionKind.SOLUTION), "malformed", False),
        (spoken(ActionKind.SQL, error="text_outside"), "malformed", True),
        (spoken(ActionKind.INVALID, error="empty_turn"), "malformed", True),
        (spoken(ActionKind.SQL, final=None), "no_answer", True),
        (spoken(ActionKind.SOLUTION), "no_answer", False),
    ],
)
def test_grpo_filter_leaves_out_what_its_rule_names(trajectory, rule, out):
    outcome = SimpleNamespace(trajectory=trajectory)
    assert broken_rule(outcome, (rule,)) == (rule if out else None)
    assert broken_rule(outcome, ()) is None
