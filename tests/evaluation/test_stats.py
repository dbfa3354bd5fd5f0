"""Intervals, tests and power against hand-computed values, exhaustive enumeration, scipy and statsmodels."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats import contingency_tables, proportion

from pipelines.evaluation import stats


def test_wilson_of_eight_right_in_ten_is_the_textbook_interval() -> None:
    # (0.8 + 1.96^2/20 -+ 1.96 sqrt(0.8 * 0.2 / 10 + 1.96^2/400)) / (1 + 1.96^2/10) = (0.99208 -+ 0.31387) / 1.38415
    low, high = stats.wilson(8, 10)
    assert low == pytest.approx(0.4902, abs=5e-5)
    assert high == pytest.approx(0.9433, abs=5e-5)


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 40), (40, 40), (3, 7), (412, 1034)])
def test_wilson_agrees_with_scipy(right: int, n: int) -> None:
    interval = scipy_stats.binomtest(right, n).proportion_ci(method="wilson")
    assert stats.wilson(right, n) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(("right", "n"), [(0, 40), (40, 40), (3, 7), (412, 1034)])
def test_wilson_agrees_with_statsmodels(right: int, n: int) -> None:
    assert stats.wilson(right, n) == pytest.approx(proportion.proportion_confint(right, n, method="wilson"), abs=1e-12)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (3, 1), (10, 6), (0, 9), (41, 40)])
def test_mcnemar_agrees_with_statsmodels(gained: int, lost: int) -> None:
    expected = contingency_tables.mcnemar([[50, lost], [gained, 7]], exact=True).pvalue
    assert stats.mcnemar(gained, lost) == pytest.approx(expected)


@pytest.mark.parametrize(("first", "second"), [(0.75, 0.80), (0.5, 0.7), (0.92, 0.95)])
def test_the_questions_needed_have_their_power_by_statsmodels(first: float, second: float) -> None:
    needed = stats.questions_needed(first, second)
    found = proportion.power_proportions_2indep(first - second, second, needed, alpha=0.05)
    assert found.power == pytest.approx(0.8, abs=0.002)


@pytest.mark.parametrize(("right", "n"), [(1, 0), (-1, 4), (5, 4)])
def test_wilson_refuses_impossible_proportions(right: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        stats.wilson(right, n)


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (8, 2, 2 * 56 / 1024), (3, 3, 1.0)])
def test_mcnemar_is_a_coin_toss_over_the_questions_that_flipped(gained: int, lost: int, p: float) -> None:
    # 8 against 2: twice (C(10,0) + C(10,1) + C(10,2)) / 2^10 = 2 * 56 / 1024
    assert stats.mcnemar(gained, lost) == pytest.approx(p)


@given(gained=st.integers(0, 300), lost=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_mcnemar_agrees_with_scipys_binomial_test(gained: int, lost: int) -> None:
    if gained + lost:
        assert stats.mcnemar(gained, lost) == pytest.approx(scipy_stats.binomtest(gained, gained + lost).pvalue)


def test_sign_flips_of_three_databases_are_counted_by_hand() -> None:
    # Sums of +-3 +-2 +-1: of the eight, only +6 and -6 are as extreme as the observed 6.
    assert stats.sign_flip([3, 2, 1]) == pytest.approx(2 / 8)
    assert stats.sign_flip([1, -1]) == 1.0
    assert stats.sign_flip([0, 0]) == 1.0


def test_sign_flip_agrees_with_scipys_permutation_test() -> None:
    draw = random.Random(3)
    differences = [draw.gauss(0.4, 1) for _ in range(10)]
    expected = scipy_stats.permutation_test((differences,), sum, permutation_type="samples", n_resamples=math.inf)
    assert stats.sign_flip(differences) == pytest.approx(expected.pvalue)


def test_sign_flip_of_many_databases_draws_and_is_never_zero() -> None:
    assert stats.sign_flip([1.0] * 30) == pytest.approx(1 / 10_001)
    even = [(-1.0) ** i for i in range(30)]
    assert stats.sign_flip(even) == pytest.approx(1.0)


def test_bootstrap_finds_the_quantiles_of_all_resamples() -> None:
    # Three databases with means 0, 1/2 and 1, of 1, 2 and 3 questions: 27 ordered resamples, enumerated.
    units = [(0.0, 1), (1.0, 2), (3.0, 3)]
    means = sorted(
        sum(total for total, _ in drawn) / sum(count for _, count in drawn)
        for drawn in itertools.product(units, repeat=3)
    )
    low, high = stats.bootstrap(units, resamples=20_000, confidence=0.8)
    assert low == pytest.approx(means[math.ceil(0.1 * 27) - 1])
    assert high == pytest.approx(means[math.ceil(0.9 * 27) - 1])


def test_bootstrap_agrees_with_scipys_percentile_bootstrap() -> None:
    draw = random.Random(5)
    scores = [draw.random() for _ in range(60)]
    expected = scipy_stats.bootstrap((scores,), lambda x, axis: x.mean(axis), method="percentile", rng=1)
    low, high = stats.bootstrap([(score, 1) for score in scores], resamples=9999)
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.006)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.006)


def test_an_interval_by_database_is_wider_when_a_databases_questions_fall_together() -> None:
    together = [float(database % 2) for database in range(20) for _ in range(10)]
    databases = [database for database in range(20) for _ in range(10)]
    by_database = stats.estimate(together, databases)
    alone = stats.wilson(sum(together), len(together))
    assert by_database is not None
    assert by_database.method == "bootstrap by database"
    assert (by_database.value, by_database.n, by_database.n_clusters) == (0.5, 200, 20)
    assert by_database.high - by_database.low > 2 * (alone[1] - alone[0])


def test_with_few_databases_the_interval_is_wilsons_or_over_questions() -> None:
    right = stats.estimate([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    graded = stats.estimate([0.5, 0.25, 1.0, 0.0], ["a", "a", "b", "b"])
    assert right is not None
    assert (right.method, right.low, right.high) == ("wilson", *stats.wilson(3, 4))
    assert graded is not None
    assert graded.method == "bootstrap by question"


@pytest.mark.parametrize(("databases", "resampled"), [(9, "question"), (10, "database")])
def test_ten_databases_are_enough_to_resample_them(databases: int, resampled: str) -> None:
    graded = [0.25, 0.75] * databases
    of = [question // 2 for question in range(2 * databases)]
    alone, pair = stats.estimate(graded, of), stats.paired([0.0] * len(graded), graded, of)
    assert alone is not None
    assert pair is not None
    assert (alone.method, pair.method) == (f"bootstrap by {resampled}",) * 2
    assert pair.flipped == resampled


def test_scores_that_are_all_equal_still_have_an_interval() -> None:
    none_right = stats.estimate([0.0] * 400, [i // 10 for i in range(400)])
    assert none_right is not None
    assert (none_right.method, none_right.low) == ("wilson", 0.0)
    assert 0.009 < none_right.high < 0.01  # 1.96^2 / (400 + 1.96^2)


def test_counts_that_all_differ_alike_have_an_interval_around_their_difference() -> None:
    """Three turns for one turn on 40 questions: Wilson's reach of 0 in 40, 0.0876, in units of that difference."""
    change = stats.paired([3.0] * 40, [1.0] * 40, list(range(40)))
    assert change is not None
    assert (change.difference, change.low, change.high) == (-2.0, -2.0, pytest.approx(-2 + 2 * 0.0876, abs=1e-3))


def test_two_systems_that_never_differ_are_not_proven_equal() -> None:
    same = stats.paired([1.0] * 8, [1.0] * 8, range(8))
    assert same is not None
    assert (same.difference, same.p_permutation) == (0.0, 1.0)
    assert same.high == -same.low == pytest.approx(stats.wilson(0, 8)[1])
    opposite = stats.paired([0.0] * 8, [1.0] * 8, range(8))
    assert opposite is not None
    assert (opposite.low, opposite.high) == (pytest.approx(stats.wilson(8, 8)[0]), 1.0)


def test_nothing_gives_no_estimate() -> None:
    assert stats.estimate([], []) is None
    assert stats.paired([], [], []) is None


def test_the_same_seed_gives_the_same_interval() -> None:
    scores, databases = [i % 3 / 2 for i in range(90)], [i % 15 for i in range(90)]
    assert stats.estimate(scores, databases, seed=4) == stats.estimate(scores, databases, seed=4)


def test_a_paired_interval_is_narrower_than_two_separate_ones() -> None:
    draw = random.Random(2)
    databases = [question // 12 for question in range(480)]
    before = [float(draw.random() < 0.7) for _ in databases]
    after = [max(score, float(draw.random() < 0.2)) for score in before]  # never worse
    result = stats.paired(before, after, databases)
    first, second = stats.estimate(before, databases), stats.estimate(after, databases)
    assert result is not None
    assert first is not None
    assert second is not None
    assert result.difference == pytest.approx(second.value - first.value)
    assert 0 < result.low < result.difference < result.high
    assert result.p_permutation < 0.001
    assert result.high - result.low < (first.high - first.low + second.high - second.low) / 2


def test_a_paired_interval_and_its_test_take_databases_as_wholes() -> None:
    """In ten of twenty databases all ten questions are gained: a share of 1/2, drawn from twenty databases."""
    databases = [question // 10 for question in range(200)]
    result = stats.paired([0.0] * 200, [float(database < 10) for database in databases], databases)
    assert result is not None
    # Of 20 fair draws 2.1 % are below 6, and as many above 14; from 200 questions it would be [0.43, 0.57].
    assert result.difference == 0.5
    assert result.low in (0.25, 0.3)
    assert result.high in (0.7, 0.75)
    assert result.p_permutation == 2 / 2**10  # both ways that all ten that moved can have the same sign


def test_paired_scores_must_be_of_the_same_questions() -> None:
    with pytest.raises(ValueError):
        stats.paired([1.0], [1.0, 0.0], ["a", "b"])


@pytest.mark.parametrize(("first", "second", "questions"), [(0.75, 0.80, 1094), (0.63, 0.72, 424), (0.80, 0.82, 6039)])
def test_questions_needed_are_those_of_the_textbook(first: float, second: float, questions: int) -> None:
    # 75 against 80 %: (1.95996 sqrt(2 * 0.775 * 0.225) + 0.84162 sqrt(0.1875 + 0.16))^2 / 0.05^2 = 1093.7
    assert stats.questions_needed(first, second) == questions
    assert stats.questions_needed(second, first) == stats.questions_needed(first, second)


def test_the_questions_needed_have_the_power_that_was_asked_for() -> None:
    needed = stats.questions_needed(0.5, 0.7)
    draw, hits, trials = random.Random(1), 0, 400
    for _ in range(trials):
        one, two = (sum(draw.random() < p for _ in range(needed)) for p in (0.5, 0.7))
        pooled = (one + two) / (2 * needed)
        hits += abs(one - two) / needed > 1.96 * math.sqrt(2 * pooled * (1 - pooled) / needed)
    assert hits / trials == pytest.approx(0.8, abs=0.06)


def test_pairs_needed_by_hand_and_fewer_than_unpaired_questions() -> None:
    # 20 % discordant, 5 points: (1.95996 sqrt(0.2) + 0.84162 sqrt(0.2 - 0.0025))^2 / 0.0025 = 625.3 -> 626
    assert stats.pairs_needed(0.20, 0.05) == 626
    assert stats.pairs_needed(0.20, -0.05) == 626
    assert stats.pairs_needed(0.20, 0.05) < stats.questions_needed(0.75, 0.80)


def test_a_detectable_difference_is_the_one_that_needs_so_many_questions() -> None:
    found = stats.detectable(0.20, 626)
    assert found == pytest.approx(0.05, abs=5e-5)  # 626 questions for 5 points, above
    assert stats.detectable(0.20, 2504) == pytest.approx(0.025, abs=1e-4)  # half of it takes about four times as many
    assert stats.pairs_needed(0.20, (stats.detectable(0.20, 133) or 0) + 1e-9) == 133
    assert stats.detectable(0.01, 100) is None  # one flip in a hundred questions proves nothing
    assert stats.detectable(0.0, 100) is None


def test_power_refuses_a_difference_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="no difference"):
        stats.questions_needed(0.5, 0.5)
    with pytest.raises(ValueError, match="no difference"):
        stats.pairs_needed(0.05, 0.10)
