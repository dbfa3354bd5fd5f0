"""The same database in another engine: an SQLite file copied into DuckDB or PostgreSQL, to compare the engines."""

import contextlib
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelines.core.types import Database
from pipelines.sql.dialects.base import quoted
from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, introspect

Kind = Literal["integer", "real", "text", "blob"]
TYPES: dict[str, dict[Kind, str]] = {
    "duckdb": {"integer": "BIGINT", "real": "DOUBLE", "text": "VARCHAR", "blob": "BLOB"},
    "mysql": {"integer": "bigint", "real": "double", "text": "longtext", "blob": "longblob"},
    "postgres": {"integer": "bigint", "real": "double precision", "text": "text", "blob": "bytea"},
}
ROWS_AT_ONCE = 1000
_REAL_WORDS = ("real", "floa", "doub", "num", "dec")


class _Copied(NamedTuple):
    name: str
    columns: Sequence[tuple[str, Kind]]
    primary: Sequence[str]
    foreign: Sequence[ForeignKey]
    rows: Iterator[Sequence[Any]]


def to_duckdb(source: Database, path: Path) -> Database:
    """The SQLite database as a DuckDB file at `path`, which must not exist yet."""
    import duckdb

    with contextlib.closing(duckdb.connect(str(path))) as connection, _opened(source) as (sqlite, schema):
        made: set[str] = set()
        for table in _tables(sqlite, schema):
            _create(connection.execute, "duckdb", "", table, made)
            marks = ", ".join("?" for _ in table.columns)
            for rows in _chunks(table.rows):
                connection.executemany(f"INSERT INTO {quoted(table.name)} VALUES ({marks})", rows)
    return Database(source.id, "duckdb", str(path))


def to_mysql(source: Database, port: int, reader: str) -> Database:
    """The SQLite database as a database of a MariaDB server on this machine, that `reader` may read.

    Names are lower-cased, and text is compared by its bytes, as SQLite does.
    """
    import pymysql

    name = source.id.lower()
    connection = pymysql.connect(
        host="127.0.0.1", port=port, user="owner", sql_mode="ANSI_QUOTES,NO_BACKSLASH_ESCAPES", autocommit=True
    )
    with contextlib.closing(connection), connection.cursor() as cursor, _opened(source) as (sqlite, known):
        cursor.execute(f"CREATE DATABASE {quoted(name)} CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")
        cursor.execute(f"USE {quoted(name)}")
        cursor.execute(f"CREATE USER IF NOT EXISTS {reader}@'%' IDENTIFIED BY 'secret'")
        cursor.execute(f"GRANT SELECT ON {quoted(name)}.* TO {reader}@'%'")
        for table in _tables(sqlite, known):
            columns = ", ".join(f"{quoted(column.lower())} {TYPES['mysql'][kind]}" for column, kind in table.columns)
            cursor.execute(f"CREATE TABLE {quoted(table.name.lower())} ({columns})")
            marks = ", ".join("%s" for _ in table.columns)
            for rows in _chunks(table.rows):
                cursor.executemany(f"INSERT INTO {quoted(table.name.lower())} VALUES ({marks})", rows)
    return Database(source.id, "mysql", f"mysql://{reader}:secret@127.0.0.1:{port}/{name}")


def to_postgres(source: Database, admin: str, reader: str, schema: str | None = None) -> Database:
    """The SQLite database as a schema of a PostgreSQL database, under the reader's connection string.

    Names are lower-cased, so that a query finds them however it writes them.

    Args:
        admin: connection string of a role that may create a schema.
        reader: connection string of a role that `infra/postgres/reader.sql` made, to the same database.
        schema: its name; by default the database's id.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    target = (schema or source.id).lower()
    role = str(conninfo_to_dict(reader)["user"])
    with psycopg.connect(admin) as connection, _opened(source) as (sqlite, known):
        connection.execute(f"CREATE SCHEMA {quoted(target)}".encode())
        made: set[str] = set()
        for table in _tables(sqlite, known):
            _create(lambda sql: connection.execute(sql.encode()), "postgres", f"{quoted(target)}.", table, made)
            into = f"COPY {quoted(target)}.{quoted(table.name.lower())} FROM STDIN"
            with connection.cursor().copy(into.encode()) as copy:
                for row in table.rows:
                    copy.write_row(row)
        for grant in (f"USAGE ON SCHEMA {quoted(target)}", f"SELECT ON ALL TABLES IN SCHEMA {quoted(target)}"):
            connection.execute(f"GRANT {grant} TO {quoted(role)}".encode())
    return Database(source.id, "postgres", make_conninfo(reader, options=f"-csearch_path={target}"))


@contextlib.contextmanager
def _opened(source: Database) -> Iterator[tuple[sqlite3.Connection, Schema]]:
    connection = open_readonly(source.location)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    try:
        yield connection, introspect(source)
    finally:
        connection.close()


def _tables(connection: sqlite3.Connection, schema: Schema) -> Iterator[_Copied]:
    """The tables, those that others refer to first."""
    primary = {table.name.lower(): _primary(connection, table) for table in schema.tables}
    for table in _referred_first(schema.tables):
        columns = [(column.name, _kind(connection, table.name, column)) for column in table.columns]
        foreign = [key for key in table.foreign_keys if primary.get(key.to_table.lower()) == [key.to_column.lower()]]
        broken = connection.execute(f"PRAGMA foreign_key_check({quoted(table.name)})").fetchone()
        rows = _rows(connection, table.name, columns)
        yield _Copied(table.name, columns, primary[table.name.lower()], [] if broken else foreign, rows)


def _primary(connection: sqlite3.Connection, table: Table) -> list[str]:
    """The primary key, lower-cased, if its values are unique and none is NULL; SQLite promises neither."""
    names = [column.name for column in table.columns if column.primary_key]
    if not names:
        return []
    null = " OR ".join(f"{quoted(name)} IS NULL" for name in names)
    listed = ", ".join(map(quoted, names))
    if connection.execute(f"SELECT 1 FROM {quoted(table.name)} WHERE {null}").fetchone():
        return []
    twice = f"SELECT 1 FROM {quoted(table.name)} GROUP BY {listed} HAVING count(*) > 1"
    return [] if connection.execute(twice).fetchone() else [name.lower() for name in names]


def _referred_first(tables: Sequence[Table]) -> list[Table]:
    done: list[Table] = []
    left = list(tables)
    while left:
        waiting = {table.name.lower() for table in left}
        ready = [
            table
            for table in left
            if not any(key.to_table.lower() in waiting - {table.name.lower()} for key in table.foreign_keys)
        ]
        done += ready or left  # tables that refer to each other in a circle come as they are
        left = [table for table in left if table not in done]
    return done


def _kind(connection: sqlite3.Connection, table: str, column: Column) -> Kind:
    """The narrowest type that holds every value that is stored, for SQLite's declared types promise nothing."""
    asked = f"SELECT DISTINCT typeof({quoted(column.name)}) FROM {quoted(table)}"
    stored = {row[0] for row in connection.execute(asked)} - {"null"}
    if not stored:
        declared = column.type.lower()
        return "integer" if "int" in declared else "real" if any(w in declared for w in _REAL_WORDS) else "text"
    if stored <= {"integer", "real"}:
        return "real" if "real" in stored else "integer"
    return "blob" if stored == {"blob"} else "text"


def _rows(connection: sqlite3.Connection, table: str, columns: Sequence[tuple[str, Kind]]) -> Iterator[Sequence[Any]]:
    names = ", ".join(quoted(name) for name, _ in columns)
    for row in connection.execute(f"SELECT {names} FROM {quoted(table)}"):
        yield [_value(value, kind) for value, (_, kind) in zip(row, columns, strict=True)]


def _value(value: Any, kind: Kind) -> Any:
    if kind != "text" or value is None or isinstance(value, str):
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _create(execute: Callable[[str], Any], engine: str, prefix: str, table: _Copied, made: set[str]) -> None:
    """Make the table, with the keys that its data keeps and whose tables are there already."""

    def name(text: str) -> str:
        return quoted(text.lower() if engine == "postgres" else text)

    lines = [f"{name(column)} {TYPES[engine][kind]}" for column, kind in table.columns]
    if table.primary:
        lines.append(f"PRIMARY KEY ({', '.join(map(name, table.primary))})")
    for key in table.foreign:
        if key.to_table.lower() in made:
            target = f"{prefix}{name(key.to_table)} ({name(key.to_column)})"
            lines.append(f"FOREIGN KEY ({name(key.column)}) REFERENCES {target}")
    execute(f"CREATE TABLE {prefix}{name(table.name)} ({', '.join(lines)})")
    made.add(table.name.lower())


def _chunks(rows: Iterator[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
        yield chunk
