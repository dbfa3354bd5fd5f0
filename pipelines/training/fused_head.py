"""Log-probabilities of labels under a language model's head on a CPU, tile by tile: no whole logits are kept."""

from typing import Any

import torch
from torch import Tensor
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils

TILE_LOGITS = 1 << 18  # logits of one tile: 1 MiB of float32 stays in a core's cache
MIN_TILE_TOKENS = 128  # a product of fewer tokens reads the head's weights too often
# Up to this vocabulary TRL's own function serves SFT, whose losses it has decided to the last bit.
SMALL_VOCABULARY = 8192
Tensors = tuple[Tensor | None, ...]


class LogProbs(torch.autograd.Function):
    """Each label's log-probability, the distribution's entropy, and whether the label is its likeliest token, (N,)
    each.

    TRL's `ChunkedLogProbFunction` computes the same with ten times as many passes over memory: without Triton its tiles
    are 4,096 tokens by 32,768 columns. Entropies and hits are for watching: they have no gradient here.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, inv_t: float, outputs: tuple[str, ...]
    ) -> Tensors:
        """From hidden states (N, H), a head's weight (V, H), labels (N,) and 1 / temperature."""
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizers = torch.empty_like(log_probs)
        entropies = None
        if "entropy" in outputs:
            entropies = torch.empty_like(log_probs)
        hits = None
        if "is_top1" in outputs:
            hits = torch.empty_like(labels, dtype=torch.bool)
        for rows in _tiles(hidden, weight):
            logits = (hidden[rows] @ weight.T).float().mul_(inv_t)
            if hits is not None:
                hits[rows] = logits.argmax(1) == labels[rows]
            normalizers[rows] = logits.logsumexp(1)
            log_ps = logits.sub_(normalizers[rows].unsqueeze(1))
            label_log_ps = log_ps.gather(1, labels[rows].unsqueeze(1))  # (n, 1)
            log_probs[rows] = label_log_ps.squeeze(1)
            if entropies is not None:
                entropies[rows] = -(log_ps.exp() * log_ps).sum(1)
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        ctx.inv_t = inv_t
        watched = [values for values in (entropies, hits) if values is not None]
        ctx.mark_non_differentiable(*watched)
        return log_probs, entropies, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensors:
        """Each tile is made once more; the gradient of its logits is g (1[label] - p) / T.

        The head's gradient is summed in float32 whatever its products are computed in: rounded tile by tile, the sum
        would be biased.
        """
        hidden, weight, labels, normalizers = ctx.saved_tensors
        scales = (gradients[0] * ctx.inv_t).unsqueeze(1)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _tiles(hidden, weight):
            tile = (hidden[rows] @ weight.T).float().mul_(ctx.inv_t)
            tile.sub_(normalizers[rows].unsqueeze(1)).exp_()  # p
            tile.mul_(-scales[rows])
            tile.scatter_add_(1, labels[rows].unsqueeze(1), scales[rows])
            grad_hidden[rows] = tile.to(weight.dtype) @ weight
            grad_weight.addmm_(tile.T, hidden[rows].float())
        return grad_hidden, grad_weight, None, None, None


def _tiles(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(MIN_TILE_TOKENS, TILE_LOGITS // len(weight))
    return [slice(first, first + size) for first in range(0, len(hidden), size)]


class FusedHead:
    """The replacement of `ChunkedLogProbFunction` in TRL's fused head."""

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
    ) -> Tensors:
        """(log-probability, entropy, log sum of squares, mean logit, is top 1): ours for a plain head on a CPU."""
        supported = {"log_probs", "entropy"}
        if len(weight) > SMALL_VOCABULARY:
            supported.add("is_top1")
        is_plain = bias is None and softcap is None and scale == 1.0
        is_supported = is_plain and supported.issuperset(outputs)
        if hidden.device.type != "cpu" or not is_supported:
            values: Tensors = ChunkedLogProbFunction.apply(
                hidden, weight, bias, labels, temperature, chunk_size, softcap, scale, outputs
            )
            return values
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
        log_probs, entropies, hits = LogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, 1 / temperature, outputs
        )
        return log_probs, entropies, None, None, hits


def patch_trl_lm_head() -> None:
    """Let TRL's fused LM head on the CPU skip unlabelled positions, as it does on CUDA, and compute in small tiles.

    TRL scores every position if Triton is absent, to keep shapes fixed for compilers, and in tiles larger than a
    cache. The numbers are the same.
    """
    uses_triton = utils._use_triton
    utils._use_triton = lambda device: device.type == "cpu" or bool(uses_triton(device))
    utils._ChunkedLogProbFunction = FusedHead
