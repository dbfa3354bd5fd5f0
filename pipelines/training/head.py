"""Log-probabilities of labels under a language model's head on a CPU, tile by tile: its logits are never whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

TILE = 1 << 18  # logits of one tile: 1 MiB of float32 stays in a core's cache
LEAST = 64  # tokens of one tile: a product of fewer reads the head's weights too often
Parts = tuple[Tensor | None, ...]


class LogProbs(torch.autograd.Function):
    """Each label's log-probability and the distribution's entropy, (N,) each.

    What TRL's `ChunkedLogProbFunction` computes, with a tenth of its passes over memory: without Triton its tiles are
    4,096 tokens by 32,768 columns. Entropies are for watching: they have no gradient here.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, inv_t: float, with_entropy: bool) -> Parts:
        """From hidden states (N, H), a head's weight (V, H), labels (N,) and 1 / temperature."""
        log_probs, normalizers = hidden.new_empty(2, len(hidden))
        entropies = hidden.new_empty(len(hidden)) if with_entropy else None
        for rows in _tiles(hidden, weight):
            logits = (hidden[rows] @ weight.T).mul_(inv_t)
            normalizers[rows] = logits.logsumexp(1)
            log_ps = logits.sub_(normalizers[rows].unsqueeze(1))
            log_probs[rows] = log_ps.gather(1, labels[rows].unsqueeze(1)).squeeze(1)
            if entropies is not None:
                entropies[rows] = -(log_ps.exp() * log_ps).sum(1)
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        ctx.inv_t = inv_t
        if entropies is not None:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Parts:
        """Each tile is made once more; the gradient of its logits is g (1[label] - p) / T."""
        hidden, weight, labels, normalizers = ctx.saved_tensors
        scales = (gradients[0] * ctx.inv_t).unsqueeze(1)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for rows in _tiles(hidden, weight):
            tile = (hidden[rows] @ weight.T).mul_(ctx.inv_t)
            tile = tile.sub_(normalizers[rows].unsqueeze(1)).exp_().mul_(-scales[rows])
            tile.scatter_add_(1, labels[rows].unsqueeze(1), scales[rows])
            grad_hidden[rows] = tile @ weight
            grad_weight.addmm_(tile.T, hidden[rows])
        return grad_hidden, grad_weight, None, None, None


class Head:
    """What TRL's fused head calls in the place of `ChunkedLogProbFunction`."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> Parts:
        """(log-probability, entropy, log sum of squares, mean logit, is top 1): ours for a plain head in float32."""
        float32 = hidden.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        plain = bias is None and softcap is None and scale == 1.0 and set(outputs) <= {"log_probs", "entropy"}
        if hidden.device.type != "cpu" or not float32 or not plain:
            parts: Parts = ChunkedLogProbFunction.apply(
                hidden, weight, bias, labels, temperature, chunk_size, softcap, scale, outputs
            )
            return parts
        log_probs, entropies = LogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, 1 / temperature, "entropy" in outputs
        )
        return log_probs, entropies, None, None, None


def _tiles(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(LEAST, TILE // len(weight))
    return [slice(first, first + size) for first in range(0, len(hidden), size)]
