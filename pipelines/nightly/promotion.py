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
    parts |= {f"guard/{name}": held for name, held in guards.items()}
    differences = {name: _difference(held, seed) for name, held in parts.items() if held.before and held.after}
    numbers = {**_numbers(whole), **differences}
    lost = {name: value for name, value in differences.items() if value < -settings.max_drop - 1e-9}
    said = f"{100 * whole.accuracy_before:.1f} to {100 * whole.accuracy_after:.1f} % of {whole.paired.n} questions"
    how = _how(whole, settings)
    if _sure(whole, settings, -1):
        return Verdict("worse", f"worse: {said} ({how})", numbers)
    if lost:
        where = ", ".join(f"{name.partition('/')[2]} {100 * value:+.1f}" for name, value in lost.items())
        bound = f"nightly.max_drop allows {100 * settings.max_drop:.1f} points"
        return Verdict("kept", f"it loses on {where} ({bound}); {said}", numbers)
    if not _sure(whole, settings, +1):
        return Verdict("kept", f"not shown to be better: {said} ({how})", numbers)
    return Verdict("promoted", f"better: {said} ({how})", numbers)


def _compare(held: Held, seed: int) -> Comparison:
    found = compare(held.before, held.after, held.equality, ("champion", "challenger"), seed=seed)
    if found is None:
        raise DataError("champion and challenger share no held-out question")
    return found


def _level(held: Held, level: str) -> Held:
    before, after = ([one for one in side if one.hardness == level] for side in (held.before, held.after))
    return Held(before, after, held.equality)


def _difference(held: Held, seed: int) -> float:
    return _compare(held, seed).paired.difference


def _sure(found: Comparison, settings: Nightly, sign: int) -> bool:
    """Whether the test shows a difference of that sign."""
    if settings.test == "mcnemar":
        return sign * (found.gained - found.lost) > 0 and _mcnemar(found) <= ALPHA
    return found.paired.low > 0 if sign > 0 else found.paired.high < 0


def _mcnemar(found: Comparison) -> float:
    return 1.0 if found.p_mcnemar is None else found.p_mcnemar


def _how(found: Comparison, settings: Nightly) -> str:
    if settings.test == "mcnemar":
        return f"gained {found.gained}, lost {found.lost}, McNemar p {_mcnemar(found):.3g}"
    low, high = 100 * found.paired.low, 100 * found.paired.high
    return f"95 % interval [{low:+.1f}, {high:+.1f}] points, {found.paired.method}"


def _numbers(found: Comparison) -> dict[str, Any]:
    return {
        "champion_ex": found.accuracy_before,
        "challenger_ex": found.accuracy_after,
        "difference": found.paired.difference,
        "low": found.paired.low,
        "high": found.paired.high,
        "p_mcnemar": _mcnemar(found),
        "p_sign_flip": found.paired.p_permutation,
        "gained": found.gained,
        "lost": found.lost,
        "questions": found.paired.n,
    }
