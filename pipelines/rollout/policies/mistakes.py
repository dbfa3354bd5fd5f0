"""Mistakes that small models make in an answer: they look for a column where the database has none of that name.

Of the answers of a model of 135 million weights that did not run, half looked for a column in another table than its
own, most of them for want of a join; the others named what no schema has (docs/results/real_model.md).
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.sql.schema import Schema

JOIN = re.compile(r"\s+JOIN\s+\w+\s+ON\s+[\w.]+\s*=\s*[\w.]+", re.IGNORECASE)
FROM = re.compile(r"\bFROM\s+(\w+)", re.IGNORECASE)
QUOTES = '"`['  # signs of quoted names
TEXT = re.compile(r"('(?:[^']|'')*')")
Reads = Mapping[str, Sequence[str]]  # tables in the order of the SQL, each with its columns
ColumnsByTable = Mapping[str, frozenset[str]]  # names of columns in lower case


@dataclass(frozen=True)
class Mistake:
    """An answer that the database refuses."""

    sql: str
    reads: Reads  # the tables and columns that it would read
    column: str  # a column that it looks for in the wrong place
    table: str  # the table that has it


def draw_mistake(sql: str, reads: Reads, schema: Schema, rng: random.Random) -> Mistake | None:
    """A mistake in a right answer, whose names are written as the schema writes them; None if there is none to make.

    Args:
        reads: the tables that the answer reads, each with its columns without keys. Quoted names are not changed.
    """
    is_quoted = any(sign in sql for sign in QUOTES)
    if is_quoted:
        return None
    columns: ColumnsByTable = {
        table.name: frozenset(column.name.lower() for column in table.columns) for table in schema.tables
    }
    reads = {table: names for table, names in reads.items() if table in columns}
    kinds = [
        list(_without_joins(sql, reads, columns)),
        list(_from_another_table(sql, reads, columns)),
        list(_behind_another_table(sql, reads, columns)),
        list(_with_the_name_of_its_table(sql, reads, columns)),
    ]
    possible = [mistakes for mistakes in kinds if mistakes]
    if not possible:
        return None
    mistakes = rng.choice(possible)
    return rng.choice(mistakes)


def _without_joins(sql: str, reads: Reads, columns: ColumnsByTable) -> Iterator[Mistake]:
    """The answer without its joins: it looks for all columns in the table behind FROM."""
    wrong, n_joins = JOIN.subn("", sql)
    places = FROM.findall(sql)
    if not n_joins or len(places) != 1 or places[0] not in columns:
        return
    (kept,) = places
    for table in reads:
        wrong, _ = _with_other_name(wrong, f"{table}.", "")
    all_names = [name for names in reads.values() for name in names]
    for table, names in reads.items():
        for name in names:
            if name.lower() not in columns[kept]:
                yield Mistake(wrong, {kept: all_names}, name, table)


def _from_another_table(sql: str, reads: Reads, columns: ColumnsByTable) -> Iterator[Mistake]:
    """The answer from one table as an answer from another one of the schema."""
    if len(reads) != 1:
        return
    ((table, names),) = reads.items()
    for other, own_columns in columns.items():
        lacking = [name for name in names if name.lower() not in own_columns]
        if lacking:
            wrong, n_places = _with_other_name(sql, table, other)
            if n_places and table not in names:
                yield Mistake(wrong, {other: names}, lacking[0], table)


def _behind_another_table(sql: str, reads: Reads, columns: ColumnsByTable) -> Iterator[Mistake]:
    """The answer with a column behind the name of another table that it reads."""
    for table, names in reads.items():
        for name in names:
            for other in reads:
                if name.lower() in columns[other]:
                    continue
                wrong, n_places = _with_other_name(sql, f"{table}.{name}", f"{other}.{name}")
                if n_places:
                    moved = _renamed(reads, table, name, None)
                    moved[other].append(name)
                    yield Mistake(wrong, moved, name, table)


def _with_the_name_of_its_table(sql: str, reads: Reads, columns: ColumnsByTable) -> Iterator[Mistake]:
    """The answer with a column whose name begins with its table's, as no column of the schema does."""
    known_names = frozenset().union(*columns.values())
    for table, names in reads.items():
        for name in names:
            longer = f"{table}_{name}"
            if longer.lower() in known_names or name in columns:
                continue
            wrong, n_places = _with_other_name(sql, name, longer)
            if n_places:
                yield Mistake(wrong, _renamed(reads, table, name, longer), name, table)


def _with_other_name(sql: str, name: str, other: str) -> tuple[str, int]:
    """The SQL with another name in place of one, and how often it stood there; texts in quotes keep it."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    n_places = 0
    parts = TEXT.split(sql)
    for index in range(0, len(parts), 2):  # between the texts
        parts[index], n_here = word.subn(lambda _: other, parts[index])
        n_places += n_here
    return "".join(parts), n_places


def _renamed(reads: Reads, table: str, name: str, new_name: str | None) -> dict[str, list[str]]:
    """The columns that are read with another name for one of them, or without it."""
    renamed = {each: list(names) for each, names in reads.items()}
    place = renamed[table].index(name)
    if new_name is None:
        del renamed[table][place]
    else:
        renamed[table][place] = new_name
    return renamed
