"""Whose fault a failure is: no statement can make its own failure pass for the database's, whatever it says or does."""

import copy
import sqlite3

import duckdb
import psycopg
import pytest
from shops import build_shop

from pipelines.core.types import ExecutionStatus
from pipelines.sql.dialects import duckdb as duck_dialect
from pipelines.sql.dialects import postgres as postgres_dialect
from pipelines.sql.dialects import sqlite as sqlite_dialect
from pipelines.sql.engine import Limits, Pair
from tests.sql.test_sandbox_state import BOUNDS, NoClock

LIMITS = Limits(timeout_s=5, max_rows=1000, max_bytes=1_000_000, memory_mb=256)
# Every text that was once read as a word about the database, the clock or the limits.
SAID = (
    "malformed database schema", "database disk image is malformed", "disk I/O error", "not authorized", "interrupted",
    "out of memory", "failed to allocate", "Could not decode to UTF-8", "too big", "is not allowed here",
    "disabled by configuration", "the database has been locked", "read-only", "unable to open database file",
)  # fmt: skip


def assert_the_statements_own(engine, database, statements):
    verdicts = engine.verdicts([Pair(database, "SELECT 1", sql) for sql in statements], ["strict"])
    for sql, verdict in zip(statements, verdicts, strict=True):
        assert verdict.predicted is ExecutionStatus.ERROR, (sql, verdict)
        assert not verdict.broken, sql


COLLATIONS = [f'SELECT 1 ORDER BY 1 COLLATE "{text}"' for text in SAID]
COLUMNS = [f'SELECT customer."{text}" FROM customer' for text in SAID]
NUMBERS = [f"SELECT CAST('{text}' AS INTEGER)" for text in SAID]


def test_a_statements_words_are_no_database_fault(engine, shop, duckdb_shop):
    assert_the_statements_own(engine, shop, COLLATIONS + COLUMNS)
    assert_the_statements_own(engine, duckdb_shop, COLLATIONS + COLUMNS + NUMBERS)


@pytest.mark.services
def test_what_a_statement_says_is_never_read_as_a_fault_of_the_server(engine, server):
    assert_the_statements_own(engine, server.shop, COLUMNS + NUMBERS)


def test_a_value_that_the_driver_cannot_read_is_no_fault_of_the_database(engine, duckdb_shop):
    tries = ["to_days(-2147483648), to_days(1), 1", "map {date '2024-01-01': 1}, [to_days(2147483647)]; -- and more"]
    first, second = engine.execute_many([(duckdb_shop, f"SELECT {values}") for values in tries])
    assert first.rows == (("-2147483648 days", "1 day", 1),)
    assert second.rows == (('{"2024-01-01": 1}', "[2147483647 days]"),)


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
def test_an_engine_that_fails_at_one_statement_only_is_no_broken_database(duckdb_shop, error):
    session = duck_dialect.DuckdbSession(duckdb_shop.location, BOUNDS, NoClock())
    raw = failed(session, error)
    assert (raw.status, raw.error_class) == ("error", "engine_failure")
    assert session.run("SELECT count(*) FROM customer", 10).rows == [(4,)]
    session.close()


@pytest.mark.parametrize("code", ["CORRUPT", "IOERR_READ", "CANTOPEN", "NOTADB", "BUSY", "LOCKED_SHAREDCACHE"])
def test_a_code_of_sqlite_for_one_statement_is_no_broken_database_and_a_lock_no_fault_of_it(shop, code):
    session = sqlite_dialect.SqliteSession(shop.location, BOUNDS, NoClock())
    error = sqlite3.DatabaseError("any text")
    error.sqlite_errorname = f"SQLITE_{code}"
    raw = failed(session, error)
    locked = {"BUSY": ("unavailable", "database_locked"), "LOCKED_SHAREDCACHE": ("unavailable", "database_locked")}
    assert (raw.status, raw.error_class) == locked.get(code, ("error", "engine_failure"))
    session.close()


def test_a_database_that_went_away_is_unavailable(tmp_path):
    session = sqlite_dialect.SqliteSession(build_shop(tmp_path / "shop.sqlite").location, BOUNDS, NoClock())
    with open(tmp_path / "shop.sqlite", "r+b") as file:
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
