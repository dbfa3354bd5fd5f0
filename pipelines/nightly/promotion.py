"""Whether a challenger takes the champion's place: better by a paired test, and nowhere worse than a bound."""

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal

from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.core.types import HARDNESS_LEVELS, Example
from pipelines.curation.leakage import leaks
from pipelines.evaluation.paired_comparison import Comparison, compare
from pipelines.evaluation.record import EpisodeRecord
from pipelines.recipe.config import Nightly
from pipelines.stages.context import each_example, examples
from pipelines.stages.data import TRAINED

Decision = Literal["promoted", "kept", "worse"]
ALPHA = 0.05


@dataclasses.dataclass(frozen=True)
class Held:
    """One held-out set: the champion's and the challenger's greedy records, and the equality that decides."""

    before: Sequence[EpisodeRecord]
    after: Sequence[EpisodeRecord]
    equality: str


@dataclasses.dataclass(frozen=True)
class PromotionDecision:
    """A decision with its numbers."""

    decision: Decision
    reason: str  # in one line, for a person.
    # EX of both, their difference with interval and p-values, and the difference on each hardness level ("level/hard")
    # and guard ("guard/NAME"), all as shares.
    numbers: dict[str, float]


def decide(test: Held, guards: Mapping[str, Held], settings: Nightly, seed: int) -> PromotionDecision:
    """Hold a challenger against the champion."""
    whole = _compare(test, seed)
    parts = {f"level/{level}": _level(test, level) for level in HARDNESS_LEVELS}
    parts |= {f"guard/{name}": pairs for name, pairs in guards.items()}
    by_part = {name: _difference(pairs, seed) for name, pairs in parts.items()}
    differences = {name: value for name, value in by_part.items() if value is not None}
    unmeasured = ", ".join(name for name in guards if f"guard/{name}" not in differences)
    numbers = {**_numbers(whole), **differences}
    lost = {name: value for name, value in differences.items() if value < -settings.max_drop - 1e-9}
    change = f"{100 * whole.accuracy_before:.1f} to {100 * whole.accuracy_after:.1f} % of {whole.paired.n} questions"
    how = _how(whole, settings)
    if _sure(whole, settings, -1):
        return PromotionDecision("worse", f"worse: {change} ({how})", numbers)
    if lost:
        where = ", ".join(f"{name.partition('/')[2]} {100 * value:+.1f}" for name, value in lost.items())
        bound = f"nightly.max_drop allows {100 * settings.max_drop:.1f} points"
        return PromotionDecision("kept", f"it loses on {where} ({bound}); {change}", numbers)
    if unmeasured:
        why = "champion and challenger share no question there that counts"
        return PromotionDecision("kept", f"whether it loses on {unmeasured} cannot be told: {why}; {change}", numbers)
    if not _sure(whole, settings, +1):
        return PromotionDecision("kept", f"not shown to be better: {change} ({how})", numbers)
    return PromotionDecision("promoted", f"better: {change} ({how})", numbers)


def _compare(pairs: Held, seed: int) -> Comparison:
    comparison = compare(pairs.before, pairs.after, pairs.equality, ("champion", "challenger"), seed=seed)
    if comparison is None:
        raise DataError("champion and challenger share no held-out question")
    return comparison


def _level(pairs: Held, level: str) -> Held:
    before, after = ([record for record in side if record.hardness == level] for side in (pairs.before, pairs.after))
    return Held(before, after, pairs.equality)


def _difference(pairs: Held, seed: int) -> float | None:
    """None where no question of the part was answered on both sides."""
    comparison = compare(pairs.before, pairs.after, pairs.equality, ("champion", "challenger"), seed=seed)
    return None if comparison is None else comparison.paired.difference


def _sure(comparison: Comparison, settings: Nightly, sign: int) -> bool:
    """Whether the test shows a difference of that sign."""
    if settings.test == "mcnemar":
        return sign * (comparison.gained - comparison.lost) > 0 and _mcnemar(comparison) <= ALPHA
    return comparison.paired.low > 0 if sign > 0 else comparison.paired.high < 0


def _mcnemar(comparison: Comparison) -> float:
    return 1.0 if comparison.p_mcnemar is None else comparison.p_mcnemar


def _how(comparison: Comparison, settings: Nightly) -> str:
    if settings.test == "mcnemar":
        return f"gained {comparison.gained}, lost {comparison.lost}, McNemar p {_mcnemar(comparison):.3g}"
    low, high = 100 * comparison.paired.low, 100 * comparison.paired.high
    return f"95 % interval [{low:+.1f}, {high:+.1f}] points, {comparison.paired.method}"


def _numbers(comparison: Comparison) -> dict[str, Any]:
    return {
        "champion_ex": comparison.accuracy_before,
        "challenger_ex": comparison.accuracy_after,
        "difference": comparison.paired.difference,
        "low": comparison.paired.low,
        "high": comparison.paired.high,
        "p_mcnemar": _mcnemar(comparison),
        "p_sign_flip": comparison.paired.p_permutation,
        "gained": comparison.gained,
        "lost": comparison.lost,
        "questions": comparison.paired.n,
    }


# How far a night's questions lie from those that were learned before.

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


# Held-out questions that a checkpoint was trained on: what is held out may have changed since.

Stage = tuple[str, str]  # its name and its key


def trained_on(store: Store, checkpoint: Stage, beside: Stage, test: Path) -> frozenset[str]:
    """The ids of held-out questions that a checkpoint was trained on, and another one was not.

    Args:
        beside: the other checkpoint. What it was trained on has been held against these questions already.
        test: folder of the held-out questions.
    """
    data = _data(store, checkpoint) - _data(store, beside)
    if not data:
        return frozenset()
    pools = (each_example(store.folder("data", key), pool) for key in sorted(data) for pool in TRAINED)
    repeated = leaks(examples(test, "test"), list(chain.from_iterable(pools)))
    return frozenset(leak.train for leak in repeated if leak.same_database)


def _data(store: Store, checkpoint: Stage) -> set[str]:
    """The keys of all data stages behind a checkpoint that the store still has."""
    waiting, seen = [checkpoint], set[Stage]()
    while waiting:
        stage = waiting.pop()
        if stage not in seen and store.has(*stage):
            seen.add(stage)
            waiting += store.manifest(*stage).get("inputs", {}).items()
    return {key for name, key in seen if name == "data"}
