"""A user's own questions: a CSV file as good as JSON lines, and one file cut so that nothing is asked on two sides."""

import json

import pytest

from pipelines.benchmarks import base
from pipelines.benchmarks.splitting import Shares, cut_questions
from pipelines.core.errors import DataError
from pipelines.core.types import ABSTENTION, Database, Example
from pipelines.curation.leakage import leaks
from pipelines.recipe import recipes
from pipelines.recipe.config import Source
from pipelines.recipe.yaml_files import read_yaml
from pipelines.stages.added_benchmarks import add_benchmark
from tests.fakes import build_database

SHOP = Database("shop", "sqlite", "shop.sqlite")
TABLES = ("customer", "purchase", "shelf", "supplier")
COLUMNS = ("name", "city", "price", "stock", "made")


@pytest.fixture
def folder(tmp_path):
    build_database(
        tmp_path / "shop.sqlite",
        "CREATE TABLE customer (name TEXT, city TEXT)",
        "INSERT INTO customer VALUES ('Ada', 'Paris, France')",
    )
    return tmp_path


def read(path, split="test", **options):
    source = Source.model_validate({"kind": path.suffix[1:], "path": str(path), "split": split, "options": options})
    return base.read(source, 0, path.parent / "stage")


def asked(question, sql):
    return Example(question, question, SHOP, sql)


def own(count=60):
    """Families of questions that differ in words or in values alone, each over several tables and columns."""
    made = [
        asked(f"{wording} {column} of {table} {value} ?", f"SELECT {column} FROM {table} WHERE id = {value}")
        for value in (1, 2)
        for wording in ("which", "give the")
        for table in TABLES
        for column in COLUMNS
    ]
    return made[:count]


def test_quotes_within_a_cell_close_nothing_and_a_row_with_an_unquoted_comma_is_set_aside(folder):
    (folder / "own.csv").write_text('question,sql\nhow long is a 5" pen,SELECT 1\n"a ""5"" inch pen",SELECT 2\n')
    loaded = read(folder / "own.csv", database="shop.sqlite")
    assert [one.question for one in loaded.examples] == ['how long is a 5" pen', 'a "5" inch pen']
    (folder / "own.csv").write_text("question,sql\na,SELECT 1, 2\nb,SELECT 1\n")
    loaded = read(folder / "own.csv", database="shop.sqlite")
    assert [one.question for one in loaded.examples] == ["b"]
    assert [(row.row, row.reason) for row in loaded.quarantine] == [("own.csv:2", "too_many_cells")]
    (folder / "own.csv").write_text("question,sql\na,SELECT 1\n")
    with pytest.raises(DataError, match=r"own\.csv has no column database; its columns: question, sql"):
        read(folder / "own.csv")


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_a_csv_file_is_read_by_its_header_whatever_parts_its_cells(folder, sign):
    lines = [
        ("\ufeffQuestion", "SQL", "note", "evidence"),
        ("who is there ?", "SELECT name FROM customer", "x", "all"),
        ('"in Paris, France ?"', "\"SELECT name FROM customer WHERE city = 'Paris, France'\"", "", ""),
        ("", "", "", ""),
    ]
    (folder / "own.csv").write_text("\n".join(sign.join(line) for line in lines), encoding="utf-8")
    loaded = read(folder / "own.csv", database="shop.sqlite")
    assert [(one.id, one.question, one.gold_sql, one.evidence) for one in loaded.examples] == [
        ("own_2", "who is there ?", "SELECT name FROM customer", "all"),
        ("own_3", "in Paris, France ?", "SELECT name FROM customer WHERE city = 'Paris, France'", ""),
    ]
    assert {one.database.id for one in loaded.examples} == {"shop"}
    assert loaded.quarantine == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\na,b\n", "own.csv has no column sql; its columns: question, answer. Its first line names"),
        ("frage;sql\na;b\n", "own.csv has no column question; its columns: frage, sql"),
        ("", "own.csv has no column question and no column sql; its columns: none"),
        ('question,sql\na,SELECT 1\n"b,SELECT 2\nc,SELECT 3\n', "own.csv is not CSV: a quote that opens in line 3 is"),
        ('question,"sql\na,SELECT 1\n', "own.csv is not CSV: a quote that opens in line 1 is never closed"),
        ("question,sql\n\xe4,b\n".encode("latin-1"), "own.csv, line 2 is not UTF-8. Save it as UTF-8."),
    ],
)
def test_a_csv_file_that_lacks_something_says_what(folder, text, message):
    (folder / "own.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError) as caught:
        read(folder / "own.csv", database="shop.sqlite")
    assert message in str(caught.value)


def test_fields_that_are_not_read_are_told_once(folder, caplog):
    row = {"question": "who is there ?", "sql": "SELECT 1", "evidence": "all"}
    (folder / "own.jsonl").write_text(json.dumps(row | {"gold_sqls": ["SELECT 2"], "votes": [], "style": "plain"}))
    read(folder / "own.jsonl", database="shop.sqlite")
    assert not caplog.records
    rows = [row, row | {"Evidence": "nobody", "hint": "ask Ada"}]
    (folder / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "mine.csv").write_text("question,sql,Hint\nwho is there ?,SELECT 1,ask Ada\n")
    for name in ("mine.jsonl", "mine.csv", "mine.jsonl"):
        read(folder / name, database="shop.sqlite")
    assert [record.getMessage().partition("; ")[0] for record in caplog.records] == [
        f"{folder}/mine.jsonl: fields that are not read: Evidence, hint",
        f"{folder}/mine.csv: fields that are not read: hint",
    ]


def test_sql_under_two_names_is_told_where_the_texts_differ(folder, caplog):
    row = {"question": "who is there ?", "sql": "SELECT 1", "query": " SELECT 1 ", "database": "shop.sqlite"}
    (folder / "same.jsonl").write_text(json.dumps(row))
    (folder / "tree.jsonl").write_text(json.dumps(row | {"sql": {"select": []}, "query": "SELECT 1"}))
    for name in ("same.jsonl", "tree.jsonl"):
        assert len(read(folder / name).examples) == 1
    assert not caplog.records
    (folder / "two.jsonl").write_text(json.dumps(row | {"gold_sql": "SELECT 2", "db_id": "farm"}))
    read(folder / "two.jsonl")
    assert [record.getMessage().partition("; ")[0] for record in caplog.records] == [
        f"{folder}/two.jsonl: fields that are not read: db_id, gold_sql"
    ]


def test_two_databases_of_one_name_are_told(folder, caplog):
    build_database(folder / "data" / "shop.duckdb", "CREATE TABLE customer (name TEXT)")
    rows = [{"question": f"q{number}", "sql": "SELECT 1", "database": "shop"} for number in range(2)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read(folder / "own.jsonl", databases="data")
    assert not caplog.records
    (folder / "data" / "shop.sqlite").write_bytes((folder / "shop.sqlite").read_bytes())
    loaded = read(folder / "own.jsonl", databases="data")
    assert {example.database.engine for example in loaded.examples} == {"sqlite"}
    first, second = (folder / "data" / f"shop.{suffix}" for suffix in ("sqlite", "duckdb"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{first} and {second} are databases of the name 'shop': the first is read; a suffix says which"
    ]


def test_cells_under_a_column_without_a_name_are_told(folder, caplog):
    text = ",question,,sql\n0,who ?,,SELECT 1\n1,all ?,of Paris,SELECT 2\n2,none ?,of Rome,SELECT 3\n"
    (folder / "own.csv").write_text(text)
    for _ in range(2):
        assert len(read(folder / "own.csv", database="shop.sqlite").examples) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}/own.csv: column 3 has cells and no name in line 1, and is not read"
    ]


def test_one_database_has_one_name_however_the_rows_write_it(folder):
    names = [{}, {"database": "shop.sqlite"}, {"database": str(folder / "shop.sqlite")}]
    rows = [{"question": f"q{number}", "sql": "SELECT 1", **name} for number, name in enumerate(names)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = read(folder / "own.jsonl", database=str(folder / "shop.sqlite"))
    assert len({one.database for one in loaded.examples}) == 1
    assert loaded.examples[0].database.id == "shop"


def test_a_cut_has_nothing_on_two_sides_and_does_not_depend_on_the_order():
    # 60 questions: 2 wordings and 2 values of 20 queries, of which the last 20 rows lack some
    found = cut_questions(own(), [], Shares(dev=0.1, test=0.3)).parts
    assert {part: len(each) for part, each in found.items()} == {"train": 36, "dev": 6, "test": 18}
    for one, other in (("train", "test"), ("train", "dev"), ("dev", "test")):
        assert list(leaks(found[one], found[other])) == []
    whole, half = (
        cut_questions(own(80), [], Shares(0.1, 0.3)).parts,
        cut_questions(own(60)[::-1], [], Shares(0.1, 0.3)).parts,
    )
    assert cut_questions(own(80)[::-1], [], Shares(0.1, 0.3)).parts["test"] == whole["test"][::-1]
    assert len({one.id for one in half["test"]} & {one.id for one in whole["test"]}) >= 12


def test_questions_without_an_answer_are_different_ones_though_their_sql_is_one():
    asked_in_vain = [asked(f"what does the {n}th cloud weigh ?", ABSTENTION) for n in range(20)]
    parts = cut_questions([*own(), *asked_in_vain], [], Shares(0.1, 0.3)).parts
    assert all(any(one in part for one in asked_in_vain) for part in parts.values())
    assert list(leaks(asked_in_vain[1:], asked_in_vain[:1])) == []


def test_a_history_that_is_no_list_is_told_and_not_passed_over(folder):
    (folder / "own.csv").write_text('question,sql,history\nand now ?,SELECT 1,"[[""a"", ""SELECT 2""]]"\nb,SELECT 1,\n')
    loaded = read(folder / "own.csv", database="shop.sqlite")
    assert [one.question for one in loaded.examples] == ["b"]
    assert [(row.row, row.reason) for row in loaded.quarantine] == [("own.csv:2", "bad_history")]


def test_own_questions_are_held_out_before_invented_ones():
    mine = [asked(f"count {table} ?", f"SELECT count(*) FROM {table}") for table in TABLES]
    like = asked("how many of customer ?", "SELECT COUNT(*) FROM customer")
    other = asked("name the customers", "SELECT name FROM customer")
    found = cut_questions(mine, [like, other], Shares(dev=0.25, test=0.75))
    assert len(found.parts["test"]) == 3
    assert len(found.parts["dev"]) == 1
    assert (found.parts["train"], found.repeats) == ([other], [like])
    found = cut_questions([], own(), Shares(0.1, 0.3))
    assert (len(found.parts["test"]), found.repeats) == (18, [])


def test_a_small_file_has_something_of_each_and_questions_that_ask_the_same_cannot_be_cut():
    same = [asked(f"what costs {number} ?", f"SELECT name FROM shelf WHERE price = {number}") for number in range(9)]
    with pytest.raises(DataError, match="the 9 questions ask 1 different things: too few for dev, test, train"):
        cut_questions(same, [], Shares(0.1, 0.3))
    found = cut_questions(
        [asked(f"{name} ?", f"SELECT {name} FROM shelf") for name in COLUMNS[:3]], [], Shares(0.1, 0.2)
    ).parts
    assert {part: len(each) for part, each in found.items()} == {"train": 1, "dev": 1, "test": 1}


def test_more_questions_are_measured_than_watched_where_groups_are_larger_than_the_shares():
    # Of 30 questions 9 are the share of test, 3 that of dev: the group of 2 fits, one of 14 has to be held out as well.
    sizes = {"price": 14, "name": 14, "colour": 2}
    rows = [
        asked(f"{column} {n} ?", f"SELECT {column} FROM shelf WHERE id = {n}")
        for column in sizes
        for n in range(sizes[column])
    ]
    found = cut_questions(rows, [], Shares(0.1, 0.3)).parts
    assert {part: len(each) for part, each in found.items()} == {"train": 14, "dev": 2, "test": 14}


def test_one_file_fills_every_pool_and_bad_rows_are_told_once(folder):
    lines = [json.dumps({"question": one.question, "sql": one.gold_sql}) + "\n" for one in own()]
    (folder / "own.jsonl").write_text("".join(lines) + "{}\n")
    (folder / "more.jsonl").write_text("".join(lines) + '{"question": "new", "sql": "SELECT max(stock) FROM shelf"}\n')
    options = {"database": "shop.sqlite", "dev": 0.1, "test": 0.3, "invented": str(folder / "more.jsonl")}
    parts = {split: read(folder / "own.jsonl", split, **options) for split in ("train", "dev", "test")}
    assert [len(each.examples) for each in parts.values()] == [37, 6, 18]
    told = [[row.reason for row in each.quarantine if row.chosen] for each in parts.values()]
    assert told == [["empty_question"], [], []]
    source = Source(kind="jsonl", path=str(folder / "own.jsonl"), options=options)
    assert {path.name for path in base.files(source) or ()} == {"own.jsonl", "more.jsonl", "shop.sqlite"}


def test_a_csv_file_of_own_questions_can_be_added(folder, tmp_path):
    (folder / "own.csv").write_text("question,sql,database\nwho ?,SELECT name FROM customer,shop.sqlite\n")
    found = add_benchmark("own", folder / "own.csv", lambda line: None, tmp_path / "local", called="sales")
    assert (found["usable"], found["rows"]) == (1, 1)
    (noted,) = read_yaml(tmp_path / "local" / "sales.yaml")["data"]["test"]
    assert (noted["kind"], noted["name"]) == ("csv", "sales")
    assert recipes.load("miniature", [f"data.test.0={{kind: csv, path: {folder / 'own.csv'}}}"]).benchmark.kind == "csv"
