"""Leakage: training questions that the benchmark asks too, by three measures."""

import json

from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.core.types import Database, Example
from pipelines.curation import leakage
from pipelines.recipe import recipes
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Silent
from tests.fakes import build_database


def ask(id, question, sql, database="d"):
    return Example(id, question, Database(database, "sqlite", ""), sql)


HELD_OUT = [
    ask("h1", "How many singers are there?", "SELECT count(*) FROM singer"),
    ask("h2", "Show the names of all clubs in Köln.", "SELECT name FROM club WHERE city = 'Köln'"),
    ask("h3", "2023年有多少学生？", "SELECT count(*) FROM student WHERE year = 2023"),
]


def test_each_kind_is_found_once_and_the_strictest_wins():
    train = [
        ask("a", "How many singers are there? ", "SELECT count(*) FROM singer"),
        ask("b", "in koln, the clubs' names", "SELECT 1"),
        ask("c", "Which clubs play in Bonn?", "select T1.name from club as T1 where T1.city = 'Bonn'"),
        ask("d", "How many clubs?", "SELECT count(*) FROM club"),
        ask("e", "2023年的销售额是多少？", "SELECT sum(price) FROM sale WHERE year = 2023"),  # its number is alike
        ask("f", "2023年有多少学生 ?", "SELECT 1"),
    ]
    shown = [(one.kind, one.train, one.held_out) for one in leakage.leaks(train, HELD_OUT)]
    assert shown == [("exact", "a", "h1"), ("normalised", "b", "h2"), ("sql", "c", "h2"), ("normalised", "f", "h3")]


def test_the_same_words_about_another_database_are_told_apart():
    found = leakage.leakage_report(
        [ask("a", "How many singers are there?", "SELECT count(*) FROM singer", "e")], HELD_OUT
    )
    assert found["any_database"] == {"exact": 1, "normalised": 0, "sql": 0}
    assert found["same_database"] == {"exact": 0, "normalised": 0, "sql": 0}
    assert found["shared_databases"] == []
    held_out = [*HELD_OUT, ask("h3", "Is it open?", "SELECT open FROM shop", "e")]  # so the benchmark asks e too
    assert list(leakage.leaks([ask("a", "Count them.", "SELECT count(*) FROM singer", "e")], held_out)) == []
    other = leakage.leaks([ask("a", "Show me all", "SELECT a FROM t")], [ask("h", "What is it of", "SELECT b FROM u")])
    assert list(other) == []


def test_a_leak_on_the_same_database_is_not_hidden_by_the_same_words_on_another():
    """The exact question stands on e; on d, which the training question asks, it stands in other words."""
    held_out = [
        ask("e", "How many items are there?", "SELECT count(*) FROM box", "e"),
        ask("d", "how many items are there ?", "SELECT count(*) FROM item"),
    ]
    train = [
        ask("words", "How many items are there?", "SELECT sum(1) FROM item"),
        ask("query", "How many items are there?", "SELECT COUNT(*) FROM item", "d"),
        ask("elsewhere", "How many items are there?", "SELECT 1", "f"),
    ]
    found = [(one.kind, one.train, one.held_out, one.same_database) for one in leakage.leaks(train, held_out)]
    assert found == [
        ("normalised", "words", "d", True),
        ("normalised", "query", "d", True),
        ("exact", "elsewhere", "e", False),
    ]


def test_a_database_is_the_same_by_whatever_name_a_source_calls_it(tmp_path):
    """Feedback names a file by its whole path; the held-out questions' reader calls it by a short name."""
    file = tmp_path / "shop.sqlite"
    file.touch()
    (tmp_path / "link.sqlite").symlink_to(file)
    question, sql = "How many singers are there?", "SELECT count(*) FROM singer"
    held_out = [Example("h", question, Database("shop", "sqlite", str(file)), sql)]
    named = Database(str(file), "sqlite", str(tmp_path / "link.sqlite"))
    train = [Example("a", question, named, sql), Example("b", "Other words", named, "select COUNT(*) from singer")]
    found = leakage.leakage_report(train, held_out)
    assert found["same_database"] == {"exact": 1, "normalised": 0, "sql": 1}
    assert found["shared_databases"] == ["shop"]


def test_the_data_stage_reports_each_training_pool(tmp_path):
    """The RL pool asks one of the held-out questions in other words; the SFT pool none."""
    build_database(
        tmp_path / "clubs.sqlite",
        "CREATE TABLE club (name TEXT, city TEXT)",
        "INSERT INTO club VALUES ('ajax', 'koeln')",
    )
    asked = {
        "sft": ("Which clubs are there?", "SELECT name FROM club"),
        "rl": ("In what city does each club play?", "SELECT city FROM club"),
        "dev": ("How many clubs?", "SELECT count(*) FROM club"),
        "test": ("What city does each club play in", "SELECT city FROM club WHERE name <> ''"),
    }
    for pool, (question, sql) in asked.items():
        row = {"id": pool, "question": question, "sql": sql, "database": str(tmp_path / "clubs.sqlite")}
        (tmp_path / f"{pool}.jsonl").write_text(json.dumps(row) + "\n")
    source = {pool: f"{{kind: jsonl, path: {tmp_path / pool}.jsonl}}" for pool in asked}
    changes = [f"data.{pool}={source[pool]}" for pool in ("sft", "dev")]
    changes += [f"data.{pool}=[{source[pool]}]" for pool in ("rl", "test")]
    recipe, store = recipes.load("miniature", changes), Store(tmp_path / "store")
    steps = graph.plan(recipe, store, among=("data", "test", "leakage"))
    for step in steps:
        stage_making.execute(step, recipe, store, Silent(), steps)
    assert read_json(steps[0].folder / "leakage.json")["rl"]["leaks"] == []  # of the dev pool
    found = read_json(steps[-1].folder / "leakage.json")
    assert found["sft"]["same_database"] == {"exact": 0, "normalised": 0, "sql": 0}
    assert found["rl"]["same_database"] == {"exact": 0, "normalised": 1, "sql": 0}
    assert [(one["train"], one["held_out"]) for one in found["rl"]["leaks"]] == [("rl", "test")]
