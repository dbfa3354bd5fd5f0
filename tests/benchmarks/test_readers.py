"""Readers keep good rows, and say of each bad one where it stands and what is wrong with it."""

import hashlib
import json
import sqlite3

import pytest
from test_benchmarks import read, reasons, write

from pipelines.benchmarks import base
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.types import Database, Example
from pipelines.recipe import recipes
from pipelines.recipe.config import Source
from tests.fakes import build_database


def make_database(path):
    build_database(
        path,
        "CREATE TABLE singer (singer_id INTEGER PRIMARY KEY, name TEXT, country TEXT)",
        "INSERT INTO singer VALUES (1, 'Ann', 'FR'), (2, 'Bo', 'ES')",
    )
    return path


def write_json(path, value):
    write(path, json.dumps(value))


def read_own(folder, *rows, **settings):
    """The rows as a user's own questions, read."""
    write(folder / "own.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return read("jsonl", folder / "own.jsonl", folder / "stage", **settings)


def ask(database):
    return {"question": "q", "database": database, "sql": "SELECT 1"}


def countries(loaded, root):
    """What the database of each question holds."""
    found = [sqlite3.connect(example.database.location) for example in base.resolve_locations(loaded.examples, root)]
    return [connection.execute("SELECT DISTINCT country FROM singer").fetchall() for connection in found]


def row(**changes):
    return {"db_id": "music", "question": "How many singers?", "query": "SELECT count(*) FROM singer"} | changes


@pytest.fixture
def spider(tmp_path):
    folder = tmp_path / "spider"
    make_database(folder / "database" / "music" / "music.sqlite")
    write_json(folder / "dev.json", [row(), row(question="Names?", query="SELECT name FROM singer")])
    return folder


def test_spider_rows_become_examples_with_official_hardness(spider, tmp_path):
    loaded = read("spider", spider, tmp_path / "stage")
    first = loaded.examples[0]
    assert (first.id, first.source, first.hardness) == ("spider_dev_0", "spider", "easy")
    assert (first.question, first.gold_sql) == ("How many singers?", "SELECT count(*) FROM singer")
    assert (len(loaded.examples), loaded.quarantine) == (2, [])
    # a location is relative until it is resolved, and an address stays
    assert first.database.location.startswith("databases/spider_")
    (resolved,) = base.resolve_locations([first], tmp_path / "stage")
    assert sqlite3.connect(resolved.database.location).execute(first.gold_sql).fetchall() == [(2,)]
    example = Example("1", "q", Database("music", "postgres", "postgresql://host/music"), "SELECT 1")
    assert base.resolve_locations([example], tmp_path) == [example]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(db_id="nowhere"), "missing_database"),
        (row(db_id="../music"), "bad_database_id"),
        (row(db_id="torn"), "not_a_database"),
        (row(question="  "), "empty_question"),
        ({"db_id": "music", "question": "q"}, "empty_query"),
        (row(query=["SELECT 1"]), "wrong_type"),
        (row(question="\ud800"), "invalid_unicode"),
        ("SELECT 1", "not_an_object"),
    ],
)
def test_a_bad_spider_row_is_quarantined_under_its_place(spider, tmp_path, bad, reason):
    torn = spider / "database" / "torn" / "torn.sqlite"
    torn.parent.mkdir()
    torn.write_bytes(b"<html>not found</html>")
    write_json(spider / "dev.json", [row(), bad])
    loaded = read("spider", spider, tmp_path / "stage")
    assert [example.id for example in loaded.examples] == ["spider_dev_0"]
    assert reasons(loaded) == [("dev.json[1]", reason)]


def test_spider_train_is_two_files_and_test_has_databases_of_its_own(spider, tmp_path):
    write_json(spider / "train_spider.json", [row()])
    write_json(spider / "train_others.json", [row()])
    write_json(spider / "train.json", [row()] * 5)
    loaded = read("spider", spider, tmp_path / "stage", "train")
    assert [example.id for example in loaded.examples] == ["spider_train_spider_0", "spider_train_others_0"]
    make_database(spider / "test_database" / "opera" / "opera.sqlite")
    write_json(spider / "test.json", [row(db_id="opera"), row()])
    loaded = read("spider", spider, tmp_path / "stage", "test")
    assert [example.database.id for example in loaded.examples] == ["opera"]
    assert reasons(loaded) == [("test.json[1]", "missing_database")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        (b'[{"db_id": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "line 1 is not UTF-8"),
        (b'{"a": 1}', "not a list"),
    ],
)
def test_a_missing_or_torn_question_file_stops_with_the_layout_as_a_hint(spider, tmp_path, text, words):
    file = spider / "dev.json"
    file.unlink() if text is None else file.write_bytes(text)
    with pytest.raises(DataError, match=words) as caught:
        read("spider", spider, tmp_path / "stage")
    assert "database/<db_id>/<db_id>.sqlite" in caught.value.hint


def test_a_source_without_a_path_or_with_an_unknown_option_is_the_users_mistake(spider, tmp_path):
    with pytest.raises(DataError, match="needs a path"):
        base.read(Source(kind="spider"), 0, tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        read("spider", spider / "nowhere", tmp_path)
    with pytest.raises(RecipeError, match=r"reader 'spider' has no option 'varient'. It has: variant"):
        recipes.load("miniature", ["data.dev={kind: spider, options: {varient: dk}}"])


def test_unreadable_gold_is_left_to_the_gold_check_and_a_long_name_is_quarantined(spider, tmp_path):
    write_json(spider / "dev.json", [row(query="SELEKT ((")])
    assert read("spider", spider, tmp_path / "stage").examples[0].hardness in ("easy", "medium", "hard", "extra")
    write_json(spider / "dev.json", [row(), row(db_id="x" * 300)])
    assert reasons(read("spider", spider, tmp_path / "stage")) == [("dev.json[1]", "bad_database_id")]


def test_count_takes_a_seeded_sample_in_the_sources_order(spider, tmp_path):
    write_json(spider / "dev.json", [row(question=f"q{number}") for number in range(50)])
    first = read("spider", spider, tmp_path / "a", count=10).examples
    assert first == read("spider", spider, tmp_path / "b", count=10).examples
    numbers = [int(example.question[1:]) for example in first]
    assert numbers == sorted(numbers)
    assert numbers != list(range(10))


def test_hardness_keeps_only_the_levels_asked_for(spider, tmp_path):
    hard = "SELECT name FROM singer WHERE singer_id IN (SELECT singer_id FROM singer)"
    write_json(spider / "dev.json", [row(), row(query=hard)])
    loaded = read("spider", spider, tmp_path / "stage", hardness=("hard",))
    assert [example.gold_sql for example in loaded.examples] == [hard]


@pytest.fixture
def bird(tmp_path):
    folder = tmp_path / "bird"
    make_database(folder / "dev_databases" / "music" / "music.sqlite")
    question = {"question_id": 7, "db_id": "music", "question": "How many French singers?", "difficulty": "simple"}
    question |= {"evidence": "French refers to country = 'FR'"}
    question |= {"SQL": "SELECT COUNT(*) FROM singer WHERE country = 'FR'"}
    write_json(folder / "dev.json", [question, question | {"evidence": ""}, question | {"SQL": ""}])
    return folder


def test_bird_keeps_evidence_and_difficulty_and_mini_dev_has_a_name_of_its_own(bird, tmp_path):
    loaded = read("bird", bird, tmp_path / "stage")
    first, second = loaded.examples
    assert (first.id, first.evidence) == ("bird_dev_0", "French refers to country = 'FR'")
    assert dict(first.meta) == {"question_id": 7, "difficulty": "simple"}
    assert second.evidence == ""
    assert reasons(loaded) == [("dev.json[2]", "empty_sql")]
    (bird / "dev.json").rename(bird / "mini_dev_sqlite.json")
    assert len(read("bird", bird, tmp_path / "stage").examples) == 2


@pytest.mark.parametrize(("dialect", "engine"), [("postgresql", "postgres"), ("mysql", "mysql")])
def test_bird_mini_dev_in_another_dialect_asks_one_database_of_a_server(bird, tmp_path, dialect, engine):
    file = bird / f"mini_dev_{dialect}.json"
    (bird / "dev.json").rename(file)
    asked = {"questions": file.name, "address": f"{dialect}://reader@db/BIRD"}
    loaded = read("bird", bird, tmp_path / "stage", options=asked)
    assert [(one.database.id, one.database.engine) for one in loaded.examples] == [("music", engine)] * 2
    assert loaded.examples[0].database.location == asked["address"]
    assert set(base.files(Source(kind="bird", path=str(bird), options=asked))) == {file}
    for address, reason in ((f"{dialect}://reader:secret@db/BIRD", "password_in_address"), ("db/BIRD", "bad_address")):
        refused = read("bird", bird, tmp_path / "stage", options=asked | {"address": address})
        assert {row.reason for row in refused.quarantine} - {"empty_sql"} == {reason}


def test_jsonl_reads_a_users_own_questions(tmp_path):
    make_database(tmp_path / "mine" / "sales.sqlite")
    lines = [
        '\ufeff{"question": "Singers?", "database": "sales.sqlite", "sql": "SELECT 1", "evidence": "none", "id": "a"}',
        "",
        '{"question": "Names?", "db": "sales.sqlite", "query": "SELECT name FROM singer"}',
    ]
    (tmp_path / "mine" / "own.jsonl").write_text("\n".join(lines), encoding="utf-8")
    loaded = read("jsonl", tmp_path / "mine" / "own.jsonl", tmp_path / "stage")
    assert [example.id for example in loaded.examples] == ["a", "own_3"]
    assert [example.database.id for example in loaded.examples] == ["sales", "sales"]
    assert loaded.quarantine == []


def test_jsonl_says_of_each_bad_line_what_is_wrong(tmp_path):
    lines = [
        b'{"question": "q", "database": "a.sqlite", "sql": "SELECT 1"',
        b'["question"]',
        b'{"question": "q", "database": "gone.sqlite", "sql": "SELECT 1"}',
        b'{"question": "\xff", "database": "a.sqlite", "sql": "SELECT 1"}',
        b'{"question": "q", "database": "postgresql://me:secret@host/shop", "sql": "SELECT 1"}',
        b"[" * 100_000,
    ]
    (tmp_path / "own.jsonl").write_bytes(b"\n".join(lines))
    loaded = read("jsonl", tmp_path / "own.jsonl", tmp_path / "stage")
    assert loaded.examples == []
    told = ("not_json", "not_an_object", "missing_database", "not_utf8", "password_in_address", "not_json")
    assert reasons(loaded) == [(f"own.jsonl:{line}", reason) for line, reason in enumerate(told, 1)]
    assert "secret" not in str(loaded.quarantine)


def test_jsonl_databases_with_equal_file_names_stay_apart(tmp_path):
    for folder, country in (("east", "JP"), ("west", "US")):
        build_database(make_database(tmp_path / folder / "shop.sqlite"), f"UPDATE singer SET country = '{country}'")
    loaded = read_own(tmp_path, ask("east/shop.sqlite"), ask("west/shop.sqlite"))
    assert [example.database.id for example in loaded.examples] == ["east/shop", "west/shop"]
    assert countries(loaded, tmp_path / "stage") == [[("JP",)], [("US",)]]


def test_jsonl_looks_a_name_up_in_a_folder_of_databases_and_rejects_a_second_row_with_the_same_id(tmp_path):
    make_database(tmp_path / "all" / "music" / "music.sqlite")
    row = {"id": "x", "question": "q", "db_id": "music", "sql": "SELECT 1"}
    loaded = read_own(tmp_path, row, row, options={"databases": "all"})
    assert [example.database.engine for example in loaded.examples] == ["sqlite"]
    assert reasons(loaded) == [("x", "duplicate_id")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (".", "bad_database_id"),
        ("/", "bad_database_id"),
        ("..", "missing_database"),
        ("a\0b.sqlite", "zero_byte"),
        ("~nobody_here/x.sqlite", "bad_database_id"),
        ("x" * 300 + ".sqlite", "bad_database_id"),
        ("x" * 300 + ".duckdb", "bad_database_id"),
        ("mysql://me:secret@host/shop", "password_in_address"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"databases": "all"}])
def test_jsonl_sets_a_row_aside_whose_database_can_be_no_file(tmp_path, name, reason, options):
    make_database(tmp_path / "a.sqlite")
    loaded = read_own(tmp_path, ask("a.sqlite"), ask(name), options=options)
    assert [example.database.id for example in loaded.examples] == ["a"]
    assert reasons(loaded) == [("own.jsonl:2", reason)]
    assert "secret" not in str(loaded.quarantine)


def test_a_name_that_is_looked_up_and_the_file_beside_it_are_two_databases(tmp_path):
    for place, country in (("shop.sqlite", "JP"), ("all/shop.sqlite", "US")):
        build_database(make_database(tmp_path / place), f"UPDATE singer SET country = '{country}'")
    for _ in range(2):  # the second time over what a killed run has left
        loaded = read_own(tmp_path, *map(ask, ("shop", "shop.sqlite", "shop")), options={"databases": "all"})
        assert countries(loaded, tmp_path / "stage") == [[("US",)], [("JP",)], [("US",)]]
    mark = hashlib.sha256(f"{tmp_path / 'own.jsonl'}\0.".encode()).hexdigest()[:6]
    assert loaded.examples[0].database.location == f"databases/jsonl_{mark}/shop.sqlite"  # as where nothing clashes


@pytest.mark.parametrize(("name", "fits"), [("x" * 200, True), ("x" * 201, False), ("é" * 101, False), ("a b.c", True)])
def test_a_plain_name_is_no_longer_than_a_files_name_may_be(name, fits):
    assert base.is_plain_name(name) is fits


def test_a_bird_description_may_be_of_any_length_and_of_any_line_ends(bird, tmp_path):
    folder = bird / "dev_databases" / "music" / "database_description"
    folder.mkdir()
    (folder / "singer.csv").write_bytes(b'original_column_name,column_description\rname,"' + b"x" * 140_000 + b'"\r')
    loaded = read("bird", bird, tmp_path / "stage", options={"descriptions": True})
    assert loaded.examples[1].evidence == f"singer.name: {'x' * 199}…"
