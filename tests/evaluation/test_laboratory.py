"""docs/laboratory.md is built from what a store has: nothing is invented, and what is there is decided and drawn."""

import csv
import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from evaluation_world import RECORD

from pipelines.core.errors import RecipeError
from pipelines.core.files import write_lines
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.sweeps import paper_tables, sweep_plan
from pipelines.sweeps.sweep_table import FinishedCell

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME = "claims/turn_reward"
SOME = (NAME, "claims/coupling", "claims/lists_everything")  # all twelve would be planned for seconds
QUESTIONS = 12
SEEDS = ["seed=4..5"]


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's program, which writes into a folder of the test."""
    monkeypatch.syspath_prepend(str(DOCS))
    module = importlib.import_module("build_laboratory")
    tables = {name: table for name, table in paper_tables.claims().items() if name in SOME}
    monkeypatch.setattr(paper_tables, "claims", lambda: tables)
    for name, place in {"PAGE": "laboratory.md", "DATA": "laboratory.csv", "IMAGES": "images"}.items():
        monkeypatch.setattr(module, name, tmp_path / place)
    return module


def fill(store: Store, cell: sweep_plan.SweepCell) -> None:
    """Make a cell's stages without training: the turn reward saves a turn, and costs no accuracy."""
    for step in graph.plan(cell.recipe, store):
        store.make(step.kind, step.key, lambda folder: build(step, cell.recipe, folder), {}, lambda: None)  # noqa: B023


def build(step: graph.Step, recipe: Recipe, folder: Path) -> None:
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


def test_a_store_without_arms_gives_a_page_without_figures(builder: ModuleType, tmp_path: Path) -> None:
    builder.main(tmp_path / "store", [])
    text = (tmp_path / "laboratory.md").read_text(encoding="utf-8")
    assert "**In all**: cannot be told: 1; not measured: 2." in text
    assert text.count("\n## ") == 3
    assert "images/" not in text
    assert not list((tmp_path / "images").iterdir())
    rows = list(csv.DictReader((tmp_path / "laboratory.csv").read_text().splitlines()))
    assert {row["verdict"] for row in rows} == {"not measured"}
    assert {row["difference"] for row in rows} == {""}


def test_a_claim_that_was_run_is_decided_and_drawn(builder: ModuleType, tmp_path: Path) -> None:
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


def test_a_claim_that_another_store_measured_is_kept_as_long_as_it_is_the_same_experiment(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_checkpoint_may_be_asked_in_another_way_than_it_was_trained(tmp_path: Path) -> None:
    store, asked = Store(tmp_path), list[sweep_plan.SweepCell]()
    words = ["recipe=laboratory", "asked=protocol.schema_view=hidden", "asked=protocol.max_turns_eval=8"]
    (cell,) = sweep_plan.cells("laboratory_unknown", words)
    assert (cell.source, cell.recipe.protocol.schema_view) == ("laboratory", "full")

    def make(made: sweep_plan.SweepCell) -> None:
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
        sweep_plan.cells("laboratory", ["asked=protocol.schema_vieuw=hidden"])


def test_seeds_that_are_named_are_in_place_of_the_files_own() -> None:
    cells, _ = sweep_plan.cells_of_paper_table(NAME, ["seed=7..8"], None, False)
    assert sorted({cell.recipe.seed for cell in cells}) == [7, 8]
    assert len(cells) == 6
