"""200,000 executions: memory stays flat, in the worker and in its parent, and nothing is left behind."""

import os
import threading
from pathlib import Path

import pytest

from pipelines.core.types import Database
from pipelines.sql.engine import Limits, Pair, SqlEngine

EXECUTIONS = 200_000
ROUND = 5_000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def resident_kb(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_memory_is_flat_over_200000_executions(shop: Database) -> None:
    before, threads, descriptors = children(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    early: tuple[int, ...] = ()
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
