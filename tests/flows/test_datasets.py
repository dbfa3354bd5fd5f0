"""`sqltrain data add` and `sqltrain check`: what a download and a recipe's gold SQL are held against."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from pipelines.benchmarks import downloads
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.types import ABSTENTION, Example
from pipelines.recipe import recipes
from pipelines.recipe.yaml_files import read_yaml
from pipelines.stages import added_benchmarks
from pipelines.stages.context import Silent
from pipelines.stages.recipe_check import check_gold_answers
from tests.fakes import build_database


@pytest.fixture
def spider(tmp_path):
    """Spider dev in small: two questions that run, one whose gold is broken, one without its database."""
    folder = tmp_path / "spider"
    place = folder / "database" / "harbour" / "harbour.sqlite"
    place.parent.mkdir(parents=True)
    build_database(place, "CREATE TABLE ship (name TEXT)")
    queries = ["SELECT name FROM ship", "SELECT count(*) FROM ship", "SELECT flag FROM ship", "SELECT 1"]
    rows = [{"db_id": "harbour", "question": "Which ships?", "query": query} for query in queries]
    rows[3]["db_id"] = "airport"
    (folder / "dev.json").write_text(json.dumps(rows))
    return folder


def test_a_partial_download_is_told_and_can_still_be_included(spider, tmp_path):
    said = []
    found = added_benchmarks.add_benchmark("spider_dev", spider, said.append, tmp_path / "local")
    assert (found["rows"], found["usable"], found["databases"]) == (4, 2, 1)
    assert found["bad"] == {"missing_database": 1, "gold_no_such_column": 1}
    text = "\n".join(said)
    assert "2 of 4 questions can run, over 1 databases" in text
    assert "the whole benchmark has 1,034" in text
    assert "what is missing: https://yale-lily.github.io/spider" in text
    assert "licence: CC BY-SA 4.0" in text
    noted = read_yaml(tmp_path / "local" / "spider_dev.yaml")
    assert noted["data"]["test"] == [{"name": "spider_dev", "kind": "spider", "split": "dev", "path": str(spider)}]


def test_a_benchmarks_text_can_neither_steer_the_terminal_nor_flood_it(spider, tmp_path):
    rows = json.loads((spider / "dev.json").read_text())
    rows[2]["query"] = "SELECT '\x1b[2J', flag FROM ship -- " + "x" * 45_000
    (spider / "dev.json").write_text(json.dumps(rows))
    said = []
    added_benchmarks.add_benchmark("spider_dev", spider, said.append, tmp_path / "local")
    assert any("SELECT '\\x1b[2J', flag" in line for line in said)
    assert max(map(len, said)) < 400


def test_the_checksum_is_of_the_questions_and_a_change_is_told(spider, tmp_path):
    first = added_benchmarks.add_benchmark("spider_dev", spider, lambda line: None, tmp_path / "local")
    again = []
    assert added_benchmarks.add_benchmark("spider_dev", spider, again.append, tmp_path / "local") == first
    assert not [line for line in again if "differ from those added before" in line]
    (spider / "dev.json").write_text((spider / "dev.json").read_text().replace("Which", "What"))
    changed = added_benchmarks.add_benchmark("spider_dev", spider, again.append, tmp_path / "local")
    assert changed["questions_sha256"] != first["questions_sha256"]
    assert changed["databases_sha256"] == first["databases_sha256"]
    assert [line for line in again if "differ from those added before" in line]


def test_what_is_not_there_says_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"dev\.json.*Get it from https://bird-bench\.github\.io"):
        added_benchmarks.add_benchmark("bird_dev", tmp_path, lambda line: None, tmp_path / "local")
    with pytest.raises(DataError, match=r"no benchmark 'spyder'.*spider_dev"):
        added_benchmarks.add_benchmark("spyder", tmp_path, lambda line: None, tmp_path / "local")
    assert not (tmp_path / "local").exists()


def test_a_place_that_cannot_be_written_is_told_before_the_questions_are_checked(spider, tmp_path):
    (tmp_path / "conf").write_text("a file")
    said = []
    with pytest.raises(DataError, match=r"conf/local cannot be written\. Run this in a folder of your own"):
        added_benchmarks.add_benchmark("spider_dev", spider, said.append, tmp_path / "conf" / "local")
    assert said == []


def test_ones_own_questions_are_checked_like_a_benchmark(spider, tmp_path):
    shutil.copy(spider / "database" / "harbour" / "harbour.sqlite", tmp_path)
    row = {"question": "Which ships?", "database": "harbour.sqlite", "sql": "SELECT name FROM ship"}
    rows = [row, row | {"sql": "SELECT flag FROM ship"}, row | {"database": "airport.sqlite"}]
    mine, said = tmp_path / "mine.jsonl", list[str]()
    mine.write_text("".join(json.dumps(one) + "\n" for one in rows) + "no row\n")
    found = added_benchmarks.add_benchmark("own", mine, said.append, tmp_path / "local")
    assert (found["rows"], found["usable"], found["licence"]) == (4, 1, "your own")
    assert found["bad"] == {"missing_database": 1, "not_json": 1, "gold_no_such_column": 1}
    assert not [line for line in said if "whole benchmark" in line or "what is missing" in line]
    noted = read_yaml(tmp_path / "local" / "own.yaml")
    assert noted == {"data": {"test": [{"name": "own", "kind": "jsonl", "split": "test", "path": str(mine)}]}}
    with pytest.raises(DataError, match=r"no such file.*Each line of the file is"):
        added_benchmarks.add_benchmark("own", tmp_path / "none.jsonl", said.append, tmp_path / "local")


def test_several_files_of_ones_own_lie_side_by_side_under_names(spider, tmp_path):
    shutil.copy(spider / "database" / "harbour" / "harbour.sqlite", tmp_path)
    row = {"question": "Which ships?", "database": "harbour.sqlite", "sql": "SELECT name FROM ship"}
    local = tmp_path / "local"
    for slot in ("sales", "stock"):
        (tmp_path / f"{slot}.jsonl").write_text(json.dumps(row) + "\n")
        assert (
            added_benchmarks.add_benchmark("own", tmp_path / f"{slot}.jsonl", print, local, called=slot)["include"]
            == f"local/{slot}"
        )
    noted = [read_yaml(local / f"{slot}.yaml")["data"]["test"][0] for slot in ("sales", "stock")]
    found = [(one["name"], Path(one["path"]).name) for one in noted]
    assert found == [("sales", "sales.jsonl"), ("stock", "stock.jsonl")]
    with pytest.raises(DataError, match="is no name for it"):
        added_benchmarks.add_benchmark("own", tmp_path / "sales.jsonl", print, local, called="../sales")


@pytest.mark.parametrize("name", downloads.BENCHMARKS)
def test_every_benchmark_is_one_line_of_conf_that_any_recipe_can_include(name):
    recipe = recipes.load("sql_trail", [f"include=data/{name}"])
    source, _ = downloads.download_source(name, Path("/data"))
    assert source.kind in {pool.kind for pool in (recipe.data.sft, *recipe.data.rl, *recipe.data.test)}
    assert source.path == "/data"


def test_a_noted_benchmark_is_included_by_its_name(spider, tmp_path, monkeypatch):
    conf = tmp_path / "conf"
    shutil.copytree(recipes.CONF, conf, ignore=shutil.ignore_patterns("local"))
    monkeypatch.setattr(recipes, "CONF", conf)
    found = added_benchmarks.add_benchmark("spider_dev", spider, lambda line: None, conf / "local")
    recipe = recipes.load("sql_trail", [f"include={found['include']}"])
    assert (recipe.benchmark.kind, recipe.benchmark.path) == ("spider", str(spider))
    with pytest.raises(RecipeError, match="cannot read"):
        recipes.load("sql_trail", ["include=local/none"])


def test_the_page_of_benchmarks_has_each_one():
    page = (recipes.CONF.parent / "docs" / "reference" / "benchmarks.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| `")]
    named = {name.strip("` ") for line in table for name in line.split("|")[1].split(",")}
    assert named == set(downloads.BENCHMARKS)
    assert all((recipes.CONF / "data" / f"{name}.yaml").is_file() for name in named)


def test_a_table_of_benchmarks_is_made_of_those_that_are_here_and_the_others_are_named(
    spider, tmp_path, monkeypatch, sqltrain
):
    """OmniSQL's nine columns in one command: two of them were added."""
    local = tmp_path / "conf" / "local"
    monkeypatch.setattr(recipes, "LOCAL", local)
    small = tmp_path / "dk"
    shutil.copytree(spider, small)
    (small / "dev.json").rename(small / "Spider-DK.json")
    for name, folder in (("spider_dev", spider), ("spider_dk", small)):
        added_benchmarks.add_benchmark(name, folder, lambda line: None, local)
    words = ("evaluate", "miniature", "--model", "oracle", "--benchmarks", "omnisql", "data.max_bad_share=1")
    out = sqltrain.ok(*words, f"--store={tmp_path / 'store'}")
    missing = [line.split()[3].rstrip(",") for line in out.splitlines() if line.startswith("no data of")]
    assert missing == [name for name in downloads.LISTS["omnisql"] if name not in ("spider_dev", "spider_dk")]
    assert len(missing) == 7
    table = out.partition("EX greedy, benchmark by benchmark")[2].splitlines()
    assert table[1].split() == ["system", "spider_dev", "(strict)", "spider_dk", "(strict)"]
    assert table[2].split() == ["oracle", "100.0", "100.0"]
    with pytest.raises(DataError, match="none of bird_dev is on this machine"):
        added_benchmarks.benchmarks_override("bird_dev", lambda line: None)


THREE = "CREATE TABLE ship (name TEXT); INSERT INTO ship VALUES ('a'), ('b'), ('c')"


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT name FROM ship", "larger than a verdict may read (raise execution.max_rows or execution.max_bytes)"),
        ("SELECT flag FROM ship", "it does not run (no_such_column)"),
    ],
)
def test_a_gold_sql_that_is_too_large_is_told_from_one_that_fails(sql, said, tmp_path):
    example = Example("q", "?", build_database(tmp_path / "harbour.sqlite", THREE), sql)
    recipe = recipes.load("miniature", ["execution.max_rows=2"])
    checked = check_gold_answers(recipe, [[example]], Silent())
    (problem,) = checked.problems
    assert said in problem
    assert (checked.checked, checked.full) == (1, 0)
    in_vain = dataclasses.replace(example, gold_sql=ABSTENTION)  # there is no schema to be paid for
    assert check_gold_answers(recipes.load("sql_trail"), [[in_vain]], Silent()).problems == ()


def test_the_gold_sql_of_all_pools_is_checked_whatever_their_ids(tmp_path, sqltrain):
    """A training file and a test file both number their questions from 1; the training file's first is empty."""
    build_database(tmp_path / "harbour.sqlite", THREE)
    asked = {"train": ["SELECT name FROM ship WHERE name > 'c'", "SELECT count(*) FROM ship"]}
    asked["test"] = ["SELECT min(name) FROM ship", "SELECT max(name) FROM ship", "SELECT name FROM ship"]
    for pool, queries in asked.items():
        rows = [
            {"id": id, "question": f"{sql}?", "database": "harbour.sqlite", "sql": sql}
            for id, sql in enumerate(queries)
        ]
        (tmp_path / f"{pool}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = (f"{{kind: jsonl, path: {tmp_path / pool}.jsonl}}" for pool in asked)
    own = [f"data.sft={train}", f"data.rl=[{train}]", f"data.dev={test}", f"data.test=[{test}]"]
    code, out, said = sqltrain("check", "miniature", *own, f"--store={tmp_path / 's'}", "--data", "--json")
    assert code == 0, said
    facts = json.loads(out.splitlines()[-1])
    assert (facts["gold_checked"], facts["gold_full"], facts["health"]["empty"]) == (5, 5, 1)
    assert facts["empty_trained"] == 1
    assert "1 training questions have an empty gold result" in out + said
    assert facts["empty_answers"]["right"] == 1
    assert f"is right for 1 of {facts['empty_answers']['questions']} training questions, and earns " in out + said


def test_a_benchmark_is_checked_and_reviewed_alone_where_the_training_data_is_not_there(spider, sqltrain, monkeypatch):
    """`check sql_trail include=local/bird_dev --data` names sources without a path (docs/reference/benchmarks.md)."""
    monkeypatch.chdir(spider.parent)
    rows = json.loads((spider / "dev.json").read_text())[:2]
    rows[1]["question"] = "How many ships?"
    (spider / "dev.json").write_text(json.dumps(rows))
    build_database(spider / "database" / "harbour" / "harbour.sqlite", "INSERT INTO ship VALUES ('Ada')")
    test = f"data.test=[{{kind: spider, split: dev, path: {spider}}}]"
    note = "data.sft, data.rl.0, data.rl.1, data.dev without a path: these questions are not checked"
    out = sqltrain.ok("check", "sql_trail", test, "--data")
    assert note in out
    assert "2 gold SQL of sql_trail: 2 earn the full reward" in out
    reviewed = sqltrain.ok("review", "sql_trail", test, "--data")
    assert note in reviewed
    assert "nothing speaks against the gold SQL of sql_trail: 2 looked at" in reviewed
    assert "Set it, such as data.rl.0.path=FOLDER" in sqltrain.refused("check", "sql_trail", "--data")


def test_a_recipe_of_ones_own_is_checked_with_its_own_variants_and_a_reward_that_fails_is_one_line(tmp_path, sqltrain):
    """The miniature's variants name terms of its panel, which this recipe leaves out."""
    (tmp_path / "own.py").write_text(
        "from pipelines.core.registry import reward\n\n\n"
        "@reward('own_term')\ndef own_term(outcome):\n    return float(len(outcome.nothing))\n"
    )
    pool = "{kind: miniature, split: SPLIT, options: {databases: 1, questions: 2}}"
    train, dev, test = (pool.replace("SPLIT", name) for name in ("train", "dev", "test"))
    (tmp_path / "own.yaml").write_text(
        "include: [recipes/miniature]\nplugins: [own.py]\nrewards:\n  - {term: own_term, weight: 1}\n"
        f"data: {{sft: {train}, rl: [{train}], dev: {dev}, test: [{test}]}}\n"
        "variants:\n  short: [grpo.steps=3]\n"
    )
    code, out, err = sqltrain("check", str(tmp_path / "own.yaml"), f"store={tmp_path / 's'}")
    assert "1 recipe with 1 variants: all load" in out
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: reward term 'own_term' fails on question ")
    assert "AttributeError: 'Outcome' object has no attribute 'nothing'" in line
    assert line.endswith(f"Look at {tmp_path / 'own.py'}, line 6.")
