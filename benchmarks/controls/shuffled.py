"""A control of docs/results/learning.md: GRPO's rewards, dealt anew at random within each group."""

import torch
from torch import Tensor

from pipelines.core.registry import reward
from pipelines.core.types import Outcome
from pipelines.training import advantages


@reward("shuffled", reads=())
def shuffled(outcome: Outcome) -> float:
    """0: a panel that names it puts this file into the stage's key and loads it."""
    return 0.0


def _estimate(rewards: Tensor, group: int, baseline: advantages.Baseline, scale: advantages.Scale) -> Tensor:
    draw = torch.Generator().manual_seed(int(1e6 * float(rewards.nansum())))  # the same on all processes
    order = torch.rand(len(rewards) // group, group, generator=draw).argsort(dim=1)
    return _own(rewards.view(-1, group).gather(1, order.to(rewards.device)).view(-1), group, baseline, scale)


_own, advantages.estimate_advantages = advantages.estimate_advantages, _estimate  # type: ignore[assignment]
