"""The cache table: what is changed, which stages run again, and what `sqltrain stages` says is the cause."""

import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipelines.core.registry import PROTOCOLS
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.recipe.config import Source
from pipelines.stages import fingerprints, graph, stage_changes, stage_keys, stage_making
from pipelines.stages.context import Silent
from tests.fakes import build_database

ALL = {stage.name for stage in graph.active(recipes.load("miniature"))}
MODELS = {"sft", "difficulty", "grpo", "evaluate_model", "evaluate_sft", "evaluate_grpo", "report"}
AFTER_GRPO = {"grpo", "evaluate_grpo", "report"}
LEARNED = ALL - {"test", "test_schema"}
BENCHMARK = {"test", "test_schema", "leakage", "evaluate_model", "evaluate_sft", "evaluate_grpo", "report"}
EVALUATIONS = {"evaluate_model", "evaluate_sft", "evaluate_grpo", "report"}


@dataclass(frozen=True)
class World:
    """A recipe over own questions, a Spider behind a link, a local model and a judge; every stage of it is finished."""

    root: Path
    store: Store
    overrides: tuple[str, ...]

    def plan(self, *more):
        return graph.plan(recipes.load("miniature", [*self.overrides, *more]), self.store)

    def finish(self, *more):
        recipe = recipes.load("miniature", [*self.overrides, *more])
        for step in self.plan(*more):
            stage = next(stage for stage in graph.active(recipe) if stage.name == step.name)
            inputs = {other.name: other.key for other in self.plan(*more) if other.name in step.needs}
            about = stage_keys.deciding(stage, recipe, inputs, self.store)
            self.store.make(step.kind, step.key, lambda folder: None, about, lambda: None)

    def again(self, *more):
        return {step.name: step.why for step in self.plan(*more) if not step.cached}


@pytest.fixture
def world(tmp_path, monkeypatch):
    own, spider, elsewhere = tmp_path / "own", tmp_path / "spider", tmp_path / "elsewhere"
    build_database(own / "shops.sqlite", "CREATE TABLE shop (name TEXT)")
    (own / "questions.jsonl").write_text(json.dumps({"question": "?", "database": "shops.sqlite", "sql": "SELECT 1"}))
    build_database(elsewhere / "farms" / "farms.sqlite", "CREATE TABLE shop (name TEXT)")
    spider.mkdir()
    (spider / "database").symlink_to(elsewhere, target_is_directory=True)
    (spider / "dev.json").write_text(json.dumps([{"question": "?", "db_id": "farms", "query": "SELECT 1"}]))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "endpoints.yaml").write_text("critic: {base_url: 'http://localhost:1/v1', model: small}\n")
    monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(tmp_path / "endpoints.yaml"))
    overrides = (
        f"data.sft={{kind: jsonl, path: {own}/questions.jsonl}}",
        f"data.dev={{kind: spider, split: dev, path: {spider}}}",
        f"model.source={tmp_path}/model",
        "rewards=[{term: exec, weight: 5}, {term: turns, weight: 2}, {term: judge, options: {by: critic}}]",
    )
    there = World(tmp_path, Store(tmp_path / "store"), overrides)
    assert set(there.again().values()) == {"not made yet"}
    there.finish()
    assert there.again() == {}
    return there


def drop_table(world):
    build_database(world.root / "own" / "shops.sqlite", "DROP TABLE shop")


def grow_behind_a_link(world):
    build_database(world.root / "elsewhere" / "farms" / "farms.sqlite", "CREATE TABLE barn (name TEXT)")


def replaced(name, old, new):
    def change(world):
        (world.root / name).write_text((world.root / name).read_text().replace(old, new))

    return change


def flip_bit(world):
    path = world.root / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


def leave_a_note(world):
    (world.root / "spider" / "notes.txt").write_text("read me")
    (world.root / "own" / "other.sqlite").write_bytes(b"")
    (world.root / "elsewhere" / "unused").mkdir()
    (world.root / "elsewhere" / "loop").symlink_to(world.root / "spider")


TABLE = {
    "a question": (
        replaced("own/questions.jsonl", '"?"', '"how many?"'),
        LEARNED,
        "data",
        "changed: the files of .*questions.jsonl$",
    ),
    "a database of own questions": (drop_table, LEARNED, "data", "changed: the files of .*questions.jsonl$"),
    "a database behind a linked folder": (grow_behind_a_link, LEARNED, "data", "changed: the files of .*/spider$"),
    "one bit of local weights": (flip_bit, {"model"} | MODELS, "model", "changed: the weights of model.source$"),
    "the model behind an endpoint": (
        replaced("endpoints.yaml", "small", "large"),
        AFTER_GRPO,
        "grpo",
        "endpoint critic.model .small -> large.$",
    ),
    "an endpoint's address": (replaced("endpoints.yaml", "localhost:1", "localhost:2"), set(), "", ""),
    "a file that no reader reads": (leave_a_note, set(), "", ""),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_change_outside_the_recipe_runs_its_stages_again(world, name):
    change, stages, first, cause = TABLE[name]
    change(world)
    found = world.again()
    assert set(found) == stages
    if first:
        assert re.search(cause, found[first]), found[first]


SETTINGS = {
    "rewards.turns.weight=0.5": (AFTER_GRPO, "grpo", "changed: rewards.turns.weight (2.0 -> 0.5)"),
    "grpo.steps=5": (AFTER_GRPO, "grpo", "changed: grpo.steps (60 -> 5)"),
    "evaluation.samples=2": (EVALUATIONS, "evaluate_sft", "changed: evaluation.samples (4 -> 2)"),
    "sft.optimizer.lr=0.5": (MODELS - {"evaluate_model"}, "sft", "changed: sft.optimizer.lr (0.02 -> 0.5)"),
    "execution.timeout_s=7": (ALL, "data", "changed: execution.timeout_s (5.0 -> 7.0)"),
    "seed=3": (ALL, "data", "changed: seed (0 -> 3)"),
    "data.test.0.count=3": (BENCHMARK, "test", "changed: benchmark.count (null -> 3)"),
    "data.test.0.options.questions=7": (BENCHMARK, "test", "changed: benchmark.options.questions (12 -> 7)"),
    "data.test.0.equality=bird": (EVALUATIONS, "evaluate_sft", "changed: benchmark.equality (null -> bird)"),
    "data.dev.count=3": (LEARNED, "data", "changed: data.dev.count (null -> 3)"),
    "hardware.threads=2": (set(), "", ""),
    "rollout.processes=1": (set(), "", ""),
    "contracts.max_leaked=0.5": (set(), "", ""),
    "rollout.slots=3": (set(), "", ""),
}


@pytest.mark.parametrize("override", SETTINGS)
def test_a_changed_setting_runs_its_stages_again(world, override):
    stages, first, cause = SETTINGS[override]
    found = world.again(override)
    assert set(found) == stages
    if first:
        assert found[first] == cause


def test_the_nearest_finished_stage_tells_the_cause_and_what_follows_names_its_input(world):
    found = world.again("sft.optimizer.lr=0.5")
    assert found["difficulty"] == "changed: sft (its input)"
    assert found["evaluate_grpo"] == "changed: grpo (its input)"
    world.finish("seed=1", "grpo.steps=9")
    assert world.again("grpo.steps=10")["grpo"] == "changed: grpo.steps (60 -> 10)"


def test_corrections_count_where_their_questions_are_read_without_them_too(tmp_path):
    """The store remembers which files a file of questions names; those that change no more, of the time 0."""
    (tmp_path / "own.jsonl").write_text("{}\n")
    os.utime(tmp_path / "own.jsonl", (0, 0))
    plain = Source(kind="jsonl", path=str(tmp_path / "own.jsonl"))
    mended = plain.model_copy(update={"corrections": str(tmp_path / "corrections.jsonl")})
    assert fingerprints.fingerprint([plain], tmp_path) != fingerprints.fingerprint([mended], tmp_path)


def test_a_database_that_is_chosen_by_what_is_there_counts_as_soon_as_it_comes(tmp_path):
    """The questions do not change, of the time 0: neither an absent database that comes, nor one that stands first."""
    own, store = tmp_path / "own.jsonl", tmp_path / "store"
    own.write_text(json.dumps({"question": "?", "database": "shop", "sql": "SELECT 1"}))
    os.utime(own, (0, 0))
    source = Source(kind="jsonl", path=str(own), options={"databases": "dbs"})
    prints = [fingerprints.fingerprint([source], store)]
    for place in ("shop/shop.sqlite", "shop.sqlite"):
        build_database(tmp_path / "dbs" / place, "CREATE TABLE shop (name TEXT)")
        prints.append(fingerprints.fingerprint([source], store))
    build_database(tmp_path / "dbs" / "shop.sqlite", "CREATE TABLE barn (name TEXT)")
    prints.append(fingerprints.fingerprint([source], store))
    assert len({str(found) for found in prints}) == 4


def test_a_database_that_a_new_invented_question_names_counts(tmp_path):
    own, more, store = tmp_path / "own.jsonl", tmp_path / "more.jsonl", tmp_path / "store"
    for file, name in ((own, "shop"), (more, "barn")):
        file.write_text(json.dumps({"question": "?", "database": f"{name}.sqlite", "sql": "SELECT 1"}) + "\n")
        build_database(tmp_path / f"{name}.sqlite", "CREATE TABLE first (name TEXT)")
    os.utime(own, (0, 0))
    source = Source(kind="jsonl", path=str(own), options={"test": 0.5, "invented": str(more)})
    fingerprints.fingerprint([source], store)
    build_database(tmp_path / "mill.sqlite", "CREATE TABLE first (name TEXT)")
    more.write_text(more.read_text().replace("barn", "mill"))
    before = fingerprints.fingerprint([source], store)
    build_database(tmp_path / "mill.sqlite", "CREATE TABLE second (name TEXT)")
    assert fingerprints.fingerprint([source], store) != before


def test_descriptions_beside_the_databases_of_own_questions_count_where_they_are_shown(world):
    """A new file counts, though the store remembers which files the questions name."""
    shown = "protocol.schema_descriptions=true"
    os.utime(world.root / "own" / "questions.jsonl", (0, 0))
    world.finish()
    world.finish(shown)
    file = world.root / "own" / "database_description" / "shop.csv"
    file.parent.mkdir()
    for description in ("its sign", "its owner"):
        file.write_text(f"original_column_name,column_description\nname,{description}\n")
        assert world.again() == {}
        assert world.again(shown)["data"].startswith("changed: the files of ")
        world.finish(shown)
        assert world.again(shown) == {}


def test_a_stage_that_is_removed_while_a_plan_looks_for_causes_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_changes, "folder_names", lambda folder: ["removed by gc"])
    assert stage_changes.nearest_changes(tmp_path, {}) == ""


def test_one_more_benchmark_has_stages_of_its_own(world):
    first = recipes.load("miniature", world.overrides).data.test[0].model_dump(mode="json")
    second = {**first, "name": "other", "count": 3}
    both, turned = (f"data.test={json.dumps(benchmarks)}" for benchmarks in ([first, second], [second, first]))
    assert set(world.again(both)) == {f"{stage}.other" for stage in BENCHMARK}
    world.finish(both)
    assert world.again(turned) == {}


def test_a_prompt(world, monkeypatch):
    react = PROTOCOLS["react"]
    shutil.copytree(react.prompts, world.root / "prompts")
    monkeypatch.setattr(react, "prompts", world.root / "prompts")
    assert world.again() == {}
    prompt = world.root / "prompts" / "react_brief.txt"
    prompt.write_text(prompt.read_text() + " Think.")
    found = world.again()
    assert set(found) == ALL - {"data", "gold_schema", "test", "test_schema", "leakage"}
    assert found["synthesize"] == "changed: the prompt's text"


def test_the_rules_of_a_judge_behind_an_endpoint(world, monkeypatch):
    program = "rewards=[{term: exec, weight: 5}, {term: turns, weight: 2}, {term: judge}]"
    graded = set(world.again(program))
    monkeypatch.setattr(fingerprints, "RUBRIC", f"{fingerprints.RUBRIC} Be kind.")
    found = world.again()
    assert set(found) == AFTER_GRPO
    assert found["grpo"].startswith("changed: endpoint rubric")
    assert set(world.again(program)) == graded


def test_a_plug_ins_code(world):
    code = (
        "from pipelines.core.registry import reward\n\n@reward('gift')\ndef gift(outcome) -> float:\n    return WORTH\n"
    )
    plugin = world.root / "gift.py"
    plugin.write_text(code.replace("WORTH", "1.0"))
    mine = (f"plugins=[{plugin}]", "rewards=[{term: gift}]")
    world.finish(*mine)
    assert world.again(*mine) == {}
    plugin.write_text(code.replace("WORTH", "2.0"))
    found = world.again(*mine)
    assert set(found) == AFTER_GRPO
    assert found["grpo"] == "changed: the code of the plug-in's reward term gift"


def test_a_stages_version(world, monkeypatch):
    stages = [replace(stage, version=77) if stage.name == "grpo" else stage for stage in graph.GRAPH]
    old = next(stage.version for stage in graph.GRAPH if stage.name == "grpo")
    monkeypatch.setattr(graph, "GRAPH", tuple(stages))
    found = world.again()
    assert set(found) == AFTER_GRPO
    assert found["grpo"] == f"changed: the stage's code (version {old} -> 77)"


def test_a_declared_librarys_version(world, monkeypatch):
    installed = stage_keys.version
    monkeypatch.setattr(stage_keys, "version", lambda name: "9.1.4" if name == "trl" else installed(name))
    found = world.again()
    assert set(found) == MODELS - {"evaluate_model"}
    assert found["sft"].endswith("-> 9.1)")
    world.finish()
    monkeypatch.setattr(stage_keys, "version", lambda name: "9.1.5" if name == "trl" else installed(name))
    assert world.again() == {}, "a patch release mends what was wrong"


def test_manifests_name_what_made_them(tmp_path):
    pools = [f"data.{pool}.options={{databases: 1, questions: 2}}" for pool in ("sft", "dev", "test.0")]
    recipe = recipes.load("miniature", [*pools, "data.rl=[]"])
    store = Store(tmp_path)
    steps = graph.plan(recipe, store, "data")
    stage_making.execute(steps[-1], recipe, store, Silent(), steps)
    made = store.manifest("data", steps[-1].key)["made_by"]
    assert set(made) == {"commit", "changed", "python", "libraries", "machine"}
    assert made["libraries"]["torch"].startswith("2.")
