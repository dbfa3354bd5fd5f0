"""Equality `spider2`: a result against accepted result files, as Spider 2.0's evaluator compares them.

Source: `compare_pandas_table` and `compare_multi_pandas_table` of spider2-lite/evaluation_suite/evaluate.py. An answer
is right when some accepted file has each of its columns that count among the answer's columns, whatever these are
called and whatever else the answer returns. Numbers may differ by 0.01. Both sides go through CSV there, so text that
reads as a number is one, and an empty cell equals NULL.
"""

import math
import re
from collections.abc import Sequence

from pipelines.core.errors import DataError
from pipelines.core.types import AcceptedResults, Example, ExecutionResult, ExecutionStatus, text_of
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


def verdicts(
    examples: Sequence[Example], pairs: Sequence[Pair], equalities: Sequence[str], sql: SqlEngine
) -> list[Verdict]:
    """Verdicts on predictions: by result files where these decide, else by gold queries; each answer runs once."""
    by_files = EQUALITY in equalities
    if by_files and len(set(equalities)) > 1:
        raise DataError(
            f"equality {EQUALITY} stands alone, beside it is {', '.join(equalities)}", "Take include=data/spider2_lite."
        )
    wrong = []
    for example in examples:
        has_gold = example.annotations.gold_results is not None if by_files else bool(example.gold_sql)
        if not has_gold:
            wrong.append(example.id)
    if wrong:
        lack = "accepted results" if by_files else "gold SQL"
        raise DataError(
            f"{len(wrong)} examples have no {lack}, the first is {wrong[0]}",
            f"Equality {EQUALITY} is for Spider 2.0's questions, and only it: include=data/spider2_lite.",
        )
    if not by_files:
        return sql.verdicts(pairs, equalities)
    queries = [(pair.database, pair.predicted_sql) for pair in pairs]
    jobs = list(dict.fromkeys((database, text) for database, text in queries if text is not None))
    results = dict(zip(jobs, sql.execute_many(jobs), strict=True))
    judged = []
    for example, pair in zip(examples, pairs, strict=True):
        gold = example.annotations.gold_results
        assert gold is not None, "checked above"
        n_gold = len(gold["results"][0]) - 1
        if pair.predicted_sql is None:
            judged.append(Verdict({EQUALITY: 0.0}, None, ExecutionStatus.OK, None, 0, n_gold))
            continue
        result = results[pair.database, pair.predicted_sql]
        facts = result.status, ExecutionStatus.OK, result.error_class, len(result.rows), n_gold
        judged.append(Verdict({EQUALITY: score(gold, result)}, *facts))
    return judged


def score(gold: AcceptedResults, result: ExecutionResult) -> float:
    """1.0 when some accepted result's columns are all among the answer's, else 0.0."""
    if not result.ok or result.truncated:
        return 0.0
    # Values as they stand in a CSV file that pandas writes.
    rows_of_text = [["" if cell is None else text_of(cell) for cell in row] for row in result.rows]
    ordered = not gold["ignore_order"]
    answer = _columns(rows_of_text, len(result.columns), ordered)
    for (header, *rows), wanted in zip(gold["results"], gold["columns"], strict=True):
        accepted = _columns(rows, len(header), ordered)
        accepted = [accepted[index] for index in wanted] if wanted else accepted
        if len(rows) == len(result.rows) and all(
            any(all(map(_close, column, other)) for other in answer) for column in accepted
        ):
            return 1.0
    return 0.0


def _columns(rows: Sequence[Sequence[str]], width: int, ordered: bool = True) -> list[list[Cell]]:
    """Cells by column, with the types that pandas gives a column of a CSV file; a short row lacks its last cells."""
    table: list[list[Cell]] = []
    for index in range(width):
        column = [row[index] if index < len(row) else "" for row in rows]
        present = [cell for cell in column if cell not in MISSING]
        if present and all(cell in _TRUTH for cell in present):
            table.append([float(_TRUTH[cell]) if cell in _TRUTH else None for cell in column])
        elif all(_NUMBER.fullmatch(cell) for cell in present):
            whole = len(present) == len(column) and all(_INTEGER.fullmatch(cell) for cell in present)
            table.append([None if cell in MISSING else int(cell) if whole else float(cell) for cell in column])
        else:
            table.append([None if cell in MISSING else cell for cell in column])
    if not ordered:  # the evaluator's order of cells: its missing cells are NaN and sort as that text
        for cells in table:
            cells.sort(key=lambda cell: ("nan" if cell is None else str(cell), isinstance(cell, int | float)))
    return table


def _close(first: Cell, second: Cell) -> bool:
    if first is None or second is None:
        return first is second
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    return math.isclose(first, second, abs_tol=TOLERANCE)
