"""The clipped losses of GRPO and its kin as pure functions on tensors: what a track's loss is, token by token."""

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo"]
Level = Literal["token", "sequence"]


def ratios(logps: Tensor, old: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Pi / pi_old: (B, C) of each token, or (B, 1) the geometric mean over an episode's tokens (GSPO, equation 7)."""
    log_ratio = logps - old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return log_ratio.exp()


def per_token(
    kind: Kind, ratio: Tensor, logps: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """(B, C) or (B, 1) losses before they are averaged.

    All kinds but one clip the objective (PPO; DAPO's two bounds). CISPO (MiniMax-M1, equation 4) clips the weight of
    each token's gradient instead, so no token loses its gradient.

    Args:
        advantages: (B, 1) or (B, C).
        clip_low, clip_high: epsilon bounds; CISPO has the upper one alone.
    """
    if kind == "cispo":
        return -ratio.clamp(max=1 + clip_high).detach() * advantages * logps
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def averaged(
    kind: Kind, losses: Tensor, mask: Tensor, *, items: Tensor, longest: int, parts: int, share: float
) -> Tensor:
    """A micro-batch's part of a step's loss: the parts of all micro-batches and processes add up to it.

    Args:
        losses: (B, C) or (B, 1).
        mask: (B, C) the track's tokens.
        items: tokens of the whole generation under the track's mask (dapo and cispo average over them).
        longest: tokens that an episode may have: dr_grpo divides by it whatever was said.
        parts: micro-batches of one step.
        share: processes, times generations' batches of a step, over which `items` count.
    """
    if kind in ("dapo", "cispo"):
        return (losses * mask).sum() / (items.clamp(min=1.0) / share)
    if kind == "grpo":
        return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / parts
    if kind == "bnpo":
        return (losses * mask).sum() / mask.sum().clamp(min=1.0) / parts
    return (losses * mask).sum() / (losses.size(0) * longest) / parts


def sampler_weights(
    old: Tensor,
    sampled: Tensor,
    mask: Tensor,
    cap: float,
    bounds: tuple[float, float] | None = None,
    level: Level = "token",
) -> Tensor:
    """(B, C) min(pi_old / pi_sampler, cap): truncated importance sampling (Yao et al., 2025); 1 where nothing is told.

    Args:
        bounds: an episode whose geometric mean of pi_old / pi_sampler over its tokens leaves them has weight 0.
        level: "token" weighs each token by its own ratio, which corrects only for that token; "sequence" weighs all of
            an episode's by their product, which without a cap is exact, and has the larger variance.
    """
    gap = ((old - sampled) * mask).nan_to_num(0.0)
    whole = gap.sum(-1, keepdim=True)  # (B, 1)
    weights = (gap if level == "token" else whole.expand_as(gap)).exp().clamp(max=cap)
    if bounds is None:
        return weights
    mean = (whole / mask.sum(-1, keepdim=True).clamp(min=1.0)).exp()
    return weights * ((mean >= bounds[0]) & (mean <= bounds[1]))


# What a group's rewards say about each of its episodes: pure functions on tensors.

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
