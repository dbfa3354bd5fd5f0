"""Throughput of the SQL engine beside raw `sqlite3` in one process, on the same queries.

    python benchmarks/scoring.py [--spider DIR] [--skip bike_1] [--passes 7]

Every pass runs statements that no pass ran before (a comment numbers them), so that each is prepared anew on both
sides. Figures are the median of the passes, raw and ours taking turns, in statements or verdicts a second. One core is
used (the process pins itself and so its workers), but for the last part, where two workers have two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.sql.compare import EQUALITIES
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.types import Database

Work = list[tuple[Database, str, str]]  # database, gold SQL, predicted SQL
ONE_PASS_EQUALITIES = [name for name in EQUALITIES if name != "r_ves"]


def spider_work(folder: Path, skipped: Sequence[str]) -> Work:
    """Every question of a Spider folder; predicted is its gold query, or for each third another of its database."""
    questions = [row for name in ("train.json", "dev.json") for row in json.loads((folder / name).read_text())]
    questions = [row for row in questions if row["db_id"] not in skipped]
    by_database: dict[str, list[str]] = {}
    for row in questions:
        by_database.setdefault(row["db_id"], []).append(row["query"])
    rng = random.Random(0)
    work = []
    for number, row in enumerate(questions):
        name = row["db_id"]
        predicted = rng.choice(by_database[name]) if number % 3 == 0 else row["query"]
        work.append(
            (Database(name, "sqlite", str(folder / "database" / name / f"{name}.sqlite")), row["query"], predicted)
        )
    return work


class Raw:
    """What anybody would write: connections kept open, execute, fetchall."""

    def __init__(self) -> None:
        self._open: dict[str, sqlite3.Connection] = {}

    def run(self, database: Database, sql: str) -> None:
        connection = self._open.get(database.location)
        if connection is None:
            connection = self._open[database.location] = sqlite3.connect(f"file:{database.location}?mode=ro", uri=True)
        connection.execute(sql).fetchall()

    def run_all(self, jobs: Sequence[tuple[Database, str]]) -> None:
        for database, sql in jobs:
            self.run(database, sql)


class Bench:
    """Times passes, each on statements of its own."""

    def __init__(self, work: Work, passes: int) -> None:
        self._work = work
        self._passes = passes
        self._pass = 0

    def _numbered(self, gold: bool = True) -> Work:
        self._pass += 1
        mark = f" -- {self._pass}"
        return [(db, g + mark if gold else g, p + mark + "p") for db, g, p in self._work]

    def rates(self, *runners: Callable[[Work], None], gold: bool = True) -> list[float]:
        """Items a second of each runner, the median over passes; they take turns, so that a busy machine slows all."""
        times: list[list[float]] = [[] for _ in runners]
        for _ in range(self._passes):
            for own, runner in zip(times, runners, strict=True):
                work = self._numbered(gold)
                start = time.perf_counter()
                runner(work)
                own.append(time.perf_counter() - start)
        return [len(self._work) / statistics.median(own) for own in times]


def judge(engine: SqlEngine, equalities: Sequence[str]) -> Callable[[Work], None]:
    def run(work: Work) -> None:
        verdicts = engine.judge_many([Pair(*item) for item in work], equalities)
        assert not any(verdict.broken for verdict in verdicts)

    return run


def show(name: str, rate: float, raw: float) -> None:
    print(f"{name:<58}{rate:>10,.0f} /s{rate / raw:>8.0%} of raw")


def one_core(bench: Bench) -> None:
    """Statements and verdicts on one core."""
    raw = Raw()
    with SqlEngine(Limits()) as engine:

        def execute(work: Work) -> None:
            engine.execute_many([(db, sql) for db, sql, _ in work])

        ours_rate, raw_rate = bench.rates(execute, lambda work: raw.run_all([(db, sql) for db, sql, _ in work]))
        show("raw sqlite3: execute and fetch", raw_rate, raw_rate)
        show("ours: the same in the sandbox, rows handed back", ours_rate, raw_rate)

        def both(work: Work) -> None:
            raw.run_all([(db, sql) for db, gold, predicted in work for sql in (gold, predicted)])

        runners = [judge(engine, [name]) for name in ONE_PASS_EQUALITIES] + [judge(engine, ONE_PASS_EQUALITIES)]
        *rates, all_rate, raw_pairs = bench.rates(*runners, both)
        show("raw sqlite3: gold and prediction, nothing compared", raw_pairs, raw_pairs)
        for name, rate in zip(ONE_PASS_EQUALITIES, rates, strict=True):
            show(f"ours: verdicts, gold cold: {name}", rate, raw_pairs)
        show("ours: verdicts, gold cold: all equalities at once", all_rate, raw_pairs)
        print(f"{'':<4}all at once cost {statistics.median(rates) / all_rate:.2f} times as much as one")
        warm, raw_pairs = bench.rates(judge(engine, ["strict"]), both, gold=False)
        show("ours: verdicts, gold warm: strict", warm, raw_pairs)


def two_cores(bench: Bench, cores: Sequence[int]) -> None:
    """The gain of a second worker on a second core; the parent shares the two with them, as it does in production."""
    os.sched_setaffinity(0, cores)
    with SqlEngine(Limits(), workers=1) as one, SqlEngine(Limits(), workers=2) as two:
        single, double = bench.rates(judge(one, ["strict"]), judge(two, ["strict"]))
    print(f"{'ours: verdicts, two workers on two cores':<58}{double:>10,.0f} /s{double / single:>7.2f}x of one worker")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    parser.add_argument("--spider", type=Path, default=shared / "spider")
    parser.add_argument(
        "--skip", nargs="*", default=["bike_1"], help="databases left out (bike_1: queries of half a second)"
    )
    parser.add_argument("--passes", type=int, default=7)
    options = parser.parse_args()
    work = spider_work(options.spider, options.skip)
    cores = sorted(os.sched_getaffinity(0))
    print(f"{len(work)} questions of {options.spider.name}, {options.passes} passes, SQLite {sqlite3.sqlite_version}")
    os.sched_setaffinity(0, cores[:1])
    one_core(Bench(work, options.passes))
    if len(cores) > 1:
        two_cores(Bench(work, options.passes), cores[:2])


if __name__ == "__main__":
    main()
