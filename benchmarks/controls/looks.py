"""A control of docs/results/learning.md: a reward for looking into the database, whatever the answer."""

from pipelines.core.registry import reward
from pipelines.core.types import ActionKind, Outcome


@reward("looks", reads=())
def looks(outcome: Outcome) -> float:
    """1 if the episode ran a query before its answer."""
    return float(any(turn.action.kind == ActionKind.SQL for turn in outcome.trajectory.turns))
