"""What tables and columns mean, as a benchmark or the database itself says, put into a schema for prompts.

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
import json
import re
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelines.benchmarks.bird import columns_described
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, Example, SchemaItems
from pipelines.sql import analyst
from pipelines.sql import schema as catalogs
from pipelines.sql.dialects.base import quoted
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Column, Schema, Table

Words = Mapping[tuple[str, str], str]  # by (table, column), lower-cased; a table's own under column ""
TABLES = ("tables.json", "test_tables.json", "KaggleDBQA_tables.json")


def describe(schema: Schema, database: Database) -> Schema:
    """The schema with descriptions of its tables and columns, where there are any."""
    words = catalogs.comments(database) if database.engine != "sqlite" else beside(Path(database.location))
    tables = []
    for table in schema.tables:
        name = table.name.lower()
        columns = tuple(
            dataclasses.replace(column, description=words.get((name, column.name.lower()), ""))
            for column in table.columns
        )
        tables.append(dataclasses.replace(table, columns=columns, description=words.get((name, ""), "")))
    return dataclasses.replace(schema, tables=tuple(tables))


def beside(location: Path) -> Words:
    """What the files of a benchmark say of an SQLite database among them; {} where there are none."""
    file = location.resolve()
    words: dict[tuple[str, str], str] = {}
    for path in files(file):
        if path.suffix == ".csv":
            words |= {
                (path.stem.strip().lower(), name.lower()): words_about for name, words_about in columns_described(path)
            }
        else:
            words |= _natural(_entries(path).get(file.parent.name, {}))
    return words


def files(location: Path) -> Iterator[Path]:
    """The files that describe an SQLite database of a benchmark."""
    file = location.resolve()
    yield from tables_of(file.parents[min(2, len(file.parents) - 1)])
    yield from sorted((file.parent / "database_description").glob("*.csv"), key=lambda path: path.name.lower())


def tables_of(folder: Path) -> Iterator[Path]:
    """The files of a benchmark's folder that hold natural names."""
    yield from (path for name in TABLES if (path := folder / name).is_file())


@functools.cache
def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """The databases of a tables.json by name; {} where it is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {row["db_id"]: row for row in rows}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _natural(entry: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Natural names and descriptions of one database, where they say more than the names themselves."""
    try:
        tables, originals = entry["table_names"], entry["table_names_original"]
        columns = zip(entry["column_names"], entry["column_names_original"], strict=True)
        texts = entry.get("column_descriptions") or [""] * len(entry["column_names"])
        columns_named = [(originals[at], name, natural) for (_, natural), (at, name) in columns if at >= 0]
        more = texts[len(texts) - len(columns_named) :]
        pairs = [
            (table, name, words or natural) for (table, name, natural), words in zip(columns_named, more, strict=True)
        ]
        pairs += [(name, "", natural) for name, natural in zip(originals, tables, strict=True)]
        return {(table.lower(), name.lower()): words for table, name, words in pairs if _says(words, name or table)}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return {}


def _says(words: str, name: str) -> bool:
    """Whether words tell more than a name."""
    plain = "".join(name.lower().split("_"))
    return bool(words.strip()) and "".join(words.lower().split()) not in (plain, name.lower())


# The part of its schema that a question is shown (`schema_view: filtered`), in `meta["linked_schema"]`.

GOLD = "gold"  # as the linker: no endpoint, the gold SQL's own tables and columns
Schemas = Callable[[Database], Schema]


def link(example: Example, items: SchemaItems | None, schema: Schema) -> Example:
    """The example with what of its schema is shown; all of it where nothing was chosen."""
    chosen = items or _whole(schema)
    columns = [list(pair) for pair in sorted(chosen.columns) if pair[0]]
    linked = {"tables": sorted(chosen.tables), "columns": columns}
    return dataclasses.replace(example, meta={**example.meta, "linked_schema": linked})


def gold_items(examples: Sequence[Example], schema: Schemas) -> dict[str, SchemaItems | None]:
    """What each example's gold SQL reads, by the example's id; None where it cannot be read."""
    queries = [(example.gold_sql, schema(example.database), example.database.engine) for example in examples]
    return dict(zip((example.id for example in examples), analyst.schema_items(queries), strict=True))


def gold_linked(examples: Sequence[Example], schema: Schemas) -> list[Example]:
    """The examples, each with the schema that its gold SQL reads (Reasoning-SQL, 5.1, "correct schema")."""
    gold = gold_items(examples, schema)
    return [link(example, gold[example.id], schema(example.database)) for example in examples]


def _whole(schema: Schema) -> SchemaItems:
    pairs = {(table.name.lower(), column.name.lower()) for table in schema.tables for column in table.columns}
    return SchemaItems(frozenset(table.name.lower() for table in schema.tables), frozenset(pairs))


# Stored values that a question speaks of: an index of a database's texts, and what of it a prompt shows.

LONGEST = 80  # characters of a text that is a value; longer ones are prose
DISTINCT = 50_000  # texts of a column that are looked at
COARSE = 200  # candidates that BM25 leaves
CLOSE = 0.55  # of a value that must stand in the question
PLACES = 3  # columns of one value that are shown
RENEWED_S = 3600.0  # an index that is kept is made anew after so long
WORD = re.compile(r"\w+")
STOP = frozenset(
    """a an and are as at be by did do does each find for from give had has have how in is it its list many me more most
    much name names no not number of on or show than that the their there these this those to was were what when where
    which who whose with""".split()  # noqa: SIM905
)
NO_TEXT = ("INT", "REAL", "FLOA", "DOUB", "NUM", "DEC", "BOOL", "BLOB", "DATE", "TIME")  # in a declared type
Place = tuple[str, str]  # table and column


class ValueIndex:
    """The texts of one database; a context manager.

    Args:
        sql: runs what reads them, within its limits: a column that goes beyond has no values.
    """

    def __init__(self, database: Database, schema: Schema, sql: SqlEngine) -> None:
        self.made = time.monotonic()
        self._store = sqlite3.connect(":memory:", check_same_thread=False)  # a server asks from one thread at a time
        weakref.finalize(self, self._store.close)
        self._store.execute(
            "CREATE VIRTUAL TABLE searched USING fts5(value, tokenize = 'porter unicode61 remove_diacritics 2')"
        )
        self._places: dict[str, list[Place]] = {}
        columns = [(table, column) for table in schema.tables for column in table.columns if _may_hold_text(column)]
        results = sql.execute_many([(database, _distinct(database, *pair)) for pair in columns], DISTINCT)
        for (table, column), result in zip(columns, results, strict=True):
            for (value,) in result.rows if result.ok else ():
                if isinstance(value, str) and 0 < len(value) <= LONGEST:
                    self._places.setdefault(value, []).append((table.name, column.name))
        self._store.executemany("INSERT INTO searched VALUES (?)", ((value,) for value in self._places))

    def __enter__(self) -> ValueIndex:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._store.close()

    def __len__(self) -> int:
        return len(self._places)

    @functools.cached_property
    def lowered(self) -> frozenset[str]:
        """The values in lower case."""
        return frozenset(value.lower() for value in self._places)

    def find(self, question: str, count: int) -> list[tuple[str, list[Place]]]:
        """Up to `count` values that the question speaks of, the likeliest first, with the columns that hold them."""
        words = dict.fromkeys(word for word in WORD.findall(question.lower()) if word not in STOP)
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        rows = self._store.execute(
            "SELECT value FROM searched WHERE searched MATCH ? ORDER BY rank, rowid LIMIT ?", (match, COARSE)
        )
        scored = [(closeness(value, question), value) for (value,) in rows]
        close = [pair for pair in scored if pair[0] >= CLOSE]
        close.sort(key=lambda pair: (-pair[0], -len(pair[1])))  # stable: BM25 decides among equals
        return [(value, self._places[value]) for _, value in close[:count]]


def closeness(value: str, question: str) -> float:
    """The share of a value that stands in the question as one piece, whatever the case."""
    low, text = value.lower(), question.lower()
    match = difflib.SequenceMatcher(None, low, text, autojunk=False).find_longest_match()
    return match.size / len(low)


def _may_hold_text(column: Column) -> bool:
    """Whether a column may hold texts; a type says it but in SQLite, where it is told by the values."""
    kind = column.type.upper()
    return not any(word in kind for word in NO_TEXT)


def _distinct(database: Database, table: Table, column: Column) -> str:
    name = quoted(column.name)
    text = f"typeof({name}) = 'text' AND " if database.engine == "sqlite" else ""
    value = name if database.engine == "sqlite" else f"CAST({name} AS {DIALECTS[database.engine].text_type})"
    return (
        f"SELECT DISTINCT {value} FROM {quoted(table.name)} "
        f"WHERE {text}length({value}) BETWEEN 1 AND {LONGEST} LIMIT {DISTINCT}"
    )


def retrieve(
    examples: Sequence[Example],
    count: int,
    schema: Callable[[Database], Schema],
    sql: SqlEngine,
    kept: dict[Database, ValueIndex] | None = None,
) -> list[Example]:
    """The examples with the values that their questions speak of in `meta["values"]`: [table, column, value] each.

    Args:
        kept: the indices of earlier calls, of which those within `RENEWED_S` are used; gets the new ones. Without it
            each database is indexed once, and let go of before the next.
    """
    by_place: dict[Database, list[int]] = {}
    for number, example in enumerate(examples):
        by_place.setdefault(example.database, []).append(number)
    enriched = list(examples)
    for database, numbers in by_place.items():
        with contextlib.ExitStack() as stack:
            index = kept.get(database) if kept is not None else None
            if index is None or time.monotonic() - index.made > RENEWED_S:
                index = ValueIndex(database, schema(database), sql)
                if kept is None:
                    stack.enter_context(index)
                else:
                    kept[database] = index
            for number in numbers:
                example = enriched[number]
                matches = index.find(f"{example.question} {example.evidence}", count)
                rows = [[*place, value] for value, places in matches for place in places[:PLACES]]
                enriched[number] = dataclasses.replace(example, meta={**example.meta, "values": rows})
    return enriched


def show(example: Example, schema: Schema) -> Schema:
    """The schema with the question's own values before the examples of each column (at most as many as there were,
    or as the question has).
    """
    by_column: dict[Place, list[str]] = {}
    for table, column, value in example.meta.get("values", ()):
        by_column.setdefault((str(table), str(column)), []).append(str(value))
    if not by_column:
        return schema
    return dataclasses.replace(schema, tables=tuple(_with_values(table, by_column) for table in schema.tables))


def _with_values(table: Table, by_column: Mapping[Place, Iterable[str]]) -> Table:
    def column(shown_column: Column) -> Column:
        first = tuple(by_column.get((table.name, shown_column.name), ()))
        first_values = tuple(dict.fromkeys((*first, *shown_column.values)))[: max(len(first), len(shown_column.values))]
        return dataclasses.replace(shown_column, values=first_values)

    return dataclasses.replace(table, columns=tuple(map(column, table.columns)))
