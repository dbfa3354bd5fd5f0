"""The sandboxed child: runs batches of statements, compares results where they are, and answers in batches.

Started as `python -I -S -c ... ` with an empty environment, it imports only what its dialect needs (SQLite: the
standard library, some 30 ms). What holds it:

- its dialect's own sandbox (authorizer, read-only connection or transaction, function allow-lists);
- no file can grow (RLIMIT_FSIZE 0), no core is dumped, memory is bounded, no environment to leak;
- a timer whose default action ends the process: it fires also inside a native function that never returns;
- when its parent is gone it ends: at the end of the stream, or when it finds itself adopted.

What does not hold it: a bug in the database engine that runs code could still read what this user may read. Give such
users less, or run the whole project in a container.
"""

import contextlib
import functools
import io
import itertools
import json
import marshal
import os
import pickle
import pkgutil
import resource
import select
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from pipelines.core.registry import EQUALITIES
from pipelines.recipe.plugins import import_in_worker
from pipelines.sql.dialects import base
from pipelines.sql.dialects.base import ERROR, LIMIT, OK, TIMEOUT, UNAVAILABLE
from pipelines.sql.equalities import official
from pipelines.sql.equalities.compare import Gold
from pipelines.sql.equalities.spider_grammar import value_units
from pipelines.sql.lexical import differ_in_case_alone
from pipelines.sql.sandbox.wire import HEADER, RETIRED, StatusPage
from pipelines.sql.splitter import has_more_behind

MAX_OPEN_DATABASES = 128
DATABASE_MB = 16  # memory that each open database may need: DuckDB takes some 4 MiB, and pages that it keeps
OPEN_SECONDS = 20.0  # time for a database to open
FLUSH_BYTES = 200_000  # a size of waiting replies at which they are sent
FLUSH_SECONDS = 0.02  # time that a reply waits for others
LONG_WORK = 100  # units of work after which a statement no longer holds back the answers before it: some 2 ms
ORPHAN_POLL_MS = 5_000

Opener = Callable[[str, base.Bounds, base.StatementTimer], base.DatabaseSession]


class OpenDatabases:
    """Open sessions and kept gold results; both are dropped when the file changes."""

    def __init__(self, open_session: Opener, bounds: base.Bounds, timer: base.StatementTimer, page: StatusPage) -> None:
        self._open = open_session
        self._bounds = bounds
        self._timer = timer
        self._page = page
        self._sessions: OrderedDict[str, base.DatabaseSession] = OrderedDict()
        self._stamps: dict[str, Any] = {}
        self._gold: OrderedDict[tuple[str, str], tuple[base.RawResult, int]] = OrderedDict()
        self._gold_bytes = 0  # marshalled
        self._max_gold_bytes = bounds.memory_mb << 20 >> 5  # Python's objects take some 4 times as many
        self._max_open = max(1, min(MAX_OPEN_DATABASES, bounds.memory_mb // DATABASE_MB))
        self.hidden: Mapping[str, base.HiddenNames] = {}  # names that no statement may read, by database `identity`

    def refresh(self, locations: set[str]) -> None:
        """Forget what is known of databases whose file changed since it was last looked at."""
        for location in locations:
            stamp: Any = None
            with contextlib.suppress(OSError):  # a connection string, or a file that is not there
                info = os.stat(location)
                stamp = info.st_mtime_ns, info.st_size, info.st_ino
                log = os.stat(location + "-wal")  # SQLite writes it before the file itself changes
                if log.st_size:
                    stamp = *stamp, log.st_mtime_ns, log.st_size
            if self._stamps.setdefault(location, stamp) == stamp:
                continue
            self._stamps[location] = stamp
            session = self._sessions.pop(location, None)
            if session is not None:
                session.close()
            outdated = [key for key in self._gold if key[0] == location]
            for key in outdated:
                _, n_bytes = self._gold.pop(key)
                self._gold_bytes -= n_bytes

    def run(self, location: str, sql: str, max_rows: int) -> base.RawResult:
        try:
            session = self.session(location)
        except base.OpenFailure as error:
            return base.failure(UNAVAILABLE, *error.args)
        return session.run(sql, max_rows)

    def session(self, location: str) -> base.DatabaseSession:
        session = self._sessions.get(location)
        if session is not None:
            self._sessions.move_to_end(location)
            return session
        self._timer.arm(OPEN_SECONDS)  # a slow server or disk is not the query's fault, nor its time
        self._page.set_opening(True)
        try:
            session = self._open(location, self._bounds, self._timer)
            if self.hidden:
                names = self.hidden.get(base.identity(location))
                if names is not None:
                    hidden = base.Hidden.of(names)
                    session.hide(hidden)
        finally:
            self._page.set_opening(False)
        self._sessions[location] = session
        if len(self._sessions) > self._max_open:
            _, oldest = self._sessions.popitem(last=False)
            oldest.close()
        return session

    def share_memory(self) -> bool:
        """Whether several databases are open, each of which may have taken what another one lacks."""
        return len(self._sessions) > 1

    def hold(self, location: str, on: bool) -> None:
        """Several statements on this database follow, or are done."""
        with contextlib.suppress(base.OpenFailure):
            if on or location in self._sessions:
                session = self.session(location)
                session.hold(on)

    def gold(self, location: str, sql: str) -> tuple[base.RawResult, bool]:
        """The result of a gold query, and whether it was kept from the last time."""
        key = (location, sql)
        entry = self._gold.get(key)
        if entry is not None:
            self._gold.move_to_end(key)
            raw, _ = entry
            return raw, True
        raw = base.untruncated(self.run(location, sql, self._bounds.max_rows))
        if raw.status == OK:
            marshalled = marshal.dumps(list(raw.rows), 2)
            n_bytes = len(marshalled) + 200
            self._gold[key] = raw, n_bytes
            self._gold_bytes += n_bytes
            while self._gold_bytes > self._max_gold_bytes and len(self._gold) > 1:
                _, (_, oldest_bytes) = self._gold.popitem(last=False)
                self._gold_bytes -= oldest_bytes
        return raw, False


End = tuple[str, str | None, int, float | None]  # status, error class, rows, ms; ms is None when nothing was run
OK_END: End = (OK, None, 0, None)


def _end_of(raw: base.RawResult, is_cached: bool = False) -> End:
    """The end of a statement, without its rows."""
    ms = None if is_cached else raw.ms
    return raw.status, raw.error_class, len(raw.rows), ms


class JobServer:
    """Reads batches of jobs from standard input and writes batches of replies to standard output."""

    def __init__(self, open_session: Opener, bounds: base.Bounds, page: StatusPage) -> None:
        self._bounds = bounds
        self._page = page
        self._timer = base.StatementTimer(self._note_work)
        self._databases = OpenDatabases(open_session, bounds, self._timer, page)
        self._predictions: dict[tuple[str, str], base.RawResult] = {}  # results of one pair, by location and text
        self._parent = os.getppid()
        # Each reply is pickled at once, so that its rows' memory serves the next query while it is warm.
        self._replies = io.BytesIO()
        self._pickler = pickle.Pickler(self._replies, 5)
        self._pickler.fast = True  # no memo: it shares equal cells, and costs more than that saves
        self._counts_work = getattr(open_session, "counts_work", False)
        self._takes_bare_text = getattr(open_session, "takes_bare_text", False)
        self._flushed = 0.0
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)

    def _note_work(self, units: int) -> None:
        """A statement goes on: its work is noted, and the answers before it go out if it is a long one."""
        self._page.set_work(units)
        if units > LONG_WORK:
            self._send()

    def serve(self) -> None:
        """Answer until the parent closes the stream or is gone. The first frame holds what is hidden, each other one
        a batch of jobs and the number of its first. Replies go out in order, early if the batch is slow.
        """
        hidden = self._frame()
        if hidden is None:
            return
        self._databases.hidden = pickle.loads(hidden)
        for body in iter(self._frame, None):
            self._flushed = perf_counter()
            first, jobs = pickle.loads(body)
            locations = set(itertools.chain.from_iterable(job[1] for job in jobs))
            self._databases.refresh(locations)
            # Neighbours on one database share its read lock.
            for location, numbered in itertools.groupby(enumerate(jobs, first), _first_location):
                group = list(numbered)
                if len(group) > 1:
                    self._databases.hold(location, True)
                for number, job in group:
                    self._answer(number, job)
                self._databases.hold(location, False)
            self._flush()

    def _answer(self, number: int, job: Sequence[Any]) -> None:
        """Put the reply to a job behind the others; the process ends if the job has used up its memory."""
        if number < self._page.recalled():
            self._pickler.dump(None)
            return
        if not self._counts_work:
            self._flush()  # nothing would tell that a long statement holds back the answers before it
        self._page.begin(number, 0)
        reply = self._reply(number, job)
        # The memory that a query took is not given back: a fresh worker has all of it. If other databases may have
        # taken it, the job has no answer yet: it is the first of that worker.
        if _lacked_memory(job, reply):
            if number == 1 or not self._databases.share_memory():
                self._pickler.dump(reply)
            self._flush()
            sys.exit(RETIRED)
        self._pickler.dump(reply)
        waited_s = perf_counter() - self._flushed
        if self._replies.tell() > FLUSH_BYTES or waited_s > FLUSH_SECONDS:
            self._flush()

    def _frame(self) -> bytes | None:
        """The parent's next frame; None if none comes any more."""
        frame = bytearray()
        size = HEADER.size
        while len(frame) < size:
            while not self._poll.poll(ORPHAN_POLL_MS):
                if os.getppid() != self._parent:
                    return None
            n_missing = size - len(frame)
            data = os.read(0, min(n_missing, 1 << 20))
            if not data:
                return None
            frame += data
            if len(frame) == HEADER.size:
                (body_size,) = HEADER.unpack(frame)
                size += body_size
        body = memoryview(frame)[HEADER.size :]
        return bytes(body)

    def _reply(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        try:
            if job[0] == "verdict":
                return self._verdict(number, job)
            _, (location,), sql, max_rows = job
            return tuple(self._databases.run(location, sql, max_rows))
        except MemoryError:
            raw = base.failure(LIMIT, "memory_limit", "the result needs more memory than it may have")
        except Exception as error:  # a driver's own defect must not cost the worker and the jobs behind
            raw = base.failure(UNAVAILABLE, "internal", f"the query could not be run ({type(error).__name__})")
        if job[0] != "verdict":
            return tuple(raw)
        _, phase, _ = self._page.current()
        if phase == 0:
            return {}, _end_of(raw), None
        if raw.status == UNAVAILABLE:  # The gold query ran, so the failure is the prediction's own.
            raw = raw._replace(status=ERROR)
        return {}, OK_END, _end_of(raw)

    def _verdict(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        """Run the two queries of a pair and compare their results where they are, equality by equality.

        Returns (scores, end of gold, end of the prediction); scores are {} if a gold query gave no result.

        Args:
            job: ("verdict", locations, gold SQL, predicted SQL or None, equality names, the first fields of `Gold`, the
                names of the database if an equality compares by value units).
        """
        _, locations, gold_sql, predicted_sql, equalities, gold_facts, names = job
        self._predictions.clear()
        gold, is_cached = self._databases.gold(locations[0], gold_sql)
        if gold.status != OK or predicted_sql is None:
            return {}, _end_of(gold, is_cached), None
        predicted = self._predicted(number, locations[0], predicted_sql, gold_sql)
        if predicted.status == TIMEOUT:  # wrong by all: no gold query is asked while a server may still be at it
            return dict.fromkeys(equalities, 0.0), _end_of(gold, is_cached), _end_of(predicted)
        gold_query = Gold(*gold_facts)
        if names is not None:
            gold_query = gold_query._replace(units=value_units(names, gold_sql, predicted_sql))
        has_more_statements: bool | None = None  # only some equalities ask for it
        scores: dict[str, float] = {}
        for name in equalities:
            equality = EQUALITIES[name]
            if equality.bare and self._takes_bare_text:
                if has_more_statements is None:
                    has_more_statements = predicted_sql.count(";") > 1 and has_more_behind(predicted_sql)
                if has_more_statements:
                    scores[name] = 0.0
                    continue
            gold_text = gold_sql
            predicted_text = predicted_sql
            if equality.rewrite is not None:
                gold_text = _rewritten(gold_sql, equality.rewrite)
                predicted_text = _rewritten(predicted_sql, equality.rewrite)
            # The score under an equality is the lowest over the databases.
            scores[name] = 1.0
            compared_on = locations if equality.suite else locations[:1]
            is_rewritten = gold_text is not gold_sql or predicted_text is not predicted_sql
            for location in compared_on:
                expected = gold
                actual = predicted
                if is_rewritten or location is not locations[0]:
                    self._page.begin(number, 0)
                    expected, _ = self._databases.gold(location, gold_text)
                    if expected.status != OK:
                        return {}, _end_of(expected), _end_of(predicted)
                    actual = self._predicted(number, location, predicted_text, gold_text)
                score = 0.0
                if actual.status == OK:
                    score = equality.compare(expected, actual, gold_query)
                scores[name] = min(scores[name], score)
                if not scores[name]:
                    break
            if scores[name] and equality.timed:  # the R-VES reward of a right prediction
                scores[name] = official.timed_reward(
                    functools.partial(self._cold_ms, number, 1, locations[0], predicted_text),
                    functools.partial(self._cold_ms, number, 0, locations[0], gold_text),
                    self._bounds.timeout_s,
                )
        return scores, _end_of(gold, is_cached), _end_of(predicted, predicted is gold)

    def _cold_ms(self, number: int, phase: int, location: str, sql: str) -> float | None:
        """The milliseconds of a statement that has run well before, as `DatabaseSession.cold_ms` takes them."""
        self._page.begin(number, phase)
        session = self._databases.session(location)
        self._timer.arm(self._bounds.timeout_s)
        return session.cold_ms(sql, self._bounds.max_rows, self._bounds.timeout_s)

    def _predicted(self, number: int, location: str, sql: str, gold_sql: str) -> base.RawResult:
        self._page.begin(number, 1)
        if sql == gold_sql:
            gold, _ = self._databases.gold(location, sql)
            return gold
        key = (location, sql)
        if key in self._predictions:
            return self._predictions[key]
        # A prediction may say that the database is not available only if gold cannot run either: else one that makes
        # its engine fail would get out of being scored. It runs twice, for the fault of others may have passed.
        raw = self._run_whole(location, sql)
        if self._fails_alone(raw, location, gold_sql):
            raw = self._run_whole(location, sql)
            if self._fails_alone(raw, location, gold_sql):
                raw = raw._replace(status=ERROR)
        self._predictions[key] = raw
        return raw

    def _run_whole(self, location: str, sql: str) -> base.RawResult:
        raw = self._databases.run(location, sql, self._bounds.max_rows)
        return base.untruncated(raw)

    def _fails_alone(self, raw: base.RawResult, location: str, gold_sql: str) -> bool:
        """Whether a prediction's database is not available, and yet the gold query runs."""
        if raw.status != UNAVAILABLE:
            return False
        gold = self._databases.run(location, gold_sql, 1)
        return gold.status != UNAVAILABLE

    def _send(self) -> None:
        """Write all replies as a frame, then start anew."""
        body = self._replies.getvalue()
        if not body:
            return
        self._replies.seek(0)
        self._replies.truncate()
        frame = HEADER.pack(len(body)) + body
        unsent = memoryview(frame)
        while unsent:
            n_sent = os.write(1, unsent)
            unsent = unsent[n_sent:]

    def _flush(self) -> None:
        self._timer.arm(0.0)  # waiting for the parent to read is not the query's time
        self._send()
        self._flushed = perf_counter()


def _first_location(numbered_job: tuple[int, Sequence[Any]]) -> str:
    _, job = numbered_job
    location: str = job[1][0]
    return location


def _lacked_memory(job: Sequence[Any], reply: Sequence[Any]) -> bool:
    """Whether a statement of the job ran out of memory."""
    if job[0] != "verdict":
        return bool(reply[5] == "memory_limit")
    return any(end is not None and end[1] == "memory_limit" for end in reply[1:])


def _rewritten(sql: str, rewrite: Callable[[str], str]) -> str:
    """A text as an equality rewrites it; the text itself if that changes nothing for the engine."""
    text = rewrite(sql)
    if differ_in_case_alone(sql, text):
        return sql
    return text


def main(session: str, page_fd: int, bounds: str, plugins: Sequence[tuple[str, str]]) -> None:
    """Serve jobs; `session` is the class that opens databases, as "module:class": a worker loads one driver only."""
    import_in_worker(plugins)
    limits = base.Bounds(*json.loads(bounds))
    open_session = pkgutil.resolve_name(session)
    server = JobServer(open_session, limits, StatusPage(page_fd))
    # From here on this process lacks what no query needs.
    with open("/proc/self/statm", encoding="ascii") as file:
        counts = file.read().split()
    data_pages = int(counts[5])
    memory = data_pages * resource.getpagesize() + (limits.memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # not address space: mapped files are no cost
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes us
    with contextlib.suppress(BrokenPipeError):
        server.serve()
