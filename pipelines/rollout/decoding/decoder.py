"""Decodes many conversations together, one step at a time: each keeps its keys and values and draws by its own seed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipelines.protocols.stops import StopStrings, cut
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.decoding.sampling import draw, uniforms
from pipelines.rollout.decoding.slots import Slots, Span
from pipelines.rollout.policies.base import Completion, Request

STEP_TOKENS = 4096  # most tokens of one forward pass: long prompts are taken in over several steps
SEEDS = 2**64


@dataclasses.dataclass(slots=True)
class _Row:
    """One conversation.

    Attributes:
        slot: where its keys and values are.
        prompt: its context in its first turn; conversations that begin alike share its keys and values.
        request: the turn being generated; meaningless between turns.
        generating: whether a turn is being generated.
        ids: its whole context so far.
        cached: how many of them have keys and values.
        logprobs: of the ids that the turn has drawn so far.
    """

    slot: int
    prompt: tuple[int, ...]
    request: Request
    generating: bool = False
    ids: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    logprobs: list[float] = dataclasses.field(default_factory=list)


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
        self._end_ids = _end_ids(model, codec)
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
            row = _Row(self._free_slot(), request.token_ids, request)
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
        self._compact()
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

    def _free_slot(self) -> int:
        taken = {row.slot for row in self._rows.values()}
        return next(slot for slot in range(self._count) if slot not in taken)

    def _compact(self) -> None:
        """Move the highest conversations into free low slots: attention reads all slots up to the highest."""
        taken = {row.slot for row in self._rows.values()}
        holes = [slot for slot in range(len(taken)) if slot not in taken]
        for row in self._rows.values():
            if row.slot >= len(taken):
                target = holes.pop(0)
                self._slots.copy(row.slot, target, row.cached)
                row.slot = target

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


def _end_ids(model: Any, codec: ChatCodec) -> frozenset[int]:
    """Ids that end a turn: the chat template's, the tokenizer's and the model's own."""
    own = getattr(model.generation_config, "eos_token_id", None)
    many = own if isinstance(own, list) else [own]
    return frozenset(index for index in (*many, codec.tokenizer.eos_token_id, codec.end_id) if index is not None)
