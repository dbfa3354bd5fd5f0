"""What a group's rewards say about each of its episodes: pure functions on tensors."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

EPS = 1e-4  # TRL's; TRUST-SQL, equation 5 names no value
SAME = 1e-5  # below this, a group's standard deviation is rounding: rewards are sums of a few 32-bit terms


def group_advantages(rewards: Tensor, group: int, scale: Literal["group", "batch", "none"] = "group") -> Tensor:
    """(N,) advantages from (N,) rewards whose groups stand together: (r - mean) / (std + eps) within each group.

    With "batch" the deviation is that of all rewards (REINFORCE++), with "none" there is none (Reasoning-SQL).

    A NaN reward is an episode that was left out: it counts in no mean or deviation and has advantage 0. So has
    every episode of a group whose rewards are all equal. The deviation is the sample's, divided by n - 1, as in
    TRL (TRUST-SQL's equation 5 says only sigma).
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.nanmean(dim=1, keepdim=True)
    if scale != "none":
        spread = _deviation(grouped if scale == "group" else rewards.view(1, -1))
        centred = centred / (spread.unsqueeze(1) + EPS)
    return centred.view(-1).where(useful(rewards, group), 0.0)


def zero_variance(rewards: Tensor, group: int) -> Tensor:
    """(N / group,) whether a group teaches nothing: all its rewards are equal, or fewer than two are left."""
    return _deviation(rewards.view(-1, group)) <= SAME


def _deviation(grouped: Tensor) -> Tensor:
    """(B,) sample deviations of the rewards that are there; 0 for fewer than two."""
    there = ~grouped.isnan()
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)
    return ((centred**2).sum(dim=1) / (there.sum(dim=1) - 1).clamp(min=1)).sqrt()


def useful(rewards: Tensor, group: int) -> Tensor:
    """(N,) whether an episode's reward says anything: it takes part, and its group's rewards are not all equal."""
    return ~rewards.isnan() & ~zero_variance(rewards, group).repeat_interleave(group)
