"""Whose fault a failure is: no statement can make its own failure pass for the database's, whatever it says or does."""

import copy
import sqlite3

import duckdb
import psycopg
import pytest
from copies import to_duckdb
from shops import build_shop

from pipelines.core.types import ExecutionStatus
from pipelines.sql.dialects import duckdb as duck_dialect
from pipelines.sql.dialects import postgres as postgres_dialect
from pipelines.sql.dialects import sqlite as sqlite_dialect
from pipelines.sql.dialects.base import Bounds
from pipelines.sql.engine import Limits, Pair, SqlEngine
from tests.sql.test_sandbox_state import NoClock

BOUNDS = Bounds(timeout_s=5.0, max_rows=1000, max_bytes=1_000_000, memory_mb=256)
# Every text that was once read as a word about the database, the clock or the limits.
SAID = (
    "malformed database schema", "database disk image is malformed", "disk I/O error", "not authorized", "interrupted",
    "out of memory", "failed to allocate", "Could not decode to UTF-8", "too big", "is not allowed here",
    "disabled by configuration", "the database has been locked", "read-only", "unable to open database file",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    with SqlEngine(Limits(timeout_s=5, max_rows=1000, max_bytes=1_000_000, memory_mb=256)) as engine:
        yield engine


@pytest.fixture
def shop(tmp_path):
    return build_shop(tmp_path / "shop.sqlite")


@pytest.fixture
def duck(shop, tmp_path):
    return to_duckdb(shop, tmp_path / "shop.duckdb")


def assert_the_statements_own(engine, database, statements):
    verdicts = engine.verdicts([Pair(database, "SELECT 1", sql) for sql in statements], ["strict"])
    for sql, verdict in zip(statements, verdicts, strict=True):
        assert verdict.predicted is ExecutionStatus.ERROR, (sql, verdict)
        assert not verdict.broken, sql


def test_a_statements_words_are_no_database_fault(engine, shop, duck):
    collations = [f'SELECT 1 ORDER BY 1 COLLATE "{text}"' for text in SAID]
    columns = [f'SELECT customer."{text}" FROM customer' for text in SAID]
    numbers = [f"SELECT CAST('{text}' AS INTEGER)" for text in SAID]
    assert_the_statements_own(engine, shop, collations + columns)
    assert_the_statements_own(engine, duck, collations + columns + numbers)


@pytest.mark.services
def test_what_a_statement_says_is_never_read_as_a_fault_of_the_server(engine, server):
    columns = [f'SELECT customer."{text}" FROM customer' for text in SAID]
    numbers = [f"SELECT CAST('{text}' AS INTEGER)" for text in SAID]
    assert_the_statements_own(engine, server.shop, columns + numbers)


def test_a_value_that_the_driver_cannot_read_is_no_fault_of_the_database(engine, duck):
    (result,) = engine.execute_many([(duck, "SELECT to_days(-2147483648), to_days(1), 1")])
    assert result.rows == (("-2147483648 days", "1 day", 1),)
    (result,) = engine.execute_many([(duck, "SELECT map {date '2024-01-01': 1}, [to_days(2147483647)]; -- and more")])
    assert result.rows == (('{"2024-01-01": 1}', "[2147483647 days]"),)


class Fails:
    """A connection whose next statement fails with an error, and which then works as it did."""

    def __init__(self, connection, error):
        self._connection, self._error = connection, error

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def cursor(self):
        return Fails(self._connection.cursor(), self._error)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()

    def execute(self, sql, *rest, **more):
        if "customer" in str(sql) and "json_serialize_sql" not in str(sql):
            raise copy.copy(self._error)  # a kept traceback would keep the connection
        return self._connection.execute(sql, *rest, **more)


def coded(name, message):
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorname = name
    return error


def failed(session, error):
    real = session._connection
    session._connection = Fails(real, error)
    raw = session.run("SELECT count(*) FROM customer", 10)
    session._connection = real
    return raw


ENGINE_FAILURES = [
    duckdb.InternalException('Internal Error: {"exception_type":"INTERNAL","exception_message":"oh"}'),
    duckdb.IOException("IO Error: could not read"),
    duckdb.FatalException("Fatal Error: invalidated"),
    OverflowError("a value is too large"),
    TypeError("keys must be str"),
    RuntimeError("the connection is closed"),
]


@pytest.mark.parametrize("error", ENGINE_FAILURES, ids=lambda error: type(error).__name__)
def test_an_engine_that_fails_at_one_statement_only_is_no_broken_database(duck, error):
    session = duck_dialect.DuckdbSession(duck.location, BOUNDS, NoClock())
    raw = failed(session, error)
    assert (raw.status, raw.error_class) == ("error", "engine_failure")
    assert session.run("SELECT count(*) FROM customer", 10).rows == [(4,)]
    session.close()


@pytest.mark.parametrize("name", ["SQLITE_CORRUPT", "SQLITE_IOERR_READ", "SQLITE_CANTOPEN", "SQLITE_NOTADB"])
def test_a_code_of_sqlite_for_one_statement_only_is_no_broken_database(shop, name):
    session = sqlite_dialect.SqliteSession(shop.location, BOUNDS, NoClock())
    raw = failed(session, coded(name, "any text"))
    assert (raw.status, raw.error_class) == ("error", "engine_failure")
    session.close()


@pytest.mark.parametrize("name", ["SQLITE_BUSY", "SQLITE_LOCKED_SHAREDCACHE"])
def test_a_locked_database_is_never_the_fault_of_the_statement(shop, name):
    session = sqlite_dialect.SqliteSession(shop.location, BOUNDS, NoClock())
    raw = failed(session, coded(name, "any text"))
    assert (raw.status, raw.error_class) == ("unavailable", "database_locked")
    session.close()


def test_a_database_that_went_away_is_unavailable(shop):
    session = sqlite_dialect.SqliteSession(shop.location, BOUNDS, NoClock())
    with open(shop.location, "r+b") as file:
        file.write(b"no database any more" * 1000)
    raw = session.run("SELECT count(*) FROM customer", 10)
    assert (raw.status, raw.error_class) == ("unavailable", "database_corrupt")
    session.close()


@pytest.mark.services
def test_a_failure_inside_the_server_is_laid_at_the_statement_that_meets_it(server):
    session = postgres_dialect.PostgresSession(server.shop.location, BOUNDS, NoClock())
    for error in (psycopg.errors.InternalError_(), psycopg.errors.DataCorrupted(), psycopg.errors.IoError()):
        raw = failed(session, error)
        assert (raw.status, raw.error_class) == ("error", "engine_failure"), error
    raw = failed(session, psycopg.errors.AdminShutdown())
    assert (raw.status, raw.error_class) == ("unavailable", "database_missing")
    raw = failed(session, OverflowError("a value is too large"))
    assert (raw.status, raw.error_class) == ("error", "engine_failure")
    assert session.run("SELECT count(*) FROM customer", 10).rows == [(4,)]
    session.close()
