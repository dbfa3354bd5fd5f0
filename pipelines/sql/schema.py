"""Schemas: read from a database of any engine, and rendered for a prompt."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, EngineName, Scalar, SchemaItems, escape_sequence, text_of
from pipelines.sql.dialects.base import plain_value, quoted
from pipelines.sql.dialects.dialect import SAMPLED_ROWS, Catalog, Query, ViewLimitExceeded

Style = Literal["ddl", "lines", "compact", "names"]
WriteName = Callable[[str], str]  # writes a name, or that of a table with its schema, as a statement does
MAX_VALUE_CHARS = 40
# Declared types; the values of an ENUM are texts.
_NUMERIC_TYPE = re.compile(r"(?is)(?!ENUM\(|SET\().*(INT|REAL|FLOA|DOUB|NUM|DEC)")
_TYPE_WITHOUT_TEXTS = re.compile(r"(?is)(?!ENUM\(|SET\().*(INT|REAL|FLOA|DOUB|NUM|DEC|BOOL|BLOB|DATE|TIME)")


@dataclass(frozen=True, slots=True)
class Column:
    """A column."""

    name: str
    type: str  # Type that the database declares; may be "".
    primary_key: bool = False  # True if it is (part of) the primary key.
    values: tuple[Scalar, ...] = ()  # Some distinct values that are stored in it; () unless asked for.
    description: str = ""  # Meaning, from the database or its benchmark; "" unless asked for.

    @property
    def has_numeric_type(self) -> bool:
        """Whether the declared type is one of numbers."""
        return _NUMERIC_TYPE.match(self.type) is not None

    @property
    def may_hold_texts(self) -> bool:
        """Whether the declared type is none of numbers, times, truth values and bytes."""
        return _TYPE_WITHOUT_TEXTS.match(self.type) is None


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
    # Schemas behind the first one, of PostgreSQL's search path or of a DuckDB file: the names of their tables are
    # qualified ("hr.person").
    other_schemas: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (name, reason) of what the database has and the tables do not show.

    def quoted(self, name: str) -> str:
        """A name in the quotes that any mode of the engine reads."""
        quoted: str = DIALECTS[self.engine].quoted(name)
        return quoted

    def written(self, table: str, write_name: WriteName | None = None) -> str:
        """A table's name in a statement, each of its parts by `write_name`, which by default puts it in quotes."""
        write_name = write_name or self.quoted
        schema = self._schema_of(table)
        if schema is None:
            return write_name(table)
        bare_table = table.removeprefix(f"{schema}.")
        return f"{write_name(schema)}.{write_name(bare_table)}"

    def rows_query(self, table: Table, columns: Sequence[Column], most: int) -> str:
        """A query of some columns of a table, of so many rows at most; 0 reads none."""
        names = ", ".join(self.quoted(column.name) for column in columns)
        return f"SELECT {names} FROM {self.written(table.name)} LIMIT {most}"

    def _schema_of(self, table: str) -> str | None:
        """The schema of a table; None for the first schema."""
        for name in self.other_schemas:
            if table.startswith(f"{name}."):
                return name
        return None

    def of_schemas(self, names: Sequence[str]) -> Schema:
        """The tables of these schemas alone; the first schema of all is main. What that leaves out is noted."""
        tables: list[Table] = []
        left_out: Counter[str] = Counter()  # tables by schema
        for table in self.tables:
            schema = self._schema_of(table.name) or "main"
            if schema in names:
                tables.append(table)
            else:
                left_out[schema] += 1
        notes = list(self.left_out)
        for name, count in left_out.items():
            notes.append((name, f"{count} tables of a schema that --schema did not name"))
        others = tuple(name for name in self.other_schemas if name in names)
        return replace(self, tables=tuple(tables), other_schemas=others, left_out=tuple(notes))


Schemas = Callable[[Database], Schema]  # gives the schema of a database as prompts show it


def render(schema: Schema, style: Style, keep: SchemaItems | None = None) -> str:
    """The schema as text for a prompt.

    Args:
        style: "ddl" is CREATE TABLE statements; "lines" is a line for each table and each join; "compact" is one line
            for tiny models, all separated by single spaces; "names" is the table names only.
        keep: leave out tables and columns that are not among these; keys stay with the columns that they join.
    """
    tables = list(schema.tables)
    if keep is not None:
        tables = [_linked(table, keep) for table in tables if table.name.lower() in keep.tables]
    write_name = written(schema.engine)
    write_table = functools.partial(schema.written, write_name=write_name)
    if style == "names":
        return " , ".join(write_table(table.name) for table in tables)
    if style == "ddl":
        statements = [_create_table(table, write_name, write_table) for table in tables]
        return "\n".join(statements)
    # The other styles: the tables with their columns, then all joins.
    if style == "lines":
        lines = [_table_line(table, write_name, write_table) for table in tables]
        lines += _joins(tables, ".", write_name, write_table)
        return "\n".join(lines)
    items = [_compact_table(table, write_name, write_table) for table in tables]
    items += _joins(tables, " . ", write_name, write_table)
    return " ; ".join(items)


def _joins(tables: Sequence[Table], dot: str, write_name: WriteName, write_table: WriteName) -> list[str]:
    """The foreign keys of all tables as equations; `dot` stands between a table and its column."""
    joins = []
    for table in tables:
        for key in table.foreign_keys:
            column = f"{write_table(table.name)}{dot}{write_name(key.column)}"
            target = f"{write_table(key.to_table)}{dot}{write_name(key.to_column)}"
            joins.append(f"{column} = {target}")
    return joins


def _linked(table: Table, keep: SchemaItems) -> Table:
    """A table after schema linking: primary keys stay, and foreign keys between tables that stay."""
    name = table.name.lower()
    wanted = {column for of_table, column in keep.columns if of_table == name}
    columns = []
    for column in table.columns:
        if column.primary_key or column.name.lower() in wanted:
            columns.append(column)
    keys = []
    for key in table.foreign_keys:
        if key.column.lower() in wanted and key.to_table.lower() in keep.tables:
            keys.append(key)
    return replace(table, columns=tuple(columns), foreign_keys=tuple(keys))


def _create_table(table: Table, write_name: WriteName, write_table: WriteName) -> str:
    """A CREATE TABLE statement, with descriptions and example values as comments."""
    primary = [column.name for column in table.columns if column.primary_key]
    lines: list[tuple[str, str]] = []  # text, comment
    for column in table.columns:
        words = [write_name(column.name)]
        if column.type:
            words.append(_one_line(column.type))
        if primary == [column.name]:
            words.append("PRIMARY KEY")
        examples = ""
        if column.values:
            values = ", ".join(map(_short_literal, column.values))
            examples = f"e.g. {values}"
        note = _note(column.description, examples)
        lines.append((" ".join(words), note))
    if len(primary) > 1:
        names = ", ".join(map(write_name, primary))
        lines.append((f"PRIMARY KEY ({names})", ""))
    for key in table.foreign_keys:
        column_name = write_name(key.column)
        target = f"{write_table(key.to_table)}({write_name(key.to_column)})"
        lines.append((f"FOREIGN KEY ({column_name}) REFERENCES {target}", ""))
    name = write_table(table.name)
    statement = [f"CREATE TABLE {name} ({_note(table.description)}"]
    for number, (text, note) in enumerate(lines, 1):
        comma = "," if number < len(lines) else ""
        statement.append(f"    {text}{comma}{note}")
    statement.append(");")
    return "\n".join(statement)


def _table_line(table: Table, write_name: WriteName, write_table: WriteName) -> str:
    """`name(column, column)`, with each column's example values and description behind it, and then the table's."""
    columns = []
    for column in table.columns:
        words = [write_name(column.name), *map(_short_literal, column.values)]
        if column.description:
            words.append(f"[{_one_line(column.description)}]")
        columns.append(" ".join(words))
    name = write_table(table.name)
    column_list = ", ".join(columns)
    return f"{name}({column_list}){_note(table.description)}"


def _compact_table(table: Table, write_name: WriteName, write_table: WriteName) -> str:
    """`name : column , column ( value , value )`."""
    name = write_table(table.name)
    columns = " , ".join(_compact_column(column, write_name) for column in table.columns)
    return f"{name} : {columns}"


def _compact_column(column: Column, write_name: WriteName) -> str:
    name = write_name(column.name)
    if not column.values:
        return name
    values = " , ".join(map(_short_literal, column.values))
    return f"{name} ( {values} )"


def value_conditions(schema: Schema, stored_values: Iterable[tuple[str, str, str]]) -> list[str]:
    """`table.column = 'value'` for each (table, column, value), as a statement writes it, on one line each."""
    write_name = written(schema.engine)
    conditions = []
    for table, column, value in stored_values:
        table_name = schema.written(table, write_name)
        column_name = write_name(column)
        text = _one_line(value).replace("'", "''")
        conditions.append(f"{table_name}.{column_name} = '{text}'")
    return conditions


def written(engine: EngineName) -> WriteName:
    """A function that writes a name on one line as a statement of the engine does."""
    return lambda name: DIALECTS[engine].identifier(_one_line(name))


def _one_line(text: str) -> str:
    """A name or a declared type on one line: a database's file can hold any text there."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else escape_sequence(sign) for sign in text)


def _note(*remarks: str) -> str:
    text = "; ".join(_one_line(remark) for remark in remarks if remark)
    if not text:
        return ""
    return f" -- {text}"


def literal(value: Scalar) -> str:
    """A value as text; a text or bytes in quotes."""
    if isinstance(value, str | bytes):
        return repr(value)
    return text_of(value)


def _short_literal(value: Scalar) -> str:
    text = "".join(sign if sign.isprintable() else "?" for sign in literal(value))
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return text[: MAX_VALUE_CHARS - 3] + "..."


# Reading a database's own catalog, in each engine's way, into one `Schema`.

VIEW_SECONDS = 60.0  # time for a view's statement, or for all views of a database where the engine counts no work
_HIDDEN_COLUMN = 1  # the mark of a column of a virtual table that `*` does not show
_SQLITE_TABLES = """
SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'
"""
# Kinds of tables that nobody can ask: a view whose query does not run, a virtual table of a module that is not here.
_MAY_FAIL = {"view": "the view does not run", "virtual": "the virtual table cannot be opened"}
DeclaredColumn = tuple[str, str, bool]  # name, type, whether it is in the primary key


def read_comments(database: Database) -> dict[tuple[str, str], str]:
    """The comments of tables and columns, by (table, column); a table's under column "".

    Empty if the engine has no comments.
    """
    dialect = DIALECTS[database.engine]
    if not dialect.comments_query:
        return {}
    try:
        location = dialect.locate(database.location)
        with dialect.catalog(location, VIEW_SECONDS) as opened:
            rows = list(opened.query(dialect.comments_query))
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the comments of {database.id} cannot be read: {type(error).__name__}") from None
    texts = {}
    for table, column, comment in rows:
        texts[table, column] = " ".join(str(comment).split())
    return texts


def introspect(database: Database, values: int = 0) -> Schema:
    """Read the schema of a database, with up to `values` example values a column."""
    dialect = DIALECTS[database.engine]
    where = ""
    if not dialect.is_server:  # an address may hold a password
        where = f" at {database.location}"
    try:
        location = dialect.locate(database.location)
        with dialect.catalog(location, VIEW_SECONDS) as opened:
            if dialect.sqlglot == "sqlite":
                return _sqlite_schema(opened, values)
            return _catalog_schema(database.engine, opened, values)
    except FileNotFoundError:
        raise DataError(f"the database {database.id}{where} cannot be read: there is no such file") from None
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"the database {database.id}{where} cannot be read: {type(error).__name__}") from None


def _sqlite_schema(opened: Catalog, values: int) -> Schema:
    query = opened.query
    tables: list[Table] = []
    left_out: list[tuple[str, str]] = []
    kinds = {name: kind for schema, name, kind, *_ in query("PRAGMA table_list") if schema == "main"}
    for (name,) in query(_SQLITE_TABLES):
        kind = kinds.get(name)
        if kind == "shadow":  # where a text index keeps its words
            continue
        try:
            declared = _sqlite_columns(query, name)
        except Exception as error:
            if kind not in _MAY_FAIL:
                raise
            left_out.append((name, f"{_MAY_FAIL[kind]}, so it is left out: {error}"))
            continue
        columns = _with_values(opened, quoted(name), kind == "view", declared, values)
        keys = _sqlite_keys(query, name)
        tables.append(Table(name, columns, keys))
    return Schema(tuple(tables), left_out=tuple(left_out))


def _sqlite_columns(query: Query, table: str) -> list[DeclaredColumn]:
    columns = []
    rows = query(f"PRAGMA table_xinfo({quoted(table)})")  # table_info leaves generated columns out
    for _, name, kind, _not_null, _default, primary_position, hidden in rows:
        if hidden != _HIDDEN_COLUMN:
            columns.append((name, kind, bool(primary_position)))
    return columns


def _sqlite_keys(query: Query, table: str) -> tuple[ForeignKey, ...]:
    keys = []
    references = query(f"PRAGMA foreign_key_list({quoted(table)})")
    in_order = sorted(references, key=itemgetter(0, 1))
    for _key, position, to_table, column, to_column, *_ in in_order:
        if to_column is None:  # "REFERENCES t" means t's primary key
            primary = _sqlite_primary_key(query, to_table)
            to_column = column
            if position < len(primary):
                to_column = primary[position]
        keys.append(ForeignKey(column, to_table, to_column))
    return tuple(keys)


def _sqlite_primary_key(query: Query, table: str) -> list[str]:
    """The columns of a table's primary key, in the key's own order."""
    columns = []
    rows = query(f"PRAGMA table_info({quoted(table)})")
    for _, name, _kind, _not_null, _default, primary_position in rows:
        if primary_position:
            columns.append((primary_position, name))
    return [name for _, name in sorted(columns)]


def _catalog_schema(engine: EngineName, opened: Catalog, values: int) -> Schema:
    """The schema of an engine whose dialect has queries of its catalog."""
    query = opened.query
    dialect = DIALECTS[engine]
    key_rows = list(query(dialect.keys_query))
    primary, foreign = _catalog_keys(key_rows)
    by_table: dict[str, list[DeclaredColumn]] = {}
    for table, name, kind in query(dialect.columns_query):
        if "'" not in kind:  # the values of an ENUM stay as they are stored
            kind = kind.upper()
        is_primary = (table, name) in primary
        declared_columns = by_table.setdefault(table, [])
        declared_columns.append((name, kind, is_primary))
    views = {row[0] for row in query(dialect.views_query)}
    failing_views = sorted(views - by_table.keys())
    left_out = [(name, "the view does not run, so it is left out") for name in failing_views]
    schemas: list[str] = []
    if dialect.schema_query:
        schemas = [name for name, is_read in query(dialect.schema_query) if is_read]
    partitions: dict[str, int] = {}
    if dialect.partitions_query:
        for table, number in query(dialect.partitions_query):
            partitions[table] = number
    schema = Schema((), engine, other_schemas=tuple(schemas[1:]), left_out=tuple(left_out))
    tables = []
    for name, declared_columns in by_table.items():
        columns = _with_values(opened, schema.written(name), name in views, declared_columns, values)
        keys = tuple(foreign.get(name, ()))
        description = ""
        if name in partitions:
            description = f"has {partitions[name]} partitions"
        tables.append(Table(name, columns, keys, description))
    return replace(schema, tables=tuple(tables))


def _catalog_keys(rows: Sequence[Sequence[Any]]) -> tuple[set[tuple[str, str]], dict[str, list[ForeignKey]]]:
    """(table, column) of primary keys, and the foreign keys of each table, from the rows of a `keys_query`."""
    primary: set[tuple[str, str]] = set()
    foreign: dict[str, list[ForeignKey]] = {}
    for table, kind, columns, to_table, to_columns in rows:
        if kind == "PRIMARY KEY":
            primary.update((table, column) for column in columns)
        elif kind == "FOREIGN KEY" and to_table is not None:  # a schema that is not read has no tables here
            keys = foreign.setdefault(table, [])
            for column, to_column in zip(columns, to_columns, strict=True):
                keys.append(ForeignKey(column, to_table, to_column))
    return primary, foreign


def _with_values(
    opened: Catalog, table: str, view: bool, columns: Sequence[DeclaredColumn], count: int
) -> tuple[Column, ...]:
    """The columns of a table or view, with up to `count` example values each: the first distinct ones, in the order of
    the table, which is the same in every engine and in every run.
    """
    bare = tuple(Column(name, kind, is_primary) for name, kind, is_primary in columns)
    if not count:
        return bare
    query = opened.view if view else opened.query
    sampled = []
    try:
        for column in bare:
            if view and time.monotonic() >= opened.views_until:
                raise ViewLimitExceeded
            rows = query(f"SELECT {quoted(column.name)} FROM {table} LIMIT {SAMPLED_ROWS}")
            distinct = dict.fromkeys(plain_value(value) for (value,) in rows if value is not None)
            values = tuple(distinct)[:count]
            sampled.append(replace(column, values=values))
    except Exception:  # each driver has an error tree of its own
        if view:
            return bare
        raise
    return tuple(sampled)
