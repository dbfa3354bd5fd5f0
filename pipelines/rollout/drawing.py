"""Draws tokens so that an episode's draws depend on its own seed and positions, never on what decodes beside it."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Two independent uniform numbers in [0, 1) for each (seed, position): (R,), (R,) -> (R, 2).

    A counter-based generator: the finalizer of SplitMix64 (Steele, Lea and Flood 2014) over the seed, then over the
    position. 24 bits, so that no value rounds up to 1 in single precision.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds + _GOLDEN)
        key = _mix(stream + positions * _GOLDEN)
        first = _mix(key + _GOLDEN)
        second = _mix(key + _GOLDEN + _GOLDEN)
    bits = np.stack([first, second], axis=-1)  # (R, 2)
    highest = (bits >> np.uint64(40)).astype(np.float32)
    return highest * np.float32(2.0**-24)


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def draw(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row: (R, V), (R,), (R,), and uniform numbers (R, 2) in [0, 1) -> ids (R,), and their
    log-probabilities (R,) at the row's temperature (1 where it is 0, for the most likely token) before top-p.

    Nucleus sampling needs no sort of every row: a token drawn from the whole distribution is kept when it lies in the
    nucleus, else the row is drawn again from the nucleus alone, which gives each nucleus token p / P(nucleus) exactly.
    """
    greedy = temperature == 0  # (R,)
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logp = torch.log_softmax(scaled, dim=-1)  # (R, V)
    probs = logp.exp()
    ids = _invert(probs, uniform[:, 0])
    drawn = probs.gather(1, ids[:, None])  # (R, 1)
    likelier = torch.where(probs > drawn, probs, 0.0).sum(dim=-1)  # (R,) mass of all likelier tokens
    outside = likelier >= top_p
    if bool(outside.any()):
        # The nucleus: the tokens for which all likelier ones have less mass than top-p. Of tokens that are equally
        # likely all are in it, or none.
        ordered, order = probs[outside].sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ties = ordered[:, 1:] == ordered[:, :-1]
        before[:, 1:][ties] = 0.0
        before = before.cummax(dim=-1).values  # a tie has the mass before the first of its tokens
        nucleus = torch.where(before < top_p[outside][:, None], ordered, 0.0)
        redrawn = _invert(nucleus, uniform[outside, 1])
        ids[outside] = order.gather(1, redrawn[:, None])[:, 0]
    ids = torch.where(greedy, scaled.argmax(dim=-1), ids)
    logprobs = logp.gather(1, ids[:, None])[:, 0]
    return ids, logprobs


def _invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw: (R, V), (R,) -> (R,)."""
    cdf = probs.cumsum(dim=-1)
    mass = uniform * cdf[:, -1]
    ids = torch.searchsorted(cdf, mass[:, None], right=True)[:, 0]
    return ids.clamp_(max=probs.shape[1] - 1)
