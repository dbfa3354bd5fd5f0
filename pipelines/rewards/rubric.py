"""The panel: a recipe's reward terms with their weights and tracks, summed, and logged term by term."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config import RewardTerm
from pipelines.errors import RecipeError, SqltrainError
from pipelines.parts import ANALYSES
from pipelines.registry import REWARDS
from pipelines.rewards.judge import STATIC
from pipelines.types import Outcome


@dataclass(frozen=True)
class Rewards:
    """What one episode is paid.

    Attributes:
        total: the full track's reward: what plain GRPO optimises.
        by_term: each term's own value, before its weight.
        by_track: weighted sum of each track's terms ("full", and "schema" where the recipe has one).
        by_turn: the full track's reward by the turn that it is paid for: the last one, where a term does not say.
    """

    total: float
    by_term: Mapping[str, float]
    by_track: Mapping[str, float]
    by_turn: tuple[float, ...] = ()


class Rubric:
    """A weighted panel (SQL-Trail, equation 12; TRUST-SQL, equation 4; Reasoning-SQL, 3.2).

    Raises:
        RecipeError: a term is named twice, or there is no term on the full track.
    """

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        names = [term.term for term in terms]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise RecipeError(f"reward term {twice[0]!r} is named twice", "Give it one weight")
        if not any(term.track == "full" for term in terms):
            raise RecipeError("the recipe has no reward term on the full track", "Add one under rewards:")
        self.terms = tuple(terms)
        self.reads = frozenset(name for term in terms for name in REWARDS[term.term].reads)
        if self.reads - ANALYSES:
            unknown = ", ".join(sorted(self.reads - ANALYSES))
            raise RecipeError(f"a reward term reads {unknown}", f"There are: {', '.join(sorted(ANALYSES))}")
        self.tracks: tuple[str, ...] = tuple(dict.fromkeys(("full", *(term.track for term in terms))))

    def score(self, outcome: Outcome) -> Rewards:
        """The rewards of an outcome.

        Raises:
            ValueError: the outcome is broken; it must be left out of its group, never scored.
        """
        if outcome.broken:
            raise ValueError(f"a broken episode of {outcome.example_id!r} cannot be scored")
        payments = {term.term: _by_turn(term, outcome) for term in self.terms}
        by_term = {name: sum(values) for name, values in payments.items()}
        by_track: dict[str, float] = dict.fromkeys(self.tracks, 0.0)
        for term in self.terms:
            by_track[term.track] += term.weight * by_term[term.term]
        full = [[term.weight * value for value in payments[term.term]] for term in self.terms if term.track == "full"]
        return Rewards(by_track["full"], by_term, by_track, tuple(map(sum, zip(*full, strict=True))))

    def margin(self) -> float | None:
        """Least reward of a right answer less the greatest of a wrong one, on the full track.

        Not below 0: no wrong answer can be paid more than a right one (Reasoning-SQL, 3.2). None where the panel
        holds a case table, whose order is its own.
        """
        margin = 0.0
        for term in self.terms:
            if term.track != "full":
                continue
            entry = REWARDS[term.term]
            if entry.wrong is None or entry.right is None:
                return None
            right = min(term.weight * value for value in entry.right)
            wrong = max(term.weight * value for value in entry.wrong)
            margin += right - wrong
        return margin


def _options(term: RewardTerm) -> Mapping[str, Any]:
    """A term's options; a judge that weighs nothing is never asked, and the program's grade is shown in its place."""
    return term.options if term.weight or term.term != "judge" else {**term.options, "by": STATIC}


def _by_turn(term: RewardTerm, outcome: Outcome) -> list[float]:
    """What a term pays for each turn, before its weight; for the last one alone, if it pays for the whole episode."""
    entry, turns = REWARDS[term.term], max(1, len(outcome.trajectory.turns))
    try:
        paid = entry.pay(outcome, **_options(term))
        values = [float(value) for value in (paid if entry.by_turn else [0.0] * (turns - 1) + [paid])]
        if len(values) != turns:
            raise ValueError(f"it pays for {len(values)} turns of {turns}")
    except Exception as error:
        code = getattr(inspect.unwrap(entry.pay), "__code__", None)
        file = code.co_filename if code is not None else "its plug-in"
        if isinstance(error, SqltrainError) or Path(file).parent == Path(__file__).parent:
            raise  # one of ours has a traceback, and not an author who reads one line
        lines = [
            f", line {frame.lineno}" for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
        ]
        raise RecipeError(
            f"reward term {term.term!r} fails on question {outcome.example_id}: {type(error).__name__}: {error}",
            f"Look at {file}{lines[-1] if lines else ''}.",
        ) from error
    return values
