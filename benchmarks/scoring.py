"""Throughput of the SQL engine beside raw `sqlite3` in one process, on the same queries.

    python benchmarks/scoring.py [--spider DIR] [--skip bike_1] [--files dev.json] [--times 8] [--passes 7] [--markdown]

Every statement is one that was never run before (a comment numbers it), so that each is prepared anew on both sides,
also where a benchmark asks for the same query twice; raw and ours take turns. The figures for one core are work per
second of processor time, this process and its workers together: what one idle core does in a second of wall clock, also
when other processes are at work beside it. The gain of a second core is in wall clock, and needs two idle cores to
show. Figures are medians of the passes.
"""

import argparse
import json
import os
import random
import sqlite3
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import Database
from pipelines.sql.engine import Limits, Pair, SqlEngine

Work = list[tuple[Database, str, str]]  # database, gold SQL, predicted SQL
Clock = Callable[[], float]
APART = ("timed", "by_file", "by_outcome")  # traits of equalities that do not compare the results of two queries
COMPARED = [
    name for name in EQUALITIES if name != "proved" and not any(getattr(EQUALITIES[name], trait) for trait in APART)
]


def spider_work(folder: Path, skipped: Sequence[str], files: Sequence[str]) -> Work:
    """Every question of a Spider folder; predicted is its gold query, or for each third another of its database."""
    questions = [row for name in files for row in json.loads((folder / name).read_text())]
    questions = [row for row in questions if row["db_id"] not in skipped]
    by_database: dict[str, list[str]] = {}
    for row in questions:
        by_database.setdefault(row["db_id"], []).append(row["query"])
    rng = random.Random(0)
    work = []
    for number, row in enumerate(questions):
        name, gold = row["db_id"], row["query"]
        predicted = rng.choice(by_database[name]) if number % 3 == 0 else gold
        work.append((Database(name, "sqlite", str(folder / "database" / name / f"{name}.sqlite")), gold, predicted))
    return work


def processor_seconds() -> float:
    """Processor time of this process and of its children so far."""
    total = time.process_time()
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return total


class Raw:
    """What anybody would write: connections kept open, execute, fetchall."""

    def __init__(self) -> None:
        self._open: dict[str, sqlite3.Connection] = {}

    def run_all(self, jobs: Sequence[tuple[Database, str]]) -> None:
        for database, sql in jobs:
            connection = self._open.get(database.location)
            if connection is None:
                connection = self._open[database.location] = sqlite3.connect(
                    f"file:{database.location}?mode=ro", uri=True
                )
            connection.execute(sql).fetchall()


class Bench:
    """Times passes, each on statements of its own."""

    def __init__(self, work: Work, passes: int, clock: Clock) -> None:
        self._work = work
        self._passes = passes
        self._clock = clock
        self._pass = 0

    def rates(self, *runners: Callable[[Work], None], gold: bool = True) -> list[float]:
        """Items a second of each runner; `gold=False` leaves the gold queries as they were in the last pass."""
        times: list[list[float]] = [[] for _ in runners]
        for _ in range(self._passes):
            for own, runner in zip(times, runners, strict=True):
                work = self._numbered(gold)
                start = self._clock()
                runner(work)
                own.append(self._clock() - start)
        return [len(self._work) / statistics.median(own) for own in times]

    def some(self) -> Work:
        """A few items, to start what runs them."""
        return self._numbered(True)[:64]

    def _numbered(self, gold: bool) -> Work:
        self._pass += 1
        return [
            (db, f"{g} -- {self._pass}.{n}" if gold else g, f"{p} -- {self._pass}.{n}p")
            for n, (db, g, p) in enumerate(self._work)
        ]


class Page:
    """Prints a line for each figure, as text or as a Markdown table."""

    def __init__(self, markdown: bool) -> None:
        self._markdown = markdown

    def head(self) -> None:
        if self._markdown:
            print("| | a second | |\n|---|---:|---:|")

    def line(self, name: str, rate: float, note: str) -> None:
        print(f"| {name} | {rate:,.0f} | {note} |" if self._markdown else f"{name:<56}{rate:>9,.0f} /s  {note}")


def judge(engine: SqlEngine, equalities: Sequence[str]) -> Callable[[Work], None]:
    def run(work: Work) -> None:
        verdicts = engine.verdicts([Pair(*item) for item in work], equalities)
        assert not any(verdict.broken for verdict in verdicts)

    return run


def one_core(bench: Bench, page: Page) -> None:
    """Statements and verdicts on one core."""
    raw = Raw()

    def raw_statements(work: Work) -> None:
        raw.run_all([(db, sql) for db, sql, _ in work])

    def raw_pairs(work: Work) -> None:
        raw.run_all([(db, sql) for db, gold, predicted in work for sql in (gold, predicted)])

    with SqlEngine(Limits()) as engine:

        def handed(work: Work) -> None:
            engine.execute_many([(db, sql) for db, sql, _ in work])

        def kept(work: Work) -> None:
            engine.verdicts([Pair(db, sql, None) for db, sql, _ in work], ["strict"])

        def shown(work: Work) -> None:
            engine.execute_many([(db, sql) for db, sql, _ in work], max_rows=50)

        base, fetched, whole, cut = bench.rates(raw_statements, kept, handed, shown)
        page.line("raw sqlite3: statements, all rows fetched", base, "100 % of raw")
        page.line("sandbox: statements, all rows fetched and kept there", fetched, f"{fetched / base:.0%} of raw")
        page.line("sandbox: statements, all rows handed back", whole, f"{whole / base:.0%} of raw")
        page.line("sandbox: statements, 50 rows handed back (a turn)", cut, f"{cut / base:.0%} of raw")
        base, *one, every = bench.rates(
            raw_pairs, *(judge(engine, [name]) for name in COMPARED), judge(engine, COMPARED)
        )
        page.line("raw sqlite3: pairs, fetched and not compared", base, "100 % of raw")
        for name, rate in zip(COMPARED, one, strict=True):
            page.line(f"verdicts, gold cold: {name}", rate, f"{rate / base:.0%} of raw")
        note = f"{statistics.median(one) / every:.2f} times the cost of one"
        page.line(f"verdicts, gold cold: all {len(COMPARED)} equalities at once", every, note)
        base, warm = bench.rates(raw_pairs, judge(engine, ["strict"]), gold=False)
        page.line("verdicts, gold warm: strict", warm, f"{warm / base:.0%} of raw")


def floor(bench: Bench, page: Page) -> None:
    """The fixed cost of a statement: that of one that raw SQLite has done at once."""
    raw = Raw()

    def raw_statements(work: Work) -> None:
        raw.run_all([(db, sql) for db, sql, _ in work])

    with SqlEngine(Limits()) as engine:
        base, fetched = bench.rates(
            raw_statements, lambda work: engine.verdicts([Pair(db, sql, None) for db, sql, _ in work], ["strict"])
        )
    note = f"{1e6 / fetched - 1e6 / base:.0f} microseconds more than raw sqlite3, {1e6 / base:.0f}"
    page.line("sandbox: SELECT 1", fetched, note)


def two_cores(bench: Bench, page: Page, cores: Sequence[int]) -> None:
    """What a second core gives: this process and one worker share one; then this process and two workers share two."""

    def on(engine: SqlEngine, used: Sequence[int]) -> Callable[[Work], None]:
        def run(work: Work) -> None:
            os.sched_setaffinity(0, used)  # a worker keeps the cores of the process that started it
            judge(engine, ["strict"])(work)

        run(bench.some())
        return run

    with SqlEngine(Limits(), workers=1) as one, SqlEngine(Limits(), workers=2) as two:
        single, double = bench.rates(on(one, cores[:1]), on(two, cores[:2]))
    page.line("verdicts, two workers on two cores: strict", double, f"{double / single:.2f} times one core")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    parser.add_argument("--spider", type=Path, default=shared / "spider")
    parser.add_argument("--skip", nargs="*", default=[], help="databases left out")
    parser.add_argument("--files", nargs="*", default=["train.json", "dev.json"], help="files of questions")
    parser.add_argument("--times", type=int, default=1, help="each question so often, for a file of few")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/results/sql.md")
    options = parser.parse_args()
    if not options.spider.is_dir():
        parser.error(f"{options.spider} is not a folder: pass --spider, with train.json, dev.json and database/")
    work, page = spider_work(options.spider, options.skip, options.files) * options.times, Page(options.markdown)
    cores = sorted(os.sched_getaffinity(0))
    print(f"{len(work)} questions of {options.spider.name}, {options.passes} passes, SQLite {sqlite3.sqlite_version}\n")
    page.head()
    os.sched_setaffinity(0, cores[:1])
    one_core(Bench(work, options.passes, processor_seconds), page)
    floor(Bench([(db, "SELECT 1", "SELECT 1") for db, *_ in work], options.passes, processor_seconds), page)
    if len(cores) > 1:
        two_cores(Bench(work, options.passes, time.perf_counter), page, cores)


if __name__ == "__main__":
    main()
