"""Drawing tokens so that an episode's draws depend on its own seed and positions, never on what decodes beside it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Two independent uniform numbers in [0, 1) for each (seed, position): (R,), (R,) -> (R, 2).

    A counter-based generator: the finalizer of SplitMix64 (Steele, Lea and Flood 2014) over the seed, then over the
    position. 24 bits, so that no value rounds up to 1 in single precision.
    """
    with np.errstate(over="ignore"):
        key = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)
        bits = np.stack([_mix(key + _GOLDEN), _mix(key + _GOLDEN + _GOLDEN)], axis=-1)  # (R, 2)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1 & _MASK
    state = (state ^ (state >> np.uint64(27))) * _MIX_2 & _MASK
    return state ^ (state >> np.uint64(31))


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Nucleus sampling needs no sort of every row: a token drawn from the whole distribution is kept when it lies in the
    nucleus, else the row is drawn again from the nucleus alone, which gives each nucleus token p / P(nucleus) exactly.

    Args:
        logits: (R, V).
        temperature: (R,); 0 takes the most likely token.
        top_p: (R,).
        uniform: (R, 2) in [0, 1).

    Returns:
        Token ids (R,), and their log-probabilities (R,) at the row's temperature (1 where it is 0) before top-p.
    """
    greedy = temperature == 0  # (R,)
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logp = torch.log_softmax(scaled, dim=-1)  # (R, V)
    probs = logp.exp()
    ids = _invert(probs, uniform[:, 0])
    outside = _mass_before(probs, ids) >= top_p
    if bool(outside.any()):
        ids[outside] = _draw_nucleus(probs[outside], top_p[outside], uniform[outside, 1])
    ids = torch.where(greedy, scaled.argmax(dim=-1), ids)
    return ids, logp.gather(1, ids[:, None])[:, 0]


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: (R, V), (R,) -> (R,)."""
    cdf = probs.cumsum(dim=-1)
    ids = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True)[:, 0]
    return ids.clamp_(max=probs.shape[1] - 1)


def _mass_before(probs: Tensor, ids: Tensor) -> Tensor:
    """The probability of all tokens more likely than each row's token: (R, V), (R,) -> (R,)."""
    own = probs.gather(1, ids[:, None])
    return torch.where(probs > own, probs, 0.0).sum(dim=-1)


def _draw_nucleus(probs: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the nucleus: the likeliest tokens, up to and with the one whose mass reaches top-p."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = torch.where(before < top_p[:, None], ordered, 0.0)
    return order.gather(1, _invert(ordered, uniform)[:, None])[:, 0]
