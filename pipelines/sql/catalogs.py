"""Reading a database's own catalog, in each engine's way, into one `Schema`.

A view is a program of whoever made the database, so its example values are read within limits: SQLite's in the sandbox,
DuckDB's with the sandbox's settings, PostgreSQL's by its server. A view that goes beyond them, or fails, has none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pipelines.errors import DataError
from pipelines.sql.dialects.base import Bounds, fetch
from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.sql.dialects.values import plain, plain_rows
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, quoted
from pipelines.types import Database, ExecutionStatus, Scalar

SAMPLED_ROWS = 10_000  # rows of a table that example values are taken from
# What the views of one SQLite file may do together, in thousands of virtual machine steps: some twenty seconds. Work,
# so that a slow machine shows the same values; time ends only what does not end by itself.
VIEW_WORK = 3_000_000
VIEW_SECONDS = 60.0  # for one statement of a view, and in engines that count no work for all views of a database

Query = Callable[[str], Iterable[Sequence[Any]]]
_Told = tuple[str, str, bool]  # a column: name, type, whether it is of the primary key


class _Opened(NamedTuple):
    """An open database: what asks its catalog and tables, and what asks its views, within limits."""

    query: Query
    view: Query


class _Unread(Exception):
    """A view does not run within its limits."""


_SQLITE_TABLES = """
SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
"""
_COLUMNS = """
SELECT table_name, column_name, data_type FROM information_schema.columns
WHERE table_schema = current_schema() ORDER BY table_name, ordinal_position
"""
_VIEWS = """
SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() AND table_type <> 'BASE TABLE'
"""
_DUCKDB_KEYS = """
SELECT table_name, constraint_type, constraint_column_names, referenced_table, referenced_column_names
FROM duckdb_constraints() WHERE schema_name = current_schema()
    AND constraint_type IN ('PRIMARY KEY', 'FOREIGN KEY') ORDER BY table_name, constraint_index
"""
# information_schema tells constraints to their owner only; the catalog tells them to every reader.
_POSTGRES_KEYS = """
SELECT c.conrelid::regclass::text, CASE c.contype WHEN 'p' THEN 'PRIMARY KEY' ELSE 'FOREIGN KEY' END,
    ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY k(n, o)
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.n ORDER BY k.o),
    c.confrelid::regclass::text,
    ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY k(n, o)
        JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.n ORDER BY k.o)
FROM pg_constraint c JOIN pg_namespace n ON n.oid = c.connamespace
WHERE n.nspname = current_schema() AND c.contype IN ('p', 'f') ORDER BY c.conrelid, c.oid
"""


_DUCKDB_COMMENTS = """
SELECT table_name, '', comment FROM duckdb_tables() WHERE schema_name = current_schema() AND comment IS NOT NULL
UNION ALL SELECT view_name, '', comment FROM duckdb_views() WHERE schema_name = current_schema() AND comment IS NOT NULL
UNION ALL SELECT table_name, column_name, comment FROM duckdb_columns()
    WHERE schema_name = current_schema() AND comment IS NOT NULL
"""
_POSTGRES_COMMENTS = """
SELECT c.relname::text, coalesce(a.attname::text, ''), d.description
FROM pg_description d JOIN pg_class c ON d.classoid = 'pg_class'::regclass AND c.oid = d.objoid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.objsubid AND d.objsubid > 0
WHERE n.nspname = current_schema()
"""


def comments(database: Database) -> dict[tuple[str, str], str]:
    """What COMMENT ON says of tables and columns, by (table, column), lower-cased; a table's own under column "".

    Raises:
        DataError: the database is missing or cannot be read, or its engine has no comments.
    """
    opening, text = {"duckdb": (_duckdb, _DUCKDB_COMMENTS), "postgres": (_postgres, _POSTGRES_COMMENTS)}[
        database.engine
    ]
    try:
        with opening(database.location) as opened:
            rows = opened.query(text)
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the comments of {database.id} cannot be read: {type(error).__name__}") from None
    return {(table.lower(), column.lower()): " ".join(str(said).split()) for table, column, said in rows}


def read(database: Database, values: int) -> Schema:
    """The schema of a database, with up to `values` example values a column.

    Raises:
        DataError: it is missing or cannot be read.
    """
    opening = {"sqlite": _sqlite, "duckdb": _duckdb, "postgres": _postgres}[database.engine]
    where = "" if database.engine == "postgres" else f" at {database.location}"  # a connection string holds a password
    try:
        with opening(database.location) as opened:
            return (_of_sqlite if database.engine == "sqlite" else _of_others)(database, opened, values)
    except FileNotFoundError:
        raise DataError(f"the database {database.id}{where} cannot be read: there is no such file") from None
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the database {database.id}{where} cannot be read: {type(error).__name__}") from None


@contextlib.contextmanager
def _sqlite(location: str) -> Iterator[_Opened]:
    from pipelines.sql.engine import Limits, SqlEngine

    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(contextlib.closing(open_readonly(location)))
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        left = VIEW_WORK

        @functools.cache
        def sandbox() -> SqlEngine:
            return stack.enter_context(SqlEngine(Limits(timeout_s=VIEW_SECONDS)))

        def view(sql: str) -> Iterable[Sequence[Any]]:
            nonlocal left
            if left < 0:
                raise _Unread
            (result,) = sandbox().execute_many([(Database("", "sqlite", location), sql)], SAMPLED_ROWS)
            left = -1 if result.status is ExecutionStatus.TIMEOUT else left - result.work
            if left < 0 or not result.ok:
                raise _Unread
            return result.rows

        yield _Opened(lambda sql: connection.execute(sql).fetchall(), view)


@contextlib.contextmanager
def _duckdb(location: str) -> Iterator[_Opened]:
    import duckdb

    from pipelines.sql.dialects.duckdb import settings

    bounds = Bounds(VIEW_SECONDS, SAMPLED_ROWS, 64_000_000, 2048)
    config = dict(settings(bounds)) | {"lock_configuration": "true"}  # last: what follows cannot be set
    with open(location, "rb"), duckdb.connect(location, read_only=True, config=config) as connection:
        until = time.monotonic() + VIEW_SECONDS

        def view(sql: str) -> Iterable[Sequence[Any]]:
            timer = threading.Timer(_left(until), connection.interrupt)
            timer.start()
            try:
                found = connection.execute(sql)
                return fetch(lambda count: plain_rows(found.fetchmany(count)), SAMPLED_ROWS, bounds.max_bytes)[0]
            finally:
                timer.cancel()
                timer.join()  # an interrupt that came late would end the next statement

        yield _Opened(lambda sql: connection.execute(sql).fetchall(), view)


@contextlib.contextmanager
def _postgres(location: str) -> Iterator[_Opened]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(location).get("options") or ""
    ours = f"{given} -c default_transaction_read_only=on -c statement_timeout={int(VIEW_SECONDS * 1000)}"
    with psycopg.connect(location, options=ours, autocommit=True, connect_timeout=10) as connection:
        until = time.monotonic() + VIEW_SECONDS

        def query(sql: str) -> Iterable[Sequence[Any]]:
            return connection.execute(sql.encode()).fetchall()

        def view(sql: str) -> Iterable[Sequence[Any]]:
            _left(until)
            return query(sql)

        yield _Opened(query, view)


def _left(until: float) -> float:
    """Seconds that are left for views.

    Raises:
        _Unread: none.
    """
    left = until - time.monotonic()
    if left <= 0.0:
        raise _Unread
    return left


def _of_sqlite(database: Database, opened: _Opened, values: int) -> Schema:
    query = opened.query
    tables = []
    for name, kind in query(_SQLITE_TABLES):
        found = [(row[1], row[2], bool(row[5])) for row in query(f"PRAGMA table_info({quoted(name)})")]
        columns = _with_values(opened, name, kind == "view", found, values)
        tables.append(Table(name, columns, _sqlite_keys(query, name)))
    return Schema(tuple(tables))


def _sqlite_keys(query: Query, table: str) -> tuple[ForeignKey, ...]:
    found = []
    rows = sorted(query(f"PRAGMA foreign_key_list({quoted(table)})"), key=lambda row: (row[0], row[1]))
    for _, position, to_table, column, to_column, *_ in rows:
        if to_column is None:  # "REFERENCES t" means t's primary key
            primary = [row[1] for row in query(f"PRAGMA table_info({quoted(to_table)})") if row[5]]
            to_column = primary[position] if position < len(primary) else column
        found.append(ForeignKey(column, to_table, to_column))
    return tuple(found)


def _of_others(database: Database, opened: _Opened, values: int) -> Schema:
    query = opened.query
    keys = query(_DUCKDB_KEYS if database.engine == "duckdb" else _POSTGRES_KEYS)
    primary = {(_bare(row[0]), name) for row in keys if row[1] == "PRIMARY KEY" for name in row[2]}
    foreign: dict[str, list[ForeignKey]] = {}
    for table, kind, columns, to_table, to_columns in keys:
        if kind == "FOREIGN KEY":
            pairs = zip(columns, to_columns, strict=True)
            foreign.setdefault(_bare(table), []).extend(ForeignKey(a, _bare(to_table), b) for a, b in pairs)
    found: dict[str, list[_Told]] = {}
    for table, name, kind in query(_COLUMNS):
        found.setdefault(table, []).append((name, str(kind).upper(), (table, name) in primary))
    views = {row[0] for row in query(_VIEWS)} if values else set()
    tables = []
    for name, told in found.items():
        columns = _with_values(opened, name, name in views, told, values)
        tables.append(Table(name, columns, tuple(foreign.get(name, ()))))
    return Schema(tuple(tables))


def _bare(name: str) -> str:
    """A table's name without its schema and quotes, as PostgreSQL's regclass writes it."""
    return name.rpartition(".")[2].strip('"')


def _with_values(opened: _Opened, table: str, view: bool, columns: Sequence[_Told], count: int) -> tuple[Column, ...]:
    """The columns of a table or view, with up to `count` example values each."""
    values: list[tuple[Scalar, ...]] = [()] * len(columns)
    if count:
        try:
            ask = opened.view if view else opened.query
            values = [_values(ask, table, name, count) for name, _, _ in columns]
        except Exception:  # each driver has an error tree of its own
            if not view:
                raise
    return tuple(Column(*told, shown) for told, shown in zip(columns, values, strict=True))


def _values(query: Query, table: str, column: str, count: int) -> tuple[Scalar, ...]:
    """The first distinct values, in the order of the table: the same in every engine, and in every run."""
    rows = query(f"SELECT {quoted(column)} FROM {quoted(table)} LIMIT {SAMPLED_ROWS}")
    return tuple(dict.fromkeys(plain(row[0]) for row in rows if row[0] is not None))[:count]
