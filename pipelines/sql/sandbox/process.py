"""One worker process as its parent sees it: jobs sent, replies received and checked, and how it ended."""

import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.registry import DIALECTS
from pipelines.core.types import ExecutionStatus
from pipelines.recipe.plugins import for_workers
from pipelines.sql.dialects.base import OK, Bounds, HiddenNames
from pipelines.sql.sandbox.wire import HEADER, OPENING, RETIRED, Board, pack, unpack_replies

ROOT = Path(__file__).resolve().parents[3]
ANALYSIS = "analysis"  # no database engine: what reads SQL text in a worker
IN_FLIGHT = 2  # batches handed to a worker ahead of its replies, so that it never waits for us
MAX_FRAME = 1 << 31
PIPE_BYTES = 1 << 20  # a large result then takes few turns between worker and parent
START = """
import sys
sys.path.append({root!r})
from pipelines.sql.sandbox.worker import main
main({session!r}, {fd}, {bounds!r}, {plugins!r})
"""


STATUSES = frozenset(status.value for status in ExecutionStatus)


class Task:
    """One job and where its reply goes."""

    __slots__ = ("deaths", "deliver", "done", "job", "killed", "tag", "urgent", "work")

    def __init__(self, job: tuple[Any, ...], deliver: Callable[[Any, Any], None], tag: Any) -> None:
        self.job = job  # what the worker gets (see `pipelines.sql.sandbox.worker`).
        self.deliver = deliver  # called once, with `tag` and the reply or a `WorkerDeath`.
        self.tag = tag
        self.done = False
        self.deaths = 0  # workers that died before they came to it.
        self.killed = 0  # workers that it ended, not by a timer.
        self.urgent = False  # an event loop waits for it, and others may wait for that one.
        self.work: Callable[[], int] = int  # the work of its statement so far, from when a worker has it.

    def finish(self, reply: Any) -> None:
        """Deliver, unless another worker was faster or nobody waits."""
        if not self.done:
            self.done = True
            self.deliver(self.tag, reply)


@dataclass(slots=True)
class WorkerDeath:
    """The worker ended at this job."""

    timeout: bool  # it was a timer.
    phase: int  # 0 at the gold (or only) statement, 1 at the prediction.
    opening: bool = True  # it was opening the database, or had not begun at all: no statement is to blame.
    proven: bool = False  # a second worker died of the same statement, so the statement is to blame, not the machine.


class MalformedReply(Exception):
    """It is no reply to this job."""


def check(job: Sequence[Any], reply: Any) -> None:
    """Raise MalformedReply for a reply that has not the shape that its job asks for: a worker has run hostile SQL, and
    one with such a reply counts as lost. Cells are not looked at: whoever shows one takes any.
    """
    if job[0] != "verdict":
        status, columns, rows, truncated, error, error_class, ms, work = reply if _is_tuple(reply, 8) else (None,) * 8
        is_good = (
            status in STATUSES
            and isinstance(columns, (list, tuple))
            and isinstance(rows, (list, tuple))
            and all(isinstance(name, str) for name in columns)
            and set(map(type, rows)) <= {tuple}
            and set(map(len, rows)) <= {len(columns)}
            and isinstance(truncated, (bool, int))
            and (error_class is None) == (status == OK)
            and isinstance(error, (str, type(None)))
            and isinstance(error_class, (str, type(None)))
            and _is_number(ms)
            and isinstance(work, int)
        )
    else:  # (scores by equality, facts of the gold query, facts of the prediction or None)
        scores, gold, predicted = reply if _is_tuple(reply, 3) else (None,) * 3
        is_good = (
            isinstance(scores, Mapping)
            and set(scores) in (set(), set(job[4]))
            and all(map(_is_number, scores.values()))
            and all(map(_are_facts, (gold,) if predicted is None else (gold, predicted)))
        )
    if not is_good:
        raise MalformedReply


def _are_facts(facts: Any) -> bool:
    """(status, error class, rows, milliseconds or None)."""
    status, error_class, rows, ms = facts if _is_tuple(facts, 4) else (None,) * 4
    is_sound = status in STATUSES and isinstance(error_class, (str, type(None))) and isinstance(rows, int) and rows >= 0
    return is_sound and (ms is None or _is_number(ms))


def _is_tuple(value: Any, size: int) -> bool:
    return isinstance(value, tuple) and len(value) == size


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 2**63


class Worker:
    """One child process and the jobs that it holds.

    Args:
        hidden: what no statement may read, by the `identity` of its database; fixed for the process's life.
    """

    def __init__(self, engine: str, bounds: Bounds, hidden: Mapping[str, HiddenNames]) -> None:
        fd = Board.create()
        try:
            self._board = Board(fd)
            session, needs_packages, environment = "pipelines.sql.analysis.session:AnalysisSession", True, {}
            if engine != ANALYSIS:
                dialect = DIALECTS[engine]
                session, needs_packages, environment = (
                    dialect.session,
                    dialect.needs_packages,
                    dialect.worker_environment(),
                )
            plugins = for_workers(engine)
            code = START.format(root=str(ROOT), session=session, fd=fd, bounds=json.dumps(bounds), plugins=plugins)
            flags = ["-I"] if needs_packages or plugins else ["-I", "-S"]
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={"PYTHONDONTWRITEBYTECODE": "1", **environment},
                cwd="/",
                pass_fds=[fd],
            )
        finally:
            os.close(fd)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.into, self.out = self._process.stdin.fileno(), self._process.stdout.fileno()
        with contextlib.suppress(OSError):  # a user may have used up what the system grants
            fcntl.fcntl(self.out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.into, False)
        os.set_blocking(self.out, False)
        self.held: deque[tuple[int, Task]] = deque()  # sent, not answered, in order
        self.batches: deque[int] = deque()  # last job number of each batch sent
        # Not on its command line, which every user of the machine may read: a location may hold a password.
        self.unsent = bytearray(pack(dict(hidden)))
        self._received = bytearray()
        self._next = 1
        self._recalled = 0
        self._taken: set[int] = set()  # numbers of jobs that it is to skip
        self._answered, self._open = False, True
        self._garbled: Task | None = None  # the job whose reply is not what a reply is
        self.answered_at = time.monotonic()

    def send(self, tasks: Sequence[Task]) -> None:
        if not self.held:
            self.answered_at = time.monotonic()
        first = self._next
        self._next += len(tasks)
        for number, task in enumerate(tasks, first):
            task.work = functools.partial(self._work_of, number)
        self.held.extend(enumerate(tasks, first))
        self.batches.append(self._next - 1)
        self.unsent += pack((first, [task.job for task in tasks]))
        self.write()

    def write(self) -> None:
        while self.unsent:
            try:
                del self.unsent[: os.write(self.into, self.unsent)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.unsent.clear()

    def read(self) -> bool:
        """Deliver the replies that came; False if the worker is gone or its replies are malformed."""
        while True:
            try:
                data = os.read(self.out, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._received += data
            while len(self._received) >= HEADER.size:
                (size,) = HEADER.unpack_from(self._received)
                if size > MAX_FRAME:
                    return False
                if len(self._received) < HEADER.size + size:
                    break
                body = bytes(memoryview(self._received)[HEADER.size : HEADER.size + size])
                del self._received[: HEADER.size + size]
                try:
                    for reply in unpack_replies(body):
                        self._settle(reply)
                except Exception:  # forged bytes can raise anything: such a worker is as good as dead
                    return False

    def _settle(self, reply: Any) -> None:
        """Take the reply to the first of the jobs held; None for a job that it skipped."""
        number, task = self.held[0]
        self._garbled = task
        if reply is not None:
            check(task.job, reply)
        elif number not in self._taken:
            raise MalformedReply  # it passed over a job that nobody took from it
        self._taken.discard(number)
        self._garbled = None
        self.held.popleft()
        if number >= self.batches[0]:
            self.batches.popleft()
        self.answered_at = time.monotonic()
        self._answered = True
        if reply is not None:
            task.finish(reply)

    def stuck_for(self, now: float) -> float:
        """Seconds since the last reply while jobs are held."""
        return now - self.answered_at if self.held else 0.0

    def take_back(self) -> list[Task]:
        """The jobs behind the one that runs now, each at most once; the worker will skip them."""
        at, _, _ = self._board.at()
        if not self.held or at < self.held[0][0]:
            return []
        waiting = {number: task for number, task in self.held if number > max(at, self._recalled)}
        self._taken |= waiting.keys()
        self._recalled = self.held[-1][0]
        self._board.recall(self._recalled + 1)
        return [task for task in waiting.values() if not task.done]

    def pulse(self) -> tuple[int, int, int]:
        """Changes whenever the worker starts something."""
        return self._board.at()

    def is_abandoned(self) -> bool:
        """Whether nobody waits any more for the statement that it is at."""
        at = self._board.at()[0]
        return any(task.done for number, task in self.held if number == at)

    def work(self) -> int:
        """The work that the statement has done which it is at; 0 when it has begun none of those that it holds."""
        at = self._board.at()[0]
        return self._board.work_of(at) if self.held and at >= self.held[0][0] else 0

    def _work_of(self, number: int) -> int:
        return self._board.work_of(number) if self._open else 0

    def has_begun(self) -> bool:
        """Whether it works, and is not still starting."""
        return self._answered or (bool(self.held) and self._board.at()[0] >= self.held[0][0])

    def in_statement(self) -> bool:
        """Whether it should be running a statement, and is not still starting or opening a database."""
        return self.has_begun() and not self._board.at()[1] & OPENING

    def end(self) -> tuple[WorkerDeath, bool, Task | None, list[Task]]:
        """End the process: its death, whether it retired, the job that it died of, and the others that it held."""
        try:
            code = self._process.wait(0.05)  # its own exit code: its stream ends before its exit is seen
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        at, phase, _ = self._board.at()
        self.close()
        retired = code == RETIRED
        culprit = None if retired else next((task for number, task in self.held if number == at), None)
        culprit = self._garbled or culprit
        others = [task for _, task in self.held if task is not culprit and not task.done]
        timeout = code == -signal.SIGALRM and not phase & OPENING
        return WorkerDeath(timeout, phase & 1, bool(phase & OPENING)), retired, culprit, others

    def close(self) -> None:
        """End the process and let go of all that belongs to it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._open = False
        self._board.close()
