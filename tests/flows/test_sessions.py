"""`sqltrain environment serve`: real HTTP clients, fifty episodes at once, and clients that vanish."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from flows.sessions import EpisodeLimits, Sessions
from pipelines.core.processes import free_port
from pipelines.core.types import Example
from pipelines.environment.core import Environment, QuestionPools
from pipelines.serving.access import Access

pytestmark = pytest.mark.services
SMALL = ("data.rl=[{kind: miniature, split: train, options: {databases: 5, questions: 10}}]",)
LOOK = "<think>a</think>\n<sql>SELECT 1 AS one</sql>"


def answer(sql: str) -> str:
    return f"<think>a</think>\n<solution>{sql}</solution>"


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    with Environment("skyrl_sql", SMALL, workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def questions(environment: Environment) -> list[Example]:
    return environment.questions("rl")


@contextmanager
def served(environment: Environment, limits: EpisodeLimits, keys: dict[str, str] | None = None) -> Iterator[str]:
    import uvicorn

    port = free_port()
    app = Sessions(environment, QuestionPools(environment, None), Access(keys or {}), limits).app()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def test_fifty_episodes_at_once_get_the_rewards_of_our_sessions(
    environment: Environment, questions: list[Example]
) -> None:
    plans = [[LOOK, answer(q.gold_sql if place % 2 else "SELECT 'no'")] for place, q in enumerate(questions)]
    expected: list[tuple[str | None, float | None]] = []
    for question, turns in zip(questions, plans, strict=True):
        session = environment.reset(question)
        steps = [session.step(text) for text in turns]
        expected.append((steps[0].observation, steps[1].reward))

    async def episode(client: httpx.AsyncClient, index: int) -> tuple[str | None, float | None]:
        begun = (await client.post("/sessions", json={"pool": "rl", "index": index})).json()
        assert questions[index].question in begun["messages"][-1]["content"]
        steps = []
        for text in plans[index]:
            reply = await client.post(f"/sessions/{begun['id']}/step", json={"text": text})
            assert reply.status_code == 200
            steps.append(reply.json())
        assert [step["done"] for step in steps] == [False, True]
        assert steps[1]["info"]["correct"] == (steps[1]["reward"] == 1.0)
        return steps[0]["observation"], steps[1]["reward"]

    async def all_of_them(address: str) -> list[tuple[str | None, float | None]]:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=60) as client:
            assert (await client.get("/pools/rl")).json() == {"questions": 50}
            done = await asyncio.gather(*(episode(client, index) for index in range(50)))
            assert (await client.get("/health")).json() == {"status": "ok", "sessions": 0}
            return done

    with served(environment, EpisodeLimits()) as address:
        assert asyncio.run(all_of_them(address)) == expected


def test_what_a_silent_client_began_is_ended_and_gives_its_place_free(environment: Environment) -> None:
    with served(environment, EpisodeLimits(sessions=1, idle_s=0.4)) as address:
        with httpx.Client(base_url=address) as gone:
            id = gone.post("/sessions", json={"pool": "rl", "index": 0}).json()["id"]
            refused = gone.post("/sessions", json={"pool": "rl", "index": 1})
            assert refused.status_code == 429
            assert "Retry-After" in refused.headers
        with httpx.Client(base_url=address) as other:
            while other.get("/health").json()["sessions"]:
                time.sleep(0.05)
            assert other.post(f"/sessions/{id}/step", json={"text": LOOK}).status_code == 404
            assert other.post("/sessions", json={"pool": "rl", "index": 1}).status_code == 201


def test_an_episode_is_its_users_alone_and_a_key_is_asked_for(environment: Environment) -> None:
    keys = {"ann": "a" * 16, "bob": "b" * 16}
    with served(environment, EpisodeLimits(), keys) as address, httpx.Client(base_url=address) as client:

        def ask(key: str, method: str, path: str, **body: Any) -> httpx.Response:
            return client.request(method, path, headers={"Authorization": f"Bearer {key}"}, json=body)

        assert client.get("/health").status_code == 401
        id = ask(keys["ann"], "POST", "/sessions", pool="rl", index=0).json()["id"]
        assert ask(keys["bob"], "POST", f"/sessions/{id}/step", text=LOOK).status_code == 404
        assert ask(keys["bob"], "DELETE", f"/sessions/{id}").status_code == 404
        assert ask(keys["ann"], "DELETE", f"/sessions/{id}").status_code == 204
        assert ask(keys["ann"], "POST", f"/sessions/{id}/step", text=LOOK).status_code == 404


def test_a_bad_request_is_told_and_harms_nothing(environment: Environment) -> None:
    with served(environment, EpisodeLimits()) as address, httpx.Client(base_url=address) as client:
        begin = {"pool": "rl", "index": 0}
        id = client.post("/sessions", json=begin).json()["id"]
        wrong: list[tuple[str, dict[str, Any], int]] = [
            ("/sessions", {"json": {"pool": "rl", "index": 50}}, 400),
            ("/sessions", {"json": {"question": "q", "sql": "SELECT 1", "database": "/etc/passwd"}}, 400),
            ("/sessions", {"json": [1]}, 400),
            ("/sessions", {"content": "{", "headers": {"content-type": "application/json"}}, 400),
            ("/sessions", {"data": {"pool": "rl"}}, 415),
            ("/sessions", {"json": begin, "headers": {"origin": "http://other.example"}}, 403),
            ("/sessions", {"json": begin, "headers": {"host": "other.example"}}, 403),
            (f"/sessions/{id}/step", {"json": {"text": 3}}, 400),
            (f"/sessions/{id}/step", {"json": {"text": "a" * 5_000_000}}, 413),
        ]
        for path, request, status in wrong:
            assert client.post(path, **request).status_code == status, (path, request)
        assert client.get("/pools/none").status_code == 400
        assert client.get("/health").json()["sessions"] == 1
        assert client.post(f"/sessions/{id}/step", json={"text": LOOK}).json()["observation"]
