"""Means over seeds, and what they leave open: another seed trains another policy, other databases ask other questions.

One run is evaluated as everywhere else (`stats.py`). Of several, two intervals are made, and the wider one counts:

- databases and seeds are resampled, each for itself (the pigeonhole bootstrap: Owen, 2007, "The pigeonhole bootstrap"):
  it holds what databases that several seeds share differ by, and cannot reach beyond the lowest and the highest seed;
- Student's t of the seeds' own means, with one degree of freedom less than there are seeds: right where each seed has a
  world of its own, and wide where there are few: two seeds say next to nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

from pipelines.evaluation import stats
from pipelines.evaluation.stats import Estimate, Method, Paired

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

# The 97.5 % quantiles of Student's t with 1 to 30 degrees of freedom.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Scores = Mapping[str, tuple[str, float]]  # by question: its database, and what one run's answer to it is worth


def mean(runs: Sequence[Scores], seed: int = 0) -> Estimate | None:
    """The mean over questions and runs of scores in [0, 1], with its 95 % interval; None when there are none.

    Args:
        runs: one a seed.
        seed: of the bootstrap.
    """
    nonempty = [run for run in runs if run]
    if not nonempty:
        return None
    databases, rows = _by_question(nonempty)
    averages = [math.fsum(row.values()) / len(row) for row in rows]
    plain = stats.estimate(averages, databases, seed)
    values = [value for row in rows for value in row.values()]
    if plain is None or len(nonempty) == 1 or min(values) == max(values):
        return plain
    low, high, method = _interval(databases, rows, len(nonempty), seed)
    within = max(low, 0.0), min(high, 1.0)
    return Estimate(math.fsum(values) / len(values), *within, plain.n, plain.n_clusters, method)


def difference(before: Sequence[Scores], after: Sequence[Scores], seed: int = 0) -> Paired | None:
    """The mean of after - before over the questions that both answered, run by run; None when there are none.

    Its p-value is of the databases alone, as if other seeds would train the same policies.

    Args:
        before, after: one a seed, in the same order of seeds.

    Raises:
        ValueError: the two have not equally many runs.
    """
    runs = [
        {
            question: (database, value - old[question][1])
            for question, (database, value) in new.items()
            if question in old
        }
        for old, new in zip(before, after, strict=True)
    ]
    nonempty = [run for run in runs if run]
    if not nonempty:
        return None
    databases, rows = _by_question(nonempty)
    averages = [math.fsum(row.values()) / len(row) for row in rows]
    plain = stats.paired([0.0] * len(averages), averages, databases, seed)
    values = [value for row in rows for value in row.values()]
    if plain is None or len(nonempty) == 1 or min(values) == max(values):
        return plain
    low, high, method = _interval(databases, rows, len(nonempty), seed)
    total, most = math.fsum(values) / len(values), max(1.0, max(map(abs, values)))
    low, high = max(low, -most), min(high, most)
    return Paired(total, low, high, plain.p_permutation, plain.n, plain.n_clusters, method)


def deviation(values: Sequence[float]) -> float | None:
    """The sample deviation (n - 1) of a figure over seeds; None of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def _by_question(runs: Sequence[Scores]) -> tuple[list[Hashable], list[dict[int, float]]]:
    """Each question's database, and its values by the number of the run; a broken episode leaves one out."""
    databases: dict[str, Hashable] = {}
    rows: dict[str, dict[int, float]] = {}
    for number, run in enumerate(runs):
        for question, (database, value) in run.items():
            databases.setdefault(question, database)
            rows.setdefault(question, {})[number] = value
    return list(databases.values()), list(rows.values())


def student(runs: int) -> float:
    """Student's t for two-sided 95 % over so many runs; beyond 31 runs that of 31, which is a little wide."""
    return STUDENT[min(runs - 1, len(STUDENT)) - 1]


def _interval(
    databases: Sequence[Hashable], rows: Sequence[Mapping[int, float]], n_runs: int, seed: int
) -> tuple[float, float, Method]:
    """The wider of the two intervals."""
    low, high, method = _crossed(databases, rows, n_runs, seed)
    by_run = [[row[number] for row in rows if number in row] for number in range(n_runs)]
    means = [math.fsum(values) / len(values) for values in by_run]
    half = student(n_runs) * statistics.stdev(means) / math.sqrt(n_runs)
    if 2 * half <= high - low:
        return low, high, method
    centre = math.fsum(means) / n_runs
    return centre - half, centre + half, "Student's t over seeds"


def _crossed(
    databases: Sequence[Hashable], rows: Sequence[Mapping[int, float]], n_runs: int, seed: int
) -> tuple[float, float, Method]:
    """Bounds of the mean when units (databases, or questions where there are few of them) and runs are redrawn."""
    import numpy as np

    by_database = len(set(databases)) >= stats.MIN_CLUSTERS
    names: Sequence[Hashable] = databases if by_database else range(len(rows))
    place = {name: index for index, name in enumerate(dict.fromkeys(names))}
    totals, counts = np.zeros((len(place), n_runs)), np.zeros((len(place), n_runs))
    for name, row in zip(names, rows, strict=True):
        for number, value in row.items():
            totals[place[name], number] += value
            counts[place[name], number] += 1
    low, high = _bounds(totals, counts, seed)
    return low, high, "bootstrap by database and seed" if by_database else "bootstrap by question and seed"


def _bounds(totals: Matrix, counts: Matrix, seed: int) -> tuple[float, float]:
    """The percentile interval of sum / count, `totals` and `counts` being (units, runs)."""
    import numpy as np

    draw = np.random.default_rng(seed)
    units, runs = totals.shape
    of_units = draw.multinomial(units, np.full(units, 1 / units), stats.RESAMPLES)
    of_runs = draw.multinomial(runs, np.full(runs, 1 / runs), stats.RESAMPLES)
    sums, sizes = ((of_units @ totals) * of_runs).sum(1), ((of_units @ counts) * of_runs).sum(1)
    means = np.sort(sums[sizes > 0] / sizes[sizes > 0])
    low, high = (np.quantile(means, share, method="inverted_cdf") for share in (0.025, 0.975))
    return float(low), float(high)
