"""Attention of short rows in bfloat16 on a CPU, by plain matrix products.

PyTorch's fused kernel computes no scores that it can avoid to keep, which pays for long rows. For rows of some hundred
tokens the products run at a multiple of its speed, and the probabilities of a layer are some megabytes.
"""

from typing import Any

import torch
from torch import Tensor


class ShortAttention(torch.autograd.Function):
    """softmax(scale * q k^T) v, in which neighbouring heads of queries share a head of keys and values.

    Products are rounded to bfloat16, scores included, as in transformers' own "eager" attention; the softmax sums in
    float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float) -> Tensor:
        """Outputs (R, H, Q, D).

        Args:
            query: (R, H, Q, D).
            key, value: (R, H_kv, K, D) each; H is a multiple of H_kv.
            sees: (R, 1, Q, K) bool, which keys each query sees, at least one.
            scale: factor of the products.
        """
        n_rows, n_heads, n_queries, width = query.shape
        n_key_heads, n_keys = key.shape[1:3]
        sharing = n_heads // n_key_heads
        # The heads that share keys stand below each other: one product serves them all.
        scaled = query * scale
        queries = scaled.reshape(n_rows, n_key_heads, sharing * n_queries, width)
        scores = queries @ key.transpose(2, 3)
        by_head = scores.view(n_rows, n_key_heads, sharing, n_queries, n_keys)
        is_hidden = ~sees.unsqueeze(1)
        by_head.masked_fill_(is_hidden, -torch.inf)
        probabilities = torch.softmax(scores, -1)
        ctx.save_for_backward(queries, key, value, probabilities)
        ctx.scale = scale
        outputs = probabilities @ value
        return outputs.view_as(query)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value; a hidden key has probability 0, and so no gradient."""
        queries, key, value, probabilities = ctx.saved_tensors
        shape = gradient.shape
        gradient = gradient.reshape(queries.shape)
        grad_value = probabilities.transpose(2, 3) @ gradient
        grad_probabilities = gradient @ value.transpose(2, 3)
        grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, probabilities.dtype)
        grad_queries = grad_scores @ key
        grad_queries.mul_(ctx.scale)
        grad_key = grad_scores.transpose(2, 3) @ queries
        return grad_queries.view(shape), grad_key, grad_value, None, None


def short_attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float) -> Tensor:
    """`ShortAttention` with its outputs (R, Q, H, D), as transformers' attention functions give them."""
    output: Tensor = ShortAttention.apply(query, key, value, sees, scale)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2)
