"""The promotion of a challenger: better than the champion by a paired test, and nowhere worse than a bound."""

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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
from pipelines.stages.context import TRAINED, each_example, examples

Decision = Literal["promoted", "kept", "worse"]
ALPHA = 0.05  # size of McNemar's two-sided test


@dataclasses.dataclass(frozen=True)
class HeldOutRecords:
    """A held-out set: the champion's and the challenger's greedy records, and the equality that decides."""

    before: Sequence[EpisodeRecord]
    after: Sequence[EpisodeRecord]
    equality: str


Guards = Mapping[str, HeldOutRecords]  # name of a guard -> its records


@dataclasses.dataclass(frozen=True)
class PromotionDecision:
    decision: Decision
    reason: str  # sentence for a person
    # numbers: EX of both, their difference with interval and p-values, and the difference on each hardness level
    # ("level/hard") and guard ("guard/NAME"), all as shares.
    numbers: dict[str, float]


def decide_promotion(test: HeldOutRecords, guards: Guards, settings: Nightly, seed: int) -> PromotionDecision:
    """Compare a challenger with the champion."""
    overall = _compare_records(test, seed)
    if overall is None:
        raise DataError("champion and challenger share no held-out question")
    differences = _accuracy_differences(test, guards, seed)
    numbers = _decision_numbers(overall, differences)
    paired = overall.paired
    if settings.test == "mcnemar":
        p_mcnemar = numbers["p_mcnemar"]
        net = overall.gained - overall.lost
        is_significant = p_mcnemar <= ALPHA
        is_worse = is_significant and net < 0
        is_better = is_significant and net > 0
        test_in_words = f"gained {overall.gained}, lost {overall.lost}, McNemar p {p_mcnemar:.3g}"
    else:
        is_worse = paired.high < 0
        is_better = paired.low > 0
        low = 100 * paired.low
        high = 100 * paired.high
        test_in_words = f"95 % interval [{low:+.1f}, {high:+.1f}] points, {paired.method}"
    percent_before = 100 * overall.accuracy_before
    percent_after = 100 * overall.accuracy_after
    change = f"{percent_before:.1f} to {percent_after:.1f} % of {paired.n} questions"
    if is_worse:
        return PromotionDecision("worse", f"worse: {change} ({test_in_words})", numbers)
    losses = {name: value for name, value in differences.items() if value < -settings.max_drop - 1e-9}
    if losses:
        lost_points = _in_points(losses)
        bound = f"nightly.max_drop allows {100 * settings.max_drop:.1f} points"
        return PromotionDecision("kept", f"it loses on {lost_points} ({bound}); {change}", numbers)
    unmeasured = [name for name in guards if f"guard/{name}" not in differences]
    if unmeasured:
        guard_names = ", ".join(unmeasured)
        uncertainty = f"whether it loses on {guard_names} cannot be told"
        cause = "champion and challenger share no question there that counts"
        return PromotionDecision("kept", f"{uncertainty}: {cause}; {change}", numbers)
    if not is_better:
        return PromotionDecision("kept", f"not shown to be better: {change} ({test_in_words})", numbers)
    return PromotionDecision("promoted", f"better: {change} ({test_in_words})", numbers)


def _decision_numbers(overall: Comparison, differences: Mapping[str, float]) -> dict[str, float]:
    """The figures that a decision is made by, as the ledger keeps them."""
    paired = overall.paired
    p_mcnemar = overall.p_mcnemar
    if p_mcnemar is None:
        p_mcnemar = 1.0
    return {
        "champion_ex": overall.accuracy_before,
        "challenger_ex": overall.accuracy_after,
        "difference": paired.difference,
        "low": paired.low,
        "high": paired.high,
        "p_mcnemar": p_mcnemar,
        "p_sign_flip": paired.p_permutation,
        "gained": overall.gained,
        "lost": overall.lost,
        "questions": paired.n,
        **differences,
    }


def _in_points(differences: Mapping[str, float]) -> str:
    """The differences of levels and guards, for a person."""
    texts = []
    for name, value in differences.items():
        bare_name = name.partition("/")[2]
        points = 100 * value
        texts.append(f"{bare_name} {points:+.1f}")
    return ", ".join(texts)


def _compare_records(records: HeldOutRecords, seed: int, level: str | None = None) -> Comparison | None:
    """The comparison on a set; None if no question of it (of that hardness level) was answered on both sides."""
    before = _records_of_level(records.before, level)
    after = _records_of_level(records.after, level)
    return compare(before, after, records.equality, ("champion", "challenger"), seed=seed)


def _records_of_level(records: Sequence[EpisodeRecord], level: str | None) -> Sequence[EpisodeRecord]:
    """The records on questions of a hardness level; all of them for None."""
    if level is None:
        return records
    return [record for record in records if record.hardness == level]


def _accuracy_differences(test: HeldOutRecords, guards: Guards, seed: int) -> dict[str, float]:
    """The difference on each hardness level and guard that has questions of both."""
    comparisons: dict[str, Comparison | None] = {}
    for level in HARDNESS_LEVELS:
        comparisons[f"level/{level}"] = _compare_records(test, seed, level)
    for name, records in guards.items():
        comparisons[f"guard/{name}"] = _compare_records(records, seed)
    differences: dict[str, float] = {}
    for name, comparison in comparisons.items():
        if comparison is not None:
            differences[name] = comparison.paired.difference
    return differences


# The distance of a night's questions from those that were learned before.

ENOUGH = 50  # fewer questions are too few for a distribution


def question_drift(learned: Sequence[Example], fresh: Sequence[Example]) -> dict[str, float]:
    """Total variation distance, in [0, 1], of hardness and of the question's length in words (by the old quartiles).

    {} if either side has fewer than `ENOUGH` questions.
    """
    if min(len(learned), len(fresh)) < ENOUGH:
        return {}
    old_levels = [example.hardness for example in learned]
    new_levels = [example.hardness for example in fresh]
    hardness = distance(old_levels, new_levels)
    old_lengths = [_length_in_words(example) for example in learned]
    new_lengths = [_length_in_words(example) for example in fresh]
    quartiles = quantiles(old_lengths, n=4)
    old_quarters = [bisect_right(quartiles, n_words) for n_words in old_lengths]
    new_quarters = [bisect_right(quartiles, n_words) for n_words in new_lengths]
    length = distance(old_quarters, new_quarters)
    return {"hardness": hardness, "length": length}


def _length_in_words(example: Example) -> int:
    return len(example.question.split())


def distance(old: Sequence[Hashable], new: Sequence[Hashable]) -> float:
    """Half the sum of the differences of two distributions' shares: 0 alike, 1 apart."""
    before = Counter(old)
    after = Counter(new)
    differences = []
    for value in before | after:
        old_share = before[value] / len(old)
        new_share = after[value] / len(new)
        differences.append(abs(old_share - new_share))
    return sum(differences) / 2


# Held-out questions that a checkpoint was trained on: the held-out questions may have changed since.

Stage = tuple[str, str]  # its name and its key


def trained_on(store: Store, checkpoint: Stage, other: Stage, test: Path) -> frozenset[str]:
    """The ids of held-out questions (of the stage in `test`) that a checkpoint was trained on and the other was not."""
    data = _data_keys(store, checkpoint) - _data_keys(store, other)
    if not data:
        return frozenset()
    learned: list[Example] = []
    for key in sorted(data):
        folder = store.folder("data", key)
        for pool in TRAINED:
            learned += each_example(folder, pool)
    held_out = examples(test, "test")
    repeated = leaks(held_out, learned)
    return frozenset(leak.train for leak in repeated if leak.same_database)


def _data_keys(store: Store, checkpoint: Stage) -> set[str]:
    """The keys of the data stages behind a checkpoint that the store still has."""
    waiting = [checkpoint]
    seen: set[Stage] = set()
    while waiting:
        stage = waiting.pop()
        if stage not in seen and store.has(*stage):
            seen.add(stage)
            manifest = store.manifest(*stage)
            waiting += manifest.get("inputs", {}).items()
    return {key for name, key in seen if name == "data"}
