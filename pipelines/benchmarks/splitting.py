"""One file of questions cut into what is trained on and what is held out, so that nothing is asked on two sides.

Questions are alike when their words are the same but for case, accents, fillers and order, or when their SQL is but for
its values (`pipelines/sql/similarity.py`); what is like a like one belongs with it, too. Such a group is never parted.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.types import Example
from pipelines.sql.similarity import normalised, sql_shape

Part = Literal["train", "dev", "test"]
HELD_OUT: tuple[Part, ...] = ("test", "dev")  # in the order in which they are filled


class Shares(NamedTuple):
    """How much of a user's own questions is held out: for settings and for figures; the rest is trained on."""

    dev: float
    test: float


class Cut(NamedTuple):
    """The parts of a cut, each in the order of its questions."""

    parts: dict[Part, list[Example]]
    repeats: list[Example]  # invented questions that ask what a held-out one asks: they are in no part.


def cut(own: Sequence[Example], invented: Sequence[Example], shares: Shares) -> Cut:
    """Cut a user's own questions; invented ones are trained on, and where there are no others they are cut.

    Which group goes where depends on what it asks, on no seed and on no order of the file.
    """
    measured_pool = own or invented
    groups = _groups([*own, *invented])
    counted = {id(example) for example in measured_pool}
    sizes = [sum(id(example) in counted for example in group) for group in groups]
    places = _places(sizes, shares)
    _hold(places, sizes, shares, trains_on_others=bool(own and invented))
    part_of = {id(example): part for group, part in zip(groups, places, strict=True) for example in group}
    parts: dict[Part, list[Example]] = {"train": [], "dev": [], "test": []}
    for example in measured_pool:
        parts[part_of[id(example)]].append(example)
    others = invented if own else ()
    parts["train"] += [example for example in others if part_of[id(example)] == "train"]
    return Cut(parts, [example for example in others if part_of[id(example)] != "train"])


def _groups(examples: Sequence[Example]) -> list[list[Example]]:
    """Questions that are alike together; the groups by a digest of what they ask."""
    above: dict[str, str] = {}

    def root(key: str) -> str:
        while above.setdefault(key, key) != key:
            above[key] = key = above[above[key]]
        return key

    for example in examples:
        first, *others = map(root, _asks(example))
        for other in others:
            above[other] = first
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        groups[root(next(_asks(example)))].append(example)
    return sorted(groups.values(), key=lambda group: _digest(min(key for example in group for key in _asks(example))))


def _asks(example: Example) -> Iterator[str]:
    """What a question shares with those that are alike."""
    words = normalised(example.question)
    yield "\0".join((example.database.id, "words", *(words or (example.question.strip(),))))
    yield "\0".join((example.database.id, "sql", sql_shape(example.gold_sql, names=True)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()


def _places(sizes: Sequence[int], shares: Shares) -> list[Part]:
    """The part of each group: held out as long as it fits into a share, else trained on."""
    wanted = {part: round(getattr(shares, part) * sum(sizes)) for part in HELD_OUT}
    filled = dict.fromkeys(HELD_OUT, 0)
    places: list[Part] = []
    for size in sizes:
        fits = (part for part in HELD_OUT if size and filled[part] + size <= wanted[part])
        places.append(next(fits, "train"))
        if places[-1] != "train":
            filled[places[-1]] += size
    for part in HELD_OUT:
        if getattr(shares, part) and not filled[part]:
            _give_smallest(part, places, sizes)
    return places


def _give_smallest(part: Part, places: list[Part], sizes: Sequence[int]) -> None:
    """Where every group is larger than a share, the smallest one that would be trained on is that part."""
    remaining = [(size, place) for place, size in enumerate(sizes) if size and places[place] == "train"]
    if remaining:
        places[min(remaining)[1]] = part


def _hold(places: Sequence[Part], sizes: Sequence[int], shares: Shares, trains_on_others: bool) -> None:
    """Raise where a part that is asked for is empty."""
    filled = {part for part, size in zip(places, sizes, strict=True) if size}
    needed = {part for part in HELD_OUT if getattr(shares, part)} | (set() if trains_on_others else {"train"})
    if needed - filled:
        n_different = sum(map(bool, sizes))
        raise DataError(
            f"the {sum(sizes)} questions ask {n_different} different things: too few for {', '.join(sorted(needed))}",
            "Questions with the same words, or the same query but for its values, stay together: add others.",
        )
