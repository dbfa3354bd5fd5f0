"""What SQLite's authorizer lets a statement do, and what SQLite's errors mean."""

from __future__ import annotations

import sqlite3

from pipelines.sql.dialects.base import ERROR, LIMIT, REFUSED, TIMEOUT, UNAVAILABLE, Raw, failure

# Action codes of sqlite3_set_authorizer; the module names only some of them before Python 3.12.
PRAGMA, READ, SELECT, UPDATE, FUNCTION, RECURSIVE = 19, 20, 21, 23, 31, 33
ALLOW, DENY = sqlite3.SQLITE_OK, sqlite3.SQLITE_DENY

# Those that only tell; data_version is what a full-text table asks.
_PRAGMAS = """
    collation_list data_version foreign_key_list index_info index_list index_xinfo table_info table_list table_xinfo
"""
# Eponymous virtual tables that show raw pages, prepared statements or paths instead of data.
_HIDDEN_TABLES = "dbstat sqlite_dbpage sqlite_dbdata sqlite_dbptr sqlite_stmt bytecode tables_used"
_FUNCTIONS = """
    abs char coalesce concat concat_ws format glob hex ifnull iif if instr length like likelihood likely lower ltrim
    max min nullif octet_length printf quote random randomblob replace round rtrim sign soundex substr substring trim
    typeof unhex unicode unlikely upper zeroblob changes total_changes last_insert_rowid
    date time datetime julianday unixepoch strftime timediff current_date current_time current_timestamp
    avg count group_concat string_agg sum total median percentile percentile_cont percentile_disc
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power
    radians sin sinh sqrt tan tanh trunc
    json json_array json_array_length json_error_position json_extract json_insert json_object json_patch json_pretty
    json_quote json_remove json_replace json_set json_type json_valid json_group_array json_group_object -> ->>
    match highlight snippet bm25 offsets matchinfo
"""
PRAGMAS = frozenset(_PRAGMAS.split())
HIDDEN_TABLES = frozenset(_HIDDEN_TABLES.split())
FUNCTIONS = frozenset(_FUNCTIONS.split())
MAX_SQL = 1_000_000
# By the name of the result code.
_CODES = {
    "SQLITE_INTERRUPT": (TIMEOUT, "timeout"),
    "SQLITE_AUTH": (REFUSED, "not_authorized"),
    "SQLITE_READONLY": (REFUSED, "not_authorized"),
    "SQLITE_TOOBIG": (LIMIT, "cell_limit"),
    "SQLITE_NOMEM": (LIMIT, "memory_limit"),
    "SQLITE_BUSY": (UNAVAILABLE, "database_locked"),
    "SQLITE_LOCKED": (UNAVAILABLE, "database_locked"),
    "SQLITE_READONLY_ROLLBACK": (UNAVAILABLE, "database_recovering"),
    "SQLITE_READONLY_RECOVERY": (UNAVAILABLE, "database_recovering"),
    "SQLITE_READONLY_CANTINIT": (UNAVAILABLE, "database_recovering"),
    "SQLITE_CANTOPEN": (UNAVAILABLE, "database_unreadable"),
    "SQLITE_NOTADB": (UNAVAILABLE, "database_corrupt"),
    "SQLITE_CORRUPT": (UNAVAILABLE, "database_corrupt"),
    "SQLITE_IOERR": (UNAVAILABLE, "disk"),
    "SQLITE_FULL": (UNAVAILABLE, "disk"),
}
# What kind of mistake it is, by the message: all of these have the one code SQLITE_ERROR.
_MISTAKES = (
    ("no such table", "no_such_table"),
    ("no such column", "no_such_column"),
    ("no such function", "no_such_function"),
    ("ambiguous column", "ambiguous_column"),
    ("misuse of", "misuse"),
    ("wrong number of arguments", "wrong_arguments"),
    ("too many", "too_complex"),
    ("too large", "too_complex"),
    ("stack overflow", "too_complex"),
    ("syntax error", "syntax"),
    ("unrecognized token", "syntax"),
    ("incomplete input", "syntax"),
)
# SQLite refuses these before it asks the authorizer.
_PROTECTED = ("may not be modified", "unsafe use of", "is prohibited", "vtable constructor failed")


def guard(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's authorizer callback: what a prepared statement may do."""
    if action == READ:
        return DENY if first in HIDDEN_TABLES else ALLOW
    if action in (SELECT, RECURSIVE):
        return ALLOW
    if action == FUNCTION:
        return ALLOW if second is not None and second.lower() in FUNCTIONS else DENY
    if action == PRAGMA:
        return ALLOW if first is not None and first.lower() in PRAGMAS else DENY
    return DENY


def guard_of_first_use(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
    """`guard` for a connection that meets a virtual table with the statement itself: SQLite then notes its columns,
    in memory.
    """
    return ALLOW if (action, first) == (UPDATE, "sqlite_master") else guard(action, first, second, *rest)


def classify(error: Exception) -> tuple[str, str]:
    """(status, error class) of what SQLite or its Python module raised."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if not name:  # of the module's own, once text and size are checked: a second statement, or a cell it cannot decode
        several = isinstance(error, sqlite3.ProgrammingError | sqlite3.Warning)
        return (REFUSED, "several_statements") if several else (ERROR, "runtime")
    code = _CODES.get(name) or _CODES.get(general(name))
    if code is not None:
        return code
    message = str(error).lower()
    if any(mark in message for mark in _PROTECTED):
        return REFUSED, "not_authorized"
    return ERROR, next((kind for mark, kind in _MISTAKES if mark in message), "runtime")


def general(name: str) -> str:
    """SQLITE_IOERR_READ is an SQLITE_IOERR."""
    return "_".join(name.split("_")[:2])


def unreadable(sql: str) -> Raw | None:
    """What Python's module would refuse before SQLite sees it, with an exception that has no code."""
    if "\x00" in sql:
        return failure(ERROR, "syntax", "the query contains a null character")
    try:
        size = len(sql) if sql.isascii() else len(sql.encode())
    except UnicodeEncodeError:
        return failure(ERROR, "syntax", "the query is not valid text")
    return failure(LIMIT, "sql_too_long", "the query is longer than a million bytes") if size > MAX_SQL else None


def remedy_of(error: sqlite3.Error) -> str | None:
    """The setting that helps a statement over this failure: "text" or "memory"; None if there is none."""
    name = getattr(error, "sqlite_errorname", None)
    if name is None:  # only the decoding of a cell fails without a code of SQLite's
        return "text" if isinstance(error, sqlite3.OperationalError) else None
    return "memory" if general(name) in ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN") else None
