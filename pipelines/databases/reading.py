"""Reads a database for its card: catalogue, comments, sizes and a few rows, each within limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.databases import addresses, findings
from pipelines.databases.card import Card, ColumnCard, Reference, TableCard
from pipelines.databases.findings import Finding, Samples
from pipelines.databases.named import Named
from pipelines.errors import DataError
from pipelines.registry import DIALECTS
from pipelines.sql import catalogs
from pipelines.sql.catalogs import introspect
from pipelines.sql.dialects.base import quoted
from pipelines.sql.dialects.dialect import Role
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema, Table
from pipelines.types import ExecutionStatus, Scalar, text_of

LIMITS = Limits(timeout_s=5.0, max_rows=200, max_bytes=4_000_000)  # of a statement that reads rows or counts them
SECONDS = 120.0  # for all counts and samples; tables after that have none
AT_ONCE = 50
SHOWN_VALUES, VALUE_CHARS = 3, 40
Bar = Callable[[int], None]


@dataclass(frozen=True)
class Found:
    """What a database holds, as its card says it, and what in it will hurt."""

    card: Card
    findings: list[Finding]


def role(named: Named) -> tuple[Role, str]:
    """What the connection's role may do, and the schema that it reads.

    Raises:
        DataError: the database cannot be opened; says why.
    """
    dialect = DIALECTS[named.database.engine]
    try:
        with dialect.catalog(named.database.location, LIMITS.timeout_s) as opened:
            schema = next(iter(opened.query(dialect.schema_query)))[0] if dialect.schema_query else ""
            return dialect.role(opened.query), str(schema or "")
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"{named.database.id} cannot be opened: {addresses.reason(error)}") from None


def read(named: Named, password_env: str | None, on_tables: Bar = lambda done: None) -> Found:
    """The card of a database that can be opened.

    Raises:
        DataError: its catalogue cannot be read, or it has no tables.
    """
    database = named.database
    schema = introspect(database)
    if not schema.tables:
        raise DataError(f"{database.id} has no tables that this role may read", "Grant it SELECT, or name its schema.")
    words = catalogs.comments(database) if DIALECTS[database.engine].comments_query else {}
    samples, rows = _look(named, schema, on_tables)
    problems = findings.examine(schema, samples, rows)
    personal = {problem.where for problem in problems if problem.kind == "personal data"}
    tables = {table.name: _table(table, samples.get(table.name, {}), rows, words, personal) for table in schema.tables}
    card = Card(engine=database.engine, location=named.address, password_env=password_env, tables=tables)
    return Found(card, problems)


def _look(named: Named, schema: Schema, on_tables: Bar) -> tuple[dict[str, Samples], dict[str, int | None]]:
    """Some rows of each table, and how many it has; of what fails or takes too long there is nothing.

    Raises:
        DataError: none of a good many statements reaches the database.
    """
    samples: dict[str, Samples] = {}
    rows: dict[str, int | None] = {}
    until = time.monotonic() + SECONDS
    with SqlEngine(LIMITS) as sql:
        for start in range(0, len(schema.tables), AT_ONCE):
            tables = schema.tables[start : start + AT_ONCE]
            if time.monotonic() > until:
                break
            jobs = [(named.database, text) for table in tables for text in _looks(table)]
            results = sql.execute_many(jobs)
            if all(result.status is ExecutionStatus.UNAVAILABLE for result in results):
                raise DataError(f"{named.database.id} cannot be read: {results[0].error}", "Nothing was written.")
            for table, sample, counted in zip(tables, results[::2], results[1::2], strict=True):
                if sample.ok:
                    columns = zip(*sample.rows, strict=True) if sample.rows else ((),) * len(table.columns)
                    samples[table.name] = dict(zip((c.name for c in table.columns), columns, strict=True))
                rows[table.name] = _count(counted.rows) if counted.ok else None
            on_tables(start + len(tables))
    return samples, rows


def _looks(table: Table) -> tuple[str, str]:
    names = ", ".join(quoted(column.name) for column in table.columns)
    return (
        f"SELECT {names} FROM {quoted(table.name)} LIMIT {LIMITS.max_rows}",
        f"SELECT count(*) FROM {quoted(table.name)}",
    )


def _count(rows: Sequence[Sequence[Scalar]]) -> int | None:
    return value if rows and isinstance(value := rows[0][0], int) else None


def _table(
    table: Table,
    samples: Samples,
    rows: dict[str, int | None],
    words: dict[tuple[str, str], str],
    personal: set[str],
) -> TableCard:
    def shown(name: str) -> tuple[str | int | float, ...]:
        return () if f"{table.name}.{name}" in personal else _values(samples.get(name, ()))

    low = table.name.lower()
    columns = {
        column.name: ColumnCard(
            type=column.type,
            key=column.primary_key,
            description=words.get((low, column.name.lower()), ""),
            values=shown(column.name),
        )
        for column in table.columns
    }
    references = tuple(
        Reference(column=k.column, to_table=k.to_table, to_column=k.to_column) for k in table.foreign_keys
    )
    return TableCard(
        description=words.get((low, ""), ""), rows=rows.get(table.name), columns=columns, references=references
    )


def _values(values: Sequence[Scalar]) -> tuple[str | int | float, ...]:
    """The first few distinct values, as a person may read and edit them."""
    plain = dict.fromkeys(
        value if isinstance(value, int | float) and value - value == 0 else text_of(value)[:VALUE_CHARS]
        for value in values
        if value is not None and not isinstance(value, bytes) and str(text_of(value)).isprintable()
    )
    return tuple(plain)[:SHOWN_VALUES]
