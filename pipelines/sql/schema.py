"""Schemas: read from a database of any engine, and rendered for a prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from pipelines.registry import DIALECTS
from pipelines.types import EngineName, Scalar, SchemaItems, text_of

Style = Literal["ddl", "compact", "names"]
VALUE_CHARS = 40


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        type: as the database declares it; may be "".
        primary_key: whether it is (part of) the primary key.
        values: some distinct values that are stored in it; () unless asked for.
        description: what it means, as the database or its benchmark says; "" unless asked for.
    """

    name: str
    type: str
    primary_key: bool = False
    values: tuple[Scalar, ...] = ()
    description: str = ""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`column` refers to `to_column` of `to_table`."""

    column: str
    to_table: str
    to_column: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table or view; its description is "" unless asked for."""

    name: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()
    description: str = ""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of a database, in its own order; its engine decides which names need quotes."""

    tables: tuple[Table, ...]
    engine: EngineName = "sqlite"


def render(schema: Schema, style: Style, keep: SchemaItems | None = None) -> str:
    """The schema as text for a prompt.

    Args:
        style: "ddl" is CREATE TABLE statements; "compact" is one line for tiny models, all separated by single spaces;
            "names" is the table names only.
        keep: leave out tables and columns that are not among these; keys stay with the columns that they join.
    """
    tables = [kept for table in schema.tables if (kept := _kept(table, keep)) is not None]
    name = written(schema.engine)
    if style == "names":
        return " , ".join(name(table.name) for table in tables)
    if style == "compact":
        return _compact(tables, name)
    return "\n".join(_ddl(table, name) for table in tables)


def written(engine: EngineName) -> Callable[[str], str]:
    """A function that writes a name on one line as a statement of the engine does."""
    return lambda name: DIALECTS[engine].identifier(_named(name))


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
    return replace(table, columns=columns, foreign_keys=keys)


def _compact(tables: list[Table], name: Callable[[str], str]) -> str:
    parts = []
    for table in tables:
        shown = [
            f"{name(column.name)} ( {' , '.join(map(_short, column.values))} )" if column.values else name(column.name)
            for column in table.columns
        ]
        parts.append(f"{name(table.name)} : {' , '.join(shown)}")
    for table in tables:
        for key in table.foreign_keys:
            joined = map(name, (table.name, key.column, key.to_table, key.to_column))
            parts.append("{} . {} = {} . {}".format(*joined))
    return " ; ".join(parts)


def _ddl(table: Table, name: Callable[[str], str]) -> str:
    lines = [_ddl_column(table, column, name) for column in table.columns]
    primary = [column.name for column in table.columns if column.primary_key]
    if len(primary) > 1:
        lines.append((f"PRIMARY KEY ({', '.join(map(name, primary))})", ""))
    for key in table.foreign_keys:
        target = f"{name(key.to_table)}({name(key.to_column)})"
        lines.append((f"FOREIGN KEY ({name(key.column)}) REFERENCES {target}", ""))
    last = len(lines) - 1
    body = [f"    {text}{'' if n == last else ','}{note}" for n, (text, note) in enumerate(lines)]
    return "\n".join([f"CREATE TABLE {name(table.name)} ({_note(table.description)}", *body, ");"])


def _named(text: str) -> str:
    """A name or a declared type on one line: a database's file can hold any text there."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _ddl_column(table: Table, column: Column, name: Callable[[str], str]) -> tuple[str, str]:
    alone = column.primary_key and sum(other.primary_key for other in table.columns) == 1
    text = " ".join(filter(None, [name(column.name), _named(column.type), "PRIMARY KEY" if alone else ""]))
    return text, _note(column.description, f"e.g. {', '.join(map(_short, column.values))}" if column.values else "")


def _note(*parts: str) -> str:
    """A comment at a line's end; "" where there is nothing to say."""
    remarks = "; ".join(_named(part) for part in parts if part)
    return f" -- {remarks}" if remarks else ""


def _short(value: Scalar) -> str:
    """A value on one line, cut."""
    text = "".join(
        c if c.isprintable() else "?" for c in (repr(value) if isinstance(value, str | bytes) else text_of(value))
    )
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 3] + "..."
