"""The environment for verifiers: a taskset of a recipe's questions, and episodes in which our environment is the user.

verifiers finds a taskset by the name of a top-level module, so a project of your own has a file such as `my_sql.py`:

    from pipelines.environment.verifiers import SqlEnv, SqlTaskset

    __all__ = ["SqlEnv", "SqlTaskset"]
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from pipelines.environment.core import Environment, example_of, row_of, shared


class SqlConfig(vf.TasksetConfig):  # type: ignore[misc]
    recipe: str = "sql_trail"  # a recipe's name or path.
    # `key=value`, as on the command line.
    overrides: list[str] = []  # noqa: RUF012 - pydantic copies defaults
    pool: str = "rl"  # `sft`, `rl`, `dev`, or a benchmark of `data.test` by its name.
    workers: int = 1  # processes that run SQL.

    def environment(self) -> Environment:
        return shared(self.recipe, tuple(self.overrides), self.workers)


class SqlData(vf.TaskData):  # type: ignore[misc]
    """A question; `row` is what `example_of` reads."""

    row: dict[str, str]


class SqlTask(vf.Task[SqlData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A question. Its reward is the episode's."""


class SqlTaskset(vf.Taskset[SqlTask, SqlConfig]):  # type: ignore[misc]
    """The questions of a pool in the source's order, each with the recipe's prompt."""

    def load(self) -> Iterator[SqlTask]:
        environment = self.config.environment()
        for example in environment.questions(self.config.pool):
            messages = environment.reset(example).messages
            system = None
            if messages[0]["role"] == "system":
                system = messages.pop(0)["content"]
            prompt: Any = messages
            if len(messages) == 1:  # given as its text: not every harness takes a conversation
                prompt = messages[0]["content"]
            data = SqlData(id=example.id, row=row_of(example), prompt=prompt, system_prompt=system)
            yield SqlTask(data, self.config.task)


class SqlEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    # the agent only speaks, and needs no tools and no machine of its own
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class SqlEnv(vf.Env[SqlEnvConfig]):  # type: ignore[misc]
    """The agent's turns go to our environment, whose observations are the user's."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode and note its reward, `correct`, and the reward by term."""
        example = example_of(task.data.row)
        session = self.taskset.config.environment().reset(example)
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                last = await session.step_async(segment.last_reply)
                if last.observation is None:
                    break
                segment = await interaction.turn(last.observation)
        trace = interaction.trace
        if not trace.ok:  # the model or its harness failed: nothing to pay
            return
        if not session.done:
            last = await asyncio.to_thread(session.give_up)
        if last.reward is None:
            raise RuntimeError(f"the episode is broken ({last.info['failure']})")
        trace.record_reward("sqltrain", last.reward)
        trace.record_metrics({"correct": last.info["correct"], **last.info["by_term"]})
