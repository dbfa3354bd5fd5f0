"""The sandboxed child: runs batches of statements, compares results where they are, and answers in batches.

Started as `python -I -S -c ... ` with an empty environment, it imports only what its dialect needs (SQLite: the standard
library, some 30 ms). What holds it:

- its dialect's own sandbox (authorizer, read-only connection or transaction, function allow-lists);
- no file can grow (RLIMIT_FSIZE 0), no core is dumped, address space is bounded, no environment to leak;
- a timer whose default action ends the process: it fires also inside a native function that never returns;
- when its parent is gone it ends: at the end of the stream, or when it finds itself adopted.

What does not hold it: a bug in the database engine that runs code could still read what this user may read. Give such
users less, or run the whole project in a container.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from pipelines.sql.compare import EQUALITIES, Gold
from pipelines.sql.dialects.base import LIMIT, OK, UNAVAILABLE, Bounds, Raw, Session, failure
from pipelines.sql.wire import HEADER, Board, pack, read_exactly, unpack_request, write_all

OPEN_DATABASES = 64
KEPT_CELLS = 4_000_000  # of gold results, in all
FLUSH_CELLS = 20_000
FLUSH_SECONDS = 0.02
ORPHAN_POLL_MS = 5_000
GRACE = 1.1  # the hard timer fires at this multiple of the limit, after the dialect's own clock has had its chance

Opener = Callable[[str, Bounds, Callable[[float], None]], Session]


def opener(engine: str) -> Opener:
    """The class that opens this engine's databases; imported here, so that a worker loads one driver only."""
    if engine == "sqlite":
        from pipelines.sql.dialects.sqlite import SqliteSession

        return SqliteSession
    raise ValueError(engine)


def arm(seconds: float) -> None:
    """Let the timer end this process, unless it is armed again or disarmed before."""
    signal.setitimer(signal.ITIMER_REAL, seconds * GRACE)


def confine(memory_mb: int) -> None:
    """Take from this process what no query needs."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    space = pages * resource.getpagesize() + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes us


class Databases:
    """Open sessions and kept gold results; both are dropped when the file changes."""

    def __init__(self, open_session: Opener, bounds: Bounds) -> None:
        self._open = open_session
        self._bounds = bounds
        self._sessions: OrderedDict[str, tuple[Any, Session]] = OrderedDict()
        self._gold: OrderedDict[tuple[str, str], Raw] = OrderedDict()
        self._cells = 0

    def refresh(self, locations: set[str]) -> None:
        """Forget what is known of databases whose file changed since they were opened."""
        for location in locations:
            kept = self._sessions.get(location)
            if kept is not None and kept[0] != _stamp(location):
                self._sessions.pop(location)[1].close()
                for key in [key for key in self._gold if key[0] == location]:
                    self._cells -= _cells(self._gold.pop(key))

    def run(self, location: str, sql: str, max_rows: int) -> Raw:
        """Run one statement."""
        kept = self._sessions.get(location)
        if kept is None:
            try:
                kept = self._sessions[location] = (_stamp(location), self._open(location, self._bounds, arm))
            except Exception as error:  # whatever a driver raises: the database cannot be read, and that is the answer
                arm(0)
                return failure(UNAVAILABLE, "database_missing", f"the database cannot be opened ({type(error).__name__})")
            if len(self._sessions) > OPEN_DATABASES:
                self._sessions.popitem(last=False)[1][1].close()
        else:
            self._sessions.move_to_end(location)
        return kept[1].run(sql, max_rows)

    def gold(self, location: str, sql: str) -> Raw:
        """The result of a gold query, from the last time if it is kept."""
        key = (location, sql)
        raw = self._gold.get(key)
        if raw is not None:
            self._gold.move_to_end(key)
            return raw
        raw = whole(self.run(location, sql, self._bounds.max_rows))
        if raw.status == OK:
            self._gold[key] = raw
            self._cells += _cells(raw)
            while self._cells > KEPT_CELLS and len(self._gold) > 1:
                self._cells -= _cells(self._gold.popitem(last=False)[1])
        return raw


def _stamp(location: str) -> Any:
    try:
        info = os.stat(location)
    except OSError:
        return None  # a connection string
    return info.st_mtime_ns, info.st_size, info.st_ino


def _cells(raw: Raw) -> int:
    return len(raw.rows) * len(raw.columns) + 20


def whole(raw: Raw) -> Raw:
    """A verdict needs all rows: a result that was cut is none."""
    if raw.truncated:
        return failure(LIMIT, "result_limit", "the result is larger than a verdict may read")
    return raw


class Judge:
    """Executes the two queries of a pair and compares their results, equality by equality."""

    def __init__(self, databases: Databases, bounds: Bounds, board: Board) -> None:
        self._databases = databases
        self._bounds = bounds
        self._board = board

    def __call__(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        """(scores, gold facts, predicted facts); scores are {} when a gold query gave no result to compare with.

        `job` is ("judge", locations, gold SQL, predicted SQL or None, equality names, fields of `Gold`).
        """
        _, locations, gold_sql, predicted_sql, names, facts = job
        gold = self._databases.gold(locations[0], gold_sql)
        if gold.status != OK or predicted_sql is None:
            return {}, _facts(gold), None
        known: dict[tuple[str, str, str], tuple[Raw, Raw]] = {}
        predicted = self._pair(number, locations[0], gold_sql, predicted_sql, known)[1]
        scores: dict[str, float] = {}
        for name in names:
            equality, score = EQUALITIES[name], 1.0
            rewrite = equality.rewrite or str
            for location in locations if equality.suite else locations[:1]:
                pair = self._pair(number, location, rewrite(gold_sql), rewrite(predicted_sql), known)
                if pair[0].status != OK:
                    return {}, _facts(pair[0]), _facts(predicted)
                score = min(score, equality.compare(*pair, Gold(*facts)) if pair[1].status == OK else 0.0)
                if not score:
                    break
            scores[name] = score
        return scores, _facts(gold), _facts(predicted)

    def _pair(
        self, number: int, location: str, gold_sql: str, predicted_sql: str, known: dict[tuple[str, str, str], tuple[Raw, Raw]]
    ) -> tuple[Raw, Raw]:
        key = (location, gold_sql, predicted_sql)
        if key not in known:
            self._board.note(number, 0)
            gold = predicted = self._databases.gold(location, gold_sql)
            if gold.status == OK and predicted_sql != gold_sql:
                self._board.note(number, 1)
                predicted = whole(self._databases.run(location, predicted_sql, self._bounds.max_rows))
            known[key] = gold, predicted
        return known[key]


def _facts(raw: Raw) -> tuple[str, str | None, int, float]:
    return raw.status, raw.error_class, len(raw.rows), raw.ms


class Server:
    """Reads batches of jobs from standard input and writes batches of replies to standard output."""

    def __init__(self, engine: str, bounds: Bounds, board: Board) -> None:
        self._board = board
        self._databases = Databases(opener(engine), bounds)
        self._judge = Judge(self._databases, bounds, board)
        self._parent = os.getppid()
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
            self._answer(*unpack_request(body))

    def _answer(self, first: int, jobs: Sequence[Sequence[Any]]) -> None:
        """Run a batch whose jobs are numbered from `first`; replies go out in order, early when the batch is slow."""
        self._databases.refresh({location for job in jobs for location in job[1]})
        replies: list[Any] = []
        flushed, cells = perf_counter(), 0
        for number, job in enumerate(jobs, first):
            if number < self._board.recalled():
                replies.append(None)
                continue
            self._board.note(number, 0)
            reply = self._run(number, job)
            replies.append(reply)
            if job[0] == "execute":
                cells += len(reply[2]) * len(reply[1])
            if cells > FLUSH_CELLS or perf_counter() - flushed > FLUSH_SECONDS:
                self._flush(replies)
                flushed, cells = perf_counter(), 0
        self._flush(replies)

    def _run(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        try:
            if job[0] == "judge":
                return self._judge(number, job)
            _, (location,), sql, max_rows = job
            return tuple(self._databases.run(location, sql, max_rows))
        except MemoryError:
            raw = failure(LIMIT, "memory_limit", "the result needs more memory than it may have")
            return ({}, _facts(raw), _facts(raw)) if job[0] == "judge" else tuple(raw)

    def _flush(self, replies: list[Any]) -> None:
        arm(0)  # waiting for the parent to read is not the query's time
        if replies:
            write_all(1, pack(replies))
            replies.clear()


def main(engine: str, board_fd: int, bounds: str) -> None:
    """Run a worker until its parent lets it go."""
    limits = Bounds(*json.loads(bounds))
    server = Server(engine, limits, Board(board_fd))
    confine(limits.memory_mb)
    with contextlib.suppress(BrokenPipeError):
        server.serve()
