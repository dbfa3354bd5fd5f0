"""One worker process as its parent sees it: jobs sent, replies received, and how it ended."""

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
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.registry import DIALECTS
from pipelines.recipe.plugins import for_workers
from pipelines.sql.dialects.base import Bounds
from pipelines.sql.dialects.hiding import HiddenNames
from pipelines.sql.sandbox.replies import Misshapen, check
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


def _session_of(engine: str) -> tuple[str, bool, dict[str, str]]:
    """What a worker opens ("module:class"), whether it needs more than the standard library, and its environment."""
    if engine == ANALYSIS:
        return "pipelines.sql.analysis.session:AnalysisSession", True, {}
    dialect = DIALECTS[engine]
    return dialect.session, dialect.needs_packages, dialect.worker_environment()


class Task:
    """One job and where its reply goes.

    Attributes:
        job: what the worker gets (see `pipelines.sql.sandbox.worker`).
        deliver: called once, with `tag` and the reply or a `WorkerDeath`.
        deaths: workers that died before they came to it.
        killed: workers that it ended, not by a timer.
        urgent: an event loop waits for it, and others may wait for that one.
        work: tells how much work its statement has done, from when a worker has it.
    """

    __slots__ = ("deaths", "deliver", "done", "job", "killed", "tag", "urgent", "work")

    def __init__(self, job: tuple[Any, ...], deliver: Callable[[Any, Any], None], tag: Any) -> None:
        self.job = job
        self.deliver = deliver
        self.tag = tag
        self.done = False
        self.deaths = self.killed = 0
        self.urgent = False
        self.work: Callable[[], int] = int

    def finish(self, reply: Any) -> None:
        """Deliver, unless another worker was faster or nobody waits."""
        if not self.done:
            self.done = True
            self.deliver(self.tag, reply)


class WorkerDeath:
    """The worker ended at this job.

    Attributes:
        timeout: it was a timer.
        phase: 0 at the gold (or only) statement, 1 at the prediction.
        opening: it was opening the database, or had not begun at all: no statement is to blame.
        proven: a second worker died of the same statement, so the statement is to blame and not the machine.
    """

    __slots__ = ("opening", "phase", "proven", "timeout")

    def __init__(self, timeout: bool, phase: int, opening: bool = True) -> None:
        self.timeout = timeout
        self.phase = phase
        self.opening = opening
        self.proven = False


class End(NamedTuple):
    """How a worker ended: the job that it died of, and the others that it held."""

    death: WorkerDeath
    retired: bool
    culprit: Task | None
    others: list[Task]


class Worker:
    """One child process and the jobs that it holds.

    Args:
        hidden: what no statement may read, by the `identity` of its database; fixed for the process's life.
    """

    def __init__(self, engine: str, bounds: Bounds, hidden: Mapping[str, HiddenNames]) -> None:
        fd = Board.create()
        try:
            self._board = Board(fd)
            session, needs_packages, environment = _session_of(engine)
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

    @property
    def has_room(self) -> bool:
        """Whether another batch may be sent ahead."""
        return len(self.batches) < IN_FLIGHT

    def send(self, tasks: Sequence[Task]) -> None:
        """Hand over a batch."""
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
        """Write what the pipe takes now."""
        while self.unsent:
            try:
                del self.unsent[: os.write(self.into, self.unsent)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.unsent.clear()

    def read(self) -> bool:
        """Deliver the replies that came; False when the worker is gone or speaks nonsense."""
        while True:
            try:
                data = os.read(self.out, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._received += data
            if not self._deliver():
                return False

    def _deliver(self) -> bool:
        while len(self._received) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._received)
            if size > MAX_FRAME:
                return False
            if len(self._received) < HEADER.size + size:
                return True
            body = bytes(memoryview(self._received)[HEADER.size : HEADER.size + size])
            del self._received[: HEADER.size + size]
            try:
                for reply in unpack_replies(body):
                    self._settle(reply)
            except Exception:  # forged bytes can raise anything: such a worker is as good as dead
                return False
        return True

    def _settle(self, reply: Any) -> None:
        number, task = self.held[0]
        self._garbled = task
        if reply is not None:
            check(task.job, reply)
        elif number not in self._taken:
            raise Misshapen  # it passed over a job that nobody took from it
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

    def end(self) -> End:
        """End the process and say how it ended."""
        code = self._exit_code()
        at, phase, _ = self._board.at()
        self.close()
        retired = code == RETIRED
        culprit = None if retired else next((task for number, task in self.held if number == at), None)
        culprit = self._garbled or culprit
        others = [task for _, task in self.held if task is not culprit and not task.done]
        timeout = code == -signal.SIGALRM and not phase & OPENING
        return End(WorkerDeath(timeout, phase & 1, bool(phase & OPENING)), retired, culprit, others)

    def _exit_code(self) -> int:
        """Its own exit code if it ends by itself within a moment (its stream ends before its exit is seen)."""
        try:
            return self._process.wait(0.05)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

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
