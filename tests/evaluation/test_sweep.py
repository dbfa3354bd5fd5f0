"""Sweeps: which cells there are, what is left of one that fails, means over seeds, and a table and page that fill."""

import csv
import dataclasses
import random

import numpy as np
import pytest
from evaluation_world import EVIL, RECORD, Outline, record

from pipelines.core.errors import DataError, RecipeError, StoppedError
from pipelines.core.files import write_lines
from pipelines.core.store import WORK, Store
from pipelines.core.types import to_dict
from pipelines.evaluation import measures, stats
from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.record import Linking, Overlap
from pipelines.recipe import recipes
from pipelines.sql.diagnoses import Diagnosis
from pipelines.stages import graph
from pipelines.sweeps import sweep_plan, sweep_table
from pipelines.sweeps.sweep_page import render_sweep
from pipelines.sweeps.sweep_table import FinishedCell, Sweep, curves, table

QUESTIONS = 36
WORDS = ("variant=none,no_turns", "seed=0..1", "data.test.0.equality=bird")
ONE_SEED = ("variant=none,no_turns,exec_only", "data.test.0.equality=bird")


def making(store, made):
    """Makes stages as a run does, without training: evaluations hold the answers of the world's systems."""

    def build(step, recipe, folder):
        made.append(step.name)
        if step.name.startswith("evaluate_"):
            system = 2 if recipe.rewards[1].weight else 0
            rows = [record(system, number, "greedy", 0) for number in range(QUESTIONS)]
            write_lines(folder / "records.jsonl", ({"pass": "greedy", "record": to_dict(row)} for row in rows))

    def make(cell):
        for step in graph.plan(cell.recipe, store):
            store.make(step.name, step.key, lambda folder: build(step, cell.recipe, folder), {}, lambda: None)  # noqa: B023

    return make


def test_the_cells_are_every_combination_and_the_last_axis_is_the_fastest():
    found = sweep_plan.plan_cells("miniature", WORDS)
    shown = [cell.name for cell in found]
    assert shown == ["variant=none seed=0", "variant=none seed=1", "variant=no_turns seed=0", "variant=no_turns seed=1"]
    assert [cell.recipe.seed for cell in found] == [0, 1, 0, 1]
    assert [cell.recipe.rewards[1].weight for cell in found] == [2, 2, 0, 0]
    assert {cell.recipe.headline for cell in found} == {"bird"}
    found = sweep_plan.plan_cells(
        "sql_trail", ["benchmark=spider_dk,bird_dev", "evaluation.ks=[1, 2]", "model=qwen3_4b"]
    )
    assert [cell.name for cell in found] == ["benchmark=spider_dk", "benchmark=bird_dev"]
    assert [cell.recipe.benchmark.kind for cell in found] == ["spider", "bird"]
    assert {cell.recipe.evaluation.ks for cell in found} == {(1, 2)}
    assert {cell.recipe.model.source for cell in found} == {"Qwen/Qwen3-4B"}


@pytest.mark.parametrize("word", ["variant=none,nope", "benchmark=nope,spider_dk", "seed=1,1", "seed"])
def test_a_wrong_axis_is_the_users_mistake(word):
    with pytest.raises(RecipeError):
        sweep_plan.plan_cells("miniature", [word])


def test_shared_stages_are_forecast_and_made_once(tmp_path):
    store, made = Store(tmp_path), list[str]()
    found = sweep_plan.plan_cells("miniature", ONE_SEED)
    *lines, total = sweep_plan.forecast(found, store)
    assert lines[1] == "variant=no_turns: grpo, evaluate_grpo, report"
    assert total == "3 cells: 21 stages to make, 0 cached, 24 shared"
    sweep_plan.fill(found, store, making(store, made), lambda line: None)
    assert (made.count("data"), made.count("sft"), made.count("grpo")) == (1, 1, 3)
    assert list(sweep_plan.forecast(found, store))[-1] == "3 cells: 0 stages to make, 21 cached, 24 shared"


def test_a_sweep_that_is_killed_in_the_middle_of_a_stage_ends_with_the_same_table(tmp_path):
    """Of what SIGKILL leaves in the second cell's training; tests/services/test_sweep_killed.py sends the signal."""
    killed, undisturbed = Store(tmp_path / "killed"), Store(tmp_path / "undisturbed")
    found, empty = sweep_plan.cells_of_recipe("miniature", ONE_SEED, None)
    making(killed, [])(found[0])
    key = next(step.key for step in graph.plan(found[1].recipe, killed) if step.name == "grpo")
    (killed.root / "grpo" / f"{WORK}{key}").mkdir()
    (killed.root / "grpo" / f"{WORK}{key}" / "half").write_text("x")
    before = {path: path.stat().st_mtime_ns for path in killed.root.glob("*/*/manifest.json")}
    assert len(before) == 15
    for store in (killed, undisturbed):
        filled = sweep_plan.fill(found, store, making(store, []), lambda line: None)
        sweep_plan.write_sweep(dataclasses.replace(empty, cells=tuple(filled)), store.root / "out")
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing was made twice
    for name in ("sweep.md", "sweep.csv", "sweep.html"):
        assert (killed.root / "out" / name).read_bytes() == (undisturbed.root / "out" / name).read_bytes()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (DataError("the training child died"), "the training child died"),
        (MemoryError("no room"), "MemoryError: no room"),
        (RuntimeError("a library's own"), "RuntimeError: a library's own"),
        (OSError(28, "disk full"), "OSError: [Errno 28] disk full"),
    ],
)
def test_a_failed_cell_stands_in_the_table_with_its_error_and_stops_no_other(tmp_path, fault, error):
    store = Store(tmp_path)
    found = sweep_plan.plan_cells("miniature", ["variant=no_turns,none", "data.test.0.equality=bird"])
    plain = making(store, [])

    def make(cell):
        if not cell.recipe.rewards[1].weight:
            raise fault
        plain(cell)

    filled = sweep_plan.fill(found, store, make, lambda line: None)
    assert [one.error for one in filled] == [error, ""]
    shown = table(Sweep("miniature", tuple(filled), {"variant": "none"}))
    assert shown.rows[0][-1] == error
    assert shown.rows[0][1] is None
    assert shown.rows[1][1] is not None


def test_a_sweep_whose_training_is_asked_to_stop_ends(tmp_path):
    made = []

    def make(cell):
        made.append(cell)
        raise StoppedError("training was asked to stop")

    with pytest.raises(StoppedError):
        sweep_plan.fill(sweep_plan.plan_cells("miniature", ["seed=0..1"]), Store(tmp_path), make, lambda line: None)
    assert len(made) == 1


def test_a_cell_that_cannot_even_be_planned_stops_no_other(tmp_path):
    store, gone = Store(tmp_path), f"[{{kind: jsonl, split: test, path: {tmp_path / 'gone'}}}]"
    found = sweep_plan.plan_cells("miniature", [f"data.test={gone},[{{kind: miniature}}]", "data.test.0.equality=bird"])
    lines = list(sweep_plan.forecast(found, store))
    assert lines[0].startswith(f"data.test={gone}: cannot be made: ")
    assert lines[-1].startswith("2 cells: 15 stages to make")
    first, second = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    assert "gone" in first.error
    assert second.run is not None
    store = Store(tmp_path)
    found = sweep_plan.plan_cells("miniature", ["stages=[data, synthesize, filter, sft]"])
    (only,) = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    assert "evaluates nothing here" in only.error


def test_one_run_s_checkpoints_are_an_axis_that_makes_nothing_twice(tmp_path):
    store, made = Store(tmp_path), list[str]()
    found = sweep_plan.plan_cells("miniature", ["after=model,sft,grpo", "data.test.0.equality=bird"])
    asked = []
    plain = making(store, made)
    filled = sweep_plan.fill(found, store, lambda cell: (asked.append(cell.name), plain(cell)), lambda line: None)
    assert asked == ["after=model"]
    values = [row[1].value for row in table(Sweep("miniature", tuple(filled))).rows]
    assert values == pytest.approx([right(system) / QUESTIONS for system in (2, 2, 2)])


def test_as_many_samples_vote_as_were_drawn(tmp_path):
    store = Store(tmp_path)
    settings = ["evaluation.samples=3", "evaluation.ks=[1,2,8]", "data.test.0.equality=bird"]
    found = sweep_plan.plan_cells("miniature", settings)
    (only,) = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    assert only.run.k == 2


def test_a_benchmark_that_was_added_here_is_taken_with_its_path(tmp_path, monkeypatch):
    local = tmp_path / "local"
    local.mkdir()
    (local / "bird_dev.yaml").write_text("data: {test: [{name: bird_dev, kind: bird, split: dev, path: /here}]}\n")
    monkeypatch.setattr(recipes, "LOCAL", local)
    found = sweep_plan.plan_cells("sql_trail", ["benchmark=bird_dev,spider_dk"])
    assert [str(cell.recipe.benchmark.path) for cell in found] == ["/here", "None"]


def right(system):
    return sum(record(system, number, "greedy", 0).right("bird") for number in range(QUESTIONS))


def test_the_table_has_figures_and_paired_differences_in_three_formats_and_a_page(tmp_path):
    store = Store(tmp_path / "store")
    found, empty = sweep_plan.cells_of_recipe("miniature", WORDS, None)
    filled = sweep_plan.fill(found, store, making(store, []), lambda line: None)
    made = dataclasses.replace(empty, cells=tuple(filled))
    sweep_plan.write_sweep(made, tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").read_text().splitlines()))
    assert [float(row["EX"]) for row in rows] == pytest.approx([right(system) / QUESTIONS for system in (2, 0)])
    first, second = (row[2] for row in table(made).rows)
    assert first is None
    assert second.difference == pytest.approx((right(0) - right(2)) / QUESTIONS)
    at = [column.name for column in table(made).columns].index("condition")
    assert {row[at] for row in table(made).rows} == {"teacher oracle; judge none; schema full; seed 0, 1"}
    assert (tmp_path / "out" / "sweep.md").read_text().startswith("### miniature: 4 cells")
    assert "\\begin{" in (tmp_path / "out" / "sweep.tex").read_text()
    assert (tmp_path / "out" / "sweep.html").read_text().startswith("<!doctype html>")


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
def test_a_condition_is_of_the_checkpoint_and_of_how_it_is_asked(words, checkpoint, asked, said):
    recipe, once_more = (recipes.load("mini_reasoning_sql", [*words, *more]) for more in ((), asked))
    assert sweep_plan.condition_of(recipe, checkpoint, once_more) == said


def test_a_base_model_is_asked_once_more_by_its_own_name(tmp_path):
    """The store refers to a hub's weights and has no folder of them."""
    words = ["stages=[data, gold_schema, evaluate, report]", "asked=variant=gold_filtered"]
    (cell,) = sweep_plan.plan_cells("reasoning_sql", words)
    assert sweep_plan.asked_again(cell, Store(tmp_path)).recipe.model.source == "Qwen/Qwen2.5-Coder-7B-Instruct"
    (tiny,) = sweep_plan.plan_cells("mini_reasoning_sql", words)
    assert sweep_plan.asked_again(tiny, Store(tmp_path)).recipe.model.source.endswith("/model")


def test_a_row_may_be_held_against_another_than_the_baseline():
    """Of 36 questions; the world's systems differ in how many they answer."""
    runs = [
        FinishedEvaluation(tuple(record(system, number, "greedy", 0) for number in range(QUESTIONS)), equality="bird")
        for system in (0, 1, 2)
    ]
    cells = tuple(FinishedCell({"row": name}, run) for name, run in zip("abc", runs, strict=True))
    source = table(Sweep("t", cells, {"row": "a"}, ("greedy",), against={"c": "b"}))
    _, of_b, of_c = (row[2] for row in source.rows)
    assert of_b.difference == pytest.approx((right(1) - right(0)) / QUESTIONS)
    assert of_c.difference == pytest.approx((right(2) - right(1)) / QUESTIONS)
    assert "from a, of c from b" in source.note


def test_the_band_of_held_out_accuracy_is_its_interval_over_the_questions():
    """Wilson's interval of 50 of 100: 0.5 -+ 0.0962."""
    steps = tuple({"step": step, "ex_held_out": 0.5, "questions_held_out": 100.0, "ex": 0.25} for step in (1.0, 21.0))
    found = curves(Sweep("t", (FinishedCell({"row": "a"}, curves=steps),)))
    assert found["ex_held_out"][0].points[1] == pytest.approx((21.0, 0.5, 0.4038, 0.5962), abs=1e-4)
    assert found["ex"][0].points[1] == (21.0, 0.25, 0.25, 0.25)
    assert "questions_held_out" not in found


def answers(right, **changes):
    """Greedy answers: "1" is right, "0" wrong, each question over a database of its own."""
    return tuple(
        dataclasses.replace(RECORD, example_id=f"q{at}", database=f"d{at}", scores={"strict": float(sign)}, **changes)
        for at, sign in enumerate(right)
    )


def scores(right):
    return {f"q{at}": (f"d{at}", float(sign)) for at, sign in enumerate(right)}


def test_one_run_is_judged_as_in_its_own_report():
    right = "110100111010"
    databases = [f"d{at}" for at in range(12)]
    assert stats.mean([scores(right)], 3) == stats.estimate([float(sign) for sign in right], databases, 3)
    plain = stats.paired([0.0] * 12, [float(sign) for sign in right], databases, 3)
    assert stats.difference([scores("0" * 12)], [scores(right)], 3) == plain


def test_an_interval_over_seeds_holds_the_spread_of_the_seeds():
    good, bad = scores("1" * 12), scores("0" * 12)
    both = stats.mean([good, bad])
    assert (both.value, both.low, both.high) == (0.5, 0.0, 1.0)
    assert both.method == "Student's t over seeds"  # 12.7 times as wide as the deviation, and a share is one in [0, 1]
    assert both.n == 12
    change = stats.difference([bad, bad], [good, bad])
    assert (change.difference, change.low, change.high) == (0.5, -1.0, 1.0)
    three = stats.difference([bad] * 3, [good, scores("1" * 9 + "000"), scores("1" * 6 + "000000")])
    # 1, 3/4 and 1/2: a deviation of 1/4, so 4.303 * 0.25 / sqrt(3) on both sides of 3/4.
    assert (three.difference, three.low) == (0.75, pytest.approx(0.75 - 4.303 * 0.25 / 3**0.5))
    assert three.high == 1.0
    # 3/4, 1/2 and 1/3, whose mean is 19/36 and variance 19/432: half of it is less than the other interval is wide.
    some = stats.mean([scores("1" * 9 + "000"), scores("1" * 6 + "000000"), scores("1" * 4 + "00000000")])
    assert (some.low, some.high) == (pytest.approx(19 / 36 - 4.303 * (19 / 432 / 3) ** 0.5), 1.0)
    assert stats.deviation([1.0, 0.0]) == pytest.approx(0.5**0.5)
    assert stats.deviation([1.0]) is None
    # Three runs that are right in no, half and all of 12 databases: the first alone comes at 1/27, more than 2.5 %.
    assert stats.crossed_bootstrap(np.outer(np.ones(12), [0.0, 0.5, 1.0]), np.ones((12, 3)), 0) == (0.0, 1.0)


def test_seeds_that_agree_leave_the_interval_of_the_databases():
    draw = random.Random(0)
    right = "".join(draw.choice("01") for _ in range(200))
    one, three = stats.mean([scores(right)]), stats.mean([scores(right)] * 3)
    assert three.value == pytest.approx(one.value)
    assert (three.low, three.high) == pytest.approx((one.low, one.high), abs=0.02)
    whole, holed = scores("1111"), {key: value for key, value in scores("0000").items() if key != "q3"}
    assert stats.mean([whole, holed]).value == pytest.approx(4 / 7)
    assert stats.mean([{}]) is None
    assert stats.difference([holed], [{}]) is None


def test_measures_are_read_from_records():
    wrong = {"diagnosis": Diagnosis("hallucination", "no such column", ())}
    records = (
        *answers("10", turns=3, tokens_out=7, difficulty="simple"),
        *(dataclasses.replace(one, example_id="q9", difficulty="hard", turns=5, **wrong) for one in answers("0")),
    )
    records = (records[0], dataclasses.replace(records[1], diagnosis=Diagnosis("syntax", "", ())), records[2])
    run = FinishedEvaluation(records, single_turn=answers("111"))
    assert {name: [value for _, value in measure(name).scores(run).values()] for name in MEASURED} == MEASURED
    assert measure("turns deviation").fold([3, 3, 5]) == pytest.approx((8 / 9) ** 0.5)
    assert measures.title("greedy [simple]") == "EX [simple]"
    linked = dataclasses.replace(RECORD, linking=Linking(Overlap(2, 1, 1), Overlap(1, 1, 1)))
    ((_, value),) = measure("schema").scores(FinishedEvaluation((linked,))).values()
    assert value == pytest.approx(2 / 3)


MEASURED = {
    "greedy": [1, 0, 0],
    "greedy [simple]": [1, 0],
    "at once": [1, 1, 1],
    "turns": [3, 3, 5],
    "tokens out": [7, 7, 20],
    "hallucination errors": [0, 1],  # of the two wrong answers
    "syntax": [1, 1, 1],
    "schema": [],
}


def test_samples_are_measured_as_in_a_report():
    drawn = tuple(
        dataclasses.replace(one, mode="sampled", sample=at, signature=mark)
        for at, (one, mark) in enumerate(zip([*answers("1"), *answers("1"), *answers("0")], "aab", strict=True))
    )
    run = FinishedEvaluation(drawn, k=3)
    found = {name: measure(name).scores(run)["q0"][1] for name in ("pass@1", "pass@3", "average@3", "majority")}
    assert found == {"pass@1": pytest.approx(2 / 3), "pass@3": 1.0, "average@3": pytest.approx(2 / 3), "majority": 1.0}
    assert measure("pass@4").scores(run) == {}


@pytest.mark.parametrize("name", ["ex", "pass", "greedy@4", "turns@2", "", "greedy deviation", "greedy [", "pass@0"])
def test_an_unknown_measure_is_the_users_mistake(name):
    with pytest.raises(RecipeError, match="there is no measure"):
        measure(name)


def rows_of(sweep):
    shown = sweep_table.table(sweep)
    return [dict(zip([column.name for column in shown.columns], row, strict=True)) for row in shown.rows], shown.note


def filled(right, **changes):
    """Cells of an axis "variant" by their answers at seed 0, 1, ..."""
    return tuple(
        FinishedCell(
            {"variant": name, "seed": str(seed)},
            FinishedEvaluation(answers(signs), seed=seed),
            tuple({"step": step, "reward": step + seed, "loss": 1.0} for step in range(1, 4)),
        )
        for name, runs in right.items()
        for seed, signs in enumerate(runs)
    )


def test_a_row_is_the_mean_over_seeds_with_the_difference_from_the_baseline():
    cells = filled({"none": ("1100", "1000"), "no_turns": ("1110", "1111")})
    (none, other), note = rows_of(Sweep("two", cells, {"variant": "none"}, ("greedy", "turns")))
    assert none["variant"] == "none"
    assert none["EX"].value == pytest.approx(3 / 8)
    assert none["deviation"] == pytest.approx((2 * (1 / 8) ** 2) ** 0.5)  # 2/4 and 1/4
    assert none["difference"] is None
    assert other["difference"].difference == pytest.approx(4 / 8)
    assert (other["seeds"], other["turns"]) == (2, 1)
    assert "Means over the seeds 0, 1" in note
    # A seed that failed leaves the mean of the others, and its error.
    failed = FinishedCell({"variant": "no_turns", "seed": "1"}, error="the disk is full")
    (_, row), _ = rows_of(Sweep("two", (*cells[:3], failed), {"variant": "none"}, ("greedy",)))
    assert row["EX"].value == 0.75
    assert row["difference"].difference == 0.25  # seed 0 alone
    assert (row["seeds"], row["error"]) == (1, "seed 1: the disk is full")


def test_the_papers_figures_stand_beside():
    cells = tuple(FinishedCell({"row": name}, FinishedEvaluation(answers("10"))) for name in ("all", "without"))
    reported = {"all": {"bird_dev": {"greedy": 60.1, "turns": 2.26}}}
    (first, second), note = rows_of(Sweep("6", cells, {"row": "all"}, ("greedy", "turns"), reported=reported))
    assert (first["EX, paper"], first["turns, paper"]) == (pytest.approx(0.601), 2.26)
    assert second["EX, paper"] is None
    assert "The paper's figures are of bird_dev." in note


def test_curves_are_means_over_seeds_with_the_range_of_the_seeds():
    drawn = sweep_table.curves(Sweep("two", filled({"none": ("1", "1"), "no_turns": ("1", "0")})))
    assert list(drawn) == ["reward", "loss"]  # those that are named come first
    assert drawn["reward"][0].points == ((1, 1.5, 1, 2), (2, 2.5, 2, 3), (3, 3.5, 3, 4))
    assert [line.row for line in drawn["reward"]] == ["none", "no_turns"]


def test_smoothing_counts_steps_and_leaves_rare_numbers_as_they_are():
    rare = [(40.0, 1.0), (80.0, 3.0)]
    assert sweep_table.smoothed(rare) == rare
    assert sweep_table.smoothed([(float(step), float(step % 2)) for step in range(50)])[-1] == (49.0, 0.5)
    every_fourth = [(float(step), float(step % 8)) for step in range(4, 44, 4)]  # 4, 0, 4, 0, ...
    assert sweep_table.smoothed(every_fourth)[-1] == (40.0, 2.0)  # a fifth of 37 steps, 7, holds two of them


def test_the_page_stands_alone_and_nothing_from_outside_gets_out_of_its_place():
    cells = (*filled({EVIL: ("10", "01"), **{f"v{at}": ("11", "10") for at in range(7)}}),)
    cells = (*cells, FinishedCell({"variant": "bad", "seed": "0"}, error=EVIL))
    untrained = FinishedCell({"variant": "untrained", "seed": "0"}, FinishedEvaluation(answers("10")))
    # In table, chart and its tip: it has no line and no legend.
    assert render_sweep(Sweep("one", (*cells, untrained))).count("untrained") == 3
    text = render_sweep(Sweep(EVIL, cells, {"variant": "v0"}, absent={EVIL: EVIL}, facts={"note": EVIL}))
    tags = Outline()
    tags.feed(text)
    assert tags.open == []
    names = [name for name, _ in tags.tags]
    assert names.count("script") == 1
    assert "img" not in names
    assert not any("src" in attributes or "http" in str(attributes.get("href")) for _, attributes in tags.tags)
    ids = [attributes["id"] for _, attributes in tags.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"table", "failed", "absent", "curves", "method"} <= set(ids)
    lines = [str(attributes["class"]) for name, attributes in tags.tags if name == "polyline"]
    assert any("dashed" in each for each in lines)  # the seventh row is not the first one's twin
    assert sum(str(attributes.get("class", "")).startswith("band") for _, attributes in tags.tags) == 8  # the reward's


def test_every_metric_of_episodes_is_a_measure_of_sweeps():
    """Of two answers one is right; both take one turn."""
    run = FinishedEvaluation(answers("10"))
    for name, part in measures.EPISODES.items():
        of = measure(name)
        known = [value for record in run.records if (value := part.value(record)) is not None]
        assert len(of.scores(run)) == len(known), name
    assert {value for _, value in measure("turns").scores(run).values()} == {1}
    with pytest.raises(RecipeError, match="there is no measure 'syntax deviation'"):
        measure("syntax deviation")
