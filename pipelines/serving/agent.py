"""The agent that is served: a question about one database runs as an episode, and each step is told as it happens.

An event is a JSON object with a `type`:

    {"type": "reasoning", "text": "..."}                      what the model thought in a turn
    {"type": "sql", "sql": "..."}                             a query that it runs
    {"type": "result", "text": "...", "rows": 3, "error": null}    what the query gave, as the model saw it
    {"type": "answer", "sql": "...", "columns": [...], "rows": [[...]], "more": false}
    {"type": "error", "message": "..."}                       the last one in place of an answer; one plain line
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from pipelines.benchmarks.prompt_schema import ValueIndex
from pipelines.core.errors import SqltrainError
from pipelines.core.types import (
    ActionKind,
    Database,
    Example,
    ExecutionResult,
    ExecutionStatus,
    Scalar,
    StopReason,
    Trajectory,
    Turn,
    text_of,
)
from pipelines.databases.named import OpenableDatabase
from pipelines.databases.of_recipe import completed
from pipelines.protocols.base import build
from pipelines.recipe.config import Recipe
from pipelines.report.terminal import plain
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EndEvent, EpisodeRequest, ResultEvent, TurnEvent
from pipelines.rollout.policies.base import Policy
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Schema
from pipelines.teachers.experts import linking

# Results of a query as JSON that any client reads without loss.

CELL_CHARS = 10_000
SAFE_BITS = 53  # of an integer that JavaScript reads exactly
TOO_LONG = "the question and the schema are longer than the model's context: hide tables in the database's card"
FAILURES = {
    "ContextOverflow": TOO_LONG,
    "EndpointError": "the model's server does not answer",
    "database_corrupt": "the database is damaged",
    "database_locked": "another process writes to the database",
    "disk": "the disk of the database is full or fails",
    "worker_died": "the process that ran the query was ended; ask again",
}


def event(sql: str, result: ExecutionResult) -> dict[str, Any]:
    """What became of a statement: an `answer` with its rows, or an `error` in one plain line."""
    if result.status is ExecutionStatus.UNAVAILABLE:
        return failure(why_broken(str(result.error_class))) | {"sql": sql}
    if not result.ok:
        return failure(f"the SQL does not run: {plain(str(result.error))}") | {"sql": sql}
    return {"type": "answer", "sql": sql, **_table(result)}


def failure(message: str) -> dict[str, Any]:
    """An `error` event."""
    return {"type": "error", "message": " ".join(plain(message).split())}


def why_broken(failure: str) -> str:
    """What a boundary's failure means for a person: the class of an execution's error, or that of an exception."""
    away = "the database is away" if failure.islower() else "the model failed; the server's log says more"
    return f"no answer: {FAILURES.get(failure, away)}"


def _table(result: ExecutionResult) -> dict[str, Any]:
    """Columns and rows; `more` says that rows were left out."""
    return {
        "columns": [_cell(name) for name in result.columns],
        "rows": [[_cell(value) for value in row] for row in result.rows],
        "more": bool(result.truncated),
    }


def _cell(value: Scalar) -> Any:
    """A value of JSON: integers beyond 53 bits, numbers that are none, and bytes are text."""
    if value is None or (isinstance(value, int) and value.bit_length() <= SAFE_BITS):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    text = f"x'{value[:CELL_CHARS].hex()}'" if isinstance(value, bytes) else text_of(value)
    return text if len(text) <= CELL_CHARS else text[:CELL_CHARS] + "\u2026"


Event = dict[str, Any]
QUESTION_CHARS = 4_000
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnsweringModel:
    """What answers: a policy, and how it is asked."""

    name: str  # as clients are told it.
    policy: Policy
    recipe: Recipe  # its protocol, its sampling and its limits of execution.


@dataclass(frozen=True)
class QuestionBudget:
    """What one question may take: seconds from first to last, and rows of its answer."""

    seconds: float = 120.0
    rows: int = 1_000


class Agent:
    """Answers questions about one database; many at a time.

    Args:
        sql: the database's sandbox.
        schema: what prompts show of it.
        model: gives the model that answers from now on.

    Attributes:
        used: what endpoints have taken so far (see `Policy.take_used`).
    """

    def __init__(
        self,
        where: OpenableDatabase,
        sql: SqlEngine,
        schema: Schema,
        model: Callable[[], AnsweringModel],
        budget: QuestionBudget,
    ) -> None:
        self.where, self.budget = where, budget
        self.used: Counter[str] = Counter()
        self.sql, self._schema, self._model = sql, schema, model
        self._numbers = itertools.count(1)
        self._links, self._indices = functools.cache(linking), dict[Database, ValueIndex]()
        self._one_at_a_time = threading.Lock()  # a linker's connections are of one event loop

    @property
    def model(self) -> AnsweringModel:
        """What answers the next question."""
        return self._model()

    async def answer(self, question: str, model: AnsweringModel | None = None) -> AsyncGenerator[Event]:
        """The events of a question, the last one an answer or an error. Whoever stops listening ends its statement.

        Args:
            model: what answers; by default the current one.
        """
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        work = asyncio.create_task(self._run(question, model or self.model, events.put_nowait))
        work.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def run(self, sql: str) -> Event:
        """The event of a statement that a person wrote: an answer or an error."""
        result = await self.sql.execute(self.where.database, sql, self.budget.rows)
        return event(sql, result)

    async def is_healthy(self) -> bool:
        """Whether the database answers."""
        return (await self.sql.execute(self.where.database, "SELECT 1", 1)).ok

    async def _run(self, question: str, model: AnsweringModel, tell: Callable[[Event], None]) -> None:
        try:
            async with asyncio.timeout(self.budget.seconds):
                tell(await self._answered(question, model, tell))
        except TimeoutError:
            tell(failure(f"no answer within {self.budget.seconds:g} s"))
        except SqltrainError as error:
            tell(failure(str(error)))
        except Exception:  # one question that fails must not take the server down
            log.exception("a question failed")
            tell(failure("an internal error; the server's log says more"))

    async def _answered(self, question: str, model: AnsweringModel, tell: Callable[[Event], None]) -> Event:
        trajectory = await self._episode(question, model, tell)
        if trajectory.final_sql is None:
            return failure(why_unanswered(trajectory))
        return await self.run(trajectory.final_sql)

    async def _episode(self, question: str, model: AnsweringModel, tell: Callable[[Event], None]) -> Trajectory:
        recipe = model.recipe
        sampling = recipe.evaluation.sampling.model_copy(update={"temperature": 0.0})
        turns = recipe.protocol.max_turns_eval
        engine = RolloutEngine(model.policy, build(recipe.protocol), self.sql, sampling, turns, lambda _: self._schema)
        name = f"chat-{next(self._numbers)}"
        try:
            example = await asyncio.to_thread(self._completed, self.where.example(question, name), recipe)
            async with contextlib.aclosing(engine.play(EpisodeRequest(example, 0, recipe.seed), name)) as events:
                async for event in events:
                    if isinstance(event, TurnEvent):
                        _tell_action(event.turn, tell)
                    elif isinstance(event, ResultEvent):
                        _tell_result(event.turn, tell)
            assert isinstance(event, EndEvent)
            return event.trajectory
        finally:
            self.used.update(model.policy.take_used())

    def _completed(self, example: Example, recipe: Recipe) -> Example:
        with self._one_at_a_time, self.where.sql(recipe.execution) as sql:  # the other sandbox is the event loop's
            link = self._links(recipe.data.linker)
            (asked,) = completed([example], recipe, lambda _: self._schema, sql, link, self._indices)
        return asked


def why_unanswered(trajectory: Trajectory) -> str:
    """Why an episode has no answer, for a person."""
    if trajectory.stop is StopReason.BROKEN:
        return why_broken(str(trajectory.failure))
    is_cut = trajectory.stop is StopReason.TOKEN_LIMIT  # a turn that was cut off says nothing of the protocol
    if not is_cut and trajectory.turns and all(turn.action.kind is ActionKind.INVALID for turn in trajectory.turns):
        taught = "name the recipe that taught it (--recipe)"
        return f"every turn of the model was malformed: it does not speak the protocol {trajectory.protocol}; {taught}"
    if not is_cut:
        return "the model gave no answer within its turns"
    if trajectory.turns:
        return "the model used up its tokens without an answer"
    return TOO_LONG


def _tell_action(turn: Turn, tell: Callable[[Event], None]) -> None:
    if turn.action.reasoning.strip():
        tell({"type": "reasoning", "text": turn.action.reasoning.strip()})
    if turn.action.kind not in (ActionKind.SOLUTION, ActionKind.INVALID, ActionKind.ASK) and turn.action.content:
        tell({"type": "sql", "sql": turn.action.content})


def _tell_result(turn: Turn, tell: Callable[[Event], None]) -> None:
    if turn.observation is not None:
        tell({"type": "result", "text": _bare(turn.observation), "rows": turn.n_rows, "error": turn.error_class})


def _bare(observation: str) -> str:
    """An observation without the tags that the protocol puts around it."""
    inside = re.fullmatch(r"\s*<(\w+)>\s*(.*?)\s*</\1>.*", observation, re.DOTALL)
    return inside[2] if inside else observation
