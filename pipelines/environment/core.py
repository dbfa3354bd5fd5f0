"""The environment: a question becomes messages, a turn of text becomes an observation, an answer becomes a reward.

It speaks text alone, so that whoever trains keeps its own tokens. All episodes share one pool of SQL workers.

    with Environment("skyrl_sql") as environment:
        session = environment.reset(example)
        while not session.done:
            step = session.step(my_model(session.messages))
        print(step.reward, step.info["correct"])
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.benchmarks.prompt_schema import NO_ENDPOINT, ValueIndex
from pipelines.core.errors import DataError, EndpointError, RecipeError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, Example, ExecutionResult, StopReason, from_dict, to_dict
from pipelines.databases.of_recipe import schemas, sql_engine, with_prompt_facts
from pipelines.evaluation import result_files
from pipelines.protocols.base import build
from pipelines.protocols.blocks import cut
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.rewards.outcome import make_outcomes
from pipelines.rewards.panel import Rubric, endpoint_of
from pipelines.rollout.episode import (
    DriverRequest,
    EndEvent,
    Episode,
    EpisodeEvent,
    EpisodeRequest,
    ResultEvent,
    Rules,
    SqlRequest,
    TurnEvent,
    UserRequest,
)
from pipelines.rollout.policies.base import Completion
from pipelines.rollout.user import reply, simulated_user
from pipelines.sql.dialects.dialect import engine_of_file
from pipelines.sql.engine import Pair

ChatMessages = list[dict[str, str]]
POLICY = "outside"  # the name of the policy in the trajectories: the environment does not know what drives it


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a turn, and after the last one the episode's reward."""

    observation: str | None  # as the text of a user message; None if the episode is over.
    # the panel's sum on the full track if the episode is over; None before, and for a broken episode, which must be
    # left out of its group and never counted as 0.
    reward: float | None
    done: bool
    # after the last turn: `correct`, `broken`, `stop`, `turns`, `final_sql`, `by_term` and `by_track`.
    info: Mapping[str, Any] = field(default_factory=dict)


class Session:
    """One episode. Its turns follow one another: a step must end before the next one begins."""

    def __init__(self, environment: Environment, example: Example, episode: Episode) -> None:
        self._environment, self._episode = environment, episode
        self.example = example
        self.stop = environment.protocol.stop  # texts after which the agent's turn ends; they belong to the turn
        self._driver = episode.play()
        self._due = next(self._driver)

    @property
    def messages(self) -> ChatMessages:
        """The conversation so far, from the prompt on, as chat models take it."""
        return [{"role": role, "content": text} for role, text in self._episode.next_request().messages]

    @property
    def done(self) -> bool:
        return self._episode.stop is not None

    def step(self, text: str) -> StepResult:
        """Take the agent's turn, and block while its SQL runs. After the last turn: ValueError."""
        environment, due = self._environment, self._accept(text)
        while isinstance(due, SqlRequest | UserRequest):
            if isinstance(due, UserRequest):
                asyncio.run(self._ask_user(due))
            else:
                time.sleep(due.delay_s)
                (result,) = environment.sql.execute_many([(self.example.database, due.sql)], environment.rows)
                self._advance(result)
            due = self._due
        return self._result()

    async def step_async(self, text: str) -> StepResult:
        """As `step`, inside a running event loop: the SQL of many sessions runs side by side."""
        environment, due = self._environment, self._accept(text)
        while isinstance(due, SqlRequest | UserRequest):
            if isinstance(due, UserRequest):
                await self._ask_user(due)
            else:
                if due.attempt:
                    await asyncio.sleep(due.delay_s)
                self._advance(await environment.sql.execute(self.example.database, due.sql, environment.rows))
            due = self._due
        return await asyncio.to_thread(self._result) if self.done else self._result()

    def give_up(self) -> StepResult:
        """End the episode of an agent that ends early: it is paid as one whose turns are empty up to the cap."""
        step = self.step("")
        while not step.done:
            step = self.step("")
        return step

    def _accept(self, text: str) -> DriverRequest | EpisodeEvent:
        if self.done:
            raise ValueError("the episode is over; begin another one with reset")
        # As a server would stop it: at the first stop string outside a thinking block.
        said = cut(text, self.stop)
        while len(said) < len(text) and self._environment.protocol.is_thinking(said):
            said += cut(text[len(said) :], self.stop)
        return self._advance(Completion(said))

    def _advance(self, answer: Completion | ExecutionResult | str) -> DriverRequest | EpisodeEvent:
        self._due = self._driver.send(answer)
        while isinstance(self._due, TurnEvent | ResultEvent):
            self._due = next(self._driver)
        return self._due

    async def _ask_user(self, due: UserRequest) -> None:
        """Show the user's answer to the agent; an endpoint that fails breaks the episode."""
        environment = self._environment
        environment.asking += 1
        try:
            self._advance(
                await reply(environment.user, environment.protocol, self.example, due.questions, self._episode.sample)
            )
        except EndpointError as error:
            self._due = self._driver.throw(error)
        finally:
            environment.asking -= 1
            if not environment.asking:
                await environment.user.close()

    def _result(self) -> StepResult:
        """The turn's observation; after the last turn the final SQL held against gold, and paid by the panel."""
        if not isinstance(self._due, EndEvent):
            return StepResult(self._episode.turns[-1].observation, None, False)
        environment, trajectory = self._environment, self._due.trajectory
        (outcome,) = make_outcomes(
            [trajectory],
            {self.example.id: self.example},
            environment.sql,
            environment.schema,
            environment.recipe.execution.equality,
            environment.rules.max_turns,
            reads=environment.rubric.reads,
        )
        info: dict[str, Any] = {
            "correct": outcome.correct,
            "broken": outcome.broken,
            "stop": trajectory.stop.value,
            "failure": trajectory.failure if trajectory.stop is StopReason.BROKEN else None,
            "turns": len(trajectory.turns),
            "final_sql": trajectory.final_sql,
        }
        if outcome.broken:
            return StepResult(None, None, True, info)
        paid = environment.rubric.score(outcome)
        return StepResult(None, paid.total, True, {**info, "by_term": paid.by_term, "by_track": paid.by_track})


class Environment(contextlib.ExitStack):
    """Many episodes of one recipe over one pool of SQL workers, which `close`, or the end of a `with`, ends. Sessions
    may run side by side.

    Args:
        recipe: a recipe, or its name or path; its protocol, its rewards and its limits hold.
        workers: processes that run SQL.
        evaluates: whether the recipe's turn cap of evaluation holds, and not that of training.

    Raises:
        RecipeError: no such recipe, or it pays nothing, or asks an endpoint as linker or judge.
    """

    def __init__(
        self, recipe: Recipe | str, overrides: Sequence[str] = (), workers: int = 1, evaluates: bool = False
    ) -> None:
        super().__init__()
        self.recipe = recipes.load(recipe, overrides) if isinstance(recipe, str) else recipe
        # An environment asks no endpoint but the user's.
        if self.recipe.data.linker not in NO_ENDPOINT:
            reason = f"the environment asks no linker ({self.recipe.data.linker})"
            raise RecipeError(reason, "Set data.linker=local, gold or null.")
        if (judge := endpoint_of(self.recipe.rewards)) is not None:
            raise RecipeError(f"the environment asks no judge ({judge})", "Set rewards.judge.options.by=static.")
        self.sql = sql_engine(self.recipe, workers)
        self.callback(self.sql.close)
        self.rows = self.recipe.protocol.observation_rows
        self.protocol = build(self.recipe.protocol)
        # It answers what agents ask; `asking` of their questions are on their way.
        self.user, self.asking = simulated_user(self.protocol), 0
        self.rubric = Rubric(self.recipe.rewards)
        cap = self.recipe.protocol.max_turns_eval if evaluates else self.recipe.protocol.max_turns
        self.rules = Rules(self.protocol, self.recipe.grpo.sampling, cap, self.recipe.protocol.forced_final)
        self.schema = schemas(self.recipe)  # of a database, read once
        self._begun = 0
        self._indices: dict[Database, ValueIndex] = {}

    def questions(self, pool: str) -> list[Example]:
        """The questions of a pool (`sft`, `rl`, `dev`, or a benchmark of `data.test` by its name), ready for `reset`,
        with what the recipe's prompt shows of them. They are read, and their gold SQL is not checked.
        """
        data = self.recipe.data
        pools = {"sft": (data.sft,), "rl": data.rl, "dev": (data.dev,)} | {each.name: (each,) for each in data.test}
        if pool not in pools:
            raise DataError(f"the recipe has no pool {pool!r}", f"There are: {', '.join(pools)}.")
        folder = tempfile.TemporaryDirectory(prefix="sqltrain-environment-")  # of links to databases
        root = Path(self.enter_context(folder))
        read = [base.read(source, self.recipe.seed, root).examples for source in pools[pool]]
        examples = base.resolve([example for examples in read for example in examples], root)
        return with_prompt_facts(examples, self.recipe, self.schema, self.sql, is_served=True)

    def reset(self, example: Example, sample: int = 0) -> Session:
        """Begin an episode on a question: the `sample`-th of its group."""
        self._begun += 1
        if example.meta.keys().isdisjoint(("values", "linked_schema")):
            with sql_engine(self.recipe, 1) as sql:  # sessions may begin in other threads
                (example,) = with_prompt_facts(
                    [example], self.recipe, self.schema, sql, indices=self._indices, is_served=True
                )
        prompt = self.rules.prompt(example, self.schema(example.database))
        request = EpisodeRequest(example, sample, self.recipe.seed)
        return Session(self, example, Episode(request, self.rules, POLICY, f"session-{self._begun}", prompt, None))

    def equalities(self, pool: str) -> tuple[str, ...]:
        """The equalities under which answers to a pool's questions are evaluated, the headline's first."""
        own = self.recipe.on(pool).equalities if pool in {source.name for source in self.recipe.data.test} else ()
        return own or tuple(dict.fromkeys((self.recipe.execution.equality, *self.recipe.evaluation.equalities)))

    def verdicts(self, example: Example, sql: str | None, equalities: Sequence[str]) -> dict[str, float] | None:
        """The score of an answer under each equality, in [0, 1]; None if the database, or the gold SQL, failed."""
        (verdict,) = result_files.verdicts([example], [Pair.of(example, sql)], equalities, self.sql)
        return None if verdict.broken else dict(verdict.scores)


@functools.cache
def shared(recipe: str, overrides: tuple[str, ...] = (), workers: int = 1, evaluates: bool = False) -> Environment:
    """The environment of a recipe in this process, which ends it; for trainers that make an object for each episode."""
    environment = Environment(recipe, overrides, workers, evaluates)
    atexit.register(environment.close)
    return environment


def row_of(example: Example) -> dict[str, str]:
    """A row of texts that `example_of` reads back to the same example."""
    return {"question": example.question, "record": json.dumps(to_dict(example))}


def example_of(row: Mapping[str, Any]) -> Example:
    """An example from the row of a dataset: `question`, `sql`, and `database` as a file; `id`, `evidence` and `engine`
    may be left out. Or from a row of `row_of`.
    """
    if isinstance(record := row.get("record"), str):
        try:
            return from_dict(Example, json.loads(record))
        except (ValueError, RecursionError):
            raise DataError("the row's field 'record' is none that row_of made") from None
    texts = {name: row.get(name, "") for name in ("question", "sql", "database", "id", "evidence", "engine")}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    missing = [name for name in ("question", "sql", "database") if not texts[name]]
    if wrong or missing:
        raise DataError(
            f"the row's field {(wrong + missing)[0]!r} is missing or is no text",
            "A row has the texts question, sql and database (a file).",
        )
    path = texts["database"]
    engine = texts["engine"] or engine_of_file(Path(path)) or "sqlite"
    if engine not in DIALECTS:
        raise DataError(f"there is no engine {engine!r}", f"There are: {', '.join(DIALECTS)}.")
    name = path.rsplit("/", 1)[-1].partition(".")[0]
    database = Database(id=name, engine=engine, location=path)
    return Example(texts["id"] or texts["question"], texts["question"], database, texts["sql"], texts["evidence"])


def asked_question(
    asked: Mapping[str, Any], questions: Callable[[str], list[Example]], databases: Path | None
) -> Example:
    """The question that a server's client asks for: `{"pool": NAME, "index": NUMBER}` of the pools that `questions`
    gives, or a row with question, sql and database.

    A row's database is a file of the folder `databases`. None refuses rows: a client could read any database that the
    server can.
    """
    if "pool" in asked:
        pool, index = asked["pool"], asked.get("index", 0)
        if not isinstance(pool, str) or not isinstance(index, int):
            raise DataError("a question is named by its pool (a text) and its index (a whole number)")
        examples = questions(pool)
        if not 0 <= index < len(examples):
            raise DataError(f"the pool {pool!r} has no question {index}", f"It has {len(examples)}, from 0 on.")
        return examples[index]
    if databases is None:
        hint = "Ask by pool and index, or start it with --database FOLDER."
        raise DataError("this server takes no rows of its clients", hint)
    if not isinstance(name := asked.get("database"), str) or "record" in asked:
        raise DataError("the row's field 'database' is missing or is no text")
    try:
        folder = databases.resolve()
        file = (folder / name).resolve()
        is_there = file.is_relative_to(folder) and file.is_file()
    except (ValueError, OSError, RuntimeError):  # a name no file bears: NUL, 300 characters, a ring of links
        is_there = False
    if not is_there:
        raise DataError(f"there is no database {name[:100]!r} in the server's folder")
    return example_of({**asked, "database": str(file)})
