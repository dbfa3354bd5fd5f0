"""The environment for TRL's GRPOTrainer: a class whose methods are the agent's tools.

    trainer = GRPOTrainer(model, args=settings, train_dataset=rows, environment_factory=tools("mtir_sql"))

Each row of the dataset has the fields that `example_of` reads; a `prompt` may be left out. The agent's answer is a tool
call, for TRL does not show its environments what the agent says besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipelines.core.types import Action, ActionKind
from pipelines.environment.core import Environment, Session, StepResult, example_of

# The prompt names these tools, and no tags; the answer ends the task, as the prompt says.
NATIVE = (
    "protocol.name=tool_call",
    "protocol.prompt=native",
    "protocol.options={}",
    "protocol.returns_failed_answers=false",
)
UNSEEN = "The reasoning stays with the agent."  # a protocol may demand some
OPENING = "<tool_response>\n"
CLOSING = "\n</tool_response>"


def tools(recipe: str, overrides: Sequence[str] = (), workers: int = 1) -> Callable[[], SqlTools]:
    """The `environment_factory` of a trainer: all episodes share one pool of SQL workers."""
    environment = Environment(recipe, [*overrides, *NATIVE], workers)
    return lambda: SqlTools(environment)


class SqlTools:
    """One episode at a time. TRL gives the agent every public method but `reset` and `get_reward` as a tool."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._session: Session | None = None
        self._last: StepResult | None = None

    def reset(self, **row: Any) -> str:
        """Begin an episode on a row of the dataset; its prompt is appended to the last message of the row's."""
        self._session = self._environment.reset(example_of(row))
        self._last = None
        texts = [message["content"] for message in self._session.messages]
        return "\n\n".join(texts)

    def execute_sql_query(self, sql: str) -> str:
        """Run one read-only SQL query and return its column names and first records.

        Args:
            sql: The SQL query to run

        Returns:
            The records as JSON, or the database's error message
        """
        return self._take(ActionKind.SQL, sql)

    def answer(self, sql: str) -> str:
        """Give the final SQL query. It ends the task.

        Args:
            sql: The final SQL query

        Returns:
            A word that the answer was taken
        """
        return self._take(ActionKind.SOLUTION, sql)

    def get_reward(self) -> float | None:
        """The recipe's reward of the episode; None for a broken one, which TRL leaves out of its group."""
        if self._last is None or not self._last.done:
            assert self._session is not None, "reset comes first"
            self._last = self._session.give_up()
        return self._last.reward

    def _take(self, kind: ActionKind, sql: str) -> str:
        assert self._session is not None, "reset comes first"
        try:
            text = self._environment.protocol.write(Action(kind, sql.strip(), UNSEEN))
        except ValueError:  # the protocol cannot say it: a malformed turn
            text = sql
        self._last = self._session.step(text)
        observation = self._last.observation or "The answer was taken."
        return observation.removeprefix(OPENING).removesuffix(CLOSING)
