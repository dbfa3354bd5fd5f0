"""Stored values that a question speaks of: an index of a database's texts, and what of it a prompt shows.

After CodeS (Li et al., 2024b, section 6.2): a coarse search by BM25, then a fine one by how much of a value stands in
the question. The coarse one is SQLite's FTS5, in memory, over the distinct texts of each column; the fine one is the
longest common substring over the value's length, as there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import re
import sqlite3
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

from pipelines.registry import DIALECTS
from pipelines.sql.dialects.base import quoted
from pipelines.sql.engine import SqlEngine
from pipelines.sql.schema import Column, Schema, Table
from pipelines.types import Database, Example

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
