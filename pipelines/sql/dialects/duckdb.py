"""DuckDB: a read-only connection that can reach nothing but its file, whose settings are locked, with one thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import duckdb

from pipelines.sql.dialects.base import (
    ERROR,
    LIMIT,
    OK,
    REFUSED,
    TIMEOUT,
    UNAVAILABLE,
    Bounds,
    Clock,
    OpenFailure,
    Raw,
    Session,
    failure,
    fetch,
)
from pipelines.sql.dialects.guard import check
from pipelines.sql.dialects.values import plain_rows

ALLOWED = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
_MARKS = (
    ("interrupted", TIMEOUT, "timeout"),
    ("out of memory", LIMIT, "memory_limit"),
    ("failed to allocate", LIMIT, "memory_limit"),
    ("could not allocate", LIMIT, "memory_limit"),
    ("disabled by configuration", REFUSED, "not_authorized"),
    ("disabled through configuration", REFUSED, "not_authorized"),
    ("read-only", REFUSED, "not_authorized"),
    ("table with name", ERROR, "no_such_table"),
    ("referenced column", ERROR, "no_such_column"),
    ("does not have a column", ERROR, "no_such_column"),
    ("referenced table", ERROR, "no_such_table"),
    ("ambiguous reference", ERROR, "ambiguous_column"),
    ("function with name", ERROR, "no_such_function"),
    ("no function matches", ERROR, "wrong_arguments"),
    ("must appear in the group by", ERROR, "misuse"),
    ("cannot contain aggregates", ERROR, "misuse"),
    ("conversion error", ERROR, "conversion"),
    ("max expression depth", ERROR, "too_complex"),
    ("parser error", ERROR, "syntax"),
)


def settings(bounds: Bounds) -> Mapping[str, Any]:
    """How a database is opened: no file but its own, no network, no extension, no Python variable taken for a table."""
    return {
        "enable_external_access": "false",
        "python_enable_replacements": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "allow_persistent_secrets": "false",
        "threads": "1",
        "memory_limit": f"{bounds.memory_mb * 3 // 4}MiB",
        "temp_directory": "",
        "max_temp_directory_size": "0KiB",
        "errors_as_json": "false",
    }


class DuckdbSession(Session):
    """One open DuckDB file; arguments as `SqliteSession` has them."""

    def __init__(self, location: str, bounds: Bounds, clock: Clock) -> None:
        self._bounds = bounds
        self._timer = clock
        self._location = location
        if not os.path.isfile(location):
            raise OpenFailure("database_missing", "the database cannot be opened: no such file")
        try:
            self._connection = duckdb.connect(location, read_only=True, config=dict(settings(bounds)))
            self._connection.execute("SET lock_configuration = true")
        except duckdb.Error as error:
            locked = "lock" in str(error).lower()
            reason = "database_locked" if locked else "database_corrupt"
            message = "the database cannot be opened: it is no DuckDB file, or somebody writes to it"
            raise OpenFailure(reason, message) from None
        self._clock = _Clock(self._connection)

    def run(self, sql: str, max_rows: int) -> Raw:
        """Run one statement within the limits."""
        refused = check(sql, "duckdb")
        if refused is not None:
            return refused
        start = perf_counter()
        self._timer.arm(self._bounds.timeout_s)
        self._clock.start(self._bounds.timeout_s)
        try:
            (statement,) = self._connection.extract_statements(sql)
            if statement.type not in ALLOWED:
                return failure(REFUSED, "not_authorized", f"not authorized: {statement.type.name}")
            result = self._connection.execute(statement)
            columns = tuple([item[0] for item in result.description or ()])
            rows, truncated = fetch(lambda count: plain_rows(result.fetchmany(count)), max_rows, self._bounds.max_bytes)
            return Raw(OK, columns, rows, truncated, None, None, (perf_counter() - start) * 1000)
        except MemoryError:
            return failure(LIMIT, "memory_limit", "the query needs more memory than it may have")
        except (duckdb.Error, RuntimeError, ValueError) as error:
            return self._explain(error)
        finally:
            self._clock.stop()

    def _explain(self, error: Exception) -> Raw:
        message = str(error).replace(self._location, "the database").replace(os.path.dirname(self._location), "")
        lowered = message.lower()
        for mark, status, error_class in _MARKS:
            if mark in lowered:
                if status == TIMEOUT:
                    message = f"the query ran longer than {self._bounds.timeout_s:g} s"
                return failure(status, error_class, message)
        if isinstance(error, duckdb.IOException | duckdb.FatalException | duckdb.InternalException):
            return failure(UNAVAILABLE, "disk", "the database could not be read")
        return failure(ERROR, "runtime", message)

    def close(self) -> None:
        """Close the file."""
        self._clock.end()
        self._connection.close()


class _Clock:
    """Interrupts the connection when a statement is past its limit: DuckDB has no timeout of its own."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._over = False
        threading.Thread(target=self._watch, daemon=True).start()

    def start(self, seconds: float) -> None:
        """A statement starts."""
        with self._changed:
            self._deadline = perf_counter() + seconds
            self._changed.notify()

    def stop(self) -> None:
        """The statement is done."""
        with self._changed:
            self._deadline = None

    def end(self) -> None:
        """No more statements."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._over:
                left = None if self._deadline is None else self._deadline - perf_counter()
                if left is not None and left <= 0:
                    self._connection.interrupt()
                    self._deadline = None
                    continue
                self._changed.wait(left)
