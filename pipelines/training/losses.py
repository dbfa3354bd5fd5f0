"""The clipped losses of GRPO and its kin as pure functions on tensors: what a track's loss is, token by token."""

from __future__ import annotations

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
