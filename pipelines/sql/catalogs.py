"""Reading a database's own catalog, in each engine's way, into one `Schema`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipelines.errors import DataError
from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.sql.dialects.values import plain
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, quoted
from pipelines.types import Database, Scalar

SAMPLED_ROWS = 10_000  # rows of a table that example values are taken from

Query = Callable[[str], Sequence[Sequence[Any]]]

_COLUMNS = """
SELECT table_name, column_name, data_type FROM information_schema.columns
WHERE table_schema = {schema} ORDER BY table_name, ordinal_position
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


def read(database: Database, values: int) -> Schema:
    """The schema of a database, with up to `values` example values a column.

    Raises:
        DataError: it is missing or cannot be read.
    """
    opened = {"sqlite": _sqlite, "duckdb": _duckdb, "postgres": _postgres}[database.engine]
    where = "" if database.engine == "postgres" else f" at {database.location}"  # a connection string holds a password
    try:
        with opened(database.location) as query:
            return (_of_sqlite if database.engine == "sqlite" else _of_others)(database, query, values)
    except FileNotFoundError:
        raise DataError(f"the database {database.id}{where} cannot be read: there is no such file") from None
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the database {database.id}{where} cannot be read: {type(error).__name__}") from None


@contextlib.contextmanager
def _sqlite(location: str) -> Iterator[Query]:
    with contextlib.closing(open_readonly(location)) as connection:
        connection.text_factory = lambda data: data.decode("utf-8", "replace")
        yield lambda sql: connection.execute(sql).fetchall()


@contextlib.contextmanager
def _duckdb(location: str) -> Iterator[Query]:
    import duckdb

    with open(location, "rb"), duckdb.connect(location, read_only=True) as connection:
        yield lambda sql: connection.execute(sql).fetchall()


@contextlib.contextmanager
def _postgres(location: str) -> Iterator[Query]:
    import psycopg

    with psycopg.connect(location, autocommit=True, connect_timeout=10) as connection:
        yield lambda sql: connection.execute(sql.encode()).fetchall()


def _of_sqlite(database: Database, query: Query, values: int) -> Schema:
    names = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    tables = []
    for (name,) in query(names):
        columns = tuple(
            Column(row[1], row[2], bool(row[5]), _values(query, name, row[1], values))
            for row in query(f"PRAGMA table_info({quoted(name)})")
        )
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


def _of_others(database: Database, query: Query, values: int) -> Schema:
    schema = "current_schema()"
    keys = query(_DUCKDB_KEYS if database.engine == "duckdb" else _POSTGRES_KEYS)
    primary = {(_bare(row[0]), name) for row in keys if row[1] == "PRIMARY KEY" for name in row[2]}
    foreign: dict[str, list[ForeignKey]] = {}
    for table, kind, columns, to_table, to_columns in keys:
        if kind == "FOREIGN KEY":
            pairs = zip(columns, to_columns, strict=True)
            foreign.setdefault(_bare(table), []).extend(ForeignKey(a, _bare(to_table), b) for a, b in pairs)
    tables: dict[str, list[Column]] = {}
    for table, name, kind in query(_COLUMNS.format(schema=schema)):
        column = Column(name, str(kind).upper(), (table, name) in primary, _values(query, table, name, values))
        tables.setdefault(table, []).append(column)
    return Schema(tuple(Table(name, tuple(tables[name]), tuple(foreign.get(name, ()))) for name in tables))


def _bare(name: str) -> str:
    """A table's name without its schema and quotes, as PostgreSQL's regclass writes it."""
    return name.rpartition(".")[2].strip('"')


def _values(query: Query, table: str, column: str, count: int) -> tuple[Scalar, ...]:
    """The first distinct values, in the order of the table: the same in every engine, and in every run."""
    if not count:
        return ()
    rows = query(f"SELECT {quoted(column)} FROM {quoted(table)} LIMIT {SAMPLED_ROWS}")
    return tuple(dict.fromkeys(plain(row[0]) for row in rows if row[0] is not None))[:count]
