"""Benchmarks in the layouts that their authors ship, written here at the size of a few rows."""

import json

import pytest

from pipelines.benchmarks import base, synsql
from pipelines.core.errors import DataError
from pipelines.recipe.config import Source
from tests.fakes import build_database


def make_database(path):
    build_database(
        path,
        "CREATE TABLE ship (id INTEGER PRIMARY KEY, name TEXT, flag TEXT)",
        "INSERT INTO ship VALUES (1, 'Aurora', 'NO'), (2, 'Egret', 'LR')",
    )


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read(kind, path, root, split="dev", **settings):
    return base.read(Source(kind=kind, path=str(path), split=split, **settings), seed=0, root=root)


def reasons(loaded):
    return [(rejected.row, rejected.reason) for rejected in loaded.quarantine]


def spider_row(db="harbour", **changes):
    return {"db_id": db, "question": "How many ships?", "query": "SELECT count(*) FROM ship"} | changes


# Spider's variants, in their own repositories' folders beside Spider's databases


@pytest.fixture
def spider(tmp_path):
    folder = tmp_path / "spider"
    make_database(folder / "database" / "harbour" / "harbour.sqlite")
    return folder


def test_spider_dk_asks_of_its_own_databases_and_of_spiders(spider, tmp_path):
    write(spider / "Spider-DK" / "Spider-DK.json", json.dumps([spider_row(), spider_row("new_harbour")]))
    make_database(spider / "Spider-DK" / "database" / "new_harbour" / "new_harbour.sqlite")
    loaded = read("spider", spider, tmp_path / "stage", options={"variant": "dk"})
    assert [(one.id, one.database.id) for one in loaded.examples] == [
        ("spider_dk_Spider-DK_0", "harbour"),
        ("spider_dk_Spider-DK_1", "new_harbour"),
    ]
    assert all((tmp_path / "stage" / one.database.location).is_file() for one in loaded.examples)


def test_spider_syn_has_a_train_part_and_its_own_question(spider, tmp_path):
    row = spider_row(SpiderQuestion="How many ships?", SpiderSynQuestion="How many vessels?")
    write(spider / "Spider-Syn" / "Spider-Syn" / "train_spider.json", json.dumps([row]))
    (example,) = read("spider", spider, tmp_path / "stage", "train", options={"variant": "syn"}).examples
    assert (example.question, example.source) == ("How many vessels?", "spider_syn")
    write(spider / "dev.json", json.dumps([row]))
    (example,) = read("spider", spider, tmp_path / "stage", options={"variant": "syn"}).examples
    assert example.question == "How many vessels?"
    with pytest.raises(DataError, match=r"no such file|cannot read"):
        read("spider", tmp_path / "none", tmp_path / "stage", options={"variant": "syn"})


def test_spider_realistic_keeps_its_name_and_a_missing_file_is_named(spider, tmp_path):
    write(spider / "spider-realistic.json", json.dumps([spider_row()]))
    (example,) = read("spider", spider, tmp_path / "stage", options={"variant": "realistic"}).examples
    assert example.source == "spider_realistic"
    with pytest.raises(DataError, match=r"Spider-DK\.json"):
        read("spider", spider, tmp_path / "stage", options={"variant": "dk"})


def test_a_test_database_may_bear_a_dev_databases_name(spider, tmp_path):
    make_database(spider / "test_database" / "harbour" / "harbour.sqlite")
    write(spider / "dev.json", json.dumps([spider_row()]))
    write(spider / "test.json", json.dumps([spider_row()]))
    places = {
        read("spider", spider, tmp_path / "stage", split).examples[0].database.location for split in ("dev", "test")
    }
    assert len(places) == 2


# KaggleDBQA


def test_kaggledbqa_splits_are_files_of_each_database(tmp_path):
    make_database(tmp_path / "kaggle" / "databases" / "harbour" / "harbour.sqlite")
    for ending, count in (("", 3), ("_fewshot", 1), ("_test", 2)):
        write(tmp_path / "kaggle" / "examples" / f"harbour{ending}.json", json.dumps([spider_row()] * count))
    counts = {
        split: len(read("kaggledbqa", tmp_path / "kaggle", tmp_path / "stage", split).examples)
        for split in ("dev", "train", "test")
    }
    assert counts == {"dev": 3, "train": 1, "test": 2}
    with pytest.raises(DataError, match="no questions of split test"):
        read("kaggledbqa", tmp_path, tmp_path / "stage", "test")


# BIRD's column descriptions


@pytest.fixture
def bird(tmp_path):
    folder = tmp_path / "bird"
    make_database(folder / "dev_databases" / "harbour" / "harbour.sqlite")
    row = {"question_id": 7, "db_id": "harbour", "question": "Norwegian ships?", "evidence": "Norwegian: flag = 'NO'"}
    row |= {"SQL": "SELECT name FROM ship WHERE flag = 'NO'", "difficulty": "simple"}
    write(folder / "dev.json", json.dumps([row]))
    head = "original_column_name,column_name,column_description,data_format,value_description\n"
    text = head + 'flag,,country of registry,text,"NO: Norway\nLR: Liberia"\nname,,name,text,\n id ,,number,integer,\n'
    place = folder / "dev_databases" / "harbour" / "database_description" / "ship.csv"
    place.parent.mkdir()
    place.write_bytes(text.replace("number", "num\xe9ro").encode("cp1252"))  # some of BIRD's files are Windows text
    return folder


def test_bird_descriptions_join_the_evidence_where_they_say_more_than_the_name(bird, tmp_path):
    (example,) = read("bird", bird, tmp_path / "stage", options={"descriptions": True}).examples
    assert example.evidence.splitlines() == [
        "Norwegian: flag = 'NO'",
        "ship.flag: country of registry; NO: Norway LR: Liberia",
        "ship.id: numéro",
    ]
    (plain,) = read("bird", bird, tmp_path / "stage").examples
    assert plain.evidence == "Norwegian: flag = 'NO'"


# Spider 2.0-lite


@pytest.fixture
def spider2(tmp_path):
    folder = tmp_path / "spider2-lite"
    make_database(folder / "resource" / "databases" / "spider2-localdb" / "harbour.sqlite")
    write(folder / "resource" / "documents" / "ships.md", "A ship sails under one flag.\n")
    rows = [
        {"instance_id": "bq001", "db": "ga4", "question": "?", "external_knowledge": None},
        {"instance_id": "local001", "db": "harbour", "question": "Which ships?", "external_knowledge": "ships.md"},
        {"instance_id": "local002", "db": "harbour", "question": "Flags?", "external_knowledge": None},
        {"instance_id": "local003", "db": "nowhere", "question": "Gone?", "external_knowledge": None},
        {"instance_id": "local004", "db": "harbour", "question": "No gold?", "external_knowledge": None},
    ]
    write(folder / "spider2-lite.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    gold = folder / "evaluation_suite" / "gold"
    standard = [{"instance_id": row["instance_id"], "condition_cols": [], "ignore_order": True} for row in rows]
    standard[2] |= {"condition_cols": [1]}
    write(gold / "spider2lite_eval.jsonl", "".join(json.dumps(row) + "\n" for row in standard))
    write(gold / "exec_result" / "local001.csv", "name\nAurora\nEgret\n")
    write(gold / "exec_result" / "local002_a.csv", "n,flag\n1,NO\n1,LR\n")
    write(gold / "exec_result" / "local002_b.csv", "n,flag\n2,NO\n")
    write(gold / "exec_result" / "local003.csv", "n\n1\n")
    write(gold / "sql" / "local001.sql", "SELECT name FROM ship\n")
    return folder


def test_spider2_takes_the_instances_that_run_on_sqlite(spider2, tmp_path):
    loaded = read("spider2", spider2, tmp_path / "stage", "test")
    first, second = loaded.examples
    assert (first.id, first.evidence, first.gold_sql) == (
        "spider2_local001",
        "A ship sails under one flag.",
        "SELECT name FROM ship",
    )
    assert first.meta["gold_results"] == {
        "results": [[["name"], ["Aurora"], ["Egret"]]],
        "columns": [[]],
        "ignore_order": True,
    }
    assert second.gold_sql == ""
    assert second.meta["gold_results"]["columns"] == [[1], [1]]
    assert reasons(loaded) == [
        ("spider2-lite.jsonl:local003", "missing_database"),
        ("spider2-lite.jsonl:local004", "missing_gold"),
    ]


def test_a_gold_result_without_gold_sql_only_needs_its_database(spider2, tmp_path):
    from pipelines.sql.engine import Limits, SqlEngine

    loaded = read("spider2", spider2, tmp_path / "stage", "test")
    with SqlEngine(Limits(timeout_s=5)) as engine:
        good, rejected = base.check_gold(loaded.examples, engine, tmp_path / "stage")
    assert [one.id for one in good] == ["spider2_local001", "spider2_local002"]
    assert rejected == []


def test_spider2_questions_and_results_may_hold_anything(spider2, tmp_path):
    gold = spider2 / "evaluation_suite" / "gold" / "exec_result"
    rows = [
        {"instance_id": "local001", "db": "harbour", "question": "a\u2028b\u0085c", "external_knowledge": None},
        {"instance_id": "local002", "db": "x" * 300, "question": "?", "external_knowledge": None},
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (spider2 / "spider2-lite.jsonl").write_text(lines, encoding="utf-8")
    write(gold / "local001.csv", "n\n" + "x" * 140_000 + "\n")
    loaded = read("spider2", spider2, tmp_path / "stage", "test")
    (one,) = loaded.examples
    assert (one.question, len(one.meta["gold_results"]["results"][0][1][0])) == ("a\u2028b\u0085c", 140_000)
    assert reasons(loaded) == [("spider2-lite.jsonl:local002", "unreadable_database")]


# SynSQL-2.5M


def synsql_row(number, **changes):
    row = {"db_id": "harbour", "question": f"Question {number} ?", "sql": "SELECT name FROM ship", "cot": "x" * 50}
    return row | {"sql_complexity": "Simple", "question_style": "Formal", "external_knowledge": ""} | changes


@pytest.fixture
def synthetic(tmp_path):
    folder = tmp_path / "synsql"
    make_database(folder / "databases" / "harbour" / "harbour.sqlite")
    levels = ("Simple", "Moderate", "Complex", "Highly Complex")
    rows = [synsql_row(number, sql_complexity=levels[number % 4]) for number in range(40)]
    rows[3] |= {"db_id": "harbour.db", "external_knowledge": "NO is Norway."}
    rows.append("no row")
    write(folder / "data.json", json.dumps(rows, indent=1))
    return folder


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_synsql_rows_are_the_same_however_the_file_is_cut(synthetic, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(synsql, "CHUNK", chunk)
    loaded = read("synsql", synthetic, tmp_path / "stage", "train")
    assert [one.id for one in loaded.examples] == [f"synsql_{number}" for number in range(40)]
    third = loaded.examples[3]
    assert (third.database.id, third.evidence) == ("harbour", "NO is Norway.")
    assert third.meta == {"difficulty": "Highly Complex", "style": "Formal"}
    assert reasons(loaded) == [("data.json[40]", "not_an_object")]


def test_a_synsql_file_in_another_encoding_is_told_in_one_line(synthetic, tmp_path):
    data = synthetic / "data.json"
    data.write_bytes(data.read_bytes().replace(b"Norway", b"Norv\xe8ge"))
    with pytest.raises(DataError, match=r"data\.json is not UTF-8"):
        read("synsql", synthetic, tmp_path / "stage", "train")


def test_synsql_levels_and_a_seeded_sample(synthetic, tmp_path):
    options = {"complexity": ["Moderate", "Complex"]}
    every = read("synsql", synthetic, tmp_path / "stage", "train", options=options).examples
    assert len(every) == 20
    some = read("synsql", synthetic, tmp_path / "stage", "train", options=options, count=5).examples
    again = read("synsql", synthetic, tmp_path / "stage", "train", options=options, count=5).examples
    assert some == again
    assert len(some) == 5
    assert [one.id for one in every if one in some] == [one.id for one in some]  # in the file's order


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"db_id": 1}', "does not begin with a JSON list"),
        ('[{"db_id": "a"}, {"db_id"', "ends within item 1"),
        ("", "does not begin with a JSON list"),
    ],
)
def test_a_torn_synsql_file_says_where(tmp_path, text, message):
    write(tmp_path / "synsql" / "data.json", text)
    with pytest.raises(DataError, match=message):
        read("synsql", tmp_path / "synsql", tmp_path / "stage", "train")


def test_a_row_that_is_no_json_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(synsql, "CHUNK", 64)
    monkeypatch.setattr(synsql, "MOST_CHARS", 256)
    write(tmp_path / "synsql" / "data.json", '[{"db_id": nonsense ' + "x" * 5000)
    with pytest.raises(DataError, match="item 0 is not JSON"):
        read("synsql", tmp_path / "synsql", tmp_path / "stage", "train")
