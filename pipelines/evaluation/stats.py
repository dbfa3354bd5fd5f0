"""Intervals, paired tests and power: how far a figure of an evaluation can be believed.

Questions over one database share its schema and its stored values, so they are not independent draws: wherever there
are enough databases, intervals resample whole databases (a cluster bootstrap), and only else single questions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import random
import statistics
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
Unit = tuple[float, int]  # the sum and the count of scores that are resampled as a whole

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

    def named(self, name: str) -> dict[str, float]:
        """The mean under a name, and its bounds under NAME_low and NAME_high."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


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
    shrinkage = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / shrinkage
    variance_of_share = share * (1 - share) / n
    variance = variance_of_share + z * z / (4 * n * n)
    half = z / shrinkage * math.sqrt(variance)
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
    is_constant = min(scores) == max(scores)
    is_binary = set(scores) <= {0.0, 1.0}
    method: Method
    if is_constant or (is_binary and len(groups) < MIN_CLUSTERS):
        method = "wilson"
        successes = min(max(total, 0.0), n)
        low, high = wilson(successes, n)
    elif len(groups) < MIN_CLUSTERS:
        method = "bootstrap by question"
        low, high = bootstrap(_single_units(scores), seed)
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
    pairs = zip(before, after, strict=True)
    differences = [new - old for old, new in pairs]
    if not differences:
        return None
    n = len(differences)
    groups = _grouped(differences, clusters)
    mean_difference = math.fsum(differences) / n
    method: Method = "bootstrap by question"
    units = _single_units(differences)
    if len(groups) >= MIN_CLUSTERS:
        method = "bootstrap by database"
        units = groups
    if min(differences) == max(differences):
        method = "wilson"
        low, high = _interval_of_equal(mean_difference, n)
    else:
        low, high = bootstrap(units, seed)
    unit_sums = [total for total, _ in units]
    p_value = sign_flip(unit_sums, seed)
    return Paired(mean_difference, low, high, p_value, n, len(groups), method)


def _interval_of_equal(difference: float, n: int) -> tuple[float, float]:
    """The interval of n equal differences: a bootstrap would be surer than so many questions allow."""
    _, reach = wilson(0, n)
    scale = max(1.0, abs(difference))  # counts may differ by more than a share does
    low = max(difference - scale * reach, -scale)
    high = min(difference + scale * reach, scale)
    return low, high


def _single_units(scores: Sequence[float]) -> list[Unit]:
    """Each question as a unit of its own."""
    return [(score, 1) for score in scores]


def _grouped(scores: Sequence[float], clusters: Sequence[Hashable]) -> list[Unit]:
    """Each cluster as a unit, in the order of first appearance."""
    scores_by_cluster: dict[Hashable, list[float]] = {}
    for score, cluster in zip(scores, clusters, strict=True):
        members = scores_by_cluster.setdefault(cluster, [])
        members.append(score)
    units = []
    for members in scores_by_cluster.values():
        total = math.fsum(members)
        units.append((total, len(members)))
    return units


def bootstrap(
    units: Sequence[Unit], seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Percentile interval of sum / count over units drawn with replacement (Efron and Tibshirani, 1993, chapter 13).

    Args:
        units: (M,) each is drawn as a whole.
    """
    draw = random.Random(seed)
    means = []
    for _ in range(resamples):
        resample = draw.choices(units, k=len(units))
        totals, counts = zip(*resample, strict=True)
        means.append(sum(totals) / sum(counts))
    means.sort()
    low = _nearest_rank(means, (1 - confidence) / 2)
    high = _nearest_rank(means, (1 + confidence) / 2)
    return low, high


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of ascending values."""
    rank = math.ceil(share * len(ordered))
    return ordered[max(rank - 1, 0)]


def sign_flip(differences: Sequence[float], seed: int = 0) -> float:
    """Two-sided p-value of the sign-flip permutation test of a sum of differences.

    Under no difference each unit's sign is a fair coin. All 2^M flips are counted up to `EXACT_CLUSTERS` units that
    differ; beyond that `FLIPS` random ones, with the observed one added so that p is never 0 (Phipson and Smyth, 2010).

    Args:
        differences: (M,) one a unit that is flipped as a whole: a database's summed difference.
    """
    nonzero = [difference for difference in differences if difference]
    if len(nonzero) <= EXACT_CLUSTERS:
        all_flips = itertools.product((1, -1), repeat=len(nonzero))
        n_flips = 1 << len(nonzero)
        return _count_extreme(all_flips, nonzero) / n_flips
    drawn_flips = _random_flips(len(nonzero), seed)
    n_extreme = _count_extreme(drawn_flips, nonzero)
    return (n_extreme + 1) / (FLIPS + 1)


def _count_extreme(flips: Iterable[Sequence[int]], differences: Sequence[float]) -> int:
    """The number of flips under which the sum is at least as far from 0 as the observed one."""
    observed = abs(math.fsum(differences)) - 1e-12  # sums in another order differ in the last bit
    n_extreme = 0
    for signs in flips:
        total = sum(map(operator.mul, signs, differences))
        n_extreme += abs(total) >= observed
    return n_extreme


def _random_flips(n_units: int, seed: int) -> Iterator[Sequence[int]]:
    """`FLIPS` draws of a sign for each unit."""
    draw = random.Random(seed)
    for _ in range(FLIPS):
        yield draw.choices((1, -1), k=n_units)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact p-value of McNemar's test: the discordant pairs as fair coins (McNemar, 1947).

    `gained` and `lost` are the questions that only the second, or only the first system has right.
    """
    n = gained + lost
    fewest = min(gained, lost)
    n_extreme = sum(math.comb(n, i) for i in range(fewest + 1))
    one_sided = n_extreme / (1 << n)
    return min(2 * one_sided, 1.0)


def pairs_needed(discordant: float, difference: float) -> int:
    """Questions that a paired comparison (McNemar) needs to detect a difference, at `POWER` and `ALPHA` (Connor, 1987).

    Args:
        discordant: share of questions that exactly one of the two systems has right.
        difference: the difference of the two accuracies; its size is at most `discordant`.
    """
    if not 0 < abs(difference) <= discordant <= 1:
        raise ValueError(f"no difference of {difference} can come from {discordant} discordant questions")
    reach = _reach(discordant, difference)
    return math.ceil(reach**2)


def detectable(discordant: float, pairs: int) -> float | None:
    """The smallest difference that a paired comparison of so many questions detects: `pairs_needed` turned round.

    None if even the largest difference, all discordant questions falling one way, is too small.
    """
    largest_reach = math.sqrt(pairs)
    if discordant <= 0 or _reach(discordant, discordant) > largest_reach:
        return None
    low = 0.0
    high = discordant
    for _ in range(60):  # bisection: the questions needed fall as the difference grows
        middle = (low + high) / 2
        if _reach(discordant, middle) <= largest_reach:
            high = middle
        else:
            low = middle
    return high


def _reach(discordant: float, difference: float) -> float:
    """The root of the questions that a paired comparison needs (Connor, 1987)."""
    under_no_difference = Z_ALPHA * math.sqrt(discordant)
    under_difference = Z_BETA * math.sqrt(discordant - difference**2)
    return (under_no_difference + under_difference) / difference


# Means over seeds, and what they leave open: another seed trains another policy, other databases ask other questions.

# The 97.5 % quantiles of Student's t with 1 to 30 degrees of freedom.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Scores = Mapping[str, tuple[str, float]]  # database and value of one run's answer, by question


@dataclasses.dataclass(frozen=True, slots=True)
class ScoresByQuestion:
    """The scores of several runs (one a seed), question by question."""

    databases: Sequence[Hashable]  # (N,) the database of each question
    rows: Sequence[Mapping[int, float]]  # (N,) scores by the number of the run; a broken episode has none
    n_runs: int  # runs with at least one score

    @classmethod
    def of(cls, runs: Sequence[Scores]) -> ScoresByQuestion:
        """The scores of these runs; a run without scores is left out and has no number."""
        databases: dict[str, Hashable] = {}
        rows: dict[str, dict[int, float]] = {}
        nonempty = [run for run in runs if run]
        for number, run in enumerate(nonempty):
            for question, (database, value) in run.items():
                databases.setdefault(question, database)
                row = rows.setdefault(question, {})
                row[number] = value
        database_of_each = list(databases.values())
        scores_of_each = list(rows.values())
        return cls(database_of_each, scores_of_each, len(nonempty))

    @property
    def averages(self) -> list[float]:
        """(N,) the mean of each question over its runs."""
        return [statistics.fmean(row.values()) for row in self.rows]

    @property
    def values(self) -> list[float]:
        """All scores, question by question."""
        values: list[float] = []
        for row in self.rows:
            values += row.values()
        return values

    @property
    def vary_by_run(self) -> bool:
        """Whether there are several runs, and two scores that differ."""
        return self.n_runs > 1 and len(set(self.values)) > 1

    def of_run(self, number: int) -> list[float]:
        """The scores of one run."""
        return [row[number] for row in self.rows if number in row]


def mean(runs: Sequence[Scores], seed: int = 0) -> Estimate | None:
    """The mean over questions and runs (one a seed) of scores in [0, 1], with its 95 % interval; None without any."""
    scores = ScoresByQuestion.of(runs)
    plain = estimate(scores.averages, scores.databases, seed)
    if plain is None or not scores.vary_by_run:
        return plain
    low, high, method = _interval(scores, seed)
    average = statistics.fmean(scores.values)
    low = max(low, 0.0)
    high = min(high, 1.0)
    return Estimate(average, low, high, plain.n, plain.n_clusters, method)


def difference(before: Sequence[Scores], after: Sequence[Scores], seed: int = 0) -> Paired | None:
    """The mean of after - before over the questions that both answered, run by run; None when there are none.

    Both have one run a seed, in the same order. The p-value is of the databases alone, as if other seeds would train
    the same policies.
    """
    pairs = zip(before, after, strict=True)
    runs = [score_differences(old, new) for old, new in pairs]
    differences = ScoresByQuestion.of(runs)
    averages = differences.averages
    zeros = [0.0] * len(averages)
    plain = paired(zeros, averages, differences.databases, seed)
    if plain is None or not differences.vary_by_run:
        return plain
    low, high, method = _interval(differences, seed)
    largest = max(map(abs, differences.values))
    bound = max(1.0, largest)
    return Paired(
        difference=statistics.fmean(differences.values),
        low=max(low, -bound),
        high=min(high, bound),
        p_permutation=plain.p_permutation,
        n=plain.n,
        n_clusters=plain.n_clusters,
        method=method,
    )


def score_differences(before: Scores, after: Scores) -> Scores:
    """The differences of one run, over the questions that both answered."""
    differences = {}
    for question, (database, value) in after.items():
        if question in before:
            _, value_before = before[question]
            differences[question] = (database, value - value_before)
    return differences


def deviation(values: Sequence[float]) -> float | None:
    """The sample deviation (n - 1) of a figure over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    return statistics.stdev(values)


def student_t(runs: int) -> float:
    """Student's t for two-sided 95 % over so many runs; beyond 31 runs that of 31, which is a little wide."""
    degrees_of_freedom = min(runs - 1, len(STUDENT))
    return STUDENT[degrees_of_freedom - 1]


def _interval(scores: ScoresByQuestion, seed: int) -> tuple[float, float, Method]:
    """The wider of two intervals of a mean: a bootstrap of databases and seeds, and Student's t over the seeds."""
    by_database = len(set(scores.databases)) >= MIN_CLUSTERS
    units = scores.databases if by_database else range(len(scores.rows))
    totals, counts = _totals(units, scores)
    low, high = crossed_bootstrap(totals, counts, seed)
    n_runs = scores.n_runs
    means = [statistics.fmean(scores.of_run(number)) for number in range(n_runs)]
    half = student_t(n_runs) * statistics.stdev(means) / math.sqrt(n_runs)
    if 2 * half > high - low:
        centre = statistics.fmean(means)
        return centre - half, centre + half, "Student's t over seeds"
    if by_database:
        return low, high, "bootstrap by database and seed"
    return low, high, "bootstrap by question and seed"


def _totals(units: Sequence[Hashable], scores: ScoresByQuestion) -> tuple[Matrix, Matrix]:
    """The sum and the number of each unit's scores in each run; both (units, runs).

    Args:
        units: (N,) the unit of each question.
    """
    import numpy as np

    distinct_units = dict.fromkeys(units)
    unit_index = {unit: index for index, unit in enumerate(distinct_units)}
    shape = (len(unit_index), scores.n_runs)
    totals = np.zeros(shape)
    counts = np.zeros(shape)
    for unit, row in zip(units, scores.rows, strict=True):
        index = unit_index[unit]
        for number, value in row.items():
            totals[index, number] += value
            counts[index, number] += 1
    return totals, counts


def crossed_bootstrap(totals: Matrix, counts: Matrix, seed: int) -> tuple[float, float]:
    """The percentile interval of sum / count over units and runs, each redrawn for itself.

    Args:
        totals, counts: (units, runs).
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    units, runs = totals.shape
    unit_chances = np.full(units, 1 / units)
    run_chances = np.full(runs, 1 / runs)
    of_units = draw.multinomial(units, unit_chances, RESAMPLES)
    of_runs = draw.multinomial(runs, run_chances, RESAMPLES)
    sums = ((of_units @ totals) * of_runs).sum(1)
    sizes = ((of_units @ counts) * of_runs).sum(1)
    has_scores = sizes > 0
    means = np.sort(sums[has_scores] / sizes[has_scores])
    low = np.quantile(means, 0.025, method="inverted_cdf")
    high = np.quantile(means, 0.975, method="inverted_cdf")
    return float(low), float(high)
