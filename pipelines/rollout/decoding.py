"""Decodes many conversations together, one step at a time: each keeps its keys and values and draws by its own seed."""

import contextlib
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pipelines.core.errors import ResourceError
from pipelines.protocols.blocks import StopStrings, cut
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.policies.base import Completion, Request

# Where conversations' keys and values live, and attention of a flat batch of tokens over them.

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
    """Spans of like length that are attended together: E conversations, C new tokens and K keys each."""

    rows: Tensor | None  # (E,) their slots; None for slots 0 to E - 1, which are read in place.
    take: Tensor | None  # (E * C,) where each token is in the flat batch; None for its first E tokens.
    mask: Tensor  # (E, 1, C, K) bool: which keys each token sees.


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
        length = max(span.end for span in spans)
        if length > self._capacity:
            self._capacity = -(-max(length, self._capacity * 3 // 2) // GROWTH) * GROWTH
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


# Drawing tokens so that an episode's draws depend on its own seed and positions, never on what decodes beside it.

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


STEP_TOKENS = 4096  # most tokens of one forward pass: long prompts are taken in over several steps
SEEDS = 2**64


@dataclasses.dataclass(slots=True)
class _Row:
    """One conversation."""

    slot: int  # where its keys and values are.
    prompt: tuple[int, ...]  # its context in its first turn; conversations that begin alike share its keys and values.
    request: Request  # the turn being generated; meaningless between turns.
    generating: bool = False  # whether a turn is being generated.
    ids: list[int] = dataclasses.field(default_factory=list)  # its whole context so far.
    cached: int = 0  # how many of them have keys and values.
    logprobs: list[float] = dataclasses.field(default_factory=list)  # of the ids that the turn has drawn so far.


class Decoder:
    """A batch of conversations over one model.

    Args:
        model: a causal LM of transformers; `step` must run inside `slots.attending(model)`.
        count: most conversations at once.
    """

    def __init__(self, model: Any, codec: ChatCodec, count: int) -> None:
        self._model, self._codec, self._count = model, codec, count
        self._slots = Slots(count, model.device)
        self._rows: dict[str, _Row] = {}
        self._leaders: dict[tuple[int, ...], _Row] = {}  # prompt -> the conversation that others copy it from
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        # Ids that end a turn: the chat template's, the tokenizer's and the model's own.
        own = getattr(model.generation_config, "eos_token_id", None)
        many = (*(own if isinstance(own, list) else [own]), codec.tokenizer.eos_token_id, codec.end_id)
        self._end_ids = frozenset(index for index in many if index is not None)
        self._own_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=model.device)

    def __contains__(self, session: str) -> bool:
        return session in self._rows

    @property
    def room(self) -> int:
        """Free slots."""
        return self._count - len(self._rows)

    @property
    def generating(self) -> int:
        """Conversations with a turn being generated."""
        return sum(row.generating for row in self._rows.values())

    def begin(self, request: Request) -> None:
        """Start a turn: of a conversation that is held, or of a new one, which needs a free slot."""
        row = self._rows.get(request.session)
        if row is not None and request.token_ids[: len(row.prompt)] != row.prompt:
            self.end(request.session)
            row = None
        if row is None:
            taken = {other.slot for other in self._rows.values()}
            free = next(slot for slot in range(self._count) if slot not in taken)
            row = _Row(free, request.token_ids, request)
            self._rows[request.session] = row
            self._leaders.setdefault(row.prompt, row)
        row.cached = min(row.cached, _n_common(row.ids, request.token_ids), len(request.token_ids) - 1)
        row.ids, row.logprobs, row.request, row.generating = list(request.token_ids), [], request, True
        if request.stop not in self._stops:
            self._stops[request.stop] = StopStrings(self._codec.tokenizer, request.stop, self._codec.decode)

    def end(self, session: str) -> None:
        """Let a conversation go; its slot is free."""
        row = self._rows.pop(session, None)
        if row is None or self._leaders[row.prompt] is not row:
            return
        del self._leaders[row.prompt]
        heirs = [other for other in self._rows.values() if other.prompt == row.prompt]
        if heirs:
            self._leaders[row.prompt] = max(heirs, key=lambda heir: heir.cached)

    def step(self) -> list[tuple[str, Completion]]:
        """One forward pass: each conversation takes in what it has not seen and, once it has, draws a token.

        Returns:
            The turns that ended with it, with their sessions.
        """
        # The highest conversations move into free low slots: attention reads all slots up to the highest.
        taken = {row.slot for row in self._rows.values()}
        holes = [slot for slot in range(len(taken)) if slot not in taken]
        for row in self._rows.values():
            if row.slot >= len(taken):
                target = holes.pop(0)
                self._slots.copy(row.slot, target, row.cached)
                row.slot = target
        batch = self._batch()
        drawing, logits = self._forward(batch)
        finished = []
        for row, token, logprob in zip(drawing, *self._draw(drawing, logits), strict=True):
            row.ids.append(token)
            row.logprobs.append(logprob)
            finish = self._ended(row)
            if finish is not None:
                row.generating = False
                finished.append((row.request.session, finish))
        return finished

    def _batch(self) -> list[tuple[_Row, Span]]:
        """What the next forward pass takes in: conversations that lack one token first, then the others."""
        active = sorted((row for row in self._rows.values() if row.generating), key=lambda row: row.slot)
        lacking = [(row, Span(row.slot, row.cached, len(row.ids) - row.cached)) for row in active if self._ready(row)]
        batch = [(row, span) for row, span in lacking if span.count == 1]
        room = STEP_TOKENS - len(batch)
        for row, span in lacking:
            if span.count > 1 and room > 1:
                count = min(span.count, room)
                batch.append((row, Span(span.slot, span.start, count)))
                room -= count
        return batch

    def _ready(self, row: _Row) -> bool:
        """Whether a row can go on. One whose prompt another is just taking in waits, and then copies it."""
        leader = self._leaders[row.prompt]
        shared = len(row.prompt) - 1  # the last one is taken in by each, for its logits
        if leader is row or row.cached >= shared:
            return True
        if leader.cached < shared:
            return False
        self._slots.copy(leader.slot, row.slot, shared)
        row.cached = shared
        return True

    def _forward(self, batch: Sequence[tuple[_Row, Span]]) -> tuple[list[_Row], torch.Tensor]:
        """The rows that now have seen all their ids, and what they predict, (R, V)."""
        device = self._model.device
        ids = [token for row, span in batch for token in row.ids[span.start : span.end]]
        ends = itertools.accumulate(span.count for _, span in batch)
        drawing = [(row, end - 1) for (row, span), end in zip(batch, ends, strict=True) if span.end == len(row.ids)]
        with torch.no_grad():
            output = self._model(
                input_ids=torch.tensor([ids], device=device),
                attention_mask=self._own_mask,  # any four-dimensional mask keeps the model from making one
                position_ids=self._slots.plan([span for _, span in batch]),
                use_cache=False,
                logits_to_keep=torch.tensor([index for _, index in drawing], dtype=torch.long, device=device),
                slots=self._slots,
            )
        for row, span in batch:
            row.cached = span.end
        return [row for row, _ in drawing], output.logits[0]

    def _draw(self, rows: Sequence[_Row], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """A token for each row, and its log-probability."""
        if not rows:
            return [], []
        samplings = [row.request.sampling for row in rows]
        seeds = np.array([row.request.seed % SEEDS for row in rows], dtype=np.uint64)
        positions = np.array([len(row.ids) for row in rows], dtype=np.uint64)
        ids, logprobs = draw(
            logits,
            temperature=torch.tensor([sampling.temperature for sampling in samplings], device=logits.device),
            top_p=torch.tensor([sampling.top_p for sampling in samplings], device=logits.device),
            uniform=torch.from_numpy(uniforms(seeds, positions)).to(logits.device),
        )
        return ids.tolist(), logprobs.tolist()

    def _ended(self, row: _Row) -> Completion | None:
        """The finished turn; None while it goes on."""
        new_ids = row.ids[len(row.request.token_ids) :]
        spoken = new_ids[:-1] if new_ids[-1] in self._end_ids else new_ids
        stopped = spoken is not new_ids or self._stops[row.request.stop].ended(new_ids)
        if not stopped and len(new_ids) < row.request.max_tokens:
            return None
        text = cut(self._codec.decode(spoken), row.request.stop)
        return Completion(text, tuple(new_ids), tuple(row.logprobs), "stop" if stopped else "length")


def _n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(left), len(right))
    if tuple(left[:shorter]) == tuple(right[:shorter]):
        return shorter
    return next(index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
