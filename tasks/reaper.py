"""Flow runs whose process is gone: found by a lock that the kernel drops, and marked as crashed on the server.

A worker that runs reports that one of its runs ended. When worker, flow and child are killed together (kill -9, a
power cut), nobody does, and the server would show the run as Running for ever. The next run on the store does it then.
"""

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from pipelines.core.errors import DataError
from pipelines.core.files import locked_file, read_json, try_lock
from pipelines.core.store import Store
from tasks.prefect_server import is_away

FLOWS = ".runs/flows"


@contextlib.contextmanager
def run_lock(store: Store, flow_run: str) -> Iterator[None]:
    """Hold a lock named after a flow run as long as this process lives."""
    folder = store.root / FLOWS
    folder.mkdir(parents=True, exist_ok=True)
    holder = {"host": platform.node(), "pid": os.getpid()}
    with locked_file(folder / f"{flow_run}.json", holder):
        yield


def mark_dead_runs(store: Store, say: Callable[[str], None]) -> None:
    """Mark the flow runs of this store whose process is gone as crashed; if the server is away, another run does it."""
    for path in sorted((store.root / FLOWS).glob("*.json")):
        mode = "r+" if os.access(path, os.W_OK) else "r"
        try:  # another user's file can be locked, too; some file systems lock for writers alone
            file = path.open(mode, encoding="utf-8")
        except FileNotFoundError:  # its run has just ended
            continue
        with file:  # the lock keeps other runs from reaping it, too
            if not (try_lock(file) and _is_at(path, file)):
                continue
            try:
                mark_crashed(path, say)
            except Exception as error:
                if not is_away(error):
                    raise
                return
            # A flow run that is started again does not wait for the lock: it puts a file of its own in this place.
            if _is_at(path, file):
                path.unlink(missing_ok=True)


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether a path still leads to an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def mark_crashed(path: Path, say: Callable[[str], None]) -> None:
    """Set the flow run of a lock file to Crashed, unless it has ended or the server does not know it."""
    holder: dict[str, Any] = {}
    with contextlib.suppress(DataError):  # a power cut may have left it empty
        holder = read_json(path)
    pid = holder.get("pid", "?")
    host = holder.get("host", "?")
    reason = f"its process {pid} on {host} is gone; the next run goes on from there"
    with get_client(sync_client=True) as client, contextlib.suppress(ObjectNotFound):
        run = client.read_flow_run(UUID(path.stem))
        if run.state is not None and not run.state.is_final():
            client.set_flow_run_state(run.id, Crashed(message=reason), force=True)
            say(f"flow run {run.name} was {run.state.name}: {reason}")
