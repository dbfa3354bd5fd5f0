"""New rows become a frozen batch once; edited rows are new ones; tables and folders alike."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pipelines.errors import DataError
from pipelines.nightly.inbox import QUESTIONS, collect, size
from pipelines.sections import Nightly

ROW = {"question": "how many ?", "database": "shop.sqlite", "sql": "SELECT 1"}


def write(path: Path, *rows: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def lines(batch: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (batch / QUESTIONS).read_text().splitlines()]


def test_a_row_is_taken_once_and_an_edited_row_is_a_new_one(tmp_path: Path) -> None:
    settings, batches = Nightly(inbox=str(tmp_path / "inbox")), tmp_path / "batches"
    write(tmp_path / "inbox" / "a.jsonl", ROW, {**ROW, "question": "two ?"})
    first = collect(settings, batches)
    assert first is not None
    assert size(first) == 2
    assert collect(settings, batches) is None
    write(tmp_path / "inbox" / "b.jsonl", ROW, {**ROW, "sql": "SELECT 2"})  # the first of them is known
    second = collect(settings, batches)
    assert second is not None
    assert [row["sql"] for row in lines(second)] == ["SELECT 2"]
    assert [first.name[:5], second.name[:5]] == ["0001-", "0002-"]


def test_rows_get_names_of_their_own_and_databases_stay_within_reach(tmp_path: Path) -> None:
    (tmp_path / "inbox" / "db").mkdir(parents=True)
    (tmp_path / "inbox" / "db" / "shop.sqlite").write_bytes(b"")
    rows = [{**ROW, "id": "q1", "database": "db/shop.sqlite"}, {**ROW, "id": "q1", "database": "gone.sqlite"}, ROW]
    write(tmp_path / "inbox" / "a.jsonl", *rows)
    batch = collect(Nightly(inbox=str(tmp_path / "inbox")), tmp_path / "batches")
    assert batch is not None
    names = [row["id"] for row in lines(batch)]
    assert len(set(names)) == 3
    assert names[0].startswith("q1-")
    assert names[2].startswith("a-")
    assert (batch / "db" / "shop.sqlite").resolve() == tmp_path / "inbox" / "db" / "shop.sqlite"
    assert not (batch / "gone.sqlite").exists()


def test_a_line_that_is_no_json_is_passed_on_for_the_data_stage_to_set_aside(tmp_path: Path) -> None:
    write(tmp_path / "inbox" / "a.jsonl", ROW, '{"question": "half')
    batch = collect(Nightly(inbox=str(tmp_path / "inbox")), tmp_path / "batches")
    assert batch is not None
    assert (batch / QUESTIONS).read_text().splitlines()[1] == '{"question": "half'


def test_rows_of_a_table_are_new_questions_too(tmp_path: Path) -> None:
    path = tmp_path / "new.sqlite"
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("CREATE TABLE asked (question TEXT, database TEXT, sql TEXT, evidence TEXT)")
        file.execute("INSERT INTO asked VALUES ('how many ?', 'shop.sqlite', 'SELECT 1', NULL)")
    settings = Nightly(inbox=str(path), table="asked")
    batch = collect(settings, tmp_path / "batches")
    assert batch is not None
    (row,) = lines(batch)
    assert {name: row[name] for name in ROW} == ROW
    assert "evidence" not in row
    assert collect(settings, tmp_path / "batches") is None


@pytest.mark.parametrize(
    ("inbox", "table", "says"),
    [(None, None, "names no inbox"), ("nowhere", None, "no inbox at"), ("file.sqlite", None, "nightly.table")],
)
def test_an_inbox_that_cannot_be_read_is_said_plainly(
    tmp_path: Path, inbox: str | None, table: str | None, says: str
) -> None:
    (tmp_path / "file.sqlite").write_bytes(b"")
    where = None if inbox is None else str(tmp_path / inbox)
    with pytest.raises(DataError, match=says):
        collect(Nightly(inbox=where, table=table), tmp_path / "batches")


def test_a_table_that_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "new.sqlite").close()
    (tmp_path / "new.sqlite").touch()
    with pytest.raises(DataError, match="cannot read table 'x\"y'"):
        collect(Nightly(inbox=str(tmp_path / "new.sqlite"), table='x"y'), tmp_path / "batches")
