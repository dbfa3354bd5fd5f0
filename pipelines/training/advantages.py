"""Advantages: what a group's rewards say about each of its episodes. Pure functions on tensors."""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["group", "others", "batch"]
Scale = Literal["group", "batch", "none"]
EPS = 1e-4  # TRL's; TRUST-SQL, equation 5 names no value
SAME = 1e-5  # below this, a standard deviation is rounding: rewards are sums of a few 32-bit terms


def estimate_advantages(rewards: Tensor, group: int, baseline: Baseline = "group", scale: Scale = "group") -> Tensor:
    """(N,) advantages from (N,) rewards whose groups stand together: (r - baseline) / (deviation + eps).

    GRPO takes both from the group. RLOO (Ahmadian et al., 2024, equation 6) takes the mean of the group's other
    episodes off and divides by nothing; REINFORCE++ (Hu et al., 2025) takes the mean of the whole generation off and
    divides by its deviation, or, with a group baseline, by the deviation of what that baseline left.

    A NaN reward is an episode that was left out: it counts in no mean or deviation and has advantage 0. So has every
    episode without signal (see `has_signal`). A deviation is the sample's, divided by n - 1, as in TRL (TRUST-SQL's
    equation 5 says only sigma).
    """
    grouped = rewards.view(-1, group)  # (N / group, group)
    mean = grouped.nanmean(dim=1, keepdim=True)
    if baseline == "batch":
        mean = rewards.nanmean()
    centred = grouped - mean
    if baseline == "others":  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        takes_part = ~grouped.isnan()
        count = takes_part.sum(dim=1, keepdim=True)
        centred = centred * count / (count - 1).clamp(min=1)
    if scale != "none":
        compared = centred.view(1, -1)
        if scale == "group":
            compared = grouped
        spread = _deviation(compared).unsqueeze(1)  # (N / group, 1), or (1, 1)
        centred = centred / (spread + EPS)
    teaches = has_signal(rewards, group, baseline)
    return centred.view(-1).where(teaches, 0.0)


def turn_advantages(payments: Tensor, group: int) -> Tensor:
    """(N, T) advantages of turns from (N, T) payments, NaN past an episode's end and where it was left out.

    What a turn earns is what is paid from it on, for an earlier payment does not depend on it. Its baseline is the mean
    of what the group's other episodes earn from their turn of the same number on (from their last, where they are
    shorter). It depends on none of the episode's own actions, so the policy gradient stays unbiased; a mean or a
    deviation that the episode itself is part of does not, nor does one over those alone that came so far.
    """
    is_paid = ~payments.isnan()
    paid = payments.nan_to_num(0.0)
    to_go = paid.flip(1).cumsum(1).flip(1)  # (N, T) payments of a turn and of all later ones
    n_paid = is_paid.sum(dim=1, keepdim=True)  # (N, 1)
    last_turn = (n_paid - 1).clamp(min=0)  # (N, 1)
    n_turns = payments.size(1)
    turns = torch.arange(n_turns, device=payments.device)
    turns_or_last = turns.minimum(last_turn)  # (N, T)
    takes_part = is_paid[:, :1].view(-1, group, 1)  # (N / group, group, 1)
    earned = to_go.gather(1, turns_or_last)
    earned = earned.view(-1, group, n_turns) * takes_part
    others = takes_part.sum(dim=1, keepdim=True) - 1
    earned_by_others = earned.sum(dim=1, keepdim=True) - earned
    baseline = earned_by_others / others.clamp(min=1)
    centred = (earned - baseline) * (others > 0)  # (N / group, group, T)
    centred = centred.view_as(payments)
    teaches = is_paid & (centred.abs() > SAME)
    return centred.where(teaches, 0.0)


def zero_variance(rewards: Tensor, group: int) -> Tensor:
    """(N / group,) whether a group's rewards are all equal, or fewer than two are left."""
    grouped = rewards.view(-1, group)
    return _deviation(grouped) <= SAME


def has_signal(rewards: Tensor, group: int, baseline: Baseline = "group") -> Tensor:
    """(N,) whether an episode takes part, and the rewards that it is compared with are not all equal."""
    compared = group
    if baseline == "batch":
        compared = rewards.numel()
    is_equal = zero_variance(rewards, compared)
    repeats = rewards.numel() // len(is_equal)
    is_equal_to_compared = is_equal.repeat_interleave(repeats)  # (N,)
    return ~rewards.isnan() & ~is_equal_to_compared


def _deviation(grouped: Tensor) -> Tensor:
    """(B,) sample deviations of the rewards that are not NaN; 0 for fewer than two."""
    takes_part = ~grouped.isnan()
    count = takes_part.sum(dim=1)
    mean = grouped.nanmean(dim=1, keepdim=True)
    centred = (grouped - mean).nan_to_num(0.0)
    squares = (centred**2).sum(dim=1)
    variance = squares / (count - 1).clamp(min=1)
    return variance.sqrt()
