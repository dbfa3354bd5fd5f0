"""R-VES of an evaluation's answers, timed once they are known to be right (`pipelines/sql/ves.py` has the reward).

It is made of wall-clock times, so it is another number on every machine and at every hour: it goes to side files and is
no part of a dataset.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.sql import ves
from pipelines.sql.engine import SqlEngine
from pipelines.types import Database


def measure(answers: Sequence[tuple[Database, str, str]], questions: int, sql: SqlEngine, repeats: int) -> float:
    """R-VES of right answers, each timed `repeats` times in turn with its gold query.

    Args:
        answers: (database, answer, gold) of the right ones.
        questions: all that were asked, the wrong ones too.
        sql: an engine with one worker: two queries at a time would time each other.

    Raises:
        ValueError: there are no questions.
    """
    rewards = [0.0] * (questions - len(answers))
    for database, answer, gold in answers:
        results = sql.execute_many([(database, text) for _ in range(repeats) for text in (answer, gold)])
        times = [max(result.elapsed_ms, 1e-3) for result in results]
        rewards.append(ves.reward([theirs / ours for ours, theirs in zip(times[::2], times[1::2], strict=True)]))
    return ves.r_ves(rewards)
