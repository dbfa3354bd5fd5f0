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
    ("exact", lambda example: example.question.strip()),
    ("normalised", lambda example: normalised(example.question) or example.question),
    ("sql", lambda example: (example.database.id, sql_shape(example.gold_sql, names=True))),
)


def leaks(train: Iterable[Example], held_out: Sequence[Example]) -> Iterator[Leak]:
    """Each training question with the first held-out one that it repeats, by the strictest kind that holds.

    SQL counts only where both ask the same database: elsewhere `SELECT count(*) FROM t` is a common phrase.
    """
    databases = {example.database.id for example in held_out}
    tests = [(kind, name, _index(held_out, name)) for kind, name in TESTS]
    for example in train:
        for kind, name, index in tests:
            if kind == "sql" and example.database.id not in databases:
                continue  # its shape, which takes the longest to find, could be nobody's
            others = index.get(name(example))
            if others:
                other = next(
                    (candidate for candidate in others if candidate.database.id == example.database.id), others[0]
                )
                same = other.database.id == example.database.id
                yield Leak(kind, example.id, other.id, example.question, same)
                break


def _index(examples: Iterable[Example], name: Callable[[Example], Any]) -> dict[Any, list[Example]]:
    by_name: dict[Any, list[Example]] = {}
    for example in examples:
        by_name.setdefault(name(example), []).append(example)
    return by_name


def report(train: Iterable[Example], held_out: Sequence[Example]) -> dict[str, Any]:
    """Counts by kind, of all and of those on the same database, the databases that both have, and every leak."""
    count, databases = 0, set()

    def counted() -> Iterator[Example]:
        nonlocal count
        for example in train:
            count += 1
            databases.add(example.database.id)
            yield example

    repeats = list(leaks(counted(), held_out))
    return {
        "train": count,
        "held_out": len(held_out),
        "shared_databases": sorted(databases & {example.database.id for example in held_out}),
        "any_database": {kind: sum(leak.kind == kind for leak in repeats) for kind, _ in TESTS},
        "same_database": {kind: sum(leak.kind == kind and leak.same_database for leak in repeats) for kind, _ in TESTS},
        "leaks": [dataclasses.asdict(leak) for leak in repeats],
    }
