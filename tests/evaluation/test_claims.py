"""The rule that decides on a claim, by hand-made numbers; docs/results/laboratory.md is built from a store."""

import csv
import dataclasses
import importlib
import re
from pathlib import Path
from statistics import NormalDist
from xml.etree import ElementTree

import pydantic
import pytest
from evaluation_world import RECORD

from pipelines.core.errors import RecipeError
from pipelines.core.files import write_lines
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.evaluation.measures import FinishedEvaluation, measure
from pipelines.evaluation.stats import Paired
from pipelines.stages import graph
from pipelines.sweeps import claims, paper_tables, sweep_plan
from pipelines.sweeps.claims import Claim, Contrast
from pipelines.sweeps.sweep_table import FinishedCell, Sweep, verdict_table

TABLES = paper_tables.claim_tables()


@pytest.mark.parametrize(
    ("low", "high", "margin", "matters", "verdict"),
    [
        (0.01, 0.05, None, 0.0, "holds"),
        (0.001, 0.015, None, 0.02, "holds"),  # small, and yet there
        (0.0, 0.05, None, 0.0, "cannot be told"),
        (-0.01, 0.05, None, 0.02, "cannot be told"),
        (-0.05, -0.01, None, 0.0, "does not hold"),
        (-0.01, 0.015, None, 0.02, "does not hold"),  # whatever there is, it is less than what matters
        (-0.02, 0.05, 0.03, 0.0, "holds"),
        (-0.02, -0.01, 0.03, 0.0, "holds"),  # worse, but by less than the margin
        (-0.04, 0.05, 0.03, 0.0, "cannot be told"),
        (-0.04, -0.01, 0.03, 0.0, "does not hold"),
    ],
)
def test_the_interval_decides(low, high, margin, matters, verdict):
    assert claims.decide(low, high, margin, matters) == verdict


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        (["holds", "holds"], "holds"),
        (["holds", "cannot be told"], "cannot be told"),
        (["holds", "cannot be told", "does not hold"], "does not hold"),
        (["does not hold", "not measured"], "not measured"),
        ([], "not measured"),
    ],
)
def test_a_claim_holds_if_all_of_its_contrasts_do(verdicts, whole):
    assert claims.overall_verdict(verdicts) == whole


def test_the_detectable_difference_follows_from_the_intervals_width():
    """A standard error of 0.01 has an interval of +-0.0196, and shows 0.028 with 80 % power: (1.96 + 0.84) * 0.01."""
    reach = 0.01 * NormalDist().inv_cdf(0.975)
    difference = Paired(0.5, 0.5 - reach, 0.5 + reach, 1.0, 100, 10, "bootstrap by database")
    assert claims.detectable_difference(difference) == pytest.approx(0.028016, abs=1e-6)


def run(right, turns=1, seed=0, curves=()):
    records = tuple(
        dataclasses.replace(
            RECORD, example_id=f"q{at}", database=f"d{at}", scores={"strict": float(sign)}, turns=turns + (at % 2)
        )
        for at, sign in enumerate(right)
    )
    return FinishedEvaluation(records, single_turn=records[:4], seed=seed, curves=curves)


def claim(**changes):
    contrast = Contrast.model_validate({"says": "a over b", "row": "a", "over": "b", "measure": "greedy"} | changes)
    return Claim(number=1, text="a is better than b", source="by hand", contrasts=(contrast,), reading="Nothing.")


def test_a_contrast_pairs_questions_within_each_seed():
    before = ("1111000000000000", "1111110000000000", "1111111100000000")
    rows = {
        "a": {str(seed): run("1111111111110000", seed=seed) for seed in (1, 2, 3)},
        "b": {str(seed): run(right, seed=seed) for seed, right in enumerate(before, 1)},
    }
    (decided,) = claims.decide_contrasts(claim(), rows, ("1", "2", "3"))
    assert decided.by_seed == (8 / 16, 6 / 16, 4 / 16)
    assert decided.questions == 48
    assert decided.difference.difference == 6 / 16
    # The deviation of the seeds is 2/16: 4.303 * 0.125 / sqrt(3) on both sides.
    assert decided.difference.low == pytest.approx(0.375 - 0.310543, abs=1e-6)
    assert decided.difference.method == "Student's t over seeds"
    assert decided.verdict == "holds"
    # The standard error is 0.125 / sqrt(3): a t test needs 4.303 + 0.842 of it.
    assert decided.detectable == pytest.approx((4.303 + 0.841621) * 0.0721688, abs=1e-5)
    (reverse,) = claims.decide_contrasts(claim(less=True), rows, ("1", "2", "3"))
    assert reverse.verdict == "does not hold"
    assert reverse.difference == decided.difference
    (two,) = claims.decide_contrasts(claim(), rows, ("1", "2"))
    assert two.verdict == "cannot be told"  # Student's t of two seeds is 12.7
    rows = {"a": {"1": run("1111"), "2": run("1111")}, "b": {"1": run("0000")}}
    (decided,) = claims.decide_contrasts(claim(), rows, ("1", "2"))
    assert (decided.verdict, decided.difference, decided.detectable) == ("not measured", None, None)
    assert claims.decide_contrasts(claim(), {}, ("1",))[0].verdict == "not measured"


@pytest.mark.parametrize(
    ("gained", "lost", "changes", "verdict"),
    [
        (2, 2, {"matters": 2}, "does not hold"),  # 0.0 [-0.7, +0.7] points: less than what matters
        (2, 2, {}, "cannot be told"),
        (5, 3, {"matters": 2}, "does not hold"),  # +0.3 [-0.6, +1.2]
        (5, 3, {"matters": 1}, "cannot be told"),  # a point is possible
        (2, 6, {}, "cannot be told"),
        (2, 6, {"margin": 1}, "cannot be told"),
        (2, 6, {"margin": 3}, "holds"),  # 0.7 points less, and no more than 1.7
    ],
)
def test_margins_and_smallest_differences_are_in_points(gained, lost, changes, verdict):
    signs = "1" * gained + "0" * lost
    rows = {"a": {"1": spread(signs)}, "b": {"1": spread("".join("10"[int(sign)] for sign in signs))}}
    (decided,) = claims.decide_contrasts(claim(**changes), rows, ("1",))
    assert decided.difference.difference == pytest.approx((gained - lost) / 600)
    assert decided.verdict == verdict


def spread(signs):
    """600 greedy answers on 20 databases, the first of which are right where the sign is "1"; all others are wrong."""
    return FinishedEvaluation(
        tuple(
            dataclasses.replace(RECORD, example_id=f"q{at}", database=f"d{at % 20}", scores={"strict": float(sign)})
            for at, sign in enumerate(signs.ljust(600, "0"))
        )
    )


def test_the_second_row_may_have_another_measure_and_a_first_difference_may_be_subtracted():
    rows = {"a": {"1": run("1111000000000000")}, "b": {"1": run("0011000000000000")}}
    (at_once,) = claims.decide_contrasts(claim(measure="at once", over_measure="greedy"), rows, ("1",))
    assert at_once.difference.difference == 2 / 4  # of the four questions that were also asked at once
    (beyond,) = claims.decide_contrasts(claim(measure="greedy", beyond="syntax"), rows, ("1",))
    assert beyond.difference.difference == 2 / 16  # both rows write SQL that runs, so nothing is subtracted
    (same,) = claims.decide_contrasts(claim(beyond="greedy"), rows, ("1",))
    assert same.difference.difference == 0
    rows = {"a": {"1": run("1" * 12, turns=1)}, "b": {"1": run("1" * 12, turns=3)}}
    fewer = claim(measure="turns", less=True, matters=0.5)
    (decided,) = claims.decide_contrasts(fewer, rows, ("1",))
    assert decided.difference.difference == -2
    assert fewer.contrasts[0].unit == 1.0
    assert claim(margin=3).contrasts[0].unit == 0.01


def test_a_number_of_training_is_paired_by_step():
    made = run("1", curves=tuple({"step": float(at), "ex": value} for at, value in enumerate([0.5, 0.75, 0.25], 1)))
    assert measure("curve ex").scores(made) == {"1": ("1", 0.5), "2": ("2", 0.75), "3": ("3", 0.25)}
    assert measure("swing ex").scores(made) == {"2": ("2", 0.25), "3": ("3", 0.5)}
    assert measure("swing ex").kind == "mean"


def test_the_verdict_stands_in_a_table_of_its_own():
    rows = {"a": "111111111111", "b": "000000111111"}
    cells = tuple(
        FinishedCell({"row": name, "seed": seed}, run(right, seed=int(seed)))
        for name, right in rows.items()
        for seed in ("1", "2", "3")
    )
    shown = verdict_table(Sweep("t", cells, {"row": "b"}, claim=claim()))
    (row,) = shown.rows
    assert row[:2] == ("a over b", "EX")
    assert str(row[2]).startswith("+50.0 [+")
    assert row[3] == "+50.0, +50.0, +50.0"
    assert row[5:] == (36.0, "holds")
    assert shown.note == "holds. Nothing."


def test_twelve_claims_have_contrasts_that_decide_them():
    tested = [table.claim for table in TABLES.values() if table.claim is not None]
    assert [claim.number for claim in tested] == list(range(1, 13))
    for table in TABLES.values():
        assert table.claim.reading
        assert any(axis.startswith("seed=") for axis in table.axes) == (not table.claim.untestable)
        for contrast in table.claim.contrasts:
            assert contrast.margin or contrast.matters, "what matters is said before it is measured"


@pytest.mark.parametrize(
    "change", [{"contrasts": ()}, {"untestable": "it has no words"}, {"number": 0}, {"contrasts": ({"says": "x"},)}]
)
def test_a_claim_must_be_decidable(change):
    with pytest.raises(pydantic.ValidationError):
        Claim.model_validate(claim().model_dump() | change)


DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = "claims/turn_reward"
SOME = (NAME, "claims/coupling", "claims/lists_everything")  # all twelve would be planned for seconds
QUESTIONS = 12
SEEDS = ["seed=4..5"]


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """The page's program, which writes into a folder of the test."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = importlib.import_module("build_laboratory")
    tables = {name: table for name, table in paper_tables.claim_tables().items() if name in SOME}
    monkeypatch.setattr(paper_tables, "claim_tables", lambda: tables)
    for name, place in {"PAGE": "laboratory.md", "DATA": "laboratory.csv", "IMAGES": "images"}.items():
        monkeypatch.setattr(module, name, tmp_path / place)
    return module


def fill(store, cell):
    """Make a cell's stages without training: the turn reward saves a turn, and costs no accuracy."""
    for step in graph.plan(cell.recipe, store):
        store.make(step.kind, step.key, lambda folder: build(step, cell.recipe, folder), {}, lambda: None)  # noqa: B023


def build(step, recipe, folder):
    rewarded = bool(recipe.rewards[1].weight)
    if step.name == "grpo":
        steps = [{"step": at, "turns": 3 - at / 10 if rewarded else 3.0, "reward": 1.0} for at in range(1, 7)]
        write_lines(folder / "curves.jsonl", steps)
        write_lines(folder / "timing.jsonl", [{"step": at, "seconds": 99.0, "cpu_seconds": 5.0} for at in range(1, 7)])
    if step.name.startswith("evaluate_"):
        rows = [
            dataclasses.replace(
                RECORD,
                example_id=f"q{number}",
                database=f"d{number}",
                mode=mode,
                turns=1 + (not rewarded) + number % 2,
                scores={"strict": float(number % 3 > 0)},
            )
            for number in range(QUESTIONS)
            for mode in ("greedy", "sampled")
        ]
        write_lines(folder / "records.jsonl", ({"pass": row.mode, "record": to_dict(row)} for row in rows))


def test_a_store_without_arms_gives_a_page_without_figures(builder, tmp_path):
    builder.main(tmp_path / "store", [])
    text = (tmp_path / "laboratory.md").read_text(encoding="utf-8")
    assert "**In all**: cannot be told: 1; not measured: 2." in text
    assert text.count("\n## ") == 3
    assert "images/" not in text
    assert not list((tmp_path / "images").iterdir())
    rows = list(csv.DictReader((tmp_path / "laboratory.csv").read_text().splitlines()))
    assert {row["verdict"] for row in rows} == {"not measured"}
    assert {row["difference"] for row in rows} == {""}


def test_a_claim_that_was_run_is_decided_and_drawn(builder, tmp_path):
    store = Store(tmp_path / "store")
    for cell in sweep_plan.cells_of_paper_table(NAME, SEEDS, None, False)[0]:
        fill(store, cell)
    builder.main(store.root, SEEDS)
    text = (tmp_path / "laboratory.md").read_text(encoding="utf-8")
    (section,) = (part for part in text.split("\n## ") if part.startswith("3. "))
    assert "**Cannot be told.**" in section  # 12 questions cannot show that no three points were lost
    assert "| fewer turns | turns | −1.00 \\[−1.00, −0.76\\] | −1.00, −1.00 | 0.17 | 24 | holds |" in section
    assert "images/laboratory/turn_reward.svg" in section
    assert "loses no accuracy | cannot be told | 2.0 |" in text  # two arms, two seeds, 30 s each
    rows = list(csv.DictReader((tmp_path / "laboratory.csv").read_text().splitlines()))
    measured = {row["contrast"]: row for row in rows if row["verdict"] != "not measured"}
    assert float(measured["fewer turns"]["difference"]) == -1
    assert {row["questions"] for row in measured.values()} == {str(2 * QUESTIONS)}
    for name in ("claims.svg", "turn_reward.svg"):
        root = ElementTree.fromstring((tmp_path / "images" / name).read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    forest = (tmp_path / "images" / "claims.svg").read_text(encoding="utf-8")
    (whisker,) = (ElementTree.fromstring(line) for line in re.findall(r'<line [^>]*class="whisker s3"[^>]*/>', forest))
    assert min(float(whisker.attrib["x1"]), float(whisker.attrib["x2"])) > 630  # fewer is what is claimed: right of 0


@pytest.mark.parametrize(("names", "has_figure"), [(("turns", "greedy"), True), (("turns",), False)])
def test_a_claim_without_curves_is_drawn_by_its_rows(builder, names, has_figure):
    """The share among its measures is drawn; a claim about counts alone has no figure."""
    figures = importlib.import_module("laboratory_figures")
    cells = tuple(FinishedCell({"row": row}, FinishedEvaluation((RECORD,))) for row in ("a", "b"))
    decided = claims.ContrastResult(claim().contrasts[0], None, (), 0, "cannot be told", None)
    tested = figures.Tested("claims/x", claim(), Sweep("t", cells, {}, names), (decided,), 0.0, "", "")
    assert (figures.figure(tested) is not None) == has_figure


def test_a_claim_that_another_store_measured_is_kept_as_long_as_it_is_the_same_experiment(
    builder, tmp_path, monkeypatch
):
    store = Store(tmp_path / "store")
    for cell in sweep_plan.cells_of_paper_table(NAME, SEEDS, None, False)[0]:
        fill(store, cell)
    builder.main(store.root, SEEDS)
    places = [tmp_path / name for name in ("laboratory.md", "laboratory.csv", "images/claims.svg")]
    before = [place.read_text(encoding="utf-8") for place in places]
    builder.main(tmp_path / "another", SEEDS)  # has nothing of it
    assert [place.read_text(encoding="utf-8") for place in places] == before
    builder.main(tmp_path / "another", ["seed=4..6"])  # another experiment
    assert "**In all**: cannot be told: 1; not measured: 2." in places[0].read_text(encoding="utf-8")


def test_a_checkpoint_may_be_asked_in_another_way_than_it_was_trained(tmp_path):
    store, asked = Store(tmp_path), list[sweep_plan.SweepCell]()
    words = ["recipe=laboratory", "asked=protocol.schema_view=hidden", "asked=protocol.max_turns_eval=8"]
    (cell,) = sweep_plan.plan_cells("laboratory_unknown", words)
    assert (cell.source, cell.recipe.protocol.schema_view) == ("laboratory", "full")

    def make(made):
        asked.append(made)
        fill(store, made)

    (filled,) = sweep_plan.fill([cell], store, make, lambda line: None)
    assert isinstance(filled, FinishedCell)
    assert (filled.error, filled.values) == ("", cell.values)
    first, second = (made.recipe for made in asked)
    assert first == cell.recipe
    assert (second.protocol.schema_view, second.protocol.max_turns_eval) == ("hidden", 8)
    checkpoint = next(step for step in graph.plan(first, store) if step.name == "grpo")
    assert second.model.source == str(checkpoint.folder / "model")
    assert "grpo" not in second.stages
    with pytest.raises(RecipeError, match=r"unknown key 'protocol\.schema_vieuw'"):
        sweep_plan.plan_cells("laboratory", ["asked=protocol.schema_vieuw=hidden"])


def test_seeds_that_are_named_are_in_place_of_the_files_own():
    cells, _ = sweep_plan.cells_of_paper_table(NAME, ["seed=7..8"], None, False)
    assert sorted({cell.recipe.seed for cell in cells}) == [7, 8]
    assert len(cells) == 6


def test_an_axis_that_a_claims_verdict_would_ignore_is_refused():
    with pytest.raises(RecipeError, match=r"has no place for several values of grpo\.steps\. Write one value"):
        sweep_plan.cells_of_paper_table(NAME, ["grpo.steps=5,10"], None, False)
    cells, _ = sweep_plan.cells_of_paper_table(NAME, ["grpo.steps=5"], None, False)
    assert {cell.recipe.grpo.steps for cell in cells} == {5}
