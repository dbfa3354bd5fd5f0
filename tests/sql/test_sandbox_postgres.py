"""What a hostile statement can do to a real PostgreSQL server: nothing."""

import asyncio
import time
from collections.abc import Iterator

import psycopg
import pytest
from clocks import check_clock, timed
from servers import Server
from shops import run

from pipelines.core.errors import DataError
from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect

pytestmark = pytest.mark.services

REFUSED = """
INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1)
UPDATE customer SET name = 'Eve'
DELETE FROM purchase
WITH gone AS (DELETE FROM purchase RETURNING *) SELECT * FROM gone
TRUNCATE purchase
DROP TABLE purchase
ALTER TABLE customer ADD COLUMN evil text
CREATE TABLE t (a int)
CREATE TEMP TABLE t (a int)
CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'SELECT 1'
DO 'BEGIN END'
CALL f()
SELECT * FROM customer FOR UPDATE
SELECT * INTO t FROM customer
COPY customer TO '/tmp/out'
COPY customer FROM '/etc/passwd'
COPY (SELECT 1) TO PROGRAM 'sh'
SET statement_timeout = 0
SET ROLE owner
SET SESSION AUTHORIZATION owner
RESET ALL
SHOW data_directory
SHOW ALL
BEGIN
COMMIT
SAVEPOINT s
LOCK TABLE customer
LISTEN x
NOTIFY x
VACUUM
ANALYZE
CLUSTER
LOAD 'x'
EXPLAIN ANALYZE DELETE FROM purchase
PREPARE p AS SELECT 1
DECLARE c CURSOR FOR SELECT 1
FETCH ALL FROM answer
CLOSE answer
SELECT pg_read_file('/etc/passwd')
SELECT pg_read_binary_file('/etc/passwd')
SELECT pg_ls_dir('/')
SELECT * FROM pg_stat_file('/etc/passwd')
SELECT lo_import('/etc/passwd')
SELECT lo_export(1, '/tmp/out')
SELECT lo_create(0)
SELECT lo_from_bytea(0, 'x')
SELECT * FROM dblink('host=127.0.0.1', 'SELECT 1') AS (a int)
SELECT pg_sleep(10)
SELECT "pg_sleep"(10)
SELECT pg_catalog.pg_sleep(10)
SELECT PG_SLEEP(10)
SELECT pg_terminate_backend(1)
SELECT pg_cancel_backend(1)
SELECT pg_advisory_lock(1)
SELECT pg_notify('x', 'y')
SELECT set_config('statement_timeout', '0', false)
SELECT current_setting('data_directory')
SELECT inet_server_addr()
SELECT version()
SELECT current_user
SELECT session_user
SELECT txid_current()
SELECT nextval('s')
SELECT query_to_xml('SELECT pg_sleep(10)', true, true, '')
SELECT * FROM pg_stat_activity
SELECT * FROM pg_settings
SELECT * FROM pg_catalog.pg_authid
SELECT * FROM pg_hba_file_rules
SELECT 1; SELECT 2
SELECT 1; DROP TABLE purchase
SELECT $$a$$
SELECT E'\\'', pg_sleep(10) --'
SELECT U&'\\0061'
SELECT 1 /* /* ' */ */ , pg_sleep(10) /* ' */
"""

HANGS = {
    "series": "SELECT count(*) FROM generate_series(1, 100000000000)",
    "cross join": "SELECT count(*) FROM generate_series(1, 1000000) a, generate_series(1, 1000000) b WHERE a + b = 3",
    "recursive": "WITH RECURSIVE c(x) AS (SELECT 1::bigint UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "native": "SELECT count(*) FROM generate_series(1, 10000000) g WHERE md5(repeat('a', 100000) || g) = 'x'",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SqlEngine]:
    with SqlEngine(Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)) as engine:
        yield engine


@pytest.fixture(scope="module")
def shop(server: Server) -> Database:
    return server.shop


def test_every_statement_that_is_no_query_of_the_data_is_refused(shop: Database) -> None:
    with SqlEngine(Limits(timeout_s=30)) as engine:  # long enough for a busy machine: none of them may run at all
        for sql in REFUSED.strip().splitlines():
            result = run(engine, shop, sql)
            assert result.status is ExecutionStatus.REFUSED, (sql, result)
            assert "127.0.0.1" not in (result.error or "")
        assert run(engine, shop, "SELECT count(*), min(name) FROM customer").rows == ((4, "Ada"),)
        assert run(engine, shop, "SELECT count(*) FROM purchase").rows == ((5,),)


def test_the_server_refuses_by_itself_what_the_allow_list_refuses(server: Server) -> None:
    refused = psycopg.errors.InsufficientPrivilege
    with psycopg.connect(server.shop.location, autocommit=True) as connection:
        for call in ("pg_sleep(0)", "lo_create(0)", "set_config('work_mem', '1GB', false)", "pg_notify('x', 'y')"):
            with pytest.raises(refused):
                connection.execute(f"SELECT {call}".encode())
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("CREATE TEMP TABLE t (a int)")
        with pytest.raises((refused, psycopg.errors.ReadOnlySqlTransaction)):
            connection.execute("INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1)")


@pytest.mark.parametrize("name", HANGS)
def test_the_clock_fires_within_a_fifth(engine: SqlEngine, shop: Database, name: str) -> None:
    check_clock(engine, shop, HANGS[name])


def running(server: Server, seconds: float) -> int:
    """Transactions of readers that are still open after so many seconds; 0 as soon as there are none."""
    query = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE usename = 'reader'"
    until = time.monotonic() + seconds
    with psycopg.connect(server.admin, autocommit=True) as admin:  # whether they are active is shown to nobody
        while True:
            row = admin.execute(query).fetchone()
            if row == (0,) or time.monotonic() > until:
                return row[0] if row else 0
            time.sleep(0.02)


def test_a_statement_is_gone_from_the_server_at_its_limit(shop: Database, server: Server) -> None:
    """The server's own timeout begins anew at each FETCH: here the first takes a part of the limit."""
    with SqlEngine(Limits(timeout_s=2)) as engine:
        rows = "CASE g WHEN 1 THEN 6000000 WHEN 65 THEN 100000000000 ELSE 1 END"
        result = run(
            engine, shop, f"SELECT (SELECT count(*) FROM generate_series(1, {rows})) FROM generate_series(1, 99) g"
        )
        assert running(server, 0.3) == 0
        assert (result.status, result.error_class) == (ExecutionStatus.TIMEOUT, "timeout"), result
        assert run(engine, shop, "SELECT 1").rows == ((1,),)


def test_a_statement_ends_when_its_worker_is_gone(shop: Database, server: Server) -> None:
    with SqlEngine(Limits(timeout_s=30)) as engine:

        async def leave() -> None:
            query = asyncio.ensure_future(engine.execute(shop, HANGS["cross join"]))
            await asyncio.sleep(1.0)
            assert running(server, 0) > 0
            query.cancel()
            await asyncio.gather(query, return_exceptions=True)

        run(engine, shop, "SELECT 1")
        asyncio.run(leave())
        assert running(server, 5.0) == 0


def test_a_lock_is_told_in_time_and_is_not_the_querys_fault(engine: SqlEngine, shop: Database, server: Server) -> None:
    with psycopg.connect(server.admin) as holder:
        holder.execute("LOCK TABLE shop.customer IN ACCESS EXCLUSIVE MODE")
        result, took = timed(engine, shop, "SELECT count(*) FROM customer", 1.2)
    assert took <= 1.2
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_locked")


def test_a_large_cell_ends_at_a_limit(engine: SqlEngine, shop: Database) -> None:
    result = run(engine, shop, "SELECT repeat('x', 900000000)")
    assert result.status in (ExecutionStatus.LIMIT, ExecutionStatus.TIMEOUT), result
    cut = run(engine, shop, "SELECT repeat('x', 10000) FROM generate_series(1, 900)")
    assert cut.truncated
    assert 90 <= len(cut.rows) <= 100


def test_a_superuser_is_turned_away(engine: SqlEngine, server: Server) -> None:
    result = run(engine, Database("x", "postgres", server.admin), "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "too_privileged")


def test_a_missing_server_is_unavailable(engine: SqlEngine) -> None:
    nowhere = Database("x", "postgres", "host=127.0.0.1 port=1 user=x password=hidden")
    result = run(engine, nowhere, "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_missing")
    with pytest.raises(DataError) as raised:
        introspect(nowhere)
    assert "hidden" not in str(raised.value) + (result.error or "")


def test_a_connection_that_broke_is_made_anew(engine: SqlEngine, shop: Database, server: Server) -> None:
    run(engine, shop, "SELECT 1")
    with psycopg.connect(server.admin, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'reader'")
    first = run(engine, shop, "SELECT 1")
    assert first.ok or first.status is ExecutionStatus.UNAVAILABLE
    assert run(engine, shop, "SELECT 1").rows == ((1,),)


def test_values_are_plain(engine: SqlEngine, shop: Database) -> None:
    sql = """SELECT 1, 1.5::float8, 2.50::numeric, 7::numeric, true, 'a', 'NaN'::float8, DATE '2024-02-29',
        TIMESTAMP '2024-02-29 01:02:03', ARRAY[1, 2], '{"a": 1}'::json, NULL, '\\x00ff'::bytea"""
    assert run(engine, shop, sql).rows == (
        (1, 1.5, 2.5, 7, 1, "a", "NaN", "2024-02-29", "2024-02-29 01:02:03", "[1, 2]", '{"a": 1}', None, b"\0\xff"),
    )


@pytest.mark.parametrize(
    ("sql", "error_class"),
    [
        ("SELEC 1", "syntax"),
        ("SELECT FROM WHERE", "syntax"),
        ("SELECT nope FROM customer", "no_such_column"),
        ("SELECT 1 FROM nope", "no_such_table"),
        ("SELECT id FROM customer, purchase", "ambiguous_column"),
        ("SELECT city FROM customer GROUP BY name", "misuse"),
        ("SELECT 1 / 0", "runtime"),
        ("", "empty"),
        ("SELECT '\ud800'", "syntax"),
    ],
)
def test_an_error_has_a_class(engine: SqlEngine, shop: Database, sql: str, error_class: str) -> None:
    assert run(engine, shop, sql).error_class == error_class
