"""Running statements: what comes back, in what order, and what happens when a worker dies, hangs or is let go."""

import asyncio
import json
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shops import build_shop

from pipelines.core.errors import DatabaseError, ResourceError
from pipelines.core.types import ExecutionStatus
from pipelines.sql import engine as sql_engine
from pipelines.sql.audit import MAX_OLD_FILES, AuditEntry, AuditLog
from pipelines.sql.engine import Limits, Pair, SqlEngine
from tests.fakes import build_database
from tests.services.conftest import wait_for
from tests.sql.servers import is_alive

LONG_ROWS = 5_000_000
LONG = f"""WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT {LONG_ROWS}) SELECT count(*) FROM c"""
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


def children():
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_rows_come_in_order_with_their_names_and_duplicates(run):
    result = run("SELECT city, city AS city, 1 + 1 FROM customer ORDER BY id DESC")
    assert result.status is ExecutionStatus.OK
    assert (result.columns, result.truncated) == (("city", "city", "1 + 1"), False)
    assert result.rows == (("Rome", "Rome", 2), ("Paris", "Paris", 2), ("Oslo", "Oslo", 2), ("Paris", "Paris", 2))
    assert result.elapsed_ms > 0
    assert run("SELECT value FROM json_each('[3,4]')").rows == ((3,), (4,))


def test_full_text_tables_can_be_searched(engine, tmp_path):
    made = "CREATE VIRTUAL TABLE note USING fts5(body); INSERT INTO note VALUES ('a red pen'), ('blue ink')"
    database = build_database(tmp_path / "texts.sqlite", made)
    (result,) = engine.execute_many([(database, "SELECT body FROM note WHERE note MATCH 'pen'")])
    assert result.rows == (("a red pen",),)


def test_fewer_rows_can_be_asked_for_and_results_keep_the_order_of_jobs(engine, shop, tmp_path):
    for most in (3, 4):
        (result,) = engine.execute_many([(shop, "SELECT id FROM customer")], max_rows=most)
        assert (result.rows, result.truncated) == (((1,), (2,), (3,), (4,))[:most], most < 4)
    others = [build_shop(tmp_path / f"{n}.sqlite") for n in range(5)]
    jobs = [((shop, *others)[n % 6], f"SELECT {n}") for n in range(500)]
    with SqlEngine(Limits(timeout_s=5), workers=3) as engine:
        assert [result.rows for result in engine.execute_many(jobs)] == [((n,),) for n in range(500)]


def test_a_changed_file_is_seen(engine, tmp_path):
    database = build_shop(tmp_path / "changing.sqlite")
    count = [(database, "SELECT count(*) FROM customer")]
    assert engine.execute_many(count)[0].rows == ((4,),)
    build_database(database.location, "DELETE FROM customer WHERE id > 1")
    assert engine.execute_many(count)[0].rows == ((1,),)
    (tmp_path / "changing.sqlite").unlink()
    build_shop(database.location)
    assert engine.execute_many(count)[0].rows == ((4,),)


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_jobs_behind_a_long_statement_do_not_wait(shop):
    with SqlEngine(Limits(timeout_s=5), workers=1) as engine:

        async def main():
            slow = asyncio.create_task(engine.execute(shop, ENDLESS))
            quick = [asyncio.create_task(engine.execute(shop, f"SELECT {n}")) for n in range(200)]
            assert [(await task).rows for task in quick] == [((n,),) for n in range(200)]
            assert not slow.done()
            assert (await slow).status is ExecutionStatus.TIMEOUT

        asyncio.run(main())


def test_an_engine_serves_event_loops_blocking_callers_and_one_who_leaves(engine, shop):
    for n in range(3):
        assert asyncio.run(engine.execute(shop, f"SELECT {n}")).rows == ((n,),)
        assert engine.execute_many([(shop, f"SELECT {n}")])[0].rows == ((n,),)

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.execute(shop, ENDLESS), 0.05)
        assert (await engine.execute(shop, "SELECT 1")).rows == ((1,),)

    asyncio.run(main())


def test_threads_and_event_loops_share_an_engine(engine, shop):
    wrong = []

    async def gathered(jobs):
        return await asyncio.gather(*(engine.execute(*job) for job in jobs))

    def ask(base):
        jobs = [(shop, f"SELECT {base + n}") for n in range(100)]
        results = asyncio.run(gathered(jobs)) if base < 2000 else engine.execute_many(jobs)
        wrong.extend(r for n, r in enumerate(results) if r.rows != ((base + n,),))

    threads = [threading.Thread(target=ask, args=(base,)) for base in (0, 1000, 2000, 3000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []


async def kill_the_busy(engine, phase=0):
    """Kill the worker that is in a long statement, as a crash of its engine would."""
    while True:
        await asyncio.sleep(0.01)
        workers = [worker for worker in engine._pools["sqlite"]._workers if worker is not None]
        alive = [worker for worker in workers if worker._process.poll() is None]
        at = {worker: worker.page.current() for worker in alive}
        busy = [worker for worker in alive if worker.page.work_of(at[worker][0]) > 2_000 and at[worker][1] == phase]
        if busy:
            os.kill(busy[0]._process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, busy[0]._process.pid, os.WEXITED | os.WNOWAIT)
            return


def test_a_killed_worker_is_replaced_and_its_query_runs_again(shop):
    with SqlEngine(Limits(timeout_s=20)) as engine:

        async def main():
            slow = asyncio.create_task(engine.execute(shop, LONG))
            behind = [asyncio.create_task(engine.execute(shop, f"SELECT {n}")) for n in range(50)]
            await kill_the_busy(engine)
            assert (await slow).rows == ((LONG_ROWS,),)
            assert [(await task).rows for task in behind] == [((n,),) for n in range(50)]

        asyncio.run(main())
        assert engine.execute_many([(shop, "SELECT 7")])[0].rows == ((7,),)


def test_a_query_that_ends_two_workers_is_to_blame_itself_and_a_gold_query_breaks_the_pair(shop):
    """A policy must not get out of being scored by a query that crashes its engine."""
    with SqlEngine(Limits(timeout_s=20)) as engine:

        async def ended(job, phase=0):
            task = asyncio.create_task(job)
            for _ in range(2):
                await kill_the_busy(engine, phase)
            return await task

        result = asyncio.run(ended(engine.execute(shop, ENDLESS)))
        assert (result.status, result.error_class) == (ExecutionStatus.ERROR, "worker_died")
        verdict = asyncio.run(ended(engine.decide(Pair(shop, "SELECT 1", ENDLESS), ["strict"]), phase=1))
        assert (verdict.predicted, verdict.error_class) == (ExecutionStatus.ERROR, "worker_died")
        assert (verdict.broken, verdict.scores) == (False, {"strict": 0.0})
        verdict = asyncio.run(ended(engine.decide(Pair(shop, ENDLESS, "SELECT 1"), ["strict"])))
        assert (verdict.broken, verdict.error_class) == (True, "worker_died")


def test_a_stopped_worker_is_killed_and_another_answers(shop):
    """It had not begun, so the statement is not to blame: a second worker gets it."""
    before = children()
    with SqlEngine(Limits(timeout_s=0.4)) as engine:
        engine.execute_many([(shop, "SELECT 1")])
        (pid,) = children() - before
        os.kill(pid, signal.SIGSTOP)  # its own timer cannot fire now
        start = time.monotonic()
        (result,) = engine.execute_many([(shop, "SELECT 1")])
        assert result.rows == ((1,),)
        assert time.monotonic() - start < 5
        assert pid not in children()
        assert engine.execute_many([(shop, "SELECT 2")])[0].rows == ((2,),)


def test_nothing_is_left_when_an_engine_is_closed(shop):
    before, threads = children(), threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        engine = SqlEngine(Limits(timeout_s=5), workers=2)
        engine.execute_many([(shop, f"SELECT {n}") for n in range(300)])
        assert threading.active_count() <= threads  # what an earlier test left may end meanwhile
        engine.close()
        engine.close()
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(DatabaseError, match="closed"):
        engine.execute_many([(shop, "SELECT 1")])
    with pytest.raises(DatabaseError, match="closed"):
        asyncio.run(asyncio.wait_for(engine.execute(shop, "SELECT 1"), 10))


def test_a_statement_of_the_tick_in_which_the_engine_closes_is_told(shop):
    engine = SqlEngine(Limits(timeout_s=20))

    async def main():
        statement = engine.begin(shop, "SELECT 1")
        engine.close()
        return await asyncio.wait_for(statement.result(), 10)

    assert asyncio.run(main()).status is ExecutionStatus.UNAVAILABLE


def test_two_event_loops_may_ask_at_the_same_moment(engine, shop, monkeypatch):
    """The second is switched out while it asks, from before the first sends what was asked until after its answer."""
    has_asked, is_asking, has_answer = threading.Event(), threading.Event(), threading.Event()
    make_task = sql_engine.Task

    def slow_task(*fields):
        if threading.current_thread().name == "second":
            is_asking.set()
            has_answer.wait(10)
        return make_task(*fields)

    async def first():
        running = engine.begin(shop, "SELECT 1")
        has_asked.set()
        is_asking.wait(10)
        result = await running.result()
        has_answer.set()
        return result

    async def second():
        has_asked.wait(10)
        return await asyncio.wait_for(engine.execute(shop, "SELECT 2"), 10)

    monkeypatch.setattr(sql_engine, "Task", slow_task)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1, initializer=name_thread, initargs=("second",)) as other:
        answers = [one.submit(lambda: asyncio.run(first())), other.submit(lambda: asyncio.run(second()))]
        assert [answer.result().rows for answer in answers] == [((1,),), ((2,),)]


def name_thread(name):
    threading.current_thread().name = name


def test_jobs_under_way_are_told_when_the_engine_closes(shop):
    engine = SqlEngine(Limits(timeout_s=20))

    async def main():
        slow = asyncio.create_task(engine.execute(shop, ENDLESS))
        await asyncio.sleep(0.1)
        engine.close()
        assert (await slow).status is ExecutionStatus.UNAVAILABLE

    asyncio.run(main())


def test_an_engine_that_is_forgotten_takes_its_workers_along(shop):
    before = children()
    engine = SqlEngine(Limits())
    engine.execute_many([(shop, "SELECT 1")])
    assert children() - before
    del engine
    assert children() == before


def test_workers_end_when_their_parent_is_killed(shop):
    code = f"""
import os
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.core.types import Database
engine = SqlEngine(Limits(timeout_s=1))
engine.execute_many([(Database("shop", "sqlite", {shop.location!r}), "SELECT 1")])
print(open(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read().split()[0], flush=True)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    wait_for(lambda: not is_alive(int(done.stdout)), 3, "the worker dies with its parent")


def test_a_worker_has_no_environment_and_can_write_no_file(shop):
    before = children()
    with SqlEngine(Limits()) as engine:
        engine.execute_many([(shop, "SELECT 1")])
        (pid,) = children() - before
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {item.partition(b"=")[0] for item in environment} <= {b"", b"PYTHONDONTWRITEBYTECODE", b"LC_CTYPE"}
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        assert next(line for line in limits if line.startswith("Max file size")).split()[3:5] == ["0", "0"]


def test_a_forked_child_may_not_use_its_parents_engine(engine, shop):
    engine.execute_many([(shop, "SELECT 1")])
    pid = os.fork()
    if pid == 0:
        try:
            engine.execute_many([(shop, "SELECT 1")])
        except DatabaseError:
            try:
                asyncio.run(asyncio.wait_for(engine.execute(shop, "SELECT 1"), 10))
            except DatabaseError:
                os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert engine.execute_many([(shop, "SELECT 3")])[0].rows == ((3,),)


EXECUTIONS = 200_000
ROUND = 5_000


def resident_kb(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_over_200000_executions(shop):
    before, threads, descriptors = children(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    early = ()
    with SqlEngine(Limits(timeout_s=5)) as engine:
        for start in range(0, EXECUTIONS, ROUND):
            jobs = [
                (shop, f"SELECT *, {n} FROM customer WHERE id <= {n % 5}" if n % 50 else f"SELECT nope{n}")
                for n in range(start, start + ROUND // 2)
            ]
            engine.execute_many(jobs)
            pairs = [Pair(shop, f"SELECT {n % 997}", f"SELECT {n}") for n in range(start, start + ROUND // 2)]
            engine.verdicts(pairs, ["strict", "bird", "test_suite"])
            workers = children() - before  # one, and a second where the machine was too busy for it for a while
            now = resident_kb(os.getpid()), max(map(resident_kb, workers))
            if start == EXECUTIONS // 4:
                early = now
        assert now[0] - early[0] < 4_000, (early, now)
        assert now[1] - early[1] < 4_000, (early, now)
    assert children() <= before  # what an earlier test left may end meanwhile
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_statement_leaves_a_line(shop, tmp_path):
    path = tmp_path / "log" / "audit.jsonl"
    with SqlEngine(Limits(timeout_s=5), audit=path) as engine:
        engine.execute_many([(shop, "SELECT id FROM customer"), (shop, "DROP TABLE customer")])
        asyncio.run(engine.execute(shop, "SELECT nope"))
        pair = Pair(shop, "SELECT 1", "SELECT 2")
        engine.verdicts([pair, pair], ["strict"])
        engine.verdicts([pair], ["strict"])
    lines = read(path)
    assert [(line["role"], line["sql"], line["outcome"], line["rows"]) for line in lines] == [
        ("query", "SELECT id FROM customer", "ok", 4),
        ("query", "DROP TABLE customer", "refused", 0),
        ("query", "SELECT nope", "error", 0),
        ("gold", "SELECT 1", "ok", 1),
        ("prediction", "SELECT 2", "ok", 1),
        ("prediction", "SELECT 2", "ok", 1),  # the gold result was kept
    ]
    assert (lines[0]["who"], lines[0]["database"]) == (pwd.getpwuid(os.getuid()).pw_name, "shop")
    assert lines[0]["ms"] > 0
    assert lines[2]["error_class"] == "no_such_column"
    assert lines[0]["at"].endswith("+00:00")


def test_no_log_is_kept_unless_it_is_asked_for(shop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with SqlEngine(Limits()) as engine:
        engine.execute_many([(shop, "SELECT 1")])
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_is_put_aside(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, max_bytes=300)
    for number in range(40):
        log.write([AuditEntry("shop", "sqlite", "query", f"SELECT {number}\n", 0.1, 1, "ok", None)])
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["audit.jsonl", *(f"audit.jsonl.{n}" for n in range(1, MAX_OLD_FILES + 1))]
    newest = [read(path)[-1], read(tmp_path / "audit.jsonl.1")[-1], read(tmp_path / "audit.jsonl.5")[-1]]
    numbers = [int(line["sql"].split()[1]) for line in newest]
    assert numbers[0] == 39
    assert numbers == sorted(numbers, reverse=True)


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="audit log"):
        AuditLog(tmp_path / "file" / "audit.jsonl").write([AuditEntry("a", "sqlite", "query", "b", 0, 0, "ok", None)])
