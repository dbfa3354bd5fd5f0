"""Each equality on results small enough to judge by eye; numbers computed by hand from the official formulas."""

import random
import time

import pytest

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import ExecutionResult, ExecutionStatus
from pipelines.sql.equalities.compare import UNKNOWN, Gold, drop_distinct, repair
from pipelines.sql.lexical import differ_in_case_alone

ORDERED = Gold(ordered=True, mentions_order=True)


def result(*rows, columns=None):
    width = columns if columns is not None else len(rows[0])
    return ExecutionResult(ExecutionStatus.OK, tuple(f"c{n}" for n in range(width)), rows)


def score(name, gold, predicted, facts=UNKNOWN):
    return EQUALITIES[name].compare(gold, predicted, facts)


AB, BA = result(("a",), ("b",)), result(("b",), ("a",))
AAB, ABB = result(("a",), ("a",), ("b",)), result(("a",), ("b",), ("b",))


@pytest.mark.parametrize(
    ("gold", "predicted", "facts", "strict", "bird", "test_suite"),
    [
        (AB, AB, Gold(), 1, 1, 1),
        (AB, BA, Gold(), 1, 1, 1),
        (AB, BA, ORDERED, 0, 1, 0),
        (AB, BA, Gold(ordered=False, mentions_order=True), 1, 1, 0),  # an ORDER BY in a subquery only
        (AAB, ABB, Gold(), 0, 1, 0),
        (AB, AAB, Gold(), 0, 1, 0),
        (result((1, "x")), result(("x", 1)), Gold(), 0, 0, 1),
        (result((1, 2), (3, 4)), result((2, 1), (4, 3)), ORDERED, 0, 0, 1),
        (result(("a",)), result(("a", "b")), Gold(), 0, 0, 0),
        (result(columns=1), result(columns=2), Gold(), 0, 1, 1),
        (result(columns=1), result(columns=1), Gold(), 1, 1, 1),
        (result(columns=1), result((None,)), Gold(), 0, 0, 0),
        (result((1,)), result((1.0,)), Gold(), 1, 1, 1),
        (result((1,)), result(("1",)), Gold(), 0, 0, 0),
        (result((None,)), result(("",)), Gold(), 0, 0, 0),
        (result((None,)), result((0,)), Gold(), 0, 0, 0),
        (result(("A",)), result(("a",)), Gold(), 0, 0, 0),
        (result((0.1 + 0.2,)), result((0.3,)), Gold(), 1, 0, 0),
        (result((0.667,)), result((0.6667,)), Gold(), 0, 0, 0),
        (result((1_700_000_000_000_001,)), result((1.7e15,)), Gold(), 0, 0, 0),
        (result((1_700_000_000_000_001.0,)), result((1.7e15,)), Gold(), 0, 0, 0),  # a column of type REAL
        (result((1_700_000_000_000_001,)), result((1.7e15 + 0.25,)), Gold(), 0, 0, 0),
        (result((5_551_234_567,)), result((5_551_234_568.0,)), Gold(), 0, 0, 0),
        (result((5_551_234_567,)), result((5_551_234_567.0,)), Gold(), 1, 1, 1),
        (result((1e-10,)), result((0,)), Gold(), 0, 0, 0),
        (result((0.1 + 0.2 - 0.3,)), result((0,)), Gold(), 1, 0, 0),
        (result((7.000000000000001,)), result((7,)), Gold(), 1, 0, 0),
        (result((1e23,)), result((1e23 + 2**24,)), Gold(), 1, 0, 0),  # neighbours among floats
        (result((2**60,)), result((float(2**60) + 256,)), Gold(), 0, 0, 0),
        (result((2**60,)), result((float(2**60),)), Gold(), 1, 1, 1),
        (result((float("inf"),)), result((1e308,)), Gold(), 0, 0, 0),
        (result((2**53,)), result((2**53 + 1,)), Gold(), 0, 0, 0),
        (result((10**400,)), result((1.5,)), Gold(), 0, 0, 0),
        (result((b"a",)), result(("a",)), Gold(), 0, 0, 0),
    ],
)
def test_what_each_equality_pays(gold, predicted, facts, strict, bird, test_suite):
    assert score("strict", gold, predicted, facts) == strict
    assert score("bird", gold, predicted, facts) == bird
    assert score("skyrl", gold, predicted, facts) == bird
    assert score("test_suite", gold, predicted, facts) == test_suite


def test_strict_matches_floats_that_differ_in_a_last_bit_and_nonempty_pays_no_empty_result():
    empty = result(columns=1)
    assert score("strict", empty, empty) == 1.0
    assert score("strict_nonempty", empty, empty) == 0.0
    assert score("strict_nonempty", AB, BA) == 1.0
    low, high = 0.1 + 0.2, 0.3
    gold, predicted = result((low, "x"), (high, "y"), (1.0, "z")), result((1.0, "z"), (low, "y"), (high, "x"))
    assert score("strict", gold, predicted) == 1.0
    assert score("strict", result((low, "x"), (high, "y")), result((low, "y"), (0.4, "x"))) == 0.0
    # sorted by their floats alone these rows would be paired crosswise
    assert score("strict", result((low, 1), (high, 2)), result((high, 1), (low, 2))) == 1.0


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        # row 1: 1 of 2 cells, row 2: both; tp = .5 + 1, fp = .5, fn = .5: precision = recall = .75
        (result(("a", 1), ("b", 2)), result(("a", 9), ("b", 2)), 0.75),
        # one row too many: tp = 1, fp = 1, fn = 0: precision .5, recall 1
        (result(("a",)), result(("a",), ("b",)), 2 / 3),
        # one row missing: tp = 1, fp = 0, fn = 1
        (result(("a",), ("b",)), result(("a",)), 2 / 3),
        # an extra column: tp = 1, fp = 1, fn = 0
        (result(("a",)), result(("a", "b")), 2 / 3),
        # duplicates are dropped before rows are paired
        (result(("a",), ("a",), ("b",)), result(("a",), ("b",)), 1.0),
        # cells may stand anywhere in the row
        (result(("a", "b")), result(("b", "a")), 1.0),
        (result(("a",), ("b",)), result(("b",), ("a",)), 0.0),
        (result(columns=1), result(columns=1), 1.0),
        (result(columns=1), result(("a",)), 0.0),
        (result(("a",)), result(columns=1), 0.0),
    ],
)
def test_soft_f1_by_hand(gold, predicted, expected):
    assert score("soft_f1", gold, predicted) == pytest.approx(expected)


def test_spider_exec_compares_columns_by_name_and_rows_by_position():
    name, age = ("none", "singer.name", False), ("none", "singer.age", False)
    gold, swapped = result(("Ada", 3), ("Bo", 4)), result((3, "Ada"), (4, "Bo"))
    assert score("spider_exec", gold, swapped, Gold(units=((name, age), (age, name)))) == 1.0
    assert score("spider_exec", gold, gold, Gold(units=((name, age), (name, name)))) == 0.0
    assert score("spider_exec", gold, gold, Gold(units=((name, age), None))) == 0.0
    assert score("spider_exec", gold, result(("Bo", 4), ("Ada", 3)), Gold(units=((name, age), (name, age)))) == 0.0
    assert score("spider_exec", gold, gold, Gold(units=(None, None))) == 1.0  # unreadable gold: by position


def test_test_suite_keeps_the_official_accident_with_numbers_of_two_types():
    # A row's cells are sorted by their text: 10 before 1 (for "<" of "<class"), but 1.0 before 10.
    assert score("test_suite", result((1, 10)), result((1.0, 10))) == 0.0
    assert score("test_suite", result((1, 10)), result((1.0, 10)), Gold(mentions_order=True)) == 0.0
    assert score("test_suite", result((1, 20)), result((1.0, 20))) == 1.0
    assert score("test_suite", result((1,), (10,)), result((1.0,), (10,))) == 1.0


def test_many_like_columns_do_not_blow_up():
    rng = random.Random(0)
    rows = [tuple(rng.randint(0, 1) for _ in range(24)) for _ in range(400)]
    order = list(range(24))
    rng.shuffle(order)
    moved = [tuple(row[i] for i in order) for row in rows]
    rng.shuffle(moved)
    start = time.process_time()
    assert score("test_suite", result(*rows), result(*moved)) == 1.0
    same = [(0, 1) * 12] * 500  # the official code tries up to 24^24 permutations of these
    assert score("test_suite", result(*same), result(*[(1, 0) * 12] * 500)) == 1.0
    assert time.process_time() - start < 2


def test_the_official_rewrites():
    assert repair("a > = 1 AND b < = 2 AND c ! = 3") == "a >= 1 AND b <= 2 AND c != 3"
    assert repair("SELECT year ( curdate() ) - born FROM t") == "SELECT 2020- born FROM t"
    assert drop_distinct("SELECT DISTINCT a, count(distinct b) FROM t") == "SELECT  a, count( b) FROM t"
    kept = "SELECT 'distinct', \"distinct\", distinctive FROM t -- distinct"
    assert drop_distinct(kept) == kept


def test_a_rewriting_of_bare_words_alone_is_the_same_query():
    assert differ_in_case_alone("SELECT A FROM T WHERE b = 'x' -- It's", "select a from t where b = 'x' -- it's")
    for sql in ("SELECT 'X'", 'SELECT "X"', "SELECT [X]", "SELECT É", "SELECT  A"):
        assert not differ_in_case_alone(sql, sql.lower().replace("  ", " "))
