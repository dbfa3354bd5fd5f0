"""The promotion of a challenger: better than the champion by a paired test, and nowhere worse than a bound."""

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import quantiles
from typing import Literal

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
class HeldOutRecords:
    """One held-out set: the champion's and the challenger's greedy records, and the equality that decides."""

    before: Sequence[EpisodeRecord]
    after: Sequence[EpisodeRecord]
    equality: str


@dataclasses.dataclass(frozen=True)
class PromotionDecision:
    decision: Decision
    reason: str  # in one line, for a person
    # EX of both, their difference with interval and p-values, and the difference on each hardness level ("level/hard")
    # and guard ("guard/NAME"), all as shares.
    numbers: dict[str, float]


def decide(
    test: HeldOutRecords, guards: Mapping[str, HeldOutRecords], settings: Nightly, seed: int
) -> PromotionDecision:
    """Compare a challenger with the champion."""

    def compared(pairs: HeldOutRecords, level: str | None = None) -> Comparison | None:
        """None if no question of the set (of that hardness level) was answered on both sides."""
        both = (pairs.before, pairs.after)
        before, after = ([row for row in side if level in (None, row.hardness)] for side in both)
        return compare(before, after, pairs.equality, ("champion", "challenger"), seed=seed)

    whole = compared(test)
    if whole is None:
        raise DataError("champion and challenger share no held-out question")
    paired, p_mcnemar = whole.paired, 1.0 if whole.p_mcnemar is None else whole.p_mcnemar
    comparisons = {f"level/{level}": compared(test, level) for level in HARDNESS_LEVELS}
    comparisons |= {f"guard/{name}": compared(pairs) for name, pairs in guards.items()}
    differences = {name: part.paired.difference for name, part in comparisons.items() if part is not None}
    numbers: dict[str, float] = {
        "champion_ex": whole.accuracy_before,
        "challenger_ex": whole.accuracy_after,
        "difference": paired.difference,
        "low": paired.low,
        "high": paired.high,
        "p_mcnemar": p_mcnemar,
        "p_sign_flip": paired.p_permutation,
        "gained": whole.gained,
        "lost": whole.lost,
        "questions": paired.n,
        **differences,
    }
    # The sign of a significant difference, and the figures of its test in words.
    if settings.test == "mcnemar":
        net = whole.gained - whole.lost
        worse, better = (sign * net > 0 and p_mcnemar <= ALPHA for sign in (-1, 1))
        how = f"gained {whole.gained}, lost {whole.lost}, McNemar p {p_mcnemar:.3g}"
    else:
        worse, better = paired.high < 0, paired.low > 0
        how = f"95 % interval [{100 * paired.low:+.1f}, {100 * paired.high:+.1f}] points, {paired.method}"
    change = f"{100 * whole.accuracy_before:.1f} to {100 * whole.accuracy_after:.1f} % of {paired.n} questions"
    if worse:
        return PromotionDecision("worse", f"worse: {change} ({how})", numbers)
    lost = {name: value for name, value in differences.items() if value < -settings.max_drop - 1e-9}
    if lost:
        losses = ", ".join(f"{name.partition('/')[2]} {100 * value:+.1f}" for name, value in lost.items())
        bound = f"nightly.max_drop allows {100 * settings.max_drop:.1f} points"
        return PromotionDecision("kept", f"it loses on {losses} ({bound}); {change}", numbers)
    unmeasured = ", ".join(name for name in guards if f"guard/{name}" not in differences)
    if unmeasured:
        why = "champion and challenger share no question there that counts"
        return PromotionDecision("kept", f"whether it loses on {unmeasured} cannot be told: {why}; {change}", numbers)
    if not better:
        return PromotionDecision("kept", f"not shown to be better: {change} ({how})", numbers)
    return PromotionDecision("promoted", f"better: {change} ({how})", numbers)


# The distance of a night's questions from those that were learned before.

ENOUGH = 50  # fewer questions are too few for a distribution


def drift(learned: Sequence[Example], fresh: Sequence[Example]) -> dict[str, float]:
    """Total variation distance, in [0, 1], of hardness and of the question's length in words (by the old quartiles); {}
    if either side has fewer than `ENOUGH` questions.
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


# Held-out questions that a checkpoint was trained on: the held-out questions may have changed since.

Stage = tuple[str, str]  # its name and its key


def trained_on(store: Store, checkpoint: Stage, other: Stage, test: Path) -> frozenset[str]:
    """The ids of held-out questions (of the stage in `test`) that a checkpoint was trained on and the other was not."""
    # The data stages behind each checkpoint that the store still has.
    keys: list[set[str]] = []
    for stage in (checkpoint, other):
        waiting, seen = [stage], set[Stage]()
        while waiting:
            one = waiting.pop()
            if one not in seen and store.has(*one):
                seen.add(one)
                waiting += store.manifest(*one).get("inputs", {}).items()
        keys.append({key for name, key in seen if name == "data"})
    data = keys[0] - keys[1]
    if not data:
        return frozenset()
    pools = (each_example(store.folder("data", key), pool) for key in sorted(data) for pool in TRAINED)
    repeated = leaks(examples(test, "test"), list(chain.from_iterable(pools)))
    return frozenset(leak.train for leak in repeated if leak.same_database)
