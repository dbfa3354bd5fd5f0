"""R-VES, BIRD's reward for answers that are right and quick (mini-dev's `evaluation_ves.py`).

It is made of wall-clock times, so it is another number on every machine and at every hour: it goes to side files and is
no part of a dataset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipelines.sql.engine import SqlEngine
from pipelines.types import Database

STEPS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5))  # at least so many times as fast as gold -> reward
SLOWEST = 0.25  # the reward of a right answer that is slower than all of these
OUTLIER = 3.0  # standard deviations from the mean beyond which a ratio is dropped


def reward(ratio: float) -> float:
    """What a right answer earns that runs in 1 / `ratio` of gold's time."""
    return next((paid for least, paid in STEPS if ratio >= least), SLOWEST)


def mean_ratio(ratios: Sequence[float]) -> float:
    """The mean of the time ratios without those three standard deviations away; equal ratios are all kept.

    Raises:
        ValueError: there are none.
    """
    if not ratios:
        raise ValueError("no time ratios")
    mean = math.fsum(ratios) / len(ratios)
    bound = OUTLIER * math.sqrt(math.fsum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
    kept = [ratio for ratio in ratios if abs(ratio - mean) < bound] or list(ratios)
    return math.fsum(kept) / len(kept)


def r_ves(rewards: Sequence[float]) -> float:
    """The mean over all questions of the square root of the reward, in percent; wrong answers earn 0.

    Raises:
        ValueError: there are no questions.
    """
    if not rewards:
        raise ValueError("R-VES needs questions")
    return 100.0 * math.fsum(map(math.sqrt, rewards)) / len(rewards)


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
        rewards.append(
            reward(mean_ratio([theirs / ours for ours, theirs in zip(times[::2], times[1::2], strict=True)]))
        )
    return r_ves(rewards)
