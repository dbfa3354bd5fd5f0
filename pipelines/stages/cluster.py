"""Shards on a Dask cluster: on this machine's cores, or behind the address of a scheduler.

The unit is the shard, hundreds of items, made by the same code as without Dask; workers write it where it belongs, so
they must see the same store and the cards of databases. A shard that a worker took down with it is made by another one.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines.databases import card
from pipelines.errors import BoundaryError, ResourceError

LOCAL = "local"
WAIT_S = 30  # for the scheduler to answer
RETRIES = 2  # beside Dask's own of a shard whose worker died
Run = Callable[[Sequence[Any], Path], str]
Job = tuple[Sequence[Any], Path]

_runs: dict[bytes, Run] = {}  # of this worker process, by what made them: the current stage's


def fan_out(
    address: str,
    processes: int,
    make: Callable[..., Run],
    args: tuple[Any, ...],
    jobs: Sequence[Job],
    finish: Callable[[Run, Sequence[Any], Path], str],
    advance: Callable[[int, str], None],
) -> None:
    """Do jobs, in any order.

    Args:
        address: "local" for `processes` workers on this machine, else a scheduler's address (tcp://HOST:PORT).
        make, args: as in `Shards.run`; called once in each worker process.
        finish: writes one shard with the run that `make` gave.
        advance: told of each finished shard: its items, and how it went.

    Raises:
        ResourceError: Dask is not installed, or no scheduler answers.
        BoundaryError: a shard's worker kept dying.
    """
    try:
        from distributed import Client, KilledWorker, LocalCluster, as_completed
    except ImportError:
        raise ResourceError("rollout.dask: Dask is not installed", "pip install 'sqltrain[dask]'") from None
    with contextlib.ExitStack() as stack:
        where: Any = address
        try:
            if address == LOCAL:
                local = LocalCluster(n_workers=processes, threads_per_worker=1, dashboard_address=None)
                where = stack.enter_context(local)
            client = stack.enter_context(Client(where, timeout=WAIT_S))
        except (OSError, ValueError) as error:
            raise ResourceError(f"rollout.dask: no scheduler at {address}: {error}", "Start: dask scheduler") from None
        plan = pickle.dumps((make, args, finish, card.FOLDER.absolute()))
        todo = {client.submit(work, plan, *job, pure=False, retries=RETRIES): len(job[0]) for job in jobs}
        try:
            for future in as_completed(todo):
                advance(todo[future], future.result())
        except KilledWorker as error:
            raise BoundaryError(f"Dask's workers kept dying: {error}", "Look at their memory limit.") from None
        finally:
            client.cancel(list(todo))


def work(plan: bytes, items: Sequence[Any], path: Path) -> str:
    """One shard, in a worker process."""
    make, args, finish, card.FOLDER = pickle.loads(plan)  # a worker may have been started in another folder
    run = _runs.get(plan)
    if run is None:
        _runs.clear()  # the engine and the model of a stage that is over
        run = _runs[plan] = make(*args)
    done: str = finish(run, items, path)
    return done
