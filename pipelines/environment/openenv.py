"""The environment as an OpenEnv server, and its client.

uvicorn.run(app("skyrl_sql"), port=8000)

async with SqlClient(base_url="http://localhost:8000") as client:
result = await client.reset(pool="rl", index=0)
while not result.done:
result = await client.step(Turn(text=my_model(result.observation.messages)))
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment as OpenEnvironment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State
from pydantic import Field

from pipelines.environment.core import Environment, Messages, QuestionPools, Session, shared


class AgentTurn(Action):  # type: ignore[misc]
    """The agent's turn, as text."""

    text: str


class Seen(Observation):  # type: ignore[misc]
    """What the agent sees: the whole conversation, so that any chat model can go on from it."""

    messages: Messages = Field(default_factory=list)
    stop: list[str] = Field(default_factory=list)  # texts after which the agent's turn ends.
    info: dict[str, Any] = Field(default_factory=dict)  # of an ended episode; see `Step.info`.


class SqlEnvironment(OpenEnvironment):  # type: ignore[misc]
    """One episode at a time; all share the SQL workers of one environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, environment: Environment, asked: QuestionPools) -> None:
        super().__init__()
        self._environment, self._asked = environment, asked
        self._session: Session | None = None
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **asked: Any) -> Seen:
        """Begin an episode on the question that `Asked.example` finds; without one, on question `seed` of pool `rl`."""
        asked = asked or {"pool": "rl", "index": (seed or 0) % len(self._asked.pool("rl"))}
        self._session = self._environment.reset(self._asked.example(asked))
        self._state = State(episode_id=episode_id, step_count=0)
        return Seen(messages=self._session.messages, stop=list(self._session.stop))

    def step(self, action: AgentTurn, timeout_s: float | None = None, **_: Any) -> Seen:
        """Take the agent's turn; SQL has the recipe's own time limit."""
        if self._session is None:
            raise ValueError("reset comes first")
        step = self._session.step(action.text)
        self._state.step_count += 1
        return Seen(
            messages=[] if step.done else self._session.messages,
            stop=list(self._session.stop),
            done=step.done,
            reward=step.reward,
            info=dict(step.info),
        )

    async def step_async(self, action: AgentTurn, timeout_s: float | None = None, **more: Any) -> Seen:
        """As `step`, beside other episodes."""
        return await asyncio.to_thread(self.step, action, timeout_s, **more)

    @property
    def state(self) -> State:
        """The episode's id and how many turns it has."""
        return self._state


class SqlClient(EnvClient[AgentTurn, Seen, State]):  # type: ignore[misc]
    """The client of `app`."""

    def _step_payload(self, action: AgentTurn) -> dict[str, Any]:
        return {"text": action.text}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Seen]:
        outcome = {"done": payload.get("done", False), "reward": payload.get("reward")}
        return StepResult(observation=Seen(**payload.get("observation", {}), **outcome), **outcome)

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
        sessions: episodes at a time.
        idle_s: after which the episode of a client that has gone silent is ended.
    """
    environment = shared(recipe, tuple(overrides), workers)
    asked = QuestionPools(environment, databases)
    limits = ConcurrencyConfig(max_concurrent_envs=sessions, session_timeout=idle_s)
    return create_app(
        lambda: SqlEnvironment(environment, asked), AgentTurn, Seen, "sqltrain", concurrency_config=limits
    )
