"""The keys and values of many conversations, and the attention of a flat batch of their new tokens over them."""

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipelines.core.errors import ResourceError

ATTENTION = "sqltrain_slots"  # the name under which a model finds `attend_slots`
GROWTH = 256  # positions: the store's capacity is a multiple
MOST_GROWTH = 1024  # positions that a store grows by at once, beyond what it needs
STRIDE = 32  # positions: an attention reads a multiple, so that few shapes occur
FEW_TOKENS = 128  # a conversation's new tokens up to which plain products attend faster than PyTorch's fused kernel
MOST_OWN_KEYS = 256  # a conversation with more of them behind a common prefix reads that prefix by itself


@dataclasses.dataclass(eq=False, slots=True)
class Prefix:
    """Tokens that several conversations begin with; each of them holds their keys and values."""

    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one conversation, which is kept in slot `slot`: positions `start` to `end` - 1."""

    slot: int
    start: int
    end: int
    prefix: Prefix | None = None  # what it begins with like others, if they were copied from each other.

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return self.end - self.start


_Member = tuple[int, Span]  # the index of a span's first token in the flat batch, and the span


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Spans of like length that are attended together: E conversations, C new tokens and K keys each."""

    rows: Tensor | None  # (E,) their slots; None for slots 0 to E - 1, which are read in place.
    take: Tensor | None  # (E * C,) where each token is in the flat batch; None for its first E tokens.
    mask: Tensor  # (E, 1, C, K) bool: which keys each token sees.


@dataclasses.dataclass(frozen=True, slots=True)
class SeenByAll:
    """The first `length` keys of a slot, which all tokens of some neighbouring rows of a group see."""

    rows: slice
    slot: int
    length: int


@dataclasses.dataclass(slots=True)
class PrefixGroup:
    """Spans of few tokens that read what they begin with once for all that share it, and K keys behind it each.

    E conversations, C new tokens each.
    """

    rows: Tensor  # (E,) their slots.
    take: Tensor  # (E * C,) where each token is in the flat batch.
    mask: Tensor  # (E, 1, C, K) bool: which of its own keys each token sees.
    own: Tensor  # (E, K) positions of these keys.
    beginnings: Sequence[SeenByAll]
    index: Tensor | None = None  # (E * H_kv * K,) of these keys among those of a layer, which all layers share.

    def own_of(self, stored: Tensor) -> Tensor:
        """(E, H_kv, K, D) the own keys or values among those of all slots, (S, H_kv, P, D)."""
        _, heads, capacity, size = stored.shape
        if self.index is None:
            first_of_head = self.rows[:, None] * heads + torch.arange(heads, device=stored.device)  # (E, H_kv)
            self.index = (first_of_head[:, :, None] * capacity + self.own[:, None]).flatten()
        own = stored.view(-1, size).index_select(0, self.index)  # many times as fast as indexing by three tensors
        return own.view(len(self.rows), heads, -1, size)


def _of_like_length(members: Sequence[_Member]) -> list[list[_Member]]:
    """Spans in groups, in which padding to the longest computes no token over 4 times; single tokens by themselves."""
    by_length: dict[int, list[_Member]] = defaultdict(list)
    for member in members:
        by_length[member[1].length.bit_length() // 2].append(member)
    return [by_length[length] for length in sorted(by_length)]


class Slots:
    """Keys and values of up to `count` conversations, for all layers of a model.

    A layer's tensors are (count + 1, H_kv, capacity, D), made when the layer first attends, in its values' dtype. They
    hold finite numbers alone (zeros, and what an earlier conversation or a wrong guess left): a masked key has weight
    0, and 0 times NaN is NaN. The last slot is nobody's.
    """

    def __init__(self, count: int, device: torch.device, by_products: bool = False) -> None:
        self.count = count
        self.device = device
        self.by_products = by_products  # whether few tokens are attended by plain products
        self.capacity = GROWTH
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values
        self.groups: list[Group | PrefixGroup] = []
        self.slot_of = self.position = torch.empty(0)  # (N,) of each token of the flat batch
        self.order: Tensor | None = None  # (N,) where a flat token is in the groups' joined output; None: as it is

    def plan(self, spans: Sequence[Span]) -> Tensor:
        """Lay out the next forward pass over a flat batch: the spans of one token first, at most one span a slot.

        Returns the tokens' positions (N,).
        """
        self.grow(spans)
        slots: list[int] = []
        positions: list[int] = []
        members: list[_Member] = []
        for span in spans:
            members.append((len(slots), span))
            slots += [span.slot] * span.length
            positions += range(span.start, span.end)
        self.slot_of = self._index(slots)
        self.position = self._index(positions)
        self.groups = []
        order = [0] * len(self.position)  # where each token of the flat batch is in the groups' joined output
        base = 0  # tokens of the groups so far, padding included
        for alike in _of_like_length(members):
            width = max(span.length for _, span in alike)
            if width <= FEW_TOKENS and self.by_products:
                base = self._add_with_prefixes(alike, order, base)
            elif width == 1:
                base = self._add_in_place(alike, order, base)
            else:
                base = self._add_copied(alike, order, base)
        self.order = None
        if order != list(range(base)):
            self.order = self._index(order)
        return self.position

    def _add_with_prefixes(self, members: Sequence[_Member], order: list[int], base: int) -> int:
        """Add a group of spans of few tokens, which read common prefixes once.

        Not in float32, where another order of sums would change the last bits of the figures that pages print.

        Args:
            members: (index in the flat batch of its first token, span) of each.
            order: receives where the group's tokens are among those of all groups.
            base: tokens of the groups so far; the number with these is returned.
        """
        by_prefix: dict[Prefix, list[_Member]] = defaultdict(list)
        others: list[_Member] = []
        for member in members:
            _, span = member
            prefix = span.prefix
            if prefix is not None and prefix.length <= span.start and span.end <= prefix.length + MOST_OWN_KEYS:
                by_prefix[prefix].append(member)
            else:
                others.append(member)
        sharing: list[_Member] = []
        first_own: list[int] = []  # of those that share, the position of the first key behind the prefix
        beginnings: list[SeenByAll] = []
        for prefix, alike in by_prefix.items():
            if len(alike) == 1:
                others += alike
                continue
            rows = slice(len(sharing), len(sharing) + len(alike))
            beginnings.append(SeenByAll(rows, alike[0][1].slot, prefix.length))
            first_own += [prefix.length] * len(alike)
            sharing += alike
        if sharing:
            base = self._add_behind(sharing, first_own, beginnings, order, base)
        if others:
            base = self._add_behind(others, [0] * len(others), [], order, base)
        return base

    def _add_behind(
        self,
        members: Sequence[_Member],
        first_own: Sequence[int],
        beginnings: Sequence[SeenByAll],
        order: list[int],
        base: int,
    ) -> int:
        """Add spans that read all keys from a position on by themselves; other arguments as of `_add_with_prefixes`.

        Args:
            first_own: (E,) that position for each span.
            beginnings: what they read before it.
        """
        n_own = 0
        for (_, span), first in zip(members, first_own, strict=True):
            n_own = max(n_own, span.end - first)
        slots, take, last = self._lay_out(members, order, base)
        steps = torch.arange(math.ceil(n_own / STRIDE) * STRIDE, device=self.device)
        own = self._index(first_own)[:, None] + steps  # (E, K)
        mask = own[:, None, None] <= last[:, None, :, None]  # (E, 1, C, K)
        readable = own.clamp(max=self.capacity - 1)
        self.groups.append(PrefixGroup(slots, take, mask, readable, beginnings))
        return base + len(take)

    def _lay_out(self, members: Sequence[_Member], order: list[int], base: int) -> tuple[Tensor, Tensor, Tensor]:
        """The slots (E,) of spans, where their tokens are in the flat batch (E * C,), and their positions (E, C), each
        padded by its last token to the longest; arguments as of `_add_with_prefixes`.
        """
        width = max(span.length for _, span in members)
        slots: list[int] = []
        take: list[int] = []
        positions: list[list[int]] = []
        for offset, span in members:
            inside = [min(i, span.length - 1) for i in range(width)]
            order[offset : offset + span.length] = range(base + len(take), base + len(take) + span.length)
            slots.append(span.slot)
            take += [offset + i for i in inside]
            positions.append([span.start + i for i in inside])
        return self._index(slots), self._index(take), self._index(positions)

    def _add_in_place(self, members: Sequence[_Member], order: list[int], base: int) -> int:
        """Add the conversations with one new token, which are read in place, all over as many keys as the longest has;
        arguments as of `_add_with_prefixes`.

        Results of slots between them that do not decode are dropped.
        """
        count = max(span.slot for _, span in members) + 1
        ends = [1] * count
        take = [0] * count
        for index, span in members:
            ends[span.slot] = span.end
            take[span.slot] = index
            order[index] = base + span.slot
        is_in_order = take == list(range(count))
        taken = None if is_in_order else self._index(take)
        n_keys = math.ceil(max(ends) / STRIDE) * STRIDE
        keys = torch.arange(n_keys, device=self.device)
        seen = keys < self._index(ends)[:, None]  # (E, K)
        self.groups.append(Group(None, taken, seen[:, None, None]))
        return base + count

    def _add_copied(self, members: Sequence[_Member], order: list[int], base: int) -> int:
        """Add a group of conversations whose keys are copied to be read; arguments as of `_add_with_prefixes`."""
        slots, take, last = self._lay_out(members, order, base)
        n_keys = math.ceil(max(span.end for _, span in members) / STRIDE) * STRIDE
        keys = torch.arange(n_keys, device=self.device)
        mask = keys <= last[:, None, :, None]  # (E, 1, C, K)
        self.groups.append(Group(slots, take, mask))
        return base + len(take)

    def _index(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values of the flat batch, (N, H_kv, D) each; all that the layer has by now."""
        old_keys, old_values = self.layers.get(layer, (None, None))
        if old_keys is None or old_keys.shape[2] != self.capacity:
            self.layers[layer] = (self._grown(keys, old_keys), self._grown(values, old_values))
        all_keys, all_values = self.layers[layer]
        all_keys[self.slot_of, :, self.position] = keys
        all_values[self.slot_of, :, self.position] = values
        return all_keys, all_values

    def _grown(self, new: Tensor, old: Tensor | None) -> Tensor:
        """A tensor for keys or values like `new`, of today's capacity, that begins with those of an older one."""
        grown = new.new_zeros((self.count + 1, new.shape[1], self.capacity, new.shape[2]))
        if old is not None:
            grown[:, :, : old.shape[2]] = old
        return grown

    def grow(self, spans: Sequence[Span]) -> int:
        """Have room for all of the spans; the number of positions up to the last of them."""
        length = max(span.end for span in spans)
        if length > self.capacity:
            needed = max(length, _next_capacity(self.capacity))
            self.capacity = math.ceil(needed / GROWTH) * GROWTH
        return length

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions from one slot to another."""
        for store in self.layers.values():
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]


def grown_capacity(length: int) -> int:
    """Positions of a store whose longest conversation has grown to this length, token by token."""
    capacity = GROWTH
    while capacity < length:
        capacity = _next_capacity(capacity)
    return capacity


def _next_capacity(capacity: int) -> int:
    half_more = math.ceil(capacity * 3 / 2 / GROWTH) * GROWTH
    return min(half_more, capacity + MOST_GROWTH)


def attend_slots(
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
    """Attention of a model's layer under `slot_attention`: (1, H, N, D), (1, H_kv, N, D) twice -> (1, N, H, D)."""
    if sliding_window is not None or softcap is not None:
        raise ResourceError("the in-process policy has no sliding window and no soft cap", "use rollout.policy=vllm")
    v = value[0].transpose(0, 1)  # (N, H_kv, D)
    # Under autocast a norm leaves queries and keys in float32.
    q = query[0].transpose(0, 1).to(v.dtype)
    k = key[0].transpose(0, 1).to(v.dtype)
    keys, values = slots.put(int(module.layer_idx), k, v)  # type: ignore[arg-type]

    # Query heads that share a key head are folded into its query positions.
    heads = k.shape[1]
    fold = q.shape[1] // heads
    outputs = []
    for group in slots.groups:
        mask = group.mask
        n_rows, _one, width, n_keys = mask.shape
        rows = slice(n_rows) if group.rows is None else group.rows
        queries = q[:n_rows] if group.take is None else q.index_select(0, group.take)
        queries = queries.reshape(n_rows, width, heads, fold, -1)
        queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # (E, H_kv, F * C, D)
        if fold > 1:
            mask = mask.repeat(1, 1, fold, 1)
        if isinstance(group, PrefixGroup):
            output = attend_with_prefixes(queries, keys, values, group, mask, scaling)
        else:
            seen_keys = keys[rows, :, :n_keys]
            seen_values = values[rows, :, :n_keys]
            output = F.scaled_dot_product_attention(queries, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        output = output.view(n_rows, heads, fold, width, -1).permute(0, 3, 1, 2, 4)  # (E, C, H_kv, F, D)
        outputs.append(output.reshape(n_rows * width, heads * fold, -1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if slots.order is not None:
        joined = joined.index_select(0, slots.order)
    return joined[None], None


def suits_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether plain products attend faster than PyTorch's fused kernel: in bfloat16 on a CPU, while decoding few
    tokens of a conversation and while training on short rows.
    """
    return device.type == "cpu" and dtype == torch.bfloat16


def products_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's products: autocast's where it is on, else that of the weights."""
    device = model.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return model.dtype  # type: ignore[no-any-return]


def attend_with_prefixes(
    queries: Tensor, keys: Tensor, values: Tensor, group: PrefixGroup, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention of conversations of which some begin alike: a common prefix is read once (Hydragen, Juravsky et al.,
    2024). (E, H_kv, Q, D) like the queries.

    Scores are rounded to the queries' dtype, as in transformers' own "eager" attention.

    Args:
        queries: (E, H_kv, Q, D).
        keys: (S, H_kv, P, D) of all slots; values as well.
        mask: (E, 1, Q, K) bool, which of its conversation's own keys each query sees, at least one.
        scaling: factor of the products; None for 1 / sqrt(D).
    """
    n_rows, heads, width, size = queries.shape
    if scaling is None:
        scaling = size**-0.5
    scaled = queries * scaling
    longest = max((beginning.length for beginning in group.beginnings), default=0)
    scores = scaled.new_full((n_rows, heads, width, longest + group.own.shape[1]), -torch.inf)
    # Keys stand left in their product, so that they are read as they lie.
    own_scores = torch.matmul(group.own_of(keys), scaled.transpose(2, 3)).transpose(2, 3)
    scores[..., longest:] = torch.where(mask, own_scores, -torch.inf)
    for beginning in group.beginnings:
        together = scaled[beginning.rows].transpose(0, 1).flatten(1, 2)  # (H_kv, n * Q, D) of n rows
        seen_keys = keys[beginning.slot, :, : beginning.length]
        seen_scores = torch.matmul(together, seen_keys.transpose(1, 2)).view(heads, -1, width, beginning.length)
        scores[beginning.rows, :, :, : beginning.length] = seen_scores.transpose(0, 1)
    weights = scores.softmax(-1)
    outputs = torch.matmul(weights[..., longest:], group.own_of(values))
    for beginning in group.beginnings:
        seen_weights = weights[beginning.rows, :, :, : beginning.length]
        together = seen_weights.transpose(0, 1).flatten(1, 2)  # (H_kv, n * Q, length)
        seen_values = values[beginning.slot, :, : beginning.length]
        seen_outputs = torch.matmul(together, seen_values).view(heads, -1, width, size)
        outputs[beginning.rows] += seen_outputs.transpose(0, 1)
    return outputs


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend_slots)


@contextlib.contextmanager
def slot_attention(model: Any) -> Iterator[None]:
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
