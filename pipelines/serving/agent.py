"""The served agent: a question about one database is played as an episode, whose steps are events as they happen.

An event is a JSON object with a `type`:

    {"type": "reasoning", "text": "..."}                      the model's reasoning in a turn
    {"type": "sql", "sql": "..."}                             a query that it runs
    {"type": "result", "text": "...", "rows": 3, "error": null}    the query's result, as the model saw it
    {"type": "answer", "sql": "...", "columns": [...], "rows": [[...]], "more": false}
    {"type": "error", "message": "..."}                       the last one in place of an answer; one plain line
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pipelines.benchmarks.prompt_schema import ValueIndex
from pipelines.core.errors import SqltrainError
from pipelines.core.types import (
    ActionKind,
    Database,
    Example,
    ExecutionResult,
    ExecutionStatus,
    History,
    Scalar,
    StopReason,
    Trajectory,
    is_abstention,
    plain,
    text_of,
)
from pipelines.databases.named import OpenableDatabase
from pipelines.databases.of_recipe import Link, with_prompt_facts
from pipelines.environment.core import Environment, RolloutMode
from pipelines.protocols.base import Protocol
from pipelines.recipe.config import Recipe
from pipelines.rollout.episode import EndEvent, EpisodeEvent, EpisodeRequest, ResultEvent, TurnEvent
from pipelines.rollout.habits import advice_on
from pipelines.rollout.policies.base import Policy
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Schema
from pipelines.teachers.experts import linking

Event = dict[str, Any]
QUESTION_CHARS = 4_000
HISTORY = 8  # questions of a conversation that the model reads before the last one
CELL_CHARS = 10_000
SAFE_BITS = 53  # bits of the integers that JavaScript reads exactly
TOO_LONG = "the prompt is longer than the model's context: begin a new conversation, or hide tables in the card"
CANNOT_ANSWER = "The database cannot answer this question."
DATABASE_AWAY = "the database is away"
FAILURES = {
    "ContextOverflow": TOO_LONG,
    "EndpointError": "the model's server does not answer",
    "database_corrupt": "the database is damaged",
    "database_locked": "another process writes to the database",
    "disk": "the disk of the database is full or fails",
    "worker_died": "the process that ran the query was ended; ask again",
}
NO_QUERY = (ActionKind.SOLUTION, ActionKind.INVALID, ActionKind.ASK)  # actions whose SQL is not shown at once
log = logging.getLogger(__name__)


def result_event(sql: str, result: ExecutionResult) -> Event:
    """The event of an executed statement: an `answer` with its rows, or an `error` in one plain line."""
    if result.status is ExecutionStatus.UNAVAILABLE:
        failure = FAILURES.get(str(result.error_class), DATABASE_AWAY)
        return {**error_event(f"no answer: {failure}"), "sql": sql}
    if not result.ok:
        reason = plain(str(result.error))
        return {**error_event(f"the SQL does not run: {reason}"), "sql": sql}
    if is_abstention(sql):
        columns: list[Any] = ["answer"]
        rows: list[list[Any]] = [[CANNOT_ANSWER]]
    else:
        columns = _json_row(result.columns)
        rows = [_json_row(row) for row in result.rows]
    return {"type": "answer", "sql": sql, "columns": columns, "rows": rows, "more": bool(result.truncated)}


def error_event(message: str) -> Event:
    one_line = " ".join(plain(message).split())
    return {"type": "error", "message": one_line}


def _json_row(cells: Sequence[Scalar]) -> list[Any]:
    return [json_cell(cell) for cell in cells]


def json_cell(value: Scalar) -> Any:
    """A stored value as JSON without loss: integers beyond 53 bits, NaN, infinities and bytes become text."""
    if value is None:
        return value
    if isinstance(value, int) and value.bit_length() <= SAFE_BITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, float):
        return str(value)
    if isinstance(value, bytes):
        digits = value[:CELL_CHARS].hex()
        text = f"x'{digits}'"
    else:
        text = text_of(value)
    if len(text) > CELL_CHARS:
        return text[:CELL_CHARS] + "\u2026"
    return text


def why_unanswered(trajectory: Trajectory) -> str:
    """The reason, for a person, for which an episode has no answer."""
    if trajectory.stop is StopReason.BROKEN:
        failure = str(trajectory.failure)  # the class of an execution's error, or of the model's exception
        reason = "the model failed; the server's log says more"
        if failure.islower():
            reason = DATABASE_AWAY
        reason = FAILURES.get(failure, reason)
        return f"no answer: {reason}"
    if trajectory.stop is StopReason.TOKEN_LIMIT:
        if not trajectory.turns:
            return TOO_LONG
        return "the model used up its tokens without an answer"
    # A turn that was cut off is malformed, too, whatever its protocol: that case is above.
    kinds_of_turns = {turn.action.kind for turn in trajectory.turns}
    if kinds_of_turns == {ActionKind.INVALID}:
        hint = "name the recipe that taught it (--recipe)"
        return f"every turn of the model was malformed: it does not speak the protocol {trajectory.protocol}; {hint}"
    return "the model gave no answer within its turns"


@dataclass(frozen=True)
class AnsweringModel:
    """The model that answers: a policy, and the recipe by which it is prompted."""

    name: str  # the name that clients see.
    policy: Policy
    recipe: Recipe  # its protocol, its sampling and its limits of execution.

    def with_turn_tokens(self, maximum: int) -> Self:
        """The same model, of which a turn has at most so many tokens."""
        evaluation = self.recipe.evaluation
        turn_tokens = min(maximum, evaluation.sampling.turn_tokens)
        sampling = evaluation.sampling.model_copy(update={"turn_tokens": turn_tokens})
        evaluation = evaluation.model_copy(update={"sampling": sampling})
        recipe = self.recipe.model_copy(update={"evaluation": evaluation})
        return replace(self, recipe=recipe)


@dataclass(frozen=True)
class QuestionBudget:
    """The limits of one question: seconds from first to last, and rows of its answer."""

    seconds: float = 120.0
    rows: int = 1_000


@dataclass(eq=False)
class Agent:
    """Answers questions about one database; many at a time."""

    openable: OpenableDatabase
    sql: SqlEngine  # the database's sandbox.
    schema: Schema  # the schema that prompts show.
    model: Callable[[], AnsweringModel]  # gives the model that answers from now on.
    budget: QuestionBudget
    used: Counter[str] = field(default_factory=Counter)  # answers, tokens and cost of endpoints (`Policy.take_used`).
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _linker: Callable[[str | None], Link | None] = field(default_factory=lambda: functools.cache(linking))
    _indices: dict[Database, ValueIndex] = field(default_factory=dict)
    _linker_lock: threading.Lock = field(default_factory=threading.Lock)  # its connections are of one event loop

    async def answer(
        self, question: str, model: AnsweringModel | None = None, history: History = ()
    ) -> AsyncGenerator[Event]:
        """The events of a question, the last one an answer or an error.

        Closing the generator ends its statement.

        Args:
            model: the model that answers; None for the current one.
            history: the questions before, of which the last `HISTORY` are read.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        id = f"chat-{next(self._numbers)}"
        example = self.openable.example(question, id, history[-HISTORY:])
        answering = model or self.model()
        work = asyncio.create_task(self._play(example, answering, events.put_nowait))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            event = await events.get()
            while event is not None:
                yield event
                event = await events.get()
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def run(self, sql: str) -> Event:
        """The event of a statement that a person wrote: an answer or an error."""
        result = await self.sql.execute(self.openable.database, sql, self.budget.rows)
        return result_event(sql, result)

    async def _play(self, example: Example, model: AnsweringModel, emit: Callable[[Event], None]) -> None:
        recipe = model.recipe
        try:
            async with asyncio.timeout(self.budget.seconds):
                environment = Environment(recipe, sql=self.sql, schema=lambda _: self.schema)
                engine = environment.engine(model.policy, RolloutMode.served(recipe))
                name = example.id
                example = await asyncio.to_thread(self._with_facts, example, recipe)
                request = EpisodeRequest(example, 0, recipe.seed)
                async with contextlib.aclosing(engine.play(request, name)) as steps:
                    async for step in steps:
                        for event in _step_events(step):
                            emit(event)
                assert isinstance(step, EndEvent)
                last_event = await self._last_event(step.trajectory, environment.protocol)
                emit(last_event)
        except TimeoutError:
            emit(error_event(f"no answer within {self.budget.seconds:g} s"))
        except SqltrainError as error:
            emit(error_event(str(error)))
        except Exception:  # a question that fails must not take the server down
            log.exception("a question failed")
            emit(error_event("an internal error; the server's log says more"))
        finally:
            self.used.update(model.policy.take_used())

    async def _last_event(self, trajectory: Trajectory, protocol: Protocol) -> Event:
        """The answer of an episode, or the reason for which it has none."""
        if trajectory.final_sql is None:
            event = error_event(why_unanswered(trajectory))
        else:
            event = await self.run(trajectory.final_sql)
        if event["type"] != "error":
            return event
        habit = advice_on(trajectory, protocol)
        if habit is None:
            return event
        message = f"{event['message']}. {plain(habit)}"
        return {**event, "message": message}

    def _with_facts(self, example: Example, recipe: Recipe) -> Example:
        """The example with all that its prompt shows; in a thread, so with a sandbox that is not the event loop's."""
        with self._linker_lock, self.openable.sql(recipe.execution) as sql:
            link = self._linker(recipe.data.linker)
            (with_facts,) = with_prompt_facts(
                [example], recipe, lambda _: self.schema, sql, link, self._indices, is_served=True
            )
            return with_facts


def _step_events(step: EpisodeEvent) -> Iterator[Event]:
    """The events of one step of an episode; the final SQL is none: its own result, with all rows, ends the question."""
    if isinstance(step, TurnEvent):
        action = step.turn.action
        reasoning = action.reasoning.strip()
        if reasoning:
            yield {"type": "reasoning", "text": reasoning}
        is_query = action.kind not in NO_QUERY
        if is_query and action.content:
            yield {"type": "sql", "sql": action.content}
    elif isinstance(step, ResultEvent) and step.turn.observation is not None:
        action = step.turn.action
        if action.kind is ActionKind.SOLUTION:  # an answer that did not run and came back
            yield {"type": "sql", "sql": action.content}
        text = step.turn.observation
        inside_tags = re.fullmatch(r"\s*<(\w+)>\s*(.*?)\s*</\1>.*", text, re.DOTALL)
        if inside_tags:  # the tags that the protocol puts around an observation
            text = inside_tags[2]
        yield {"type": "result", "text": text, "rows": step.turn.n_rows, "error": step.turn.error_class}
