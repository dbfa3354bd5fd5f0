"""The audit log: one JSON line for every statement that ran, in a file that is rotated when it has grown."""

from __future__ import annotations

import datetime
import json
import os
import pwd
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.errors import ResourceError

MAX_BYTES = 64_000_000
KEPT_FILES = 5


class Entry(NamedTuple):
    """One statement.

    Attributes:
        role: "query", "gold" or "prediction".
        ms: wall clock of its execution in the worker.
        outcome: the status, a value of `ExecutionStatus`.
    """

    database: str
    engine: str
    role: str
    sql: str
    ms: float
    rows: int
    outcome: str
    error_class: str | None


class AuditLog:
    """Appends entries; a full file becomes NAME.1, what was NAME.1 becomes NAME.2, and so on up to `KEPT_FILES`.

    Args:
        path: the file; its folder is made.
        max_bytes: a file that has grown beyond this is put aside.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._who = _user()

    def write(self, entries: Iterable[Entry]) -> None:
        """Append entries in one write, so that several processes may share a file.

        Raises:
            ResourceError: the file cannot be written; an audit that silently stops is none.
        """
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        lines = [json.dumps(self._line(now, entry), ensure_ascii=True, separators=(",", ":")) for entry in entries]
        if not lines:
            return
        try:
            self._rotate()
            with self._path.open("ab", buffering=0) as file:
                file.write(("\n".join(lines) + "\n").encode())
        except OSError as error:
            raise ResourceError(f"the audit log {self._path} cannot be written: {error.strerror}") from None

    def _line(self, now: str, entry: Entry) -> dict[str, Any]:
        return {"at": now, "who": self._who, "pid": os.getpid(), **entry._asdict(), "ms": round(entry.ms, 3)}

    def _rotate(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self._path.stat().st_size < self._max_bytes:
                return
        except FileNotFoundError:
            return
        for number in range(KEPT_FILES - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                os.replace(older, self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        return str(os.getuid())
