"""Whether a challenger takes the champion's place: better by a paired test, and nowhere worse than a bound."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pipelines.config import Nightly
from pipelines.errors import DataError
from pipelines.evaluation.compare import Comparison, compare
from pipelines.evaluation.record import EpisodeRecord
from pipelines.types import HARDNESS_LEVELS

Decision = Literal["promoted", "kept", "worse"]
ALPHA = 0.05


@dataclasses.dataclass(frozen=True)
class Held:
    """One held-out set: the champion's and the challenger's greedy records, and the equality that decides."""

    before: Sequence[EpisodeRecord]
    after: Sequence[EpisodeRecord]
    equality: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A decision with its numbers.

    Attributes:
        reason: in one line, for a person.
        numbers: EX of both, their difference with interval and p-values, and the difference on each hardness level
            ("level/hard") and guard ("guard/NAME"), all as shares.
    """

    decision: Decision
    reason: str
    numbers: dict[str, float]


def decide(test: Held, guards: Mapping[str, Held], settings: Nightly, seed: int) -> Verdict:
    """Hold a challenger against the champion.

    Raises:
        DataError: they share no held-out question.
    """
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
        return Verdict("worse", f"worse: {change} ({how})", numbers)
    if lost:
        where = ", ".join(f"{name.partition('/')[2]} {100 * value:+.1f}" for name, value in lost.items())
        bound = f"nightly.max_drop allows {100 * settings.max_drop:.1f} points"
        return Verdict("kept", f"it loses on {where} ({bound}); {change}", numbers)
    if unmeasured:
        why = "champion and challenger share no question there that counts"
        return Verdict("kept", f"whether it loses on {unmeasured} cannot be told: {why}; {change}", numbers)
    if not _sure(whole, settings, +1):
        return Verdict("kept", f"not shown to be better: {change} ({how})", numbers)
    return Verdict("promoted", f"better: {change} ({how})", numbers)


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
