"""A file of questions cut into a trained part and held-out parts, so that no question is on two sides.

Questions are alike if their words are the same whatever the case, accents, fillers and order, or if their SQL is the
same without its values (`pipelines/sql/similarity.py`); likeness is transitive. A group of like questions is never
split.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.types import Example
from pipelines.sql.similarity import example_shape, normalised

Part = Literal["train", "dev", "test"]
HELD_OUT: tuple[Part, ...] = ("test", "dev")  # held-out parts, in the order in which they are filled
OTHER_PART: dict[Part, Part] = {"dev": "test", "test": "dev", "train": "train"}  # the two held-out parts exchanged


class Shares(NamedTuple):
    """Shares of a user's own questions that are held out; the rest is trained on."""

    dev: float  # for the choice of settings.
    test: float  # for figures.


Parts = dict[Part, list[Example]]


class Cut(NamedTuple):
    """The parts of a cut, each in the order of its questions."""

    parts: Parts
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
    sizes = _sizes(groups, counted)
    group_parts = _assign_parts(sizes, shares)
    _require_all_parts(group_parts, sizes, shares, needs_train=not (own and invented))

    part_by_identity = {}
    for group, part in zip(groups, group_parts, strict=True):
        for example in group:
            part_by_identity[id(example)] = part
    parts: Parts = {"train": [], "dev": [], "test": []}
    words_of_counted = set()
    for example in counted:
        part = part_by_identity[id(example)]
        parts[part].append(example)
        words_of_counted.add(_question_words(example))
    repeats = []
    for example in others:
        is_trained = part_by_identity[id(example)] == "train"
        if is_trained and _question_words(example) not in words_of_counted:
            parts["train"].append(example)
        else:
            repeats.append(example)
    return Cut(parts, repeats)


def _sizes(groups: Sequence[Sequence[Example]], counted: Sequence[Example]) -> list[int]:
    """How many of the counted questions each group has."""
    counted_identities = {id(example) for example in counted}
    sizes = []
    for group in groups:
        size = sum(id(example) in counted_identities for example in group)
        sizes.append(size)
    return sizes


def _require_all_parts(group_parts: Sequence[Part], sizes: Sequence[int], shares: Shares, needs_train: bool) -> None:
    """Refuse questions that ask too few different things for all parts."""
    needed: set[Part] = {part for part in HELD_OUT if getattr(shares, part)}
    if needs_train:
        needed.add("train")
    filled = {part for part, size in zip(group_parts, sizes, strict=True) if size}
    if needed <= filled:
        return
    n_questions = sum(sizes)
    n_different = sum(size > 0 for size in sizes)
    parts = ", ".join(sorted(needed))
    raise DataError(
        f"the {n_questions} questions ask {n_different} different things: too few for {parts}",
        "Questions with the same words, or the same query but for its values, stay together: add others.",
    )


def _assign_parts(sizes: Sequence[int], shares: Shares) -> list[Part]:
    """The part of each group: held out as long as it fits into a share, else trained on."""
    total = sum(sizes)
    room = {}  # part -> the questions that still fit
    for part in HELD_OUT:
        share = getattr(shares, part)
        room[part] = round(share * total)
    filled = dict.fromkeys(HELD_OUT, 0)
    parts: list[Part] = []
    for size in sizes:
        part = _part_with_room(size, room)
        parts.append(part)
        if part != "train":
            filled[part] += size
            room[part] -= size
    for part in HELD_OUT:
        is_wanted = getattr(shares, part) > 0
        if not is_wanted or filled[part]:
            continue
        # Every group is larger than the share: the smallest one is held out.
        trained = [index for index, size in enumerate(sizes) if size and parts[index] == "train"]
        if trained:
            smallest = min(trained, key=lambda index: (sizes[index], index))
            filled[part] = sizes[smallest]
            parts[smallest] = part
    if shares.test >= shares.dev and filled["dev"] > filled["test"]:
        return [OTHER_PART[part] for part in parts]
    return parts


def _part_with_room(size: int, room: Mapping[Part, int]) -> Part:
    """The first held-out part with room for a group; an empty group is trained on."""
    for part in HELD_OUT:
        if 0 < size <= room[part]:
            return part
    return "train"


def _question_words(example: Example) -> str:
    """A question's words, whatever their case, accents, fillers and order."""
    words = normalised(example.in_context())
    if not words:
        words = (example.question.strip(),)
    return "\0".join((example.database.id, "words", *words))


def _query_shape(example: Example) -> str:
    """A question's SQL without its values."""
    shape = example_shape(example)
    return "\0".join((example.database.id, "sql", shape))


def _groups(examples: Sequence[Example]) -> list[list[Example]]:
    """Questions that are alike together, by union-find over their keys; the groups by a digest of their keys.

    The keys of a question are its words and its SQL without values: it shares one with each question that is like it.
    """
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    keys = []
    for example in examples:
        words = _question_words(example)
        shape = _query_shape(example)
        keys.append((words, shape))
        root_of_words = root(words)
        parent[root(shape)] = root_of_words
    groups: dict[str, list[Example]] = defaultdict(list)
    keys_of_groups: dict[str, list[str]] = defaultdict(list)
    for example, (words, shape) in zip(examples, keys, strict=True):
        group = root(words)
        groups[group].append(example)
        keys_of_groups[group] += [words, shape]
    digests = {}
    for group, keys_of_group in keys_of_groups.items():
        digests[group] = _digest(min(keys_of_group))
    ordered = sorted(groups, key=digests.__getitem__)
    return [groups[group] for group in ordered]


def _digest(key: str) -> bytes:
    key_bytes = key.encode("utf-8", "backslashreplace")
    return hashlib.sha256(key_bytes).digest()
