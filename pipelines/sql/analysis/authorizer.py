"""What SQLite itself says a query reads: its authorizer is asked about every table and column of a prepared
statement.
"""

from __future__ import annotations

import sqlite3

from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.sql.dialects.sqlite_rules import ALLOW, DENY, READ, guard
from pipelines.types import Database, SchemaItems


def read_items(database: Database, sql: str) -> SchemaItems | None:
    """The tables and columns that the prepared statement reads; None if SQLite refuses to prepare it, or the database
    is not SQLite's or cannot be opened. Nothing is run: EXPLAIN only prepares.
    """
    if database.engine != "sqlite":
        return None
    try:
        connection = open_readonly(database.location)
    except (sqlite3.Error, OSError):
        return None
    try:
        return _prepare(connection, sql)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    finally:
        connection.close()


def _prepare(connection: sqlite3.Connection, sql: str) -> SchemaItems:
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    real_tables = {name.lower() for (name,) in names}
    tables: set[str] = set()
    columns: set[tuple[str, str]] = set()

    def watch(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
        if guard(action, first, second, *rest) == DENY:
            return DENY
        # A CTE counted with count(*) is reported like a table; a view is reported beside what it reads.
        if action == READ and first is not None and first.lower() in real_tables:
            tables.add(first.lower())
            if second and second != "ROWID":
                columns.add((first.lower(), second.lower()))
        return ALLOW

    connection.set_authorizer(watch)
    connection.execute("EXPLAIN " + sql).close()
    return SchemaItems(frozenset(tables), frozenset(columns))
