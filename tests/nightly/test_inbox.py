"""New rows become a frozen batch once; edited rows are new ones; tables and folders alike."""

import json

import duckdb
import pytest

from pipelines.benchmarks import base
from pipelines.core.errors import DataError
from pipelines.core.files import read_json
from pipelines.nightly.inbox import HELD_OUT, QUESTIONS, ROWS, freeze_batch, held_out_rows, set_held_out_aside
from pipelines.recipe.config import Nightly, Source
from tests.fakes import build_database

ROW = {"question": "how many ?", "database": "shop.sqlite", "sql": "SELECT 1"}


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def lines(batch):
    return [json.loads(line) for line in (batch / QUESTIONS).read_text().splitlines()]


@pytest.fixture
def collected(tmp_path):
    return lambda place="inbox", table=None, batches="batches": freeze_batch(
        Nightly(inbox=str(tmp_path / place), table=table), tmp_path / batches
    )


def test_a_row_is_taken_once_and_an_edited_row_is_a_new_one(tmp_path, collected):
    write(tmp_path / "inbox" / "a.jsonl", ROW, {**ROW, "question": "two ?"})
    first = collected()
    assert len(read_json(first / ROWS)) == 2
    assert collected() is None
    write(tmp_path / "inbox" / "b.jsonl", ROW, {**ROW, "sql": "SELECT 2"})  # the first of them is known
    second = collected()
    assert [row["sql"] for row in lines(second)] == ["SELECT 2"]
    assert [first.name[:5], second.name[:5]] == ["0001-", "0002-"]


def test_rows_get_names_of_their_own_and_databases_stay_within_reach(tmp_path, collected):
    (tmp_path / "inbox" / "db").mkdir(parents=True)
    (tmp_path / "inbox" / "db" / "shop.sqlite").write_bytes(b"")
    rows = [
        {**ROW, "id": "q1", "database": "db/shop.sqlite"},
        {**ROW, "id": "q1", "database": "gone.sqlite"},
        ROW,
        {**ROW, "id": 17},
    ]
    write(tmp_path / "inbox" / "a.jsonl", *rows)
    batch = collected()
    names = [row["id"] for row in lines(batch)]
    assert len(set(names)) == 4
    assert names[0].startswith("q1-")
    assert names[2].startswith("a-")
    assert names[3].startswith("17-")
    assert (batch / "db" / "shop.sqlite").resolve() == tmp_path / "inbox" / "db" / "shop.sqlite"
    assert not (batch / "gone.sqlite").exists()


def test_a_row_is_found_by_the_id_that_a_reader_of_its_batch_gives_it(tmp_path, collected):
    """A reader strips the blanks around an id: a person's file has them behind a comma."""
    rows = [{**ROW, "id": " 7 "}, {**ROW, "id": "8"}, {**ROW, "id": " \t"}]
    write(tmp_path / "inbox" / " a.jsonl", *rows)
    build_database(tmp_path / "inbox" / "shop.sqlite", "CREATE TABLE t (a)")
    batch = collected()
    loaded = base.read(Source(kind="jsonl", path=str(batch / QUESTIONS)), 0, tmp_path / "stage")
    first, second, third = [example.id for example in loaded.examples]
    assert [row["id"] for row in lines(batch)] == [first, second, third]
    assert [id.rpartition("-")[0] for id in (first, second, third)] == ["7", "8", "a"]
    assert set_held_out_aside(batch, {first: "t1", third: "t2"})
    assert [row["id"] for row in lines(batch)] == [second]


def test_a_line_that_is_no_json_is_passed_on_for_the_data_stage_to_set_aside(tmp_path, collected):
    write(tmp_path / "inbox" / "a.jsonl", ROW, '{"question": "half')
    batch = collected()
    bad = lines(batch)[1]["not_read"]
    assert bad["reason"] == "not_json"
    assert bad["detail"].startswith("a.jsonl, line 2: not JSON")
    # Editors on Windows write one.
    write(tmp_path / "inbox" / "a.jsonl", "\ufeff" + json.dumps(ROW), {**ROW, "question": "two ?"})
    batch = collected(batches="marked")
    assert [row["question"] for row in lines(batch)] == ["how many ?", "two ?"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (['{"question": "half'], ['{"question": "hole']),
        (['{"id": 1, "id": 2}'], ['{"id": 3, "id": 4}']),
        (["[1]"], ["[2]"]),
        (['[{"id": 1, "id": 2}]'], ['[{"id": 3, "id": 4}]']),
        ([b"\xff1".decode("latin-1")], [b"\xff2".decode("latin-1")]),
    ],
)
def test_another_bad_row_in_the_place_of_one_is_a_new_row(tmp_path, collected, before, after):
    """Its line and its message are those of the row that was taken."""
    file = tmp_path / "inbox" / "a.jsonl"
    for rows in (before, after):
        write(file, *rows)
        file.write_bytes(file.read_text(encoding="utf-8").encode("latin-1"))
        (row,) = lines(collected())
        assert "a.jsonl, line 1" in row["not_read"]["detail"]
        assert collected() is None


def test_rows_of_a_table_are_new_questions_too(tmp_path, collected):
    script = """
    CREATE TABLE asked (question TEXT, database TEXT, sql TEXT, evidence TEXT);
    INSERT INTO asked VALUES ('how many ?', 'shop.sqlite', 'SELECT 1', NULL);
    """
    build_database(tmp_path / "new.sqlite", script)
    (row,) = lines(collected("new.sqlite", "asked"))
    assert {name: row[name] for name in ROW} == ROW
    assert "evidence" not in row
    assert collected("new.sqlite", "asked") is None


@pytest.mark.parametrize(
    ("inbox", "table", "says"),
    [
        ("nowhere", None, "no inbox at"),
        ("file.sqlite", None, "nightly.table"),
        ("file.sqlite", 'x"y', "cannot read table 'x\"y'"),
    ],
)
def test_an_inbox_that_cannot_be_read_is_said_plainly(tmp_path, collected, inbox, table, says):
    (tmp_path / "file.sqlite").touch()
    with pytest.raises(DataError, match="names no inbox"):
        freeze_batch(Nightly(), tmp_path / "batches")
    with pytest.raises(DataError, match=says):
        collected(inbox, table)


def read(batch, root):
    loaded = base.read(Source(kind="jsonl", path=str(batch / QUESTIONS)), 0, root)
    return [one.question for one in loaded.examples], [one.reason for one in loaded.quarantine]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**ROW, "question": "a \ud83d"}, "invalid_unicode"),
        ({**ROW, "database": "a\ud83d.sqlite"}, "invalid_unicode"),
        ({**ROW, "database": "x" * 300 + ".sqlite"}, "bad_database_id"),
        ({**ROW, "database": "~nobody_here/x.sqlite"}, "bad_database_id"),
        ({**ROW, "database": "."}, "bad_database_id"),
        ({**ROW, "database": "questions.jsonl"}, "not_a_database"),
        ({**ROW, "database": HELD_OUT}, "missing_database"),  # a link would be taken for the batch's own file
        ({**ROW, "database": "postgresql://me:SECRET@host/shop"}, "password_in_address"),
        ({**ROW, "database": " postgresql://me:SEC/RET@SECRET@host/shop?password=SECRET"}, "password_in_address"),
        ('{"question": "q", "database": "postgresql://me:SECRET@host/shop"', "not_json"),
        ("[" * 100_000, "not_json"),
        ('{"n": ' + "9" * 5000 + "}", "not_json"),
    ],
)
def test_a_row_that_cannot_be_used_stops_no_night(tmp_path, collected, row, reason):
    """The good row beside it is taken; the other one goes to the data stage's quarantine, without its secrets."""
    inbox = tmp_path / "inbox"
    write(inbox / "questions.jsonl", row, ROW)
    for name in ("shop.sqlite", HELD_OUT):
        (inbox / name).touch()
    batch = collected()
    assert read(batch, tmp_path / "stage") == (["how many ?"], [reason])
    assert collected() is None
    assert not [path for path in batch.iterdir() if path.is_file() and b"SECRET" in path.read_bytes()]


def test_brackets_near_the_limit_of_recursion_stop_no_night(tmp_path, collected):
    rows = ['{"question": ' + "[" * depth + "]" * depth + "}" for depth in (*range(850, 1000), 100_000)]
    write(tmp_path / "inbox" / "a.jsonl", *rows)
    questions, reasons = read(collected(), tmp_path / "stage")
    assert (questions, len(reasons), set(reasons)) == ([], 151, {"wrong_type", "not_json"})


def test_rows_that_are_left_out_of_a_batch_twice_are_all_kept_on_record(tmp_path, collected):
    """A benchmark may grow while a batch waits; a row with an end of line in it stays one row."""
    texts = [f"a\u2028b\u0085c{place}" for place in range(4)]
    rows = [json.dumps({**ROW, "question": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.jsonl").write_text("\r\n".join(rows), encoding="utf-8")
    batch = collected()
    assert len(read_json(batch / ROWS)) == 4

    def ids(name="id"):
        with (batch / QUESTIONS).open(encoding="utf-8") as file:
            return [json.loads(line)[name] for line in file]

    assert ids("question") == texts
    first, second, third, fourth = ids()
    assert set_held_out_aside(batch, {second: "t1"})
    assert ids() == [first, third, fourth]
    assert set_held_out_aside(batch, {second: "t1", fourth: "t2"})
    assert ids() == [first, third]
    gone = [json.loads(line) for line in (batch / HELD_OUT).read_text().splitlines()]
    assert gone == [{"id": second, "asks": "t1"}, {"id": fourth, "asks": "t2"}]
    assert len(held_out_rows(batch)) == 2
    assert not set_held_out_aside(
        batch, {first: "t1", third: "t2"}
    )  # nothing would be left: the batch is refused as it is


def test_a_table_may_hold_times_and_bytes(tmp_path, collected):
    (tmp_path / "shop.sqlite").touch()
    with duckdb.connect(str(tmp_path / "new.duckdb")) as lake:
        lake.execute(
            "CREATE TABLE asked (question VARCHAR, sql VARCHAR, database VARCHAR, day TIMESTAMP, price DECIMAL(4, 2))"
        )
        lake.execute("INSERT INTO asked VALUES ('how many ?', 'SELECT 1', 'shop.sqlite', '2026-01-02 03:04:05', 1.5)")
    batch = collected("new.duckdb", "asked", "lake")
    (row,) = lines(batch)
    assert (row["day"], row["price"]) == ("2026-01-02 03:04:05", "1.50")
    assert read(batch, tmp_path / "stage") == (["how many ?"], [])
    assert collected("new.duckdb", "asked", "lake") is None
    script = """
    CREATE TABLE asked (question, sql, database, vector);
    INSERT INTO asked VALUES ('how many ?', 'SELECT 1', 'shop.sqlite', x'00ff');
    INSERT INTO asked VALUES (x'00ff', 'SELECT 1', 'shop.sqlite', NULL);
    INSERT INTO asked VALUES (CAST(x'61ff' AS TEXT), 'SELECT 1', 'shop.sqlite', NULL);
    """
    build_database(tmp_path / "new.sqlite", script)
    batch = collected("new.sqlite", "asked")
    assert read(batch, tmp_path / "other") == (["how many ?"], ["wrong_type", "not_utf8"])


def test_a_folder_that_bears_a_files_name_is_said_plainly(tmp_path, collected):
    (tmp_path / "inbox" / "a.jsonl").mkdir(parents=True)
    with pytest.raises(DataError, match=r"cannot read .*a\.jsonl"):
        collected()


def test_csv_files_are_taken_too_whatever_the_case_of_their_suffix(tmp_path, collected):
    (tmp_path / "inbox").mkdir()
    text = 'question,sql,database\nhow many ?,SELECT 1,shop.sqlite\n"a, b",SELECT 2,shop.sqlite\nx,y,z,too many\n'
    (tmp_path / "inbox" / "Monday.CSV").write_text(text)
    write(tmp_path / "inbox" / "b.JSONL", {**ROW, "sql": "SELECT 3"})
    *rows, last = lines(collected())
    assert [row["sql"] for row in (rows[0], rows[1], last)] == ["SELECT 1", "SELECT 2", "SELECT 3"]
    assert rows[2]["not_read"]["detail"].startswith(
        "Monday.CSV, line 4: 4 cells under 3 columns"
    )  # the data stage sets it aside


@pytest.mark.parametrize(
    "name",
    [
        "x.json",
        "rows.parquet",
        "x.jsonl.gz",
        "x.zip",
        "sub/y.jsonl",
        "x.jsonlines",
        "rows.ODS",
        "x.jsonl.bz2",
        "rows.feather",
    ],
)
def test_a_file_that_looks_like_questions_and_is_not_read_is_named(tmp_path, collected, name):
    write(tmp_path / "inbox" / "a.jsonl", ROW)
    write(tmp_path / "inbox" / name, ROW)
    with pytest.raises(
        DataError, match=rf"holds files that are not read: {name}\. Questions are taken from \.jsonl, \.csv"
    ):
        collected()


def test_files_that_are_neither_questions_nor_databases_are_told(tmp_path, collected, caplog):
    inbox = tmp_path / "inbox"
    write(inbox / "a.jsonl", ROW)
    build_database(inbox / "shop.sqlite", "CREATE TABLE t (a)")
    (inbox / "bare").write_bytes((inbox / "shop.sqlite").read_bytes())
    (inbox / "shop.sqlite-wal").touch()
    (inbox / ".hidden").touch()
    assert len(lines(collected())) == 1
    assert not caplog.records
    write(inbox / "questions", ROW)
    write(inbox / "week.1" / "monday" / "b.jsonl", ROW)
    write(inbox / "week.1" / "c.json", ROW)
    write(inbox / ".git" / "d.jsonl", ROW)
    assert collected() is None
    (told,) = caplog.records
    files = "questions, week.1/c.json, week.1/monday/b.jsonl"
    assert told.getMessage() == f"the inbox {inbox} holds files that are not read: {files}"
