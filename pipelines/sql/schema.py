"""Schemas: read from a database of any engine, and rendered for a prompt."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Literal

from pipelines.errors import DataError
from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.types import Database, Scalar, SchemaItems

Style = Literal["ddl", "compact", "names"]
SAMPLED_ROWS = 10_000  # rows of a table that example values are taken from
VALUE_CHARS = 40


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        type: as the database declares it; may be "".
        primary_key: whether it is (part of) the primary key.
        values: some distinct values that are stored in it; () unless asked for.
    """

    name: str
    type: str
    primary_key: bool = False
    values: tuple[Scalar, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`column` refers to `to_column` of `to_table`."""

    column: str
    to_table: str
    to_column: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table or view."""

    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database, in its own order."""

    tables: tuple[Table, ...]


def introspect(database: Database, values: int = 0) -> Schema:
    """Read the schema of a database, with up to `values` example values a column.

    Raises:
        DataError: it is missing or cannot be read.
    """
    try:
        with _closing(open_readonly(database.location)) as connection:
            return _sqlite(connection, values)
    except (sqlite3.Error, OSError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise DataError(f"the database {database.id} at {database.location} cannot be read: {reason}") from None


class _closing:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> sqlite3.Connection:
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _sqlite(connection: sqlite3.Connection, values: int) -> Schema:
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    names = connection.execute(
        "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    ).fetchall()
    keys = {name: _sqlite_keys(connection, name) for (name,) in names}
    tables = []
    for (name,) in names:
        columns = tuple(
            Column(row[1], row[2], bool(row[5]), _sqlite_values(connection, name, row[1], values))
            for row in connection.execute(f"PRAGMA table_info({quoted(name)})")
        )
        tables.append(Table(name, columns, keys[name]))
    return Schema(tuple(tables))


def _sqlite_keys(connection: sqlite3.Connection, table: str) -> tuple[ForeignKey, ...]:
    rows = connection.execute(f"PRAGMA foreign_key_list({quoted(table)})").fetchall()
    found = []
    for _, position, to_table, column, to_column, *_ in sorted(rows, key=lambda row: (row[0], row[1])):
        if to_column is None:  # "REFERENCES t" means t's primary key
            primary = [row[1] for row in connection.execute(f"PRAGMA table_info({quoted(to_table)})") if row[5]]
            to_column = primary[position] if position < len(primary) else column
        found.append(ForeignKey(column, to_table, to_column))
    return tuple(found)


def _sqlite_values(connection: sqlite3.Connection, table: str, column: str, count: int) -> tuple[Scalar, ...]:
    if not count:
        return ()
    name = quoted(column)
    sample = f"SELECT {name} FROM {quoted(table)} LIMIT {SAMPLED_ROWS}"
    rows = connection.execute(f"SELECT DISTINCT {name} FROM ({sample}) WHERE {name} IS NOT NULL LIMIT {count}")
    return tuple(row[0] for row in rows)


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def render(schema: Schema, style: Style, keep: SchemaItems | None = None) -> str:
    """The schema as text for a prompt.

    Args:
        style: "ddl" is CREATE TABLE statements; "compact" is one line for tiny models, all separated by single spaces;
            "names" is the table names only.
        keep: leave out tables and columns that are not among these; keys stay with the columns that they join.
    """
    tables = [kept for table in schema.tables if (kept := _kept(table, keep)) is not None]
    if style == "names":
        return " , ".join(table.name for table in tables)
    if style == "compact":
        return _compact(tables)
    return "\n".join(_ddl(table) for table in tables)


def _kept(table: Table, keep: SchemaItems | None) -> Table | None:
    if keep is None:
        return table
    if table.name.lower() not in keep.tables:
        return None
    wanted = {column for name, column in keep.columns if name == table.name.lower()}
    columns = tuple(column for column in table.columns if column.name.lower() in wanted or column.primary_key)
    keys = tuple(
        key for key in table.foreign_keys if key.column.lower() in wanted and key.to_table.lower() in keep.tables
    )
    return Table(table.name, columns, keys)


def _compact(tables: list[Table]) -> str:
    parts = []
    for table in tables:
        names = [" ".join([column.name, *_shown_values(column)]) for column in table.columns]
        parts.append(f"{table.name} : {' , '.join(names)}")
    for table in tables:
        for key in table.foreign_keys:
            parts.append(f"{table.name} . {key.column} = {key.to_table} . {key.to_column}")
    return " ; ".join(parts)


def _shown_values(column: Column) -> list[str]:
    return [f"( {' , '.join(_short(value) for value in column.values)} )"] if column.values else []


def _ddl(table: Table) -> str:
    lines = [_ddl_column(table, column) for column in table.columns]
    primary = [column.name for column in table.columns if column.primary_key]
    if len(primary) > 1:
        lines.append((f"PRIMARY KEY ({', '.join(map(_bare, primary))})", ""))
    for key in table.foreign_keys:
        target = f"{_bare(key.to_table)}({_bare(key.to_column)})"
        lines.append((f"FOREIGN KEY ({_bare(key.column)}) REFERENCES {target}", ""))
    last = len(lines) - 1
    body = [f"    {text}{'' if n == last else ','}{note}" for n, (text, note) in enumerate(lines)]
    return "\n".join([f"CREATE TABLE {_bare(table.name)} (", *body, ");"])


def _ddl_column(table: Table, column: Column) -> tuple[str, str]:
    alone = column.primary_key and sum(other.primary_key for other in table.columns) == 1
    text = " ".join(filter(None, [_bare(column.name), column.type, "PRIMARY KEY" if alone else ""]))
    return text, f" -- e.g. {', '.join(map(_short, column.values))}" if column.values else ""


def _bare(name: str) -> str:
    """A name, quoted only when it must be."""
    return name if name.replace("_", "a").isalnum() and not name[0].isdigit() else quoted(name)


def _short(value: Scalar) -> str:
    """A value on one line, cut."""
    text = "".join(c if c.isprintable() else "?" for c in repr(value) if c)
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."
