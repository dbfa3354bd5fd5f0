"""Cells of a table: which there are, what they share, what is left of one that fails, and the table that they fill."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluation_world import record

from flows import sweeping
from pipelines.config import Recipe
from pipelines.errors import DataError, RecipeError, UserError
from pipelines.stages import graph
from pipelines.stages.inputs import write_lines
from pipelines.store import Store
from pipelines.types import to_dict

QUESTIONS = 36
WORDS = ("variant=none,no_turns", "seed=0..1", "evaluation.equality=bird")
ONE_SEED = ("variant=none,no_turns,exec_only", "evaluation.equality=bird")


def making(store: Store, made: list[str], fails: str = "") -> Callable[[Recipe], None]:
    """Makes stages as a run does, without training: evaluations hold the answers of the world's systems."""

    def build(step: graph.Step, recipe: Recipe, folder: Path) -> None:
        if step.name == "grpo" and f"{recipe.rewards[1].weight:g}" == fails:
            raise DataError("the training child died")
        made.append(step.name)
        if step.name.startswith("evaluate_"):
            system = 2 if recipe.rewards[1].weight else 0
            rows = [record(system, number, "greedy", 0) for number in range(QUESTIONS)]
            write_lines(folder / "records.jsonl", ({"pass": "greedy", "record": to_dict(row)} for row in rows))

    def make(recipe: Recipe) -> None:
        for step in graph.plan(recipe, store):
            store.make(step.name, step.key, lambda folder: build(step, recipe, folder), {}, lambda: None)  # noqa: B023

    return make


def test_the_cells_are_every_combination_and_the_last_axis_is_the_fastest() -> None:
    found = sweeping.cells("miniature", WORDS)
    assert [cell.name for cell in found] == [
        "variant=none seed=0",
        "variant=none seed=1",
        "variant=no_turns seed=0",
        "variant=no_turns seed=1",
    ]
    assert [cell.recipe.seed for cell in found] == [0, 1, 0, 1]
    assert [cell.recipe.rewards[1].weight for cell in found] == [2, 2, 0, 0]
    assert {cell.recipe.evaluation.equality for cell in found} == {"bird"}


def test_a_comma_in_brackets_parts_no_axis_and_benchmarks_and_models_are_files() -> None:
    found = sweeping.cells("sql_trail", ["benchmark=spider_dk,bird_dev", "evaluation.ks=[1, 2]", "model=qwen3_4b"])
    assert [cell.name for cell in found] == ["benchmark=spider_dk", "benchmark=bird_dev"]
    assert [cell.recipe.data.test.kind for cell in found] == ["spider", "bird"]
    assert {cell.recipe.evaluation.ks for cell in found} == {(1, 2)}
    assert {cell.recipe.model.source for cell in found} == {"Qwen/Qwen3-4B"}


@pytest.mark.parametrize("word", ["variant=none,nope", "benchmark=nope,spider_dk", "seed=1,1", "seed"])
def test_a_wrong_axis_is_the_users_mistake(word: str) -> None:
    with pytest.raises(RecipeError):
        sweeping.cells("miniature", [word])


def test_what_cells_share_is_made_once_and_told_before(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweeping.cells("miniature", ONE_SEED)
    *lines, total = sweeping.outlook(found, store)
    assert lines[1] == "variant=no_turns: grpo, evaluate_grpo, report"
    assert total == "3 cells: 21 stages to make, 0 there already, 24 shared"
    sweeping.fill(found, store, making(store, made), lambda line: None)
    assert (made.count("data"), made.count("sft"), made.count("grpo")) == (1, 1, 3)
    assert list(sweeping.outlook(found, store))[-1] == "3 cells: 0 stages to make, 21 there already, 24 shared"


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweeping.cells("miniature", ONE_SEED)
    making(store, made)(found[0].recipe)  # and then it was killed
    first = len(made)
    sweeping.fill(found, store, making(store, made), lambda line: None)
    assert made[first:] == ["grpo", "evaluate_grpo", "report"] * 2


def test_a_failed_cell_stands_in_the_table_with_its_error(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweeping.cells("miniature", ["variant=no_turns,none", "evaluation.equality=bird"])
    filled = sweeping.fill(found, store, making(store, made, fails="0"), lambda line: None)
    assert [one.error for one in filled] == ["the training child died", ""]
    shown = sweeping.table("miniature", filled, {"variant": "none"})
    assert shown.rows[0][-1] == "the training child died"
    assert shown.rows[0][1] is None
    assert shown.rows[1][1] is not None


def test_the_table_has_figures_and_paired_differences_in_three_formats(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found = sweeping.cells("miniature", ["variant=none,no_turns", "evaluation.equality=bird"])
    filled = sweeping.fill(found, store, making(store, []), lambda line: None)
    shown = sweeping.table("miniature", filled, sweeping.baseline_of(found, "variant=none"))
    sweeping.write(shown, tmp_path / "out")
    rows = list(csv.reader((tmp_path / "out" / "sweep.csv").read_text().splitlines()))
    right = [sum(record(system, number, "greedy", 0).right("bird") for number in range(QUESTIONS)) for system in (2, 0)]
    values = [float(row[1]) for row in rows[1:]]
    assert values == pytest.approx([count / QUESTIONS for count in right])
    first, second = (row[2] for row in shown.rows)
    assert first is None
    assert second.difference == pytest.approx((right[1] - right[0]) / QUESTIONS)  # type: ignore[union-attr]
    assert (tmp_path / "out" / "sweep.md").read_text().startswith("### miniature: 2 cells")
    assert "\\begin{" in (tmp_path / "out" / "sweep.tex").read_text()
    with pytest.raises(UserError, match="no cell has 'variant=nope'"):
        sweeping.baseline_of(found, "variant=nope")
