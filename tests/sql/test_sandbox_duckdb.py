"""What a hostile statement can do to a DuckDB file, its host and its worker: nothing."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import check_clock
from copies import to_duckdb
from shops import USERS, build_shop, build_users, contents, run

from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.engine import Limits, Pair, SqlEngine

REFUSED = """
COPY customer TO '{folder}/out.csv'
COPY (SELECT 1) TO '{folder}/out.parquet' (FORMAT parquet)
COPY customer FROM '{secret}'
EXPORT DATABASE '{folder}/export'
IMPORT DATABASE '{folder}/export'
ATTACH '{folder}/other.duckdb'
ATTACH ':memory:' AS scratch
DETACH shop
INSTALL httpfs
LOAD httpfs
INSTALL sqlite; LOAD sqlite
SET threads = 8
SET enable_external_access = true
SET GLOBAL memory_limit = '100GB'
RESET lock_configuration
PRAGMA database_list
PRAGMA version
CALL pragma_version()
CHECKPOINT
VACUUM
ANALYZE
CREATE TABLE t (a INTEGER)
CREATE TEMP TABLE t AS SELECT 1
CREATE VIEW v AS SELECT 1
CREATE MACRO m() AS 1
CREATE SECRET s (TYPE s3)
INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1)
UPDATE customer SET name = 'Eve'
DELETE FROM purchase
WITH x AS (SELECT 1) DELETE FROM purchase
DROP TABLE purchase
ALTER TABLE customer ADD COLUMN evil TEXT
TRUNCATE purchase
BEGIN
PREPARE p AS SELECT 1
EXECUTE p
SELECT * FROM read_csv('{secret}')
SELECT * FROM read_csv_auto('{secret}')
SELECT * FROM read_text('{secret}')
SELECT content FROM read_blob('{secret}')
SELECT * FROM read_parquet('{folder}/x.parquet')
SELECT * FROM read_json('{secret}')
SELECT * FROM glob('{folder}/*')
SELECT * FROM sniff_csv('{secret}')
SELECT * FROM parquet_scan('{folder}/x.parquet')
SELECT * FROM '{secret}'
SELECT * FROM 'https://example.com/x.csv'
FROM '{secret}' SELECT 1
SELECT "read_text"('{secret}')
SELECT '{secret}'.read_text()
SELECT * FROM query('SELECT 1')
SELECT * FROM query_table('customer')
SELECT * FROM duckdb_settings()
SELECT * FROM duckdb_databases
SELECT * FROM duckdb_databases()
SELECT * FROM duckdb_secrets()
SELECT * FROM duckdb_extensions()
SELECT * FROM duckdb_temporary_files()
SELECT * FROM pragma_database_size()
SELECT * FROM pg_catalog.pg_settings
SELECT current_setting('secret_directory')
SELECT getenv('HOME')
SELECT getvariable('x')
SELECT current_query()
SELECT version()
SELECT current_user
SELECT nextval('s')
SELECT setseed(0.5)
SELECT write_log('x')
SELECT pg_sleep(1)
SELECT 1; SELECT 2
SELECT 1; COPY customer TO '{folder}/out.csv'
SELECT $$a$$
SELECT /* a /* b */ c */ 1
"""

HANGS = {
    "cross join": "SELECT count(*) FROM range(1000000000) a, range(1000000) b WHERE a.range + b.range = 3",
    "recursive": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "native": "SELECT levenshtein(repeat('ab', 400000), repeat('ba', 400000))",
}

BOMBS = {
    "repeat": "SELECT repeat('x', 2000000000)",
    "string_agg": "SELECT string_agg(repeat('x', 1000000), '') FROM range(2000)",
    "list": "SELECT list(i) FROM range(100000000) r(i)",
    "sort": "SELECT * FROM (SELECT repeat(i::VARCHAR, 100) x FROM range(20000000) r(i)) ORDER BY x LIMIT 3000000",
}

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("duck")
    to_duckdb(build_shop(tmp_path_factory.mktemp("source") / "shop.sqlite"), folder / "shop.duckdb")
    (folder / "secret.csv").write_text("the secret\n1\n")
    return folder


@pytest.fixture(scope="module")
def shop(folder: Path) -> Database:
    return Database("shop", "duckdb", str(folder / "shop.duckdb"))


@pytest.fixture(scope="module")
def engine() -> Iterator[SqlEngine]:
    with SqlEngine(Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)) as engine:
        yield engine


def test_every_statement_that_is_no_query_of_the_data_is_refused(
    engine: SqlEngine, shop: Database, folder: Path
) -> None:
    before = contents(folder)
    for line in REFUSED.strip().splitlines():
        sql = line.format(folder=folder, secret=folder / "secret.csv")
        result = run(engine, shop, sql)
        assert result.status is ExecutionStatus.REFUSED, (sql, result)
        assert "the secret" not in (result.error or "")
        assert str(folder) not in (result.error or "") or str(folder) in sql
    assert contents(folder) == before
    assert run(engine, shop, "SELECT count(*) FROM customer").rows == ((4,),)


@pytest.mark.parametrize("name", HANGS)
def test_the_clock_fires_within_a_fifth(engine: SqlEngine, shop: Database, name: str) -> None:
    check_clock(engine, shop, HANGS[name])


def test_a_file_that_another_process_writes_is_told_as_locked(
    engine: SqlEngine, shop: Database, tmp_path: Path
) -> None:
    database = Database("held", "duckdb", str(shutil.copy(shop.location, tmp_path / "held.duckdb")))
    hold = f"import duckdb; c = duckdb.connect({database.location!r}); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        result = run(engine, database, "SELECT count(*) FROM customer")
        assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_locked")
        holder.communicate("\n")
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_at_a_limit_and_the_next_query_runs(engine: SqlEngine, shop: Database, name: str) -> None:
    result = run(engine, shop, BOMBS[name])
    assert result.status in (ExecutionStatus.LIMIT, ExecutionStatus.TIMEOUT), result
    assert run(engine, shop, "SELECT count(*) FROM customer").rows == ((4,),)


def test_a_python_variable_is_no_table(engine: SqlEngine, shop: Database) -> None:
    for name in ("bounds", "databases", "session", "row"):
        assert run(engine, shop, f"SELECT * FROM {name}").error_class == "no_such_table"


def test_a_table_and_a_column_may_be_called_user(tmp_path: Path) -> None:
    """An unquoted `user` is the table's own, where there is one; elsewhere it is a constant of DuckDB."""
    users = to_duckdb(build_users(tmp_path / "users.sqlite"), tmp_path / "users.duckdb")
    with SqlEngine(Limits(timeout_s=20)) as engine:  # a busy machine opens a file slowly
        for sql in USERS:
            assert run(engine, users, sql).rows == (("ada",),), sql
        assert run(engine, users, "SELECT user").rows == (("duckdb",),)
        assert run(engine, users, "SELECT user()").status is ExecutionStatus.REFUSED


def test_the_schema_can_be_asked_for_in_sql(engine: SqlEngine, shop: Database) -> None:
    assert run(engine, shop, "SHOW TABLES").rows == (("customer",), ("purchase",))
    assert [row[0] for row in run(engine, shop, "DESCRIBE customer").rows] == ["id", "name", "city", "credit"]
    asked = "SELECT table_name FROM information_schema.tables ORDER BY 1"
    assert run(engine, shop, asked).rows == (("customer",), ("purchase",))


@pytest.mark.parametrize(
    ("sql", "error_class"),
    [
        ("SELEC 1", "syntax"),
        ("SELECT nope FROM customer", "no_such_column"),
        ("SELECT 1 FROM nope", "no_such_table"),
        ("SELECT id FROM customer, purchase", "ambiguous_column"),
        ("SELECT city FROM customer GROUP BY name", "misuse"),
        ("SELECT 'a'::INTEGER", "conversion"),
        ("", "empty"),
        ("-- nothing", "empty"),
        ("SELECT '\ud800'", "syntax"),
        ("SELECT " + "(" * 3000 + "1" + ")" * 3000, "too_complex"),
    ],
)
def test_an_error_has_a_class(engine: SqlEngine, shop: Database, sql: str, error_class: str) -> None:
    assert run(engine, shop, sql).error_class == error_class, run(engine, shop, sql)


def test_values_are_plain(engine: SqlEngine, shop: Database) -> None:
    sql = """SELECT 1, 1.5, 2.50::DECIMAL(9, 2), 7::DECIMAL(9, 0), true, 'a', 'NaN'::DOUBLE, DATE '2024-02-29',
        TIMESTAMP '2024-02-29 01:02:03', [1, 2], {'a': 1}, 170141183460469231731687303715884105727, NULL,
        '\\x00\\xFF'::BLOB"""
    assert run(engine, shop, sql).rows == (
        (
            1,
            1.5,
            2.5,
            7,
            1,
            "a",
            "NaN",
            "2024-02-29",
            "2024-02-29 01:02:03",
            "[1, 2]",
            '{"a": 1}',
            2**127 - 1,
            None,
            b"\0\xff",
        ),
    )


def test_a_file_that_is_no_database_is_unavailable(engine: SqlEngine, tmp_path: Path) -> None:
    (tmp_path / "text.duckdb").write_text("no database")
    assert (
        run(engine, Database("x", "duckdb", str(tmp_path / "text.duckdb")), "SELECT 1").error_class
        == "database_corrupt"
    )
    missing = run(engine, Database("x", "duckdb", str(tmp_path / "gone.duckdb")), "SELECT 1")
    assert (missing.status, missing.error_class) == (ExecutionStatus.UNAVAILABLE, "database_missing")
    assert not (tmp_path / "gone.duckdb").exists()


def test_an_infinite_date_is_not_the_last_day_of_pythons_calendar(engine: SqlEngine, shop: Database) -> None:
    sql = "SELECT 'infinity'::DATE, DATE '9999-12-31', '-infinity'::TIMESTAMP, 1.5::DOUBLE"
    assert run(engine, shop, sql).rows == (("infinity", "9999-12-31", "-infinity", 1.5),)
    (verdict,) = engine.verdicts([Pair(shop, "SELECT 'infinity'::DATE", "SELECT DATE '9999-12-31'")], ["strict"])
    assert (verdict.scores, verdict.broken) == ({"strict": 0.0}, False)
