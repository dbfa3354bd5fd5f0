"""Retry, breaker, rates and caps, with a clock of our own."""

import asyncio
import time
from email.utils import formatdate

import httpx
import openai
import pytest

from pipelines.core.errors import RecipeError, ResourceError
from pipelines.endpoints import limits
from pipelines.endpoints.client import Connection, ContextOverflow, Endpoint
from pipelines.endpoints.limits import Budget, Pace, Rate
from pipelines.endpoints.log import Spent


class Clock:
    now = 1000.0

    def __call__(self) -> float:
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
def test_retry_after_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert limits.retry_after(headers) == seconds


def test_retry_after_as_a_date_to_come() -> None:
    waits = limits.retry_after({"retry-after": formatdate(time.time() + 30, usegmt=True)})
    assert waits is not None
    assert 28 < waits <= 30


def test_delays_double_with_jitter_and_obey_the_server() -> None:
    assert all(0.25 <= limits.delay(0, None) <= 0.5 for _ in range(50))
    assert all(2.0 <= limits.delay(3, None) <= 4.0 for _ in range(50))
    assert all(30.0 <= limits.delay(20, None) <= 60.0 for _ in range(50))
    assert all(2.0 <= limits.delay(9, 2.0) <= 2.5 for _ in range(50))
    assert len({limits.delay(0, None) for _ in range(5)}) > 1


def test_a_breaker_lets_probes_through_and_gives_up_after_its_patience() -> None:
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


def test_who_waits_when_the_patience_ends_gives_up_though_a_probe_is_still_on_its_way() -> None:
    clock = Clock()
    breaker = limits.Breaker("teacher", patience_s=0.5, clock=clock)
    for _ in range(limits.TRIP):
        breaker.failed()

    async def scene() -> None:
        await breaker.admit()  # a probe that hangs
        waiting = asyncio.create_task(breaker.admit())
        await asyncio.sleep(0)
        clock.now += 0.6
        with pytest.raises(ResourceError, match="is down"):
            await waiting

    asyncio.run(scene())


def test_an_endpoint_that_was_down_for_hours_is_asked_again() -> None:
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

    async def scene() -> None:
        await breaker.admit()
        other = asyncio.create_task(breaker.admit())  # waits for what this probe brings
        await asyncio.sleep(0)
        breaker.worked()
        await other

    asyncio.run(scene())
    assert not breaker.open


def test_a_rate_is_never_exceeded_in_any_minute() -> None:
    clock = Clock()
    rate = Rate(600, clock)
    sent = []
    for _ in range(1500):
        clock.now += (wait := rate.take(1))
        sent.append(clock.now)
        assert wait < 0.2
    most = max(sum(start <= one < start + 60 for one in sent) for start in sent[::50])
    assert 590 <= most <= 600


def test_what_was_reserved_and_not_used_comes_back() -> None:
    clock = Clock()
    rate = Rate(6100, clock)  # 100 a second, and 100 at once
    assert rate.take(100) == 0.0
    assert rate.take(50) == pytest.approx(0.5)
    rate.level += 40
    assert rate.take(0) == pytest.approx(0.1)
    assert Rate(None).take(10**9) == 0.0


def test_a_budget_counts_what_is_on_its_way_at_its_most() -> None:
    spent = Spent()
    budget = Budget("t", spent, cap_tokens=100)

    async def scene() -> None:
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


def test_a_pause_that_a_server_asks_for_holds_those_who_wait_for_their_rate_too() -> None:
    async def run() -> float:
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
def test_a_conversation_that_is_too_long_is_not_sent_again(status: int) -> None:
    """llama.cpp says it with a 500."""
    connection = Connection(Endpoint(base_url="http://localhost:1/v1", model="m"), "teacher")
    said = {"error": {"message": "the request exceeds the available context size"}}
    response = httpx.Response(status, json=said, request=httpx.Request("POST", "http://localhost:1/v1"))
    error = openai.APIStatusError(said["error"]["message"], response=response, body=said["error"])

    async def send(_: object) -> None:
        raise error

    async def scene() -> None:
        for _ in range(limits.TRIP + 1):
            with pytest.raises(ContextOverflow):
                await connection.ask(send)
        await connection.close()

    asyncio.run(scene())
    assert not connection._breaker.open


def test_a_cap_on_the_cost_needs_a_price() -> None:
    with pytest.raises(RecipeError, match="cap_cost bounds nothing without a price"):
        Endpoint(base_url="http://localhost:1/v1", model="m", cap_cost=50.0)
    assert Endpoint(base_url="http://localhost:1/v1", model="m", cap_cost=50.0, price_out=1.0).cap_cost == 50.0


def test_the_spend_cap_in_a_currency() -> None:
    budget = Budget("t", Spent(1, 2_000_000, 500_000), price_in=3.0, price_out=10.0)
    assert budget.cost(2_000_000, 500_000) == pytest.approx(11.0)
    capped = Budget("t", Spent(1, 2_000_000, 500_000), cap_cost=11.5, price_in=3.0, price_out=10.0, currency="EUR")
    asyncio.run(capped.reserve((100_000, 20_000)))  # 0.3 + 0.2: just fits
    capped.in_flight.remove((100_000, 20_000))
    with pytest.raises(ResourceError, match=r"11\.00 of 11\.50 EUR"):
        asyncio.run(capped.reserve((100_000, 20_001)))
