"""Curves of a training: their moving average, and the step at which one first reaches a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

SMOOTH = 10  # steps of the moving average (SQL-Trail, figure 3)
Points = Sequence[tuple[float, float]]  # (step, value), by ascending step


def series(rows: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """One number's points; rows without it, with words in its place or without a finite value are left out."""
    rows_with_value = [row for row in rows if isinstance(row.get(name), int | float)]
    return [(float(row["step"]), float(row[name])) for row in rows_with_value if math.isfinite(row[name])]


def moving_average(points: Points, window: int = SMOOTH) -> list[tuple[float, float]]:
    """The mean over the last `window` steps at each point; what is measured more rarely than that stays as it is."""
    smooth = []
    for index, (step, _) in enumerate(points):
        part = [value for at, value in points[max(0, index + 1 - window) : index + 1] if at > step - window]
        smooth.append((step, math.fsum(part) / len(part)))
    return smooth


def steps_to(points: Points, threshold: float, window: int = SMOOTH) -> float | None:
    """The first step at which the moving average reaches a threshold; None where it never does.

    Only averages over a whole window count, or the luck of the first steps would decide. SkyRL-SQL, figure 6, compares
    two trainings by this number.
    """
    whole = moving_average(points, window)[max(0, min(window, len(points)) - 1) :]
    return next((step for step, value in whole if value >= threshold), None)
