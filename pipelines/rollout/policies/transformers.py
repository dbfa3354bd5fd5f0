"""The policy that decodes in this process: a batch of episodes over one model, each turn at the cost of its new tokens.

With `deterministic`, the decode step at which an episode rejoins after its SQL follows from the statement's own work,
in steps of SQLite's virtual machine, whatever the clock says: a short query is back after two steps, one of a second
after a few hundred, in which the others go on. The batch stops only for an episode that is due and not back. So what
decodes beside what never depends on timing, and the same requests give the same bytes, run after run. Without it, an
episode rejoins as soon as it can and none ever waits for another; its tokens are still drawn by its own seed, but the
last bits of a log-probability may then depend on its company (a sum over a batch of another shape rounds differently),
and once in a great while so does a token.
"""

import asyncio
import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from pipelines.core.errors import ResourceError
from pipelines.core.out_of_memory import is_out_of_memory
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.decoding import Decoder
from pipelines.rollout.packed_weights import packed_linear_layers
from pipelines.rollout.policies.base import Completion, Policy, Request
from pipelines.rollout.slots import slot_attention

REJOIN_STEPS = 2  # decode steps that an episode is away for its SQL at the least, when deterministic
# Work of a statement for which it stays away one more step. SQLite does some 500 in the 10 ms of a step of the tiny
# model on an idle core: with several long statements at once on busy ones they still come back before they are due.
STEP_WORK = 160
MOST_STEPS = 1024  # steps that one is away at the most; also the cost of a statement that its time limit ended
POLL_S = 0.002  # seconds between two looks at the work of statements that hold the batch
SETTLE_TICKS = 3  # event-loop turns after a step: finished turns are read, and their SQL is sent off


@dataclasses.dataclass(slots=True)
class _Session:
    """The state of an episode."""

    # the step from which it may be in the batch again, or its slot be given away; later by its statement's `work`.
    due: int = 0
    work: Callable[[], float] | None = None  # work of the statement that it waits for; None if it waits for none.
    acting: bool = True  # it will call `generate`, `away` or `release` without waiting for anything.
    wanted: Request | None = None  # the turn that it waits to start.
    generating: bool = False  # a turn of it is in the batch.
    over: bool = False  # it was released.
    answer: asyncio.Future[Completion] | None = None  # the turn's completion.

    def rejoins(self) -> int:
        """The step at which it is due as far as is known: never later than it will be."""
        if self.work is None:
            return self.due
        return self.due + int(min(self.work() / STEP_WORK, MOST_STEPS))

    def settle(self) -> None:
        """Fix the step at which it is due: its statement is done, and the statement's cost known."""
        self.due = self.rejoins()
        self.work = None
        self.acting = False

    @property
    def is_awaited(self) -> bool:
        """Whether it is away, neither in the batch nor waiting to join it."""
        return not (self.generating or self.wanted or self.over)

    def fail(self, error: Exception) -> None:
        """Fail the turn that is in the batch or waits for it."""
        if (self.generating or self.wanted) and self.answer and not self.answer.done():
            self.generating = False
            self.wanted = None
            self.acting = True
            self.answer.set_exception(error)


class TransformersPolicy(Policy):
    """Generates with a model of transformers on the device and in the dtype that it has.

    The model's weights may change between runs. Inside a run it is in evaluation mode, without gradients; afterwards it
    is as it was.
    """

    name = "transformers"

    def __init__(
        self,
        model: Any,  # a causal LM whose attention goes through transformers' attention interface
        tokenizer: Any,
        slots: int = 64,  # episodes that are decoded together
        deterministic: bool = True,  # see the module's docstring
        compute: torch.dtype | None = None,  # dtype of products, if weights are kept in float32 for training
    ) -> None:
        # Layers of windows or of linear attention never reach `slot_attention`, and would mix episodes.
        others = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
        if others:
            kinds = ", ".join(sorted(others))
            reason = f"the in-process policy decodes full attention alone, and the model has {kinds}"
            raise ResourceError(reason, "Set rollout.policy=vllm.")
        self.live = slots
        self.codec: ChatCodec = ChatCodec(tokenizer)
        self.context = getattr(model.config, "max_position_embeddings", None)
        # Seconds of its life with nothing to decode, or held back for an episode that was due: the wait for SQL.
        self.waiting_s = 0.0
        self._model = model
        self._deterministic = deterministic
        self._compute = compute
        self._sessions: dict[str, _Session] = {}  # sessions in the order of their opening
        self._step = 0
        self._changed = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def open(self, session: str) -> None:
        self._sessions[session] = _Session(due=self._step)

    def away(self, session: str, work: Callable[[], float] | None = None) -> None:
        state = self._sessions[session]
        state.acting = False
        state.due = self._step
        if self._deterministic:
            state.due += REJOIN_STEPS
            state.work = work
        self._changed.set()

    def release(self, session: str) -> None:
        state = self._sessions[session]
        state.settle()
        state.over = True
        state.wanted = None
        self._changed.set()

    async def generate(self, request: Request) -> Completion:
        state = self._sessions[request.session]
        state.settle()
        state.wanted = request
        state.answer = asyncio.get_running_loop().create_future()
        if self._loop is None:
            self._changed = asyncio.Event()
            self._loop = asyncio.create_task(self._decode())
        self._changed.set()
        return await state.answer

    async def close(self) -> None:
        """End the decode loop: the model is as it was, and all keys and values are gone."""
        if self._loop is not None:
            self._loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop
        self._loop = None
        self._sessions.clear()
        self._step = 0

    @property
    def is_idle(self) -> bool:
        return not self._sessions

    async def _decode(self) -> None:
        """Decode until it is cancelled, or an error ends it: the next turn that is asked for begins anew."""
        try:
            await self._decode_steps()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # else they would hold keys, values and weights beside the next
            failure = error
            if is_out_of_memory(error):
                reason = f"no memory left while decoding {self.live} episodes together"
                failure = ResourceError(reason, "lower rollout.slots or sampling.episode_tokens")
            self._loop = None
            for state in self._sessions.values():
                state.fail(failure)

    async def _decode_steps(self) -> None:
        # Entered once: the weights are cast once a run, and not at each step.
        casting = torch.autocast(self._model.device.type, self._compute, enabled=self._compute is not None)
        packing = packed_linear_layers(self._model, self._compute or self._model.dtype)
        with slot_attention(self._model), casting, packing:
            decoder = Decoder(self._model, self.codec, self.live)
            while True:
                await self._until_step_may_run(decoder)
                finished = decoder.step()
                self._step += 1
                for session, completion in finished:
                    state = self._sessions[session]
                    state.generating = False
                    state.acting = True
                    state.due = self._step
                    if state.answer and not state.answer.done():
                        state.answer.set_result(completion)
                for _ in range(SETTLE_TICKS):
                    await asyncio.sleep(0)

    async def _until_step_may_run(self, decoder: Decoder) -> None:
        """Bring in all that is due; the work of statements is looked at again and again."""
        started = time.perf_counter()
        while not self._admit(decoder):
            self._changed.clear()
            is_known = all(state.work is None for state in self._sessions.values())
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes as the event is set.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if is_known else POLL_S):
                    await self._changed.wait()
        self.waiting_s += time.perf_counter() - started

    def _admit(self, decoder: Decoder) -> bool:
        """Bring in all that is due, in the order of opening; False if the next step must wait for an episode."""
        while True:
            if self._deterministic and self._is_someone_late():
                return False
            for session, state in list(self._sessions.items()):
                if state.over and (state.generating or state.due <= self._step):
                    decoder.end(session)
                    del self._sessions[session]
            for session, state in self._sessions.items():
                if state.wanted and state.due <= self._step and (session in decoder.rows or decoder.room):
                    decoder.begin(state.wanted)
                    state.wanted = None
                    state.generating = True
            if decoder.generating:
                return True
            # With nothing to decode the clock of steps goes on to the first episode that is due.
            first = self._first_due()
            if first is None:
                return False
            self._step = first

    def _is_someone_late(self) -> bool:
        """Whether an episode that is due is not back yet."""
        for state in self._sessions.values():
            if state.acting or (state.is_awaited and state.rejoins() <= self._step):
                return True
        return False

    def _first_due(self) -> int | None:
        """The step of the first episode that is due later; None without one, or if it may turn out to be later yet."""
        first: int | None = None
        is_certain = True
        for state in self._sessions.values():
            due = state.rejoins()
            if due <= self._step:
                continue
            if first is None or due < first:
                first = due
                is_certain = state.work is None
            elif due == first and state.work is not None:
                is_certain = False
        return first if is_certain else None
