"""The sandboxed child: runs batches of statements, compares results where they are, and answers in batches.

Started as `python -I -S -c ... ` with an empty environment, it imports only what its dialect needs (SQLite: the
standard library, some 30 ms). What holds it:

- its dialect's own sandbox (authorizer, read-only connection or transaction, function allow-lists);
- no file can grow (RLIMIT_FSIZE 0), no core is dumped, address space is bounded, no environment to leak;
- a timer whose default action ends the process: it fires also inside a native function that never returns;
- when its parent is gone it ends: at the end of the stream, or when it finds itself adopted.

What does not hold it: a bug in the database engine that runs code could still read what this user may read. Give such
users less, or run the whole project in a container.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import marshal
import os
import resource
import select
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from pipelines.sql.compare import EQUALITIES, Equality, Gold
from pipelines.sql.dialects.base import LIMIT, OK, UNAVAILABLE, Bounds, OpenFailure, Raw, Session, failure
from pipelines.sql.wire import HEADER, RETIRED, Board, Replies, read_exactly, unpack_request, write_all

OPEN_DATABASES = 128
OPEN_SECONDS = 20.0
FLUSH_CELLS = 20_000
FLUSH_SECONDS = 0.02
ORPHAN_POLL_MS = 5_000
GRACE, SLACK = 1.05, 0.05  # of the limit: the dialect's own clock has its chance before the hard timer

Opener = Callable[[str, Bounds, Callable[[float], None]], Session]


def opener(engine: str) -> Opener:
    """The class that opens this engine's databases; imported here, so that a worker loads one driver only."""
    if engine == "sqlite":
        from pipelines.sql.dialects.sqlite import SqliteSession

        return SqliteSession
    if engine == "duckdb":
        from pipelines.sql.dialects.duckdb import DuckdbSession

        return DuckdbSession
    from pipelines.sql.dialects.postgres import PostgresSession

    return PostgresSession


class Timer:
    """Ends this process, from inside a native function too, when a statement is past its limit.

    A system call for each statement would cost some 1 % of Spider's queries, so a timer that was set a moment ago is
    left to serve the next statement: it fires at 1.05 to 1.1 times the limit.
    """

    def __init__(self) -> None:
        self._set_at = self._seconds = 0.0

    def arm(self, seconds: float) -> None:
        """A statement starts that may take this long."""
        now = perf_counter()
        if seconds != self._seconds or now - self._set_at > seconds * SLACK:
            signal.setitimer(signal.ITIMER_REAL, seconds * (GRACE + SLACK))
            self._set_at, self._seconds = now, seconds

    def disarm(self) -> None:
        """No statement runs."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._seconds = 0.0


def confine(memory_mb: int) -> None:
    """Take from this process what no query needs."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])
    memory = pages * resource.getpagesize() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # not address space: mapped files are no cost
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes us


class Databases:
    """Open sessions and kept gold results; both are dropped when the file changes."""

    def __init__(self, open_session: Opener, bounds: Bounds, timer: Timer, board: Board) -> None:
        self._open = open_session
        self._timer = timer
        self._board = board
        self._bounds = bounds
        self._sessions: OrderedDict[str, tuple[Any, Session]] = OrderedDict()
        self._gold: OrderedDict[tuple[str, str], tuple[Raw, int]] = OrderedDict()
        self._kept = 0
        self._keep = bounds.memory_mb << 20 >> 5  # bytes, marshalled; Python's objects take some 4 times as many

    def refresh(self, locations: set[str]) -> None:
        """Forget what is known of databases whose file changed since they were opened."""
        for location in locations:
            kept = self._sessions.get(location)
            if kept is not None and kept[0] != _stamp(location):
                self._sessions.pop(location)[1].close()
                for key in [key for key in self._gold if key[0] == location]:
                    self._kept -= self._gold.pop(key)[1]

    def run(self, location: str, sql: str, max_rows: int) -> Raw:
        """Run one statement."""
        try:
            session = self._session(location)
        except OpenFailure as error:
            return failure(UNAVAILABLE, error.error_class, error.message)
        return session.run(sql, max_rows)

    def _session(self, location: str) -> Session:
        kept = self._sessions.get(location)
        if kept is not None:
            self._sessions.move_to_end(location)
            return kept[1]
        self._timer.arm(OPEN_SECONDS)  # a slow server or disk is not the query's fault, nor its time
        self._board.opening(True)
        session = self._open(location, self._bounds, self._timer.arm)
        self._board.opening(False)
        self._sessions[location] = _stamp(location), session
        if len(self._sessions) > OPEN_DATABASES:
            self._sessions.popitem(last=False)[1][1].close()
        return session

    def hold(self, location: str) -> None:
        """Several statements on this database follow."""
        with contextlib.suppress(OpenFailure):
            self._session(location).hold()

    def release(self, location: str) -> None:
        """The statements of `hold` are done."""
        kept = self._sessions.get(location)
        if kept is not None:
            kept[1].release()

    def gold(self, location: str, sql: str) -> Raw:
        """The result of a gold query, from the last time if it is kept."""
        key = (location, sql)
        known = self._gold.get(key)
        if known is not None:
            self._gold.move_to_end(key)
            return known[0]
        raw = whole(self.run(location, sql, self._bounds.max_rows))
        if raw.status == OK:
            size = len(marshal.dumps(list(raw.rows), 2)) + 200
            self._gold[key] = raw, size
            self._kept += size
            while self._kept > self._keep and len(self._gold) > 1:
                self._kept -= self._gold.popitem(last=False)[1][1]
        return raw


def _stamp(location: str) -> Any:
    try:
        info = os.stat(location)
    except OSError:
        return None  # a connection string
    return info.st_mtime_ns, info.st_size, info.st_ino


def whole(raw: Raw) -> Raw:
    """A verdict needs all rows: a result that was cut is none."""
    if raw.truncated:
        return failure(LIMIT, "result_limit", "the result is larger than a verdict may read")
    return raw


class Judge:
    """Executes the two queries of a pair and compares their results, equality by equality.

    `job` is ("judge", locations, gold SQL, predicted SQL or None, equality names, fields of `Gold`).
    """

    def __init__(self, databases: Databases, bounds: Bounds, board: Board) -> None:
        self._databases = databases
        self._bounds = bounds
        self._board = board
        self._number = 0
        self._predictions: dict[tuple[str, str], Raw] = {}

    def __call__(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        """(scores, gold facts, predicted facts); scores are {} when a gold query gave nothing to compare with."""
        _, locations, gold_sql, predicted_sql, names, facts = job
        self._number = number
        self._predictions.clear()
        gold = self._gold(locations[0], gold_sql)
        if gold.status != OK or predicted_sql is None:
            return {}, _facts(gold), None
        predicted = self._predicted(locations[0], predicted_sql, gold_sql)
        scores: dict[str, float] = {}
        for name in names:
            equality = EQUALITIES[name]
            chosen = locations if equality.suite else locations[:1]
            score, failed = self._score(equality, chosen, gold_sql, predicted_sql, Gold(*facts))
            if failed is not None:
                return {}, _facts(failed), _facts(predicted)
            scores[name] = score
        return scores, _facts(gold), _facts(predicted)

    def broken(self, raw: Raw) -> tuple[Any, ...]:
        """The reply when something broke: laid at the query that was at hand."""
        if self._board.at()[1] == 0:
            return {}, _facts(raw), None
        return {}, (OK, None, 0, 0.0), _facts(raw)

    def _score(
        self, equality: Equality, locations: Sequence[str], gold_sql: str, predicted_sql: str, facts: Gold
    ) -> tuple[float, Raw | None]:
        """The lowest score over the databases; beside it the gold result if there was none to compare with."""
        if equality.rewrite is not None:
            gold_sql, predicted_sql = equality.rewrite(gold_sql), equality.rewrite(predicted_sql)
        score = 1.0
        for location in locations:
            gold = self._gold(location, gold_sql)
            if gold.status != OK:
                return 0.0, gold
            predicted = self._predicted(location, predicted_sql, gold_sql)
            score = min(score, equality.compare(gold, predicted, facts) if predicted.status == OK else 0.0)
            if not score:
                break
        return score, None

    def _gold(self, location: str, sql: str) -> Raw:
        self._board.note(self._number, 0)
        return self._databases.gold(location, sql)

    def _predicted(self, location: str, sql: str, gold_sql: str) -> Raw:
        self._board.note(self._number, 1)
        if sql == gold_sql:
            return self._databases.gold(location, sql)
        key = (location, sql)
        if key not in self._predictions:
            self._predictions[key] = whole(self._databases.run(location, sql, self._bounds.max_rows))
        return self._predictions[key]


def _facts(raw: Raw) -> tuple[str, str | None, int, float]:
    return raw.status, raw.error_class, len(raw.rows), raw.ms


class Server:
    """Reads batches of jobs from standard input and writes batches of replies to standard output."""

    def __init__(self, engine: str, bounds: Bounds, board: Board) -> None:
        self._board = board
        self._timer = Timer()
        self._databases = Databases(opener(engine), bounds, self._timer, board)
        self._judge = Judge(self._databases, bounds, board)
        self._parent = os.getppid()
        self._tired = False
        self._replies = Replies()
        self._cells, self._flushed = 0, 0.0
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)

    def serve(self) -> None:
        """Answer until the parent closes the stream or is gone."""
        while True:
            while not self._poll.poll(ORPHAN_POLL_MS):
                if os.getppid() != self._parent:
                    return
            header = read_exactly(0, HEADER.size)
            body = header and read_exactly(0, HEADER.unpack(header)[0])
            if not body:
                return
            self._flushed = perf_counter()
            self._answer(*unpack_request(body))

    def _answer(self, first: int, jobs: Sequence[Sequence[Any]]) -> None:
        """Run a batch whose jobs are numbered from `first`; replies go out in order, early when the batch is slow."""
        self._databases.refresh({location for job in jobs for location in job[1]})
        for location, numbered in itertools.groupby(enumerate(jobs, first), lambda item: item[1][1][0]):
            group = list(numbered)
            if len(group) > 1:
                self._databases.hold(location)
            for number, job in group:
                self._take(number, job)
            self._databases.release(location)
        self._flush()

    def _take(self, number: int, job: Sequence[Any]) -> None:
        if number < self._board.recalled():
            self._replies.add(None)
            return
        self._board.note(number, 0)
        reply = self._run(number, job)
        self._replies.add(reply)
        if job[0] == "execute":
            self._cells += len(reply[2]) * len(reply[1])
        if self._tired:
            self._flush()
            sys.exit(RETIRED)
        if self._cells > FLUSH_CELLS or perf_counter() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _run(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        reply: tuple[Any, ...]
        try:
            if job[0] == "judge":
                reply = self._judge(number, job)
                self._tired = "memory_limit" in (reply[1][1], reply[2] and reply[2][1])
            else:
                _, (location,), sql, max_rows = job
                reply = self._databases.run(location, sql, max_rows)
                self._tired = reply.error_class == "memory_limit"
        except MemoryError:
            self._tired = True
            raw = failure(LIMIT, "memory_limit", "the result needs more memory than it may have")
            reply = self._judge.broken(raw) if job[0] == "judge" else raw
        except Exception as error:  # a driver's own defect must not cost the worker and the jobs behind
            raw = failure(UNAVAILABLE, "internal", f"the query could not be run ({type(error).__name__})")
            reply = self._judge.broken(raw) if job[0] == "judge" else raw
        return tuple(reply)

    def _flush(self) -> None:
        self._timer.disarm()  # waiting for the parent to read is not the query's time
        write_all(1, self._replies.take())
        self._flushed, self._cells = perf_counter(), 0


def main(engine: str, board_fd: int, bounds: str) -> None:
    """Run a worker until its parent lets it go."""
    limits = Bounds(*json.loads(bounds))
    server = Server(engine, limits, Board(board_fd))
    confine(limits.memory_mb)
    with contextlib.suppress(BrokenPipeError):
        server.serve()
