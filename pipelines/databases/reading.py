"""Reads a database for its card: catalogue, comments, sizes and a few rows, each within limits."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import ExecutionStatus, Scalar, text_of
from pipelines.databases import named as addresses
from pipelines.databases.card import ColumnCard, DatabaseCard, Reference, TableCard
from pipelines.databases.named import OpenableDatabase
from pipelines.sql import schema as catalogs
from pipelines.sql.dialects.base import quoted
from pipelines.sql.dialects.dialect import Role
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Column, Schema, Table, introspect

# What will hurt an agent in a database: no keys, codes, several ways to write a date, cryptic names, empty tables;
# and columns that look like personal data. By names and by a few rows, so a finding is a reason to look, and no
# proof.

Samples = Mapping[str, Sequence[Scalar]]  # some values of each column of a table, in the order of its rows

MOST_CODES = 12  # distinct values of a column of codes, at most
CODE_CHARS = 3
FEWEST = 4  # values from which on something can be said
_DATES = {
    "2024-05-31": re.compile(r"\d{4}-\d{1,2}-\d{1,2}([ T].*)?"),
    "31/05/2024": re.compile(r"\d{1,2}/\d{1,2}/\d{2,4}"),
    "31.05.2024": re.compile(r"\d{1,2}\.\d{1,2}\.\d{2,4}"),
    "2024/05/31": re.compile(r"\d{4}/\d{1,2}/\d{1,2}"),
    "31 May 2024": re.compile(r"\d{1,2}[ -][A-Za-z]{3,9}[ -]\d{2,4}"),
    "20240531": re.compile(r"(19|20)\d{2}(0[1-9]|1[0-2])([0-2]\d|3[01])"),
}
_CODE_NAMES = re.compile(r"status|state|type|kind|flag|code|level|category|class|grade|priority", re.IGNORECASE)
_CRYPTIC = re.compile(r"(?i:[a-z]{1,2}|[a-z]{1,5}\d+|[bcdfghjklmnpqrstvwxz]{3,}(_[bcdfghjklmnpqrstvwxz]+)*)")
_WORDS = "id no nr tv pk fk ip url sql db ms km kg cm mm ft lb usd eur vat pct qty sku html css xml csv"
_KNOWN = frozenset(_WORDS.split())
_PERSONAL = re.compile(
    r"e?mail|phone|mobile|ssn|social_?sec|passport|iban|card_?n|cvv|password|passwd|secret|birth|dob$|salary|address"
    r"|tax_?id|licen[cs]e_?n|medical|diagnos",
    re.IGNORECASE,
)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.\w+")


@dataclass(frozen=True)
class DatabaseFinding:
    """One thing to look at: its `kind`, where it is ("table" or "table.column"), and what to do."""

    kind: str
    where: str
    advice: str


def examine(schema: Schema, samples: Mapping[str, Samples], rows: Mapping[str, int | None]) -> list[DatabaseFinding]:
    """All findings, table by table.

    Args:
        samples: by table; a table whose rows could not be read has none.
        rows: rows of each table; None where not counted.
    """
    findings = [finding for table in schema.tables for finding in _of_table(table, samples.get(table.name, {}), rows)]
    if len(schema.tables) > 1 and not any(table.foreign_keys for table in schema.tables):
        advice = "no foreign keys: say in the descriptions which columns join"
        findings.insert(0, DatabaseFinding("no keys", "the database", advice))
    return findings


def _of_table(table: Table, samples: Samples, rows: Mapping[str, int | None]) -> Iterator[DatabaseFinding]:
    if rows.get(table.name) == 0:
        yield DatabaseFinding("no rows", table.name, "no rows: hide it if nobody asks for it")
    if not any(column.primary_key for column in table.columns):
        yield DatabaseFinding("no keys", table.name, "no primary key: say in its description what one row is")
    if _is_cryptic(table.name):
        yield DatabaseFinding("cryptic name", table.name, "a cryptic name: describe it")
    keys = {key.column for key in table.foreign_keys}
    for column in table.columns:
        where = f"{table.name}.{column.name}"
        is_key = column.primary_key or column.name in keys
        yield from (
            DatabaseFinding(*parts[:1], where, parts[1])
            for parts in _of_column(column, is_key, samples.get(column.name, ()))
        )


def _of_column(column: Column, is_key: bool, values: Sequence[Scalar]) -> Iterator[tuple[str, str]]:
    present = [value for value in values if value is not None]
    if is_personal(column.name, present):
        yield "personal data", "looks like personal data: set `hidden: true` unless questions may reach it"
    if _is_cryptic(column.name):
        yield "cryptic name", "a cryptic name: describe it"
    texts = [value.strip() for value in present if isinstance(value, str) and value.strip()]
    formats = [name for name, pattern in _DATES.items() if any(map(pattern.fullmatch, texts))]
    if len(formats) > 1:
        yield "mixed dates", f"dates in several forms ({', '.join(formats)}): comparing them as text goes wrong"
    if not is_key and _are_codes(column.name, present):
        codes = ", ".join(sorted({str(value) for value in present}))
        yield "codes", f"holds codes ({codes}): say in its description what they mean"


def is_personal(name: str, values: Sequence[Scalar]) -> bool:
    """Whether a column looks like personal data: its values are then not put into the card."""
    emails = [value for value in values if isinstance(value, str) and _EMAIL.fullmatch(value.strip())]
    return bool(_PERSONAL.search(name)) or 2 * len(emails) > len(values) > 0


def _is_cryptic(name: str) -> bool:
    return name.lower() not in _KNOWN and _CRYPTIC.fullmatch(name) is not None


def _are_codes(name: str, values: Sequence[Scalar]) -> bool:
    """Whether few short values stand for something: short texts, or numbers in a column so named."""
    distinct = set(values)
    if len(values) < FEWEST or not 1 < len(distinct) <= min(MOST_CODES, len(values) - 1):
        return False
    if all(isinstance(value, str) for value in distinct):
        return all(len(str(value).strip()) <= CODE_CHARS for value in distinct)
    return all(isinstance(value, int) for value in distinct) and _CODE_NAMES.search(name) is not None


LIMITS = Limits(timeout_s=5.0, max_rows=200, max_bytes=4_000_000)  # of a statement that reads rows or counts them
SECONDS = 120.0  # for all counts and samples; tables after that have none
AT_ONCE = 50
SHOWN_VALUES, VALUE_CHARS = 3, 40
Bar = Callable[[int], None]


@dataclass(frozen=True)
class Found:
    """What a database holds, as its card says it, and what in it will hurt."""

    card: DatabaseCard
    findings: list[DatabaseFinding]


def role(named: OpenableDatabase) -> tuple[Role, str]:
    """What the connection's role may do, and the schema that it reads."""
    dialect = DIALECTS[named.database.engine]
    try:
        with dialect.catalog(named.database.location, LIMITS.timeout_s) as opened:
            schema = next(iter(opened.query(dialect.schema_query)))[0] if dialect.schema_query else ""
            return dialect.role(opened.query), str(schema or "")
    except Exception as error:  # each driver has an error tree of its own
        raise DataError(f"{named.database.id} cannot be opened: {addresses.reason(error)}") from None


def read(named: OpenableDatabase, password_env: str | None, on_tables: Bar = lambda done: None) -> Found:
    """The card of a database that can be opened."""
    database = named.database
    schema = introspect(database)
    if not schema.tables:
        raise DataError(f"{database.id} has no tables that this role may read", "Grant it SELECT, or name its schema.")
    words = catalogs.comments(database) if DIALECTS[database.engine].comments_query else {}
    samples, rows = _look(named, schema, on_tables)
    problems = examine(schema, samples, rows)
    personal = {problem.where for problem in problems if problem.kind == "personal data"}
    tables = {table.name: _table(table, samples.get(table.name, {}), rows, words, personal) for table in schema.tables}
    card = DatabaseCard(engine=database.engine, location=named.address, password_env=password_env, tables=tables)
    return Found(card, problems)


def _look(named: OpenableDatabase, schema: Schema, on_tables: Bar) -> tuple[dict[str, Samples], dict[str, int | None]]:
    """Some rows of each table, and how many it has; of what fails or takes too long there is nothing."""
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
