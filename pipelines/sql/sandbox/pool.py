"""The hand-over of jobs to worker processes: batches, stealing, and the replacement of workers that died.

No thread is used: whoever waits (a blocking caller, or an event loop) drives the same state machine, so nothing is left
behind and a parent that has PyTorch loaded may fork.
"""

import contextlib
import fcntl
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.registry import DIALECTS
from pipelines.core.types import ExecutionStatus
from pipelines.recipe.plugins import for_workers
from pipelines.sql.dialects.base import OK, Bounds, HiddenNames
from pipelines.sql.sandbox.wire import HEADER, OPENING, PAGE_BYTES, RETIRED, StatusPage, pack_frame, unpack_replies

# A worker process, seen from its parent: jobs sent, replies received and checked, and its end.

ROOT = Path(__file__).resolve().parents[3]
ANALYSIS = "analysis"  # the engine name of workers that read SQL text and open no database
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


@dataclass(slots=True, eq=False)
class Task:
    """A job, and the callback for its reply."""

    job: tuple[Any, ...]  # Job as the worker gets it (see `pipelines.sql.sandbox.worker`).
    deliver: Callable[[Any, Any], None]  # Function that is called once, with `tag` and the reply or a `WorkerDeath`.
    tag: Any
    done: bool = False
    deaths: int = 0  # Workers that died before they came to it.
    killed: int = 0  # Workers that it ended, not by a timer.
    urgent: bool = False  # True if an event loop waits for it, and others may wait for that one.
    work: Callable[[], int] = int  # Work of its statement so far, from when a worker has it.

    def finish(self, reply: Any) -> None:
        """Deliver the reply, unless another worker was faster or the caller has left."""
        if not self.done:
            self.done = True
            self.deliver(self.tag, reply)


@dataclass(slots=True)
class WorkerDeath:
    """The end of a worker at a job."""

    timeout: bool  # True if a timer ended it.
    phase: int  # Statement of the job: 0 for the gold (or only) one, 1 for the prediction.
    opening: bool = True  # True if it was opening the database, or had not begun: no statement is to blame.
    proven: bool = False  # True if a second worker died of the same statement, so the machine is not to blame.


class WorkerEnd(NamedTuple):
    """The end of a worker's process, and the jobs that it leaves."""

    death: WorkerDeath
    retired: bool  # Whether it ended by itself after many jobs.
    culprit: Task | None  # The job that it died of.
    others: list[Task]  # Jobs that it held and that somebody waits for, without the culprit.


class MalformedReply(Exception):
    """A worker's bytes are not a reply to the job."""


def check_reply(job: Sequence[Any], reply: Any) -> None:
    """Raise MalformedReply if a reply has not the shape that its job requires: a worker has run hostile SQL, and one
    with such a reply counts as lost. Cells are not checked: whatever shows them accepts any.
    """
    if job[0] == "verdict":
        _, _, _, _, equalities, *_ = job
        is_good = _is_verdict(reply, equalities)
    else:
        is_good = _is_result(reply)
    if not is_good:
        raise MalformedReply


def _is_verdict(reply: Any, equalities: Sequence[str]) -> bool:
    """Whether a reply is (scores, end of the gold query, end of the prediction or None)."""
    if type(reply) is not tuple or len(reply) != 3:
        return False
    scores, gold, predicted = reply
    if type(scores) is not dict or not all(map(_is_number, scores.values())):
        return False
    if scores and scores.keys() != set(equalities):
        return False
    return _is_end(gold) and (predicted is None or _is_end(predicted))


def _is_result(reply: Any) -> bool:
    """Whether a reply is a `RawResult` as a tuple."""
    if type(reply) is not tuple or len(reply) != 8:
        return False
    status, columns, rows, truncated, error, error_class, ms, work = reply
    if status not in STATUSES or (error_class is None) != (status == OK):
        return False
    if not _is_text_or_none(error) or not _is_text_or_none(error_class):
        return False
    if not isinstance(columns, (list, tuple)) or not isinstance(rows, (list, tuple)):
        return False
    if not all(isinstance(name, str) for name in columns) or set(map(type, rows)) - {tuple}:
        return False
    if set(map(len, rows)) - {len(columns)}:
        return False
    return isinstance(truncated, (bool, int)) and _is_number(ms) and isinstance(work, int)


def _is_end(end: Any) -> bool:
    """Whether this is (status, error class, rows, ms) of a statement."""
    if type(end) is not tuple or len(end) != 4:
        return False
    status, error_class, rows, ms = end
    if status not in STATUSES or not _is_text_or_none(error_class):
        return False
    return isinstance(rows, int) and rows >= 0 and (ms is None or _is_number(ms))


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < 2**63


def _start_process(engine: str, bounds: Bounds, page_fd: int) -> subprocess.Popen[bytes]:
    """A worker's process, with the environment that its driver reads and no other."""
    if engine == ANALYSIS:
        session = "pipelines.sql.analysis.session:AnalysisSession"
        needs_packages = True
        environment: dict[str, str] = {}
    else:
        dialect = DIALECTS[engine]
        session = dialect.session
        needs_packages = dialect.needs_packages
        environment = dialect.worker_environment()
    plugins = for_workers(engine)
    limits = json.dumps(bounds)
    code = START.format(root=str(ROOT), session=session, fd=page_fd, bounds=limits, plugins=plugins)
    flags = ["-I"] if needs_packages or plugins else ["-I", "-S"]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={"PYTHONDONTWRITEBYTECODE": "1", **environment},
        cwd="/",
        pass_fds=[page_fd],
    )


class Worker:
    """A child process and the jobs that it holds; `hidden` is fixed for its life."""

    def __init__(self, engine: str, bounds: Bounds, hidden: Mapping[str, HiddenNames]) -> None:
        fd = os.memfd_create("sqltrain-status", os.MFD_CLOEXEC)  # the worker inherits this page
        try:
            os.ftruncate(fd, PAGE_BYTES)
            self.page = StatusPage(fd)
            self._process = _start_process(engine, bounds, fd)
        finally:
            os.close(fd)
        # Its pipes never block this process, which may be in an event loop.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.into = self._process.stdin.fileno()
        self.out = self._process.stdout.fileno()
        with contextlib.suppress(OSError):  # a user may have used up what the system grants
            fcntl.fcntl(self.out, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.into, False)
        os.set_blocking(self.out, False)
        self.held: deque[tuple[int, Task]] = deque()  # (job number, task) that were sent and not answered, in order
        self.batches: deque[int] = deque()  # last job number of each batch that was sent
        # The hidden names are not on the command line, which every user may read: a location may hold a password.
        self.unsent = bytearray(pack_frame(dict(hidden)))
        self._received = bytearray()
        self._next = 1
        self._recalled = 0
        self._taken: set[int] = set()  # numbers of jobs that it is to skip
        self._has_answered = False
        self._garbled: Task | None = None  # the job whose reply is malformed
        self.answered_at = time.monotonic()

    def send(self, tasks: Sequence[Task]) -> None:
        if not self.held:
            self.answered_at = time.monotonic()
        first = self._next
        self._next += len(tasks)
        for number, task in enumerate(tasks, first):
            if task.urgent:  # nobody follows the work of another one
                task.work = functools.partial(self.page.work_of, number)
        self.held.extend(enumerate(tasks, first))
        self.batches.append(self._next - 1)
        jobs = [task.job for task in tasks]
        self.unsent += pack_frame((first, jobs))
        self.write()

    def write(self) -> None:
        while self.unsent:
            try:
                n_sent = os.write(self.into, self.unsent)
                del self.unsent[:n_sent]
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
                end = HEADER.size + size
                if len(self._received) < end:
                    break
                body = bytes(memoryview(self._received)[HEADER.size : end])
                del self._received[:end]
                self.answered_at = time.monotonic()
                self._has_answered = True
                try:
                    for reply in unpack_replies(body):
                        self._accept(reply)
                except Exception:  # forged bytes can raise anything: such a worker is as good as dead
                    return False

    def _accept(self, reply: Any) -> None:
        """Deliver the reply to the first of the jobs held; None for a job that the worker skipped."""
        number, task = self.held[0]
        self._garbled = task
        if reply is not None:
            check_reply(task.job, reply)
        elif number not in self._taken:  # nobody took that job from it
            raise MalformedReply
        self._taken.discard(number)
        self._garbled = None
        self.held.popleft()
        if number >= self.batches[0]:
            self.batches.popleft()
        if reply is not None:
            task.finish(reply)

    def take_back(self) -> list[Task]:
        """The jobs behind the one that runs now, each at most once; the worker will skip them."""
        if not self.held:
            return []
        current_job, _, _ = self.page.current()
        first_held, _ = self.held[0]
        if current_job < first_held:
            return []
        last_begun = max(current_job, self._recalled)
        waiting = []
        for number, task in self.held:
            if number > last_begun:
                self._taken.add(number)
                waiting.append(task)
        last_held, _ = self.held[-1]
        self._recalled = last_held
        self.page.recall(last_held + 1)
        return [task for task in waiting if not task.done]

    def is_abandoned(self) -> bool:
        """Whether nobody waits any more for the statement that it is at."""
        current_job, _, _ = self.page.current()
        task = dict(self.held).get(current_job)
        return task is not None and task.done

    def is_stuck(self, now: float) -> bool:
        """Whether it works at a statement that holds up the jobs behind it."""
        return self.has_begun() and self.is_slow(now)

    def is_slow(self, now: float) -> bool:
        """Whether its statement holds up the jobs behind it, by the clock or by its work."""
        if not self.held:
            return False
        current_job, _, _ = self.page.current()
        first_held, _ = self.held[0]
        is_long = current_job >= first_held and self.page.work_of(current_job) > STUCK_WORK
        return is_long or now - self.answered_at > STUCK_SECONDS

    def has_begun(self) -> bool:
        """Whether it works, and is not still starting."""
        if self._has_answered:
            return True
        if not self.held:
            return False
        current_job, _, _ = self.page.current()
        first_held, _ = self.held[0]
        return current_job >= first_held

    def end(self) -> WorkerEnd:
        """End the process."""
        try:
            code = self._process.wait(0.05)  # its own exit code: its stream ends before its exit is seen
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        current_job, phase, _ = self.page.current()
        self.close()
        retired = code == RETIRED
        # A malformed reply is laid at its job, whatever job the worker says it is at.
        culprit = self._garbled
        if culprit is None and not retired:
            culprit = dict(self.held).get(current_job)
        others = [task for _, task in self.held if task is not culprit and not task.done]
        opening = bool(phase & OPENING)
        timeout = code == -signal.SIGALRM and not opening
        death = WorkerDeath(timeout, phase & 1, opening)
        return WorkerEnd(death, retired, culprit, others)

    def close(self) -> None:
        """End the process and let go of all that belongs to it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self.page.close()


BATCH = 128  # jobs that are handed over at once, at most
STUCK_SECONDS = 0.1  # a statement that runs this long no longer holds up the jobs behind it
STUCK_WORK = 1_500  # the same for work: some 30 ms, which no batch of short statements takes
SPARE = 3  # workers beyond the pool's own, for when all of these are stuck
# A worker whose statement goes on for KILL_FACTOR times the limit and KILL_MARGIN seconds is killed: its own timer has
# failed.
KILL_FACTOR = 1.15
KILL_MARGIN = 0.5
START_SECONDS = 60.0  # time to start a worker or open a database on a busy machine
FATAL = 2  # workers that a statement may end before it counts as failed
MAX_EARLY_DEATHS = 3  # workers that may die before they reach a job


class Pool:
    """The workers of one engine.

    A job goes to the home of its database, so that kept gold results and open files are found again; a worker with
    nothing to do steals from the fullest home. While every worker is stuck in a long statement, one more is started, or
    up to `SPARE` where an event loop waits.
    """

    def __init__(
        self,
        engine: str,
        bounds: Bounds,
        size: int,
        selector: selectors.BaseSelector,
        hidden: Mapping[str, HiddenNames],
    ) -> None:
        self._engine = engine
        self._bounds = bounds
        self._hidden = hidden
        self._selector = selector
        self._homes: list[deque[Task]] = [deque() for _ in range(size)]
        self._workers: list[Worker | None] = [None] * (size + SPARE)
        self._pulses: dict[Worker, tuple[object, float]] = {}

    def submit(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._home(task).append(task)
        self._dispatch(time.monotonic())

    def cancel(self, task: Task) -> None:
        """Nobody waits for this job any more: it is not begun, and its statement ends if it runs already."""
        task.done = True
        for home in self._homes:
            if task in home:
                home.remove(task)
        for slot, worker in enumerate(self._workers):
            if worker is not None and worker.is_abandoned():
                self._replace_worker(slot, worker)
        self._dispatch(time.monotonic())

    def _home(self, task: Task) -> deque[Task]:
        if len(self._homes) == 1:
            return self._homes[0]
        location = task.job[1][0]
        number = zlib.crc32(location.encode()) % len(self._homes)
        return self._homes[number]

    def _dispatch(self, now: float) -> None:
        n_homes = len(self._homes)
        for slot in range(n_homes):
            self._feed(slot, now)
        for slot in range(n_homes, len(self._workers)):
            workers_before = self._workers[:slot]
            if not any(self._homes):
                return
            if not all(worker is not None and worker.is_stuck(now) for worker in workers_before):
                return
            is_first_spare = slot == n_homes
            if is_first_spare or self._has_urgent_task():
                self._feed(slot, now)

    def _has_urgent_task(self) -> bool:
        """Whether an event loop waits for a job that no worker has."""
        return any(task.urgent for home in self._homes for task in home)

    def _feed(self, slot: int, now: float) -> None:
        """Send jobs to a slot's worker while it has room, and start one if there is none."""
        worker = self._workers[slot]
        while waiting := sum(map(len, self._homes)):
            source: deque[Task] = deque()
            if slot < len(self._homes) and self._homes[slot]:
                source = self._homes[slot]
            elif worker is None or not worker.held:  # it has nothing at all to do: the fullest home
                fullest = max(self._homes, key=len)
                home_slot = self._homes.index(fullest)
                if slot >= len(self._homes) or self._workers[home_slot] is not None:
                    source = fullest
            if not source:
                return
            if worker is not None:
                has_room = len(worker.batches) < IN_FLIGHT
                if not has_room or worker.is_stuck(now):
                    return
            if worker is None:
                try:
                    worker = Worker(self._engine, self._bounds, self._hidden)
                except OSError:  # no more processes or descriptors: the jobs fail, and the caller's code goes on
                    while source:
                        task = source.popleft()
                        task.finish(WorkerDeath(False, 0))
                    return
                self._workers[slot] = worker
                self._selector.register(worker.out, selectors.EVENT_READ, (self, slot))
            # Half of its share of what waits, so that no worker is left with a long queue at the end.
            share = -(-waiting // (2 * len(self._homes)))
            n_jobs = min(len(source), BATCH, max(4, share))
            batch = [source.popleft() for _ in range(n_jobs)]
            worker.send(batch)
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        """Wait for writing exactly while bytes are unsent, because the pipe was full."""
        is_registered = worker.into in self._selector.get_map()
        if worker.unsent and not is_registered:
            slot = self._workers.index(worker)
            self._selector.register(worker.into, selectors.EVENT_WRITE, (self, slot))
        elif is_registered and not worker.unsent:
            self._selector.unregister(worker.into)

    def ready(self, slot: int, events: int) -> None:
        """A pipe of this slot's worker can be read or written."""
        worker = self._workers[slot]
        if worker is None:
            return
        if events & selectors.EVENT_WRITE:
            worker.write()
            self._watch(worker)
        if events & selectors.EVENT_READ and not worker.read():
            self._replace_worker(slot, worker)
        self._dispatch(time.monotonic())

    def tick(self) -> None:
        """Check the workers that have been silent: take back the jobs behind a long statement; kill one that hangs."""
        now = time.monotonic()
        for slot, worker in enumerate(self._workers):
            if worker is None:
                continue
            if not worker.is_slow(now):
                self._pulses.pop(worker, None)  # it is at another statement now
                continue
            if worker.is_abandoned():
                self._replace_worker(slot, worker)
                continue
            for task in reversed(worker.take_back()):
                self._home(task).appendleft(task)
            last_seen, since = self._pulses.get(worker, (None, now))
            statement = worker.page.current()
            _, phase, _ = statement
            is_running = worker.has_begun() and not phase & OPENING  # False while it starts or opens a database
            limit = START_SECONDS
            if is_running:
                limit = self._bounds.timeout_s * KILL_FACTOR + KILL_MARGIN
            if last_seen != statement:
                self._pulses[worker] = statement, now
            elif now - since > limit:
                self._replace_worker(slot, worker, hung=is_running)
        self._dispatch(now)

    def _replace_worker(self, slot: int, worker: Worker, hung: bool = False) -> None:
        """Replace a worker that died: its job gets the reason, the others go to other workers."""
        self._forget(slot, worker)
        death, retired, culprit, others = worker.end()
        death.timeout |= hung
        died_early = culprit is None and not retired
        for task in reversed(others):
            task.deaths += died_early
            if task.deaths >= MAX_EARLY_DEATHS:
                task.finish(death)
            else:
                self._home(task).appendleft(task)
        if culprit is None:
            return
        # A job of which a worker died runs once more, for something outside may have ended it. Twice is no chance.
        culprit.killed += not death.timeout
        if death.timeout or culprit.killed >= FATAL or culprit.done:
            death.proven = not death.opening
            culprit.finish(death)
        else:
            self._home(culprit).appendleft(culprit)

    def _forget(self, slot: int, worker: Worker) -> None:
        for fd in (worker.out, worker.into):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        self._workers[slot] = None
        self._pulses.pop(worker, None)

    def close(self) -> None:
        unfinished: list[Task] = []
        for home in self._homes:
            unfinished += home
            home.clear()
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                self._forget(slot, worker)
                worker.close()
                unfinished += [task for _, task in worker.held]
        for task in unfinished:
            task.finish(WorkerDeath(False, 0))
