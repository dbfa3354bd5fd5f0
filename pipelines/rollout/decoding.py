"""Decodes many conversations together, one step at a time: each keeps its keys and values and draws by its own seed."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.protocols.blocks import StopStrings, truncate_at_stop
from pipelines.rollout import drafts
from pipelines.rollout.codec import ChatCodec, common_prefix
from pipelines.rollout.drawing import draw, uniforms
from pipelines.rollout.policies.base import Completion, Request
from pipelines.rollout.slots import GROWTH, Group, Prefix, Slots, Span, products_dtype, suits_products

LEAST_PREFIX = 256  # tokens: a shorter prefix of another prompt is computed about as fast as it is copied
SHORT_PREFIX = 64  # the same in bfloat16 on a CPU, where a model has more than a few million weights
STEP_TOKENS = 4096  # most tokens of one forward pass: long prompts are prefilled over several steps
DRAFT_TOKENS = 32  # on a CPU, tokens of a forward pass up to which further ones cost little, and guesses pay
MAX_DEFERRED_STEPS = 16  # on a GPU, steps for which several new tokens of a conversation wait for those of others
SEEDS = 2**64


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
            slots.groups = [Group(None, None, seen[:, None, None])]
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
        by_products = suits_products(model.device, products_dtype(model))
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
        """Move the highest conversations into free low slots, where attention reads all slots up to the highest."""
        if self._slots.by_products:  # each group names its slots
            return
        used = {row.slot for row in self.rows.values()}
        free = [slot for slot in range(len(used)) if slot not in used]
        for row in self.rows.values():
            if row.slot >= len(used):
                target = free.pop(0)
                self._slots.copy(row.slot, target, row.cached)
                row.slot = target

    def _rows_to_compute(self) -> list[_Conversation]:
        """Conversations with a turn to go on with, by their slots.

        A new conversation copies the longest beginning of its prompt that another one has computed; while another one
        computes a longer beginning, or the same prompt, it waits.
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
            elif row.cached == 0:
                source, length, coming = self._longest_prefix(row, ready)
                if coming > length:
                    continue
                if source is not None:
                    self._copy_prefix(source, row, length)
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
        if part.draft and turn is None:  # guesses behind the end of a turn are neither right nor wrong
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

    def _longest_prefix(
        self, row: _Conversation, prefilling: Sequence[_Conversation]
    ) -> tuple[_Conversation | None, int, int]:
        """The longest prefix of a new conversation that another one has computed: that one, and the number of tokens.

        Third is the number of tokens of the longest that this step computes. Those below the least length count as 0.
        Prompts of one database begin with the same schema. What follows the prefix is computed in a pass of another
        shape than the whole prompt would be, so its last bits may differ.

        Args:
            prefilling: conversations that this step computes.
        """
        source = None
        ready = 0
        coming = 0
        for other in self.rows.values():
            if other is row:
                continue
            shared = min(common_prefix(other.prompt, row.prompt), len(row.prompt) - 1)
            if shared < self._least_prefix:
                continue
            computed = min(shared, other.cached)
            if computed >= self._least_prefix and computed > ready:
                source = other
                ready = computed
            if shared > other.cached and other in prefilling:
                coming = max(coming, shared)
        return source, ready, coming

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
