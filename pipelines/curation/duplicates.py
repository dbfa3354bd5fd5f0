"""What makes trajectories near-duplicates: their plan and their SQL's shape, whatever the words and values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from pipelines.alike import sql_shape
from pipelines.types import Trajectory

_WORD = re.compile(r"\w+")


def plan(trajectory: Trajectory) -> tuple[str, ...]:
    """What an episode does: each turn's action with the shape of its SQL; wording and values left out."""
    return tuple(f"{turn.action.kind.value}:{sql_shape(turn.action.content)}" for turn in trajectory.turns)


def signature(trajectory: Trajectory, database: str) -> tuple[str, ...]:
    """Equal for near-duplicates: the same database, the same plan, and the same answer but for its values."""
    return (database, *plan(trajectory), sql_shape(trajectory.final_sql or "", names=True))


def distinct_2(trajectories: Iterable[Trajectory]) -> float:
    """Distinct word pairs of the reasoning over all of them (Li et al., 2016): near 0 where teachers repeat themselves.

    It falls with the amount of text, so compare it between as many trajectories.
    """
    pairs = [pair for trajectory in trajectories for turn in trajectory.turns for pair in _pairs(turn.action.reasoning)]
    return len(set(pairs)) / len(pairs) if pairs else 0.0


def _pairs(text: str) -> list[tuple[str, str]]:
    words = _WORD.findall(text.lower())
    return list(itertools.pairwise(words))
