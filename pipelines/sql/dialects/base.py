"""What every dialect gives a worker: a session that runs one statement at a time and never raises for a bad one.

Only the standard library is imported here: a worker must start in some 30 ms.
"""

from __future__ import annotations

import abc
import marshal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

OK, ERROR, REFUSED, TIMEOUT, LIMIT, UNAVAILABLE = "ok", "error", "refused", "timeout", "limit", "unavailable"
FIRST_FETCH = 64
MESSAGE_CHARS = 500


class Bounds(NamedTuple):
    """The limits of a worker, as numbers (see `pipelines.sql.engine.Limits`)."""

    timeout_s: float
    max_rows: int
    max_bytes: int
    memory_mb: int


class Clock(Protocol):
    """What a session tells of the time that its statement takes."""

    def arm(self, seconds: float) -> None:
        """A statement starts that may take this long: the timer that ends the whole worker is set."""

    def worked(self, units: int) -> None:
        """The statement has done so much work (see `Raw.work`) and goes on."""


class Raw(NamedTuple):
    """What a statement gave, in the worker's own terms: `ExecutionResult` without its imports.

    Attributes:
        work: what it cost, in thousands of virtual machine steps that no clock and no load has a say in; 0 where the
            engine does not count.
    """

    status: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Any, ...]] = ()
    truncated: bool = False
    error: str | None = None
    error_class: str | None = None
    ms: float = 0.0
    work: int = 0


class OpenFailure(Exception):
    """A database cannot be opened.

    Args:
        error_class: a short stable word for it.
        message: without paths or host details.
    """

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.message = message


class Session(abc.ABC):
    """An open database, as a worker keeps it."""

    @abc.abstractmethod
    def run(self, sql: str, max_rows: int) -> Raw:
        """Run one statement; every failure is a `Raw` with its status and class."""

    def hold(self) -> None:  # noqa: B027  a dialect may have nothing to do here
        """Several statements follow: whatever is worth doing once for all of them."""

    def release(self) -> None:  # noqa: B027
        """The statements of `hold` are done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the database."""


def failure(status: str, error_class: str, message: str) -> Raw:
    """A statement that gave no rows."""
    return Raw(status, error=message[:MESSAGE_CHARS], error_class=error_class)


def fetch(fetchmany: Callable[[int], list[tuple[Any, ...]]], max_rows: int, max_bytes: int) -> tuple[list[Any], bool]:
    """At most `max_rows` rows and about `max_bytes` bytes, and whether more were left.

    Rows come in growing chunks; the size of a chunk is that of its marshalled form, the cheapest true measure there is
    (some 15 ns a cell, where asking each cell its length would cost as much as fetching it).
    """
    rows: list[Any] = []
    size, step = 0, FIRST_FETCH
    while True:
        chunk = fetchmany(min(step, max_rows + 1 - len(rows)))
        if not chunk:
            return rows, False
        size += len(marshal.dumps(chunk, 2))
        if size > max_bytes:
            return rows + _within(chunk, max_bytes - (size - len(marshal.dumps(chunk, 2)))), True
        rows += chunk
        if len(rows) > max_rows:
            del rows[max_rows:]
            return rows, True
        if len(chunk) < min(step, max_rows + 1):
            return rows, False
        step = min(step * 4, 4096)


def _within(chunk: list[tuple[Any, ...]], max_bytes: int) -> list[tuple[Any, ...]]:
    """The first rows of a chunk that fit."""
    for number, row in enumerate(chunk):
        max_bytes -= len(marshal.dumps(row, 2))
        if max_bytes < 0:
            return chunk[:number]
    return chunk
