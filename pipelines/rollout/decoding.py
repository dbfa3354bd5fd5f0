"""Decodes many conversations together, one step at a time: each keeps its keys and values and draws by its own seed."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipelines.core.errors import ResourceError
from pipelines.protocols.blocks import StopStrings, truncate_at_stop
from pipelines.rollout import drafts
from pipelines.rollout.codec import ChatCodec, common_prefix
from pipelines.rollout.policies.base import Completion, Request

# Conversations' keys and values, and the attention of a flat batch of tokens over them.

ATTENTION = "sqltrain_slots"  # the name under which a model finds `attend`
GROWTH = 256  # positions: the store's capacity is a multiple
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
class _Group:
    """Spans of like length that are attended together: E conversations, C new tokens and K keys each."""

    rows: Tensor | None  # (E,) their slots; None for slots 0 to E - 1, which are read in place.
    take: Tensor | None  # (E * C,) where each token is in the flat batch; None for its first E tokens.
    mask: Tensor  # (E, 1, C, K) bool: which keys each token sees.


@dataclasses.dataclass(frozen=True, slots=True)
class _SeenByAll:
    """The first `length` keys of a slot, which all tokens of some neighbouring rows of a group see."""

    rows: slice
    slot: int
    length: int


@dataclasses.dataclass(slots=True)
class _PrefixGroup:
    """Spans of few tokens that read what they begin with once for all that share it, and K keys behind it each.

    E conversations, C new tokens each.
    """

    rows: Tensor  # (E,) their slots.
    take: Tensor  # (E * C,) where each token is in the flat batch.
    mask: Tensor  # (E, 1, C, K) bool: which of its own keys each token sees.
    own: Tensor  # (E, K) positions of these keys.
    beginnings: Sequence[_SeenByAll]
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
    hold zeros and never garbage: a masked key has weight 0, and 0 times NaN is NaN. The last slot is nobody's.
    """

    def __init__(self, count: int, device: torch.device, by_products: bool = False) -> None:
        self.count = count
        self.device = device
        self.by_products = by_products  # whether few tokens are attended by plain products
        self.capacity = GROWTH
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys, values
        self.groups: list[_Group | _PrefixGroup] = []
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
        beginnings: list[_SeenByAll] = []
        for prefix, alike in by_prefix.items():
            if len(alike) == 1:
                others += alike
                continue
            rows = slice(len(sharing), len(sharing) + len(alike))
            beginnings.append(_SeenByAll(rows, alike[0][1].slot, prefix.length))
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
        beginnings: Sequence[_SeenByAll],
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
        self.groups.append(_PrefixGroup(slots, take, mask, readable, beginnings))
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
        self.groups.append(_Group(None, taken, seen[:, None, None]))
        return base + count

    def _add_copied(self, members: Sequence[_Member], order: list[int], base: int) -> int:
        """Add a group of conversations whose keys are copied to be read; arguments as of `_add_with_prefixes`."""
        slots, take, last = self._lay_out(members, order, base)
        n_keys = math.ceil(max(span.end for _, span in members) / STRIDE) * STRIDE
        keys = torch.arange(n_keys, device=self.device)
        mask = keys <= last[:, None, :, None]  # (E, 1, C, K)
        self.groups.append(_Group(slots, take, mask))
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
            needed = max(length, self.capacity * 3 // 2)
            self.capacity = math.ceil(needed / GROWTH) * GROWTH
        return length

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions from one slot to another."""
        for store in self.layers.values():
            for tensor in store:
                tensor[target, :, :length] = tensor[source, :, :length]


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
        if isinstance(group, _PrefixGroup):
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


def suits_products(tensor: Tensor) -> bool:
    """Whether plain products attend faster than PyTorch's fused kernel: in bfloat16 on a CPU, while decoding few
    tokens of a conversation and while training on short rows.
    """
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16


def products_dtype(model: Any) -> torch.dtype:
    """The dtype of a model's products: autocast's where it is on, else that of the weights."""
    device = model.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return model.dtype  # type: ignore[no-any-return]


def attend_with_prefixes(
    queries: Tensor, keys: Tensor, values: Tensor, group: _PrefixGroup, mask: Tensor, scaling: float | None
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


# Drawing tokens so that an episode's draws depend on its own seed and positions, never on what decodes beside it.

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
        # The nucleus: the likeliest tokens, up to and with the one whose mass reaches top-p.
        ordered, order = probs[outside].sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
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


class Recording:
    """A decode step over the first `n_keys` positions of all slots, recorded as a CUDA graph: a GPU does such a step in
    a few milliseconds, and Python takes many times as long to start its kernels one by one.
    """

    def __init__(self, forward: Callable[[Tensor, Tensor, Tensor], Tensor], slots: Slots, n_keys: int) -> None:
        # For each slot: its token, the slot and position that its keys and values go to, and the end of its span. The
        # last slot, which is nobody's, takes those of a slot that does not decode.
        self._idle = [(0, slots.count, 0, 1)] * slots.count
        self._inputs = torch.tensor(self._idle, device=slots.device).T.contiguous()  # (4, E)
        self._every = torch.arange(slots.count, device=slots.device)  # a graph keeps none of the tensors that it reads

        def step() -> Tensor:
            ids, slots.slot_of, slots.position, ends = self._inputs
            seen = torch.arange(n_keys, device=slots.device) < ends[:, None]  # (E, K)
            slots.groups = [_Group(None, None, seen[:, None, None])]
            slots.order = None
            return forward(ids, slots.position, self._every)

        step()  # makes first what is made once, such as weights in the compute dtype
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(slots.device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step()

    def replay(self, tokens: Sequence[tuple[int, Span]]) -> Tensor:
        """(R, V) what follows one new token each of R slots."""
        columns = list(self._idle)
        for token, span in tokens:
            columns[span.slot] = (token, span.slot, span.start, span.end)
        self._inputs.copy_(torch.tensor(columns).T)
        self._graph.replay()
        return self._logits[[span.slot for _, span in tokens]]


LEAST_PREFIX = 256  # tokens: a shorter prefix of another prompt is computed about as fast as it is copied
SHORT_PREFIX = 64  # the same in bfloat16 on a CPU, where a model has more than a few million weights
STEP_TOKENS = 4096  # most tokens of one forward pass: long prompts are prefilled over several steps
DRAFT_TOKENS = 32  # on a CPU, tokens of a forward pass up to which further ones cost little, and guesses pay
MAX_DEFERRED_STEPS = 16  # on a GPU, steps for which several new tokens of a conversation wait for those of others
SEEDS = 2**64


@dataclasses.dataclass(slots=True)
class _Conversation:
    slot: int  # the slot of its keys and values.
    prompt: tuple[int, ...]  # its context in its first turn; conversations that begin alike share its keys and values.
    request: Request  # the turn being generated; meaningless between turns.
    generating: bool = False  # whether a turn is being generated.
    ids: list[int] = dataclasses.field(default_factory=list)  # its whole context so far.
    cached: int = 0  # how many of them have keys and values.
    # Log-probabilities of the ids that the turn has drawn.
    logprobs: list[float] = dataclasses.field(default_factory=list)
    guesses: int = drafts.FIRST_GUESSES  # how many tokens to guess at once.
    prefix: Prefix | None = None  # what it begins with like others.


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What a forward pass computes of one conversation."""

    row: _Conversation
    span: Span
    draft: tuple[int, ...] = ()  # guessed tokens behind its context, at the end of the span.

    @property
    def tokens(self) -> list[int]:
        """The tokens of the span."""
        return [*self.row.ids[self.span.start : self.span.end], *self.draft]

    @property
    def n_drawn(self) -> int:
        """The number of positions at which a token is drawn: those that end its context, with and without guesses."""
        if self.span.end < len(self.row.ids):
            return 0
        return 1 + len(self.draft)


class Decoder:
    """A batch of at most `count` conversations over one causal LM; `step` must run inside `slot_attention(model)`.

    Made under the autocast under which it steps.
    """

    def __init__(self, model: Any, codec: ChatCodec, count: int) -> None:
        self._model = model
        self._codec = codec
        self._count = count
        by_products = suits_products(torch.empty(0, dtype=products_dtype(model), device=model.device))
        self._slots = Slots(count, model.device, by_products)
        self._least_prefix = SHORT_PREFIX if by_products else LEAST_PREFIX
        self.rows: dict[str, _Conversation] = {}  # session -> conversation
        self._leaders: dict[tuple[int, ...], _Conversation] = {}  # prompt -> the conversation that others copy it from
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        # Ids that end a turn: the chat template's, the tokenizer's and the model's own.
        models_own = getattr(model.generation_config, "eos_token_id", None)
        end_ids = [codec.tokenizer.eos_token_id, codec.end_id]
        end_ids += models_own if isinstance(models_own, list) else [models_own]
        self._end_ids = frozenset(index for index in end_ids if index is not None)
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=model.device)
        self._recorded: dict[tuple[int, int], Recording] = {}  # on a GPU, by the slots' capacity and the keys read
        self._max_deferred = MAX_DEFERRED_STEPS if model.device.type == "cuda" else 0
        self._deferred = 0  # steps for which conversations that lack several tokens have waited by now

    @property
    def room(self) -> int:
        return self._count - len(self.rows)

    @property
    def generating(self) -> int:
        """The number of conversations with a turn being generated."""
        return sum(row.generating for row in self.rows.values())

    def begin(self, request: Request) -> None:
        """Start a turn: of a conversation that has a slot, or of a new one, which needs a free one."""
        row = self.rows.get(request.session)
        if row is not None and request.token_ids[: len(row.prompt)] != row.prompt:
            self.end(request.session)
            row = None
        if row is None:
            taken = {other.slot for other in self.rows.values()}
            free = next(slot for slot in range(self._count) if slot not in taken)
            row = _Conversation(free, request.token_ids, request)
            self.rows[request.session] = row
            self._leaders.setdefault(row.prompt, row)
        # Keys and values are good as far as the new context begins like the old one; one token must be left to predict.
        ids = list(request.token_ids)
        shared = common_prefix(row.ids[: row.cached], ids)
        row.cached = min(shared, len(request.token_ids) - 1)
        row.ids = ids
        row.logprobs = []
        row.request = request
        row.generating = True
        if request.stop not in self._stops:
            self._stops[request.stop] = StopStrings(self._codec.tokenizer, request.stop, self._codec.decode)

    def end(self, session: str) -> None:
        """Let a conversation go; its slot is free."""
        row = self.rows.pop(session, None)
        if row is None or self._leaders[row.prompt] is not row:
            return
        del self._leaders[row.prompt]
        heirs = [other for other in self.rows.values() if other.prompt == row.prompt]
        if heirs:
            self._leaders[row.prompt] = max(heirs, key=lambda heir: heir.cached)

    def step(self) -> list[tuple[str, Completion]]:
        """One forward pass: each conversation is prefilled further and, once it is whole, draws a token. Returns the
        turns that ended, with their sessions.
        """
        self._fill_free_slots()
        parts = self._next_batch(self._rows_to_compute())
        if self._slots.by_products:
            parts = self._with_drafts(parts)
        logits = self._predict(parts)
        drawing = [part for part in parts if part.n_drawn]
        if not drawing:
            return []
        drawn, logprobs = self._draw(drawing, logits)
        tokens = zip(drawn.tolist(), logprobs.tolist(), strict=True)
        finished = []
        for part in drawing:
            own = list(itertools.islice(tokens, part.n_drawn))
            turn = self._take(part, own)
            if turn is not None:
                part.row.generating = False
                finished.append((part.row.request.session, turn))
        return finished

    def _fill_free_slots(self) -> None:
        """Move the highest conversations into free low slots: attention reads all slots up to the highest."""
        used = {row.slot for row in self.rows.values()}
        free = [slot for slot in range(len(used)) if slot not in used]
        for row in self.rows.values():
            if row.slot >= len(used):
                target = free.pop(0)
                self._slots.copy(row.slot, target, row.cached)
                row.slot = target

    def _rows_to_compute(self) -> list[_Conversation]:
        """Conversations with a turn to go on with, by their slots.

        A conversation whose prompt another one is just prefilling waits, and then copies it.
        """
        generating = [row for row in self.rows.values() if row.generating]
        generating.sort(key=lambda row: row.slot)
        ready: list[_Conversation] = []
        for row in generating:
            leader = self._leaders[row.prompt]
            shared = len(row.prompt) - 1  # each computes the last token, for its logits
            if leader is not row and row.cached < shared:
                if leader.cached < shared:
                    continue
                self._copy_prefix(leader, row, shared)
            elif row.cached == 0 and self._waits_for_prefix(row, ready):
                continue
            ready.append(row)
        return ready

    def _next_batch(self, rows: Sequence[_Conversation]) -> list[_Part]:
        """The conversations of a step with the tokens that it computes, at most `STEP_TOKENS` in all.

        Those that lack one token come first. On a GPU a pass of single tokens is recorded, and another pass takes as
        long as several recorded ones: conversations that lack more tokens are deferred until others join them.
        """
        batch: list[_Part] = []
        others = []
        waiting = 0  # tokens of the others
        for row in rows:
            missing = len(row.ids) - row.cached
            if missing == 1:
                batch.append(_Part(row, Span(row.slot, row.cached, len(row.ids), row.prefix)))
            else:
                others.append(row)
                waiting += missing
        tokens = len(batch)
        has_both = bool(batch) and bool(others)
        if has_both and self._deferred < self._max_deferred and tokens + waiting < STEP_TOKENS:
            self._deferred += 1
            return batch
        self._deferred = 0
        for row in others:
            room = STEP_TOKENS - tokens
            if room > 1:
                end = min(len(row.ids), row.cached + room)
                batch.append(_Part(row, Span(row.slot, row.cached, end, row.prefix)))
                tokens += end - row.cached
        return batch

    def _with_drafts(self, parts: Sequence[_Part]) -> list[_Part]:
        """The parts of a step, with guesses behind those that lack one token, where the pass has room for them.

        For a model whose passes of few tokens take about as long as one of a single token. In float32 a pass of another
        shape would change the last bits of the figures that pages print.
        """
        n_tokens = sum(part.span.length for part in parts)
        share = (DRAFT_TOKENS - n_tokens) // max(len(parts), 1)  # guesses of each conversation
        drafted = [self._with_draft(part, share) for part in parts]
        return sorted(drafted, key=lambda part: part.span.length > 1)  # spans of one token come first

    def _with_draft(self, part: _Part, share: int) -> _Part:
        """A part with at most `share` guesses behind it, if it has one token and something can be guessed."""
        row = part.row
        span = part.span
        left = row.request.max_tokens - (len(row.ids) - len(row.request.token_ids))
        most = min(share, row.guesses, left - 1)
        if most < 1 or span.length > 1:
            return part
        guessed = drafts.continuation(row.ids, most)
        longer = Span(span.slot, span.start, span.end + len(guessed), span.prefix)
        return _Part(row, longer, tuple(guessed))

    def _draw(self, parts: Sequence[_Part], logits: Tensor) -> tuple[Tensor, Tensor]:
        """A token and its log-probability at each of R positions, (R,) each, whether the guesses before it are right.

        Args:
            parts: what was computed, each with at least one position.
            logits: (R, V).
        """
        device = self._model.device
        requests: list[Request] = []
        positions: list[int] = []
        for part in parts:
            requests += [part.row.request] * part.n_drawn
            first = len(part.row.ids)
            positions += range(first, first + part.n_drawn)
        seeds = np.array([request.seed % SEEDS for request in requests], dtype=np.uint64)
        uniform = uniforms(seeds, np.array(positions, dtype=np.uint64))
        temperatures = [request.sampling.temperature for request in requests]
        top_ps = [request.sampling.top_p for request in requests]
        return draw(
            logits,
            temperature=torch.tensor(temperatures, device=device),
            top_p=torch.tensor(top_ps, device=device),
            uniform=torch.from_numpy(uniform).to(device),
        )

    def _take(self, part: _Part, drawn: Sequence[tuple[int, float]]) -> Completion | None:
        """Add the drawn tokens to a conversation, up to the first that was not guessed; the turn, if it has ended.

        Args:
            drawn: a token and its log-probability for each guess and for what follows the last of them.
        """
        row = part.row
        turn = None
        n_right = 0
        for token, logprob in drawn:
            row.ids.append(token)
            row.logprobs.append(logprob)
            turn = self._ended_turn(row)
            is_guessed = n_right < len(part.draft) and part.draft[n_right] == token
            if turn is not None or not is_guessed:
                break
            n_right += 1
        row.cached = len(row.ids) - 1
        if part.draft:
            row.guesses = drafts.next_length(len(part.draft), n_right)
        return turn

    def _ended_turn(self, row: _Conversation) -> Completion | None:
        """The turn, if it has ended: by an end-of-turn token, a stop string or its budget."""
        request = row.request
        new_ids = row.ids[len(request.token_ids) :]
        has_end = new_ids[-1] in self._end_ids
        is_stopped = has_end or self._stops[request.stop].ended(new_ids)
        if not is_stopped and len(new_ids) < request.max_tokens:
            return None
        spoken = new_ids[:-1] if has_end else new_ids
        text = truncate_at_stop(self._codec.decode(spoken), request.stop)
        return Completion(
            text=text,
            token_ids=tuple(new_ids),
            logprobs=tuple(row.logprobs),
            finish="stop" if is_stopped else "length",
        )

    def _waits_for_prefix(self, row: _Conversation, prefilling: Sequence[_Conversation]) -> bool:
        """Copy the longest prefix that another conversation has for a new one; True if a longer one is on its way.

        Prompts of one database begin with the same schema. What follows the prefix is computed in a pass of another
        shape than the whole prompt would be, so its last bits may differ.

        Args:
            prefilling: conversations that this step computes.
        """
        source = None
        ready = 0  # tokens of the longest prefix that can be copied now
        coming = 0  # tokens of the longest prefix that this step computes
        for other in self.rows.values():
            if other is row:
                continue
            shared = min(common_prefix(other.prompt, row.prompt), len(row.prompt) - 1)
            computed = min(shared, other.cached)
            if computed > ready:
                source = other
                ready = computed
            if shared > other.cached and other in prefilling:
                coming = max(coming, shared)
        if coming >= self._least_prefix and coming > ready:
            return True
        if source is not None and ready >= self._least_prefix:
            self._copy_prefix(source, row, ready)
        return False

    def _copy_prefix(self, source: _Conversation, row: _Conversation, length: int) -> None:
        """Copy the first `length` tokens' keys and values to a new conversation, which then shares them."""
        self._slots.copy(source.slot, row.slot, length)
        row.cached = length
        if source.prefix is None:
            source.prefix = Prefix(length)
        if 2 * length >= source.prefix.length:  # else the others would share much less
            source.prefix.length = min(source.prefix.length, length)
            row.prefix = source.prefix

    def _predict(self, parts: Sequence[_Part]) -> Tensor:
        """One forward pass: (R, V) what follows the positions at which tokens are drawn, part by part."""
        spans = [part.span for part in parts]
        for part in parts:
            part.row.cached = min(part.span.end, len(part.row.ids))
        last_span = spans[-1]  # on a GPU the span with the most tokens, for spans of one come first
        if self._model.device.type == "cuda" and last_span.length == 1:
            recording = self._recording(spans)
            tokens = [(part.row.ids[-1], part.span) for part in parts]
            return recording.replay(tokens)
        ids: list[int] = []
        keep: list[int] = []  # positions in the flat batch behind which tokens are drawn
        for part in parts:
            ids += part.tokens
            keep += range(len(ids) - part.n_drawn, len(ids))
        index = functools.partial(torch.tensor, dtype=torch.long, device=self._model.device)
        positions = self._slots.plan(spans)
        return self._forward(index(ids), positions, index(keep))

    def _recording(self, spans: Sequence[Span]) -> Recording:
        """The recorded step over as many keys as spans of one token read."""
        n_keys = math.ceil(self._slots.grow(spans) / GROWTH) * GROWTH
        key = (self._slots.capacity, n_keys)
        if key not in self._recorded:
            # Recordings over slots of another capacity read tensors that are gone.
            for capacity, other_keys in list(self._recorded):
                if capacity != self._slots.capacity:
                    del self._recorded[capacity, other_keys]
            self._recorded[key] = Recording(self._forward, self._slots, n_keys)
        return self._recorded[key]

    @torch.no_grad()
    def _forward(self, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """(R, V) what follows R of a flat batch's N tokens, whose keys and values go where the slots' plan says."""
        output = self._model(
            input_ids=ids[None],
            attention_mask=self._any_mask,  # any four-dimensional mask keeps the model from making one
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            slots=self._slots,
        )
        return output.logits[0]  # type: ignore[no-any-return]
