"""Equality `spider2`: a result against accepted result files, as Spider 2.0's evaluator compares them.

Source: `compare_pandas_table` and `compare_multi_pandas_table` of spider2-lite/evaluation_suite/evaluate.py. An answer
is right when some accepted file has each of its columns that count among the answer's columns, whatever these are
called and whatever else the answer returns. Numbers may differ by 0.01. Both sides go through CSV there, so text that
reads as a number is one, and an empty cell equals NULL.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

from pipelines.core.errors import DataError
from pipelines.core.types import (
    AcceptedResults,
    Database,
    Example,
    ExecutionResult,
    ExecutionStatus,
    Scalar,
    text_of,
)
from pipelines.sql.engine import Pair, SqlEngine, Verdict

EQUALITY = "spider2"
META = "gold_results"  # the field of an example's `meta` with its `AcceptedResults`
TOLERANCE = 1e-2
MISSING = frozenset(  # missing values of pandas.read_csv
    {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"}
    | {"NA", "NULL", "NaN", "None", "n/a", "nan", "null"}
)
_INTEGER = re.compile(r"\s*[+-]?\d{1,18}\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?((\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|inf|infinity)\s*", re.IGNORECASE | re.ASCII)
_TRUTH = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
Cell = str | float | None
Column = list[Cell]
Results = Mapping[tuple[Database, str], ExecutionResult]  # results of predictions


def verdicts(
    examples: Sequence[Example], pairs: Sequence[Pair], equalities: Sequence[str], sql: SqlEngine
) -> list[Verdict]:
    """Verdicts on predictions: by result files where these decide, else by gold queries; each answer runs once."""
    by_files = EQUALITY in equalities
    if by_files and len(set(equalities)) > 1:
        listed = ", ".join(equalities)
        message = f"equality {EQUALITY} stands alone, but the equalities are {listed}"
        raise DataError(message, "Take include=data/spider2_lite.")
    _require_gold(examples, by_files)
    if not by_files:
        return sql.verdicts(pairs, equalities)
    results = _results(pairs, sql)
    judged = []
    for example, pair in zip(examples, pairs, strict=True):
        gold = example.annotations.gold_results
        assert gold is not None, "checked above"
        judged.append(_verdict(gold, pair, results))
    return judged


def _require_gold(examples: Sequence[Example], by_files: bool) -> None:
    """Refuse examples without accepted results, or without a gold query."""
    without_gold = []
    for example in examples:
        gold = example.annotations.gold_results if by_files else example.gold_sql
        if not gold:
            without_gold.append(example.id)
    if without_gold:
        lack = "accepted results" if by_files else "gold SQL"
        raise DataError(
            f"{len(without_gold)} examples have no {lack}, the first is {without_gold[0]}",
            f"Equality {EQUALITY} is for Spider 2.0's questions, and only it: include=data/spider2_lite.",
        )


def _results(pairs: Sequence[Pair], sql: SqlEngine) -> Results:
    """The result of each different prediction."""
    jobs: dict[tuple[Database, str], None] = {}
    for pair in pairs:
        if pair.predicted_sql is not None:
            jobs[pair.database, pair.predicted_sql] = None
    results = sql.execute_many(list(jobs))
    return dict(zip(jobs, results, strict=True))


def _verdict(gold: AcceptedResults, pair: Pair, results: Results) -> Verdict:
    header_and_rows = gold["results"][0]
    n_gold_rows = len(header_and_rows) - 1
    if pair.predicted_sql is None:
        return Verdict({EQUALITY: 0.0}, None, ExecutionStatus.OK, None, 0, n_gold_rows)
    result = results[pair.database, pair.predicted_sql]
    return Verdict(
        scores={EQUALITY: score(gold, result)},
        predicted=result.status,
        gold=ExecutionStatus.OK,
        error_class=result.error_class,
        n_rows=len(result.rows),
        gold_rows=n_gold_rows,
    )


def score(gold: AcceptedResults, result: ExecutionResult) -> float:
    """1.0 when some accepted result's columns are all among the answer's, else 0.0."""
    if not result.ok or result.truncated:
        return 0.0
    is_ordered = not gold["ignore_order"]
    csv_rows = _csv_rows(result)
    answer = _columns(csv_rows, len(result.columns), is_ordered)
    for (header, *rows), counted in zip(gold["results"], gold["columns"], strict=True):
        if len(rows) != len(result.rows):
            continue
        accepted = _columns(rows, len(header), is_ordered)
        if counted:
            accepted = [accepted[index] for index in counted]
        if all(_has_column(answer, column) for column in accepted):
            return 1.0
    return 0.0


def _csv_rows(result: ExecutionResult) -> list[list[str]]:
    """A result's values as they stand in a CSV file that pandas writes."""
    rows = []
    for row in result.rows:
        rows.append([_csv_cell(cell) for cell in row])
    return rows


def _csv_cell(cell: Scalar) -> str:
    if cell is None:
        return ""
    return text_of(cell)


def _has_column(table: Sequence[Column], column: Column) -> bool:
    """Whether a table has a column with these cells; both have as many rows."""
    return any(_are_close(column, candidate) for candidate in table)


def _are_close(first: Column, second: Column) -> bool:
    return all(map(_close, first, second))


def _columns(rows: Sequence[Sequence[str]], width: int, ordered: bool = True) -> list[Column]:
    """Cells by column, with the types that pandas gives a column of a CSV file; a short row lacks its last cells."""
    table = []
    for index in range(width):
        texts = [row[index] if index < len(row) else "" for row in rows]
        table.append(_typed_cells(texts))
    if not ordered:
        for cells in table:
            cells.sort(key=_unordered_key)
    return table


def _typed_cells(texts: Sequence[str]) -> Column:
    """The cells of a column: truth values as numbers, numbers, or texts; missing ones are None."""
    present = [text for text in texts if text not in MISSING]
    if present and all(text in _TRUTH for text in present):
        return _converted(texts, lambda text: float(_TRUTH[text]))
    if not all(_NUMBER.fullmatch(text) for text in present):
        return _converted(texts, str)
    has_missing = len(present) < len(texts)
    if not has_missing and all(_INTEGER.fullmatch(text) for text in present):
        return [int(text) for text in texts]
    return _converted(texts, float)


def _converted(texts: Sequence[str], convert: Callable[[str], Cell]) -> Column:
    """The cells with their texts converted, but for the missing ones."""
    return [None if text in MISSING else convert(text) for text in texts]


def _unordered_key(cell: Cell) -> tuple[str, bool]:
    """The evaluator's order of cells: its missing cells are NaN and sort as that text."""
    text = "nan" if cell is None else str(cell)
    is_number = isinstance(cell, int | float)
    return text, is_number


def _close(first: Cell, second: Cell) -> bool:
    if first is None or second is None:
        return first is second
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return math.isclose(first, second, abs_tol=TOLERANCE)
