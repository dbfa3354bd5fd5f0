"""Named equalities of query results: each true to its source, each a pure function of two results.

A verdict without its equality's name says little: published evaluators disagree on 7 % of real predictions. Workers
import this module, so it needs nothing beyond the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from pipelines.registry import equality
from pipelines.sql import ehrsql, livesqlbench
from pipelines.sql.bags import close_rows, same_bag
from pipelines.sql.permutation import equal_up_to_columns

Row = tuple[Any, ...]


class Result(Protocol):
    """Rows in order, with their column names."""

    @property
    def columns(self) -> Sequence[str]:
        """Column names."""

    @property
    def rows(self) -> Sequence[Row]:
        """Rows, duplicates kept."""


class Gold(NamedTuple):
    """What an equality may know of the gold query beside its result.

    Attributes:
        ordered: its outermost query has an ORDER BY (`lexical.is_ordered`).
        mentions_order: "order by" stands anywhere in its text: the official test suite's rule.
        units: the official parser's value units of its SELECT list, and of the prediction's (`spider_exec`).
    """

    ordered: bool = False
    mentions_order: bool = False
    units: tuple[Sequence[Any] | None, Sequence[Any] | None] = (None, None)


UNKNOWN = Gold()


_WORD = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|--[^\n]*|/\*.*?\*/|\w+""", re.DOTALL)
_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def repair(sql: str) -> str:
    """What the official test suite puts right in both queries: "> =", "< =" and "! =", and MySQL's current year,
    which is 2020 (`exec_eval.py: postprocess, replace_cur_year`).
    """
    closed = sql.replace("> =", ">=").replace("< =", "<=").replace("! =", "!=")
    return _CURRENT_YEAR.sub("2020", closed) if "urdate" in closed.lower() else closed


def drop_distinct(sql: str) -> str:
    """The query without its DISTINCT keywords, after `repair` (`parse.py: remove_distinct`).

    The official code also drops everything after the first statement, so that "SELECT a; SELECT b" passes as "SELECT
    a". That is a defect, and not followed: two statements are refused here.
    """
    if "distinct" not in sql.lower():
        return repair(sql)
    return _WORD.sub(lambda word: "" if word[0].lower() == "distinct" else word[0], repair(sql))


@equality("bird", form="set")
def bird(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """BIRD's execution accuracy: the rows as sets (Li et al. 2023, `evaluation_ex.py`)."""
    return float(gold.rows == predicted.rows or set(gold.rows) == set(predicted.rows))


@equality("skyrl", form="set")
def skyrl(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """SkyRL-SQL's outcome reward for a well-formed answer: the rows as frozensets (`skyrl_gym/envs/sql/utils.py`)."""
    return bird(gold, predicted, facts)


@equality("test_suite", rewrite=drop_distinct, suite=True)
@equality("test_suite_keep_distinct", rewrite=repair, suite=True)
def suite(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Test suite accuracy on one database: bags of rows up to a permutation of columns, in order when the gold text
    has an ORDER BY (Zhong et al. 2020, `exec_eval.py: result_eq`). Two empty results are equal whatever their arity.
    """
    if not gold.rows and not predicted.rows:
        return 1.0
    return float(equal_up_to_columns(gold.rows, predicted.rows, facts.mentions_order))


@equality("soft_f1", graded=True)
def soft_f1(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """BIRD mini-dev's Soft F1: distinct rows compared position by position (`evaluation_f1.py`).

    In row i, a predicted cell that stands anywhere in the gold row counts 1/c true positive, else 1/c false positive; a
    gold cell that stands nowhere in the predicted row counts 1/c false negative (c: the gold row's columns). A row
    without a partner counts 1 false positive or 1 false negative.
    """
    if gold.rows == predicted.rows:
        return 1.0
    predicted_rows, gold_rows = list(dict.fromkeys(predicted.rows)), list(dict.fromkeys(gold.rows))
    true = false_positive = false_negative = 0.0
    for predicted_row, gold_row in zip(predicted_rows, gold_rows, strict=False):
        hits = sum(cell in gold_row for cell in predicted_row)
        true += hits / len(gold_row)
        false_positive += (len(predicted_row) - hits) / len(gold_row)
        false_negative += sum(cell not in predicted_row for cell in gold_row) / len(gold_row)
    false_positive += max(0, len(predicted_rows) - len(gold_rows))
    false_negative += max(0, len(gold_rows) - len(predicted_rows))
    precision = true / (true + false_positive) if true + false_positive else 0.0
    recall = true / (true + false_negative) if true + false_negative else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@equality("spider_exec", by_units=True)
def spider_exec(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Spider's execution match of 2018: the same columns by the official parser's names, each with the same values in
    the same order (`evaluation.py: eval_exec_match`).

    A prediction that parser cannot read never matches. Where it cannot read the gold query, and the official code
    stops, columns are named by their position.
    """
    gold_units, predicted_units = facts.units
    if gold_units is None:
        gold_units = predicted_units = range(max(len(gold.columns), len(predicted.columns)))
    if predicted_units is None:
        return 0.0
    by_unit = _by_unit(gold.rows, gold_units)
    return float(by_unit is not None and by_unit == _by_unit(predicted.rows, predicted_units))


def _by_unit(rows: Sequence[Row], units: Sequence[Any]) -> dict[Any, list[Any]] | None:
    if rows and len(rows[0]) < len(units):
        return None
    return {unit: [row[index] for row in rows] for index, unit in enumerate(units)}


@equality("strict")
def strict(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Our own equality, and the default for training.

    Equal means: the same number of columns, in the same order, also when there are no rows; the same rows as a bag,
    with their multiplicity; in the same order when the gold query's outermost level has an ORDER BY. Integers exactly;
    two numbers of which one is a float within 1e-12 of the larger or 1e-15 (sums differ in their last bits by the order
    of addition), but a whole number below 2^53 never to another one; text by code points; NULL only to NULL; a number
    never to a text (`bags.close`).

    Why it is the better reward: a set (`bird`, `skyrl`) pays a query that lost its GROUP BY, its DISTINCT or its ORDER
    BY, and pays any empty result for any other; `test_suite` pays columns in another order, rows whose DISTINCT is
    missing, and empty results of another arity; `spider_exec` refuses right answers for an alias. A policy that is paid
    for these learns them. `strict_nonempty` on top never pays where the gold result is empty: there a query that finds
    nothing for the wrong reason cannot be told from the right one.
    """
    if len(gold.columns) != len(predicted.columns) or len(gold.rows) != len(predicted.rows):
        return 0.0
    if gold.rows == predicted.rows:
        return 1.0
    if facts.ordered:
        return float(all(map(close_rows, gold.rows, predicted.rows)))
    return float(same_bag(gold.rows, predicted.rows))


@equality("strict_nonempty")
def strict_nonempty(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """`strict`, and an empty gold result is never paid."""
    return strict(gold, predicted, facts) if gold.rows else 0.0


@equality("ehrsql", rewrite=ehrsql.repaired)
def ehrsql_answer(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """EHRSQL's execution match: the bag of texts in the first column (Lee et al. 2022, `evaluate.py`)."""
    return float(ehrsql.same_answer(gold.rows, predicted.rows))


@equality("livesqlbench", rewrite=livesqlbench.prepared, by_outcome=True, form="set")
def livesqlbench_outcome(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """LiveSQLBench's default test case for queries, and the state of the database for statements that change it."""
    return float(livesqlbench.same_outcome(gold.rows, predicted.rows))


@equality("r_ves", graded=True, timed=True)
def r_ves(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """BIRD's R-VES: a prediction that is right as `bird` says is paid by its speed against the gold query."""
    return bird(gold, predicted, facts)


@equality("spider2", by_file=True)
def spider2(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Spider 2.0's comparison with accepted result files: `evaluation/result_files.py` decides, no gold query runs.

    Raises:
        TypeError: always.
    """
    raise TypeError("spider2 compares with result files, not with the result of a gold query")
