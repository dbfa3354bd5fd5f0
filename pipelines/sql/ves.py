"""R-VES, BIRD's reward for the speed of a right query (mini-dev, `evaluation_ves.py`).

It is made of wall-clock times, so it is another number on every machine and at every hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter

REPEATS = 100  # `iterate_num` of the official script
_STEPS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5))


def timed(predicted: Callable[[], float | None], gold: Callable[[], float | None], timeout_s: float) -> float:
    """The reward of a right query, timed in turn with the gold query (`iterated_execute_sql`).

    Each is run `REPEATS` times; one that fails then, or more than `REPEATS` time limits in all, earns 0.

    Args:
        predicted, gold: run the query as if for the first time and give its milliseconds, None if it fails.
        timeout_s: the time limit of one query, in seconds.
    """
    ratios: list[float] = []
    end = perf_counter() + timeout_s * REPEATS
    while len(ratios) < REPEATS:
        ours, theirs = predicted(), gold()
        if ours is None or theirs is None or perf_counter() > end:
            return 0.0
        ratios.append(theirs / max(ours, 1e-6))
    return reward(ratios)


def reward(ratios: Sequence[float]) -> float:
    """The reward of a right query from the ratios of gold time to predicted time, one a repetition; at least one.

    Ratios beyond three standard deviations are left out; the mean of the rest pays 1.25 from 2 on, 1 from 1, 0.75 from
    a half, 0.5 from a quarter, else 0.25. (The official code divides by zero when all ratios are alike; here none is
    left out then.)
    """
    mean = sum(ratios) / len(ratios)
    spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
    inliers = [ratio for ratio in ratios if mean - 3 * spread < ratio < mean + 3 * spread] or ratios
    ratio = sum(inliers) / len(inliers)
    return next((pay for bound, pay in _STEPS if ratio >= bound), 0.25)


def r_ves(rewards: Sequence[float]) -> float:
    """The published figure: the mean over all questions of the reward's square root, in percent; a wrong answer has 0.

    Raises:
        ValueError: there are no questions.
    """
    if not rewards:
        raise ValueError("R-VES needs questions")
    return 100 * math.fsum(map(math.sqrt, rewards)) / len(rewards)
