"""Every equality against a slow, exact definition of its own, written here without a look at ours; and what must hold
of `strict` whatever the results are.
"""

import random
import sqlite3
from collections import Counter
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import ExecutionResult, ExecutionStatus
from pipelines.sql.equalities.compare import UNKNOWN, Gold
from tests.fakes import load_script

Row = tuple[Any, ...]


def result(rows, width):
    return ExecutionResult(ExecutionStatus.OK, tuple(f"c{n}" for n in range(width)), tuple(rows))


def score(name, gold, predicted, widths, facts=UNKNOWN):
    return EQUALITIES[name].compare(result(gold, widths[0]), result(predicted, widths[1]), facts)


# The definitions, in exact arithmetic and by trying everything


def same_cell(left, right):
    """`strict` on cells, with fractions instead of floats."""
    if isinstance(left, str | bytes | None) or isinstance(right, str | bytes | None):
        return type(left) is type(right) and left == right
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if float("inf") in (left, right):
        return bool(left == right)
    one, two = Fraction(left), Fraction(right)
    if one == two:
        return True
    largest = max(abs(one), abs(two))
    if largest >= 2**53:
        return not isinstance(left, int) and not isinstance(right, int) and abs(one - two) <= largest / 10**12
    if 1 in (one.denominator, two.denominator) and abs(one - two) >= Fraction(1, 2):
        return False
    return abs(one - two) <= max(largest / 10**12, Fraction(1, 10**15))


def same_row(left, right):
    return all(same_cell(a, b) for a, b in zip(left, right, strict=True))


def slow_strict(gold, predicted, widths, ordered):
    if widths[0] != widths[1] or len(gold) != len(predicted):
        return False
    if ordered:
        return all(map(same_row, gold, predicted))
    rest = list(predicted)
    alone = []  # rows of gold without an equal partner; only these may have a close one
    for row in gold:
        twin = next((at for at, other in enumerate(rest) if identical(row, other)), None)
        if twin is None:
            alone.append(row)
        else:
            del rest[twin]
    return any(all(map(same_row, alone, order)) for order in permutations(rest))


def identical(left, right):
    """Equal, and of one type where the type decides what else a number is close to."""
    return left == right and all(
        isinstance(a, int) == isinstance(b, int) or abs(a) < 2**53 for a, b in zip(left, right, strict=True)
    )


def slow_soft_f1(gold, predicted):
    """`evaluation_f1.py`: calculate_row_match and calculate_f1_score."""
    if gold == predicted:
        return 1.0
    gold, predicted = list(dict.fromkeys(gold)), list(dict.fromkeys(predicted))
    matched, only_predicted, only_gold = [], [], []
    for at, row in enumerate(gold):
        if at >= len(predicted):
            only_gold.append(Fraction(1))
            continue
        width = len(row)
        hits = sum(1 for cell in predicted[at] if cell in row)
        matched.append(Fraction(hits, width))
        only_predicted.append(Fraction(len(predicted[at]) - hits, width))
        only_gold.append(Fraction(sum(1 for cell in row if cell not in predicted[at]), width))
    only_predicted += [Fraction(1)] * (len(predicted) - len(gold))
    true, wrong, missed = sum(matched), sum(only_predicted), sum(only_gold)
    precision = true / (true + wrong) if true + wrong else Fraction(0)
    recall = true / (true + missed) if true + missed else Fraction(0)
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def slow_suite(gold, predicted, ordered):
    """`exec_eval.py: result_eq`, by trying every permutation."""
    if not gold and not predicted:
        return True
    if len(gold) != len(predicted) or len(gold[0]) != len(predicted[0]):
        return False
    sort = [[tuple(sorted(row, key=lambda x: str(x) + str(type(x)))) for row in rows] for rows in (gold, predicted)]
    if sort[0] != sort[1] if ordered else set(sort[0]) != set(sort[1]):
        return False
    moved = ([tuple(row[at] for at in order) for row in predicted] for order in permutations(range(len(gold[0]))))
    return any(gold == rows if ordered else Counter(gold) == Counter(rows) for rows in moved)


# Results: a table and a copy of it, shuffled and altered in ways that hold traps for a tolerance

NUMBERS = st.sampled_from(
    [0, 1, 10, 2**53, 2**60, 2**60 + 1, 1_700_000_000_000_001, 5_551_234_567]
    + [0.0, 1.0, 0.1 + 0.2, 0.3, 1e-10, 1e-16, 1.7e15, 1.7e15 + 0.25, 5_551_234_567.0, float(2**60), 1e300]
    + [1.0 + 9e-13 * step for step in range(3)]  # each is close to the next, the first not to the third
    + [float("inf")]
)
CELLS = st.one_of(NUMBERS, st.sampled_from(["", "a", "1", "0.3", None, b"a"]))


def altered(cell, how):
    if not isinstance(cell, int | float) or cell == float("inf"):
        return cell
    if how == "bits":
        return cell * (1 + 2.0**-52)
    return float(cell) if how == "float" else cell + 1


@st.composite
def two_results(draw):
    width = draw(st.integers(1, 3))
    gold = draw(st.lists(st.tuples(*[CELLS] * width), max_size=5))
    predicted = [
        tuple(altered(cell, draw(st.sampled_from(["no", "no", "bits", "float", "more"]))) for cell in row)
        for row in draw(st.permutations(gold))
    ]
    if draw(st.booleans()) and draw(st.booleans()):
        other = draw(st.integers(1, 3))
        return gold, draw(st.lists(st.tuples(*[CELLS] * other), max_size=5)), (width, other)
    return gold, predicted, (width, width)


@settings(deadline=None, max_examples=400)
@given(two_results(), st.booleans())
def test_strict_is_its_exact_definition(results, ordered):
    gold, predicted, widths = results
    expected = slow_strict(gold, predicted, widths, ordered)
    assert bool(score("strict", gold, predicted, widths, Gold(ordered=ordered))) is expected
    nonempty = bool(score("strict_nonempty", gold, predicted, widths, Gold(ordered=ordered)))
    assert nonempty is (expected and bool(gold))


@settings(deadline=None)
@given(two_results(), st.booleans())
def test_sets_bags_and_grades_are_exact(results, ordered):
    gold, predicted, widths = results
    for name in ("bird", "skyrl", "r_ves"):
        assert bool(score(name, gold, predicted, widths)) is (set(gold) == set(predicted))
    assert score("soft_f1", gold, predicted, widths) == pytest.approx(slow_soft_f1(gold, predicted))
    for name in ("test_suite", "test_suite_keep_distinct"):
        found = bool(score(name, gold, predicted, widths, Gold(mentions_order=ordered)))
        assert found is slow_suite(gold, predicted, ordered)


FEW = st.sampled_from([0, 1, 10, 1.0, 10.0, "a", "b", "1", None])


@st.composite
def two_tables(draw):
    """A table, and a shuffled, permuted and perhaps altered copy of it."""
    width = draw(st.integers(1, 4))
    gold = draw(st.lists(st.tuples(*[FEW] * width), max_size=6))
    order = draw(st.permutations(range(width)))
    predicted = [tuple(row[i] for i in order) for row in draw(st.permutations(gold))]
    if predicted and draw(st.booleans()):
        predicted[0] = draw(st.tuples(*[FEW] * width))
    return gold, predicted


@settings(deadline=None)
@given(two_tables(), st.booleans())
def test_test_suite_is_its_exact_definition_over_permuted_columns(tables, ordered):
    gold, predicted = tables
    width = len(gold[0]) if gold else 1
    ours = score("test_suite", gold, predicted, (width, width), Gold(mentions_order=ordered))
    assert bool(ours) is slow_suite(gold, predicted, ordered)


@settings(deadline=None)
@given(two_results(), st.data())
def test_spider_exec_is_its_exact_definition(results, data):
    gold, predicted, widths = results
    names = [tuple(data.draw(st.lists(st.sampled_from("abc"), min_size=w, max_size=w, unique=True))) for w in widths]
    columns = [
        {name: [row[at] for row in rows] for at, name in enumerate(own)}
        for own, rows in zip(names, (gold, predicted), strict=True)
    ]
    found = score("spider_exec", gold, predicted, widths, Gold(units=(names[0], names[1])))
    assert bool(found) is (columns[0] == columns[1])


@settings(deadline=None)
@given(two_results(), st.booleans(), st.randoms(use_true_random=False))
def test_strict_is_reflexive_and_symmetric_and_blind_to_the_order_of_rows(results, ordered, rng):
    gold, predicted, widths = results
    facts = Gold(ordered=ordered)
    assert score("strict", gold, gold, (widths[0], widths[0]), facts) == 1.0
    verdict = score("strict", gold, predicted, widths, facts)
    assert verdict == score("strict", predicted, gold, widths[::-1], facts)
    if not ordered:
        left, right = rng.sample(gold, len(gold)), rng.sample(predicted, len(predicted))
        assert score("strict", left, right, widths) == verdict


EXACT = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3), st.text(max_size=2), st.none(), st.binary(max_size=1)
)


@st.composite
def one_exact_value_apart(draw):
    """A table of exact values, the same with some integers as floats, and that with one value changed."""
    width = draw(st.integers(1, 3))
    gold = draw(st.lists(st.tuples(*[EXACT] * width), min_size=1, max_size=5))
    same = [
        tuple(
            float(cell) if isinstance(cell, int) and float(cell) == cell and draw(st.booleans()) else cell
            for cell in row
        )
        for row in draw(st.permutations(gold))
    ]
    at, column = draw(st.integers(0, len(gold) - 1)), draw(st.integers(0, width - 1))
    before = same[at][column]
    other = draw(EXACT)
    if isinstance(before, int | float) and draw(st.booleans()):
        other = int(before) + draw(st.sampled_from([-1, 1, -1000, 1000]))
    if isinstance(other, int) and draw(st.booleans()):
        other = float(other)
    assume(other != before)
    return gold, same, [*same[:at], (*same[at][:column], other, *same[at][column + 1 :]), *same[at + 1 :]]


@settings(deadline=None)
@given(one_exact_value_apart(), st.booleans())
def test_strict_sees_a_changed_exact_value(results, ordered):
    gold, same, changed = results
    widths = (len(gold[0]), len(gold[0]))
    assert score("strict", gold, same, widths) == 1.0
    facts = Gold(ordered=ordered)
    # Two floats from 2^53 on are whole because floats there are: their last bits are no exact value.
    assume(not any(isinstance(cell, float) and abs(cell) >= 2**53 for row in [*same, *changed] for cell in row))
    assert score("strict", gold, changed, widths, facts) == 0.0
    assert score("strict", changed, gold, widths, facts) == 0.0


def test_a_sum_in_another_order_is_the_same_sum(tmp_path):
    """SQLite adds REAL values in the order of its scan: by rows, by an index, by groups of groups."""
    rng = random.Random(7)
    connection = sqlite3.connect(tmp_path / "sums.sqlite")
    connection.execute("CREATE TABLE sale (region INTEGER, amount REAL, at INTEGER)")
    rows = [(rng.randint(0, 9), round(rng.uniform(-1000, 9000), 2), rng.random()) for _ in range(20_000)]
    connection.executemany("INSERT INTO sale VALUES (?, ?, ?)", rows)
    one = "SELECT region, sum(amount), avg(amount) FROM sale GROUP BY region"
    other = (
        "SELECT region, sum(part), sum(part) / sum(n) FROM"
        " (SELECT region, sum(amount) part, count(*) n FROM (SELECT * FROM sale ORDER BY at) GROUP BY region, at > 0.5)"
        " GROUP BY region"
    )
    left, right = connection.execute(one).fetchall(), connection.execute(other).fetchall()
    connection.close()
    assert left != right
    assert score("strict", left, right[::-1], (3, 3)) == 1.0
    assert score("strict", left, [*right[1:], (right[0][0], right[0][1] + 0.01, right[0][2])], (3, 3)) == 0.0


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz():
    return load_script(ROOT / "benchmarks" / "fuzz.py")


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_random_cases_find_nothing(fuzz, tmp_path, engine):
    assert fuzz.hunt(fuzz.make_database(tmp_path, engine), 600, 0) == []


def test_the_reference_tells_what_strict_says_of_itself(fuzz):
    assert fuzz.same_bag([(1, "a"), (None, b"x")], [(None, b"x"), (1.0, "a")])
    assert not fuzz.same_bag([(1,)], [(1,), (1,)])
    assert not fuzz.same_cell(2**53, 2**53 + 1)
    assert fuzz.same_cell(0.1 + 0.2, 0.3)
    assert not fuzz.same_cell(1.0, 1.000001)
    assert not fuzz.same_cell(1, "1")


def test_the_fuzzer_reports_a_lax_equality(fuzz, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "EQUALITIES", dict.fromkeys(("strict", "bird"), fuzz.EQUALITIES["bird"]))
    assert fuzz.hunt(fuzz.make_database(tmp_path, "sqlite"), 900, 0)
