"""A reward term of one's own: short queries are paid more."""

from pipelines.core.registry import reward
from pipelines.core.types import Outcome


@reward("short_answer")
def short_answer(outcome: Outcome, characters: int = 200) -> float:
    """1 if the final SQL is right and has at most that many characters."""
    sql = outcome.trajectory.final_sql
    return float(outcome.correct and sql is not None and len(sql) <= characters)
