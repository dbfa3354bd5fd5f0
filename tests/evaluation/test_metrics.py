"""Metrics against hand-computed values and brute force."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from pipelines.core.registry import METRICS
from pipelines.core.types import ExecutionStatus, SchemaItems
from pipelines.evaluation import metrics
from pipelines.evaluation.record import EpisodeRecord, Linking, Overlap
from pipelines.evaluation.voting import Rule, majority_at_k

Make = Callable[..., EpisodeRecord]


def of(name: str, records: list[EpisodeRecord]) -> Any:
    """The figure of a registered metric."""
    return METRICS[name].measure(records, "strict", 0)


def samples(record: Make, letters: str, **changes: object) -> list[EpisodeRecord]:
    """Sampled records of one question: "A" is right, other letters are wrong; equal letters agree."""
    return [
        record(float(letter == "A"), mode="sampled", sample=i, signature=letter, **changes)
        for i, letter in enumerate(letters)
    ]


def test_accuracy_is_the_share_of_right_answers_and_leaves_broken_ones_out(record: Make) -> None:
    records = [record(1.0, example_id="a"), record(0.0, example_id="b"), record(1.0, example_id="c")]
    records.append(record(0.0, example_id="d", broken=True, failure="worker_died"))
    found = metrics.execution_accuracy(records, "strict")
    assert found is not None
    assert (found.value, found.n) == (pytest.approx(2 / 3), 3)


def test_a_question_with_many_samples_counts_once(record: Make) -> None:
    records = samples(record, "AAAB", example_id="a") + samples(record, "B", example_id="b")
    found = metrics.execution_accuracy(records, "strict")
    assert found is not None
    assert (found.value, found.n) == (pytest.approx((3 / 4 + 0) / 2), 2)


def test_no_records_give_no_figure(record: Make) -> None:
    assert metrics.execution_accuracy([record(broken=True)], "strict") is None
    assert metrics.k_point([], "strict", 1) is None
    assert of("linking_jaccard", [record()]) is None
    assert of("linking_n", [record()]) is None
    assert of("probes", [record()]) is None
    assert metrics.cost([record(tokens_out=None)], lambda each: each.tokens_out) is None


@pytest.mark.parametrize(
    ("n", "correct", "k", "value"),
    [
        (6, 0, 6, 0.0),
        (6, 6, 1, 1.0),
        (6, 1, 1, 1 / 6),
        (8, 2, 4, 1 - 15 / 70),
        (4, 2, 3, 1.0),
        (10, 3, 5, 1 - 21 / 252),
    ],
)
def test_pass_at_k_by_hand(n: int, correct: int, k: int, value: float) -> None:
    # 2 right of 8, k = 4: 1 - C(6, 4) / C(8, 4) = 1 - 15 / 70
    assert metrics.pass_at_k(n, correct, k) == pytest.approx(value)


def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample() -> None:
    for n, correct in itertools.product(range(1, 8), range(8)):
        if correct > n:
            continue
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([i < correct for i in range(n)], k))
            assert metrics.pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, 2, 0), (4, 2, 5), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_counts(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        metrics.pass_at_k(n, correct, k)


def test_a_point_of_the_curves_by_hand(record: Make) -> None:
    records = samples(record, "BABA", example_id="a") + samples(record, "AAAB", example_id="b")
    point = metrics.k_point(records, "strict", 2)
    assert point is not None
    # a: 1 - C(2,2)/C(4,2) = 5/6; b: 1. The first two samples: 1/2 and 1.
    assert point.pass_at.value == pytest.approx((5 / 6 + 1) / 2)
    assert point.average_at.value == pytest.approx((0.5 + 1) / 2)
    # Pairs of B A B A: BA BB BA | AB AA | BA: the first of a tie wins, so A, A only: 2/6. A A A B: all six.
    assert point.majority_at.value == pytest.approx((2 / 6 + 1) / 2)
    assert point.tied == pytest.approx((4 / 6 + 3 / 6) / 2)


def test_a_failed_answer_does_not_vote_as_an_empty_result(record: Make) -> None:
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


def test_a_question_with_too_few_samples_is_left_out_of_a_point(record: Make) -> None:
    records = samples(record, "AA", example_id="a") + samples(record, "B", example_id="b")
    point = metrics.k_point(records, "strict", 2)
    assert point is not None
    assert (point.pass_at.n, point.pass_at.value) == (1, 1.0)
    assert metrics.k_point(records, "strict", 3) is None


def test_broken_samples_shrink_a_group(record: Make) -> None:
    records = samples(record, "AB", example_id="a")
    records.append(dataclasses.replace(records[0], sample=2, broken=True))
    point = metrics.k_point(records, "strict", 1)
    assert point is not None
    assert point.pass_at.value == 0.5


def test_the_spread_of_costs_by_hand() -> None:
    found = metrics.spread([1, 1, 2, 4])
    assert found is not None
    assert (found.mean, found.median, found.p95, found.n) == (2.0, 1.5, 4, 4)
    assert found.std == pytest.approx(1.5**0.5)  # (1 + 1 + 0 + 4) / 4
    twenty = metrics.spread(list(range(1, 21)))
    assert twenty is not None
    assert twenty.p95 == 19


def test_costs_are_those_of_episodes_that_know_them(record: Make) -> None:
    records = [
        record(tokens_out=10),
        record(tokens_out=None),
        record(tokens_out=30),
        record(tokens_out=99, broken=True),
    ]
    found = metrics.cost(records, lambda each: each.tokens_out)
    assert found is not None
    assert (found.mean, found.n) == (20, 2)


def test_the_probe_share_is_of_the_questions_that_need_one(record: Make) -> None:
    records = [
        record(example_id="a", needs_probe=True, tool_calls=2),
        record(example_id="b", needs_probe=True, tool_calls=0),
        record(example_id="c", needs_probe=False, tool_calls=3),
        record(example_id="d", needs_probe=None, tool_calls=0),
    ]
    found = of("probes", records)
    assert (found.value, found.n) == (0.5, 2)


def test_the_syntax_rate_is_the_share_of_answers_that_ran(record: Make) -> None:
    records = [
        record(0.0, example_id="a"),
        record(0.0, example_id="b", status=ExecutionStatus.ERROR),
        record(0.0, example_id="c", status=None, final_sql=None),
        record(0.0, example_id="d", status=ExecutionStatus.TIMEOUT),
    ]
    found = of("syntax", records)
    assert found.value == 0.25


def items(tables: str, columns: str) -> SchemaItems:
    pairs = (column.split(".") for column in columns.split())
    return SchemaItems(frozenset(tables.split()), frozenset((table, column) for table, column in pairs))


def test_linking_of_one_prediction_by_hand() -> None:
    gold = items("ships visits", "ships.name ships.ship_id visits.ship_id visits.year")
    link = Linking.of(items("ships ports", "ships.name ships.flag"), gold)
    assert link is not None
    assert (link.tables.precision, link.tables.recall) == (0.5, 0.5)
    assert (link.columns.precision, link.columns.recall) == (0.5, 0.25)
    assert link.jaccard == pytest.approx(2 / 8)  # 1 table and 1 column of 3 tables and 5 columns
    assert not link.exact


def test_sql_trails_example_of_schema_similarity() -> None:
    # A.4: gold {Employees, Salary}, predicted {Employees, Wages}: 1/3.
    link = Linking.of(items("employees", "employees.wages"), items("employees", "employees.salary"))
    assert link is not None
    assert link.jaccard == pytest.approx(1 / 3)


def test_an_absent_answer_has_found_nothing_and_no_gold_gives_no_link() -> None:
    gold = items("ships", "ships.name")
    link = Linking.of(None, gold)
    assert link is not None
    assert (link.tables.precision, link.tables.recall, link.columns.recall, link.exact) == (0.0, 0.0, 0.0, False)
    assert Linking.of(gold, None) is None
    assert Overlap(0, 0, 0).precision == Overlap(0, 0, 0).recall == Overlap(0, 0, 0).jaccard == 1.0


def test_linking_means_over_episodes(record: Make) -> None:
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


@pytest.mark.parametrize(
    ("before", "after", "points"), [(0.822, 0.860, 2.0), (0.509, 0.601, 4.9), (0.866, 0.868, 0.11)]
)
def test_data_efficiency_gives_sql_trails_table_9(before: float, after: float, points: float) -> None:
    assert metrics.data_efficiency(before, after, 1873) == pytest.approx(points, abs=0.05)


def test_data_efficiency_needs_examples() -> None:
    with pytest.raises(ValueError, match="training examples"):
        metrics.data_efficiency(0.1, 0.2, 0)


def test_listing_everything_first_and_unverified_names_are_shares_of_those_that_could(record: Make) -> None:
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
