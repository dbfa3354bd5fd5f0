"""What a group's rewards say about each of its episodes: pure functions on tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group", "others", "batch"]
Scale = Literal["group", "batch", "none"]
EPS = 1e-4  # TRL's; TRUST-SQL, equation 5 names no value
SAME = 1e-5  # below this, a standard deviation is rounding: rewards are sums of a few 32-bit terms


def estimate(rewards: Tensor, group: int, baseline: Baseline = "group", scale: Scale = "group") -> Tensor:
    """(N,) advantages from (N,) rewards whose groups stand together: (r - baseline) / (deviation + eps).

    GRPO takes both from the group. RLOO (Ahmadian et al., 2024, equation 6) takes the mean of the group's other
    episodes off and divides by nothing; REINFORCE++ (Hu et al., 2025) takes the mean of the whole generation off and
    divides by its deviation, or, with a group baseline, by the deviation of what that baseline left.

    A NaN reward is an episode that was left out: it counts in no mean or deviation and has advantage 0. So has every
    episode that says nothing (see `useful`). A deviation is the sample's, divided by n - 1, as in TRL (TRUST-SQL's
    equation 5 says only sigma).
    """
    grouped = rewards.view(-1, group)
    mean = rewards.nanmean() if baseline == "batch" else grouped.nanmean(dim=1, keepdim=True)
    centred = grouped - mean
    if baseline == "others":  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        count = (~grouped.isnan()).sum(dim=1, keepdim=True)
        centred = centred * count / (count - 1).clamp(min=1)
    if scale != "none":
        spread = _deviation(grouped if scale == "group" else centred.view(1, -1))
        centred = centred / (spread.unsqueeze(1) + EPS)
    return centred.view(-1).where(useful(rewards, group, baseline), 0.0)


def of_turns(payments: Tensor, group: int) -> Tensor:
    """(N, T) advantages of turns from (N, T) payments, NaN past an episode's end and where it was left out.

    What a turn earns is what is paid from it on, for an earlier payment does not depend on it. Its baseline is the mean
    of what the group's other episodes earn from their turn of the same number on (from their last, where they are
    shorter). It depends on none of the episode's own actions, so the policy gradient stays unbiased; a mean or a
    deviation that the episode itself is part of does not, nor does one over those alone that came so far.
    """
    there = ~payments.isnan()
    to_go = payments.nan_to_num(0.0).flip(1).cumsum(1).flip(1)
    last = (there.sum(dim=1, keepdim=True) - 1).clamp(min=0)  # (N, 1)
    places = torch.arange(payments.size(1), device=payments.device).expand_as(payments).minimum(last)
    counts = there[:, :1].view(-1, group, 1)  # (N / group, group, 1): which episodes take part
    earned = to_go.gather(1, places).view(-1, group, payments.size(1)) * counts
    others = counts.sum(dim=1, keepdim=True) - 1
    centred = earned - (earned.sum(dim=1, keepdim=True) - earned) / others.clamp(min=1)
    centred = (centred * (others > 0)).view_as(payments)
    return centred.where(there & (centred.abs() > SAME), 0.0)


def zero_variance(rewards: Tensor, group: int) -> Tensor:
    """(N / group,) whether a group's rewards are all equal, or fewer than two are left."""
    return _deviation(rewards.view(-1, group)) <= SAME


def _deviation(grouped: Tensor) -> Tensor:
    """(B,) sample deviations of the rewards that are there; 0 for fewer than two."""
    there = ~grouped.isnan()
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).nan_to_num(0.0)
    return ((centred**2).sum(dim=1) / (there.sum(dim=1) - 1).clamp(min=1)).sqrt()


def useful(rewards: Tensor, group: int, baseline: Baseline = "group") -> Tensor:
    """(N,) whether an episode's reward says anything: it takes part, and those it is held against are not all equal."""
    alike = zero_variance(rewards, rewards.numel() if baseline == "batch" else group)
    return ~rewards.isnan() & ~alike.repeat_interleave(rewards.numel() // len(alike))
