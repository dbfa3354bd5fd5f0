"""PostgreSQL: a role that may only read, a read-only transaction for each statement, a cursor that takes only
queries.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import psycopg
import psycopg.conninfo

from pipelines.sql.dialects.base import (
    ERROR,
    LIMIT,
    OK,
    REFUSED,
    TIMEOUT,
    UNAVAILABLE,
    Bounds,
    Clock,
    OpenFailure,
    Raw,
    Session,
    failure,
    fetch,
)
from pipelines.sql.dialects.guard import check
from pipelines.sql.dialects.values import plain_rows

# By the class of the SQLSTATE (its first two characters), or by all of it.
_STATES = {
    "57014": (TIMEOUT, "timeout"),
    "25P03": (TIMEOUT, "timeout"),
    "55P03": (UNAVAILABLE, "database_locked"),
    "42P01": (ERROR, "no_such_table"),
    "42703": (ERROR, "no_such_column"),
    "42702": (ERROR, "ambiguous_column"),
    "42883": (ERROR, "no_such_function"),
    "42803": (ERROR, "misuse"),
    "42601": (ERROR, "syntax"),
    "42501": (REFUSED, "not_authorized"),
    "42P03": (REFUSED, "not_authorized"),
    "0A000": (REFUSED, "not_authorized"),
    "25006": (REFUSED, "not_authorized"),
    "54001": (ERROR, "too_complex"),
    "54000": (LIMIT, "cell_limit"),
    "53": (LIMIT, "memory_limit"),
    "22": (ERROR, "runtime"),
    "42": (ERROR, "syntax"),
    "08": (UNAVAILABLE, "database_missing"),
    "57": (UNAVAILABLE, "database_missing"),
    "58": (UNAVAILABLE, "disk"),
    "XX": (UNAVAILABLE, "database_corrupt"),
}
# What a role may be or hold that would make it more than a reader.
_PRIVILEGES = """
SELECT r.rolsuper OR r.rolcreaterole OR r.rolcreatedb OR r.rolreplication OR r.rolbypassrls
    OR pg_has_role(current_user, 'pg_read_server_files', 'member')
    OR pg_has_role(current_user, 'pg_write_server_files', 'member')
    OR pg_has_role(current_user, 'pg_execute_server_program', 'member')
    OR pg_has_role(current_user, 'pg_signal_backend', 'member')
FROM pg_roles r WHERE r.rolname = current_user
"""


class PostgresSession(Session):
    """One connection; `location` is its connection string. The other arguments are as `SqliteSession` has them.

    Its role must be a plain reader (`pipelines.sql.dialects.copies.make_reader` makes one): a superuser is turned away.
    """

    def __init__(self, location: str, bounds: Bounds, clock: Clock) -> None:
        self._bounds = bounds
        self._clock = clock
        self._location = location
        self._connection = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        milliseconds = max(1, int(self._bounds.timeout_s * 1000))
        ours = (
            f"-c default_transaction_read_only=on -c statement_timeout={milliseconds}"
            f" -c lock_timeout={max(1, int(milliseconds * 0.9))} -c standard_conforming_strings=on"
            " -c idle_in_transaction_session_timeout=60000 -c cursor_tuple_fraction=1.0"
        )
        try:
            given = psycopg.conninfo.conninfo_to_dict(self._location)
            connection = psycopg.connect(
                self._location,
                options=f"{given.get('options', '')} {ours}",
                connect_timeout=max(2, int(self._bounds.timeout_s)),
                autocommit=True,
                application_name="sqltrain",
            )
            row = connection.execute(_PRIVILEGES).fetchone()
        except psycopg.Error:
            raise OpenFailure("database_missing", "the database server cannot be reached, or turned us away") from None
        if row is None or row[0]:
            connection.close()
            raise OpenFailure("too_privileged", "the role of this connection may do more than read; use a plain one")
        return connection

    def run(self, sql: str, max_rows: int) -> Raw:
        """Run one statement within the limits."""
        refused = check(sql, "postgres")
        if refused is not None:
            return refused
        start = perf_counter()
        self._clock.arm(self._bounds.timeout_s)
        try:
            if self._connection.closed:
                self._connection = self._connect()
            columns, rows, truncated = self._query(sql, max_rows)
            return Raw(OK, columns, rows, truncated, None, None, (perf_counter() - start) * 1000)
        except OpenFailure as error:
            return failure(UNAVAILABLE, error.error_class, error.message)
        except MemoryError:
            return failure(LIMIT, "memory_limit", "the query needs more memory than it may have")
        except (psycopg.Error, ValueError, OverflowError) as error:
            return self._explain(error)

    def _query(self, sql: str, max_rows: int) -> tuple[tuple[str, ...], list[Any], bool]:
        """Columns, rows, and whether there were more.

        A cursor is declared for the statement, which the server allows for queries only, and with the extended
        protocol, which takes one statement only.
        """
        with self._connection.cursor() as cursor:
            cursor.execute(b"BEGIN READ ONLY")
            try:
                statement = sql.rstrip("; \t\n").encode()
                cursor.execute(b"DECLARE answer NO SCROLL CURSOR FOR " + statement, binary=True)

                def more(count: int) -> list[Any]:
                    return plain_rows(cursor.execute(b"FETCH FORWARD %d FROM answer" % count).fetchall())

                rows, truncated = fetch(more, max_rows, self._bounds.max_bytes)
                return tuple([column.name for column in cursor.description or ()]), rows, truncated
            finally:
                if not self._connection.closed:
                    cursor.execute(b"ROLLBACK")

    def _explain(self, error: Exception) -> Raw:
        state = getattr(error, "sqlstate", None) or ""
        diagnosis = getattr(error, "diag", None)
        message = getattr(diagnosis, "message_primary", None) or "the server gave no answer"
        if "out of memory" in str(error):
            return failure(LIMIT, "memory_limit", "the query needs more memory than it may have")
        if not state:  # no answer of the server: the connection broke, or a value is beyond what Python holds
            return failure(UNAVAILABLE if isinstance(error, psycopg.OperationalError) else ERROR, "connection", message)
        if "is not allowed here" in message:  # SELECT INTO, to a cursor a syntax error
            return failure(REFUSED, "not_authorized", message)
        status, error_class = _STATES.get(state) or _STATES.get(state[:2]) or (ERROR, "runtime")
        if status == TIMEOUT:
            message = f"the query ran longer than {self._bounds.timeout_s:g} s"
        return failure(status, error_class, message)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
