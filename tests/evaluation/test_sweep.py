"""Cells of a table: which there are, what they share, what is left of one that fails, and the table that they fill."""

import csv
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluation_world import record

from pipelines.core.errors import DataError, RecipeError, StoppedError, UserError
from pipelines.core.files import write_lines
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.evaluation.measures import FinishedEvaluation
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.sweeps import sweep_plan
from pipelines.sweeps.sweep_table import FinishedCell, Sweep, curves, table

QUESTIONS = 36
WORDS = ("variant=none,no_turns", "seed=0..1", "data.test.0.equality=bird")
ONE_SEED = ("variant=none,no_turns,exec_only", "data.test.0.equality=bird")


def making(store: Store, made: list[str], fails: str = "") -> Callable[[sweep_plan.SweepCell], None]:
    """Makes stages as a run does, without training: evaluations hold the answers of the world's systems."""

    def build(step: graph.Step, recipe: Recipe, folder: Path) -> None:
        if step.name == "grpo" and f"{recipe.rewards[1].weight:g}" == fails:
            raise DataError("the training child died")
        made.append(step.name)
        if step.name.startswith("evaluate_"):
            system = 2 if recipe.rewards[1].weight else 0
            rows = [record(system, number, "greedy", 0) for number in range(QUESTIONS)]
            write_lines(folder / "records.jsonl", ({"pass": "greedy", "record": to_dict(row)} for row in rows))

    def make(cell: sweep_plan.SweepCell) -> None:
        for step in graph.plan(cell.recipe, store):
            store.make(step.name, step.key, lambda folder: build(step, cell.recipe, folder), {}, lambda: None)  # noqa: B023

    return make


def test_the_cells_are_every_combination_and_the_last_axis_is_the_fastest() -> None:
    found = sweep_plan.cells("miniature", WORDS)
    assert [cell.name for cell in found] == [
        "variant=none seed=0",
        "variant=none seed=1",
        "variant=no_turns seed=0",
        "variant=no_turns seed=1",
    ]
    assert [cell.recipe.seed for cell in found] == [0, 1, 0, 1]
    assert [cell.recipe.rewards[1].weight for cell in found] == [2, 2, 0, 0]
    assert {cell.recipe.headline for cell in found} == {"bird"}


def test_a_comma_in_brackets_parts_no_axis_and_benchmarks_and_models_are_files() -> None:
    found = sweep_plan.cells("sql_trail", ["benchmark=spider_dk,bird_dev", "evaluation.ks=[1, 2]", "model=qwen3_4b"])
    assert [cell.name for cell in found] == ["benchmark=spider_dk", "benchmark=bird_dev"]
    assert [cell.recipe.benchmark.kind for cell in found] == ["spider", "bird"]
    assert {cell.recipe.evaluation.ks for cell in found} == {(1, 2)}
    assert {cell.recipe.model.source for cell in found} == {"Qwen/Qwen3-4B"}


@pytest.mark.parametrize("word", ["variant=none,nope", "benchmark=nope,spider_dk", "seed=1,1", "seed"])
def test_a_wrong_axis_is_the_users_mistake(word: str) -> None:
    with pytest.raises(RecipeError):
        sweep_plan.cells("miniature", [word])


def test_shared_stages_are_forecast_and_made_once(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweep_plan.cells("miniature", ONE_SEED)
    *lines, total = sweep_plan.forecast(found, store)
    assert lines[1] == "variant=no_turns: grpo, evaluate_grpo, report"
    assert total == "3 cells: 21 stages to make, 0 cached, 24 shared"
    sweep_plan.fill(found, store, making(store, made), lambda line: None)
    assert (made.count("data"), made.count("sft"), made.count("grpo")) == (1, 1, 3)
    assert list(sweep_plan.forecast(found, store))[-1] == "3 cells: 0 stages to make, 21 cached, 24 shared"


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweep_plan.cells("miniature", ONE_SEED)
    making(store, made)(found[0])  # and then it was killed
    first = len(made)
    sweep_plan.fill(found, store, making(store, made), lambda line: None)
    assert made[first:] == ["grpo", "evaluate_grpo", "report"] * 2


STOPPED = """
import sys, time
from pathlib import Path
from test_sweep import ONE_SEED, making
from pipelines.sweeps import sweep_plan
from pipelines.core.store import Store
store, made = Store(Path(sys.argv[1])), []
plain = making(store, made)
def make(cell):
    if cell.recipe.rewards[1].weight == 0:
        print("in the second cell", flush=True)
        store.make("grpo", next(step.key for step in sweep_plan.graph.plan(cell.recipe, store) if step.name == "grpo"),
                   lambda folder: (folder.joinpath("half").write_text("x"), time.sleep(600)), {}, lambda: None)
    plain(cell)
sweep_plan.fill(sweep_plan.cells("miniature", ONE_SEED), store, make, lambda line: None)
"""


def test_a_sweep_that_is_killed_in_the_middle_of_a_stage_ends_with_the_same_table(tmp_path: Path) -> None:
    """SIGKILL in the second cell's training; tests/services/test_sweep_killed.py does it to the real chain."""
    killed, undisturbed = Store(tmp_path / "killed"), Store(tmp_path / "undisturbed")
    search = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command = [sys.executable, "-c", STOPPED, str(killed.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in the second cell\n"
        while not list(killed.root.glob("grpo/.work-*/half")):
            time.sleep(0.01)
        process.kill()
    before = {path: path.stat().st_mtime_ns for path in killed.root.glob("*/*/manifest.json")}
    assert len(before) == 15
    found, empty = sweep_plan.cells_of_recipe("miniature", ONE_SEED, None)
    for store in (killed, undisturbed):
        filled = sweep_plan.fill(found, store, making(store, []), lambda line: None)
        sweep_plan.write(dataclasses.replace(empty, cells=tuple(filled)), store.root / "out")
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing was made twice
    for name in ("sweep.md", "sweep.csv", "sweep.html"):
        assert (killed.root / "out" / name).read_bytes() == (undisturbed.root / "out" / name).read_bytes()


def test_a_failed_cell_stands_in_the_table_with_its_error(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweep_plan.cells("miniature", ["variant=no_turns,none", "data.test.0.equality=bird"])
    filled = sweep_plan.fill(found, store, making(store, made, fails="0"), lambda line: None)
    assert [one.error for one in filled] == ["the training child died", ""]
    shown = table(Sweep("miniature", tuple(filled), {"variant": "none"}))
    assert shown.rows[0][-1] == "the training child died"
    assert shown.rows[0][1] is None
    assert shown.rows[1][1] is not None


@pytest.mark.parametrize("fault", [MemoryError("no room"), RuntimeError("a library's own"), OSError(28, "disk full")])
def test_no_fault_of_a_cell_stops_the_others(tmp_path: Path, fault: Exception) -> None:
    store = Store(tmp_path)
    found = sweep_plan.cells("miniature", ["variant=no_turns,none", "data.test.0.equality=bird"])
    plain = making(store, [])

    def make(cell: sweep_plan.SweepCell) -> None:
        if not cell.recipe.rewards[1].weight:
            raise fault
        plain(cell)

    first, second = sweep_plan.fill(found, store, make, lambda line: None)
    assert first.error == f"{type(fault).__name__}: {fault}"
    assert second.run is not None


def test_a_sweep_whose_training_is_asked_to_stop_ends(tmp_path: Path) -> None:
    made = []

    def make(cell: sweep_plan.SweepCell) -> None:
        made.append(cell)
        raise StoppedError("training was asked to stop")

    with pytest.raises(StoppedError):
        sweep_plan.fill(sweep_plan.cells("miniature", ["seed=0..1"]), Store(tmp_path), make, lambda line: None)
    assert len(made) == 1


def test_a_cell_that_cannot_even_be_planned_stops_no_other(tmp_path: Path) -> None:
    store, gone = Store(tmp_path), f"[{{kind: jsonl, split: test, path: {tmp_path / 'gone'}}}]"
    found = sweep_plan.cells("miniature", [f"data.test={gone},[{{kind: miniature}}]", "data.test.0.equality=bird"])
    lines = list(sweep_plan.forecast(found, store))
    assert lines[0].startswith(f"data.test={gone}: cannot be made: ")
    assert lines[-1].startswith("2 cells: 15 stages to make")
    first, second = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    assert "gone" in first.error
    assert second.run is not None


def test_a_recipe_that_evaluates_nothing_is_an_error_of_its_cell(tmp_path: Path) -> None:
    store = Store(tmp_path)
    found = sweep_plan.cells("miniature", ["stages=[data, synthesize, filter, sft]"])
    (only,) = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    assert "evaluates nothing here" in only.error


def test_one_run_s_checkpoints_are_an_axis_that_makes_nothing_twice(tmp_path: Path) -> None:
    store, made = Store(tmp_path), list[str]()
    found = sweep_plan.cells("miniature", ["after=model,sft,grpo", "data.test.0.equality=bird"])
    asked: list[str] = []
    plain = making(store, made)
    filled = sweep_plan.fill(found, store, lambda cell: (asked.append(cell.name), plain(cell)), lambda line: None)
    assert asked == ["after=model"]
    values = [row[1].value for row in table(Sweep("miniature", tuple(filled))).rows]  # type: ignore[union-attr]
    assert values == pytest.approx([right(system) / QUESTIONS for system in (2, 2, 2)])
    with pytest.raises(RecipeError, match="there is no checkpoint 'end'"):
        sweep_plan.cells("miniature", ["after=end"])


def test_as_many_samples_vote_as_were_drawn(tmp_path: Path) -> None:
    store = Store(tmp_path)
    found = sweep_plan.cells(
        "miniature", ["evaluation.samples=3", "evaluation.ks=[1,2,8]", "data.test.0.equality=bird"]
    )
    (only,) = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    assert only.run is not None
    assert only.run.k == 2


def test_a_benchmark_that_was_added_here_is_taken_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    (local / "bird_dev.yaml").write_text("data: {test: [{name: bird_dev, kind: bird, split: dev, path: /here}]}\n")
    monkeypatch.setattr(recipes, "LOCAL", local)
    found = sweep_plan.cells("sql_trail", ["benchmark=bird_dev,spider_dk"])
    assert [str(cell.recipe.benchmark.path) for cell in found] == ["/here", "None"]


def right(system: int) -> int:
    return sum(record(system, number, "greedy", 0).right("bird") for number in range(QUESTIONS))


def test_the_table_has_figures_and_paired_differences_in_three_formats_and_a_page(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    found, empty = sweep_plan.cells_of_recipe("miniature", ["variant=none,no_turns", "data.test.0.equality=bird"], None)
    filled = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    made = dataclasses.replace(empty, cells=tuple(filled))
    sweep_plan.write(made, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines()))
    assert [float(row["EX"]) for row in rows] == pytest.approx([right(system) / QUESTIONS for system in (2, 0)])
    first, second = (row[2] for row in table(made).rows)
    assert first is None
    assert second.difference == pytest.approx((right(0) - right(2)) / QUESTIONS)  # type: ignore[union-attr]
    assert (tmp_path / "out" / "sweep.md").read_text().startswith("### miniature: 2 cells")
    assert "\\begin{" in (tmp_path / "out" / "sweep.tex").read_text()
    assert (tmp_path / "out" / "sweep.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UserError, match="no row has 'variant=nope'"):
        sweep_plan.baseline_of(found, "variant=nope")


def test_each_row_has_its_condition(tmp_path: Path) -> None:
    """The program's grades and the oracle's demonstrations stood under a paper's name without a word of it."""
    store = Store(tmp_path / "store")
    words = ["variant=none,no_turns", "seed=0..1", "data.test.0.equality=bird"]
    found, empty = sweep_plan.cells_of_recipe("miniature", words, None)
    filled = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    shown = table(dataclasses.replace(empty, cells=tuple(filled)))
    at = [column.name for column in shown.columns].index("condition")
    assert {row[at] for row in shown.rows} == {"teacher oracle; judge none; schema full; seed 0, 1"}


ENDPOINTS = ("rewards.judge.options.by=big", "synthesis.teacher={kind: endpoint, endpoint: wise}")


@pytest.mark.parametrize(
    ("words", "checkpoint", "asked", "said"),
    [
        ((), "grpo", (), "teacher oracle; judge program; schema full"),
        ((), "sft", ("variant=gold_filtered",), "teacher oracle; judge none; schema filtered by gold"),
        (ENDPOINTS, "grpo", (), "teacher wise; judge big; schema full"),
        (("rewards.judge.weight=0",), "grpo", (), "teacher oracle; judge none; schema full"),
        ((), "model", ("protocol.schema_view=names",), "teacher none; judge none; schema names"),
    ],
)
def test_a_condition_is_of_the_checkpoint_and_of_how_it_is_asked(
    words: tuple[str, ...], checkpoint: str, asked: tuple[str, ...], said: str
) -> None:
    recipe, once_more = (recipes.load("mini_reasoning_sql", [*words, *more]) for more in ((), asked))
    assert sweep_plan.condition_of(recipe, checkpoint, once_more) == said


def test_a_base_model_is_asked_once_more_by_its_own_name(tmp_path: Path) -> None:
    """The store refers to a hub's weights and has no folder of them."""
    words = ["stages=[data, gold_schema, evaluate, report]", "asked=variant=gold_filtered"]
    (cell,) = sweep_plan.cells("reasoning_sql", words)
    assert sweep_plan.asked_again(cell, Store(tmp_path)).recipe.model.source == "Qwen/Qwen2.5-Coder-7B-Instruct"
    (tiny,) = sweep_plan.cells("mini_reasoning_sql", words)
    assert sweep_plan.asked_again(tiny, Store(tmp_path)).recipe.model.source.endswith("/model")


def test_a_row_may_be_held_against_another_than_the_baseline() -> None:
    """Of 36 questions; the world's systems differ in how many they answer."""
    runs = [
        FinishedEvaluation(tuple(record(system, number, "greedy", 0) for number in range(QUESTIONS)), equality="bird")
        for system in (0, 1, 2)
    ]
    cells = tuple(FinishedCell({"row": name}, run) for name, run in zip("abc", runs, strict=True))
    source = table(Sweep("t", cells, {"row": "a"}, ("greedy",), against={"c": "b"}))
    _, of_b, of_c = (row[2] for row in source.rows)
    assert of_b.difference == pytest.approx((right(1) - right(0)) / QUESTIONS)  # type: ignore[union-attr]
    assert of_c.difference == pytest.approx((right(2) - right(1)) / QUESTIONS)  # type: ignore[union-attr]
    assert "from a, of c from b" in source.note


def test_the_band_of_held_out_accuracy_is_its_interval_over_the_questions() -> None:
    """Wilson's interval of 50 of 100: 0.5 -+ 0.0962."""
    steps = tuple({"step": step, "ex_held_out": 0.5, "questions_held_out": 100.0, "ex": 0.25} for step in (1.0, 21.0))
    found = curves(Sweep("t", (FinishedCell({"row": "a"}, curves=steps),)))
    assert found["ex_held_out"][0].points[1] == pytest.approx((21.0, 0.5, 0.4038, 0.5962), abs=1e-4)
    assert found["ex"][0].points[1] == (21.0, 0.25, 0.25, 0.25)
    assert "questions_held_out" not in found
