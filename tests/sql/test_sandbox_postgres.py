"""What a hostile statement can do to a real PostgreSQL server: nothing."""

import asyncio
import time

import psycopg
import pytest
from clocks import timed
from servers import postgres_schema
from shops import run

from pipelines.core.types import ExecutionStatus
from pipelines.sql.engine import Limits, SqlEngine

pytestmark = pytest.mark.services

CROSS = "SELECT count(*) FROM generate_series(1, 1000000) a, generate_series(1, 1000000) b WHERE a + b = 3"
LIMITS = Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)


def running(server, seconds):
    """Transactions of readers that are still open after so many seconds; 0 as soon as there are none."""
    query = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE usename = 'reader'"
    until = time.monotonic() + seconds
    with psycopg.connect(server.admin, autocommit=True) as admin:  # whether they are active is shown to nobody
        while True:
            row = admin.execute(query).fetchone()
            if row == (0,) or time.monotonic() > until:
                return row[0] if row else 0
            time.sleep(0.02)


def test_a_statement_is_gone_from_the_server_at_its_limit(postgres_shop, server):
    """The server's own timeout begins anew at each FETCH: here the first takes a part of the limit."""
    with SqlEngine(Limits(timeout_s=2)) as engine:
        rows = "CASE g WHEN 1 THEN 6000000 WHEN 65 THEN 100000000000 ELSE 1 END"
        sql = f"SELECT (SELECT count(*) FROM generate_series(1, {rows})) FROM generate_series(1, 99) g"
        result = run(engine, postgres_shop, sql)
        assert running(server, 0.3) == 0
        assert (result.status, result.error_class) == (ExecutionStatus.TIMEOUT, "timeout"), result
        after = run(engine, postgres_shop, "SELECT 1")
        assert after.rows == ((1,),), after


def test_a_statement_ends_when_its_worker_is_gone(postgres_shop, server):
    with SqlEngine(Limits(timeout_s=30)) as engine:

        async def leave():
            query = asyncio.ensure_future(engine.execute(postgres_shop, CROSS))
            await asyncio.sleep(1.0)
            assert running(server, 0) > 0
            query.cancel()
            await asyncio.gather(query, return_exceptions=True)

        run(engine, postgres_shop, "SELECT 1")
        asyncio.run(leave())
        assert running(server, 5.0) == 0


def test_a_locked_table_is_unavailable_in_time(engine, postgres_shop, server):
    with psycopg.connect(server.admin) as holder:
        holder.execute("LOCK TABLE shop.customer IN ACCESS EXCLUSIVE MODE")
        result, took = timed(engine, postgres_shop, "SELECT count(*) FROM customer", 1.2)
    assert took <= 1.2
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_locked")


def test_a_connection_that_broke_is_made_anew(engine, postgres_shop, server):
    run(engine, postgres_shop, "SELECT 1")
    with psycopg.connect(server.admin, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'reader'")
    first = run(engine, postgres_shop, "SELECT 1")
    assert first.ok or first.status is ExecutionStatus.UNAVAILABLE
    assert run(engine, postgres_shop, "SELECT 1").rows == ((1,),)


def test_a_function_of_the_database_that_writes_is_refused_and_writes_nothing(engine, server):
    """Its owner may write, and it runs with the rights of its owner; so does what a view of it calls."""
    script = """
        CREATE TABLE note (body text);
        CREATE FUNCTION leave_note() RETURNS int LANGUAGE plpgsql SECURITY DEFINER
            AS $$ BEGIN INSERT INTO own_functions.note VALUES ('mark'); RETURN 1; END $$;
        CREATE VIEW left_notes AS SELECT leave_note() AS n;
        CREATE SEQUENCE counter; GRANT USAGE ON SEQUENCE counter TO reader
    """
    writing = "WITH gone AS (DELETE FROM note RETURNING body) SELECT body FROM gone"
    calls = [
        "leave_note()",
        "own_functions.leave_note()",
        "* FROM leave_note()",
        "n FROM left_notes",
        "nextval('counter')",
    ]
    with postgres_schema(server, "own_functions", script) as (owner, database):
        owner.execute("INSERT INTO own_functions.note VALUES ('first')")
        results = [run(engine, database, statement) for statement in [writing, *(f"SELECT {call}" for call in calls)]]
        assert [(result.status, result.error_class) for result in results] == [
            (ExecutionStatus.REFUSED, "not_authorized")
        ] * 6
        assert owner.execute("SELECT body FROM own_functions.note").fetchall() == [("first",)]
        assert owner.execute("SELECT is_called FROM own_functions.counter").fetchone() == (False,)
