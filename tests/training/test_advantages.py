"""Advantages against numbers worked out by hand, and against TRL's own."""

import math
from types import SimpleNamespace

import pytest
import torch

from pipelines.core.types import Action, ActionKind, StopReason, Trajectory, Turn
from pipelines.curation.filtering import broken_rule
from pipelines.training.losses import estimate, useful, zero_variance

NAN = float("nan")


def test_the_advantages_of_grpo_are_normalised_within_each_group():
    # Group 1: mean 2, deviation sqrt((4 + 0 + 4) / 2) = 2. Group 2: mean 1, deviation 1.
    rewards = torch.tensor([0.0, 2.0, 4.0, 0.0, 1.0, 2.0])
    expected = torch.tensor([-2 / 2.0001, 0.0, 2 / 2.0001, -1 / 1.0001, 0.0, 1 / 1.0001])
    assert torch.allclose(estimate(rewards, 3), expected)


def test_without_scaling_only_the_mean_is_taken_off():
    """Reasoning-SQL: r - mean, no deviation."""
    rewards = torch.tensor([0.0, 1.0, 5.0])
    assert estimate(rewards, 3, scale="none").tolist() == [-2.0, -1.0, 3.0]


def test_the_deviation_can_be_the_whole_generations():
    """REINFORCE++ with a group baseline, which leaves -1, 1, -1, 1: their deviation is sqrt(4 / 3)."""
    rewards = torch.tensor([0.0, 2.0, 1.0, 3.0])
    scale = math.sqrt(4 / 3) + 1e-4
    assert estimate(rewards, 2, scale="batch").tolist() == pytest.approx([-1 / scale, 1 / scale] * 2)


def test_the_baseline_can_be_the_mean_of_the_groups_others():
    """RLOO: 3 - (1 + 0 + 0) / 3, 1 - 3 / 3, 0 - 4 / 3; and of 2 and 4, where a third episode is left out, 2 - 4."""
    rewards = torch.tensor([3.0, 1.0, 0.0, 0.0, 2.0, NAN, 4.0, NAN])
    expected = [8 / 3, 0.0, -4 / 3, -4 / 3, -2.0, 0.0, 2.0, 0.0]
    assert estimate(rewards, 4, "others", "none").tolist() == pytest.approx(expected, abs=1e-6)


def test_the_baseline_can_be_the_mean_of_the_whole_generation():
    """REINFORCE++: of 1, 1, 3, 3 and one left out the mean is 2, the deviation sqrt(4 / 3); equal groups teach, too."""
    rewards = torch.tensor([1.0, 1.0, NAN, 3.0, 3.0, NAN])
    scale = math.sqrt(4 / 3) + 1e-4
    expected = [-1 / scale, -1 / scale, 0.0, 1 / scale, 1 / scale, 0.0]
    assert estimate(rewards, 3, "batch", "batch").tolist() == pytest.approx(expected)
    assert useful(rewards, 3, "batch").tolist() == [True, True, False, True, True, False]
    assert estimate(torch.full((4,), 0.7), 2, "batch", "batch").tolist() == [0.0] * 4


def test_an_episode_that_is_left_out_counts_nowhere():
    # Without the left-out one: mean 3, deviation sqrt(2 * 1) = sqrt(2).
    rewards = torch.tensor([2.0, NAN, 4.0])
    scale = math.sqrt(2) + 1e-4
    assert estimate(rewards, 3).tolist() == pytest.approx([-1 / scale, 0.0, 1 / scale])


def test_groups_that_teach_nothing():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 3.0, NAN, NAN])
    assert zero_variance(rewards, 2).tolist() == [True, False, True, True]
    assert useful(rewards, 2).tolist() == [False, False, True, True, False, False, False, False]


def test_rounding_is_no_advantage():
    """Sixty equal rewards whose 32-bit mean is not quite their value give no gradient at all."""
    rewards = torch.full((6,), 7.3) + torch.tensor([0.0, 1e-6, 0.0, 0.0, 0.0, 0.0])
    assert estimate(rewards, 6).tolist() == [0.0] * 6


def episode(*kinds: ActionKind, error: str | None = None, final: str | None = "SELECT 1") -> Trajectory:
    turns = tuple(Turn("...", Action(kind, format_error=error)) for kind in kinds)
    return Trajectory("q", 0, "p", "react", (), turns, final, StopReason.SOLUTION)


@pytest.mark.parametrize(
    ("trajectory", "rule", "out"),
    [
        (episode(ActionKind.SQL, ActionKind.SOLUTION), "malformed", False),
        (episode(ActionKind.SQL, error="text_outside"), "malformed", True),
        (episode(ActionKind.INVALID, error="empty_turn"), "malformed", True),
        (episode(ActionKind.SQL, final=None), "no_answer", True),
        (episode(ActionKind.SOLUTION), "no_answer", False),
    ],
)
def test_grpo_filter_leaves_out_what_its_rule_names(trajectory, rule, out):
    outcome = SimpleNamespace(trajectory=trajectory)
    assert broken_rule(outcome, (rule,)) == (rule if out else None)
    assert broken_rule(outcome, ()) is None
