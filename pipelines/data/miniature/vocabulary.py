"""The words of the miniature world: domains, tables, columns, and the forms in which a value may be stored.

The vocabulary is small on purpose: a byte-level BPE of some 1,300 entries learns nearly every word as one token.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Split = Literal["train", "dev", "test"]
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
class Measure:
    """A numeric column: its values are whole numbers in [low, high]; questions compare with multiples of `step`."""

    low: int
    high: int
    step: int


MEASURES: dict[str, Measure] = {
    "age": Measure(18, 80, 10),
    "height": Measure(120, 210, 10),
    "weight": Measure(10, 100, 10),
    "salary": Measure(100, 900, 100),
    "score": Measure(1, 100, 10),
    "rating": Measure(1, 100, 10),
    "year": Measure(1960, 2024, 10),
    "capacity": Measure(50, 900, 100),
    "price": Measure(10, 500, 50),
    "stock": Measure(1, 300, 50),
    "length": Measure(10, 300, 50),
    "budget": Measure(100, 900, 100),
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

NAMES: tuple[str, ...] = tuple(
    start + end
    for end in ("na", "ro", "mi", "lan", "dor", "vek")
    for start in ("Al", "Be", "Cor", "Du", "El", "Fi", "Gra", "Ho")
)  # 48 neutral names: never asked for, so they need not be single tokens


@dataclasses.dataclass(frozen=True)
class Domain:
    """A theme whose databases draw 2 to 4 of its tables.

    Attributes:
        test, dev: the pair of tables that occurs together only in databases of that split.
    """

    name: str
    tables: tuple[str, ...]
    test: tuple[str, str]
    dev: tuple[str, str]


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
    return frozenset(frozenset(domain.test if split == "test" else domain.dev) for domain in DOMAINS)


def held_out_columns(table: str, split: Split) -> tuple[str, str] | None:
    """The (category, measure) that this table carries only in databases of this split; None for train."""
    if split == "train":
        return None
    kind = KINDS[table]
    place = TABLES[kind].index(table) + (split == "dev")
    categories, measures = CATEGORIES_OF[kind], MEASURES_OF[kind]
    return categories[place % len(categories)], measures[place % len(measures)]


def columns_of(table: str, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The categories and measures that this table may carry in databases of this split."""
    others: tuple[Split, ...] = tuple(other for other in ("dev", "test") if other != split)
    banned = {column for other in others for column in held_out_columns(table, other) or ()}
    kind = KINDS[table]
    return (
        tuple(column for column in CATEGORIES_OF[kind] if column not in banned),
        tuple(column for column in MEASURES_OF[kind] if column not in banned),
    )
