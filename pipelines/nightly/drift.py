"""How far a night's questions lie from those that were learned before."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import quantiles

from pipelines.types import Example

ENOUGH = 50  # fewer questions say nothing about a distribution


def drift(learned: Sequence[Example], fresh: Sequence[Example]) -> dict[str, float]:
    """Total variation distance, in [0, 1], of hardness and of the question's length in words (by the old quartiles).

    {} where either side has fewer than `ENOUGH` questions.
    """
    if min(len(learned), len(fresh)) < ENOUGH:
        return {}
    old, new = ([len(example.question.split()) for example in side] for side in (learned, fresh))
    cuts = quantiles(old, n=4)
    return {
        "hardness": distance([example.hardness for example in learned], [example.hardness for example in fresh]),
        "length": distance([bisect_right(cuts, count) for count in old], [bisect_right(cuts, count) for count in new]),
    }


def distance(old: Sequence[Hashable], new: Sequence[Hashable]) -> float:
    """Half the sum of the differences of two distributions' shares: 0 alike, 1 apart."""
    before, after = Counter(old), Counter(new)
    return sum(abs(before[value] / len(old) - after[value] / len(new)) for value in before | after) / 2
