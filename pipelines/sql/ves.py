"""R-VES, BIRD's reward for the speed of a right query (mini-dev, `evaluation_ves.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

REPEATS = 100  # `iterate_num` of the official script
_STEPS = ((2.0, 1.25), (1.0, 1.0), (0.5, 0.75), (0.25, 0.5))


def reward(ratios: Sequence[float]) -> float:
    """The reward of a right query from the ratios of gold time to predicted time, one a repetition; at least one.

    Ratios beyond three standard deviations are left out; the mean of the rest pays 1.25 from 2 on, 1 from 1, 0.75 from
    a half, 0.5 from a quarter, else 0.25. (The official code divides by zero when all ratios are alike; here none is
    left out then.)
    """
    mean = sum(ratios) / len(ratios)
    spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / len(ratios))
    kept = [ratio for ratio in ratios if mean - 3 * spread < ratio < mean + 3 * spread] or ratios
    ratio = sum(kept) / len(kept)
    return next((pay for bound, pay in _STEPS if ratio >= bound), 0.25)


def r_ves(rewards: Sequence[float]) -> float:
    """The published figure: the mean over all questions of the reward's square root, in percent; a wrong answer has 0.

    Raises:
        ValueError: there are no questions.
    """
    if not rewards:
        raise ValueError("R-VES needs questions")
    return 100 * math.fsum(map(math.sqrt, rewards)) / len(rewards)
