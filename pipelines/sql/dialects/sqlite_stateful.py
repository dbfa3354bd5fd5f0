"""SQLite for statements that change data: each script runs on a private copy in memory, which ends with the script.

The read-only connection of `sqlite.py` reads the database's file into the copy, and runs nothing else. So a statement
may write as it likes: it has no connection to the file, the worker may make no file larger, and what it did is gone
when its answer is.

An episode's later statements must meet what its earlier ones did. So the script of a later turn begins with the texts
of the earlier turns that may have written; a turn that failed is not among them and has left nothing behind.
"""

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.registry import dialect
from pipelines.sql.dialects.base import (
    BETWEEN,
    ERROR,
    LIMIT,
    OK,
    Bounds,
    Clock,
    DatabaseSession,
    OpenFailure,
    Raw,
    failure,
    fetch,
    quoted,
)
from pipelines.sql.dialects.sqlite import (
    ALLOW,
    FUNCTION,
    PRAGMA,
    Sqlite,
    SqliteSession,
    classify,
    general_code,
    guard,
    unreadable,
)
from pipelines.sql.lexical import ORDERED, OUTCOME, statements, writes

# What a script led to on a private copy: the rows of its last statement, and what it has made of the database.

COLUMNS = ("query", "rows", "as_set", "in_order", "ordered", "changed", "state")
PLACES = 2  # decimal places that count (`preprocess_results` of LiveSQLBench's evaluator)
_OBJECTS = "SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"


def outcome(
    rows: Sequence[tuple[Any, ...]], query: bool, ordered: bool, changed: bool, digest_of_state: str
) -> tuple[Any, ...]:
    """The one row of an outcome (`COLUMNS`): digests of the last statement's rows, as a set and in order, and `state`.

    Args:
        query: whether the last statement was one.
        ordered: whether the order of its rows counts; passed on.
        changed: whether the script changed the database; `digest_of_state` is then what `state` says.
    """
    texts = [repr(rounded(row)) for row in rows]
    return int(query), len(rows), digest(sorted(set(texts))), digest(texts), int(ordered), int(changed), digest_of_state


def state(connection: sqlite3.Connection) -> str:
    """A digest that two databases share whose tables and views have the same names, columns and rows (as bags, numbers
    to `PLACES`), the same indices (by table, columns and whether unique) and as many triggers on each table.

    A text that begins with the current day is the same as any other: two runs write different times.
    """
    today = time.strftime("%Y-%m-%d", time.gmtime())
    objects: list[Any] = []
    for kind, name, table in connection.execute(_OBJECTS).fetchall():
        if kind in ("table", "view"):
            cursor = connection.execute(f"SELECT * FROM {quoted(name)}")
            columns = [item[0].lower() for item in cursor.description]
            # The number of rows, and the sum of their digests, which no order changes and no row is kept for.
            count = total = 0
            for row in cursor:
                cells = ["now" if isinstance(cell, str) and cell.startswith(today) else cell for cell in rounded(row)]
                total = (total + int(digest([repr(cells)]), 16)) % (1 << 128)
                count += 1
            objects.append([kind, name.lower(), columns, count, total])
        elif kind == "index":
            indices = connection.execute(f"PRAGMA index_list({quoted(table)})").fetchall()
            columns = [row[2] for row in connection.execute(f"PRAGMA index_info({quoted(name)})")]
            objects.append([kind, table.lower(), [row[2] for row in indices if row[1] == name], columns])
        else:
            objects.append([kind, table.lower()])
    return digest(sorted(map(repr, objects)))


def rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row's cells, numbers to `PLACES`; a whole number is the same whatever its type."""
    cells = [round(cell, PLACES) if isinstance(cell, float) else cell for cell in row]
    return tuple([int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in cells])


def digest(texts: Iterable[str]) -> str:
    """32 hex digits of texts in order."""
    whole = hashlib.blake2b(digest_size=16)
    for text in texts:
        whole.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return whole.hexdigest()


CHANGED = ("rows changed",)  # the column of a statement that returns no rows
SETUP = ".setup.sql"  # beside a database: the script that prepares the copy
SHARE = 4  # the part of the worker's memory that a copy may have

# Action codes of sqlite3_set_authorizer that change data or schema, and nothing beyond the connection's own databases.
# Not among them: ATTACH, which VACUUM and VACUUM INTO are too, DETACH and virtual tables.
_WRITES = frozenset((*range(1, 19), 22, 23, 26, 27, 28, 32))
_PRAGMAS = ("foreign_keys", "quick_check")  # the second is what ADD COLUMN asks
_OWN_FUNCTIONS = ("sqlite_rename_", "sqlite_drop_column")  # of ALTER TABLE; a statement cannot call them


def writing_guard(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
    """SQLite's authorizer callback for a private copy: what `guard` allows, and whatever changes the copy alone."""
    if action in _WRITES:
        return ALLOW
    if action == PRAGMA and first is not None and first.lower() in _PRAGMAS:
        return ALLOW
    if action == FUNCTION and second is not None and second.lower().startswith(_OWN_FUNCTIONS):
        return ALLOW
    return guard(action, first, second, *rest)


@dialect("sqlite_stateful")
class StatefulSqlite(Sqlite):
    """SQLite for questions that change data: an episode has a private copy of the database."""

    session = "pipelines.sql.dialects.sqlite_stateful:StatefulSession"
    keeps_state = True

    @staticmethod
    def keeps(sql: str) -> bool:
        return writes(sql)


class StatefulSession(SqliteSession):
    """One SQLite file, and for each script a copy of it, which may take a part of the worker's memory (`SHARE`).

    Beside the file may lie the script that prepares each copy (`SETUP`).
    """

    def __init__(self, location: str, bounds: Bounds, clock: Clock) -> None:
        super().__init__(location, bounds, clock)
        self._most_bytes = (bounds.memory_mb << 20) // SHARE
        self._source, self._guard = self._connection, writing_guard
        self._source.set_authorizer(None)  # no statement of anybody else runs on it
        setup = Path(location + SETUP)
        try:
            self._setup = statements(setup.read_text(encoding="utf-8")) if setup.is_file() else []
        except (OSError, ValueError):
            raise OpenFailure("setup_failed", "the script that prepares the database cannot be read") from None

    def run(self, sql: str, max_rows: int) -> Raw:
        try:
            return super().run(sql, max_rows)
        finally:
            if self._connection is not self._source:
                self._connection.close()
                self._connection = self._source

    def answer(self, sql: str, max_rows: int) -> Raw:
        """Run a script on a copy of its own: the turns before the last one, then that one, whose last result it is."""
        refused = unreadable(sql.replace(BETWEEN, "\n"))
        if refused is not None:
            return refused
        self._connection = self._copy()
        self._confine()
        try:
            for statement in self._setup:
                self._connection.execute(statement).close()
            self._connection.commit()
        except sqlite3.Error as error:
            raise OpenFailure("setup_failed", f"the database cannot be prepared: {error}") from None
        before = self._changes()
        *earlier, last = sql.split(BETWEEN)
        asks_outcome = bool(earlier) and last in (OUTCOME, ORDERED)
        ordered = last == ORDERED
        if asks_outcome:
            last = earlier.pop()
        for turn in earlier:
            self._turn(turn, 1)
        raw = self._turn(last, max_rows)
        if not asks_outcome or raw.status != OK:
            return raw
        # One row: the rows of the last statement, and what the script has made of the database.
        if raw.truncated:
            return failure(LIMIT, "result_limit", "the result is larger than a verdict may read")
        changed = self._changes() != before
        now = state(self._connection) if changed else ""
        return Raw(OK, COLUMNS, [outcome(raw.rows, raw.columns != CHANGED, ordered, changed, now)])

    def _copy(self) -> sqlite3.Connection:
        """A copy of the file in memory, which cannot grow beyond its part of the memory."""
        source = self._source
        try:
            source.execute("BEGIN")
            source.execute("SELECT 1 FROM sqlite_master").fetchall()  # takes the read lock, within the time for it
            (pages,), (size,) = (source.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
            if pages * size > self._most_bytes:
                raise OpenFailure("database_too_large", f"the database is larger than {self._most_bytes >> 20} MiB")
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=0)
            source.backup(copy)
            copy.execute(f"PRAGMA max_page_count={self._most_bytes // size}")
            copy.execute("PRAGMA temp_store=MEMORY")
        except sqlite3.Error as error:
            message = str(error).replace(self._location, "the database")
            raise OpenFailure(classify(error)[1], f"the database cannot be copied: {message}") from None
        finally:
            source.rollback()
        copy.text_factory = lambda data: data.decode("utf-8", "replace")
        return copy

    def _changes(self) -> tuple[list[tuple[str, ...]], int]:
        """The objects of the copy and the number of rows changed so far."""
        objects = self._connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2").fetchall()
        return objects, self._connection.total_changes

    def _turn(self, script: str, max_rows: int) -> Raw:
        raw = failure(ERROR, "empty", "there is no statement to run")
        try:
            parts = statements(script)
        except ValueError as error:
            return failure(LIMIT, "too_many_statements", str(error))
        for statement in parts:
            self._sql = statement
            cursor = self._connection.execute(statement)
            if cursor.description is None:
                raw = Raw(OK, CHANGED, [(max(0, cursor.rowcount),)])
            else:
                rows, truncated = fetch(cursor.fetchmany, max_rows, self.bounds.max_bytes)
                raw = Raw(OK, tuple([item[0] for item in cursor.description]), rows, truncated)
            cursor.close()
        return raw

    def explain(self, error: Exception) -> Raw:
        """See `SqliteSession.explain`; a copy that may not grow is the statement's own fault."""
        if general_code(error) == "SQLITE_FULL":
            return failure(LIMIT, "size_limit", f"the database may not grow beyond {self._most_bytes >> 20} MiB")
        return super().explain(error)

    # Nothing can be hidden, for a statement that writes could carry it elsewhere; no script touches the file, so none
    # locks it; a script is timed on its copy.
    closed, hold, cold_ms = DatabaseSession.closed, DatabaseSession.hold, DatabaseSession.cold_ms
