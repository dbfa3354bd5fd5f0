"""Whether the role of a connection may do more than read, and the statements that make one that may not."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pipelines.sql.dialects.dialect import Query
from pipelines.sql.dialects.mysql import is_reader
from pipelines.sql.dialects.postgres import PRIVILEGES

_WRITABLE = """
SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = current_schema() AND c.relkind IN ('r', 'p')
    AND (has_table_privilege(c.oid, 'INSERT') OR has_table_privilege(c.oid, 'UPDATE')
        OR has_table_privilege(c.oid, 'DELETE') OR has_table_privilege(c.oid, 'TRUNCATE'))
ORDER BY 1 LIMIT 3
"""


@dataclass(frozen=True)
class Role:
    """What a connection's role may do beside reading.

    Attributes:
        writes: in words, such as "write to orders"; () for a plain reader.
        is_turned_away: whether the sandbox refuses every statement of it, whatever a person allows.
    """

    writes: tuple[str, ...] = ()
    is_turned_away: bool = False


def examine(engine: str, query: Query) -> Role:
    """What the role of an open connection may do; a file is opened read-only by its engine, and has none."""
    if engine == "postgres":
        if any(row[0] for row in query(PRIVILEGES)):
            return Role(("act as a superuser, or make roles and databases, or reach the server's files",), True)
        return Role(tuple(f"write to {row[0]}" for row in query(_WRITABLE)))
    if engine == "mysql":
        grants = [str(row[0]) for row in query("SHOW GRANTS")]
        more = tuple(grant.partition(" TO ")[0] for grant in grants if not is_reader(grant))
        return Role(more, bool(more))
    return Role()


def grants(engine: str, address: str, schema: str) -> list[str]:
    """Statements for an administrator that make a role that reads this database and does nothing else."""
    name = urlsplit(address).path.strip("/")
    if engine == "mysql":
        place = f"`{name.replace('`', '``')}`"
        return [
            f"CREATE USER '{name}_reader'@'%' IDENTIFIED BY 'a new password';",
            f"GRANT SELECT, SHOW VIEW ON {place}.* TO '{name}_reader'@'%';",
        ]
    role, spot = f'"{name}_reader"', '"' + schema.replace('"', '""') + '"'
    return [
        f"CREATE ROLE {role} LOGIN PASSWORD 'a new password' NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT;",
        f'GRANT CONNECT ON DATABASE "{name}" TO {role};',
        f"GRANT USAGE ON SCHEMA {spot} TO {role};",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {spot} TO {role};",
        f"ALTER ROLE {role} SET default_transaction_read_only = on;",
    ]
