"""Equality by result file: the columns that count must be among the answer's, to 0.01, whatever they are called."""

import io
from typing import Any

import pytest

from pipelines.core.types import ExecutionResult, ExecutionStatus, Scalar
from pipelines.evaluation import result_files


def answer(*rows: tuple[Scalar, ...], width: int | None = None) -> ExecutionResult:
    columns = tuple(f"c{index}" for index in range(width if width is not None else len(rows[0])))
    return ExecutionResult(ExecutionStatus.OK, columns, rows)


def gold(*files: str, columns: list[list[int]] | None = None, ignore_order: bool = True) -> dict[str, Any]:
    results = [[line.split(",") for line in text.split("\n")] for text in files]
    return {"results": results, "columns": columns or [[] for _ in files], "ignore_order": ignore_order}


SHIPS = gold("name,tons\nAurora,52.004\nEgret,95")


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        ([("Aurora", 52.0), ("Egret", 95)], True),  # to 0.01
        ([("Egret", 95.0), ("Aurora", 52.01)], True),  # the order is free
        ([(95, 1, "Egret"), (52, 2, "Aurora")], True),  # other columns are let be
        ([("Aurora", "52"), ("Egret", "95")], True),  # text that reads as a number is one
        ([("Aurora", 52.1), ("Egret", 95)], False),
        ([("Aurora",), ("Egret",)], False),  # a column is missing
        ([("Aurora", 52.0)], False),  # a row is missing
        ([("Egret", 52.0), ("Aurora", 95.0)], True),  # columns are compared one by one: the official evaluator's limit
    ],
)
def test_an_answer_holds_the_columns_that_count(rows: list[tuple[Scalar, ...]], right: bool) -> None:
    assert result_files.score(SHIPS, answer(*rows)) == float(right)


def test_only_the_columns_that_count_are_asked_for() -> None:
    assert result_files.score(gold("n,flag\n1,NO\n2,LR", columns=[[1]]), answer(("LR",), ("NO",))) == 1.0


def test_the_order_counts_where_the_standard_says_so() -> None:
    ordered = gold("flag\nNO\nLR", ignore_order=False)
    assert result_files.score(ordered, answer(("NO",), ("LR",))) == 1.0
    assert result_files.score(ordered, answer(("LR",), ("NO",))) == 0.0


def test_an_answer_equal_to_any_accepted_file_is_right() -> None:
    either = gold("n\n1", "n,m\n2,3", columns=[[0], [1]])
    assert [result_files.score(either, answer((value,))) for value in (1, 2, 3)] == [1.0, 0.0, 1.0]


def test_nothing_equals_no_value_and_only_that() -> None:
    missing = gold("flag,n\nNO,1\n,2")
    assert result_files.score(missing, answer(("NO", 1), (None, 2))) == 1.0
    assert result_files.score(missing, answer(("NO", 1), ("0", 2))) == 0.0


def test_an_empty_result_equals_an_empty_file() -> None:
    assert result_files.score(gold("flag"), answer(width=1)) == 1.0
    assert result_files.score(gold("flag"), answer(("NO",))) == 0.0


def test_an_answer_that_failed_or_was_cut_is_wrong() -> None:
    assert result_files.score(gold("n\n1"), ExecutionResult(ExecutionStatus.ERROR)) == 0.0
    assert result_files.score(gold("n\n1"), ExecutionResult(ExecutionStatus.OK, ("n",), ((1,),), truncated=True)) == 0.0


@pytest.mark.parametrize(
    "cells",
    [
        ["1", "2", "3"],
        ["1", "", "3"],
        ["1.5", "2", "-3e2"],
        ["1", "x", "3"],
        ["NULL", "None", "7"],
        ["True", "false", "TRUE"],
        ["2020-01-01", "2020-01-02", ""],
        ["", "", ""],
        [" 4", "5 ", ".5"],
    ],
)
def test_columns_get_the_types_that_pandas_gives_them(cells: list[str]) -> None:
    pandas = pytest.importorskip("pandas")
    text = "a,b\n" + "".join(f"{cell},x\n" for cell in cells)
    theirs = [None if pandas.isna(cell) else cell for cell in pandas.read_csv(io.StringIO(text))["a"].tolist()]
    assert result_files._columns([[cell] for cell in cells], 1) == [theirs]
