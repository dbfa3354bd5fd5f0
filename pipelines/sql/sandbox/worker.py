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
import os
import pickle
import resource
import select
import signal
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from pipelines.recipe.plugins import import_in_worker
from pipelines.sql.dialects.base import LIMIT, UNAVAILABLE, Bounds, failure
from pipelines.sql.sandbox.verdicts import OpenDatabases, Verdicts, opener
from pipelines.sql.sandbox.wire import HEADER, RETIRED, Board, read_exactly, write_all

OPEN_SECONDS = 20.0
FLUSH_CELLS = 20_000
FLUSH_SECONDS = 0.02
LONG_WORK = 100  # units of work after which a statement no longer holds back the answers before it: some 2 ms
ORPHAN_POLL_MS = 5_000
GRACE, SLACK = 1.05, 0.05  # of the limit: the dialect's own clock has its chance before the hard timer


class Timer:
    """Ends this process, from inside a native function too, when a statement is past its limit.

    A system call for each statement would cost some 1 % of Spider's queries, so a timer that was set a moment ago is
    left to serve the next statement: it fires at 1.05 to 1.1 times the limit.

    Args:
        worked: called with the running statement's work, now and then.
    """

    def __init__(self, worked: Callable[[int], None]) -> None:
        self._set_at = self._seconds = 0.0
        self.worked = worked

    def arm(self, seconds: float) -> None:
        now = perf_counter()
        if seconds != self._seconds or now - self._set_at > seconds * SLACK:
            signal.setitimer(signal.ITIMER_REAL, seconds * (GRACE + SLACK))
            self._set_at, self._seconds = now, seconds

    def disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._seconds = 0.0


class Server:
    """Reads batches of jobs from standard input and writes batches of replies to standard output."""

    def __init__(self, session: str, bounds: Bounds, board: Board) -> None:
        self._board = board

        def worked(units: int) -> None:
            """A statement goes on: its work is noted, and the answers before it go out if it is a long one."""
            board.worked(units)
            if units > LONG_WORK:
                self._send()

        def begin_opening() -> None:
            """A slow server or disk is not the query's fault, nor its time."""
            self._timer.arm(OPEN_SECONDS)
            board.opening(True)

        self._timer = Timer(worked)
        open_session = opener(session)
        end_opening = functools.partial(board.opening, False)
        self._databases = OpenDatabases(open_session, bounds, self._timer, begin_opening, end_opening)
        self._verdicts = Verdicts(self._databases, bounds, board)
        self._parent = os.getppid()
        self._must_retire = False
        # Each reply is pickled at once, so that its rows' memory serves the next query while it is warm.
        self._replies = io.BytesIO()
        self._pickler = pickle.Pickler(self._replies, 5)
        self._pickler.fast = True  # no memo: it shares equal cells, and costs more than that saves
        self._counts = getattr(open_session, "counts_work", False)
        self._cells, self._flushed = 0, 0.0
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)

    def serve(self) -> None:
        """Answer until the parent closes the stream or is gone. The first frame says what is hidden."""
        first = self._frame()
        if first is None:
            return
        self._databases.hidden = pickle.loads(first)
        while (body := self._frame()) is not None:
            self._flushed = perf_counter()
            self._answer(*pickle.loads(body))

    def _frame(self) -> bytes | None:
        """The parent's next frame; None when there is none to come."""
        while not self._poll.poll(ORPHAN_POLL_MS):
            if os.getppid() != self._parent:
                return None
        header = read_exactly(0, HEADER.size)
        return (header and read_exactly(0, HEADER.unpack(header)[0])) or None

    def _answer(self, first: int, jobs: Sequence[Sequence[Any]]) -> None:
        """Run a batch whose jobs are numbered from `first`; replies go out in order, early when the batch is slow."""
        self._databases.refresh({location for job in jobs for location in job[1]})
        for location, numbered in itertools.groupby(enumerate(jobs, first), lambda item: item[1][1][0]):
            group = list(numbered)
            if len(group) > 1:
                self._databases.hold(location)
            for number, job in group:
                if number < self._board.recalled():
                    self._pickler.dump(None)
                    continue
                if not self._counts:
                    self._flush()  # nothing would tell that a long statement holds back the answers before it
                self._board.note(number, 0)
                reply = self._run(number, job)
                self._pickler.dump(reply)
                if job[0] == "execute":
                    self._cells += len(reply[2]) * len(reply[1])
                if self._must_retire:
                    self._flush()
                    sys.exit(RETIRED)
                if self._cells > FLUSH_CELLS or perf_counter() - self._flushed > FLUSH_SECONDS:
                    self._flush()
            self._databases.release(location)
        self._flush()

    def _run(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        reply: tuple[Any, ...]
        try:
            if job[0] == "verdict":
                reply = self._verdicts(number, job)
                self._must_retire = "memory_limit" in (reply[1][1], reply[2] and reply[2][1])
            else:
                _, (location,), sql, max_rows = job
                reply = self._databases.run(location, sql, max_rows)
                self._must_retire = reply.error_class == "memory_limit"
            return tuple(reply)
        except MemoryError:
            self._must_retire = True
            raw = failure(LIMIT, "memory_limit", "the result needs more memory than it may have")
        except Exception as error:  # a driver's own defect must not cost the worker and the jobs behind
            raw = failure(UNAVAILABLE, "internal", f"the query could not be run ({type(error).__name__})")
        return self._verdicts.broken(raw) if job[0] == "verdict" else tuple(raw)

    def _send(self) -> None:
        """Write all replies as a frame, then start anew."""
        body = self._replies.getvalue()
        self._replies.seek(0)
        self._replies.truncate()
        if body:
            write_all(1, HEADER.pack(len(body)) + body)

    def _flush(self) -> None:
        self._timer.disarm()  # waiting for the parent to read is not the query's time
        self._send()
        self._flushed, self._cells = perf_counter(), 0


def main(session: str, board_fd: int, bounds: str, plugins: Sequence[tuple[str, str]]) -> None:
    import_in_worker(plugins)
    limits = Bounds(*json.loads(bounds))
    server = Server(session, limits, Board(board_fd))
    # From here on this process lacks what no query needs.
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])
    memory = pages * resource.getpagesize() + (limits.memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # not address space: mapped files are no cost
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes us
    with contextlib.suppress(BrokenPipeError):
        server.serve()
