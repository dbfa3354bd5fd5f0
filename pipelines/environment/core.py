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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pipelines import recipes
from pipelines.config import Recipe
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.errors import DataError
from pipelines.protocols.base import build
from pipelines.registry import DIALECTS
from pipelines.rewards.outcome import make_outcomes
from pipelines.rewards.rubric import Rubric
from pipelines.rollout.env import Episode, EpisodeRequest, Rules
from pipelines.rollout.policies.base import Completion
from pipelines.sql.dialects.dialect import of_file
from pipelines.types import Database, Example, Outcome, StopReason, Trajectory

Messages = list[dict[str, str]]
POLICY = "outside"  # the name of the policy in the trajectories: the environment does not know what drives it


@dataclass(frozen=True)
class Step:
    """What a turn led to.

    Attributes:
        observation: the environment's answer, as the text of a user message; None when the episode is over.
        reward: the panel's sum on the full track when the episode is over; None before, and for a broken episode, which
            must be left out of its group and never counted as 0.
        done: whether the episode is over.
        info: after the last turn: `correct`, `broken`, `stop`, `turns`, `final_sql`, `by_term` and `by_track`.
    """

    observation: str | None
    reward: float | None
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Session:
    """One episode. Its turns follow one another: a step must end before the next one begins."""

    def __init__(self, environment: Environment, example: Example, episode: Episode) -> None:
        self._environment, self._episode = environment, episode
        self.example = example

    @property
    def messages(self) -> Messages:
        """The conversation so far, from the prompt on, as chat models take it."""
        return [{"role": role, "content": text} for role, text in self._episode.next_request().messages]

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts after which the agent's turn ends; they belong to the turn."""
        return self._episode.next_request().stop

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        return self._episode.done

    def step(self, text: str) -> Step:
        """Take the agent's turn. Blocks while its SQL runs.

        Raises:
            ValueError: the episode is over.
        """
        sql = self._accept(text)
        if not self._episode.done:
            result = None
            if sql is not None:
                (result,) = self._environment.sql.execute_many([(self.example.database, sql)], self._environment.rows)
            self._episode.observe(result)
        return self._answer()

    async def step_async(self, text: str) -> Step:
        """As `step`, inside a running event loop: the SQL of many sessions runs side by side."""
        sql = self._accept(text)
        if not self._episode.done:
            result = None
            if sql is not None:
                result = await self._environment.sql.execute(self.example.database, sql, self._environment.rows)
            self._episode.observe(result)
        return await asyncio.to_thread(self._answer) if self.done else self._answer()

    def _accept(self, text: str) -> str | None:
        if self.done:
            raise ValueError("the episode is over; begin another one with reset")
        ends = [place + len(mark) for mark in self.stop if (place := text.find(mark)) >= 0]
        return self._episode.accept(Completion(text[: min(ends, default=len(text))]))  # as a server would stop it

    def _answer(self) -> Step:
        if self.done:
            return self._environment.score(self._episode.trajectory(), self.example)
        return Step(self._episode.last_turn.observation, None, False)


class Environment:
    """Many episodes of one recipe over one pool of SQL workers. A context manager; sessions may run side by side.

    Args:
        recipe: a recipe, or its name or path; its protocol, its rewards and its limits hold.
        overrides: `key=value`, as on the command line.
        workers: processes that run SQL.
        max_turns: the turn cap; None takes the recipe's for training.

    Raises:
        RecipeError: no such recipe, or it pays nothing.
    """

    def __init__(
        self, recipe: Recipe | str, overrides: Sequence[str] = (), workers: int = 1, max_turns: int | None = None
    ) -> None:
        self.recipe = recipes.load(recipe, overrides) if isinstance(recipe, str) else recipe
        self.sql = sql_engine(self.recipe, workers)
        self.rows = self.recipe.protocol.observation_rows
        self._protocol = build(self.recipe.protocol)
        self._rubric = Rubric(self.recipe.rewards)
        cap = max_turns or self.recipe.protocol.max_turns
        self._rules = Rules(self._protocol, self.recipe.grpo.sampling, cap, self.recipe.protocol.forced_final)
        self.schema = schemas(self.recipe)  # of a database, read once
        self._begun = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the SQL workers."""
        self.sql.close()

    def reset(self, example: Example, sample: int = 0) -> Session:
        """Begin an episode on a question; its first messages are `session.messages`.

        Args:
            sample: the episode's index within the question's group.

        Raises:
            DatabaseError: the database cannot be read.
        """
        self._begun += 1
        prompt = self._protocol.prompt(example, self.schema(example.database), self._rules.max_turns)
        request = EpisodeRequest(example, sample, self.recipe.seed)
        return Session(self, example, Episode(request, self._rules, POLICY, f"session-{self._begun}", prompt, None))

    def score(self, trajectory: Trajectory, example: Example) -> Step:
        """The last step of an episode: its final SQL held against gold, and paid by the recipe's panel."""
        (outcome,) = make_outcomes(
            [trajectory],
            {example.id: example},
            self.sql,
            self.schema,
            self.recipe.execution.equality,
            self._rules.max_turns,
        )
        facts = _facts(outcome)
        if outcome.broken:
            return Step(None, None, True, facts)
        paid = self._rubric.score(outcome)
        return Step(None, paid.total, True, {**facts, "by_term": paid.by_term, "by_track": paid.by_track})


def _facts(outcome: Outcome) -> dict[str, Any]:
    trajectory = outcome.trajectory
    return {
        "correct": outcome.correct,
        "broken": outcome.broken,
        "stop": trajectory.stop.value,
        "failure": trajectory.failure if trajectory.stop is StopReason.BROKEN else None,
        "turns": len(trajectory.turns),
        "final_sql": trajectory.final_sql,
    }


def example_of(row: Mapping[str, Any]) -> Example:
    """An example from the row of a dataset: `question`, `sql`, and `database` as a file; `id`, `evidence` and `engine`
    may be left out.

    Raises:
        DataError: a field is missing or is no text.
    """
    texts = {name: row.get(name, "") for name in ("question", "sql", "database", "id", "evidence", "engine")}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    missing = [name for name in ("question", "sql", "database") if not texts[name]]
    if wrong or missing:
        raise DataError(
            f"the row's field {(wrong + missing)[0]!r} is missing or is no text",
            "A row has the texts question, sql and database (a file).",
        )
    path = texts["database"]
    engine = texts["engine"] or of_file(Path(path)) or "sqlite"
    if engine not in DIALECTS:
        raise DataError(f"there is no engine {engine!r}", f"There are: {', '.join(DIALECTS)}.")
    name = path.rsplit("/", 1)[-1].partition(".")[0]
    database = Database(id=name, engine=engine, location=path)
    return Example(texts["id"] or texts["question"], texts["question"], database, texts["sql"], texts["evidence"])
