"""Claims of stages by runs at work: garbage collection keeps what is claimed, and `sqltrain status` lists the runs."""

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.files import locked_file, require_room, try_lock
from pipelines.core.store import MIN_FREE_MB, Store

RUNS = ".runs"  # folder of the store: one locked file a run
StageName = tuple[str, str]  # stage, key


@contextlib.contextmanager
def claimed(store: Store, names: Iterable[StageName], about: Mapping[str, Any]) -> Iterator[None]:
    """Claim stages, made or not, for a run for the time of the block; the claims of a killed run are free."""
    folder = store.root / RUNS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        require_room(folder, MIN_FREE_MB)
    except OSError as error:
        raise ResourceError(f"cannot write {folder}: {error.strerror}", "Pass --store DIR.") from None
    host = platform.node()
    pid = os.getpid()
    claim = {**about, "host": host, "pid": pid, "since": time.time(), "stages": list(names)}
    path = folder / f"{host}-{pid}-{time.monotonic_ns()}.json"
    with locked_file(path, claim):
        yield


def live_runs(store: Store) -> list[dict[str, Any]]:
    """The claims of runs that are at work, the oldest first; those of runs that have ended are removed.

    Raises:
        DataError: a live run's claim cannot be read, so nobody knows which stages it needs.
    """
    claims = []
    for path in sorted((store.root / RUNS).glob("*.json")):
        try:
            claim = _live_claim(path)
        except FileNotFoundError:  # its run has just ended
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            hint = "A run that is at work wrote it: wait until it is over."
            raise DataError(f"cannot read {path}: {reason}", hint) from None
        if claim is not None:
            claims.append(claim)
    return sorted(claims, key=lambda row: float(row["since"]))


def _live_claim(path: Path) -> dict[str, Any] | None:
    """The claim of a run that is at work; None if the run has ended, and then its file is removed."""
    with path.open(encoding="utf-8") as file:
        if not try_lock(file, shared=True):
            claim: dict[str, Any] = json.load(file)
            return claim
        with contextlib.suppress(OSError):  # a store that may only be read, or another process was first
            path.unlink()
    return None


def claimed_names(store: Store) -> set[StageName]:
    """The stages that runs at work have claimed."""
    names: set[StageName] = set()
    for run in live_runs(store):
        names.update((stage, key) for stage, key in run["stages"])
    return names
