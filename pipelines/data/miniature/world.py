"""Draws miniature databases: which tables, columns and links, how each category is stored, and the rows."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pipelines.data.miniature.vocabulary import (
    CATEGORIES,
    DOMAINS,
    KINDS,
    MEASURES,
    NAMES,
    RANK,
    Domain,
    Split,
    columns_of,
    held_out_columns,
    held_out_pairs,
)

Form = Literal["word", "upper", "title", "code"]
FORMS: tuple[Form, ...] = ("word", "upper", "title", "code")
FORM_WEIGHTS = (1, 2, 2, 2)  # of seven columns one stores its values as a question says them
TABLE_COUNTS = {2: 5, 3: 4, 4: 1}  # number of tables: weight
ROWS = (8, 40)
Row = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class MiniTable:
    """One table: `id`, the link to its parent, `name`, categories, measures, in this order.

    Attributes:
        parent: the table that `<parent>_id` refers to; None for the first table.
        categories: column -> the form in which this database stores its values.
    """

    name: str
    parent: str | None
    categories: dict[str, Form]
    measures: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names in the order of the rows' values."""
        link = (f"{self.parent}_id",) if self.parent else ()
        return ("id", *link, "name", *self.categories, *self.measures)


@dataclasses.dataclass(frozen=True)
class MiniDatabase:
    """One generated database, parents before children."""

    id: str
    domain: str
    tables: tuple[MiniTable, ...]
    rows: dict[str, list[Row]]

    def children(self, table: str) -> list[MiniTable]:
        """The tables that refer to this one."""
        return [child for child in self.tables if child.parent == table]


def stored(column: str, word: str, form: Form) -> str:
    """The text that a database holds for a value that a question calls `word`."""
    if form == "upper":
        return word.upper()
    if form == "title":
        return word.title()
    return CATEGORIES[column][word] if form == "code" else word


def draw(split: Split, index: int, seed: int) -> MiniDatabase:
    """Database number `index` of a split: the same for the same seed, whatever else is drawn."""
    rng = random.Random(f"{seed}/{split}/{index}")
    domain = DOMAINS[index % len(DOMAINS)]
    names = _draw_names(domain, split, rng)
    links = _draw_links(names, domain, split, rng)
    tables = tuple(_draw_table(name, links[name], domain, split, rng) for name in names)
    rows: dict[str, list[Row]] = {}
    for table in tables:
        rows[table.name] = _draw_rows(table, len(rows[table.parent]) if table.parent else 0, rng)
    return MiniDatabase(f"{domain.name}_{split}_{index}", domain.name, tables, rows)


def build(database: MiniDatabase, path: Path) -> None:
    """Write the database as an SQLite file; a file that is already there is replaced whole."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    connection = sqlite3.connect(partial, isolation_level=None)
    connection.execute("PRAGMA page_size = 1024")
    connection.execute("PRAGMA journal_mode = OFF")
    connection.execute("PRAGMA synchronous = OFF")
    fill(database, connection)
    connection.close()
    os.replace(partial, path)


def fill(database: MiniDatabase, connection: sqlite3.Connection) -> None:
    """Create and fill the tables over an open connection."""
    connection.execute("BEGIN")
    for create, insert, rows in statements(database):
        connection.execute(create)
        connection.executemany(insert, rows)
    connection.execute("COMMIT")


def statements(database: MiniDatabase, mark: str = "?") -> Iterator[tuple[str, str, list[Row]]]:
    """CREATE TABLE, INSERT and its rows for each table, parents first, in SQL that any engine takes.

    Args:
        mark: the driver's parameter mark.
    """
    for table in database.tables:
        marks = ", ".join([mark] * len(table.columns))
        yield _create(table), f"INSERT INTO {table.name} VALUES ({marks})", database.rows[table.name]


def _create(table: MiniTable) -> str:
    lines = ["id INTEGER PRIMARY KEY"]
    if table.parent:
        lines.append(f"{table.parent}_id INTEGER REFERENCES {table.parent} (id)")
    lines.append("name TEXT")
    lines += [f"{column} TEXT" for column in table.categories]
    lines += [f"{column} INTEGER" for column in table.measures]
    return f"CREATE TABLE {table.name} ({', '.join(lines)})"


def _pair(domain: Domain, split: Split) -> tuple[str, str] | None:
    return {"train": None, "dev": domain.dev, "test": domain.test}[split]


def _draw_names(domain: Domain, split: Split, rng: random.Random) -> list[str]:
    """Tables without any pair that another split holds for itself, and with the pair of this split.

    Two tables from elsewhere may join in: a word that is met beside many others is learned as a word.
    """
    others: tuple[Split, ...] = ("dev", "test")
    banned = {pair for other in others if other != split for pair in held_out_pairs(other)}
    pair = _pair(domain, split)
    count = rng.choices(list(TABLE_COUNTS), list(TABLE_COUNTS.values()))[0]
    order = [*domain.tables, *rng.sample([name for name in KINDS if name not in domain.tables], 2)]
    allowed: list[tuple[str, ...]] = []
    while not allowed:
        allowed = [
            names
            for names in itertools.combinations(order, count)
            if (pair is None or set(pair) <= set(names))
            and not any(frozenset(two) in banned for two in itertools.combinations(names, 2))
        ]
        count -= 1
    names = list(rng.choice(allowed))
    return sorted(names, key=lambda name: (RANK[KINDS[name]], order.index(name)))


def _draw_links(names: list[str], domain: Domain, split: Split, rng: random.Random) -> dict[str, str | None]:
    """A tree: every table after the first refers to an earlier one; the held-out pair is linked directly."""
    links: dict[str, str | None] = {names[0]: None}
    pair = _pair(domain, split) or ()
    for place, name in enumerate(names[1:], 1):
        partner = [other for other in names[:place] if {name, other} == set(pair)]
        links[name] = partner[0] if partner else rng.choice(names[:place])
    return links


def _draw_table(name: str, parent: str | None, domain: Domain, split: Split, rng: random.Random) -> MiniTable:
    categories, measures = columns_of(name, split)
    chosen = rng.sample(categories, rng.choice((1, 2)))
    numbers = rng.sample(measures, rng.choice((1, 1, 2)))
    own = held_out_columns(name, split)
    if own and name in (_pair(domain, split) or ()):
        chosen[0], numbers[0] = own
        chosen, numbers = list(dict.fromkeys(chosen)), list(dict.fromkeys(numbers))
    forms: dict[str, Form] = {column: rng.choices(FORMS, FORM_WEIGHTS)[0] for column in chosen}
    return MiniTable(name, parent, forms, tuple(numbers))


def _draw_rows(table: MiniTable, parents: int, rng: random.Random) -> list[Row]:
    """Names and measures do not repeat within a table, so that an order is never a matter of luck.

    A quarter of the parents stay without children, so that their absence can be asked about.
    """
    count = rng.randint(*ROWS)
    names = rng.sample(NAMES, count)
    linked = rng.sample(range(1, parents + 1), max(1, parents * 3 // 4)) if table.parent else []
    numbers = [rng.sample(range(MEASURES[m].low, MEASURES[m].high + 1), count) for m in table.measures]
    rows: list[Row] = []
    for place in range(count):
        link = (rng.choice(linked),) if table.parent else ()
        words = tuple(stored(c, rng.choice(list(CATEGORIES[c])), form) for c, form in table.categories.items())
        rows.append((place + 1, *link, names[place], *words, *(column[place] for column in numbers)))
    return rows
