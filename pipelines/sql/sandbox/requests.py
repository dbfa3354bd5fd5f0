"""What a worker is told beside the SQL: where a database lies, its suite, and what the gold query's text decides."""

import functools
import os

from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, ExecutionResult
from pipelines.sql.audit import AuditEntry


def locate(database: Database) -> str:
    """Where a worker finds the database: an absolute path, or a connection string with the environment's password."""
    dialect = DIALECTS[database.engine]
    if dialect.is_server():
        return str(dialect.with_environment(database.location))
    return database.location if database.location.startswith("/") else os.path.abspath(database.location)


def suite_locations(database: Database) -> tuple[str, ...]:
    """All databases of a test suite (Zhong et al. 2020): every `.sqlite` file beside the database, which comes first.

    Only in the official layout, where the directory bears the database's name: elsewhere neighbours are strangers.
    """
    path = locate(database)
    folder = os.path.dirname(path)
    if database.engine != "sqlite" or os.path.basename(folder) != database.id:
        return (path,)
    try:
        return (path, *(other for other in _suite(folder, os.stat(folder).st_mtime_ns) if other != path))
    except OSError:
        return (path,)


@functools.lru_cache(4096)
def _suite(folder: str, changed_ns: int) -> tuple[str, ...]:
    names = [name for name in sorted(os.listdir(folder)) if ".sqlite" in name]
    return tuple(os.path.join(folder, name) for name in names if not name.endswith(("-wal", "-shm", "-journal")))


@functools.lru_cache(65536)
def gold_facts(gold_sql: str) -> tuple[bool, bool]:
    """The fields of `compare.Gold` that the text of the gold query decides."""
    lowered = gold_sql.lower()
    if "order" not in lowered:
        return False, False
    from pipelines.sql.lexical import is_ordered

    return is_ordered(gold_sql), "order by" in lowered


def executed(database: Database, sql: str, result: ExecutionResult) -> AuditEntry:
    """The line of the audit log for a statement that `execute` ran."""
    return AuditEntry(
        database.id,
        database.engine,
        "query",
        sql,
        result.elapsed_ms,
        len(result.rows),
        result.status.value,
        result.error_class,
    )
