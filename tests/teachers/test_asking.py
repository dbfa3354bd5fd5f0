"""What is paid for is kept in the log, whatever ends the asking; retry, breaker, rates and caps."""

import asyncio
import os
import re
import subprocess
import sys
import time
from email.utils import formatdate
from pathlib import Path

import httpx
import openai
import pytest
from teacher_world import kept

from pipelines.core.errors import BoundaryError, RecipeError, ResourceError
from pipelines.endpoints import limits
from pipelines.endpoints.asker import Asker, Budget
from pipelines.endpoints.client import Connection, Endpoint
from pipelines.endpoints.errors import ContextOverflow
from pipelines.endpoints.limits import Pace, Rate
from pipelines.endpoints.log import ResponseLog, Spent


def asker_of(server, folder, concurrency=8, **settings):
    return Asker(Endpoint(base_url=server.url, model="m", **settings), "teacher", folder / "responses", concurrency)


def cases(count):
    return [(("user", f"question {number}"),) for number in range(count)]


def echo(messages):
    return f"answer to {messages[-1]['content']}"


def test_a_pause_longer_than_the_time_out_throws_no_answer_away(tmp_path, servers):
    """A starved or suspended process finds its answers in the sockets when it wakes, with all timers due."""
    server = servers(echo, latency_s=0.3)
    asker = asker_of(server, tmp_path, timeout_s=1.0)

    async def scene():
        asked = asyncio.create_task(asker.ask_all_async(cases(8)))
        while len(server.seeds) < 8:
            await asyncio.sleep(0.01)
        time.sleep(2.0)
        return await asked

    assert [one.text for one in asyncio.run(scene())] == [f"answer to question {n}" for n in range(8)]
    assert set(server.delivered.values()) == {1}


def test_what_is_on_its_way_when_a_run_is_stopped_is_kept(tmp_path, servers):
    server = servers(echo, latency_s=0.5)
    asker = asker_of(server, tmp_path)

    async def scene():
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


def test_the_cap_of_one_keeps_the_answers_of_all(tmp_path, servers):
    server = servers(echo, latency_s=0.1)
    asker = asker_of(server, tmp_path, cap_tokens=1500, extra={"max_tokens": 150})  # each takes some 25
    with pytest.raises(ResourceError, match=r"has used 1\d\d\d tokens; its cap is 1500"):
        asker.ask_all(cases(400))
    assert len(kept(tmp_path)) == sum(server.delivered.values()) == len(server.seeds) > 40


def test_a_request_that_always_fails_is_reported_after_the_others_are_kept(tmp_path, servers, monkeypatch):
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


def test_two_who_share_an_endpoint_close_it_one_after_the_other(tmp_path, servers):
    """The first closes while the second still waits: nothing is lost, and nothing asked again."""
    server = servers(echo, latency_s=0.2)
    asker = asker_of(server, tmp_path)

    async def scene():
        long = asyncio.create_task(asker.ask_all_async(cases(20)))
        await asyncio.sleep(0.1)
        await asker.connection.close()
        return await long

    assert [one.text for one in asyncio.run(scene())] == [f"answer to question {n}" for n in range(20)]
    assert set(server.delivered.values()) == {1}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({}, None),
    ],
)
def test_retry_after_in_all_its_forms(headers, seconds):
    assert limits.retry_after(headers) == seconds
    assert 28 < limits.retry_after({"retry-after": formatdate(time.time() + 30, usegmt=True)}) <= 30


def test_delays_double_with_jitter_and_obey_the_server():
    assert all(0.25 <= limits.delay(0, None) <= 0.5 for _ in range(50))
    assert all(2.0 <= limits.delay(3, None) <= 4.0 for _ in range(50))
    assert all(30.0 <= limits.delay(20, None) <= 60.0 for _ in range(50))
    assert all(2.0 <= limits.delay(9, 2.0) <= 2.5 for _ in range(50))
    assert len({limits.delay(0, None) for _ in range(5)}) > 1


def test_a_breaker_lets_probes_through_and_gives_up_after_its_patience():
    clock = Clock()
    breaker = limits.Breaker("teacher", patience_s=100, clock=clock)
    for _ in range(limits.TRIP):
        assert not breaker.open
        breaker.failed()
    assert breaker.open
    asyncio.run(breaker.admit())  # the first probe
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(breaker.admit(), 0.05))  # everybody else waits
    clock.now += 1.1
    asyncio.run(breaker.admit())  # the next probe, a second later
    clock.now += 100
    asyncio.run(breaker.admit())  # the last one
    down = r"'teacher' is down: 17 requests failed in 101 s.*nothing that was answered"
    with pytest.raises(ResourceError, match=down):
        breaker.failed()
    with pytest.raises(ResourceError, match=down):
        asyncio.run(breaker.admit())
    breaker.worked()
    assert not breaker.open
    asyncio.run(breaker.admit())


def test_who_waits_when_the_patience_ends_gives_up_though_a_probe_is_still_on_its_way():
    clock = Clock()
    breaker = limits.Breaker("teacher", patience_s=0.5, clock=clock)
    for _ in range(limits.TRIP):
        breaker.failed()

    async def scene():
        await breaker.admit()  # a probe that hangs
        waiting = asyncio.create_task(breaker.admit())
        await asyncio.sleep(0)
        clock.now += 0.6
        with pytest.raises(ResourceError, match="is down"):
            await waiting

    asyncio.run(scene())


def test_an_endpoint_that_was_down_for_hours_is_asked_again():
    """`serve` and `mcp` live on: without another probe they would say that it is down until they are restarted."""
    clock = Clock()
    breaker = limits.Breaker("teacher", patience_s=100, clock=clock)
    for _ in range(limits.TRIP):
        breaker.failed()
        clock.now += 600
    for _ in range(3):
        asyncio.run(breaker.admit())  # it is time for a probe, whatever the patience
        with pytest.raises(ResourceError, match="is down"):
            breaker.failed()
        with pytest.raises(ResourceError, match="is down"):
            asyncio.run(breaker.admit())  # at once, until the next one
        clock.now += limits.MOST_DELAY_S

    async def scene():
        await breaker.admit()
        other = asyncio.create_task(breaker.admit())  # waits for what this probe brings
        await asyncio.sleep(0)
        breaker.worked()
        await other

    asyncio.run(scene())
    assert not breaker.open


def test_a_rate_is_never_exceeded_in_any_minute():
    clock = Clock()
    rate = Rate(600, clock)
    sent = []
    for _ in range(1500):
        clock.now += (wait := rate.take(1))
        sent.append(clock.now)
        assert wait < 0.2
    assert 590 <= max(sum(start <= one < start + 60 for one in sent) for start in sent[::50]) <= 600
    clock = Clock()
    rate = Rate(6100, clock)  # 100 a second, and 100 at once
    assert rate.take(100) == 0.0
    assert rate.take(50) == pytest.approx(0.5)
    rate.level += 40
    assert rate.take(0) == pytest.approx(0.1)
    assert Rate(None).take(10**9) == 0.0


def test_a_budget_counts_what_is_on_its_way_at_its_most():
    spent = Spent()
    budget = Budget("t", Endpoint(base_url="http://localhost:1/v1", model="m", cap_tokens=100), spent)

    async def scene():
        await budget.reserve((10, 50))
        waiting = asyncio.create_task(budget.reserve((10, 50)))  # 120 in all: it waits
        await asyncio.sleep(0.06)
        assert not waiting.done()
        spent.prompt_tokens, spent.completion_tokens = 10, 5  # the first took 15 of its 60
        budget.in_flight.remove((10, 50))
        await waiting
        budget.in_flight.remove((10, 50))
        spent.completion_tokens += 40
        with pytest.raises(ResourceError, match="has used 55 tokens; its cap is 100"):
            await budget.reserve((10, 50))

    asyncio.run(scene())


def test_a_pause_that_a_server_asks_for_holds_those_who_wait_for_their_rate_too():
    async def run():
        pace = Pace(Rate(600), Rate(None))
        started = time.monotonic()
        waiters = [asyncio.create_task(pace.admit(1)) for _ in range(14)]  # four wait for the rate
        await asyncio.sleep(0.05)
        pace.held_until = held_until = time.monotonic() + 1.0
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        late = [waiter for waiter in waiters if not waiter.done()]
        assert late
        await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        assert time.monotonic() >= held_until - 0.01
        await asyncio.gather(*waiters)
        return time.monotonic() - started

    assert 1.0 <= asyncio.run(run()) < 3.0


@pytest.mark.parametrize("status", [400, 500])
def test_a_conversation_that_is_too_long_is_not_sent_again(status):
    """llama.cpp says it with a 500."""
    connection = Connection(Endpoint(base_url="http://localhost:1/v1", model="m"), "teacher")
    said = {"error": {"message": "the request exceeds the available context size"}}
    response = httpx.Response(status, json=said, request=httpx.Request("POST", "http://localhost:1/v1"))
    error = openai.APIStatusError(said["error"]["message"], response=response, body=said["error"])

    async def send(_):
        raise error

    async def scene():
        for _ in range(limits.TRIP + 1):
            with pytest.raises(ContextOverflow):
                await connection.ask(send)
        await connection.close()

    asyncio.run(scene())
    assert not connection._breaker.open


def test_the_spend_cap_in_a_currency():
    priced = Endpoint(base_url="http://localhost:1/v1", model="m", price_in=3.0, price_out=10.0)
    assert Budget("t", priced, Spent(1, 2_000_000, 500_000)).cost(2_000_000, 500_000) == pytest.approx(11.0)
    in_euros = priced.model_copy(update={"cap_cost": 11.5, "currency": "EUR"})
    capped = Budget("t", in_euros, Spent(1, 2_000_000, 500_000))
    asyncio.run(capped.reserve((100_000, 20_000)))  # 0.3 + 0.2: just fits
    capped.in_flight.remove((100_000, 20_000))
    with pytest.raises(ResourceError, match=r"11\.00 of 11\.50 EUR"):
        asyncio.run(capped.reserve((100_000, 20_001)))
    with pytest.raises(RecipeError, match="cap_cost bounds nothing without a price"):
        Endpoint(base_url="http://localhost:1/v1", model="m", cap_cost=50.0)
    assert Endpoint(base_url="http://localhost:1/v1", model="m", cap_cost=50.0, price_out=1.0).cap_cost == 50.0


ROOT = Path(__file__).resolve().parents[2]
A, B = "a" * 32, "b" * 32


@pytest.fixture
def logs(tmp_path):
    """Two logs of the same file, as two processes have them."""
    made = [ResponseLog(tmp_path, "t"), ResponseLog(tmp_path, "t")]
    yield made
    for log in made:
        log.close()


def child(code, root):
    head = "import os, sys; from pathlib import Path; from pipelines.endpoints.log import ResponseLog\n"
    command = [sys.executable, "-c", f"{head}log = ResponseLog(Path(sys.argv[1]), 't')\n{code}", str(root)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_an_appended_answer_is_found_by_the_next_run(tmp_path):
    log = ResponseLog(tmp_path, "big/teacher")
    log.append(A, (30, 7), {"text": "é\nSELECT 1"})
    log.close()
    again = ResponseLog(tmp_path, "big/teacher")
    assert again.find(A) == {"text": "é\nSELECT 1"}
    assert again.find(B) is None
    assert (again.spent.requests, again.spent.tokens) == (1, 37)
    again.close()
    assert {path.name for path in tmp_path.iterdir() if path.stat().st_size} == {"big%2Fteacher.sqlite"}
    ResponseLog(tmp_path, "t").close()
    assert os.stat(tmp_path / "t.sqlite").st_mode & 0o777 == 0o600


def test_answers_of_another_process_count_after_refresh(logs):
    one, other = logs
    one.append(A, (1, 1), {"text": "x"})
    assert other.find(A) == {"text": "x"}
    other.refresh()
    assert other.spent.tokens == 2
    other.append(B, (2, 3), {"text": "y"})
    one.refresh()
    assert (one.spent.requests, one.spent.tokens) == (other.spent.requests, other.spent.tokens) == (2, 7)


def test_an_answer_that_was_paid_for_twice_counts_twice(logs):
    """On a file system without locks two machines may both buy it; the first answer is the one that is used."""
    logs[0].append(A, (1, 1), {"text": "x"})
    logs[1].append(A, (2, 2), {"text": "y"})
    assert logs[1].find(A) == {"text": "x"}
    assert logs[1].spent.tokens == 6


def test_a_process_killed_while_it_appends_leaves_whole_answers(tmp_path):
    """All answers that it reported are there, and at most the one that it was writing besides."""
    code = (
        "number = 0\nwhile True:\n"
        "    log.append(f'{number:032x}', (1, 1), {'text': 'x' * 100_000})\n"
        "    print(number, flush=True); number += 1"
    )
    for _ in range(3):
        with child(code, tmp_path) as writer:
            assert writer.stdout.readline() == b"0\n"
            writer.kill()
            # Not `communicate`, which would lose the lines that were read together with the first.
            reported = 1 + len(writer.stdout.read().splitlines())
        log = ResponseLog(tmp_path, "t")
        assert log.spent.requests in (reported, reported + 1)
        assert all(log.find(f"{number:032x}") == {"text": "x" * 100_000} for number in range(reported))
        log.append(B, (1, 1), {"text": "y"})
        log.close()
        log.path.unlink()


def test_the_first_process_pays_for_an_answer_and_the_others_wait(logs):
    bought = []

    async def ask(number):
        log = logs[number % 2]
        async with log.claim(A) as found:
            if found is None:
                bought.append(number)
                await asyncio.sleep(0.05)
                log.append(A, (1, 1), {"text": f"by {number}"})
                return f"by {number}"
            return str(found["text"])

    async def all_at_once():
        return await asyncio.gather(*(ask(number) for number in range(6)))

    assert asyncio.run(all_at_once()) == ["by 0"] * 6
    assert bought == [0]


def test_a_claim_ends_with_its_holder(tmp_path):
    holder = child(f"log.take('{A}'); print('held', flush=True)\nsys.stdin.read(); os._exit(9)", tmp_path)
    assert holder.stdout.readline() == b"held\n"
    log = ResponseLog(tmp_path, "t")
    assert not log.take(A)
    assert log.take(B)
    holder.communicate()
    assert log.take(A)
    log.close()


def test_a_file_that_is_shortened_or_not_a_log_is_refused_in_one_line(tmp_path):
    log = ResponseLog(tmp_path, "t")
    for number in range(100):
        log.append(f"{number:032x}", (1, 1), {"text": "x" * 1000})
    log.close()
    os.truncate(tmp_path / "t.sqlite", 12_288)
    with pytest.raises(ResourceError, match="cannot be used"):
        ResponseLog(tmp_path, "t").find(f"{99:032x}")
    (tmp_path / "t.sqlite").write_text("not a database, although its name says so\n" * 100)
    with pytest.raises(ResourceError, match=re.escape(f"{tmp_path / 't.sqlite'} cannot be used")):
        ResponseLog(tmp_path, "t")


def test_an_answer_that_finds_no_space_is_refused_in_one_line(logs):
    logs[0]._table.execute("PRAGMA max_page_count=4")
    with pytest.raises(ResourceError, match="no space left"):
        logs[0].append(A, (1, 1), {"text": "x" * 100_000})
