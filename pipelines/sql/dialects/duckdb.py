"""DuckDB: a read-only connection that can reach nothing but its file, whose settings are locked, with one thread.

Each statement has a cursor of its own, which is a connection with settings, temporary tables, macros, variables,
prepared statements and a transaction of its own: it ends with the statement, and so do they.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.core.registry import dialect
from pipelines.sql.dialects import base
from pipelines.sql.dialects.base import ERROR, LIMIT, REFUSED, TIMEOUT, UNAVAILABLE
from pipelines.sql.dialects.dialect import SAMPLED_ROWS, Catalog, Dialect
from pipelines.sql.dialects.guard import DUCKDB_TOKEN, body, body_behind_as, token_refusal, with_pivot_values
from pipelines.sql.dialects.parse_trees import duckdb_body, duckdb_names, duckdb_reads, duckdb_refusal

if TYPE_CHECKING:
    import duckdb

# Status and error class by the name of an exception's type, or of one that it is derived from.
_TYPES = {
    "InterruptException": (TIMEOUT, "timeout"),
    "OutOfMemoryException": (LIMIT, "memory_limit"),
    "PermissionException": (REFUSED, "not_authorized"),
    "IOException": (UNAVAILABLE, "disk"),
    "FatalException": (UNAVAILABLE, "disk"),
    "InternalException": (UNAVAILABLE, "disk"),
    "ParserException": (ERROR, "syntax"),
    "SyntaxException": (ERROR, "syntax"),
    "ConversionException": (ERROR, "conversion"),
}
# Error classes by DuckDB's own JSON of the error: (field, start of its value, class).
_MISTAKES = (
    ("type", "Table", "no_such_table"),
    ("exception_message", "Referenced table", "no_such_table"),
    ("error_subtype", "COLUMN_NOT_FOUND", "no_such_column"),
    ("exception_message", "Table ", "no_such_column"),  # "Table "t" does not have a column named "x""
    ("exception_message", "Values list", "no_such_column"),
    ("exception_message", "Ambiguous reference", "ambiguous_column"),
    ("exception_message", "No function matches", "wrong_arguments"),
    ("exception_message", "column ", "misuse"),  # "column "name" must appear in the GROUP BY clause"
    ("exception_message", "aggregate ", "misuse"),
    ("exception_message", "Max expression depth", "too_complex"),
)
# Why a file cannot be opened, by the start of DuckDB's message: (start, class, message).
_FAULTS = (
    ("IO Error: Could not set lock on file", "database_locked", "somebody writes to it"),
    ("IO Error: Cannot open file", "database_unreadable", "its file cannot be read"),
)
# Types with values that Python's lack: months, nanoseconds, more days than a timedelta holds. The engine writes them.
_INEXACT = ("INTERVAL", "_NS")
_ENDS = ("0001-01-01", "9999-12-31")
_opening = threading.Lock()
_STORED = """
SELECT schema_name, table_name, column_name, data_type FROM duckdb_columns() c WHERE NOT internal AND EXISTS (
    SELECT 1 FROM duckdb_tables() t WHERE t.schema_name = c.schema_name AND t.table_name = c.table_name
)
"""
# Functions that take the name of a type in a text.
_TAKE_TYPES = ("from_json", "from_json_strict", "json_transform", "json_transform_strict")
_CACHED_CHECKS = 256  # refusals that are cached
_MAX_CACHED_CHARS = 2_000  # the longest statement whose refusal is cached


def opened(location: str, bounds: base.Bounds) -> duckdb.DuckDBPyConnection:
    """A read-only connection with locked settings: no file but its own, no network, no extension, no Python variable as
    a table, no thread. Raises the driver's error.
    """
    import duckdb

    # Cursors inherit these, and DuckDB applies them in an order of its own.
    config: dict[str, Any] = {
        "python_enable_replacements": "false",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "allow_persistent_secrets": "false",
        "threads": "1",
        "async_threads": "0",  # else eight threads beside the one, 68 MiB each
        "memory_limit": f"{bounds.memory_mb * 3 // 4}MiB",
        "temp_directory": "",
        "max_temp_directory_size": "0KiB",
        "errors_as_json": "true",
    }
    with _opening:  # connections of one process to one file share their settings
        connection = duckdb.connect(location, read_only=True, config=config)
        is_locked = connection.execute("SELECT current_setting('lock_configuration')").fetchone()
        if is_locked != (True,):
            # Either forbids some of the settings above, so both come behind them, and before any other statement.
            connection.execute("SET enable_external_access = false; SET lock_configuration = true")
    return connection


# The name of a relation in cards and prompts: qualified if its schema is not main.
_SHOWN = "CASE schema_name WHEN 'main' THEN '' ELSE schema_name || '.' END || {}"


@dialect("duckdb")
class Duckdb(Dialect):
    """DuckDB: a file."""

    title = "DuckDB"
    session = "pipelines.sql.dialects.duckdb:DuckdbSession"
    sqlglot = "duckdb"
    suffixes = (".duckdb",)
    magic = (8, b"DUCK")
    # A file has no search path: all schemas are read, and tables of all but main have qualified names.
    schema_query = """
SELECT schema_name, dense_rank() OVER (ORDER BY schema_name <> 'main', schema_name) FROM duckdb_schemas()
WHERE database_name = current_database() AND schema_name NOT IN ('information_schema', 'pg_catalog') ORDER BY 2
"""
    columns_query = f"""
SELECT {_SHOWN.format("table_name")}, column_name, data_type FROM duckdb_columns()
WHERE database_name = current_database() AND NOT internal
ORDER BY schema_name <> 'main', schema_name, table_name, column_index
"""
    views_query = f"""
SELECT {_SHOWN.format("view_name")} FROM duckdb_views() WHERE database_name = current_database() AND NOT internal
"""
    keys_query = f"""
SELECT {_SHOWN.format("table_name")}, constraint_type, constraint_column_names, {_SHOWN.format("referenced_table")},
    referenced_column_names
FROM duckdb_constraints() WHERE database_name = current_database() AND constraint_type IN ('PRIMARY KEY', 'FOREIGN KEY')
ORDER BY schema_name, table_name, constraint_index
"""
    comments_query = f"""
SELECT {_SHOWN.format("table_name")}, '', comment FROM duckdb_tables()
    WHERE database_name = current_database() AND comment IS NOT NULL
UNION ALL SELECT {_SHOWN.format("view_name")}, '', comment FROM duckdb_views()
    WHERE database_name = current_database() AND comment IS NOT NULL
UNION ALL SELECT {_SHOWN.format("table_name")}, column_name, comment FROM duckdb_columns()
    WHERE database_name = current_database() AND comment IS NOT NULL
"""

    @classmethod
    def with_schemas(cls, address: str, schemas: Sequence[str]) -> str:
        """The file itself: a card has the schemas that are read (see `Schema.of_schemas`)."""
        return address

    @classmethod
    def locate(cls, location: str) -> str:
        """The file itself: by two links, as two stages have them, DuckDB would open it in one process only once."""
        return os.path.realpath(location)

    @staticmethod
    @contextlib.contextmanager
    def catalog(location: str, view_seconds: float) -> Iterator[Catalog]:
        """An open catalog, with the settings of the sandbox."""
        bounds = base.Bounds(view_seconds, SAMPLED_ROWS, 64_000_000, 2048)
        with open(location, "rb"), opened(location, bounds) as connection:
            until = time.monotonic() + view_seconds

            def view(sql: str) -> Iterable[Sequence[Any]]:
                seconds_left = max(0.0, until - time.monotonic())
                timer = threading.Timer(seconds_left, connection.interrupt)
                timer.start()
                try:
                    cursor = connection.execute(sql)
                    rows, _ = base.fetch(cursor.fetchmany, SAMPLED_ROWS, bounds.max_bytes)
                    return rows
                finally:
                    timer.cancel()
                    timer.join()  # an interrupt that came late would end the next statement

            yield Catalog(lambda sql: connection.execute(sql).fetchall(), view, until)


class DuckdbSession(base.DatabaseSession):
    """An open DuckDB file."""

    engine = "duckdb"
    _connection: duckdb.DuckDBPyConnection | None
    _views: frozenset[str] = frozenset()  # where something is hidden: the folded names of the database's views

    def __init__(self, location: str, bounds: base.Bounds, clock: base.StatementTimer) -> None:
        super().__init__(location, bounds, clock)
        self._checked = functools.lru_cache(_CACHED_CHECKS)(self._refusal)

    def _connect(self) -> duckdb.DuckDBPyConnection:
        import duckdb

        if not os.path.isfile(self._location):
            raise base.OpenFailure("database_missing", "the database cannot be opened: no such file")
        try:
            return opened(self._location, self.bounds)
        except (duckdb.OutOfMemoryException, MemoryError):
            raise base.OpenFailure("memory_limit", "the database cannot be opened in the memory that is left") from None
        except duckdb.Error as error:
            # No statement has been read here, so all of the text is DuckDB's own, but for the file's name at its end.
            for start, reason, message in _FAULTS:
                if str(error).startswith(start):
                    raise base.OpenFailure(reason, f"the database cannot be opened: {message}") from None
            message = "it is no DuckDB file, or it is damaged"
            raise base.OpenFailure("database_corrupt", f"the database cannot be opened: {message}") from None

    def _cursor(self) -> contextlib.closing[duckdb.DuckDBPyConnection]:
        """A cursor, which is a connection with a state of its own."""
        self._connection = self._connection or self._connect()
        return contextlib.closing(self._connection.cursor())

    def answer(self, sql: str, max_rows: int) -> base.RawResult:
        check = self._checked if len(sql) <= _MAX_CACHED_CHARS else self._refusal
        refused = check(sql)
        if refused is not None:
            return refused
        # DuckDB has no timeout of its own.
        with self._cursor() as cursor, base.interrupted_at(self.deadline, cursor.interrupt):
            description = cursor.execute(sql).description or []
            columns = tuple([item[0] for item in description])
            types = [str(item[1]) for item in description]
            as_text = _inexact_columns(types)
            while True:
                if as_text:
                    query = body(sql, DUCKDB_TOKEN)
                    selected = _select_list(len(types), as_text)
                    cursor.execute(f"SELECT {selected} FROM ({query}\n) AS answer")
                raw = self.result(cursor, max_rows)
                infinite = _infinite_dates(types, raw.rows) - as_text
                if not infinite:
                    return raw._replace(columns=columns)
                as_text |= infinite

    def _refusal(self, sql: str) -> base.RawResult | None:
        """Both fences. EXPLAIN is allowed before what is a query by itself, so never with options, nor with ANALYZE."""
        refused = token_refusal(sql, "duckdb")
        if refused is not None:
            return refused
        stripped = sql.lstrip(" \t\n")
        if stripped[:7].lower() == "explain":
            stripped = stripped[7:]
        with self._cursor() as cursor, base.interrupted_at(self.deadline, cursor.interrupt):
            names_in = functools.partial(self._names, cursor, stripped)
            serialize = functools.partial(TREE.of, cursor)
            return duckdb_refusal(stripped, serialize, self.hidden, names_in)

    def _names(self, cursor: duckdb.DuckDBPyConnection, sql: str, tree: Any) -> base.StatementNames:
        """The names in a statement and what it reads."""
        plan = PLAN.of(cursor, sql)
        return duckdb_names(tree, plan, self._views)

    def closure(self, hidden: base.Hidden) -> base.Hidden:
        """The hidden names, the columns computed from them, the types that only hidden columns have, and the views that
        read something hidden or call what no statement may. Macros are hidden too.
        """
        self._checked.cache_clear()
        with self._cursor() as cursor:
            macros = cursor.execute("SELECT function_name FROM duckdb_functions() WHERE NOT internal").fetchall()
            columns = cursor.execute(_STORED).fetchall()
            types = cursor.execute("SELECT type_name, labels FROM duckdb_types() WHERE NOT internal").fetchall()
            views = cursor.execute("SELECT schema_name, view_name, sql FROM duckdb_views() WHERE NOT internal")
            definitions = views.fetchall()
            self._views = frozenset(base.fold(name) for _, name, _ in definitions)
            functions = [str(row[0]) for row in macros]
            computed: list[tuple[str, str]] = []
            for schema, table, column, _ in columns:
                if base.fold(table) in hidden.columns and _is_computed_from(cursor, hidden, schema, table, column):
                    computed.append((table, column))
            hidden = hidden.extended(functions=functions, computed=computed)
            visible_types: list[str] = []
            for _, table, column, kind in columns:
                if not hidden.hides(table, column):
                    visible_types.append(kind)
            hidden = _with_types(hidden, types, visible_types)
            bodies: list[tuple[str, base.StatementNames | None]] = []
            for schema, name, sql in definitions:
                names = self._view_names(cursor, schema, name, sql)
                bodies.append((name, names))
            return hidden.with_views(bodies)

    def _view_names(
        self, cursor: duckdb.DuckDBPyConnection, schema: str, view: str, sql: str
    ) -> base.StatementNames | None:
        """The names in a view's query and what it reads; None if a statement like it would be refused."""
        serialize = functools.partial(TREE.of, cursor)
        tree = duckdb_body(body_behind_as(sql), serialize)
        if tree is None:
            return None
        every_row = f"SELECT * FROM {base.quoted(schema)}.{base.quoted(view)}"
        return self._names(cursor, every_row, tree)

    def explain(self, error: Exception) -> tuple[str, str, str] | None:
        """The meaning of an exception by its type and by DuckDB's account: a JSON object behind the type's name."""
        import duckdb

        if isinstance(error, UnicodeDecodeError):  # a message that quotes part of a character, as of unhex('é')
            text = bytes(error.object).decode(errors="replace")
        elif isinstance(error, duckdb.Error):
            text = str(error)
        else:
            return None
        account = _account_of(text)
        message = str(account.get("exception_message", ""))
        message = message.replace(self._location, "the database")
        folder = os.path.dirname(self._location) + os.sep
        message = message.replace(folder, "")
        status, error_class = _class_of(type(error))
        if status == ERROR:
            error_class = _mistake_class(account) or error_class
        return status, error_class, message

    def probe(self) -> None:
        """Read the catalog; a database that a fatal error has shut is opened again for that."""
        import duckdb

        for is_last in (False, True):
            try:
                with self._cursor() as cursor:
                    cursor.execute("SELECT count(*) FROM duckdb_tables()").fetchall()
                break
            except duckdb.Error:
                if is_last:
                    raise
                self.close()


def _account_of(text: str) -> dict[str, Any]:
    """DuckDB's account of an error, by the text of its exception."""
    name, _, account_text = text.partition(": ")
    try:
        account = json.loads(account_text)
    except ValueError:
        account = None
    if isinstance(account, dict):
        return account
    return {"exception_message": account_text or name}


def _class_of(exception: type[Exception]) -> tuple[str, str]:
    """The status and the error class of an exception, by the nearest of its bases that is known."""
    for kind in exception.__mro__:
        if kind.__name__ in _TYPES:
            return _TYPES[kind.__name__]
    return ERROR, "runtime"


def _inexact_columns(types: Sequence[str]) -> set[int]:
    """The columns whose values the driver changes."""
    inexact: set[int] = set()
    for index, kind in enumerate(types):
        if any(mark in kind for mark in _INEXACT):
            inexact.add(index)
    return inexact


def _select_list(width: int, as_text: Set[int]) -> str:
    """The SELECT list that takes all columns, some of them as text."""
    items: list[str] = []
    for index in range(width):
        item = f"#{index + 1}"
        if index in as_text:
            item = f"{item}::VARCHAR"
        items.append(item)
    return ", ".join(items)


def _infinite_dates(types: Sequence[str], rows: Sequence[base.Row]) -> set[int]:
    """The columns with infinite dates, which the driver reads as Python's first or last one."""
    infinite: set[int] = set()
    for index, kind in enumerate(types):
        if not kind.startswith(("DATE", "TIMESTAMP")):
            continue
        if any(str(row[index]).startswith(_ENDS) for row in rows):
            infinite.add(index)
    return infinite


def _mistake_class(account: Mapping[str, Any]) -> str | None:
    """The error class of a statement's mistake, by DuckDB's account of it; None if it is another one."""
    if str(account.get("type", "")).endswith("Function"):
        return "no_such_function"
    for field, start, error_class in _MISTAKES:
        if str(account.get(field, "")).startswith(start):
            return error_class
    return None


class JsonForm(NamedTuple):
    """A form in which DuckDB describes a statement as JSON."""

    function: str  # Function of DuckDB that makes it.
    options: str  # Arguments of that function.
    several_mark: str  # Text in its answer to a statement that it takes for several.

    def of(self, cursor: duckdb.DuckDBPyConnection, sql: str) -> str:
        """The form of a statement; that of a PIVOT which finds its values itself, as if they were given."""
        text = self._of_one(cursor, sql)
        if self.several_mark in text and "pivot" in sql.lower():
            return self._of_one(cursor, with_pivot_values(sql))
        return text

    def _of_one(self, cursor: duckdb.DuckDBPyConnection, sql: str) -> str:
        quoted = sql.replace("'", "''")
        row = cursor.execute(f"SELECT {self.function}('{quoted}', {self.options})").fetchone()
        if not row:
            return ""
        return str(row[0])


_OPTIONS = "skip_null := true, skip_empty := true"
TREE = JsonForm("json_serialize_sql", _OPTIONS, '"error_type":"not implemented"')
# A plan as DuckDB's binder makes it.
PLAN = JsonForm("json_serialize_plan", f"optimize := false, {_OPTIONS}", "statement of type MULTI")


def _is_computed_from(
    cursor: duckdb.DuckDBPyConnection, hidden: base.Hidden, schema: str, table: str, column: str
) -> bool:
    """Whether a column is computed from a hidden one, or is one."""
    column_name = base.quoted(column)
    query = f"SELECT {column_name} FROM {base.quoted(schema)}.{base.quoted(table)}"
    plan = json.loads(PLAN.of(cursor, query))
    if plan["error"]:
        return True
    reads = duckdb_reads(plan["plans"])
    if reads is None:
        return True
    return any(hidden.hides(*read) for read in reads)


def _with_types(
    hidden: base.Hidden, types: Iterable[tuple[str, Sequence[str] | None]], visible_types: Sequence[str]
) -> base.Hidden:
    """The hidden names with the ENUM types that no column has but hidden ones."""
    others: list[str] = []  # other types of the database, which may hold such an ENUM
    names: list[str] = []
    values: list[str] = []
    for name, labels in types:
        if not labels:
            others.append(name)
        elif not any(_enum(labels) in kind for kind in visible_types):
            names.append(name)
            values.append(",".join(labels))
    if not names:
        return hidden
    return hidden.extended(types=[*others, *names, *values], functions=_TAKE_TYPES)  # whose texts may name a type


def _enum(labels: Iterable[str]) -> str:
    """An ENUM type as DuckDB writes it."""
    texts = ["'" + label.replace("'", "''") + "'" for label in labels]
    values = ", ".join(texts)
    return f"ENUM({values})"
