"""The losses that GRPO may train with: each a function of one track's tokens, registered under its name.

No import of torch at run time: recipes name a loss, and they are read without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipelines.core.registry import loss

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # the registry looks up the annotations of a loss

Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class TrackBatch:
    """One track's tokens in a micro-batch of B episodes, padded to C tokens, and what a mean over them divides by."""

    logps: Tensor  # (B, C) log-probabilities under the policy, with a gradient.
    ratio: Tensor  # pi / pi_old: (B, C), or (B, 1) with `grpo.level=sequence` (see `ratios`).
    advantages: Tensor  # (B, 1), or (B, C) if tokens of an episode differ.
    mask: Tensor  # (B, C) 1 for the track's tokens.
    clip_low: float  # epsilon below 1.
    clip_high: float  # epsilon above 1.
    generation_tokens: Tensor  # () tokens under the track's mask in the whole generation, over all processes.
    longest_episode: int  # tokens that an episode may have at most.
    micro_batches: int = 1  # forwards of this process in one optimiser step.
    # processes times optimiser steps that share the tokens of one generation.
    generation_share: float = 1.0


def ratios(logps: Tensor, old: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Pi / pi_old: (B, C) of each token, or (B, 1) the geometric mean over an episode's tokens (GSPO, equation 7)."""
    log_ratio = logps - old
    if level == "sequence":
        log_ratio = _mean_over_tokens(log_ratio, mask)
    return log_ratio.exp()


def _mean_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """(B, 1) the means of values (B, C) over each episode's tokens in `mask` (B, C)."""
    total = (values * mask).sum(-1, keepdim=True)
    return total / mask.sum(-1, keepdim=True).clamp(min=1.0)


def sampler_weights(
    old: Tensor,
    sampled: Tensor,
    mask: Tensor,
    cap: float,
    bounds: tuple[float, float] | None = None,
    level: Level = "token",
) -> Tensor:
    """(B, C) min(pi_old / pi_sampler, cap): truncated importance sampling (Yao et al., 2025).

    The weight is 1 for tokens without a sampler log-probability.

    Args:
        old, sampled: (B, C) log-probabilities under the policy before the step, and under the sampler.
        bounds: an episode whose geometric mean of pi_old / pi_sampler over its tokens leaves them has weight 0.
        level: "token" weighs each token by its own ratio, which corrects only for that token; "sequence" weighs all of
            an episode's by their product, which without a cap is exact, and has the larger variance.
    """
    gap = ((old - sampled) * mask).nan_to_num(0.0)
    episode_gap = gap.sum(-1, keepdim=True)  # (B, 1)
    log_weights = gap if level == "token" else episode_gap.expand_as(gap)
    weights = log_weights.exp().clamp(max=cap)
    if bounds is None:
        return weights
    low, high = bounds
    n_tokens = mask.sum(-1, keepdim=True).clamp(min=1.0)
    mean_ratio = (episode_gap / n_tokens).exp()
    is_within = (mean_ratio >= low) & (mean_ratio <= high)
    return weights * is_within


# The loss of each token, (B, C), or (B, 1) if an episode has one ratio.


def clipped_objective(track: TrackBatch) -> Tensor:
    """PPO's clipped objective, negated, with a lower and an upper bound of its own (DAPO, equation 8)."""
    clipped_ratio = track.ratio.clamp(1 - track.clip_low, 1 + track.clip_high)
    plain = track.ratio * track.advantages
    clipped = clipped_ratio * track.advantages
    return -plain.minimum(clipped)


def clipped_weight(track: TrackBatch) -> Tensor:
    """The policy gradient with each token's weight clipped from above, so that no token loses its gradient."""
    weight = track.ratio.clamp(max=1 + track.clip_high).detach()
    return -weight * track.advantages * track.logps


# Means. The parts of all micro-batches and processes add up to the loss of a step.


def mean_over_generation(losses: Tensor, track: TrackBatch) -> Tensor:
    """The mean over all tokens of the generation."""
    total = (losses * track.mask).sum()
    divisor = track.generation_tokens.clamp(min=1.0) / track.generation_share
    return total / divisor


def mean_over_episodes(losses: Tensor, track: TrackBatch) -> Tensor:
    """The mean over each episode's tokens, then over episodes."""
    lengths = track.mask.sum(-1).clamp(min=1.0)  # (B,)
    by_episode = (losses * track.mask).sum(-1) / lengths
    return by_episode.mean() / track.micro_batches


def mean_over_longest(losses: Tensor, track: TrackBatch) -> Tensor:
    """The sum over tokens, divided by the tokens that so many episodes may have at most."""
    total = (losses * track.mask).sum()
    episodes = track.mask.size(0)
    return total / (episodes * track.longest_episode) / track.micro_batches


def mean_over_micro_batch(losses: Tensor, track: TrackBatch) -> Tensor:
    """The mean over the tokens of each micro-batch, then over micro-batches."""
    total = (losses * track.mask).sum()
    tokens = track.mask.sum().clamp(min=1.0)
    return total / tokens / track.micro_batches


# The losses: () a micro-batch's part of a step's loss.


@loss("grpo", trl="grpo")
def grpo(track: TrackBatch) -> Tensor:
    """The clipped objective, averaged in each episode first (DeepSeekMath, equation 3)."""
    return mean_over_episodes(clipped_objective(track), track)


@loss("dr_grpo", trl="dr_grpo")
def dr_grpo(track: TrackBatch) -> Tensor:
    """The clipped objective, summed and divided by the longest episode there may be (Dr. GRPO)."""
    return mean_over_longest(clipped_objective(track), track)


@loss("dapo", trl="dapo")
def dapo(track: TrackBatch) -> Tensor:
    """The clipped objective, averaged over all tokens of a generation (DAPO, equation 8)."""
    return mean_over_generation(clipped_objective(track), track)


@loss("bnpo", trl="bnpo", by_micro_batch=True)
def bnpo(track: TrackBatch) -> Tensor:
    """The clipped objective, averaged over the tokens of each micro-batch."""
    return mean_over_micro_batch(clipped_objective(track), track)


@loss("cispo", trl="cispo", settings=("clip_high", "level"))
def cispo(track: TrackBatch) -> Tensor:
    """The policy gradient with clipped weights, averaged over all tokens of a generation (MiniMax-M1, equation 4)."""
    return mean_over_generation(clipped_weight(track), track)
