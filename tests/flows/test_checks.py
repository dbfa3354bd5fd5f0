"""What `sqltrain check` says of a gold SQL under which no verdict can be given."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from flows import checks
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.types import Database, Example


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT name FROM ship", "larger than a verdict may read (raise execution.max_rows or execution.max_bytes)"),
        ("SELECT flag FROM ship", "it does not run (no_such_column)"),
    ],
)
def test_a_gold_sql_that_is_too_large_is_told_from_one_that_fails(sql: str, said: str, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "harbour.sqlite")
    connection.executescript("CREATE TABLE ship (name TEXT); INSERT INTO ship VALUES ('a'), ('b'), ('c')")
    connection.close()
    example = Example("q", "?", Database("harbour", "sqlite", str(tmp_path / "harbour.sqlite")), sql)
    with SqlEngine(Limits(timeout_s=5, max_rows=2)) as engine:
        assert said in checks._without_result(example, engine)
