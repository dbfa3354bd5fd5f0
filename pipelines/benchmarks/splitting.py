"""One file of questions cut into a trained part and held-out parts, so that no question is on two sides.

Questions are alike when their words are the same but for case, accents, fillers and order, or when their SQL is but for
its values (`pipelines/sql/similarity.py`); a question like a like one belongs with it, too. Such a
group is never parted.
"""

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.types import Example
from pipelines.sql.similarity import example_shape, normalised

Part = Literal["train", "dev", "test"]
HELD_OUT: tuple[Part, ...] = ("test", "dev")  # in the order in which they are filled


class Shares(NamedTuple):
    """How much of a user's own questions is held out: for settings and for figures; the rest is trained on."""

    dev: float
    test: float


class Cut(NamedTuple):
    """The parts of a cut, each in the order of its questions."""

    parts: dict[Part, list[Example]]
    repeats: list[Example]  # invented questions like a held-out one, or in the words of one's own: they are in no part.


def cut(own: Sequence[Example], invented: Sequence[Example], shares: Shares) -> Cut:
    """Cut a user's own questions; invented ones are trained on, and where there are no others they are cut.

    Which group goes where depends on its questions, on no seed and on no order of the file.
    """
    measured_pool, others = (own, invented) if own else (invented, ())
    groups = _groups([*own, *invented])
    counted = {id(example) for example in measured_pool}
    sizes = [sum(id(example) in counted for example in group) for group in groups]
    # A group is held out as long as it fits into a share, else trained on.
    wanted = {part: round(getattr(shares, part) * sum(sizes)) for part in HELD_OUT}
    filled = dict.fromkeys(HELD_OUT, 0)
    places: list[Part] = []
    for size in sizes:
        fits = (part for part in HELD_OUT if size and filled[part] + size <= wanted[part])
        places.append(next(fits, "train"))
        if places[-1] != "train":
            filled[places[-1]] += size
    for part in HELD_OUT:
        remaining = [(size, number) for number, size in enumerate(sizes) if size and places[number] == "train"]
        if getattr(shares, part) and not filled[part] and remaining:
            filled[part], number = min(remaining)  # every group is larger than the share: the smallest one is held out
            places[number] = part
    if shares.test >= shares.dev and filled["dev"] > filled["test"]:
        swapped: dict[Part, Part] = {"dev": "test", "test": "dev"}
        places = [swapped.get(place, place) for place in places]
    needed: set[Part] = {part for part in HELD_OUT if getattr(shares, part)}
    needed |= set() if own and invented else {"train"}
    if needed - {part for part, size in zip(places, sizes, strict=True) if size}:
        n_different = sum(map(bool, sizes))
        raise DataError(
            f"the {sum(sizes)} questions ask {n_different} different things: too few for {', '.join(sorted(needed))}",
            "Questions with the same words, or the same query but for its values, stay together: add others.",
        )
    part_of = {id(example): part for group, part in zip(groups, places, strict=True) for example in group}
    parts: dict[Part, list[Example]] = {"train": [], "dev": [], "test": []}
    for example in measured_pool:
        parts[part_of[id(example)]].append(example)
    asked = set(map(_words, measured_pool))
    are_new = [part_of[id(example)] == "train" and _words(example) not in asked for example in others]
    parts["train"] += itertools.compress(others, are_new)
    return Cut(parts, [example for example, is_new in zip(others, are_new, strict=True) if not is_new])


def _words(example: Example) -> str:
    """A question's words but for case, accents, fillers and order."""
    words = normalised(example.in_context()) or (example.question.strip(),)
    return "\0".join((example.database.id, "words", *words))


def _groups(examples: Sequence[Example]) -> list[list[Example]]:
    """Questions that are alike together; the groups by a digest of their keys."""
    above: dict[str, str] = {}

    def root(key: str) -> str:
        while above.setdefault(key, key) != key:
            above[key] = key = above[above[key]]
        return key

    # The two keys that a question shares with those that are alike: its words, and its SQL but for values.
    keys = [(_words(one), "\0".join((one.database.id, "sql", example_shape(one)))) for one in examples]
    for by_words, by_sql in keys:
        above[root(by_sql)] = root(by_words)
    groups: dict[str, list[Example]] = defaultdict(list)
    smallest: dict[str, str] = {}
    for example, pair in zip(examples, keys, strict=True):
        group = root(pair[0])
        groups[group].append(example)
        smallest[group] = min(*pair, smallest.get(group, pair[0]))
    digests = {name: hashlib.sha256(smallest[name].encode("utf-8", "backslashreplace")).digest() for name in groups}
    return [groups[name] for name in sorted(groups, key=digests.__getitem__)]
