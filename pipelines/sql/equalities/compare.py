"""Named equalities of query results: each true to its source, each a pure function of two results.

A verdict without its equality's name says little: published evaluators disagree on 7 % of real predictions. Workers
import this module, so it needs nothing beyond the standard library.
"""

import marshal
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from pipelines.core.registry import equality
from pipelines.sql.dialects.sqlite import OUTCOME_COLUMNS
from pipelines.sql.equalities import official

Row = tuple[Any, ...]
ColumnPath = tuple[int, ...]  # places of predicted columns that were chosen for gold columns
MAX_STEPS = 2_000  # partial choices of columns in the search of `suite`

# Rows that are equal but for the last bits of their floats, and bags of such rows, for the equality `strict`.

RELATIVE = 1e-12  # sums of a million floats in two orders differ by some 1e-13
ABSOLUTE = 1e-15  # 0.1 + 0.2 - 0.3 is 5.6e-17 and not 0
WHOLE = 2**53  # below it a float tells every whole number from the next
MAX_MATCHED = 100  # rows of one group whose pairing is searched for


class RowGroup(NamedTuple):
    """Rows of gold and of the prediction that are near one another, and have no equal partner."""

    missing: list[Row]
    surplus: list[Row]


def close(left: Any, right: Any) -> bool:
    """Whether two cells are the same value: text, bytes, NULL and integers exactly, numbers with a fraction nearly.

    Two numbers of which one is a float may differ by `RELATIVE` of the larger or by `ABSOLUTE`. A whole number below
    2^53, whatever its type, equals nothing that is half a unit away or more, so no float stands for two integers; an
    integer from there on equals a float only exactly.
    """
    if left == right:
        return True
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return False
    if isinstance(left, int) and isinstance(right, int):
        return False
    try:
        if not math.isclose(left, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            return False
    except OverflowError:  # an integer beyond the range of floats
        return False
    if max(abs(left), abs(right)) >= WHOLE:
        return isinstance(left, float) and isinstance(right, float)
    has_whole_number = left == int(left) or right == int(right)
    return not has_whole_number or abs(left - right) < 0.5


def close_rows(left: Row, right: Row) -> bool:
    """Whether each cell of two rows of one width is `close` to its partner."""
    return left == right or all(map(close, left, right))


def same_bag(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    """Whether two bags of equally many rows can be paired: same rows with same rows, the rest with close ones.

    A pairing is searched for in groups of rows that are near one another; a group of more than `MAX_MATCHED` rows,
    which takes as many floats within 1e-12 of their neighbours, is paired in sorted order.
    """
    if Counter(gold) == Counter(predicted):
        return True
    cells = chain.from_iterable(chain(gold, predicted))
    if float not in set(map(type, cells)):
        return False
    gold_rows = Counter((row, _large_floats(row)) for row in gold)
    predicted_rows = Counter((row, _large_floats(row)) for row in predicted)
    missing = _rows_in_order(gold_rows - predicted_rows)
    surplus = _rows_in_order(predicted_rows - gold_rows)
    if all(map(close_rows, missing, surplus)):
        return True
    groups = _groups_of_near_rows(missing, surplus)
    for missing_rows, surplus_rows in groups:
        if len(missing_rows) != len(surplus_rows):
            return False
    return all(_match(missing_rows, surplus_rows) for missing_rows, surplus_rows in groups)


def _rows_in_order(counts: Counter[tuple[Row, tuple[int, ...]]]) -> list[Row]:
    """Counted rows, each as often as it is counted, in `_row_order`."""
    rows = [row for row, _ in counts.elements()]
    return sorted(rows, key=_row_order)


def _large_floats(row: Row) -> tuple[int, ...]:
    """The places of a row's floats from 2^53 on: an equal integer there is close to fewer numbers than the float."""
    indices = []
    for index, cell in enumerate(row):
        if isinstance(cell, float) and abs(cell) >= WHOLE:
            indices.append(index)
    return tuple(indices)


def _row_order(row: Row) -> tuple[list[tuple[int, int, Any]], list[Any]]:
    """A total order over rows of mixed types: exact cells first, for numbers are what may differ by a last bit."""
    exact: list[tuple[int, int, Any]] = []
    numbers: list[Any] = []
    for index, cell in enumerate(row):
        rank = _rank(cell)
        if rank == NUMBER:
            numbers.append(cell)
        elif cell is None:
            exact.append((index, rank, 0))
        else:
            exact.append((index, rank, cell))
    return exact, numbers


def _groups_of_near_rows(missing: Sequence[Row], surplus: Sequence[Row]) -> list[RowGroup]:
    """The rows of both sides in groups, such that two rows that are close are in one, whatever else is in it."""
    columns = zip(*missing, *surplus, strict=True)
    neighbourhoods = list(map(_neighbourhoods, columns))
    groups: dict[Row, RowGroup] = defaultdict(lambda: RowGroup([], []))
    for row in missing:
        key = _group_key(row, neighbourhoods)
        groups[key].missing.append(row)
    for row in surplus:
        key = _group_key(row, neighbourhoods)
        groups[key].surplus.append(row)
    return list(groups.values())


def _group_key(row: Row, neighbourhoods: Sequence[Mapping[Any, int]]) -> Row:
    """The row with each number's neighbourhood in its place. The ranks keep a text or NULL in a cell apart from the
    number of a neighbourhood.
    """
    ranks = tuple(map(_rank, row))
    cells = []
    for cell, rank, neighbourhood_of in zip(row, ranks, neighbourhoods, strict=True):
        if rank == NUMBER:
            cells.append(neighbourhood_of.get(cell, 0))
        else:
            cells.append(cell)
    return tuple(cells), ranks


def _neighbourhoods(column: Sequence[Any]) -> dict[Any, int]:
    """The neighbourhood of each number of a column. The next one begins at a gap, which is wider than the bound of
    `close` and parts no close numbers.
    """
    numbers = {cell for cell in column if _rank(cell) == NUMBER}
    neighbourhood_of: dict[Any, int] = {}
    neighbourhood = 0
    previous = None
    for number in sorted(numbers):
        if previous is not None and not _is_near(previous, number):
            neighbourhood += 1
        neighbourhood_of[number] = neighbourhood
        previous = number
    return neighbourhood_of


def _is_near(left: Any, right: Any) -> bool:
    """Whether two numbers are within twice the bound of `close`."""
    try:
        if left == right:
            return True
        return math.isclose(left, right, rel_tol=2 * RELATIVE, abs_tol=2 * ABSOLUTE)
    except OverflowError:
        return False


NUMBER = 1


def _rank(cell: Any) -> int:
    """The kind of a cell: NULL, numbers, text and bytes are not ordered among each other."""
    if cell is None:
        return 0
    if isinstance(cell, (int, float)):
        return NUMBER
    if isinstance(cell, str):
        return 2
    return 3


def _match(missing: Sequence[Row], surplus: Sequence[Row]) -> bool:
    """Whether every row finds a close partner that no other row has: augmenting paths (Kuhn)."""
    if len(missing) > MAX_MATCHED:
        return all(map(close_rows, missing, surplus))
    partners_of = []
    for row in missing:
        partners = [index for index, other in enumerate(surplus) if close_rows(row, other)]
        partners_of.append(partners)
    row_of: dict[int, int] = {}  # the row of each partner

    def find_partner(row: int, seen: set[int]) -> bool:
        for partner in partners_of[row]:
            if partner in seen:
                continue
            seen.add(partner)
            if partner not in row_of or find_partner(row_of[partner], seen):
                row_of[partner] = row
                return True
        return False

    return all(find_partner(row, set()) for row in range(len(missing)))


class Result(Protocol):
    """Rows in order, duplicates kept, with their column names."""

    columns: Sequence[str]
    rows: Sequence[Row]


class Gold(NamedTuple):
    """Facts of the gold query that an equality may know beside its result."""

    ordered: bool = False  # True if its outermost query has an ORDER BY (`lexical.is_ordered`).
    mentions_order: bool = False  # True if "order by" stands anywhere in its text: the official test suite's rule.
    # Value units that the official parser reads in its SELECT list, and in the prediction's (`spider_exec`).
    units: tuple[Sequence[Any] | None, Sequence[Any] | None] = (None, None)


UNKNOWN = Gold()
_WORD = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|--[^\n]*|/\*.*?\*/|\w+""", re.DOTALL)
_BEGINS_EMPTY = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*;", re.DOTALL)
_CURRENT_YEAR = re.compile(r"YEAR\s*\(\s*CURDATE\s*\(\s*\)\s*\)\s*", re.IGNORECASE)


def repair(sql: str) -> str:
    """The repairs of the official test suite to both queries: "> =", "< =" and "! =", and MySQL's current year,
    which is 2020 (`exec_eval.py: postprocess, replace_cur_year`).
    """
    for operator in (">=", "<=", "!="):
        spaced = " ".join(operator)
        sql = sql.replace(spaced, operator)
    if "urdate" not in sql.lower():
        return sql
    return _CURRENT_YEAR.sub("2020", sql)


def drop_distinct(sql: str) -> str:
    """The query without its DISTINCT keywords, after `repair` (`parse.py: remove_distinct`).

    The official code also drops everything after the first statement, so that "SELECT a; SELECT b" passes as "SELECT
    a". That is a defect, and not followed: two statements are refused here. "SELECT a;;" passes there for that reason,
    and here, and ";SELECT a" has an empty first statement.
    """
    repaired = repair(sql)
    if _BEGINS_EMPTY.match(repaired):
        return ";"
    if "distinct" not in sql.lower():
        return repaired
    return _WORD.sub(_without_distinct, repaired)


def _without_distinct(match: re.Match[str]) -> str:
    word = match[0]
    if word.lower() == "distinct":
        return ""
    return word


@equality("bird", bare=True, form="set")
@equality("skyrl", bare=True, form="set")
def bird(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """BIRD's execution accuracy: the rows as sets (Li et al. 2023, `evaluation_ex.py`). SkyRL-SQL's outcome reward for
    a well-formed answer is the same (`skyrl_gym/envs/sql/utils.py`).
    """
    is_equal = gold.rows == predicted.rows or set(gold.rows) == set(predicted.rows)
    return float(is_equal)


@equality("test_suite", rewrite=drop_distinct, suite=True)
@equality("test_suite_keep_distinct", rewrite=repair, suite=True, bare=True)
def suite(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Test suite accuracy on one database: bags of rows up to a permutation of columns, in order when the gold text
    has an ORDER BY (Zhong et al. 2020, `exec_eval.py: result_eq`). Two empty results are equal whatever their arity.

    A search of more than `MAX_STEPS` partial choices counts as unequal, where the official code blows up; only results
    with dozens of columns that hold the same values in other rows come near.
    """
    if not gold.rows and not predicted.rows:
        return 1.0
    if len(gold.rows) != len(predicted.rows) or len(gold.rows[0]) != len(predicted.rows[0]):
        return 0.0
    if _have_same_cells(gold.rows, predicted.rows):
        return 1.0
    if facts.mentions_order:  # with the order of rows fixed, columns are whole values: their bags must be equal
        gold_columns = zip(*gold.rows, strict=True)
        predicted_columns = zip(*predicted.rows, strict=True)
        is_equal = Counter(gold_columns) == Counter(predicted_columns)
    elif Counter(gold.rows) == Counter(predicted.rows):
        is_equal = True
    else:
        is_equal = _equal_by_permutation(gold.rows, predicted.rows)
    if not is_equal:
        return 0.0
    # The official quick rejection also decides. Kept, to be true to the source, but last: it takes most of the time.
    gold_rows = _sorted_cells(gold.rows)
    predicted_rows = _sorted_cells(predicted.rows)
    if facts.mentions_order:
        return float(gold_rows == predicted_rows)
    return float(set(gold_rows) == set(predicted_rows))


def _have_same_cells(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    """Whether cells are equal and of equal types: the official quick rejection cannot part such rows."""
    if gold is predicted:
        return True
    if gold != predicted:
        return False
    gold_bytes = marshal.dumps(list(gold), 2)
    predicted_bytes = marshal.dumps(list(predicted), 2)
    return gold_bytes == predicted_bytes


def _equal_by_permutation(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    """Whether some order of the predicted columns gives the same bag of rows: depth-first over the gold columns, those
    with the fewest candidates first.
    """
    gold_columns = list(zip(*gold, strict=True))
    predicted_columns = list(zip(*predicted, strict=True))
    candidates_of = _candidate_columns(gold_columns, predicted_columns)
    n_columns = len(gold_columns)
    order = sorted(range(n_columns), key=lambda index: len(candidates_of[index]))
    first_candidates = iter(candidates_of[order[0]])
    stack: list[tuple[ColumnPath, Iterator[int]]] = [((), first_candidates)]
    steps = 0
    while stack and steps < MAX_STEPS:
        path, candidates = stack[-1]
        index = next((index for index in candidates if index not in path), None)
        if index is None:
            stack.pop()
            continue
        steps += 1
        path = (*path, index)
        placed_columns = order[: len(path)]
        gold_rows = _bag_of_rows(gold_columns, placed_columns)
        predicted_rows = _bag_of_rows(predicted_columns, path)
        if gold_rows != predicted_rows:
            continue
        if len(path) == n_columns:
            return True
        # Columns that hold the same cells row by row are one choice, not several.
        distinct: dict[tuple[Any, ...], int] = {}
        next_column = order[len(path)]
        for candidate in candidates_of[next_column]:
            if candidate not in path:
                distinct[predicted_columns[candidate]] = candidate
        stack.append((path, iter(distinct.values())))
    return False


def _candidate_columns(gold_columns: Sequence[Row], predicted_columns: Sequence[Row]) -> list[list[int]]:
    """The places of the predicted columns that hold the same bag of cells, for each gold column."""
    bags = list(map(Counter, predicted_columns))
    candidates_of = []
    for column in gold_columns:
        gold_bag = Counter(column)
        candidates = [index for index, bag in enumerate(bags) if bag == gold_bag]
        candidates_of.append(candidates)
    return candidates_of


def _bag_of_rows(columns: Sequence[Row], indices: Sequence[int]) -> Counter[Row]:
    """The rows of some columns, in the order of their places."""
    picked = [columns[index] for index in indices]
    return Counter(zip(*picked, strict=True))


def _sorted_cells(rows: Sequence[Row]) -> list[Row]:
    """Rows with their cells sorted by text and type, as the official code sorts them: 1 and 1.0 can sort apart, so that
    equal rows count as unequal.
    """
    sorted_rows = []
    for row in rows:
        if len(row) > 1:
            cells = sorted(row, key=_text_and_type)
            sorted_rows.append(tuple(cells))
        else:
            sorted_rows.append(row)
    return sorted_rows


def _text_and_type(cell: Any) -> str:
    return str(cell) + str(type(cell))


@equality("soft_f1", bare=True, graded=True)
def soft_f1(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """BIRD mini-dev's Soft F1: distinct rows compared position by position (`evaluation_f1.py`).

    In row i, a predicted cell that stands anywhere in the gold row counts 1/c true positive, else 1/c false positive; a
    gold cell that stands nowhere in the predicted row counts 1/c false negative (c: the gold row's columns). A row
    without a partner counts 1 false positive or 1 false negative.
    """
    if gold.rows == predicted.rows:
        return 1.0
    predicted_rows = list(dict.fromkeys(predicted.rows))
    gold_rows = list(dict.fromkeys(gold.rows))
    true_positive = 0.0
    false_positive = 0.0
    false_negative = 0.0
    for predicted_row, gold_row in zip(predicted_rows, gold_rows, strict=False):
        width = len(gold_row)
        hits = sum(cell in gold_row for cell in predicted_row)
        misses = sum(cell not in predicted_row for cell in gold_row)
        true_positive += hits / width
        false_positive += (len(predicted_row) - hits) / width
        false_negative += misses / width
    false_positive += max(0, len(predicted_rows) - len(gold_rows))
    false_negative += max(0, len(gold_rows) - len(predicted_rows))
    precision = _quotient(true_positive, true_positive + false_positive)
    recall = _quotient(true_positive, true_positive + false_negative)
    return _quotient(2 * precision * recall, precision + recall)


def _quotient(dividend: float, divisor: float) -> float:
    """A quotient; 0.0 for a divisor of 0."""
    if not divisor:
        return 0.0
    return dividend / divisor


@equality("spider_exec", bare=True, by_units=True)
def spider_exec(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Spider's execution match of 2018: the same columns by the official parser's names, each with the same values in
    the same order (`evaluation.py: eval_exec_match`).

    A prediction that parser cannot read never matches. Where it cannot read the gold query, and the official code
    stops, columns are named by their position.
    """
    gold_units, predicted_units = facts.units
    if gold_units is None:
        width = max(len(gold.columns), len(predicted.columns))
        gold_units = range(width)
        predicted_units = range(width)
    if predicted_units is None:
        return 0.0
    gold_columns = _columns_by_unit(gold.rows, gold_units)
    if gold_columns is None:
        return 0.0
    predicted_columns = _columns_by_unit(predicted.rows, predicted_units)
    return float(gold_columns == predicted_columns)


def _columns_by_unit(rows: Sequence[Row], units: Sequence[Any]) -> dict[Any, list[Any]] | None:
    """The values of each column by its value unit; None if there are fewer columns than units."""
    if rows and len(rows[0]) < len(units):
        return None
    columns: dict[Any, list[Any]] = {}
    for index, unit in enumerate(units):
        columns[unit] = [row[index] for row in rows]
    return columns


@equality("strict")
def strict(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Our own equality, and the default for training.

    Equal means: the same number of columns, in the same order, also when there are no rows; the same rows as a bag,
    with their multiplicity; in the same order when the gold query's outermost level has an ORDER BY. Integers exactly;
    two numbers of which one is a float within 1e-12 of the larger or 1e-15 (sums differ in their last bits by the order
    of addition), but a whole number below 2^53 never to another one; text by code points; NULL only to NULL; a number
    never to a text (`close`). More semicolons behind a prediction are no error, as they are on most official scripts.

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
        is_equal = all(map(close_rows, gold.rows, predicted.rows))
        return float(is_equal)
    return float(same_bag(gold.rows, predicted.rows))


@equality("strict_nonempty")
def strict_nonempty(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """`strict`, and an empty gold result is never paid."""
    if not gold.rows:
        return 0.0
    return strict(gold, predicted, facts)


@equality("proved", proof="pipelines.sql.analyst:prove")
def proved(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Equivalence on every database of the schema (`analyst.prove`); where neither is proved, `strict`."""
    return strict(gold, predicted, facts)


@equality("ehrsql", rewrite=official.ehrsql_query, bare=True)
def ehrsql_answer(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """EHRSQL's execution match: the bag of texts in the first column (Lee et al. 2022, `process_answer`)."""
    gold_texts = [str(row[0]) for row in gold.rows]
    predicted_texts = [str(row[0]) for row in predicted.rows]
    return float(sorted(gold_texts) == sorted(predicted_texts))


@equality("livesqlbench", rewrite=official.outcome_query, by_outcome=True, form="set")
def livesqlbench_outcome(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """LiveSQLBench's default test case for queries, and the state of the database for statements that change it.

    Scores 0 for every answer if the gold script neither queries nor changes data: a wrong one could not be told from a
    right one.
    """
    expected = dict(zip(OUTCOME_COLUMNS, gold.rows[0], strict=True))
    answer = dict(zip(OUTCOME_COLUMNS, predicted.rows[0], strict=True))
    if expected["changed"]:
        return float(answer["state"] == expected["state"])
    if not expected["query"] or not expected["rows"] or not answer["query"]:
        return 0.0
    form = "in_order" if expected["ordered"] else "as_set"
    return float(answer[form] == expected[form])


@equality("r_ves", bare=True, graded=True, timed=True)
def r_ves_answer(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """BIRD's R-VES: a prediction that is right under `bird` is paid by its speed against the gold query."""
    return bird(gold, predicted, facts)


@equality("spider2", by_file=True)
def spider2(gold: Result, predicted: Result, facts: Gold = UNKNOWN) -> float:
    """Spider 2.0's comparison with accepted result files: `evaluation/result_files.py` decides, no gold query runs."""
    raise TypeError("spider2 compares with result files, not with the result of a gold query")
