"""Training questions that a benchmark repeats: by exact text, by normalised text, and by the shape of their SQL."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pipelines.core.types import Database, Example
from pipelines.sql.dialects.base import identity
from pipelines.sql.similarity import example_shape, normalised


@dataclasses.dataclass(frozen=True)
class Leak:
    """A training question that a held-out one repeats."""

    # "exact", "normalised" (the same words, whatever their case, accents, fillers and order), or "sql" (the same query
    # without its values, on tables and columns of the same names).
    kind: str
    train: str  # the training question's id.
    held_out: str  # the held-out question's id.
    question: str  # the training question's text.
    same_database: bool  # whether both ask the same database; a leak across databases is mostly a common phrase.


def _exact_text(example: Example) -> str:
    return example.in_context().strip()


def _normalised_text(example: Example) -> tuple[str, ...] | str:
    """A question's words in no order; the question itself if no word is left of it."""
    return normalised(example.in_context()) or example.question


KeyOf = Callable[[Example], Any]
# The part of a question that a leak of each kind repeats, the strictest kind first.
KEYS: dict[str, KeyOf] = {"exact": _exact_text, "normalised": _normalised_text, "sql": example_shape}
SAME_QUESTION = ("exact", "normalised")  # kinds that ask the same; a query of the same shape may have other values


def database_names(held_out: Iterable[Example]) -> Callable[[Database], str]:
    """A database's name among the held-out questions, else its own: databases of one name or location are the same."""
    ids_by_location = {}
    for example in held_out:
        ids_by_location[example.database.location] = example.database.id
    names = {}
    for location, id in ids_by_location.items():
        if location:
            names[identity(location)] = id

    @functools.cache
    def name_of(database: Database) -> str:
        return names.get(identity(database.location), database.id)

    return name_of


def leaks(train: Iterable[Example], held_out: Sequence[Example]) -> Iterator[Leak]:
    """Each training question with the first held-out one that it repeats, by the strictest kind that holds.

    A leak on the same database, of whatever kind, goes before one on another database. SQL counts on the same database
    alone: elsewhere `SELECT count(*) FROM t` is a common phrase.
    """
    name_of = database_names(held_out)
    held_out_databases = {name_of(example.database) for example in held_out}
    held_out_by_key = {}
    for kind, key_of in KEYS.items():
        held_out_by_key[kind] = _group_by_key(held_out, key_of)
    for example in train:
        database = name_of(example.database)
        elsewhere: Leak | None = None
        for kind, key_of in KEYS.items():
            if kind == "sql" and database not in held_out_databases:
                continue  # its shape, which takes the longest to find, could match none
            key = key_of(example)
            repeated = held_out_by_key[kind].get(key, [])
            on_same = _first_on(database, repeated, name_of)
            if on_same is not None:
                yield Leak(kind, example.id, on_same.id, example.question, True)
                break
            if repeated and kind != "sql" and elsewhere is None:
                elsewhere = Leak(kind, example.id, repeated[0].id, example.question, False)
        else:
            if elsewhere is not None:
                yield elsewhere


def _group_by_key(examples: Iterable[Example], key_of: KeyOf) -> dict[Any, list[Example]]:
    """The questions that have one key, in order."""
    groups: dict[Any, list[Example]] = {}
    for example in examples:
        group = groups.setdefault(key_of(example), [])
        group.append(example)
    return groups


def _first_on(database: str, examples: Sequence[Example], name_of: Callable[[Database], str]) -> Example | None:
    """The first of these examples that is about a database."""
    for example in examples:
        if name_of(example.database) == database:
            return example
    return None


def leakage_report(train: Iterable[Example], held_out: Sequence[Example]) -> dict[str, Any]:
    """Counts by kind, of all and of those on the same database, the databases that both have, and every leak."""
    name_of = database_names(held_out)
    train_count = 0
    train_databases = set()

    def counted() -> Iterator[Example]:
        """The training questions, which may be walked only once."""
        nonlocal train_count
        for example in train:
            train_count += 1
            train_databases.add(name_of(example.database))
            yield example

    repeats = list(leaks(counted(), held_out))
    held_out_databases = {name_of(example.database) for example in held_out}
    any_database = Counter(leak.kind for leak in repeats)
    same_database = Counter(leak.kind for leak in repeats if leak.same_database)
    return {
        "train": train_count,
        "held_out": len(held_out),
        "shared_databases": sorted(train_databases & held_out_databases),
        "any_database": {kind: any_database[kind] for kind in KEYS},
        "same_database": {kind: same_database[kind] for kind in KEYS},
        "leaks": [dataclasses.asdict(leak) for leak in repeats],
    }
