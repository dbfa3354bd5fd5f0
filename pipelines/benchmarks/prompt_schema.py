"""Descriptions of tables and columns, by a benchmark or the database itself, put into a schema for prompts.

BIRD            <db_id>/database_description/<table>.csv beside <db_id>.sqlite: descriptions of columns and values
Spider          tables.json above the folder of databases: natural names; only those that say more than the name
KaggleDBQA      its tables.json has descriptions too, which go before the natural names
DuckDB, PostgreSQL    COMMENT ON TABLE, COMMENT ON COLUMN
MySQL, MariaDB        COMMENT of a table and of a column; views have none
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import logging
import re
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelines.benchmarks.base import by_name
from pipelines.benchmarks.bird import columns_described, description_tables
from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.text_files import read_json_text
from pipelines.core.types import Database, Example, SchemaItems
from pipelines.sql import analyst
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Schema, Schemas, read_comments

# Descriptions by (table, column), a table's own under column ""; names from a benchmark's files are lower-cased.
Descriptions = Mapping[tuple[str, str], str]
log = logging.getLogger(__name__)
TABLES = ("tables.json", "test_tables.json", "KaggleDBQA_tables.json")


def describe(schema: Schema, database: Database) -> Schema:
    """The schema with descriptions of its tables and columns, if there are any."""
    if database.engine == "sqlite":
        descriptions = published_descriptions(Path(database.location))
        key: Callable[[str], str] = str.lower
    else:
        descriptions = read_comments(database)
        key = str
    tables = []
    for table in schema.tables:
        name = key(table.name)
        columns = []
        for column in table.columns:
            column_name = key(column.name)
            description = descriptions.get((name, column_name), "")
            columns.append(dataclasses.replace(column, description=description))
        descriptions_of_table = [descriptions.get((name, "")), table.description]
        description = "; ".join(filter(None, descriptions_of_table))
        described = dataclasses.replace(table, columns=tuple(columns), description=description)
        tables.append(described)
    return dataclasses.replace(schema, tables=tuple(tables))


def published_descriptions(location: Path) -> Descriptions:
    """The descriptions of an SQLite database in the files of its benchmark; {} if there are none."""
    file = location.resolve()
    descriptions: dict[tuple[str, str], str] = {}
    for path in description_files(file):
        if path.suffix == ".csv":
            table = path.stem.strip().lower()
            for name, meaning in columns_described(path):
                descriptions[table, name.lower()] = meaning
        else:
            names_of_databases = _natural_names(path)
            descriptions |= names_of_databases.get(file.parent.name, {})
    return descriptions


def description_files(location: Path) -> Iterator[Path]:
    """The files that describe an SQLite database of a benchmark."""
    file = location.resolve()
    level = min(2, len(file.parents) - 1)
    yield from natural_name_files(file.parents[level])
    yield from description_tables(file.parent)


def natural_name_files(folder: Path) -> Iterator[Path]:
    """The files of a benchmark's folder that hold natural names."""
    for name in TABLES:
        if (folder / name).is_file():
            yield folder / name


@functools.cache
def _natural_names(path: Path) -> dict[str, Descriptions]:
    """Natural names and descriptions in a tables.json, by database, if they add to the names themselves.

    A database whose entry is malformed has none, and the log says so. DataError for a file that is no such list.
    """
    rows = read_json_text(path)
    if not isinstance(rows, list):
        raise DataError(f"{path} is no list of databases", "Take it away, or download it again.")
    objects = [row for row in rows if isinstance(row, dict)]
    entries = by_name(objects, "db_id", path)
    names: dict[str, Descriptions] = {}
    malformed: list[str] = []
    for id, entry in entries.items():
        try:
            names[id] = _names_of_entry(entry)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            malformed.append(id)
    n_unread = len(malformed) + len(rows) - len(entries)
    if n_unread:
        first = ""
        if malformed:
            first = f"; the first named: {malformed[0]}"
        log.warning("%s: %d entries are malformed, so their natural names are not shown%s", path, n_unread, first)
    return names


def _names_of_entry(entry: Mapping[str, Any]) -> Descriptions:
    """The natural names and descriptions of one database; any of Python's look-up errors for a malformed entry."""
    tables = entry["table_names_original"]
    natural_names = entry["column_names"]
    columns: list[tuple[str, str, str]] = []  # (table, column, natural name)
    for (_, natural), (index, name) in zip(natural_names, entry["column_names_original"], strict=True):
        if index >= 0:
            columns.append((tables[index], name, natural))
    texts = entry.get("column_descriptions") or [""] * len(natural_names)
    texts = texts[len(texts) - len(columns) :]  # the first may stand for "*", which belongs to no table
    descriptions = {}
    for (table, name, natural), text in zip(columns, texts, strict=True):
        description = text or natural
        if _adds_to(name or table, description):
            descriptions[table.lower(), name.lower()] = description
    for table, natural in zip(tables, entry["table_names"], strict=True):
        if _adds_to(table, natural):
            descriptions[table.lower(), ""] = natural
    return descriptions


def _adds_to(name: str, description: str) -> bool:
    """Whether a description says more than the name itself."""
    name = name.lower()
    bare_name = name.replace("_", "")
    bare_description = "".join(description.lower().split())
    return bare_description not in ("", name, bare_name)


# The part of its schema that a question is shown, in `meta`.

LINKED = "linked_schema"  # the field with the choice of the recipe's linker (`schema_view: filtered`)
FITTED = "fitted_schema"  # the field with the part that fits of a schema that is too large to be shown whole
# Linkers that are no endpoint.
GOLD = "gold"  # the gold SQL's own tables and columns
LOCAL = "local"  # the schema filter (`databases/schema_filter.py`)
FIT = "fit"  # the schema filter, but only if a schema is too large: a server's way
NO_ENDPOINT = (None, GOLD, LOCAL, FIT)


def with_linked_schema(example: Example, items: SchemaItems | None, schema: Schema, key: str = LINKED) -> Example:
    """The example with the shown part of its schema; all of it if nothing was chosen."""
    if items is None:
        items = all_items(schema)
    columns = []
    for table, column in sorted(items.columns):
        if table:
            columns.append([table, column])
    linked = {"tables": sorted(items.tables), "columns": columns}
    return example.with_meta(**{key: linked})


def all_items(schema: Schema) -> SchemaItems:
    """All tables and columns of a schema, lower-cased."""
    tables = set()
    columns = set()
    for table in schema.tables:
        name = table.name.lower()
        tables.add(name)
        for column in table.columns:
            columns.add((name, column.name.lower()))
    return SchemaItems(frozenset(tables), frozenset(columns))


def gold_items(examples: Sequence[Example], schema: Schemas) -> dict[str, SchemaItems | None]:
    """The items that each example's gold SQL reads, by the example's id; None if it cannot be read."""
    reading = functools.cache(analyst.reading)
    ids = []
    queries = []
    for example in examples:
        database = example.database
        ids.append(example.id)
        queries.append((example.gold_sql, schema(database), reading(database)))
    items = analyst.schema_items(queries)
    return dict(zip(ids, items, strict=True))


def gold_linked(examples: Sequence[Example], schema: Schemas) -> list[Example]:
    """The examples, each with the schema that its gold SQL reads (Reasoning-SQL, 5.1, "correct schema")."""
    gold = gold_items(examples, schema)
    linked = []
    for example in examples:
        items = gold[example.id]
        linked_example = with_linked_schema(example, items, schema(example.database))
        linked.append(linked_example)
    return linked


# Stored values that a question mentions: an index of a database's texts, and its part in a prompt.

LONGEST = 80  # characters of the longest value; longer texts are prose
DISTINCT = 50_000  # texts of a column that are looked at
COARSE = 200  # candidates that BM25 leaves
CLOSE = 0.55  # share of a value that must stand in the question
PLACES = 3  # columns of one value that are shown
RENEWED_S = 3600.0  # seconds after which an index is made anew
WORD = re.compile(r"\w+")
CREATE_INDEX = "CREATE VIRTUAL TABLE searched USING fts5(value, tokenize = 'porter unicode61 remove_diacritics 2')"
SEARCH = "SELECT value FROM searched WHERE searched MATCH ? ORDER BY rank, rowid LIMIT ?"
STOP = frozenset(
    """a an and are as at be by did do does each find for from give had has have how in is it its list many me more most
    much name names no not number of on or show than that the their there these this those to was were what when where
    which who whose with""".split()  # noqa: SIM905
)
ColumnName = tuple[str, str]  # table and column


class ValueIndex:
    """The texts of one database; a context manager. A column that is beyond the limits of the engine has no values."""

    def __init__(self, database: Database, schema: Schema, sql: SqlEngine) -> None:
        self.created = time.monotonic()
        self._store = sqlite3.connect(":memory:", check_same_thread=False)  # a server asks from one thread at a time
        weakref.finalize(self, self._store.close)
        self._store.execute(CREATE_INDEX)
        self._columns_by_value = _columns_by_value(database, schema, sql)
        values = ((value,) for value in self._columns_by_value)
        self._store.executemany("INSERT INTO searched VALUES (?)", values)

    def __enter__(self) -> ValueIndex:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._store.close()

    def __len__(self) -> int:
        return len(self._columns_by_value)

    def find(self, question: str, count: int) -> list[tuple[str, list[ColumnName]]]:
        """Up to `count` values that the question mentions, the likeliest first, with the columns that hold them."""
        words = WORD.findall(question.lower())
        terms = [f'"{word}"' for word in dict.fromkeys(words) if word not in STOP]
        if not terms:
            return []
        any_term = " OR ".join(terms)
        rows = self._store.execute(SEARCH, (any_term, COARSE))
        shares: dict[str, float] = {}  # close value -> its share, in BM25's order
        for (value,) in rows:
            share = closeness(value, question)
            if share >= CLOSE:
                shares[value] = share
        likeliest = sorted(shares, key=lambda value: (-shares[value], -len(value)))  # BM25 decides among equals
        return [(value, self._columns_by_value[value]) for value in likeliest[:count]]


def _columns_by_value(database: Database, schema: Schema, sql: SqlEngine) -> dict[str, list[ColumnName]]:
    """The columns of each text that stands in a database."""
    queries: dict[ColumnName, str] = {}
    for table in schema.tables:
        for column in table.columns:
            if column.may_hold_texts:
                query = _texts_query(database, schema, table.name, column.name)
                queries[table.name, column.name] = query
    jobs = [(database, query) for query in queries.values()]
    results = sql.execute_many(jobs, DISTINCT)
    columns_by_value: dict[str, list[ColumnName]] = {}
    for column_name, result in zip(queries, results, strict=True):
        if not result.ok:
            continue
        for (cell,) in result.rows:
            if isinstance(cell, str) and 0 < len(cell) <= LONGEST:
                columns = columns_by_value.setdefault(cell, [])
                columns.append(column_name)
    return columns_by_value


def _texts_query(database: Database, schema: Schema, table: str, column: str) -> str:
    """The query for the different texts of a column."""
    name = schema.quoted(column)
    if database.engine == "sqlite":
        value = name
        is_text = f"typeof({name}) = 'text' AND "
    else:
        value = f"CAST({name} AS {DIALECTS[database.engine].text_type})"
        is_text = ""
    return (
        f"SELECT DISTINCT {value} FROM {schema.written(table)} "
        f"WHERE {is_text}length({value}) BETWEEN 1 AND {LONGEST} LIMIT {DISTINCT}"
    )


def closeness(value: str, question: str) -> float:
    """The share of a value that stands in the question as one piece, whatever the case."""
    value = value.lower()
    matcher = difflib.SequenceMatcher(None, value, question.lower(), autojunk=False)
    match = matcher.find_longest_match()
    return match.size / len(value)


def retrieve(
    examples: Sequence[Example],
    count: int,
    schema: Schemas,
    sql: SqlEngine,
    kept: dict[Database, ValueIndex] | None = None,
) -> list[Example]:
    """The examples with the values that their questions mention in `meta["values"]`: [table, column, value] each.

    Args:
        kept: indices of earlier calls, which are used until they are `RENEWED_S` old; new ones are added. Without it
            each database is indexed once, and its index is closed before the next.
    """
    numbers_by_database: dict[Database, list[int]] = {}
    for number, example in enumerate(examples):
        numbers = numbers_by_database.setdefault(example.database, [])
        numbers.append(number)
    enriched = list(examples)
    for database, numbers in numbers_by_database.items():
        with contextlib.ExitStack() as stack:
            index = None
            if kept is not None:
                index = kept.get(database)
            if index is None or time.monotonic() - index.created > RENEWED_S:
                index = ValueIndex(database, schema(database), sql)
                if kept is None:
                    stack.enter_context(index)
                else:
                    kept[database] = index
            for number in numbers:
                enriched[number] = _add_values(enriched[number], index, count)
    return enriched


def _add_values(example: Example, index: ValueIndex, count: int) -> Example:
    conversation = example.in_context((" ", " "))
    mentions = index.find(f"{conversation} {example.evidence}", count)
    rows = []
    for value, columns in mentions:
        for table, column in columns[:PLACES]:
            rows.append([table, column, value])
    return example.with_meta(values=rows)


def with_question_values(example: Example, schema: Schema) -> Schema:
    """The schema with the question's own values before the examples of each column (at most as many as there were,
    or as the question has).
    """
    values_by_column: dict[ColumnName, list[str]] = {}
    for table_name, column_name, value in example.prompt_context.values or ():
        values_of_column = values_by_column.setdefault((table_name, column_name), [])
        values_of_column.append(value)
    if not values_by_column:
        return schema
    tables = []
    for table in schema.tables:
        columns = []
        for column in table.columns:
            question_values = values_by_column.get((table.name, column.name), [])
            length = max(len(question_values), len(column.values))
            distinct = dict.fromkeys((*question_values, *column.values))
            values = tuple(distinct)[:length]
            columns.append(dataclasses.replace(column, values=values))
        tables.append(dataclasses.replace(table, columns=tuple(columns)))
    return dataclasses.replace(schema, tables=tuple(tables))
