"""The work of a statement: counted by SQLite's virtual machine, the same in every run, and known while it runs."""

import asyncio
import math

import pytest

from pipelines.core.types import ExecutionStatus
from pipelines.sql.engine import Limits, RunningStatement, SqlEngine
from pipelines.sql.sandbox.pool import Task
from tests.fakes import engine_fixture

engine = engine_fixture(timeout_s=20)
COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT count(*) FROM n"
LONG, ENDLESS = COUNT.format(3_000_000), COUNT.format(10**12)


def test_work_is_that_of_the_statement_alone(engine, shop):
    """The same number whatever ran before, in whatever batch, in another process; ten times the rows, ten times it."""
    small, large = COUNT.format(50_000), COUNT.format(500_000)
    first = [one.work for one in engine.execute_many([(shop, sql) for sql in (small, large, small, "SELECT 1")])]
    again = [one.work for one in engine.execute_many([(shop, sql) for sql in ("SELECT 1", large, small, small)])]
    with SqlEngine(Limits(timeout_s=20), workers=1) as other:
        alone = other.execute_many([(shop, small)])[0].work
    assert first[0] == first[2] == again[2] == again[3] == alone > 0
    assert first[1] == again[1] == pytest.approx(10 * first[0], rel=0.05)
    assert first[3] == again[0] == 0  # less than five thousand steps


def test_work_is_known_while_it_runs_and_never_too_much(engine, shop):
    async def follow():
        query = engine.begin(shop, LONG)
        task, seen = asyncio.create_task(query.result()), []
        while not task.done():
            await asyncio.sleep(0.005)
            seen.append(query.work())
        return [*seen, (await task).work]

    seen = asyncio.run(follow())
    assert seen == sorted(seen)
    assert any(0 < one < seen[-1] for one in seen)


def test_the_work_of_a_statement_never_decreases():
    """A worker that has gone on to the next job shows 0 for the one before, whose answer is still to be read."""
    shown = iter([3, 6, 0, 0])
    task = Task((), lambda tag, reply: None, None)
    task.work = lambda: next(shown)

    async def look():
        query = RunningStatement(task, asyncio.get_running_loop().create_future(), lambda reply: reply)
        return [query.work() for _ in range(4)]

    assert asyncio.run(look()) == [3, 6, 6, 6]


def test_what_the_clock_ended_has_no_end(shop):
    async def run(engine):
        query = engine.begin(shop, ENDLESS)
        return (await query.result()).status, query.work()

    with SqlEngine(Limits(timeout_s=0.3), workers=1) as engine:
        assert asyncio.run(run(engine)) == (ExecutionStatus.TIMEOUT, math.inf)


def test_a_long_statement_holds_back_no_answer_before_it(engine, shop):
    async def race():
        short, long = engine.begin(shop, "SELECT 1"), engine.begin(shop, ENDLESS)
        running = asyncio.create_task(long.result())
        await asyncio.wait_for(short.result(), 10)
        assert not running.done()

    asyncio.run(race())


def test_a_worker_that_was_slow_and_idle_is_not_taken_for_stuck(shop):
    """After a long statement and a pause longer than the limit, what is sent next is neither ended nor given help."""
    long = COUNT.format(1_000_000)  # past what makes a worker stuck

    async def again(engine):
        first = await engine.begin(shop, long).result()
        (pool,) = engine._pools.values()
        assert pool._workers[0] is not None
        pool._workers[0].answered_at -= 4  # a pause longer than the limit
        queries = [engine.begin(shop, f"SELECT {n}") for n in range(50)]
        await asyncio.sleep(0)
        engine._pump()  # a tick before the worker has begun
        return [first.status, *[(await query.result()).status for query in queries]]

    with SqlEngine(Limits(timeout_s=3), workers=1) as engine:
        assert set(asyncio.run(again(engine))) == {ExecutionStatus.OK}
        (pool,) = engine._pools.values()
        assert sum(worker is not None for worker in pool._workers) == 1
