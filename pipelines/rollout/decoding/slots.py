"""Where conversations' keys and values live, and attention of a flat batch of tokens over them.

A step's tokens are laid out flat, one conversation after the other and without padding, so that everything in the model
but attention costs what its tokens cost: decoded tokens, prompts and observations share one forward pass. A
conversation owns one slot; its keys and values stay there between turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipelines.errors import ResourceError

ATTENTION = "sqltrain_slots"  # the name under which a model finds `_attention`
GROWTH = 256  # positions: the store's capacity is a multiple
STRIDE = 32  # positions: an attention reads a multiple, so that few shapes occur


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one conversation: `count` of them from position `start` on, kept in slot `slot`."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """The conversation's length with the new tokens."""
        return self.start + self.count


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Spans of like length that are attended together: E conversations, C new tokens and K keys each.

    Attributes:
        rows: (E,) their slots; None for slots 0 to E - 1, which are read in place.
        take: (E * C,) where each token is in the flat batch; None for its first E tokens.
        mask: (E, 1, C, K) bool: which keys each token sees.
    """

    rows: Tensor | None
    take: Tensor | None
    mask: Tensor


class Slots:
    """Keys and values of up to `count` conversations, for all layers of a model.

    A layer's tensors are (count, H_kv, capacity, D), made when the layer first attends, in its values' dtype. They hold
    zeros and never garbage: a masked key has weight 0, and 0 times NaN is NaN.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._capacity = GROWTH
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values
        self._groups: list[_Group] = []
        self._slot_of = self._position = torch.empty(0)
        self._order: Tensor | None = None  # (N,) where a flat token is in the groups' joined output; None: as it is

    def plan(self, spans: Sequence[Span]) -> Tensor:
        """Lay out the next forward pass.

        Args:
            spans: what the flat batch holds, in its order: those of one token first, at most one span a slot.

        Returns:
            The tokens' positions (1, N).
        """
        self._reserve(max(span.end for span in spans))
        self._slot_of = self._index([span.slot for span in spans for _ in range(span.count)])
        self._position = self._index([i for span in spans for i in range(span.start, span.end)])
        n_single = sum(span.count == 1 for span in spans)
        order = [0] * len(self._position)
        self._groups = [self._in_place(spans[:n_single], order)] if n_single else []
        base = len(self._groups[0].mask) if n_single else 0
        for members in _by_length(spans, n_single):
            self._groups.append(self._padded(members, order, base))
            base += len(members) * self._groups[-1].mask.shape[2]
        self._order = None if base == len(order) and order == list(range(base)) else self._index(order)
        return self._position[None]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions from one slot to another."""
        for store in self._layers.values():
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Keep the new keys and values, then attend: (1, H, N, D), (1, H_kv, N, D) twice -> (1, N, H, D)."""
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))  # (N, H, D)
        keys, values = self._layer(layer, k, v)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast a norm of queries and keys gives them in float32
        keys[self._slot_of, :, self._position] = k
        values[self._slot_of, :, self._position] = v
        parts = [_attend(group, keys, values, q, scale) for group in self._groups]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (joined if self._order is None else joined.index_select(0, self._order))[None]

    def _in_place(self, spans: Sequence[Span], order: list[int]) -> _Group:
        """One token a conversation; slots in between that do not decode are computed too, and dropped."""
        n_rows = max(span.slot for span in spans) + 1
        ends, take = [1] * n_rows, [0] * n_rows
        for index, span in enumerate(spans):
            ends[span.slot], take[span.slot], order[index] = span.end, index, span.slot
        mask = self._keys(max(ends)) < self._index(ends)[:, None]  # (E, K)
        in_order = take == list(range(n_rows))
        return _Group(None, None if in_order else self._index(take), mask[:, None, None])

    def _padded(self, members: Sequence[tuple[int, Span]], order: list[int], base: int) -> _Group:
        """Several tokens a conversation, padded to the longest; `members` are spans with their place in the batch."""
        width = max(span.count for _, span in members)
        take, seen = [], []
        for row, (offset, span) in enumerate(members):
            inside = [min(i, span.count - 1) for i in range(width)]
            take += [offset + i for i in inside]
            seen.append([span.start + i for i in inside])
            order[offset : offset + span.count] = range(base + row * width, base + row * width + span.count)
        rows = self._index([span.slot for _, span in members])
        last = torch.tensor(seen, device=self._device)[:, None, :, None]  # (E, 1, C, 1)
        return _Group(rows, self._index(take), self._keys(max(span.end for _, span in members)) <= last)

    def _layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, grown to the capacity."""
        layer_cache = self._layers.get(layer)
        if layer_cache is not None and layer_cache[0].shape[2] == self._capacity:
            return layer_cache
        grown = tuple(v.new_zeros((self._count, new.shape[1], self._capacity, new.shape[2])) for new in (k, v))
        for old, new in zip(layer_cache or (), grown, strict=False):
            new[:, :, : old.shape[2]] = old
        self._layers[layer] = (grown[0], grown[1])
        return self._layers[layer]

    def _reserve(self, length: int) -> None:
        if length > self._capacity:
            self._capacity = -(-max(length, self._capacity * 3 // 2) // GROWTH) * GROWTH

    def _keys(self, length: int) -> Tensor:
        """(K,) the key positions that an attention over `length` reads."""
        return torch.arange(min(-(-length // STRIDE) * STRIDE, self._capacity), device=self._device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _by_length(spans: Sequence[Span], skip: int) -> list[list[tuple[int, Span]]]:
    """The spans after the first `skip` with their offsets in the batch, grouped so that none is padded over 4 times."""
    groups: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    offset = skip
    for span in spans[skip:]:
        groups[span.count.bit_length() // 2].append((offset, span))
        offset += span.count
    return [groups[key] for key in sorted(groups)]


def _attend(group: _Group, keys: Tensor, values: Tensor, q: Tensor, scale: float | None) -> Tensor:
    """(N, H, D) -> (E * C, H, D). Query heads that share a key head are folded into its query positions."""
    n_rows, _, width, n_keys = group.mask.shape
    if group.rows is None:
        k, v = keys[:n_rows, :, :n_keys], values[:n_rows, :, :n_keys]
    else:
        k, v = keys[group.rows, :, :n_keys], values[group.rows, :, :n_keys]
    heads, fold = k.shape[1], q.shape[1] // k.shape[1]
    q = q[:n_rows] if group.take is None else q.index_select(0, group.take)
    q = q.reshape(n_rows, width, heads, fold, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (E, H_kv, F * C, D)
    mask = group.mask if fold == 1 else group.mask.repeat(1, 1, fold, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    out = out.view(n_rows, heads, fold, width, -1).permute(0, 3, 1, 2, 4)  # (E, C, H_kv, F, D)
    return out.reshape(n_rows * width, heads * fold, -1)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    slots: Slots,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layers call while they are under `attending`."""
    if sliding_window is not None or softcap is not None:
        raise ResourceError("the in-process policy has no sliding window and no soft cap", "use rollout.policy=vllm")
    return slots.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)


@contextlib.contextmanager
def attending(model: Any) -> Iterator[None]:
    """Inside, the model's attention is over slots, and it is in evaluation mode; afterwards all is as before."""
    before = model.config._attn_implementation
    training = [module for module in model.modules() if module.training]
    model.config._attn_implementation = ATTENTION
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for module in training:
            module.training = True
