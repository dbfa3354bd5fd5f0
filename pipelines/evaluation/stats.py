"""Intervals, paired tests and power: how far a figure of an evaluation can be believed.

Questions over one database share its schema and its stored values, so they are not independent draws: wherever there
are enough databases, intervals resample whole databases (a cluster bootstrap), and only else single questions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

CONFIDENCE = 0.95
POWER = 0.8  # power of the comparisons that are planned
ALPHA = 0.05  # size of their two-sided test
Z_ALPHA = NormalDist().inv_cdf(1 - ALPHA / 2)
Z_BETA = NormalDist().inv_cdf(POWER)
RESAMPLES = 2000
MIN_CLUSTERS = 10  # databases; resampling fewer of them gives intervals that are far too narrow
EXACT_CLUSTERS = 12  # units up to which all 2^m sign flips are enumerated
FLIPS = 10_000  # sign flips that are drawn for more units

Method = Literal[
    "wilson",
    "bootstrap by database",
    "bootstrap by question",
    "bootstrap by database and seed",
    "bootstrap by question and seed",
    "Student's t over seeds",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of scores in [0, 1] with its interval."""

    value: float  # the mean
    # low, high: bounds of the 95 % interval.
    low: float
    high: float
    n: int  # questions
    n_clusters: int  # databases that they are about
    method: Method  # method of the interval


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """The mean difference of two systems on the same questions."""

    difference: float  # mean of after - before, in [-1, 1]
    # low, high: bounds of its 95 % interval.
    low: float
    high: float
    p_permutation: float  # two-sided p-value of the sign-flip test over the units of `flipped`
    # n, n_clusters, method: as in `Estimate`.
    n: int
    n_clusters: int
    method: Method

    @property
    def flipped(self) -> str:
        """The unit of the sign-flip test: each "database" as a whole, or each "question" if there are few databases."""
        return "database" if self.n_clusters >= MIN_CLUSTERS else "question"


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion (E. B. Wilson, 1927); `successes` may be fractional."""
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"no proportion: {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def estimate(scores: Sequence[float], clusters: Sequence[Hashable], seed: int = 0) -> Estimate | None:
    """The mean of scores in [0, 1] with a 95 % interval; None without scores.

    Whole clusters are resampled when there are at least `MIN_CLUSTERS`; else Wilson for right-or-wrong scores, and
    single questions are resampled for graded ones. Scores that are all equal leave a bootstrap nothing to vary: Wilson.

    Args:
        scores: (N,) one a question.
        clusters: (N,) the database of each.
    """
    if not scores:
        return None
    n = len(scores)
    groups = _grouped(scores, clusters)
    total = math.fsum(scores)
    method: Method
    if min(scores) == max(scores) or (len(groups) < MIN_CLUSTERS and set(scores) <= {0.0, 1.0}):
        method = "wilson"
        low, high = wilson(min(max(total, 0.0), n), n)
    elif len(groups) < MIN_CLUSTERS:
        method = "bootstrap by question"
        low, high = bootstrap([(score, 1) for score in scores], seed)
    else:
        method = "bootstrap by database"
        low, high = bootstrap(groups, seed)
    return Estimate(total / n, low, high, n, len(groups), method)


def paired(
    before: Sequence[float], after: Sequence[float], clusters: Sequence[Hashable], seed: int = 0
) -> Paired | None:
    """The mean of after - before over the same questions, with a 95 % interval; None when there are none.

    Whole databases are resampled, or single questions when there are fewer than `MIN_CLUSTERS`; differences that are
    all equal get the reach of Wilson's interval of 0 in n; of counts, in units of that difference.
    """
    differences = [b - a for a, b in zip(before, after, strict=True)]
    if not differences:
        return None
    n = len(differences)
    groups = _grouped(differences, clusters)
    by_database = len(groups) >= MIN_CLUSTERS
    units = groups if by_database else [(difference, 1) for difference in differences]
    mean = math.fsum(differences) / n
    method: Method
    if min(differences) == max(differences):
        reach = wilson(0, n)[1]  # a bootstrap would be surer than so many questions allow
        scale = max(1.0, abs(mean))  # counts may differ by more than a share does
        method = "wilson"
        low = max(mean - scale * reach, -scale)
        high = min(mean + scale * reach, scale)
    else:
        method = "bootstrap by database" if by_database else "bootstrap by question"
        low, high = bootstrap(units, seed)
    p = sign_flip([total for total, _ in units], seed)
    return Paired(mean, low, high, p, n, len(groups), method)


def _grouped(scores: Sequence[float], clusters: Sequence[Hashable]) -> list[tuple[float, int]]:
    """(sum, count) of each cluster, in the order of first appearance."""
    members: dict[Hashable, list[float]] = {}
    for score, cluster in zip(scores, clusters, strict=True):
        members.setdefault(cluster, []).append(score)
    return [(math.fsum(values), len(values)) for values in members.values()]


def bootstrap(
    units: Sequence[tuple[float, int]], seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Percentile interval of sum / count over units drawn with replacement (Efron and Tibshirani, 1993, chapter 13).

    Args:
        units: (M,) the (sum, count) of each unit that is drawn as a whole.
    """
    draw = random.Random(seed)
    means = []
    for _ in range(resamples):
        resample = draw.choices(units, k=len(units))
        means.append(sum(total for total, _ in resample) / sum(count for _, count in resample))
    means.sort()
    shares = (1 - confidence) / 2, (1 + confidence) / 2
    # Nearest-rank quantiles.
    low, high = (means[max(math.ceil(share * resamples) - 1, 0)] for share in shares)
    return low, high


def sign_flip(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the sign-flip permutation test of a sum of differences.

    Under no difference each unit's sign is a fair coin. All 2^M flips are counted up to `EXACT_CLUSTERS` units that
    differ; beyond that `FLIPS` random ones, with the observed one added so that p is never 0 (Phipson and Smyth, 2010).

    Args:
        differences: (M,) one a unit that is flipped as a whole: a database's summed difference.
    """
    moved = [difference for difference in differences if difference]
    observed = abs(math.fsum(moved)) - 1e-12  # sums in another order differ in the last bit
    if len(moved) <= EXACT_CLUSTERS:
        flips: Iterable[Sequence[int]] = itertools.product((1, -1), repeat=len(moved))
    else:
        draw = random.Random(seed)
        flips = (draw.choices((1, -1), k=len(moved)) for _ in range(FLIPS))
    sums = (sum(sign * value for sign, value in zip(signs, moved, strict=True)) for signs in flips)
    extreme = sum(abs(total) >= observed for total in sums)
    return extreme / (1 << len(moved)) if len(moved) <= EXACT_CLUSTERS else (extreme + 1) / (FLIPS + 1)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value of McNemar's test: the discordant pairs as fair coins (McNemar, 1947).

    `gained` and `lost` are the questions that only the second, or only the first system has right.
    """
    n = gained + lost
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(tail / (1 << n) * 2, 1.0)


def pairs_needed(discordant: float, difference: float) -> int:
    """Questions that a paired comparison (McNemar) needs to detect a difference, at `POWER` and `ALPHA` (Connor, 1987).

    Args:
        discordant: share of questions that exactly one of the two systems has right.
        difference: the difference of the two accuracies; its size is at most `discordant`.
    """
    if not 0 < abs(difference) <= discordant <= 1:
        raise ValueError(f"no difference of {difference} can come from {discordant} discordant questions")
    return math.ceil(_reach(discordant, difference) ** 2)


def detectable(discordant: float, pairs: int) -> float | None:
    """The smallest difference that a paired comparison of so many questions detects: `pairs_needed` turned round.

    None if even the largest difference, all discordant questions falling one way, is too small.
    """
    if discordant <= 0 or _reach(discordant, discordant) > math.sqrt(pairs):
        return None
    low = 0.0
    high = discordant
    for _ in range(60):  # bisection: the questions needed fall as the difference grows
        middle = (low + high) / 2
        if _reach(discordant, middle) <= math.sqrt(pairs):
            high = middle
        else:
            low = middle
    return high


def _reach(discordant: float, difference: float) -> float:
    """The root of the questions that a paired comparison needs (Connor, 1987)."""
    return (Z_ALPHA * math.sqrt(discordant) + Z_BETA * math.sqrt(discordant - difference**2)) / difference


# Means over seeds, and what they leave open: another seed trains another policy, other databases ask other questions.

# The 97.5 % quantiles of Student's t with 1 to 30 degrees of freedom.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Scores = Mapping[str, tuple[str, float]]  # database and value of one run's answer, by question


def mean(runs: Sequence[Scores], seed: int = 0) -> Estimate | None:
    """The mean over questions and runs (one a seed) of scores in [0, 1], with its 95 % interval; None without any."""
    databases, rows, n_runs = _by_question(runs)
    plain = estimate([math.fsum(row.values()) / len(row) for row in rows], databases, seed)
    values = [value for row in rows for value in row.values()]
    if plain is None or n_runs == 1 or min(values) == max(values):
        return plain
    low, high, method = _interval(databases, rows, n_runs, seed)
    within = max(low, 0.0), min(high, 1.0)
    return Estimate(math.fsum(values) / len(values), *within, plain.n, plain.n_clusters, method)


def difference(before: Sequence[Scores], after: Sequence[Scores], seed: int = 0) -> Paired | None:
    """The mean of after - before over the questions that both answered, run by run; None when there are none.

    Both have one run a seed, in the same order. The p-value is of the databases alone, as if other seeds would train
    the same policies.
    """
    differences: list[dict[str, tuple[str, float]]] = []
    for old, new in zip(before, after, strict=True):
        of_run = {}
        for question, (database, value) in new.items():
            if question in old:
                of_run[question] = (database, value - old[question][1])
        differences.append(of_run)
    databases, rows, n_runs = _by_question(differences)
    averages = [math.fsum(row.values()) / len(row) for row in rows]
    plain = paired([0.0] * len(averages), averages, databases, seed)
    values = [value for row in rows for value in row.values()]
    if plain is None or n_runs == 1 or min(values) == max(values):
        return plain
    low, high, method = _interval(databases, rows, n_runs, seed)
    bound = max(1.0, max(map(abs, values)))
    low = max(low, -bound)
    high = min(high, bound)
    mean_difference = math.fsum(values) / len(values)
    return Paired(mean_difference, low, high, plain.p_permutation, plain.n, plain.n_clusters, method)


def deviation(values: Sequence[float]) -> float | None:
    """The sample deviation (n - 1) of a figure over seeds; None for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def _by_question(runs: Sequence[Scores]) -> tuple[list[Hashable], list[dict[int, float]], int]:
    """Each question's database, its values by the number of the run, which a broken episode lacks, and the runs."""
    databases: dict[str, Hashable] = {}
    rows: dict[str, dict[int, float]] = {}
    nonempty = [run for run in runs if run]
    for number, run in enumerate(nonempty):
        for question, (database, value) in run.items():
            databases.setdefault(question, database)
            rows.setdefault(question, {})[number] = value
    return list(databases.values()), list(rows.values()), len(nonempty)


def student_t(runs: int) -> float:
    """Student's t for two-sided 95 % over so many runs; beyond 31 runs that of 31, which is a little wide."""
    return STUDENT[min(runs - 1, len(STUDENT)) - 1]


def _interval(
    databases: Sequence[Hashable], rows: Sequence[Mapping[int, float]], n_runs: int, seed: int
) -> tuple[float, float, Method]:
    """The wider of two intervals of a mean: a bootstrap of databases and seeds, and Student's t over the seeds."""
    import numpy as np

    # Units (databases, or questions if there are few of them) and runs are redrawn, each for itself.
    by_database = len(set(databases)) >= MIN_CLUSTERS
    names: Sequence[Hashable] = databases if by_database else range(len(rows))
    unit_index = {name: index for index, name in enumerate(dict.fromkeys(names))}
    totals = np.zeros((len(unit_index), n_runs))
    counts = np.zeros((len(unit_index), n_runs))
    for name, row in zip(names, rows, strict=True):
        for number, value in row.items():
            totals[unit_index[name], number] += value
            counts[unit_index[name], number] += 1
    low, high = crossed_bootstrap(totals, counts, seed)
    means = []
    for number in range(n_runs):
        values = [row[number] for row in rows if number in row]
        means.append(math.fsum(values) / len(values))
    half = student_t(n_runs) * statistics.stdev(means) / math.sqrt(n_runs)
    if 2 * half <= high - low:
        method: Method = "bootstrap by database and seed" if by_database else "bootstrap by question and seed"
        return low, high, method
    centre = math.fsum(means) / n_runs
    return centre - half, centre + half, "Student's t over seeds"


def crossed_bootstrap(totals: Matrix, counts: Matrix, seed: int) -> tuple[float, float]:
    """The percentile interval of sum / count over redrawn units and redrawn runs.

    Args:
        totals, counts: (units, runs).
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    units, runs = totals.shape
    of_units = draw.multinomial(units, np.full(units, 1 / units), RESAMPLES)
    of_runs = draw.multinomial(runs, np.full(runs, 1 / runs), RESAMPLES)
    sums = ((of_units @ totals) * of_runs).sum(1)
    sizes = ((of_units @ counts) * of_runs).sum(1)
    means = np.sort(sums[sizes > 0] / sizes[sizes > 0])
    low, high = (float(np.quantile(means, share, method="inverted_cdf")) for share in (0.025, 0.975))
    return low, high
