"""One clock for all that a statement takes: the look at its text, each of its runs, and the rows."""

from pathlib import Path
from typing import Any

import pytest
from copies import to_duckdb
from shops import build_shop

from pipelines.sql.dialects import guard
from pipelines.sql.dialects.base import Bounds
from pipelines.sql.dialects.duckdb import DuckdbSession
from pipelines.sql.dialects.sqlite import SqliteSession
from tests.fakes import build_database
from tests.sql.test_sandbox_state import NoClock

BOUNDS = Bounds(timeout_s=5.0, max_rows=1000, max_bytes=1_000_000, memory_mb=256)


class Recorder(NoClock):
    def __init__(self) -> None:
        self.events: list[str] = []

    def arm(self, seconds: float) -> None:
        self.events.append(f"armed {seconds:g}")


def test_the_text_is_looked_at_within_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Recorder()
    database = to_duckdb(build_shop(tmp_path / "shop.sqlite"), tmp_path / "shop.duckdb")
    session = DuckdbSession(database.location, BOUNDS, clock)

    def check(sql: str, engine: str) -> Any:
        clock.events.append("looked")
        return guard.check(sql, engine)

    monkeypatch.setattr("pipelines.sql.dialects.duckdb.check", check)
    session.run("SELECT 1", 10)
    session.close()
    assert clock.events == ["armed 5", "looked"]


def test_a_text_that_takes_long_to_look_at_is_not_looked_at() -> None:
    for engine in ("duckdb", "postgres"):
        refused = guard.check("SELECT " + "1," * guard.MAX_SQL + "1", engine)
        assert refused is not None
        assert (refused.status, refused.error_class) == ("limit", "sql_too_long")


def test_a_second_run_has_what_the_first_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.sqlite"
    build_database(path, "CREATE TABLE t AS SELECT CAST(x'ff' AS TEXT) AS s")
    clock, deadlines = Recorder(), []
    session = SqliteSession(str(path), BOUNDS, clock)

    def executed(connection: Any, sql: str) -> Any:
        deadlines.append(session.deadline)
        return connection.execute(sql)

    monkeypatch.setattr("pipelines.sql.dialects.sqlite.executed", executed)
    assert session.run("SELECT s FROM t", 10).rows == [("\ufffd",)]
    session.close()
    assert len(deadlines) == 2
    assert deadlines[0] == deadlines[1]
    assert clock.events == ["armed 5"]
