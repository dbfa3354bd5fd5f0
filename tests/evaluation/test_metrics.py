"""Metrics, votes, intervals, tests and power: by hand, by brute force and by scipy."""

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest
from evaluation_world import report_data
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from pipelines.core.registry import METRICS
from pipelines.core.types import ExecutionResult, ExecutionStatus, SchemaItems
from pipelines.evaluation import metrics, stats
from pipelines.evaluation.measures import curve_points, moving_average, steps_to
from pipelines.evaluation.record import Linking, Overlap
from pipelines.evaluation.summary import summarise
from pipelines.evaluation.voting import Candidate, Rule, majority_at_k, signature, vote
from pipelines.recipe.config import Evaluation
from pipelines.report import report_tables


def of(name, records):
    """The figure of a registered metric."""
    return METRICS[name].measure(records, "strict", 0)


def samples(record, letters, **changes):
    """Sampled records of one question: "A" is right, other letters are wrong; equal letters agree."""
    return [
        record(float(letter == "A"), mode="sampled", sample=i, signature=letter, **changes)
        for i, letter in enumerate(letters)
    ]


def test_accuracy_is_the_share_of_right_answers_and_leaves_broken_ones_out(record):
    records = [record(1.0, example_id="a"), record(0.0, example_id="b"), record(1.0, example_id="c")]
    records.append(record(0.0, example_id="d", broken=True, failure="worker_died"))
    found = metrics.execution_accuracy(records, "strict")
    assert (found.value, found.n) == (pytest.approx(2 / 3), 3)
    records = samples(record, "AAAB", example_id="a") + samples(record, "B", example_id="b")
    found = metrics.execution_accuracy(records, "strict")
    assert (found.value, found.n) == (pytest.approx((3 / 4 + 0) / 2), 2)  # a question with many samples counts once


def test_a_conversation_matches_if_each_of_its_questions_is_right(record):
    rights = {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [1.0, 1.0], "d": [1.0]}
    records = [
        record(right, example_id=f"{name}_{turn}", interaction=name, broken=(name, turn) == ("c", 1))
        for name, each in rights.items()
        for turn, right in enumerate(each)
    ]
    found = of("interaction_match", records)  # a and d of a, b and d; c has a broken episode
    assert (found.value, found.n) == (pytest.approx(2 / 3), 3)
    assert of("interaction_match", [record(1.0)]) is None


def test_a_conversation_with_a_broken_episode_is_left_out_of_a_summary_too(record):
    rights = {"a": [1.0, 1.0], "b": [0.0, 1.0]}
    records = [
        record(right, example_id=f"{name}_{turn}", interaction=name, broken=(name, turn) == ("a", 1))
        for name, each in rights.items()
        for turn, right in enumerate(each)
    ]
    measured = summarise(records, "strict").measured
    assert (measured["interaction_match"].value, measured["interaction_match"].n) == (0.0, 1)  # b alone
    assert measured["turns"].n == 3  # other metrics see the unbroken episodes


def test_a_conversation_of_which_a_question_was_not_asked_is_left_out(record):
    records = [
        record(right, example_id=f"{name}_{turn}", interaction=name, interaction_questions=questions)
        for name, questions, rights in (("a", 3, [1.0, 1.0]), ("b", 2, [1.0, 0.0]), ("c", 1, [1.0]))
        for turn, right in enumerate(rights)
    ]
    found = of("interaction_match", records)  # c of b and c; one question of a is missing
    assert (found.value, found.n) == (0.5, 2)
    assert of("interaction_match", records[:2]) is None


def test_no_records_give_no_figure(record):
    assert metrics.execution_accuracy([record(broken=True)], "strict") is None
    assert metrics.k_point([], "strict", 1) is None
    assert of("linking_jaccard", [record()]) is None
    assert of("linking_n", [record()]) is None
    assert of("probes", [record()]) is None
    assert metrics.cost([record(tokens_out=None)], lambda each: each.tokens_out) is None


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample():
    for n, correct in itertools.product(range(1, 8), range(8)):
        if correct > n:
            continue
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([i < correct for i in range(n)], k))
            assert metrics.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_a_point_of_the_curves_by_hand(record):
    records = samples(record, "BABA", example_id="a") + samples(record, "AAAB", example_id="b")
    point = metrics.k_point(records, "strict", 2)
    # a: 1 - C(2,2)/C(4,2) = 5/6; b: 1. The first two samples: 1/2 and 1.
    assert point.pass_at.value == pytest.approx((5 / 6 + 1) / 2)
    assert point.average_at.value == pytest.approx((0.5 + 1) / 2)
    # Pairs of B A B A: BA BB BA | AB AA | BA: the first of a tie wins, so A, A only: 2/6. A A A B: all six.
    assert point.majority_at.value == pytest.approx((2 / 6 + 1) / 2)
    assert point.tied == pytest.approx((4 / 6 + 3 / 6) / 2)
    assert metrics.k_point(records[::-1], "strict", 2).average_at.value == pytest.approx((0.5 + 1) / 2)
    records = samples(record, "AA", example_id="a") + samples(record, "B", example_id="b")
    point = metrics.k_point(records, "strict", 2)
    assert (point.pass_at.n, point.pass_at.value) == (1, 1.0)
    assert metrics.k_point(records, "strict", 3) is None
    records = samples(record, "AB", example_id="a")
    records.append(dataclasses.replace(records[0], sample=2, broken=True))
    point = metrics.k_point(records, "strict", 1)
    assert point.pass_at.value == 0.5


def test_a_failed_answer_does_not_vote_as_an_empty_result(record):
    """Three failures outvote one right answer where failures vote, whether empty results come last or not."""
    failed = {"status": ExecutionStatus.ERROR, "n_rows": 0, "signature": None, "score": 0.0}
    members = [record(sample=number, **failed) for number in range(3)] + [record(sample=3, signature="A", score=1.0)]
    voters = metrics.candidates(members, "strict")
    assert [voter.empty for voter in voters] == [False] * 4
    for rule in (Rule(failing="vote"), Rule(failing="vote", empty="last")):
        assert majority_at_k(voters, 4, rule).score == 0.0
    assert majority_at_k(voters, 4, Rule(empty="last")).score == 1.0
    (empty,) = metrics.candidates([record(n_rows=0)], "strict")
    assert empty.empty


def test_the_spread_of_costs_by_hand(record):
    found = metrics.spread([1, 1, 2, 4])
    assert (found.mean, found.median, found.p95, found.n) == (2.0, 1.5, 4, 4)
    assert found.std == pytest.approx(1.5**0.5)  # (1 + 1 + 0 + 4) / 4
    assert metrics.spread(list(range(1, 21))).p95 == 19
    known = [record(tokens_out=10), record(tokens_out=None), record(tokens_out=30), record(tokens_out=99, broken=True)]
    found = metrics.cost(known, lambda each: each.tokens_out)
    assert (found.mean, found.n) == (20, 2)


def test_shares_are_of_the_questions_that_could(record):
    records = [
        record(example_id="a", needs_probe=True, tool_calls=2),
        record(example_id="b", needs_probe=True, tool_calls=0),
        record(example_id="c", needs_probe=False, tool_calls=3),
        record(example_id="d", needs_probe=None, tool_calls=0),
    ]
    found = of("probes", records)
    assert (found.value, found.n) == (0.5, 2)
    records = [
        record(0.0, example_id="a"),
        record(0.0, example_id="b", status=ExecutionStatus.ERROR),
        record(0.0, example_id="c", status=None, final_sql=None),
        record(0.0, example_id="d", status=ExecutionStatus.TIMEOUT),
    ]
    found = of("syntax", records)
    assert found.value == 0.25
    records = [
        record(example_id="a", lists_first=True, unverified=2),
        record(example_id="b", lists_first=False, unverified=0),
        record(example_id="c", lists_first=False),  # explored and never proposed
        record(example_id="d"),  # an agent without phases
    ]
    listing, unverified = of("listing", records), of("unverified", records)
    assert (listing.value, listing.n) == (pytest.approx(1 / 3), 3)
    assert (unverified.value, unverified.n) == (0.5, 2)
    assert of("listing", records[3:]) is None


def items(tables, columns):
    pairs = (column.split(".") for column in columns.split())
    return SchemaItems(frozenset(tables.split()), frozenset((table, column) for table, column in pairs))


def test_linking_of_one_prediction_by_hand():
    gold = items("ships visits", "ships.name ships.ship_id visits.ship_id visits.year")
    link = Linking.of(items("ships ports", "ships.name ships.flag"), gold)
    assert (link.tables.precision, link.tables.recall) == (0.5, 0.5)
    assert (link.columns.precision, link.columns.recall) == (0.5, 0.25)
    assert link.jaccard == pytest.approx(2 / 8)  # 1 table and 1 column of 3 tables and 5 columns
    assert not link.exact
    # SQL-Trail, A.4: gold {Employees, Salary}, predicted {Employees, Wages}: 1/3.
    assert Linking.of(
        items("employees", "employees.wages"), items("employees", "employees.salary")
    ).jaccard == pytest.approx(1 / 3)
    gold = items("ships", "ships.name")
    link = Linking.of(None, gold)
    assert (link.tables.precision, link.tables.recall, link.columns.recall, link.exact) == (0.0, 0.0, 0.0, False)
    assert Linking.of(gold, None) is None
    assert Overlap(0, 0, 0).precision == Overlap(0, 0, 0).recall == Overlap(0, 0, 0).jaccard == 1.0


def test_linking_means_over_episodes(record):
    gold = items("ships", "ships.name ships.flag")
    records = [
        record(linking=Linking.of(gold, gold)),
        record(linking=Linking.of(items("ships", "ships.name"), gold)),
        record(linking=None),
        record(linking=Linking.of(None, gold), broken=True),
    ]
    fields = ("table_precision", "table_recall", "column_precision", "column_recall", "exact", "jaccard", "n")
    found = tuple(of(f"linking_{field}", records) for field in fields)
    assert found == (1.0, 1.0, 1.0, 0.75, 0.5, pytest.approx((1 + 2 / 3) / 2), 2)


@pytest.mark.parametrize(("before", "after", "gain"), [(0.822, 0.860, 2.0), (0.509, 0.601, 4.9), (0.866, 0.868, 0.11)])
def test_data_efficiency_gives_sql_trails_table_9(before, after, gain):
    assert metrics.data_efficiency(before, after, 1873) == pytest.approx(gain, abs=0.05)


def rows(*values):
    return [{"step": step, "ex": value} for step, value in enumerate(values, 1)]


def test_the_threshold_is_reached_by_the_mean_of_a_whole_window():
    points = curve_points([*rows(1.0, 0.0, 0.5), {"step": 4, "ex": float("nan")}, {"step": 5}, *rows()], "ex")
    assert points == [(1.0, 1.0), (2.0, 0.0), (3.0, 0.5)]
    assert moving_average(points, 2) == [(1.0, 1.0), (2.0, 0.5), (3.0, 0.25)]
    assert steps_to(points, 0.5, window=2) == 2.0, "the luck of the first step alone does not count"
    assert steps_to(points, 0.6, window=2) is None
    assert steps_to(points, 0.5, window=10) == 3.0, "a short training has one window"
    assert steps_to([], 0.0) is None
    held_out = [(1.0, 0.7), (21.0, 0.94), (41.0, 0.95)]
    assert moving_average(held_out) == held_out
    assert moving_average([(1.0, 0.0), (6.0, 1.0), (11.0, 0.5)]) == [(1.0, 0.0), (6.0, 0.5), (11.0, 0.75)]


def test_the_report_has_the_steps_to_an_accuracy():
    data = dataclasses.replace(report_data(), curves={"GRPO": [*rows(*[0.1] * 10, *[0.5] * 10)]})
    table = report_tables.thresholds(data)
    assert [column.name for column in table.columns] == ["curve", "10 %", "20 %", "30 %", "40 %", "50 %"]
    assert table.rows == (("GRPO: EX in training", 10.0, 13.0, 15.0, 18.0, 20.0),)
    assert not report_tables.thresholds(dataclasses.replace(data, curves={"GRPO": rows(0.0, 0.0)})).rows


def test_the_share_of_answers_by_the_first_statement(record):
    episodes = [
        record(example_id="a", tool_calls=0),
        record(example_id="b", tool_calls=2),
        record(example_id="c", tool_calls=0, final_sql=None),
        record(example_id="d", tool_calls=0, broken=True),
    ]
    found = summarise(episodes, "strict").measured["single_statement"]
    assert (found.value, found.n) == (0.5, 2)
    assert summarise(episodes, "strict").flat()["single_statement"] == 0.5


def test_figures_by_birds_levels_stand_in_their_order_with_characters_and_deviation(record):
    episodes = [
        record(example_id=f"q{n}", difficulty=level, turns=turns, reasoning_chars=chars, tokens_in=10, tokens_out=7)
        for n, (level, turns, chars) in enumerate(
            [("challenging", 5, 900), ("simple", 1, 100), ("moderate", 2, 300), ("simple", 3, 200)]
        )
    ]
    summary = summarise(episodes, "strict")
    assert [level.name for level in summary.by_difficulty] == ["simple", "moderate", "challenging"]
    simple = summary.by_difficulty[0]
    assert (simple.turns.mean, simple.turns.std, simple.reasoning_chars.mean) == (2.0, 1.0, 150.0)
    flat = summary.flat()
    assert flat["turns_difficulty_simple"] == 2.0
    assert flat["turns_deviation"] == pytest.approx(1.479, abs=1e-3)  # of 5, 1, 2, 3 about 2.75
    assert flat["ex_strict_difficulty_challenging"] in (0.0, 1.0)


def test_reasoning_is_sliced_by_the_links_of_gold_and_by_those_of_the_predicted_sql(record):
    """Figure 7 of SQL-Trail counts "the number of schema links in the predicted SQL" (A.8)."""
    gold = items("ships", "ships.name")
    longer = Linking.of(items("ships", "ships.name ships.flag ships.port"), gold)
    episodes = [
        record(example_id="q1", linking=Linking.of(gold, gold), reasoning_chars=100),
        record(example_id="q2", linking=longer, reasoning_chars=300),
        record(example_id="q3", linking=longer, reasoning_chars=500),
    ]
    summary = summarise(episodes, "strict")
    by_gold = [(level.name, level.n, level.reasoning_chars.mean) for level in summary.by_links]
    assert by_gold == [("1", 3, 300.0)]  # gold names one column
    predicted = [(level.name, level.n, level.reasoning_chars.mean) for level in summary.by_predicted_links]
    assert predicted == [("1", 1, 100.0), ("3", 2, 400.0)]


def test_the_tables_show_turns_tokens_and_reasoning(record):
    data = report_data()
    names = [column.name for column in report_tables.databases(data).columns]
    assert names[-5:] == ["turns", "± turns", "tokens in", "tokens out", "reasoning"], "cost by database"
    assert {"± turns", "single", "reasoning"} <= {column.name for column in report_tables.behaviour(data).columns}


@pytest.mark.parametrize(("right", "n"), [(0, 1), (1, 1), (0, 40), (40, 40), (3, 7), (412, 1034)])
def test_wilson_agrees_with_scipy(right, n):
    interval = scipy_stats.binomtest(right, n).proportion_ci(method="wilson")
    assert stats.wilson(right, n) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (5, 0, 2 / 32), (8, 2, 2 * 56 / 1024), (3, 3, 1.0)])
def test_mcnemar_is_a_coin_toss_over_the_questions_that_flipped(gained, lost, p):
    # 8 against 2: twice (C(10,0) + C(10,1) + C(10,2)) / 2^10 = 2 * 56 / 1024
    assert stats.mcnemar(gained, lost) == pytest.approx(p)


@given(gained=st.integers(0, 300), lost=st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_mcnemar_agrees_with_scipys_binomial_test(gained, lost):
    if gained + lost:
        assert stats.mcnemar(gained, lost) == pytest.approx(scipy_stats.binomtest(gained, gained + lost).pvalue)


def test_sign_flips_by_hand_by_scipy_and_drawn():
    # Sums of +-3 +-2 +-1: of the eight, only +6 and -6 are as extreme as the observed 6.
    assert stats.sign_flip([3, 2, 1]) == pytest.approx(2 / 8)
    assert stats.sign_flip([1, -1]) == 1.0
    assert stats.sign_flip([0, 0]) == 1.0
    assert stats.sign_flip([0.1] * 10) == 2 / 1024  # ten times 0.1, added one by one, is less than 1
    assert stats.sign_flip([1.0] * 30) == pytest.approx(1 / 10_001)
    assert stats.sign_flip([(-1.0) ** i for i in range(30)]) == pytest.approx(1.0)
    draw = random.Random(3)
    differences = [draw.gauss(0.4, 1) for _ in range(10)]
    expected = scipy_stats.permutation_test((differences,), sum, permutation_type="samples", n_resamples=math.inf)
    assert stats.sign_flip(differences) == pytest.approx(expected.pvalue)


def test_bootstrap_finds_the_quantiles_of_all_resamples():
    # Three databases with means 0, 1/2 and 1, of 1, 2 and 3 questions: 27 ordered resamples, enumerated.
    units = [(0.0, 1), (1.0, 2), (3.0, 3)]
    means = sorted(
        sum(total for total, _ in drawn) / sum(count for _, count in drawn)
        for drawn in itertools.product(units, repeat=3)
    )
    assert stats.bootstrap([(1.0, 2)], resamples=1) == (0.5, 0.5)  # the first of one
    low, high = stats.bootstrap(units, resamples=20_000, confidence=0.8)
    assert low == pytest.approx(means[math.ceil(0.1 * 27) - 1])
    assert high == pytest.approx(means[math.ceil(0.9 * 27) - 1])


def test_bootstrap_agrees_with_scipys_percentile_bootstrap():
    draw = random.Random(5)
    scores = [draw.random() for _ in range(60)]
    expected = scipy_stats.bootstrap((scores,), lambda x, axis: x.mean(axis), method="percentile", rng=1)
    low, high = stats.bootstrap([(score, 1) for score in scores], resamples=9999)
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.006)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.006)


def test_an_interval_by_database_is_wider_when_a_databases_questions_fall_together():
    together = [float(database % 2) for database in range(20) for _ in range(10)]
    by_database = stats.estimate(together, [database for database in range(20) for _ in range(10)])
    alone = stats.wilson(sum(together), len(together))
    assert by_database.method == "bootstrap by database"
    assert (by_database.value, by_database.n, by_database.n_clusters) == (0.5, 200, 20)
    assert by_database.high - by_database.low > 2 * (alone[1] - alone[0])


def test_with_few_databases_the_interval_is_wilsons_or_over_questions():
    right = stats.estimate([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])
    graded = stats.estimate([0.5, 0.25, 1.0, 0.0], ["a", "a", "b", "b"])
    assert (right.method, right.low, right.high) == ("wilson", *stats.wilson(3, 4))
    assert graded.method == "bootstrap by question"


@pytest.mark.parametrize(("databases", "resampled"), [(9, "question"), (10, "database")])
def test_ten_databases_are_enough_to_resample_them(databases, resampled):
    graded = [0.25, 0.75] * databases
    of = [question // 2 for question in range(2 * databases)]
    alone, pair = stats.estimate(graded, of), stats.paired([0.0] * len(graded), graded, of)
    assert (alone.method, pair.method) == (f"bootstrap by {resampled}",) * 2
    assert pair.flipped == resampled


def test_values_that_are_all_alike_still_have_an_interval():
    none_right = stats.estimate([0.0] * 400, [i // 10 for i in range(400)])
    assert (none_right.method, none_right.low) == ("wilson", 0.0)
    assert 0.009 < none_right.high < 0.01  # 1.96^2 / (400 + 1.96^2)
    # Three turns for one turn on 40 questions: Wilson's reach of 0 in 40, 0.0876, in units of that difference.
    change = stats.paired([3.0] * 40, [1.0] * 40, list(range(40)))
    assert (change.difference, change.low, change.high) == (-2.0, -2.0, pytest.approx(-2 + 2 * 0.0876, abs=1e-3))


def test_two_systems_that_never_differ_are_not_proven_equal():
    same = stats.paired([1.0] * 8, [1.0] * 8, range(8))
    assert (same.difference, same.p_permutation) == (0.0, 1.0)
    assert same.high == -same.low == pytest.approx(stats.wilson(0, 8)[1])
    opposite = stats.paired([0.0] * 8, [1.0] * 8, range(8))
    assert (opposite.low, opposite.high) == (pytest.approx(stats.wilson(8, 8)[0]), 1.0)


def test_no_scores_give_no_estimate():
    assert stats.estimate([], []) is None
    assert stats.paired([], [], []) is None


def test_a_paired_interval_is_narrower_than_two_separate_ones():
    draw = random.Random(2)
    databases = [question // 12 for question in range(480)]
    before = [float(draw.random() < 0.7) for _ in databases]
    after = [max(score, float(draw.random() < 0.2)) for score in before]  # never worse
    result = stats.paired(before, after, databases)
    first, second = stats.estimate(before, databases), stats.estimate(after, databases)
    assert result.difference == pytest.approx(second.value - first.value)
    assert 0 < result.low < result.difference < result.high
    assert result.p_permutation < 0.001
    assert result.high - result.low < (first.high - first.low + second.high - second.low) / 2


def test_a_paired_interval_and_its_test_take_databases_as_wholes():
    """In ten of twenty databases all ten questions are gained: a share of 1/2, drawn from twenty databases."""
    databases = [question // 10 for question in range(200)]
    result = stats.paired([0.0] * 200, [float(database < 10) for database in databases], databases)
    # Of 20 fair draws 2.1 % are below 6, and as many above 14; from 200 questions it would be [0.43, 0.57].
    assert result.difference == 0.5
    assert result.low in (0.25, 0.3)
    assert result.high in (0.7, 0.75)
    assert result.p_permutation == 2 / 2**10  # both ways that all ten that moved can have the same sign


def test_pairs_needed_by_hand():
    # 20 % discordant, 5 points: (1.95996 sqrt(0.2) + 0.84162 sqrt(0.2 - 0.0025))^2 / 0.0025 = 625.3 -> 626
    assert stats.pairs_needed(0.20, 0.05) == 626
    assert stats.pairs_needed(0.20, -0.05) == 626


def test_a_detectable_difference_is_the_one_that_needs_so_many_questions():
    assert stats.detectable(0.20, 626) == pytest.approx(0.05, abs=5e-5)  # 626 questions for 5 points, above
    assert stats.detectable(0.20, 2504) == pytest.approx(0.025, abs=1e-4)  # half of it takes about four times as many
    assert stats.pairs_needed(0.20, (stats.detectable(0.20, 133) or 0) + 1e-9) == 133
    assert stats.detectable(0.01, 100) is None  # one flip in a hundred questions proves nothing
    assert stats.detectable(0.0, 100) is None


def group(letters, right="A"):
    """Candidates from letters: equal letters agree, "-" failed, "0" has an empty result."""
    return [
        Candidate(i, None if letter == "-" else letter, empty=letter == "0", score=float(letter in right))
        for i, letter in enumerate(letters)
    ]


@pytest.mark.parametrize(
    ("figure", "arguments", "message"),
    [
        *((metrics.pass_at_k, counts, "pass@") for counts in [(4, 5, 1), (4, 2, 0), (4, 2, 5), (4, -1, 1)]),
        *((stats.wilson, counts, "no proportion") for counts in [(1, 0), (-1, 4), (5, 4)]),
        *((majority_at_k, (group("AAB"), k), "majority") for k in (0, 4)),
        (vote, ([],), "candidates"),
        (metrics.data_efficiency, (0.822, 0.860, 0), "training examples"),
        (stats.paired, ([1.0], [1.0, 0.0], ["a", "b"]), "argument 2 is longer"),
        (stats.pairs_needed, (0.05, 0.10), "no difference"),
    ],
)
def test_a_figure_of_impossible_counts_is_refused(figure, arguments, message):
    with pytest.raises(ValueError, match=message):
        figure(*arguments)


def result(*rows, columns=1):
    return ExecutionResult(ExecutionStatus.OK, tuple("abc"[:columns]), rows)


@pytest.mark.parametrize(
    ("letters", "rule", "sample", "signature", "tied"),
    [
        ("BAABA", Rule(), 1, "A", False),  # the largest group, and its earliest sample
        ("BABA", Rule(), 0, "B", True),  # of a tie the group of the earliest sample
        ("--A", Rule(), 2, "A", False),  # failing candidates abstain
        ("--A", Rule(failing="vote"), 0, None, False),
        ("00A", Rule(), 0, "0", False),  # empty results vote
        ("00A", Rule(empty="last"), 2, "A", False),
        ("-00", Rule(empty="last"), 1, "0", False),  # there is nothing else
        ("---", Rule(), 0, None, False),  # nobody votes
    ],
)
def test_the_winner_of_a_vote(letters, rule, sample, signature, tied):
    """Whatever the order in which the candidates are handed over."""
    for candidates in (group(letters), group(letters)[::-1]):
        found = vote(candidates, rule)
        assert (found.winner.sample, found.winner.signature, found.tied) == (sample, signature, tied)


def test_majority_at_k_by_hand():
    # A A B: pairs AA -> A; AB and AB are ties that the earlier A wins. B A A: BA, BA go to B; AA to A.
    assert majority_at_k(group("AAB"), 2).score == 1.0
    assert majority_at_k(group("AAB"), 2).tied == pytest.approx(2 / 3)
    assert majority_at_k(group("BAA"), 2).score == pytest.approx(1 / 3)
    assert majority_at_k(group("BAA"), 1).score == pytest.approx(2 / 3)
    assert majority_at_k(group("BAA"), 3).score == 1.0


def brute_force(letters, k, right):
    """Every k-subset, its most common letter (the earliest of several), whether that one is right."""
    wins = []
    for chosen in itertools.combinations(range(len(letters)), k):
        votes = [letters[i] for i in chosen if letters[i] != "-"]
        top = max(Counter(votes).values(), default=0)
        wins.append(next((letter for letter in votes if votes.count(letter) == top), letters[chosen[0]]) in right)
    return sum(wins) / len(wins)


@given(letters=st.text("ABC0-", min_size=1, max_size=8), data=st.data())
@settings(max_examples=150, deadline=None)
def test_majority_at_k_agrees_with_brute_force(letters, data):
    k = data.draw(st.integers(1, len(letters)))
    assert majority_at_k(group(letters, "AB"), k).score == pytest.approx(brute_force(letters, k, "AB"))


def test_too_many_subsets_are_drawn_and_come_close():
    draw = random.Random(0)
    letters = "".join(draw.choice("AAB") for _ in range(16))
    exact = brute_force(letters, 6, "A")  # 8,008 subsets
    assert majority_at_k(group(letters), 6).score == pytest.approx(exact, abs=0.05)
    assert majority_at_k(group(letters), 6) == majority_at_k(group(letters), 6)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (result((1,), (2,)), result((2,), (1,))),  # order
        (result((1,)), result((1.0,))),  # SQL's 1 = 1.0
        (result((0.1 + 0.2,)), result((0.3,))),  # the last bits of a sum
        (result((0.0,)), result((-0.0,))),
        (result(("é", None, b"\x00"), columns=3), result(("é", None, b"\x00"), columns=3)),
    ],
)
def test_results_that_agree(left, right):
    assert signature(left) == signature(right) is not None


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (result((1,)), result(("1",))),  # a number is not a text
        (result((1,)), result((1,), (1,))),  # multiplicity
        (result(("a", "b"), columns=2), result(("b", "a"), columns=2)),  # order of columns
        (result(("a\x1eb", "c"), columns=2), result(("a", "b\x1ec"), columns=2)),  # a separator inside a text
        (result(("a",), ("b",)), result(("a\x1dtext:b",))),
        (result((None,)), result(("null",))),
        (result(), result(columns=2)),  # empty, but of another shape
        (result((10**15,)), result((10**15 + 1,))),  # neighbouring identifiers
        (result((1234567.5,)), result((1234568.4,))),  # seven digits of ten
        (result((float("inf"),)), result((float("-inf"),))),
    ],
)
def test_results_that_differ(left, right):
    assert signature(left) != signature(right)


def test_duplicates_do_not_count_under_a_set_equality():
    once, twice = result((1,), (2,)), result((2,), (1,), (1,))
    assert signature(once, "set") == signature(twice, "set")
    assert signature(once, "bag") != signature(twice, "bag")


@pytest.mark.parametrize("status", [status for status in ExecutionStatus if status is not ExecutionStatus.OK])
def test_a_result_that_is_not_ok_has_no_signature(status):
    assert signature(ExecutionResult(status, error="no")) is None


@given(st.lists(st.tuples(st.none() | st.text() | st.integers() | st.floats() | st.binary()), max_size=5))
@settings(max_examples=150, deadline=None)
def test_any_row_has_a_signature_that_row_order_does_not_change(rows):
    forms = ("bag", "set")
    for form in forms:
        assert signature(result(*rows), form) == signature(result(*reversed(rows)), form)


def test_a_recipe_states_who_votes():
    assert Rule.of(Evaluation()) == Rule("vote", "abstain")
    assert Rule.of(Evaluation(empty="last", failing="vote")) == Rule("last", "vote")
