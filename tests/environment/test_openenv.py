"""Our environment as an OpenEnv server, with OpenEnv's own client: the same rewards on the same turns."""

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipelines.core.processes import free_port
from pipelines.environment.core import Environment

pytest.importorskip("openenv")
pytestmark = pytest.mark.services

SMALL = ("data.rl=[{kind: miniature, split: train, options: {databases: 2, questions: 4}}]",)


@pytest.fixture(scope="module")
def address():
    import uvicorn

    from pipelines.environment.openenv import app

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app("skyrl_sql", SMALL), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_many_clients_get_the_rewards_that_our_sessions_give(address):
    from pipelines.environment.openenv import AgentTurn, SqlClient

    look = "<think>a</think>\n<sql>SELECT 1 AS one</sql>"

    async def episode(index, turns):
        async with SqlClient(base_url=address) as client:
            result = await client.reset(pool="rl", index=index)
            seen = [result.observation.messages[-1]["content"]]
            for text in turns:
                result = await client.step(AgentTurn(text=text))
                seen += [message["content"] for message in result.observation.messages[-1:]]
            assert result.done
            assert result.observation.info["correct"] == (result.reward == 1.0)
            return seen, result.reward

    with Environment("skyrl_sql", SMALL) as environment:
        plans, expected = [], []
        for index, question in enumerate(environment.questions("rl")):
            sql = question.gold_sql if index % 2 else "SELECT 'no'"
            plans.append((index, [look, f"<think>a</think>\n<solution>{sql}</solution>"]))
            session = environment.reset(question)
            seen = [session.messages[-1]["content"]]
            steps = [session.step(text) for text in plans[-1][1]]
            expected.append(([*seen, steps[0].observation], steps[-1].reward))

    async def all_of_them():
        return await asyncio.gather(*(episode(*plan) for plan in plans))

    assert asyncio.run(all_of_them()) == expected


def test_openenvs_own_validator_passes_the_server(address):
    command = [str(Path(sys.executable).with_name("openenv")), "validate", "--url", address, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"], report
