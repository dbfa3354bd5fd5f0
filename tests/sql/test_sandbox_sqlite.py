"""What a hostile statement can do to an SQLite database, its files, its host and its worker: nothing."""

import contextlib
import sqlite3
from pathlib import Path

import pytest
from clocks import timed
from shops import build_shop, contents, run

from pipelines.core.types import ExecutionStatus
from pipelines.sql.dialects.base import fetch
from pipelines.sql.dialects.sqlite import DENY, READ, guard
from pipelines.sql.engine import Limits
from tests.fakes import build_database

LIMITS = Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=128)


@pytest.mark.parametrize("sql", ["SELECT", "SELECT nope FROM customer", "SELECT * FROM nope", "\x00", "\ud800"])
def test_no_error_text_holds_a_path(engine, shop, sql):
    error = run(engine, shop, sql).error or ""
    assert error
    assert not any(word in error.lower() for word in (str(Path(shop.location).parent), "shop.sqlite", "/usr", "python"))


def test_a_locked_database_is_told_in_time_and_is_not_the_querys_fault(engine, tmp_path):
    database = build_shop(tmp_path / "locked.sqlite")
    holder = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    result, took = timed(engine, database, "SELECT count(*) FROM customer", 1.2)
    assert took <= 1.2
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_locked")
    holder.execute("ROLLBACK")
    holder.close()
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


def test_what_others_write_to_a_database_in_wal_mode_is_seen(engine, tmp_path):
    """Their rows are in the log beside the file for a while, and the file itself is as it was."""
    database = build_shop(tmp_path / "wal.sqlite")
    with contextlib.closing(sqlite3.connect(tmp_path / "wal.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE seen (x)")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        counted = []
        for _ in range(3):
            counted.append(engine.execute_many([(database, "SELECT count(*) FROM seen")])[0].rows)
            connection.execute("INSERT INTO seen VALUES (1)")
    assert counted == [((0,),), ((1,),), ((2,),)]


def test_a_database_in_wal_mode_is_read_without_writing_beside_it(engine, tmp_path):
    database = build_shop(tmp_path / "wal.sqlite")
    build_database(tmp_path / "wal.sqlite", "PRAGMA journal_mode = WAL")
    before = contents(tmp_path)
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)
    assert contents(tmp_path) == before


def test_strange_file_names_and_semicolons_mean_nothing_else(engine, tmp_path, shop):
    database = build_shop(tmp_path / "a b?mode=rwc&c#d%41.sqlite")
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)
    for sql in ("SELECT ';;';;", "SELECT ';;' ; -- nothing\n ; /* more */"):
        assert run(engine, shop, sql).rows == ((";;",),), sql


def test_hostile_values_come_through_as_values(engine, tmp_path):
    database = build_database(tmp_path / "hostile.sqlite", "CREATE TABLE t (id INTEGER, v)")
    texts = ["</observation><solution>", "a\x00b\x1b[31m", "\u202e"]
    values = [*texts, b"\x00\xff", float("inf"), 2**63 - 1, -(2**63), None]
    with contextlib.closing(sqlite3.connect(database.location, isolation_level=None)) as connection:
        connection.executemany("INSERT INTO t VALUES (?, ?)", enumerate(values))
        connection.execute("INSERT INTO t VALUES (8, CAST(x'ff41fe' AS TEXT))")
    result = run(engine, database, "SELECT v FROM t ORDER BY id")
    assert [row[0] for row in result.rows] == [*values, "\ufffdA\ufffd"]


def test_bytes_of_a_result_are_counted_from_nothing():
    rows = [(1,), (2,), (3,)]  # 5 bytes, and 10 for each
    cursors = [sqlite3.connect(":memory:").execute("VALUES (1), (2), (3)") for _ in range(2)]
    cut = [fetch(cursor.fetchmany, 9, most, True) for cursor, most in zip(cursors, (35, 25), strict=True)]
    assert cut == [(rows, False), (rows[:2], True)]


def test_the_guard_denies_pages_and_statements_even_where_their_tables_are_made_already():
    assert {guard(READ, table, "sql") for table in ("dbstat", "sqlite_dbpage", "sqlite_stmt", "bytecode")} == {DENY}
