"""Whether training questions are those of a benchmark: by exact text, by normalised text, and by their SQL's shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pipelines.alike import normalised, sql_shape
from pipelines.types import Example


@dataclasses.dataclass(frozen=True)
class Leak:
    """A training question that a held-out one repeats.

    Attributes:
        kind: "exact", "normalised" (words but for case, accents, fillers and order), or "sql" (the same query on tables
            and columns of the same names, but for its values).
        same_database: whether both ask the same database; a leak across databases is mostly a common phrase.
    """

    kind: str
    train: str
    held_out: str
    question: str
    same_database: bool


TESTS: tuple[tuple[str, Callable[[Example], Any]], ...] = (  # the strictest first
    ("exact", lambda one: one.question.strip()),
    ("normalised", lambda one: normalised(one.question) or one.question),
    ("sql", lambda one: (one.database.id, sql_shape(one.gold_sql, names=True))),
)


def leaks(train: Iterable[Example], held_out: Sequence[Example]) -> Iterator[Leak]:
    """Each training question with the first held-out one that it repeats, by the strictest kind that holds.

    SQL counts only where both ask the same database: elsewhere `SELECT count(*) FROM t` is a common phrase.
    """
    asked = {example.database.id for example in held_out}
    known = [(kind, name, _index(held_out, name)) for kind, name in TESTS]
    for example in train:
        for kind, name, index in known:
            if kind == "sql" and example.database.id not in asked:
                continue  # its shape, which takes the longest to find, could be nobody's
            others = index.get(name(example))
            if others:
                other = next((one for one in others if one.database.id == example.database.id), others[0])
                same = other.database.id == example.database.id
                yield Leak(kind, example.id, other.id, example.question, same)
                break


def _index(examples: Iterable[Example], name: Callable[[Example], Any]) -> dict[Any, list[Example]]:
    known: dict[Any, list[Example]] = {}
    for example in examples:
        known.setdefault(name(example), []).append(example)
    return known


def report(train: Iterable[Example], held_out: Sequence[Example]) -> dict[str, Any]:
    """Counts by kind, of all and of those on the same database, the databases that both have, and every leak."""
    count, asked = 0, set()

    def counted() -> Iterator[Example]:
        nonlocal count
        for example in train:
            count += 1
            asked.add(example.database.id)
            yield example

    found = list(leaks(counted(), held_out))
    return {
        "train": count,
        "held_out": len(held_out),
        "shared_databases": sorted(asked & {one.database.id for one in held_out}),
        "any_database": {kind: sum(one.kind == kind for one in found) for kind, _ in TESTS},
        "same_database": {kind: sum(one.kind == kind and one.same_database for one in found) for kind, _ in TESTS},
        "leaks": [dataclasses.asdict(one) for one in found],
    }
