"""Tables in which nothing is trained: the command of their head, whole, asks for the benchmark alone."""

import json
import re
import shlex

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.protocols.blocks import THINK
from pipelines.recipe import recipes
from pipelines.recipe.config import Model, TinyModel
from pipelines.stages import graph, preflight
from pipelines.sweeps import paper_tables, sweep_plan
from tests.fakes import build_database

UNTRAINED = ("trust_sql/figure3", "skyrl_sql/figure2", "sql_trail/table4", "reasoning_sql/table4")
# Names that a head leaves to its reader; the linker "local" asks no endpoint, and "none" starts no server here.
FILLED = {"HOST": "127.0.0.1", "rollout.python=PYTHON": "rollout.servers=[http://127.0.0.1:8000/v1]", "LINKER": "local"}
# A model without training, in this process, draws four tokens a turn.
SMALL = (
    *("hardware.device=cpu", "rollout.policy=transformers", "evaluation.samples=0", "evaluation.ks=[1]"),
    *("evaluation.sampling.turn_tokens=4", "evaluation.sampling.episode_tokens=4096", "evaluation.equalities=[]"),
)


@pytest.fixture
def bird(tmp_path, monkeypatch):
    """One question of a benchmark in BIRD's layout, noted as `sqltrain data add bird_dev` notes it."""
    folder, local = tmp_path / "bird", tmp_path / "local"
    database = folder / "dev_databases" / "port" / "port.sqlite"
    build_database(
        database,
        "CREATE TABLE ship (id INTEGER PRIMARY KEY, name TEXT)",
        "INSERT INTO ship VALUES (1, 'Aurora'), (2, 'Egret')",
    )
    row = {"question_id": 7, "db_id": "port", "evidence": "", "difficulty": "simple"}
    row |= {"question": "How many ships are there?", "SQL": "SELECT count(*) FROM ship"}
    (folder / "dev.json").write_text(json.dumps([row]))
    local.mkdir()
    noted = {"name": "bird_dev", "kind": "bird", "split": "dev", "path": str(folder)}
    (local / "bird_dev.yaml").write_text(json.dumps({"data": {"test": [noted]}}))
    monkeypatch.setattr(recipes, "LOCAL", local)
    return folder


def words_of_the_head(name):
    text = (paper_tables.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").replace("\\\n#", "")
    line = re.search(r"^# Command +sqltrain sweep (.+)$", text, re.MULTILINE)[1]
    for placeholder, value in FILLED.items():
        line = line.replace(placeholder, value)
    table, *words = shlex.split(line)
    assert table == name
    return words


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_table_without_training_asks_for_no_training_pool(name, bird, tmp_path):
    """Each ended before its first cell: "data.sft, data.rl.0: no path to the questions"."""
    store = Store(tmp_path / "store")
    cells, _ = sweep_plan.cells_of_paper_table(name, words_of_the_head(name), None, False)
    for cell in cells:
        steps = graph.plan(cell.recipe, store)
        preflight.check_run(cell.recipe, steps)
        assert {step.name for step in steps} <= {"test", "test_schema", "model", "evaluate_model", "report"}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNTRAINED)
def test_the_command_of_the_head_fills_its_table(name, bird, tmp_path, sqltrain):
    from pipelines.training.model import make_tiny

    sizes = TinyModel(width=16, layers=1, heads=1, ffn=16, vocabulary=400, context=4096)
    make_tiny(Model(tiny=sizes), ["How many ships are there?"] * 9, [f"<{THINK}>"], tmp_path / "model", seed=0)
    words = [*words_of_the_head(name), *SMALL, f"model.source={tmp_path / 'model'}", f"--store={tmp_path / 'store'}"]
    done = json.loads(sqltrain.ok("sweep", name, *words, f"--out={tmp_path / 'out'}", "--json").splitlines()[-1])
    assert done["failed"] == {}
    table = (tmp_path / "out" / "sweep.csv").read_text(encoding="utf-8").splitlines()
    assert len(table) == 1 + len(paper_tables.load_table(name).rows)


PAPERS = ("sql_trail", "trust_sql", "reasoning_sql", "skyrl_sql", "mtir_sql")


@pytest.mark.parametrize("name", PAPERS)
def test_a_run_that_only_evaluates_needs_the_benchmark_alone(name, bird, tmp_path):
    recipe = recipes.load(name, ["stages=[data, evaluate, report]", "include=local/bird_dev"])
    steps = graph.plan(recipe, Store(tmp_path / "store"))
    preflight.check_run(recipe, [step for step in steps if step.name != "evaluate_model"])  # no vLLM is looked for
    assert [step.name for step in steps] == ["test", "model", "evaluate_model", "report"]
    with pytest.raises(RecipeError, match="trains nothing here and has no path to its pools") as refused:
        graph.plan(recipe, Store(tmp_path / "store"), "data")
    assert "data.sft.path=..." in str(refused.value.hint)


def test_pools_that_are_named_are_read_and_training_asks_for_them(bird, tmp_path):
    store = Store(tmp_path / "store")
    evaluates = ["stages=[data, gold_schema, evaluate]", "include=local/bird_dev"]
    named = [f"data.{pool}={{kind: bird, split: dev, path: {bird}}}" for pool in ("sft", "rl.0", "dev")]
    steps = graph.plan(recipes.load("reasoning_sql", [*evaluates, *named]), store)
    assert [step.name for step in steps[:2]] == ["data", "test"]
    trains = recipes.load("reasoning_sql", ["stages=[data, gold_schema, grpo, evaluate]", "include=local/bird_dev"])
    with pytest.raises(RecipeError, match=r"data\.sft, data\.rl\.0, data\.dev of reasoning_sql: no path"):
        preflight.check_run(trains, graph.plan(trains, store))
    learns_tokens = recipes.load("reasoning_sql", [*evaluates, "model.source=tiny"])
    assert "data" in {step.name for step in graph.plan(learns_tokens, store)}
