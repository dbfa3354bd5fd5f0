"""Long work in shards: each finished shard is a file, so that a killed run loses at most the ones in flight."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from pipelines.core import processes as process_state
from pipelines.core.errors import BoundaryError, ResourceError
from pipelines.core.files import write_atomic
from pipelines.core.store import SHARDS
from pipelines.databases import card
from pipelines.stages.context import Context, Progress

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

    import polars as pl


Item = TypeVar("Item")
Run = Callable[[Sequence[Any], Path], str]
RETRIES = 3
SIZE = "size"  # the file beside the shards with the number of items in each
LOCAL = "local"  # A Dask cluster on this machine's cores; any other is behind the address of a scheduler.
WAIT_S = 30  # seconds in which a scheduler must answer
WORKER_RETRIES = 2  # retries of a shard whose worker died, on top of Dask's own
BATCH = 1024  # items between two moves of the bar, if they are rows of a file
PLACES = "places.npy"  # the file with the row of `data` that each item belongs to, beside the shards

_runs: dict[bytes, Run] = {}  # the current stage's run in this worker process, by its plan


def fan_out(
    address: str,
    processes: int,
    plan: bytes,
    jobs: Sequence[tuple[Sequence[Any], Path]],
    advance: Callable[[int, str], None],
) -> None:
    """Do jobs on a Dask cluster, in any order.

    Args:
        address: "local" for `processes` workers on this machine, else a scheduler's address (tcp://HOST:PORT).
        plan: what `run_shard` takes.
        advance: called with the number of items of each finished shard, and how it went.
    """
    try:
        from distributed import Client, KilledWorker, LocalCluster, as_completed
    except ImportError:
        raise ResourceError("rollout.dask: Dask is not installed", "pip install 'sqltrain[dask]'") from None
    with contextlib.ExitStack() as stack:
        cluster: Any = address
        try:
            if address == LOCAL:
                local = LocalCluster(n_workers=processes, threads_per_worker=1, dashboard_address=None)
                cluster = stack.enter_context(local)
            client = stack.enter_context(Client(cluster, timeout=WAIT_S))
        except (OSError, ValueError) as error:
            raise ResourceError(f"rollout.dask: no scheduler at {address}: {error}", "Start: dask scheduler") from None
        todo = {}
        for items, path in jobs:
            future = client.submit(run_shard, plan, items, path, pure=False, retries=WORKER_RETRIES)
            todo[future] = len(items)
        try:
            for future in as_completed(todo):
                advance(todo[future], future.result())
        except KilledWorker as error:
            raise BoundaryError(f"Dask's workers kept dying: {error}", "Look at their memory limit.") from None
        finally:
            client.cancel(list(todo))


def run_shard(plan: bytes, items: Sequence[Any], path: Path) -> str:
    """One shard, in a worker process; the plan has the pickled `make` and `args` of `Shards.run`, called once, and the
    folder of the databases' cards.
    """
    if plan not in _runs:
        make, args, card.FOLDER = pickle.loads(plan)  # a worker may have been started in another folder
        _runs.clear()  # the engine and the model of a stage that is over
        _runs[plan] = make(*args)  # made here, so that its errors reach the parent as they are
    return _finish(_runs[plan], items, path)


class Shards(Generic[Item]):
    """Work cut into shards of equal size; shard i covers items [i * size, (i + 1) * size).

    Args:
        folder: the stage's work folder; finished shards are `shards/00000.jsonl` and so on in it. The store removes
            them once the stage is complete. Shards that a killed run cut in another size are removed.
    """

    def __init__(self, items: Sequence[Item], size: int, folder: Path) -> None:
        self.items = items
        self.size = size
        self.folder = folder / SHARDS
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / SIZE
        has_this_size = note.is_file() and note.read_text(encoding="utf-8") == str(size)
        if not has_this_size:
            for path in self.folder.glob("*.jsonl"):
                path.unlink()
            write_atomic(note, str(size))

    def __len__(self) -> int:
        return -(-len(self.items) // self.size)

    def path(self, index: int) -> Path:
        """The file of one shard."""
        return self.folder / f"{index:05d}.jsonl"

    def part(self, index: int) -> Sequence[Item]:
        """The items of one shard."""
        start = index * self.size
        return self.items[start : start + self.size]

    def run(
        self,
        make: Callable[..., Run],
        args: tuple[Any, ...],
        processes: int,
        progress: Progress,
        dask: str | None = None,
        enough: Callable[[], bool] | None = None,
    ) -> None:
        """Do the shards that are not there yet.

        Args:
            make: called once in each process with `args`; returns `run(items, path) -> note`, which writes the
                shard's records to `path` and says in a few words how it went.
            dask: a cluster that does them in place of this stage's own processes; see `fan_out`.
            enough: asked after each shard; once it says so, no other is begun, and what is under way is ended.
        """
        for stale in self.folder.glob("*.part-*"):
            stale.unlink()
        missing = []
        for index in range(len(self)):
            if self.path(index).exists():
                part = self.part(index)
                progress.advance(len(part))
            else:
                missing.append(index)
        if not missing:
            return
        if dask is not None:
            plan = _pickled_plan(make, args)
            jobs = [(self.part(index), self.path(index)) for index in missing]
            fan_out(dask, processes, plan, jobs, progress.advance)
        elif processes == 1 or len(missing) == 1:
            self._run_here(make, args, missing, progress, enough)
        else:
            plan = _pickled_plan(make, args)
            self._run_in_processes(plan, missing, processes, progress, enough)

    def _run_here(
        self,
        make: Callable[..., Run],
        args: tuple[Any, ...],
        missing: Sequence[int],
        progress: Progress,
        enough: Callable[[], bool] | None,
    ) -> None:
        """Do the missing shards one after the other in this process."""
        run = make(*args)
        for index in missing:
            if enough is not None and enough():
                break
            part = self.part(index)
            note = _finish(run, part, self.path(index))
            progress.advance(len(part), note)
        del run
        # Give back a GPU's memory: the next stage may be a process of its own.
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            gc.collect()
            torch.cuda.empty_cache()

    def _run_in_processes(
        self,
        plan: bytes,
        missing: Sequence[int],
        processes: int,
        progress: Progress,
        enough: Callable[[], bool] | None,
    ) -> None:
        """Do the missing shards in worker processes; those of workers that died are tried again.

        Raises:
            BoundaryError: workers died in every try.
        """
        for _ in range(RETRIES):
            if not missing:  # the workers died with their work done
                return
            try:
                self._run_in_pool(plan, missing, processes, progress, enough)
                return
            except BrokenProcessPool:  # a worker was killed (out of memory, say): finished shards stand
                missing = [index for index in missing if not self.path(index).exists()]
                progress.say(f"a worker process died; {len(missing)} shards are tried again")
        raise BoundaryError(
            "the worker processes kept dying", "Lower rollout.processes or rollout.slots if memory is short."
        )

    def _run_in_pool(
        self,
        plan: bytes,
        missing: Sequence[int],
        processes: int,
        progress: Progress,
        enough: Callable[[], bool] | None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        start = process_state.DiesWithParent(_number_process)
        n_started = context.Value("i")
        count = min(processes, len(missing))
        with ProcessPoolExecutor(count, context, start, (n_started,)) as pool:
            sizes: dict[Future[str], int] = {}  # items of the shards under way
            for index in missing:
                part = self.part(index)
                future = pool.submit(run_shard, plan, part, self.path(index))
                sizes[future] = len(part)
            while sizes:
                done, _ = wait(sizes, return_when=FIRST_COMPLETED)
                for future in done:
                    progress.advance(sizes.pop(future), future.result())
                if enough is not None and enough():
                    _end_workers(pool)
                    break

    def read(self, index: int) -> list[Any]:
        """What one shard holds: one JSON value a line."""
        with self.path(index).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def is_complete(self) -> bool:
        """Whether every shard is there."""
        paths = [self.path(index) for index in range(len(self))]
        return all(path.exists() for path in paths)

    def rows(self) -> Iterator[Any]:
        """What the shards hold, in the order of the items."""
        for index in range(len(self)):
            yield from self.read(index)


def run_over_rows(
    ctx: Context, rows: pl.Series, unit: str, make: Callable[..., Run], *more: Path, data: Path
) -> Shards[int]:
    """Run `make(recipe, *more, data, places)` over items that stand for these rows of the data stage's file.

    `places` is a file with the row of each item.
    """
    shards = Shards(range(len(rows)), BATCH, ctx.folder)
    places = shards.folder / PLACES
    np.save(places, rows.to_numpy())
    ctx.progress.begin(ctx.stage, len(rows), unit)
    rollout = ctx.recipe.rollout
    args = (ctx.recipe, *more, data, places)
    shards.run(make, args, rollout.processes, ctx.progress, rollout.dask)
    return shards


def _pickled_plan(make: Callable[..., Run], args: tuple[Any, ...]) -> bytes:
    """The plan of `run_shard`; `make` and `args` are pickled once for all shards."""
    return pickle.dumps((make, args, card.FOLDER.absolute()))


def _end_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool's workers without waiting for the work under way, which may take minutes yet."""
    workers = list(pool._processes.values())  # no way to end them before Python 3.14
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()


def _number_process(started: Synchronized[int]) -> None:
    with started.get_lock():
        process_state.number = started.value
        started.value += 1


def _finish(run: Run, items: Sequence[Any], path: Path) -> str:
    """Write beside, then rename: a shard is whole or absent."""
    beside = path.with_name(f"{path.name}.part-{os.getpid()}")
    note = run(items, beside)
    beside.replace(path)
    return note
