"""Inventing questions: what does not run, is empty, is twice the same, or is answered otherwise, is not kept."""

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import Source
from pipelines.data import base
from pipelines.rollout.endpoints import Endpoint
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect
from pipelines.teachers.asking import Asker
from pipelines.teachers.invent import Inventor, read_sql
from pipelines.types import Database

PROPOSALS = [
    "SELECT name FROM singer WHERE city = 'paris'",
    "SELECT nam FROM singer",  # does not run
    "SELECT name FROM singer WHERE city = 'oslo'",  # like the first but for its value
    "SELECT age FROM singer WHERE city = 'nowhere'",  # empty
    "SELECT city, count(*) FROM singer GROUP BY city",
    "DROP TABLE singer",
    "SELECT max(age) FROM singer",  # answered otherwise
]


@pytest.fixture
def database(tmp_path: Path) -> Database:
    path = tmp_path / "music.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE singer (name TEXT, city TEXT, age INTEGER)")
        rows = [("ann", "paris", 30), ("bo", "oslo", 40), ("cy", "paris", 50)]
        connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", rows)
    connection.close()
    return Database("music", "sqlite", str(path))


def reply(messages: list[dict[str, str]]) -> str:
    """Proposes by number, asks "what is N", and answers that, the last one wrongly."""
    rules, case = messages[0]["content"], messages[1]["content"]
    if "people who work with" in rules:
        number = int(re.search(r"number (\d+)", case)[1])  # type: ignore[index]
        return f"Here:\n```sql\n{PROPOSALS[number % len(PROPOSALS)]};\n```"
    if "into words" in rules:
        query = case.partition("SQL:\n")[2]
        return f'"What is {PROPOSALS.index(query)}?"\n'
    number = int(re.search(r"What is (\d+)", case)[1])  # type: ignore[index]
    return "SELECT min(age) FROM singer" if number == 6 else PROPOSALS[number]


def test_only_what_is_answered_alike_is_kept(tmp_path: Path, servers: Any, database: Database) -> None:
    server = servers(reply)
    asker = Asker(Endpoint(base_url=server.url, model="m"), "teacher", tmp_path / "responses")
    with SqlEngine(Limits(timeout_s=5)) as sql:
        made = Inventor(database, introspect(database, 3), sql, asker, asker).make(4)
    assert [one.gold_sql for one in made.examples] == [PROPOSALS[0], PROPOSALS[4]]
    assert [one.question for one in made.examples] == ["What is 0?", "What is 4?"]
    assert [one.hardness for one in made.examples] == ["easy", "medium"]
    counts = made.counts
    assert (counts["kept"], counts["answers_differ"] > 0, counts["no_sql"] > 0) == (2, True, True)
    assert {"near_duplicate", "empty_result", "sql_no_such_column"} <= set(counts)


def test_the_command_writes_what_the_reader_reads(
    tmp_path: Path, servers: Any, database: Database, name_endpoint: Any
) -> None:
    from flows.inventing import invent
    from pipelines import recipes
    from pipelines.store import Store

    name_endpoint(servers(reply))
    out = tmp_path / "mine.jsonl"
    recipe, store = recipes.load("miniature"), Store(tmp_path / "store")
    invent(recipe, store, Path(database.location), 2, "teacher", None, out)
    loaded = base.read(Source(kind="jsonl", path=str(out)), 0, tmp_path / "stage")
    assert [one.gold_sql for one in loaded.examples] == [PROPOSALS[0], PROPOSALS[4]]
    assert loaded.quarantine == []


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        (
            "a ```\nSELECT 1\n``` then ```SQL\nwith t as (select 1) select * from t```",
            "with t as (select 1) select * from t",
        ),
        ("select 1", "select 1"),
        ("I cannot.", None),
        ("```sql\nDROP TABLE t\n```", None),
        ("", None),
        (None, None),
    ],
)
def test_a_query_is_found_in_an_answer(text: str | None, sql: str | None) -> None:
    assert read_sql(text) == sql
