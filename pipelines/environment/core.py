"""The environment: a recipe's databases, protocol, user and judge in one noun, over one pool of SQL workers.

Training, difficulty, synthesis, evaluation and serving run their policies in it. For other people's trainers a
question becomes messages, a turn of text an observation, an answer a reward; whoever trains keeps its own tokens.

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
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pipelines.benchmarks import base
from pipelines.benchmarks.prompt_schema import NO_ENDPOINT, ValueIndex
from pipelines.core.errors import DataError, EndpointError, RecipeError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import (
    BadRow,
    Database,
    Example,
    ExecutionResult,
    Outcome,
    SchemaItems,
    StopReason,
    Trajectory,
    from_dict,
    gold_queries,
    history_field,
    to_dict,
)
from pipelines.databases.of_recipe import Link, schemas, sql_engine, with_prompt_facts
from pipelines.environment.session_user import Reply, SessionUser
from pipelines.evaluation import result_files
from pipelines.protocols.base import build_protocol
from pipelines.protocols.blocks import truncate_at_stop
from pipelines.recipe import recipes
from pipelines.recipe.config import ProtocolSection, Recipe, Sampling, Source
from pipelines.rewards.outcome import make_outcomes
from pipelines.rewards.panel import Rubric, endpoint_of
from pipelines.rollout.engine import RolloutEngine
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
from pipelines.rollout.policies.base import Completion, Policy
from pipelines.rollout.user import simulated_user
from pipelines.sql.dialects.dialect import engine_of_file
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.schema import Schemas

ChatMessages = list[dict[str, str]]
REQUIRED_TEXTS = ("question", "sql", "database")  # fields of a dataset's row
OPTIONAL_TEXTS = ("id", "evidence", "engine")
POLICY = "outside"  # the name of the policy in the trajectories: the environment does not know what drives it


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to a turn, and after the last one the episode's reward."""

    observation: str | None  # the text of a user message; None if the episode is over.
    # the panel's sum on the full track if the episode is over; None before, and for a broken episode, which must be
    # left out of its group and never counted as 0.
    reward: float | None
    done: bool
    # after the last turn: `correct`, `broken`, `stop`, `turns`, `final_sql`, `by_term` and `by_track`.
    info: Mapping[str, Any] = field(default_factory=dict)


class Session:
    """One episode. Its turns follow one another: a step must end before the next one begins."""

    def __init__(self, environment: Environment, example: Example, episode: Episode) -> None:
        self._environment = environment
        self._episode = episode
        self.example = example
        self._rows = environment.recipe.protocol.observation_rows  # rows that an observation shows
        self.stop = environment.protocol.stop  # texts after which the agent's turn ends; they belong to the turn
        self._driver = episode.play()
        self._due = next(self._driver)

    @property
    def messages(self) -> ChatMessages:
        """The conversation so far, from the prompt on, as chat models take it."""
        request = self._episode.next_request()
        return [{"role": role, "content": text} for role, text in request.messages]

    @property
    def done(self) -> bool:
        return self._episode.stop is not None

    def step(self, text: str) -> StepResult:
        """Take the agent's turn, and block while its SQL runs. After the last turn: ValueError."""
        sql = self._environment.sql
        due = self._accept(text)
        while isinstance(due, SqlRequest | UserRequest):
            if isinstance(due, UserRequest):
                user = self._environment.user
                self._show(user.ask(self.example, due.questions, self._episode.sample))
            else:
                time.sleep(due.delay_s)
                (result,) = sql.execute_many([(self.example.database, due.sql)], self._rows)
                self._advance(self._explained(result, due.sql))
            due = self._due
        return self._result()

    async def step_async(self, text: str) -> StepResult:
        """As `step`, inside a running event loop: the SQL of many sessions runs side by side."""
        sql = self._environment.sql
        due = self._accept(text)
        while isinstance(due, SqlRequest | UserRequest):
            if isinstance(due, UserRequest):
                user = self._environment.user
                self._show(await user.ask_async(self.example, due.questions, self._episode.sample))
            else:
                if due.attempt:
                    await asyncio.sleep(due.delay_s)
                result = await sql.execute(self.example.database, due.sql, self._rows)
                self._advance(self._explained(result, due.sql))
            due = self._due
        if self.done:  # the answer is judged, which blocks
            return await asyncio.to_thread(self._result)
        return self._result()

    def give_up(self) -> StepResult:
        """End the episode of an agent that ends early: it is paid as one whose turns are empty up to the cap."""
        step = self.step("")
        while not step.done:
            step = self.step("")
        return step

    def _explained(self, result: ExecutionResult, sql: str) -> ExecutionResult:
        environment = self._environment
        return environment.rules.explained(result, sql, self.example.database, environment.schema)

    def _accept(self, text: str) -> DriverRequest | EpisodeEvent:
        if self.done:
            raise ValueError("the episode is over; begin another one with reset")
        # A server would stop the turn here too: at the first stop string outside a thinking block.
        protocol = self._environment.protocol
        turn = truncate_at_stop(text, self.stop)
        while len(turn) < len(text) and protocol.is_thinking(turn):
            rest = text[len(turn) :]
            turn += truncate_at_stop(rest, self.stop)
        return self._advance(Completion(turn))

    def _advance(self, answer: Completion | ExecutionResult | str) -> DriverRequest | EpisodeEvent:
        self._due = self._driver.send(answer)
        while isinstance(self._due, TurnEvent | ResultEvent):
            self._due = next(self._driver)
        return self._due

    def _show(self, reply: Reply) -> None:
        """Show the user's reply to the agent; an endpoint that failed breaks the episode."""
        if isinstance(reply, EndpointError):
            self._due = self._driver.throw(reply)
        else:
            self._advance(reply)

    def _result(self) -> StepResult:
        """The turn's observation; after the last turn the final SQL held against gold, and paid by the panel."""
        if not isinstance(self._due, EndEvent):
            return StepResult(self._episode.turns[-1].observation, None, False)
        trajectory = self._due.trajectory
        environment = self._environment
        rubric = environment.rubric
        max_turns = environment.rules.max_turns
        (outcome,) = environment.judge([trajectory], [self.example], rubric.reads, max_turns=max_turns)
        failure = None
        if trajectory.stop is StopReason.BROKEN:
            failure = trajectory.failure
        info: dict[str, Any] = {
            "correct": outcome.correct,
            "broken": outcome.broken,
            "stop": trajectory.stop.value,
            "failure": failure,
            "turns": len(trajectory.turns),
            "final_sql": trajectory.final_sql,
        }
        if outcome.broken:
            return StepResult(None, None, True, info)
        rewards = rubric.score(outcome)
        info["by_term"] = rewards.by_term
        info["by_track"] = rewards.by_track
        return StepResult(None, rewards.total, True, info)


@dataclass(frozen=True)
class RolloutMode:
    """The sampling and the turn cap of a policy's episodes."""

    sampling: Sampling  # how tokens are drawn, and how many at most
    max_turns: int  # the turn cap T; 0 forces an answer in the first turn
    protocol: ProtocolSection | None = None  # the protocol; None for the recipe's own

    @classmethod
    def training(cls, recipe: Recipe) -> Self:
        """The mode of GRPO's episodes."""
        return cls(recipe.grpo.sampling, recipe.protocol.max_turns)

    @classmethod
    def difficulty(cls, recipe: Recipe) -> Self:
        """The mode in which questions are scored by their pass rate."""
        return cls(recipe.difficulty.sampling, recipe.protocol.max_turns)

    @classmethod
    def served(cls, recipe: Recipe) -> Self:
        """The greedy mode with the turns of an evaluation, so that a served answer is the one that was measured."""
        return cls(recipe.evaluation.sampling, recipe.protocol.max_turns_eval).greedy()

    def greedy(self) -> Self:
        """The same with the likeliest tokens."""
        sampling = self.sampling.model_copy(update={"temperature": 0.0})
        return replace(self, sampling=sampling)


class Environment(contextlib.ExitStack):
    """A recipe's databases, protocol, simulated user and judge, composed once.

    Policies of ours run in it (`run`, `judge`); other people's trainers drive sessions, which may run side by side
    (`questions`, `reset`). `close`, or the end of a `with`, ends its SQL workers.

    Args:
        recipe: a recipe, or the name or path of one for sessions (`session_recipe`); its protocol, its rewards and its
            limits hold.
        workers: processes that run SQL; None takes the recipe's.
        evaluates: whether the recipe's turn cap of evaluation holds for sessions, and not that of training.
        sql: a sandbox that its owner closes, in place of one of its own.
        schema: the schema of a database as prompts show it, in place of the recipe's reading.
        responses: the folder of the logs of endpoints' answers; None keeps no answer of a simulated user.

    Raises:
        RecipeError: no such recipe, or, for sessions, it pays nothing or asks an endpoint as linker or judge.
    """

    def __init__(
        self,
        recipe: Recipe | str,
        overrides: Sequence[str] = (),
        workers: int | None = 1,
        evaluates: bool = False,
        *,
        sql: SqlEngine | None = None,
        schema: Schemas | None = None,
        responses: Path | None = None,
    ) -> None:
        super().__init__()
        if isinstance(recipe, str):
            recipe = session_recipe(recipe, overrides)
        self.recipe = recipe
        if sql is None:
            sql = sql_engine(recipe, workers)
            self.callback(sql.close)
        self.sql = sql
        if schema is None:
            schema = schemas(recipe)
        self.schema = schema
        self.protocol = build_protocol(recipe.protocol)
        self.responses = responses
        max_turns = recipe.protocol.max_turns
        if evaluates:
            max_turns = recipe.protocol.max_turns_eval
        self.rules = Rules(self.protocol, recipe.grpo.sampling, max_turns, recipe.protocol.forced_final)
        self._indices: dict[Database, ValueIndex] = {}
        self._begun = 0  # sessions
        self._user: SessionUser | None = None
        self._user_lock = threading.Lock()  # sessions may ask their first questions at once

    @functools.cached_property
    def rubric(self) -> Rubric:
        """The panel of the recipe's rewards."""
        return Rubric(self.recipe.rewards)

    @property
    def user(self) -> SessionUser:
        """The simulated user, who answers what the agents of sessions ask."""
        with self._user_lock:
            if self._user is None:
                user = simulated_user(self.protocol, self.responses)
                self._user = SessionUser(user, self.protocol)
                self.callback(self._user.close)
            return self._user

    # Episodes of a policy of ours.

    def prepare(
        self,
        examples: Sequence[Example],
        link: Link | None = None,
        *,
        sql: SqlEngine | None = None,
        is_served: bool = False,
    ) -> list[Example]:
        """Add the facts that the recipe's prompts show of each question (`with_prompt_facts`).

        Args:
            sql: another sandbox than the environment's, for a thread of its own.
        """
        if sql is None:
            sql = self.sql
        return with_prompt_facts(examples, self.recipe, self.schema, sql, link, self._indices, is_served)

    def engine(self, policy: Policy, mode: RolloutMode) -> RolloutEngine:
        """Runs episodes with a policy that is asked in one way."""
        protocol = self.protocol
        if mode.protocol is not None:
            protocol = build_protocol(mode.protocol)
        user = simulated_user(protocol, self.responses)
        return RolloutEngine(policy, protocol, self.sql, mode.sampling, mode.max_turns, self.schema, user)

    def run(self, policy: Policy, requests: Sequence[EpisodeRequest], mode: RolloutMode) -> list[Trajectory]:
        """The trajectories of episodes, in the order of their requests."""
        return self.engine(policy, mode).run(requests)

    def judge(
        self,
        trajectories: Sequence[Trajectory],
        examples: Iterable[Example],
        reads: Collection[str] = (),
        gold_schemas: Mapping[str, SchemaItems] | None = None,
        max_turns: int | None = None,
    ) -> list[Outcome]:
        """One outcome a trajectory, in order, by the equality that training decides by (`make_outcomes`).

        Args:
            examples: those that the trajectories answer, at least.
            reads: the analyses that the outcomes hold.
            max_turns: the turn cap of the episodes; None for that of training.
        """
        by_id = {example.id: example for example in examples}
        equality = self.recipe.execution.equality
        if max_turns is None:
            max_turns = self.recipe.protocol.max_turns
        return make_outcomes(trajectories, by_id, self.sql, self.schema, equality, max_turns, gold_schemas, reads)

    # Sessions of other people's trainers.

    def questions(self, pool: str) -> list[Example]:
        """The questions of a pool (`sft`, `rl`, `dev`, or a benchmark of `data.test` by its name), ready for `reset`,
        with what the recipe's prompt shows of them. They are read, and their gold SQL is not checked.
        """
        require_sessions(self.recipe)
        data = self.recipe.data
        pools: dict[str, tuple[Source, ...]] = {"sft": (data.sft,), "rl": data.rl, "dev": (data.dev,)}
        for benchmark in data.test:
            pools[benchmark.name] = (benchmark,)
        if pool not in pools:
            raise DataError(f"the recipe has no pool {pool!r}", f"There are: {', '.join(pools)}.")
        folder = tempfile.TemporaryDirectory(prefix="sqltrain-environment-")  # links to databases
        root = Path(self.enter_context(folder))
        examples: list[Example] = []
        for source in pools[pool]:
            examples += base.read(source, self.recipe.seed, root).examples
        return self.prepare(base.resolve_locations(examples, root), is_served=True)

    def reset(self, example: Example, sample: int = 0) -> Session:
        """Begin an episode on a question: the `sample`-th of its group."""
        require_sessions(self.recipe)
        self._begun += 1
        context = example.prompt_context
        if context.values is None and context.linked_schema is None:
            with sql_engine(self.recipe, 1) as sql:  # sessions may begin in other threads
                (example,) = self.prepare([example], sql=sql, is_served=True)
        prompt = self.rules.prompt(example, self.schema(example.database))
        request = EpisodeRequest(example, sample, self.recipe.seed)
        name = f"session-{self._begun}"
        episode = Episode(request, self.rules, POLICY, name, prompt, codec=None)
        return Session(self, example, episode)

    def equalities(self, pool: str) -> tuple[str, ...]:
        """The equalities under which answers to a pool's questions are evaluated, the headline's first."""
        recipe = self.recipe
        if pool in {source.name for source in recipe.data.test}:
            equalities = recipe.on(pool).equalities
            if equalities:
                return equalities
        return tuple(dict.fromkeys((recipe.execution.equality, *recipe.evaluation.equalities)))

    def verdicts(self, example: Example, sql: str | None, equalities: Sequence[str]) -> dict[str, float] | None:
        """The score of an answer under each equality, in [0, 1]; None if the database, or the gold SQL, failed."""
        pair = Pair.of(example, sql)
        (verdict,) = result_files.verdicts([example], [pair], equalities, self.sql)
        if verdict.broken:
            return None
        return dict(verdict.scores)


def session_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by its name or path, for sessions.

    Raises:
        RecipeError: no such recipe, or sessions cannot do what it asks for.
    """
    recipe = recipes.load(name, overrides)
    require_sessions(recipe)
    return recipe


def require_sessions(recipe: Recipe) -> None:
    """Refuse what a session cannot do: it asks no endpoint but the user's."""
    if recipe.data.linker not in NO_ENDPOINT:
        reason = f"the environment asks no linker ({recipe.data.linker})"
        raise RecipeError(reason, "Set data.linker=local, gold or null.")
    judge = endpoint_of(recipe.rewards)
    if judge is not None:
        raise RecipeError(f"the environment asks no judge ({judge})", "Set rewards.judge.options.by=static.")


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
    """An example from the row of a dataset: `question`, `sql`, and `database` as a file; `id`, `evidence`, `engine`,
    `history` and `gold_sqls` (further right queries) may be left out. Or from a row of `row_of`.
    """
    record = row.get("record")
    if isinstance(record, str):
        try:
            return from_dict(Example, json.loads(record))
        except (ValueError, RecursionError):
            raise DataError("the row's field 'record' was not written by row_of()") from None
    texts = {name: row.get(name, "") for name in (*REQUIRED_TEXTS, *OPTIONAL_TEXTS)}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    wrong += [name for name in REQUIRED_TEXTS if not texts[name]]
    if wrong:
        hint = "A row has the texts question, sql and database (a file)."
        raise DataError(f"the row's field {wrong[0]!r} is missing or is no text", hint)
    try:
        _, meta = gold_queries(row, "sql")
        if row.get("history"):
            meta["history"] = history_field(row)
    except BadRow as error:
        raise DataError(f"a row cannot be read: {error.detail}") from None
    path = texts["database"]
    engine = texts["engine"] or engine_of_file(Path(path)) or "sqlite"
    if engine not in DIALECTS:
        raise DataError(f"there is no engine {engine!r}", f"There are: {', '.join(DIALECTS)}.")
    file_name = path.rpartition("/")[2]
    database_id = file_name.partition(".")[0]
    database = Database(id=database_id, engine=engine, location=path)
    row_id = texts["id"] or texts["question"]
    return Example(row_id, texts["question"], database, texts["sql"], texts["evidence"], meta=meta)


def asked_question(
    asked: Mapping[str, Any], questions: Callable[[str], list[Example]], databases: Path | None
) -> Example:
    """The question that a server's client asks for: `{"pool": NAME, "index": NUMBER}` of the pools that `questions`
    gives, or a row with question, sql and database.

    A row's database is a file of the folder `databases`. None refuses rows: a client could read any database that the
    server can.
    """
    if "pool" in asked:
        pool = asked["pool"]
        index = asked.get("index")
        if not isinstance(pool, str) or not isinstance(index, int):
            raise DataError("a question is named by its pool (a text) and its index (a whole number)")
        examples = questions(pool)
        if not 0 <= index < len(examples):
            raise DataError(f"the pool {pool!r} has no question {index}", f"It has {len(examples)}, from 0 on.")
        return examples[index]
    if databases is None:
        hint = "Ask by pool and index, or start it with --database FOLDER."
        raise DataError("this server takes no rows of its clients", hint)
    name = asked.get("database")
    if not isinstance(name, str) or "record" in asked:
        raise DataError("the row's field 'database' is missing or is no text")
    try:
        folder = databases.resolve()
        file = (folder / name).resolve()
        is_inside = file.is_relative_to(folder) and file.is_file()
    except (ValueError, OSError, RuntimeError):  # a name no file bears: NUL, 300 characters, a ring of links
        is_inside = False
    if not is_inside:
        raise DataError(f"there is no database {name[:100]!r} in the server's folder")
    return example_of({**asked, "database": str(file)})
