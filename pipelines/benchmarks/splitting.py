"""One file of questions cut into a trained part and held-out parts, so that no question is on two sides.

Questions are alike if their words are the same whatever the case, accents, fillers and order, or if their SQL is the
same without its values (`pipelines/sql/similarity.py`); likeness is transitive. A group of like questions is never
split.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.types import Example
from pipelines.sql.similarity import example_shape, normalised

Part = Literal["train", "dev", "test"]
HELD_OUT: tuple[Part, ...] = ("test", "dev")  # held-out parts, in the order in which they are filled


class Shares(NamedTuple):
    """Shares of a user's own questions that are held out; the rest is trained on."""

    dev: float  # for the choice of settings.
    test: float  # for figures.


class Cut(NamedTuple):
    """The parts of a cut, each in the order of its questions."""

    parts: dict[Part, list[Example]]
    repeats: list[Example]  # invented questions like a held-out one, or in the words of a user's own: in no part.


def cut_questions(own: Sequence[Example], invented: Sequence[Example], shares: Shares) -> Cut:
    """Cut a user's own questions; invented ones are trained on, or cut if there are no others.

    The part of a group depends on its questions, on no seed and on no order of the file.

    Raises:
        DataError: the questions ask too few different things for all parts.
    """
    counted = own or invented  # the questions that the shares are measured on
    others = invented if own else ()
    groups = _groups([*own, *invented])
    counted_ids = set(map(id, counted))
    sizes = [len(counted_ids.intersection(map(id, group))) for group in groups]
    group_parts = _assign_parts(sizes, shares)

    needed: set[Part] = {part for part in HELD_OUT if getattr(shares, part)}
    if not (own and invented):
        needed.add("train")
    filled = {part for part, size in zip(group_parts, sizes, strict=True) if size}
    if needed - filled:
        n_different = sum(map(bool, sizes))
        raise DataError(
            f"the {sum(sizes)} questions ask {n_different} different things: too few for {', '.join(sorted(needed))}",
            "Questions with the same words, or the same query but for its values, stay together: add others.",
        )

    part_of = {}
    for group, part in zip(groups, group_parts, strict=True):
        for example in group:
            part_of[id(example)] = part
    parts: dict[Part, list[Example]] = {"train": [], "dev": [], "test": []}
    for example in counted:
        parts[part_of[id(example)]].append(example)
    words_of_counted = set(map(_question_words, counted))
    repeats = []
    for example in others:
        if part_of[id(example)] == "train" and _question_words(example) not in words_of_counted:
            parts["train"].append(example)
        else:
            repeats.append(example)
    return Cut(parts, repeats)


def _assign_parts(sizes: Sequence[int], shares: Shares) -> list[Part]:
    """The part of each group: held out as long as it fits into a share, else trained on."""
    wanted = {part: round(getattr(shares, part) * sum(sizes)) for part in HELD_OUT}
    filled = dict.fromkeys(HELD_OUT, 0)
    parts: list[Part] = []
    for size in sizes:
        fitting = (part for part in HELD_OUT if size and filled[part] + size <= wanted[part])
        part: Part = next(fitting, "train")
        parts.append(part)
        if part != "train":
            filled[part] += size
    for part in HELD_OUT:
        remaining = [(size, index) for index, size in enumerate(sizes) if size and parts[index] == "train"]
        if getattr(shares, part) and not filled[part] and remaining:
            smallest, index = min(remaining)  # every group is larger than the share
            filled[part] = smallest
            parts[index] = part
    if shares.test >= shares.dev and filled["dev"] > filled["test"]:
        swapped: dict[Part, Part] = {"dev": "test", "test": "dev"}
        parts = [swapped.get(part, part) for part in parts]
    return parts


def _question_words(example: Example) -> str:
    """A question's words, whatever their case, accents, fillers and order."""
    words = normalised(example.in_context()) or (example.question.strip(),)
    return "\0".join((example.database.id, "words", *words))


def _groups(examples: Sequence[Example]) -> list[list[Example]]:
    """Questions that are alike together, by union-find over their keys; the groups by a digest of their keys."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    # Two keys that a question shares with those that are alike: its words, and its SQL without values.
    keys = [(_question_words(one), "\0".join((one.database.id, "sql", example_shape(one)))) for one in examples]
    for by_words, by_sql in keys:
        parent[root(by_sql)] = root(by_words)
    groups: dict[str, list[Example]] = defaultdict(list)
    smallest: dict[str, str] = {}
    for example, pair in zip(examples, keys, strict=True):
        group = root(pair[0])
        groups[group].append(example)
        smallest[group] = min(*pair, smallest.get(group, pair[0]))
    digests = {name: hashlib.sha256(smallest[name].encode("utf-8", "backslashreplace")).digest() for name in groups}
    return [groups[name] for name in sorted(groups, key=digests.__getitem__)]
