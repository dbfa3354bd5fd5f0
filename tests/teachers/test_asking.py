"""What is paid for is kept: whatever stalls, stops or ends the asking, an answer that came is not bought again."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from teacher_server import TeacherServer
from teacher_world import kept

from pipelines.core.errors import BoundaryError, ResourceError
from pipelines.core.types import Message
from pipelines.endpoints import limits
from pipelines.endpoints.asking import Asker
from pipelines.endpoints.client import Endpoint, within


def asker_of(server: TeacherServer, folder: Path, concurrency: int = 8, **settings: Any) -> Asker:
    return Asker(Endpoint(base_url=server.url, model="m", **settings), "teacher", folder / "responses", concurrency)


def cases(count: int) -> list[tuple[Message, ...]]:
    return [(("user", f"question {number}"),) for number in range(count)]


def echo(messages: list[dict[str, str]]) -> str:
    return f"answer to {messages[-1]['content']}"


def test_a_pause_longer_than_the_time_out_throws_no_answer_away(tmp_path: Path, servers: Any) -> None:
    """A starved or suspended process finds its answers in the sockets when it wakes, with all timers due."""
    server = servers(echo, latency_s=0.3)
    asker = asker_of(server, tmp_path, timeout_s=1.0)

    async def scene() -> list[Any]:
        asked = asyncio.create_task(asker.ask_all_async(cases(8)))
        while len(server.seeds) < 8:
            await asyncio.sleep(0.01)
        time.sleep(2.0)
        return await asked

    assert [one.text for one in asyncio.run(scene())] == [f"answer to question {n}" for n in range(8)]
    assert set(server.delivered.values()) == {1}


def test_a_starved_process_looks_at_what_came_before_it_gives_up() -> None:
    """Every slice of the time-out runs the loop, however long the process was kept from it."""

    async def answer() -> str:
        for _ in range(8):
            time.sleep(0.05)  # somebody else has the processor
            await asyncio.sleep(0)
        return "whole"

    async def never() -> None:
        await asyncio.sleep(60)

    assert asyncio.run(within(answer(), 0.2)) == "whole"  # 0.4 s by the clock
    with pytest.raises(TimeoutError):
        asyncio.run(within(never(), 0.2))


def test_what_is_on_its_way_when_a_run_is_stopped_is_kept(tmp_path: Path, servers: Any) -> None:
    server = servers(echo, latency_s=0.5)
    asker = asker_of(server, tmp_path)

    async def scene() -> None:
        asked = asyncio.create_task(asker.ask_all_async(cases(20)))
        while len(server.seeds) < 8:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(scene())
    assert len(kept(tmp_path)) == sum(server.delivered.values()) == len(server.seeds) == 8
    asker.ask_all(cases(20))
    assert set(server.delivered.values()) == {1}
    assert len(server.delivered) == 20


def test_the_cap_of_one_keeps_the_answers_of_all(tmp_path: Path, servers: Any) -> None:
    server = servers(echo, latency_s=0.1)
    asker = asker_of(server, tmp_path, cap_tokens=1500, extra={"max_tokens": 150})  # each takes some 25
    with pytest.raises(ResourceError, match=r"has used 1\d\d\d tokens; its cap is 1500"):
        asker.ask_all(cases(400))
    assert len(kept(tmp_path)) == sum(server.delivered.values()) == len(server.seeds) > 40


def test_a_request_that_always_fails_is_reported_after_the_others_are_kept(
    tmp_path: Path, servers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FIRST_DELAY_S", 0.01)
    server = servers(echo)
    server.sick = "question 3"
    asker = asker_of(server, tmp_path, retries=2)
    with pytest.raises(BoundaryError, match=r"1 of 10 requests failed.*Run again"):
        asker.ask_all(cases(10))
    assert len(kept(tmp_path)) == 9
    server.sick = None
    assert [one.text for one in asker.ask_all(cases(10)) if one] == [f"answer to question {n}" for n in range(10)]
    assert (set(server.delivered.values()), len(server.delivered)) == ({1}, 10)


def test_two_who_share_an_endpoint_close_it_one_after_the_other(tmp_path: Path, servers: Any) -> None:
    """The first closes while the second still waits: nothing is lost, and nothing asked again."""
    server = servers(echo, latency_s=0.2)
    asker = asker_of(server, tmp_path)

    async def scene() -> list[Any]:
        long = asyncio.create_task(asker.ask_all_async(cases(20)))
        await asyncio.sleep(0.1)
        await asker.connection.close()
        return await long

    assert [one.text for one in asyncio.run(scene())] == [f"answer to question {n}" for n in range(20)]
    assert set(server.delivered.values()) == {1}
