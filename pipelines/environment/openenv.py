"""The environment as an OpenEnv server, and its client.

uvicorn.run(app("skyrl_sql"), port=8000)

async with SqlClient(base_url="http://localhost:8000") as client:
    result = await client.reset(pool="rl", index=0)
    while not result.done:
        result = await client.step(AgentTurn(text=my_model(result.observation.messages)))
"""

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment as OpenEnvironment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
from pydantic import Field

from pipelines.core.types import Example
from pipelines.environment.core import ChatMessages, Environment, Session, asked_question, shared


class AgentTurn(Action):  # type: ignore[misc]
    text: str


class SqlObservation(Observation):  # type: ignore[misc]
    """The whole conversation, so that any chat model can go on from it."""

    messages: ChatMessages = Field(default_factory=list)
    stop: list[str] = Field(default_factory=list)  # texts after which the agent's turn ends.
    info: dict[str, Any] = Field(default_factory=dict)  # an ended episode's, see `core.StepResult`.


class SqlEnvironment(OpenEnvironment):  # type: ignore[misc]
    """One episode at a time; all share the SQL workers of one environment. Questions are those of `asked_question`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self, environment: Environment, questions: Callable[[str], list[Example]], databases: Path | None
    ) -> None:
        super().__init__()
        self._environment = environment
        self._questions = questions
        self._databases = databases
        self._session: Session | None = None
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **asked: Any) -> SqlObservation:
        """Begin an episode on the question that the client asks for; without one, on question `seed` of pool `rl`."""
        if not asked:
            index = (seed or 0) % len(self._questions("rl"))
            asked = {"pool": "rl", "index": index}
        example = asked_question(asked, self._questions, self._databases)
        self._session = self._environment.reset(example)
        self._state = State(episode_id=episode_id, step_count=0)
        return SqlObservation(messages=self._session.messages, stop=list(self._session.stop))

    def step(self, action: AgentTurn, timeout_s: float | None = None, **_: Any) -> SqlObservation:
        if self._session is None:
            raise ValueError("reset comes first")
        step = self._session.step(action.text)
        self._state.step_count += 1
        messages: ChatMessages = []
        if not step.done:
            messages = self._session.messages
        return SqlObservation(
            messages=messages,
            stop=list(self._session.stop),
            done=step.done,
            reward=step.reward,
            info=dict(step.info),
        )

    async def step_async(self, action: AgentTurn, timeout_s: float | None = None, **more: Any) -> SqlObservation:
        return await asyncio.to_thread(self.step, action, timeout_s, **more)

    @property
    def state(self) -> State:
        return self._state


class SqlClient(EnvClient[AgentTurn, SqlObservation, State]):  # type: ignore[misc]
    def _step_payload(self, action: AgentTurn) -> dict[str, Any]:
        return {"text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[SqlObservation]:
        outcome = {"done": payload.get("done", False), "reward": payload.get("reward")}
        fields = payload.get("observation", {})
        observation = SqlObservation(**fields, **outcome)
        return StepResult(observation=observation, **outcome)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)


def app(
    recipe: str,
    overrides: Sequence[str] = (),
    databases: Path | None = None,
    sessions: int = 64,
    idle_s: float = 600.0,
    workers: int = 2,
) -> Any:
    """The ASGI application.

    Args:
        databases: the folder whose files clients' own rows may name; None gives out the recipe's questions alone.
        sessions: episodes at a time; one whose client is silent for `idle_s` is ended.
    """
    environment = shared(recipe, tuple(overrides), workers)
    questions = functools.cache(environment.questions)
    limits = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=idle_s)
    return create_app(
        lambda: SqlEnvironment(environment, questions, databases),
        AgentTurn,
        SqlObservation,
        "sqltrain",
        concurrency_config=limits,
    )
