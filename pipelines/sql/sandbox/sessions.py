"""The databases that a worker has open, and the gold results that it keeps."""

from __future__ import annotations

import contextlib
import importlib
import marshal
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from pipelines.sql.dialects.base import LIMIT, OK, UNAVAILABLE, Bounds, Clock, OpenFailure, Raw, Session, failure
from pipelines.sql.dialects.hiding import Hidden, Told, identity

OPEN_DATABASES = 128

Opener = Callable[[str, Bounds, Clock], Session]


def opener(session: str) -> Opener:
    """The class that opens databases, by "module:class"; imported here, so that a worker loads one driver only."""
    module, _, name = session.partition(":")
    opener: Opener = getattr(importlib.import_module(module), name)
    return opener


class Databases:
    """Open sessions and kept gold results; both are dropped when the file changes.

    Args:
        begin_opening, end_opening: called around the opening of a database, whose time is not the query's.
        clock: see `SqliteSession`.

    Attributes:
        hidden: what no statement may read, by the `identity` of its database.
    """

    def __init__(
        self,
        open_session: Opener,
        bounds: Bounds,
        clock: Clock,
        begin_opening: Callable[[], None],
        end_opening: Callable[[], None],
    ) -> None:
        self._open = open_session
        self._bounds = bounds
        self._clock = clock
        self._begin_opening = begin_opening
        self._end_opening = end_opening
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._stamps: dict[str, Any] = {}
        self._gold: OrderedDict[tuple[str, str], tuple[Raw, int]] = OrderedDict()
        self._kept = 0
        self.hidden: Mapping[str, Told] = {}
        self._keep = bounds.memory_mb << 20 >> 5  # bytes, marshalled; Python's objects take some 4 times as many

    def refresh(self, locations: set[str]) -> None:
        """Forget what is known of databases whose file changed since it was last looked at."""
        for location in locations:
            stamp = _stamp(location)
            if self._stamps.setdefault(location, stamp) == stamp:
                continue
            self._stamps[location] = stamp
            if location in self._sessions:
                self._sessions.pop(location).close()
            for key in [key for key in self._gold if key[0] == location]:
                self._kept -= self._gold.pop(key)[1]

    def run(self, location: str, sql: str, max_rows: int) -> Raw:
        """Run one statement."""
        try:
            session = self._session(location)
        except OpenFailure as error:
            return failure(UNAVAILABLE, error.error_class, error.message)
        return session.run(sql, max_rows)

    def cold_ms(self, location: str, sql: str) -> float | None:
        """The milliseconds of a statement that has run well before, as `Session.cold_ms` takes them."""
        session = self._session(location)
        self._clock.arm(self._bounds.timeout_s)
        return session.cold_ms(sql, self._bounds.max_rows, self._bounds.timeout_s)

    def _session(self, location: str) -> Session:
        session = self._sessions.get(location)
        if session is not None:
            self._sessions.move_to_end(location)
            return session
        self._begin_opening()
        try:
            session = self._open(location, self._bounds, self._clock)
            hidden = self.hidden.get(identity(location)) if self.hidden else None
            if hidden is not None:
                session.hide(Hidden.of(hidden))
        finally:
            self._end_opening()
        self._sessions[location] = session
        if len(self._sessions) > OPEN_DATABASES:
            self._sessions.popitem(last=False)[1].close()
        return session

    def hold(self, location: str) -> None:
        """Several statements on this database follow."""
        with contextlib.suppress(OpenFailure):
            self._session(location).hold()

    def release(self, location: str) -> None:
        """The statements of `hold` are done."""
        session = self._sessions.get(location)
        if session is not None:
            session.release()

    def gold(self, location: str, sql: str) -> tuple[Raw, bool]:
        """The result of a gold query, and whether it was kept from the last time."""
        key = (location, sql)
        entry = self._gold.get(key)
        if entry is not None:
            self._gold.move_to_end(key)
            return entry[0], True
        raw = whole(self.run(location, sql, self._bounds.max_rows))
        if raw.status == OK:
            size = len(marshal.dumps(list(raw.rows), 2)) + 200
            self._gold[key] = raw, size
            self._kept += size
            while self._kept > self._keep and len(self._gold) > 1:
                self._kept -= self._gold.popitem(last=False)[1][1]
        return raw, False


def _stamp(location: str) -> Any:
    try:
        info = os.stat(location)
    except OSError:
        return None  # a connection string, or a file that is not there
    return info.st_mtime_ns, info.st_size, info.st_ino, _log_of(location)


def _log_of(location: str) -> Any:
    """Of SQLite's log beside a file, what is written before the file itself changes; None where it is empty."""
    try:
        info = os.stat(location + "-wal")
    except OSError:
        return None
    return (info.st_mtime_ns, info.st_size) if info.st_size else None


def whole(raw: Raw) -> Raw:
    """A verdict needs all rows: a result that was cut is none."""
    if raw.truncated:
        return failure(LIMIT, "result_limit", "the result is larger than a verdict may read")
    return raw
