"""The audit log: one JSON line for every statement that ran, in a file that is rotated when it has grown."""

import datetime
import itertools
import json
import os
import pwd
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import ResourceError

MAX_BYTES = 64_000_000
MAX_OLD_FILES = 5


class AuditEntry(NamedTuple):
    """A statement."""

    database: str
    engine: str
    role: str  # Word of "query", "gold" and "prediction".
    sql: str
    ms: float  # Wall clock of its execution in the worker, in milliseconds.
    rows: int
    outcome: str  # Status, a value of `ExecutionStatus`.
    error_class: str | None


class AuditLog:
    """Appends entries to a file, whose folder is made; a file that has grown beyond `max_bytes` is put aside."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        try:
            self._user = pwd.getpwuid(os.getuid()).pw_name
        except KeyError:  # a container's user without a name
            self._user = str(os.getuid())

    def write(self, entries: Iterable[AuditEntry]) -> None:
        """Append entries; see `append`."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        head = {"at": now, "who": self._user, "pid": os.getpid()}
        rows = []
        for entry in entries:
            fields = entry._asdict()
            fields["ms"] = round(entry.ms, 3)
            rows.append({**head, **fields})
        append(self._path, rows, self._max_bytes)


def append(path: Path, rows: Sequence[Mapping[str, Any]], max_bytes: int = MAX_BYTES) -> None:
    """Append JSON lines in one write, so that several processes may share a file, which is rotated when it has grown.

    A full file becomes NAME.1, NAME.1 becomes NAME.2, and so on up to `MAX_OLD_FILES`. Without rows the file is made.
    """
    encoder = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
    lines = [encoder.encode(row) + "\n" for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size >= max_bytes:
            _rotate(path)
        with path.open("ab", buffering=0) as file:
            file.write("".join(lines).encode())
    except OSError as error:
        raise ResourceError(f"the audit log {path} cannot be written: {error.strerror}") from None


def _rotate(path: Path) -> None:
    """Number a full file and its predecessors anew; the oldest is overwritten."""
    names = [path]
    for number in range(1, MAX_OLD_FILES + 1):
        names.append(path.with_name(f"{path.name}.{number}"))
    renames = list(itertools.pairwise(names))
    for newer, older in reversed(renames):
        if newer.exists():
            os.replace(newer, older)
