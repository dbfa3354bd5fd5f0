"""Draws miniature databases: which tables, columns and links, how each category is stored, and the rows."""

import contextlib
import dataclasses
import itertools
import os
import random
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

# The words of the miniature world: domains, tables, columns, and the forms in which a value may be stored.

Split = Literal["train", "dev", "test"]
HELD_OUT_SPLITS: tuple[Split, ...] = ("dev", "test")
Kind = Literal["place", "person", "thing", "event"]

TABLES: dict[Kind, tuple[str, ...]] = {
    "place": ("school", "hotel", "shop", "clinic", "club", "office", "farm", "museum"),
    "person": ("singer", "student", "player", "doctor", "guest", "worker", "driver", "client"),
    "thing": ("song", "book", "film", "car", "meal", "tool", "plane"),
    "event": ("concert", "exam", "game", "trip", "sale", "visit", "gala"),
}
KINDS: dict[str, Kind] = {table: kind for kind, tables in TABLES.items() for table in tables}
RANK: dict[Kind, int] = {"place": 0, "person": 1, "thing": 2, "event": 3}  # a table refers to one of lower rank

# Stored forms are told from the asked word only by looking: the code of a value is its usual abbreviation.
CATEGORIES: dict[str, dict[str, str]] = {
    "country": {"france": "FR", "spain": "ES", "japan": "JP", "brazil": "BR", "kenya": "KE"},
    "city": {"paris": "PAR", "rome": "ROM", "lima": "LIM", "oslo": "OSL", "cairo": "CAI"},
    "gender": {"male": "M", "female": "F"},
    "status": {"active": "A", "closed": "C", "late": "L", "new": "N"},
    "level": {"low": "1", "middle": "2", "high": "3"},
    "language": {"english": "EN", "french": "FRA", "german": "DE", "polish": "PL"},
    "type": {"public": "PU", "private": "PR", "basic": "BA", "special": "SP"},
    "size": {"small": "S", "medium": "M", "large": "L"},
    "color": {"red": "RD", "green": "GR", "blue": "BL", "black": "BK"},
    "material": {"wood": "WO", "metal": "ME", "glass": "GL", "paper": "PA"},
    "season": {"spring": "SPR", "summer": "SUM", "autumn": "AUT", "winter": "WIN"},
    "day": {"monday": "MON", "friday": "FRI", "sunday": "SUN"},
}


@dataclasses.dataclass(frozen=True)
class NumericColumn:
    """A numeric column: its values are whole numbers in [low, high]; questions compare with multiples of `step`."""

    low: int
    high: int
    step: int


MEASURES: dict[str, NumericColumn] = {
    "age": NumericColumn(18, 80, 10),
    "height": NumericColumn(120, 210, 10),
    "weight": NumericColumn(10, 100, 10),
    "salary": NumericColumn(100, 900, 100),
    "score": NumericColumn(1, 100, 10),
    "rating": NumericColumn(1, 100, 10),
    "year": NumericColumn(1960, 2024, 10),
    "capacity": NumericColumn(50, 900, 100),
    "price": NumericColumn(10, 500, 50),
    "stock": NumericColumn(1, 300, 50),
    "length": NumericColumn(10, 300, 50),
    "budget": NumericColumn(100, 900, 100),
}

CATEGORIES_OF: dict[Kind, tuple[str, ...]] = {
    "place": ("country", "city", "type", "status", "size", "level", "language", "color"),
    "person": ("country", "city", "gender", "status", "level", "language", "type", "day"),
    "thing": ("color", "type", "size", "material", "status", "language", "country", "level"),
    "event": ("season", "day", "type", "city", "status", "level", "country", "size"),
}
MEASURES_OF: dict[Kind, tuple[str, ...]] = {
    "place": ("rating", "year", "capacity", "budget", "price", "stock", "score"),
    "person": ("age", "height", "weight", "salary", "score", "rating", "budget"),
    "thing": ("price", "weight", "year", "stock", "length", "rating", "height"),
    "event": ("price", "year", "length", "rating", "budget", "capacity", "score"),
}

# 48 neutral names: never asked for, so they need not be single tokens.
NAME_STARTS = ("Al", "Be", "Cor", "Du", "El", "Fi", "Gra", "Ho")
NAME_ENDS = ("na", "ro", "mi", "lan", "dor", "vek")
NAMES: tuple[str, ...] = tuple(start + end for end in NAME_ENDS for start in NAME_STARTS)


@dataclasses.dataclass(frozen=True)
class Domain:
    """A theme whose databases draw 2 to 4 of its tables."""

    name: str
    tables: tuple[str, ...]
    test: tuple[str, str]  # the pair of tables that occurs together only in test databases.
    dev: tuple[str, str]  # the pair that occurs together only in dev databases.

    def held_out_pair(self, split: Split) -> tuple[str, ...]:
        """The pair of tables that occurs together only in databases of this split; () for train."""
        if split == "test":
            return self.test
        if split == "dev":
            return self.dev
        return ()


DOMAINS: tuple[Domain, ...] = (
    Domain("music", ("singer", "song", "concert", "club", "guest"), ("singer", "concert"), ("singer", "club")),
    Domain("school", ("student", "school", "exam", "book", "club"), ("student", "exam"), ("student", "book")),
    Domain("sport", ("player", "club", "game", "trip", "driver"), ("player", "game"), ("player", "trip")),
    Domain("travel", ("guest", "hotel", "trip", "car", "driver"), ("hotel", "trip"), ("hotel", "car")),
    Domain("trade", ("client", "shop", "sale", "tool", "worker"), ("client", "sale"), ("client", "tool")),
    Domain("health", ("doctor", "clinic", "visit", "client", "worker"), ("doctor", "visit"), ("doctor", "client")),
    Domain("reading", ("book", "student", "shop", "sale", "guest"), ("book", "sale"), ("book", "guest")),
    Domain("screen", ("film", "gala", "guest", "singer", "worker"), ("film", "gala"), ("film", "singer")),
    Domain("farming", ("farm", "worker", "tool", "sale", "meal"), ("farm", "tool"), ("farm", "meal")),
    Domain("business", ("office", "worker", "client", "visit", "trip"), ("office", "worker"), ("office", "visit")),
    Domain("air", ("plane", "driver", "trip", "guest", "office"), ("plane", "trip"), ("plane", "guest")),
    Domain("art", ("museum", "gala", "guest", "visit", "worker"), ("museum", "visit"), ("museum", "gala")),
    Domain("food", ("meal", "shop", "visit", "guest", "worker"), ("meal", "shop"), ("meal", "visit")),
    Domain("racing", ("car", "driver", "game", "club", "worker"), ("car", "game"), ("car", "club")),
)


def held_out_pairs(split: Split) -> frozenset[frozenset[str]]:
    """The table pairs that may occur together only in databases of this split."""
    if split == "train":
        return frozenset()
    pairs = [frozenset(domain.held_out_pair(split)) for domain in DOMAINS]
    return frozenset(pairs)


def held_out_columns(table: str, split: Split) -> tuple[str, str] | None:
    """The (category, measure) that this table carries only in databases of this split; None for train."""
    if split == "train":
        return None
    kind = KINDS[table]
    categories = CATEGORIES_OF[kind]
    measures = MEASURES_OF[kind]
    index = TABLES[kind].index(table)
    if split == "dev":
        index += 1
    category = categories[index % len(categories)]
    measure = measures[index % len(measures)]
    return category, measure


def allowed_columns(table: str, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The categories and measures that this table may carry in databases of this split."""
    banned: set[str] = set()
    for other in HELD_OUT_SPLITS:
        if other != split:
            banned.update(held_out_columns(table, other) or ())
    kind = KINDS[table]
    categories = [column for column in CATEGORIES_OF[kind] if column not in banned]
    measures = [column for column in MEASURES_OF[kind] if column not in banned]
    return tuple(categories), tuple(measures)


Form = Literal["word", "upper", "title", "code"]
FORMS: tuple[Form, ...] = ("word", "upper", "title", "code")
FORM_WEIGHTS = (1, 2, 2, 2)  # A seventh of the columns store their values in the words of questions.
TABLE_COUNTS = {2: 5, 3: 4, 4: 1}  # number of tables: weight
ROWS = (8, 40)
Row = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class MiniTable:
    """A table: `id`, the link to its parent, `name`, categories, measures, in this order."""

    name: str
    parent: str | None  # the table that `<parent>_id` refers to; None for the first table.
    categories: dict[str, Form]  # column -> the form in which this database stores its values.
    measures: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names in the order of the rows' values."""
        if self.parent is None:
            return ("id", "name", *self.categories, *self.measures)
        return ("id", f"{self.parent}_id", "name", *self.categories, *self.measures)


@dataclasses.dataclass(frozen=True)
class MiniDatabase:
    """A generated database, parents before children."""

    id: str
    domain: str
    tables: tuple[MiniTable, ...]
    rows: dict[str, list[Row]]

    def table(self, name: str) -> MiniTable:
        """The table of this name."""
        return next(table for table in self.tables if table.name == name)


def stored(column: str, word: str, form: Form) -> str:
    """The text that a database holds for a value that a question calls `word`."""
    if form == "upper":
        return word.upper()
    if form == "title":
        return word.title()
    if form == "code":
        return CATEGORIES[column][word]
    return word


def draw_database(split: Split, index: int, seed: int) -> MiniDatabase:
    """Database number `index` of a split: the same for the same seed, whatever else is drawn."""
    rng = random.Random(f"{seed}/{split}/{index}")
    domain = DOMAINS[index % len(DOMAINS)]
    held_out_pair = domain.held_out_pair(split)
    names = _draw_names(domain, split, rng)
    parents = _draw_parents(names, held_out_pair, rng)
    tables = []
    for name in names:
        columns = allowed_columns(name, split)
        columns_to_have = None
        if name in held_out_pair:
            columns_to_have = held_out_columns(name, split)
        table = _draw_table(name, parents[name], columns, columns_to_have, rng)
        tables.append(table)
    rows: dict[str, list[Row]] = {}
    for table in tables:
        n_parents = 0
        if table.parent:
            n_parents = len(rows[table.parent])
        rows[table.name] = _draw_rows(table, n_parents, rng)
    id = f"{domain.name}_{split}_{index}"
    return MiniDatabase(id, domain.name, tuple(tables), rows)


def _draw_names(domain: Domain, split: Split, rng: random.Random) -> list[str]:
    """The names of a database's tables, parents before children.

    They have the held-out pair of this split, and no pair that another split holds for itself. Two tables from
    elsewhere may join in: a word that is met beside many others is learned as a word.
    """
    weights = list(TABLE_COUNTS.values())
    (count,) = rng.choices(list(TABLE_COUNTS), weights)
    foreign = [name for name in KINDS if name not in domain.tables]
    order = [*domain.tables, *rng.sample(foreign, 2)]
    choices: list[tuple[str, ...]] = []
    while not choices:
        for names in itertools.combinations(order, count):
            if _may_occur(names, domain, split):
                choices.append(names)
        count -= 1
    names = rng.choice(choices)

    def parents_first(name: str) -> tuple[int, int]:
        kind = KINDS[name]
        return RANK[kind], order.index(name)

    return sorted(names, key=parents_first)


def _may_occur(names: Sequence[str], domain: Domain, split: Split) -> bool:
    """Whether a database may have these tables: the held-out pair of its split, and no pair of another split."""
    needed = set(domain.held_out_pair(split))
    if not needed <= set(names):
        return False
    pairs = {frozenset(pair) for pair in itertools.combinations(names, 2)}
    pairs_of_other_splits: set[frozenset[str]] = set()
    for other in HELD_OUT_SPLITS:
        if other != split:
            pairs_of_other_splits |= held_out_pairs(other)
    return pairs.isdisjoint(pairs_of_other_splits)


def _draw_parents(names: Sequence[str], held_out_pair: Sequence[str], rng: random.Random) -> dict[str, str | None]:
    """A tree: every table after the first refers to an earlier one; the held-out pair is linked directly."""
    pair = set(held_out_pair)
    parents: dict[str, str | None] = {}
    earlier: list[str] = []
    for name in names:
        partners = [other for other in earlier if {name, other} == pair]
        if not earlier:
            parents[name] = None
        elif partners:
            parents[name] = partners[0]
        else:
            parents[name] = rng.choice(earlier)
        earlier.append(name)
    return parents


def _draw_table(
    name: str,
    parent: str | None,
    columns: tuple[tuple[str, ...], tuple[str, ...]],
    columns_to_have: tuple[str, str] | None,
    rng: random.Random,
) -> MiniTable:
    """A table with some of these categories and measures, and with the category and measure that it has to have."""
    allowed_categories, allowed_measures = columns
    n_categories = rng.choice((1, 2))
    categories = rng.sample(allowed_categories, n_categories)
    n_measures = rng.choice((1, 1, 2))
    measures = rng.sample(allowed_measures, n_measures)
    if columns_to_have is not None:
        categories[0], measures[0] = columns_to_have
    forms: dict[str, Form] = {}
    for column in dict.fromkeys(categories):
        (form,) = rng.choices(FORMS, FORM_WEIGHTS)
        forms[column] = form
    distinct_measures = dict.fromkeys(measures)
    return MiniTable(name, parent, forms, tuple(distinct_measures))


def _draw_rows(table: MiniTable, n_parents: int, rng: random.Random) -> list[Row]:
    """The rows of a table.

    Names and measures do not repeat within it, so that an order is never a matter of luck. A quarter of the parents
    stay without children, so that their absence can be asked about.
    """
    size = rng.randint(*ROWS)
    names = rng.sample(NAMES, size)
    linked_parents: list[int] = []
    if table.parent:
        n_linked = max(1, n_parents * 3 // 4)
        linked_parents = rng.sample(range(1, n_parents + 1), n_linked)
    values_of_measures = []
    for measure in table.measures:
        column = MEASURES[measure]
        possible = range(column.low, column.high + 1)
        values = rng.sample(possible, size)
        values_of_measures.append(values)
    rows: list[Row] = []
    for index in range(size):
        row: list[str | int] = [index + 1]
        if table.parent:
            row.append(rng.choice(linked_parents))
        row.append(names[index])
        for category, form in table.categories.items():
            word = rng.choice(list(CATEGORIES[category]))
            row.append(stored(category, word, form))
        for values in values_of_measures:
            row.append(values[index])
        rows.append(tuple(row))
    return rows


def build_database(database: MiniDatabase, path: Path) -> None:
    """Write the database as an SQLite file; a file that is already there is replaced whole."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(partial, isolation_level=None)) as connection:
        for pragma in ("page_size = 1024", "journal_mode = OFF", "synchronous = OFF"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN")
        for create, insert, rows in create_statements(database):
            connection.execute(create)
            connection.executemany(insert, rows)
        connection.execute("COMMIT")
    os.replace(partial, path)


def create_statements(database: MiniDatabase, mark: str = "?") -> Iterator[tuple[str, str, list[Row]]]:
    """CREATE TABLE, INSERT and its rows for each table, parents first, in any engine's SQL with the driver's mark."""
    for table in database.tables:
        columns = ["id INTEGER PRIMARY KEY"]
        if table.parent:
            columns.append(f"{table.parent}_id INTEGER REFERENCES {table.parent} (id)")
        columns.append("name TEXT")
        for category in table.categories:
            columns.append(f"{category} TEXT")
        for measure in table.measures:
            columns.append(f"{measure} INTEGER")
        column_list = ", ".join(columns)
        create = f"CREATE TABLE {table.name} ({column_list})"
        marks = ", ".join([mark] * len(table.columns))
        insert = f"INSERT INTO {table.name} VALUES ({marks})"
        yield create, insert, database.rows[table.name]
