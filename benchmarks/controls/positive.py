"""An ablation of docs/results/learning.md: GRPO that learns only from episodes above their group's mean."""

from torch import Tensor

from pipelines.core.registry import reward
from pipelines.core.types import Outcome
from pipelines.training import advantages


@reward("positive", reads=())
def positive(outcome: Outcome) -> float:
    """0: a panel that names it puts this file into the stage's key and loads it."""
    return 0.0


def _estimate(rewards: Tensor, group: int, baseline: advantages.Baseline, scale: advantages.Scale) -> Tensor:
    return _own(rewards, group, baseline, scale).clamp(min=0.0)


_own, advantages.estimate_advantages = advantages.estimate_advantages, _estimate  # type: ignore[assignment]
