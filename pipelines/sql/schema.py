"""Schemas: read from a database of any engine, and rendered for a prompt."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, EngineName, Scalar, SchemaItems, text_of
from pipelines.sql.dialects.base import plain, quoted
from pipelines.sql.dialects.dialect import SAMPLED_ROWS, Catalog, ViewLimitExceeded

Style = Literal["ddl", "compact", "names"]
VALUE_CHARS = 40


@dataclass(frozen=True, slots=True)
class Column:
    """A column."""

    name: str
    type: str  # as the database declares it; may be "".
    primary_key: bool = False  # whether it is (part of) the primary key.
    values: tuple[Scalar, ...] = ()  # some distinct values that are stored in it; () unless asked for.
    description: str = ""  # its meaning, from the database or its benchmark; "" unless asked for.


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`column` refers to `to_column` of `to_table`."""

    column: str
    to_table: str
    to_column: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table or view; its description is "" unless asked for, or unless it has partitions."""

    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()
    description: str = ""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database, in its own order; its engine decides which names need quotes."""

    tables: tuple[Table, ...]
    engine: EngineName = "sqlite"
    # The schemas behind the first one, of PostgreSQL's search path or of a DuckDB file: the names of their tables are
    # qualified ("hr.person").
    other_schemas: tuple[str, ...] = ()
    # What the database has and the tables do not show: its name, and the reason.
    left_out: tuple[tuple[str, str], ...] = ()

    def quoted(self, name: str) -> str:
        """A name in the quotes that any mode of the engine reads."""
        quoted: str = DIALECTS[self.engine].quoted(name)
        return quoted

    def written(self, table: str, part: Callable[[str], str] | None = None) -> str:
        """A table's name in a statement, each of its parts as `part` writes it, which by default is in quotes."""
        part = part or self.quoted
        spot = next((f"{name}." for name in self.other_schemas if table.startswith(f"{name}.")), "")
        own = part(table.removeprefix(spot))
        return f"{part(spot[:-1])}.{own}" if spot else own

    def of_schemas(self, names: Sequence[str]) -> Schema:
        """The tables of these schemas alone; the first schema of all is main. What that leaves out is noted."""
        kept, counts = list[Table](), dict[str, int]()
        for table in self.tables:
            home = next((name for name in self.other_schemas if table.name.startswith(f"{name}.")), "main")
            if home in names:
                kept.append(table)
            else:
                counts[home] = counts.get(home, 0) + 1
        notes = [(name, f"{count} tables of a schema that --schema did not name") for name, count in counts.items()]
        others = tuple(name for name in self.other_schemas if name in names)
        return replace(self, tables=tuple(kept), other_schemas=others, left_out=(*self.left_out, *notes))


def render(schema: Schema, style: Style, keep: SchemaItems | None = None) -> str:
    """The schema as text for a prompt.

    Args:
        style: "ddl" is CREATE TABLE statements; "compact" is one line for tiny models, all separated by single spaces;
            "names" is the table names only.
        keep: leave out tables and columns that are not among these; keys stay with the columns that they join.
    """
    name, tables = written(schema.engine), list(schema.tables)
    table_name = functools.partial(schema.written, part=name)
    if keep is not None:
        # Schema linking: primary keys stay, and foreign keys between tables that stay.
        tables = []
        for table in (table for table in schema.tables if table.name.lower() in keep.tables):
            wanted = {column for of, column in keep.columns if of == table.name.lower()}
            keys = [key for key in table.foreign_keys if key.column.lower() in wanted]
            keys = [key for key in keys if key.to_table.lower() in keep.tables]
            columns = [column for column in table.columns if column.name.lower() in wanted or column.primary_key]
            tables.append(replace(table, columns=tuple(columns), foreign_keys=tuple(keys)))
    if style == "names":
        return " , ".join(table_name(table.name) for table in tables)
    if style == "ddl":
        statements = []
        for table in tables:
            primary = [column.name for column in table.columns if column.primary_key]
            lines = []
            for column in table.columns:
                constraint = "PRIMARY KEY" if primary == [column.name] else ""
                example = f"e.g. {', '.join(map(_short, column.values))}" if column.values else ""
                text = " ".join(filter(None, [name(column.name), _one_line(column.type), constraint]))
                lines.append((text, _note(column.description, example)))
            if len(primary) > 1:
                lines.append((f"PRIMARY KEY ({', '.join(map(name, primary))})", ""))
            for key in table.foreign_keys:
                target = f"{table_name(key.to_table)}({name(key.to_column)})"
                lines.append((f"FOREIGN KEY ({name(key.column)}) REFERENCES {target}", ""))
            last = len(lines) - 1
            body = [f"    {text}{'' if n == last else ','}{note}" for n, (text, note) in enumerate(lines)]
            statements += [f"CREATE TABLE {table_name(table.name)} ({_note(table.description)}", *body, ");"]
        return "\n".join(statements)
    # The compact style: the tables with their columns, then all joins.
    parts = []
    for table in tables:
        shown = [
            f"{name(column.name)} ( {' , '.join(map(_short, column.values))} )" if column.values else name(column.name)
            for column in table.columns
        ]
        parts.append(f"{table_name(table.name)} : {' , '.join(shown)}")
    for table in tables:
        for key in table.foreign_keys:
            own, other = table_name(table.name), table_name(key.to_table)
            parts.append(f"{own} . {name(key.column)} = {other} . {name(key.to_column)}")
    return " ; ".join(parts)


def written(engine: EngineName) -> Callable[[str], str]:
    """A function that writes a name on one line as a statement of the engine does."""
    return lambda name: DIALECTS[engine].identifier(_one_line(name))


def _one_line(text: str) -> str:
    """A name or a declared type on one line: a database's file can hold any text there."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _note(*parts: str) -> str:
    remarks = "; ".join(_one_line(part) for part in parts if part)
    return f" -- {remarks}" if remarks else ""


def literal(value: Scalar) -> str:
    """A value as text; a text or bytes in quotes."""
    return repr(value) if isinstance(value, str | bytes) else text_of(value)


def _short(value: Scalar) -> str:
    text = "".join(c if c.isprintable() else "?" for c in literal(value))
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."


# Reading a database's own catalog, in each engine's way, into one `Schema`.

VIEW_SECONDS = 60.0  # for one statement of a view, and in engines that count no work for all views of a database
_HIDDEN = 1  # a column of a virtual table that `*` does not show
_SQLITE_TABLES = """
SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
"""
DeclaredColumn = tuple[str, str, bool]  # name, type, whether it is of the primary key


def comments(database: Database) -> dict[tuple[str, str], str]:
    """The comments of tables and columns, by (table, column); a table's under column "".

    Empty if the engine has no comments.
    """
    dialect = DIALECTS[database.engine]
    if not dialect.comments_query:
        return {}
    try:
        with dialect.catalog(dialect.locate(database.location), VIEW_SECONDS) as opened:
            rows = list(opened.query(dialect.comments_query))
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the comments of {database.id} cannot be read: {type(error).__name__}") from None
    return {(table, column): " ".join(str(comment).split()) for table, column, comment in rows}


def introspect(database: Database, values: int = 0) -> Schema:
    """Read the schema of a database, with up to `values` example values a column."""
    dialect = DIALECTS[database.engine]
    where = "" if dialect.is_server else f" at {database.location}"  # an address may hold a password
    try:
        with dialect.catalog(dialect.locate(database.location), VIEW_SECONDS) as opened:
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
    query, tables, left_out = opened.query, list[Table](), list[tuple[str, str]]()
    shadows = {row[1] for row in query("PRAGMA table_list") if row[2] == "shadow"}  # where a text index keeps its words
    for name, kind in (row for row in query(_SQLITE_TABLES) if row[0] not in shadows):
        try:
            rows = query(f"PRAGMA table_xinfo({quoted(name)})")  # table_info leaves generated columns out
            declared = [(row[1], row[2], bool(row[5])) for row in rows if row[6] != _HIDDEN]
        except Exception as error:  # nobody can ask a view whose query does not run
            if kind != "view":
                raise
            left_out.append((name, f"the view does not run, so it is left out: {error}"))
            continue
        keys = []
        references = sorted(query(f"PRAGMA foreign_key_list({quoted(name)})"), key=lambda row: (row[0], row[1]))
        for _, position, to_table, column, to_column, *_ in references:
            if to_column is None:  # "REFERENCES t" means t's primary key, in the key's own order
                parts = sorted((row[5], row[1]) for row in query(f"PRAGMA table_info({quoted(to_table)})") if row[5])
                to_column = parts[position][1] if position < len(parts) else column
            keys.append(ForeignKey(column, to_table, to_column))
        tables.append(Table(name, _with_values(opened, quoted(name), kind == "view", declared, values), tuple(keys)))
    return Schema(tuple(tables), left_out=tuple(left_out))


def _of_others(engine: EngineName, opened: Catalog, values: int) -> Schema:
    query, dialect = opened.query, DIALECTS[engine]
    keys = list(query(dialect.keys_query))
    primary = {(row[0], name) for row in keys if row[1] == "PRIMARY KEY" for name in row[2]}
    foreign: dict[str, list[ForeignKey]] = {}
    for table, kind, columns, to_table, to_columns in keys:
        if kind == "FOREIGN KEY" and to_table is not None:  # not of a schema that is not read
            pairs = zip(columns, to_columns, strict=True)
            foreign.setdefault(table, []).extend(ForeignKey(a, to_table, b) for a, b in pairs)
    by_table: dict[str, list[DeclaredColumn]] = {}
    for table, name, kind in query(dialect.columns_query):  # the values of an ENUM stay as they are stored
        declared = kind if "'" in kind else kind.upper()
        by_table.setdefault(table, []).append((name, declared, (table, name) in primary))
    views = {row[0] for row in query(dialect.views_query)}
    left_out = [(name, "the view does not run, so it is left out") for name in sorted(views - by_table.keys())]
    schemas = [name for name, place in query(dialect.schema_query) if place] if dialect.schema_query else []
    partitions: dict[str, int] = {}
    for table, number in query(dialect.partitions_query) if dialect.partitions_query else ():
        partitions[table] = number
    schema, tables = Schema((), engine, tuple(schemas[1:])), []
    for name, columns_of_table in by_table.items():
        columns = _with_values(opened, schema.written(name), name in views, columns_of_table, values)
        description = f"has {partitions[name]} partitions" if name in partitions else ""
        tables.append(Table(name, columns, tuple(foreign.get(name, ())), description))
    return replace(schema, tables=tuple(tables), left_out=tuple(left_out))


def _with_values(
    opened: Catalog, table: str, view: bool, columns: Sequence[DeclaredColumn], count: int
) -> tuple[Column, ...]:
    """The columns of a table or view, with up to `count` example values each: the first distinct ones, in the order of
    the table, which is the same in every engine and in every run.
    """
    values: list[tuple[Scalar, ...]] = [()] * len(columns)
    ask = opened.view if view else opened.query
    try:
        for place, (name, _, _) in enumerate(columns if count else ()):
            if view and time.monotonic() >= opened.views_until:
                raise ViewLimitExceeded
            rows = ask(f"SELECT {quoted(name)} FROM {table} LIMIT {SAMPLED_ROWS}")
            values[place] = tuple(dict.fromkeys(plain(row[0]) for row in rows if row[0] is not None))[:count]
    except Exception:  # each driver has an error tree of its own
        if not view:
            raise
        values = [()] * len(columns)
    return tuple(Column(*facts, sample) for facts, sample in zip(columns, values, strict=True))
