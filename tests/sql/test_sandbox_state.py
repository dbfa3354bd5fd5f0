"""Each statement meets the session that the first one met, and one clock holds for all that it takes."""

import sqlite3
import threading
import time

import pytest
from shops import build_shop

from pipelines.sql.dialects import guard as fence
from pipelines.sql.dialects.base import Bounds, interrupted_at
from pipelines.sql.dialects.duckdb import DuckdbSession
from pipelines.sql.dialects.mysql import MysqlSession
from pipelines.sql.dialects.postgres import PostgresSession
from pipelines.sql.dialects.sqlite import SqliteSession, guard
from pipelines.sql.engine import Limits, Pair, SqlEngine
from tests.fakes import build_database

BOUNDS = Bounds(timeout_s=5.0, max_rows=1000, max_bytes=1_000_000, memory_mb=256)


class NoClock:
    def arm(self, seconds):
        pass

    def worked(self, units):
        pass


# What a query may try to leave behind; the first was paid for a wrong answer once.
LEFT_BY_DUCKDB = (
    "EXPLAIN ANALYZE CREATE TEMP TABLE customer AS SELECT 9 AS id, 'Eve' AS name, 'Nice' AS city, 1.0 AS credit",
    "EXPLAIN ANALYZE CREATE OR REPLACE TEMP VIEW customer AS SELECT 9 AS id",
    "EXPLAIN ANALYZE CREATE TEMP MACRO lower(x) AS 'Eve'",
    "EXPLAIN CREATE TEMP TABLE customer AS SELECT 1",
    "EXPLAIN ANALYZE SET VARIABLE x = 1",
    "EXPLAIN ANALYZE SELECT 1",
    "EXPLAIN (ANALYZE) CREATE TEMP TABLE customer AS SELECT 1",
    "EXPLAIN (FORMAT json) CREATE TEMP TABLE customer AS SELECT 1",
    "CREATE TEMP TABLE customer AS SELECT 9 AS id",
    "SET search_path = 'temp'",
    "SET SESSION schema = 'temp'",
    "SET VARIABLE x = 1",
    "SET disabled_optimizers = 'filter_pushdown'",
    "USE temp",
    "BEGIN",
    "PREPARE p AS SELECT 1",
    "PRAGMA enable_profiling",
    "ATTACH ':memory:' AS scratch",
    "WITH x AS (DELETE FROM purchase RETURNING *) SELECT * FROM x",
    "WITH x AS (INSERT INTO temp.t VALUES (1) RETURNING *) SELECT * FROM x",
    "SELECT setseed(0.5)",
    "SELECT set_config('TimeZone', 'Asia/Tokyo', false)",
    "FROM (EXPLAIN ANALYZE CREATE TEMP TABLE customer AS SELECT 1)",
)
PIVOT = "PIVOT customer ON city"  # DuckDB makes a type of the cities for it


def session_of_duckdb(session):
    with session._cursor() as cursor:
        asked = (
            "SELECT table_name FROM duckdb_tables() WHERE temporary ORDER BY 1",
            "SELECT view_name FROM duckdb_views() WHERE temporary AND NOT internal ORDER BY 1",
            "SELECT function_name FROM duckdb_functions() WHERE NOT internal ORDER BY 1",
            "SELECT type_name FROM duckdb_types() WHERE NOT internal ORDER BY 1",
            "SELECT name, value FROM duckdb_settings() ORDER BY 1",
            "SELECT * FROM duckdb_variables() ORDER BY 1",
            "SELECT name FROM duckdb_prepared_statements() ORDER BY 1",
            "SELECT database_name FROM duckdb_databases() ORDER BY 1",
            "SELECT current_schema(), current_setting('search_path'), lower('A')",
            "SELECT * FROM customer ORDER BY id",
        )
        return [cursor.execute(sql).fetchall() for sql in asked]


@pytest.fixture
def duck(duckdb_shop):
    session = DuckdbSession(duckdb_shop.location, BOUNDS, NoClock())
    yield session
    session.close()


def test_duckdb_forgets_a_statement_and_explains_a_plain_query(duck):
    before = session_of_duckdb(duck)
    for sql in LEFT_BY_DUCKDB:
        assert duck.run(sql, 10).status in ("refused", "error"), sql
    assert duck.run(PIVOT, 10).columns == ("id", "name", "credit", "Oslo", "Paris", "Rome")
    assert session_of_duckdb(duck) == before
    for sql in ("EXPLAIN SELECT * FROM customer", " explain\nWITH x AS (SELECT 1) FROM x"):
        assert duck.run(sql, 10).status == "ok", sql


def test_duckdb_forgets_without_fences(duck, monkeypatch):
    before = session_of_duckdb(duck)
    monkeypatch.setattr("pipelines.sql.dialects.duckdb.token_refusal", lambda sql, engine: None)
    monkeypatch.setattr("pipelines.sql.dialects.duckdb.duckdb_refusal", lambda *_: None)
    assert len([sql for sql in LEFT_BY_DUCKDB if duck.run(sql, 10).status == "ok"]) > 8
    assert session_of_duckdb(duck) == before


def test_a_poisoned_answer_is_not_paid_and_harms_no_other(duckdb_shop):
    gold = "SELECT name FROM customer"
    pairs = [Pair(duckdb_shop, gold + " WHERE id > 0", LEFT_BY_DUCKDB[0]), Pair(duckdb_shop, gold, gold)]
    with SqlEngine(Limits(timeout_s=5)) as engine:
        assert [verdict.scores for verdict in engine.verdicts(pairs, ["strict"])] == [{"strict": 0.0}, {"strict": 1.0}]
        assert len(engine.execute_many([(duckdb_shop, gold)])[0].rows) == 4


def session_of_sqlite(session):
    connection = session._connection
    connection.set_authorizer(None)
    try:
        asked = (
            "SELECT * FROM sqlite_temp_master",
            "SELECT name, file FROM pragma_database_list",
            "PRAGMA temp_store",
            "PRAGMA cache_size",
            "PRAGMA query_only",
            "PRAGMA trusted_schema",
            "PRAGMA case_sensitive_like",
            "SELECT count(*) FROM customer",
        )
        rows = []
        for sql in asked:
            try:
                rows.append(connection.execute(sql).fetchall())
            except sqlite3.Error as error:
                rows.append([(str(error),)])
        return [*rows, connection.text_factory, connection.in_transaction]
    finally:
        connection.set_authorizer(guard)


LEFT_BY_SQLITE = (
    "CREATE TEMP TABLE customer AS SELECT 9 AS id",
    "ATTACH ':memory:' AS scratch",
    "PRAGMA temp_store = 2",
    "PRAGMA case_sensitive_like = 1",
    "PRAGMA query_only = 0",
    "BEGIN",
    "SAVEPOINT s",
    "SELECT CAST(x'ff41fe' AS TEXT)",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 300)"
    " SELECT count(*) FROM (SELECT DISTINCT zeroblob(100000) || x FROM c)",
)


def test_sqlite_forgets_a_statement(tmp_path):
    session = SqliteSession(build_shop(tmp_path / "shop.sqlite").location, BOUNDS, NoClock())
    before = session_of_sqlite(session)
    for sql in LEFT_BY_SQLITE:
        session.run(sql, 10)
        assert session_of_sqlite(session) == before, sql
    session.close()


LEFT_BY_POSTGRES = (
    "CREATE TEMP TABLE customer AS SELECT 9 AS id",
    "SELECT 9 AS id INTO TEMP customer",
    "SELECT set_config('search_path', 'pg_catalog', false)",
    "SET search_path = pg_catalog",
    "SELECT pg_advisory_lock(1)",
    "PREPARE p AS SELECT 1",
    "BEGIN",
    "LISTEN x",
    "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
    "SELECT setseed(0.5)",
)


def session_of_postgres(session):
    asked = (
        "SELECT name, setting FROM pg_settings WHERE name NOT LIKE 'transaction%' ORDER BY 1",
        "SELECT relname FROM pg_class WHERE relpersistence = 't'",
        "SELECT name FROM pg_prepared_statements",
        "SELECT name FROM pg_cursors WHERE is_holdable",
        "SELECT locktype FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
        "SELECT pg_listening_channels()",
        "SELECT count(*) FROM customer",
    )
    return [session._connection.execute(sql.encode()).fetchall() for sql in asked]


@pytest.mark.services
def test_postgres_forgets_a_statement(server, monkeypatch):
    session = PostgresSession(server.shop.location, BOUNDS, NoClock())
    before = session_of_postgres(session)
    for sql in LEFT_BY_POSTGRES:
        assert session.run(sql, 10).status in ("refused", "error"), sql
        assert session_of_postgres(session) == before, sql
    allow = lambda *_: None  # noqa: E731
    monkeypatch.setattr("pipelines.sql.dialects.postgres.token_refusal", allow)
    monkeypatch.setattr("pipelines.sql.dialects.postgres.postgres_refusal", allow)
    for sql in LEFT_BY_POSTGRES:
        session.run(sql, 10)
        assert session_of_postgres(session) == before, sql
    session.close()


@pytest.mark.parametrize("first", ["sort", "both"])
def test_sqlite_gives_one_verdict_whatever_ran_before(tmp_path, first):
    """A sort that outgrows its cache and then meets text that is not UTF-8 needs both remedies, in either order."""
    counted = "WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c WHERE n < 299)"
    rows = f"{counted} INSERT INTO t SELECT n, zeroblob(20000), CAST(x'ff41' AS TEXT) FROM c"
    database = build_database(tmp_path / "bad.sqlite", "CREATE TABLE t (id INTEGER, b BLOB, s TEXT)", rows)
    both = "SELECT DISTINCT b || id, s FROM t ORDER BY 1"
    before = {"sort": "SELECT count(*) FROM (SELECT DISTINCT b || id FROM t)", "both": both}
    limits = Limits(timeout_s=20, memory_mb=256)
    with SqlEngine(limits) as fresh, SqlEngine(limits) as used:
        (alone,) = fresh.execute_many([(database, both)], 3)
        _, after = used.execute_many([(database, before[first]), (database, both)], 3)
    assert alone.ok, alone
    assert [row[1] for row in alone.rows] == ["\ufffdA"] * 3
    assert (after.status, after.rows, after.work) == (alone.status, alone.rows, alone.work)


def test_a_signal_that_is_on_its_way_is_waited_for_and_told():
    """The server's own limit can end a statement while our signal is being sent: it would meet the next statement."""
    begun, returned = threading.Event(), []

    def interrupt():
        begun.set()
        time.sleep(0.2)
        returned.append(time.perf_counter())

    with interrupted_at(time.perf_counter(), interrupt) as calls:
        assert begun.wait(10)
    assert (len(calls), len(returned)) == (1, 1)
    with interrupted_at(time.perf_counter() + 0.2, interrupt) as calls:
        pass
    time.sleep(0.4)
    assert (calls, len(returned)) == ([], 1), "called after the block"


@pytest.mark.services
def test_a_statement_that_was_ended_at_its_limit_is_not_run_again(postgres_shop, monkeypatch):
    runs, rows = [], PostgresSession._rows
    monkeypatch.setattr(PostgresSession, "_rows", lambda self, *query: runs.append(query) or rows(self, *query))
    session = PostgresSession(postgres_shop.location, BOUNDS._replace(timeout_s=0.5), NoClock())
    assert session.run("SELECT count(*) FROM generate_series(1, 100000000000)", 10).status == "timeout"
    session.close()
    assert len(runs) == 1


@pytest.mark.services
@pytest.mark.parametrize(("session_of", "kind"), [(PostgresSession, "postgres_shop"), (MysqlSession, "mysql_shop")])
def test_the_time_to_connect_again_is_not_the_statements(session_of, kind, request, monkeypatch):
    session = session_of(request.getfixturevalue(kind).location, BOUNDS, NoClock())

    def connect(self, *args, **kwargs):
        time.sleep(0.5)
        return connect_at_once(self, *args, **kwargs)

    connect_at_once = session_of._connect
    monkeypatch.setattr(session_of, "_connect", connect)
    session.close() if kind == "mysql_shop" else session._connection.close()
    begun = time.perf_counter()
    assert session.run("SELECT 1", 10).rows == [(1,)]
    session.close()
    assert session.deadline - begun >= BOUNDS.timeout_s + 0.5


class Recorder(NoClock):
    def __init__(self):
        self.events = []

    def arm(self, seconds):
        self.events.append(f"armed {seconds:g}")


def test_the_text_is_looked_at_within_the_clock(duckdb_shop, monkeypatch):
    clock = Recorder()
    session = DuckdbSession(duckdb_shop.location, BOUNDS, clock)

    def check(sql, engine):
        clock.events.append("looked")
        return fence.token_refusal(sql, engine)

    monkeypatch.setattr("pipelines.sql.dialects.duckdb.token_refusal", check)
    session.run("SELECT 1", 10)
    session.close()
    assert clock.events == ["armed 5", "looked"]


def test_a_text_that_takes_long_to_look_at_is_not_looked_at():
    for engine in ("duckdb", "postgres"):
        refused = fence.token_refusal("SELECT " + "1," * fence.MAX_SQL + "1", engine)
        assert (refused.status, refused.error_class) == ("limit", "sql_too_long")


def test_a_second_run_has_what_the_first_one_left(tmp_path, monkeypatch):
    bad = build_database(tmp_path / "bad.sqlite", "CREATE TABLE t AS SELECT CAST(x'ff' AS TEXT) AS s")
    clock, deadlines = Recorder(), []
    session = SqliteSession(bad.location, BOUNDS, clock)

    def executed(connection, sql):
        deadlines.append(session.deadline)
        return connection.execute(sql)

    monkeypatch.setattr("pipelines.sql.dialects.sqlite.executed", executed)
    assert session.run("SELECT s FROM t", 10).rows == [("\ufffd",)]
    session.close()
    assert deadlines == [deadlines[0]] * 2
    assert clock.events == ["armed 5"]
