"""The hand-over of jobs to worker processes: batches, stealing, and the replacement of workers that died.

No thread is used: whoever waits (a blocking caller, or an event loop) drives the same state machine, so nothing is left
behind and a parent that has PyTorch loaded may fork.
"""

import selectors
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

from pipelines.sql.dialects.base import Bounds, HiddenNames
from pipelines.sql.sandbox.process import IN_FLIGHT, Task, Worker, WorkerDeath

BATCH = 32
STUCK_SECONDS = 0.1  # a statement that runs this long no longer holds up the jobs behind it
STUCK_WORK = 1_500  # nor one that has done so much work: some 30 ms, told from a batch of short ones
SPARE = 3  # workers beyond the pool's own, for when all of these are stuck
KILL_FACTOR = 1.15  # of the limit, without a new statement: the worker's own timer has failed
KILL_MARGIN = 0.5
START_SECONDS = 60.0  # to start a worker or open a database, on a machine that is busy
FATAL = 2  # workers that a statement may end before it is told so
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
        homes = self._homes
        return homes[zlib.crc32(task.job[1][0].encode()) % len(homes)] if len(homes) > 1 else homes[0]

    def _dispatch(self, now: float) -> None:
        for slot in range(len(self._homes)):
            self._feed(slot, now)
        for slot in range(len(self._homes), len(self._workers)):
            if not self._waiting() or not all(self._stuck(worker, now) for worker in self._workers[:slot]):
                return
            if slot == len(self._homes) or any(task.urgent for home in self._homes for task in home):
                self._feed(slot, now)

    def _feed(self, slot: int, now: float) -> None:
        """Send jobs to a slot's worker while it has room, and start one if there is none."""
        worker = self._workers[slot]
        while waiting := self._waiting():
            source: deque[Task] = deque()
            if slot < len(self._homes) and self._homes[slot]:
                source = self._homes[slot]
            elif worker is None or not worker.held:  # it has nothing at all to do: the fullest home
                fullest = max(self._homes, key=len)
                if slot >= len(self._homes) or self._workers[self._homes.index(fullest)] is not None:
                    source = fullest
            if not source or (worker is not None and (len(worker.batches) >= IN_FLIGHT or self._stuck(worker, now))):
                return
            if worker is None:
                try:
                    worker = Worker(self._engine, self._bounds, self._hidden)
                except OSError:  # no more processes or descriptors: the jobs are told, and the caller's code goes on
                    while source:
                        source.popleft().finish(WorkerDeath(False, 0))
                    return
                self._workers[slot] = worker
                self._selector.register(worker.out, selectors.EVENT_READ, (self, slot))
            share = -(-waiting // (2 * len(self._homes)))
            worker.send([source.popleft() for _ in range(min(len(source), BATCH, max(4, share)))])
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        """Ask to be woken when a pipe that was full takes more."""
        is_registered = worker.into in self._selector.get_map()
        if worker.unsent and not is_registered:
            self._selector.register(worker.into, selectors.EVENT_WRITE, (self, self._workers.index(worker)))
        elif is_registered and not worker.unsent:
            self._selector.unregister(worker.into)

    def _waiting(self) -> int:
        return sum(map(len, self._homes))

    def _stuck(self, worker: Worker | None, now: float) -> bool:
        if worker is None or not worker.has_begun():
            return False
        return worker.stuck_for(now) > STUCK_SECONDS or worker.work() > STUCK_WORK

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
        """Look after workers that have been silent: take back what waits behind a long statement; kill what hangs."""
        now = time.monotonic()
        for slot, worker in enumerate(self._workers):
            if worker is None:
                continue
            if worker.stuck_for(now) < STUCK_SECONDS and worker.work() < STUCK_WORK:
                self._pulses.pop(worker, None)  # what it was once slow at says nothing of what it is at now
                continue
            if worker.is_abandoned():
                self._replace_worker(slot, worker)
                continue
            for task in reversed(worker.take_back()):
                self._home(task).appendleft(task)
            pulse, since = self._pulses.get(worker, (None, now))
            running = worker.in_statement()
            if pulse != worker.pulse():
                self._pulses[worker] = worker.pulse(), now
            elif now - since > (self._bounds.timeout_s * KILL_FACTOR + KILL_MARGIN if running else START_SECONDS):
                self._replace_worker(slot, worker, hung=running)
        self._dispatch(now)

    def _replace_worker(self, slot: int, worker: Worker, hung: bool = False) -> None:
        """Replace a worker that died: its job gets the reason, the others go to other workers."""
        self._forget(slot, worker)
        death, retired, culprit, others = worker.end()
        death.timeout |= hung
        for task in reversed(others):
            task.deaths += culprit is None and not retired
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
        unfinished = [task for home in self._homes for task in home]
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                self._forget(slot, worker)
                worker.close()
                unfinished += [task for _, task in worker.held]
        for home in self._homes:
            home.clear()
        for task in unfinished:
            task.finish(WorkerDeath(False, 0))
