"""Reading a database's own catalog, in each engine's way, into one `Schema`.

A view is a program of whoever made the database, so its example values are read within limits: SQLite's in the sandbox,
DuckDB's with the sandbox's settings, PostgreSQL's by its server. A view that goes beyond them, or fails, has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.errors import DataError
from pipelines.registry import DIALECTS
from pipelines.sql.dialects.base import quoted
from pipelines.sql.dialects.dialect import SAMPLED_ROWS, Catalog, Query
from pipelines.sql.dialects.values import plain
from pipelines.sql.sandbox.requests import locate
from pipelines.sql.schema import Column, ForeignKey, Schema, Table
from pipelines.types import Database, EngineName, Scalar

VIEW_SECONDS = 60.0  # for one statement of a view, and in engines that count no work for all views of a database
_HIDDEN = 1  # a column of a virtual table that `*` does not show
_Told = tuple[str, str, bool]  # a column: name, type, whether it is of the primary key


_SQLITE_TABLES = """
SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
"""


def comments(database: Database) -> dict[tuple[str, str], str]:
    """What the database's makers say of tables and columns, by (table, column), lower-cased; a table's under column "".

    Nothing where its engine has no comments.

    Raises:
        DataError: the database is missing or cannot be read.
    """
    dialect = DIALECTS[database.engine]
    if not dialect.comments_query:
        return {}
    try:
        with dialect.catalog(locate(database), VIEW_SECONDS) as opened:
            rows = list(opened.query(dialect.comments_query))
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the comments of {database.id} cannot be read: {type(error).__name__}") from None
    return {(table.lower(), column.lower()): " ".join(str(comment).split()) for table, column, comment in rows}


def introspect(database: Database, values: int = 0) -> Schema:
    """Read the schema of a database, with up to `values` example values a column.

    Raises:
        DataError: it is missing or cannot be read.
    """
    dialect = DIALECTS[database.engine]
    where = "" if dialect.is_server() else f" at {database.location}"  # an address may hold a password
    try:
        with dialect.catalog(locate(database), VIEW_SECONDS) as opened:
            return (
                _of_sqlite(opened, values)
                if dialect.sqlglot == "sqlite"
                else _of_others(database.engine, opened, values)
            )
    except FileNotFoundError:
        raise DataError(f"the database {database.id}{where} cannot be read: there is no such file") from None
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the database {database.id}{where} cannot be read: {type(error).__name__}") from None


def _of_sqlite(opened: Catalog, values: int) -> Schema:
    query = opened.query
    tables = []
    for name, kind in query(_SQLITE_TABLES):
        try:
            rows = query(f"PRAGMA table_xinfo({quoted(name)})")  # table_info leaves generated columns out
            declared = [(row[1], row[2], bool(row[5])) for row in rows if row[6] != _HIDDEN]
        except Exception:  # of a view whose query does not run, nothing is known, and nobody can ask it
            if kind != "view":
                raise
            continue
        columns = _with_values(opened, name, kind == "view", declared, values)
        tables.append(Table(name, columns, _sqlite_keys(query, name)))
    return Schema(tuple(tables))


def _sqlite_keys(query: Query, table: str) -> tuple[ForeignKey, ...]:
    keys = []
    rows = sorted(query(f"PRAGMA foreign_key_list({quoted(table)})"), key=lambda row: (row[0], row[1]))
    for _, position, to_table, column, to_column, *_ in rows:
        if to_column is None:  # "REFERENCES t" means t's primary key
            parts = sorted((row[5], row[1]) for row in query(f"PRAGMA table_info({quoted(to_table)})") if row[5])
            primary = [name for _, name in parts]  # in the key's own order
            to_column = primary[position] if position < len(primary) else column
        keys.append(ForeignKey(column, to_table, to_column))
    return tuple(keys)


def _of_others(engine: EngineName, opened: Catalog, values: int) -> Schema:
    query, dialect = opened.query, DIALECTS[engine]
    keys = list(query(dialect.keys_query))
    primary = {(row[0], name) for row in keys if row[1] == "PRIMARY KEY" for name in row[2]}
    foreign: dict[str, list[ForeignKey]] = {}
    for table, kind, columns, to_table, to_columns in keys:
        if kind == "FOREIGN KEY":
            pairs = zip(columns, to_columns, strict=True)
            foreign.setdefault(table, []).extend(ForeignKey(a, to_table, b) for a, b in pairs)
    by_table: dict[str, list[_Told]] = {}
    for table, name, kind in query(dialect.columns_query):
        by_table.setdefault(table, []).append((name, str(kind).upper(), (table, name) in primary))
    views = {row[0] for row in query(dialect.views_query)} if values else set()
    tables = []
    for name, columns_of_table in by_table.items():
        columns = _with_values(opened, name, name in views, columns_of_table, values)
        tables.append(Table(name, columns, tuple(foreign.get(name, ()))))
    return Schema(tuple(tables), engine)


def _with_values(opened: Catalog, table: str, view: bool, columns: Sequence[_Told], count: int) -> tuple[Column, ...]:
    """The columns of a table or view, with up to `count` example values each."""
    values: list[tuple[Scalar, ...]] = [()] * len(columns)
    if count:
        try:
            ask = opened.view if view else opened.query
            values = [_values(ask, table, name, count) for name, _, _ in columns]
        except Exception:  # each driver has an error tree of its own
            if not view:
                raise
    return tuple(Column(*facts, sample) for facts, sample in zip(columns, values, strict=True))


def _values(query: Query, table: str, column: str, count: int) -> tuple[Scalar, ...]:
    """The first distinct values, in the order of the table: the same in every engine, and in every run."""
    rows = query(f"SELECT {quoted(column)} FROM {quoted(table)} LIMIT {SAMPLED_ROWS}")
    return tuple(dict.fromkeys(plain(row[0]) for row in rows if row[0] is not None))[:count]
