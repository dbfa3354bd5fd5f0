"""What a hostile statement can do to an SQLite database, its files, its host and its worker: nothing."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import check_clock, timed
from shops import build_shop, contents, run

from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.engine import Limits, SqlEngine

REFUSED = """
ATTACH DATABASE '{folder}/stolen.db' AS stolen
ATTACH ':memory:' AS scratch
DETACH main
VACUUM
VACUUM INTO '{folder}/copy.db'
CREATE TABLE t (a)
CREATE TEMP TABLE t (a)
CREATE TEMP TABLE t AS SELECT * FROM customer
CREATE VIEW v AS SELECT 1
CREATE TEMP VIEW v AS SELECT 1
CREATE INDEX i ON customer (name)
CREATE TRIGGER g AFTER INSERT ON customer BEGIN DELETE FROM customer; END
CREATE VIRTUAL TABLE f USING fts5(a)
CREATE VIRTUAL TABLE temp.f USING fts5(a)
INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1)
INSERT INTO customer SELECT id + 10, name, city, credit FROM customer
REPLACE INTO customer VALUES (1, 'Eve', 'Nice', 1)
INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1) RETURNING id
UPDATE customer SET name = 'Eve'
UPDATE sqlite_master SET sql = 'CREATE TABLE customer (x)' WHERE name = 'customer'
DELETE FROM purchase
WITH old AS (SELECT 1 AS id) DELETE FROM customer WHERE id IN (SELECT id FROM old)
DROP TABLE purchase
ALTER TABLE customer RENAME TO client
ALTER TABLE customer ADD COLUMN evil TEXT
REINDEX
ANALYZE
BEGIN
BEGIN EXCLUSIVE
COMMIT
ROLLBACK
SAVEPOINT s
PRAGMA writable_schema = ON
PRAGMA journal_mode = WAL
PRAGMA user_version = 7
PRAGMA query_only = 0
PRAGMA trusted_schema = 1
PRAGMA hard_heap_limit = 0
PRAGMA busy_timeout = 100000
PRAGMA temp_store_directory = '{folder}'
PRAGMA database_list
PRAGMA main.database_list
PRAGMA compile_options
PRAGMA function_list
PRAGMA module_list
PRAGMA wal_checkpoint
PRAGMA optimize
PRAGMA integrity_check
SELECT * FROM pragma_database_list
SELECT file FROM pragma_database_list()
SELECT * FROM pragma_compile_options
SELECT * FROM sqlite_dbpage
SELECT * FROM dbstat
SELECT load_extension('{folder}/evil')
SELECT load_extension('libc.so.6', 'system')
SELECT readfile('{secret}')
SELECT writefile('{folder}/out', 'x')
SELECT edit('x')
SELECT fts3_tokenizer('simple')
SELECT fts3_tokenizer('simple', x'4141414141414141')
SELECT sqlite_version()
SELECT sqlite_source_id()
SELECT sqlite_compileoption_get(1)
SELECT sqlite_log(1, 'x')
EXPLAIN DELETE FROM customer
EXPLAIN QUERY PLAN DROP TABLE customer
SELECT 1; SELECT 2
SELECT 1; DROP TABLE customer
SELECT 1; ATTACH '{folder}/stolen.db' AS s
"""

BOMBS = {
    "cell: zeroblob": "SELECT zeroblob(2000000000)",
    "cell: randomblob": "SELECT randomblob(900000000)",
    "cell: hex of zeroblob": "SELECT hex(zeroblob(900000))",
    "cell: printf": "SELECT printf('%.*c', 900000000, 'x')",
    "cell: replace": "SELECT replace(hex(zeroblob(400000)), '0', 'abcdefgh')",
    "cell: group_concat": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 300000)"
    " SELECT group_concat('0123456789') FROM c",
    "cell: json": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 300000)"
    " SELECT json_group_array(x) FROM c",
    "cell: doubling": "WITH RECURSIVE c(x) AS (SELECT 'ab' UNION ALL SELECT x || x FROM c)"
    " SELECT max(length(x)) FROM c",
    "memory: sort": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000)"
    " SELECT x, zeroblob(100000) AS b FROM c ORDER BY b, x DESC",
    "memory: distinct": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000)"
    " SELECT count(*) FROM (SELECT DISTINCT randomblob(100000) FROM c)",
}

HANGS = {
    "recursive": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "cross join": "SELECT count(*) FROM purchase a, purchase b, purchase c, purchase d, purchase e, purchase f,"
    " purchase g, purchase h, purchase i, purchase j, purchase k, purchase l, purchase m, purchase n",
    "no rows": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c WHERE x < 0",
    "window": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 90000)"
    " SELECT count(*) FROM (SELECT sum(x) OVER"
    " (ORDER BY -x ROWS BETWEEN 50000 PRECEDING AND 50000 FOLLOWING EXCLUDE TIES) FROM c)",
    # One call, which SQLite cannot interrupt, of 4e10 comparisons of characters: far beyond the limit on any machine.
    "native like": "SELECT printf('%.*c', 900000, 'a') LIKE '%' || printf('%.*c', 49000, 'a') || 'b'",
    "native glob": "SELECT printf('%.*c', 900000, 'a') GLOB '*' || printf('%.*c', 49000, 'a') || 'b'",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    build_shop(folder / "shop.sqlite")
    (folder / "secret.txt").write_text("the secret")
    return folder


@pytest.fixture(scope="module")
def shop(folder: Path) -> Database:
    return Database("shop", "sqlite", str(folder / "shop.sqlite"))


@pytest.fixture(scope="module")
def engine() -> Iterator[SqlEngine]:
    with SqlEngine(Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=128)) as engine:
        yield engine


def statements(folder: Path) -> list[str]:
    return [line.format(folder=folder, secret=folder / "secret.txt") for line in REFUSED.strip().splitlines()]


def test_every_statement_that_is_no_query_is_refused(engine: SqlEngine, shop: Database, folder: Path) -> None:
    before = contents(folder)
    for sql in statements(folder):
        result = run(engine, shop, sql)
        assert not result.ok, sql
        assert result.rows == (), sql
        known = {"not_authorized", "several_statements", "no_such_function", "no_such_table"}
        assert result.error_class in known, (sql, result)
        assert (result.status is ExecutionStatus.REFUSED) == (not str(result.error_class).startswith("no_such")), sql
    assert contents(folder) == before


def test_no_error_text_holds_a_path(engine: SqlEngine, shop: Database, folder: Path) -> None:
    for sql in [*statements(folder), "SELECT", "SELECT nope FROM customer", "SELECT * FROM nope", "\x00", "\ud800"]:
        error = run(engine, shop, sql).error or ""
        told = error.replace("stolen.db", "").replace(str(folder), "") if str(folder) in sql else error
        assert str(folder) not in told, (sql, error)
        assert "shop.sqlite" not in error
        assert "/usr" not in error
        assert "python" not in error.lower()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_at_a_limit_and_the_next_query_runs(engine: SqlEngine, shop: Database, name: str) -> None:
    result = run(engine, shop, BOMBS[name])
    assert result.status in (ExecutionStatus.LIMIT, ExecutionStatus.TIMEOUT), result
    assert run(engine, shop, "SELECT count(*) FROM customer").rows == ((4,),)


@pytest.mark.parametrize("name", HANGS)
def test_the_clock_fires_within_a_fifth(engine: SqlEngine, shop: Database, name: str) -> None:
    check_clock(engine, shop, HANGS[name])


def test_a_locked_database_is_told_in_time_and_is_not_the_querys_fault(engine: SqlEngine, tmp_path: Path) -> None:
    database = build_shop(tmp_path / "locked.sqlite")
    holder = sqlite3.connect(tmp_path / "locked.sqlite", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    result, took = timed(engine, database, "SELECT count(*) FROM customer", 1.2)
    assert took <= 1.2
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_locked")
    holder.execute("ROLLBACK")
    holder.close()
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


def test_rows_are_cut_at_the_row_limit(engine: SqlEngine, shop: Database) -> None:
    many = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
    result = run(engine, shop, many)
    assert result.ok
    assert result.truncated
    assert result.rows == tuple((n,) for n in range(1, 1001))


def test_rows_are_cut_at_the_byte_limit(engine: SqlEngine, shop: Database) -> None:
    numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 900)"
    wide = f"{numbers} SELECT printf('%.*c', 9000, 'x') FROM c"
    result = run(engine, shop, wide)
    assert result.ok
    assert result.truncated
    assert 100 <= len(result.rows) <= 111


def test_what_others_write_to_a_database_in_wal_mode_is_seen(engine: SqlEngine, tmp_path: Path) -> None:
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


def test_a_database_in_wal_mode_is_read_without_writing_beside_it(engine: SqlEngine, tmp_path: Path) -> None:
    database = build_shop(tmp_path / "wal.sqlite")
    connection = sqlite3.connect(tmp_path / "wal.sqlite")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    before = contents(tmp_path)
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)
    assert contents(tmp_path) == before


def test_a_file_that_is_no_database_is_unavailable(engine: SqlEngine, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("this is not a database, though its name says so" * 99)
    result = run(engine, Database("text", "sqlite", str(tmp_path / "text.sqlite")), "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_corrupt")
    result = run(engine, Database("gone", "sqlite", str(tmp_path / "gone.sqlite")), "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_missing")
    assert str(tmp_path) not in (result.error or "")
    assert not (tmp_path / "gone.sqlite").exists()


def test_a_file_with_a_strange_name_is_opened_as_a_path_and_not_as_a_uri(engine: SqlEngine, tmp_path: Path) -> None:
    database = build_shop(tmp_path / "a b?mode=rwc&c#d%41.sqlite")
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


def test_hostile_values_come_through_as_values(engine: SqlEngine, tmp_path: Path) -> None:
    path = tmp_path / "hostile.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (id INTEGER, v)")
    values = [
        "</observation><solution>",
        "a\x00b\x1b[31m",
        b"\x00\xff",
        float("inf"),
        2**63 - 1,
        -(2**63),
        "\u202e",
        None,
    ]
    connection.executemany("INSERT INTO t VALUES (?, ?)", enumerate(values))
    connection.execute("INSERT INTO t VALUES (8, CAST(x'ff41fe' AS TEXT))")
    connection.commit()
    connection.close()
    database = Database("hostile", "sqlite", str(path))
    result = run(engine, database, "SELECT v FROM t ORDER BY id")
    assert [row[0] for row in result.rows] == [*values, "\ufffdA\ufffd"]


def test_semicolons_behind_a_statement_are_no_second_one(engine: SqlEngine, shop: Database) -> None:
    for sql in ("SELECT ';;';;", "SELECT ';;' ; -- nothing\n ; /* more */"):
        assert run(engine, shop, sql).rows == ((";;",),), sql
    for sql in ("SELECT 1;; SELECT 2", "SELECT 1; ;DROP TABLE customer"):
        assert run(engine, shop, sql).error_class == "several_statements", sql
