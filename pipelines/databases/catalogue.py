"""Read a database for its card: catalogue, comments, sizes and a few rows, each within limits."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import ExecutionStatus, Scalar, text_of
from pipelines.databases import named as addresses
from pipelines.databases.card import ColumnCard, DatabaseCard, Reference, TableCard
from pipelines.databases.named import OpenableDatabase
from pipelines.sql import schema as catalogs
from pipelines.sql.dialects.dialect import Role
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema, introspect

# Findings of a database that mislead an agent: no keys, codes, several ways to write a date, cryptic names, empty
# tables; and columns that look like personal data. By names and by a few rows, so a finding is a reason to look, and no
# proof.

Samples = Mapping[str, Sequence[Scalar]]  # some values of each column of a table, in the order of its rows

MOST_CODES = 12  # distinct values of a column of codes, at most
CODE_CHARS = 3
FEWEST = 4  # values without which a column is not judged
LIMITS = Limits(timeout_s=5.0, max_rows=200, max_bytes=4_000_000)  # of a statement that reads rows or counts them
SECONDS = 120.0  # for all counts and samples; tables after that have none
AT_ONCE = 50
SHOWN_VALUES, VALUE_CHARS = 3, 40
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
    """One likely problem: its `kind`, where it is ("table" or "table.column"), and the advice."""

    kind: str
    where: str
    advice: str


def examine(schema: Schema, samples: Mapping[str, Samples], rows: Mapping[str, int | None]) -> list[DatabaseFinding]:
    """All findings, table by table. A table whose rows could not be read has no `samples`, and one whose rows were not
    counted has None for `rows`.
    """
    findings = [("left out", name, reason) for name, reason in schema.left_out]
    if len(schema.tables) > 1 and not any(table.foreign_keys for table in schema.tables):
        findings.append(("no keys", "the database", "no foreign keys: say in the descriptions which columns join"))
    for table in schema.tables:
        if rows.get(table.name) == 0:
            findings.append(("no rows", table.name, "no rows: hide it if nobody asks for it"))
        if not any(column.primary_key for column in table.columns):
            findings.append(("no keys", table.name, "no primary key: say in its description what one row is"))
        names = (table.name, *(column.name for column in table.columns))
        cryptic = {name for name in names if name.lower() not in _KNOWN and _CRYPTIC.fullmatch(name)}
        if table.name in cryptic:
            findings.append(("cryptic name", table.name, "a cryptic name: describe it"))
        keys = {key.column for key in table.foreign_keys}
        for column in table.columns:
            where, name = f"{table.name}.{column.name}", column.name
            values = [value for value in samples.get(table.name, {}).get(name, ()) if value is not None]
            texts = [value.strip() for value in values if isinstance(value, str)]
            # Personal data: by the column's name, or by values of which most are e-mail addresses.
            if _PERSONAL.search(name) or 2 * len([*filter(_EMAIL.fullmatch, texts)]) > len(values) > 0:
                advice = "looks like personal data: set `hidden: true` unless questions may reach it"
                findings.append(("personal data", where, advice))
            if name in cryptic:
                findings.append(("cryptic name", where, "a cryptic name: describe it"))
            formats = [form for form, pattern in _DATES.items() if any(map(pattern.fullmatch, texts))]
            if len(formats) > 1:
                advice = f"dates in several forms ({', '.join(formats)}): comparing them as text goes wrong"
                findings.append(("mixed dates", where, advice))
            # Codes are a few repeated values: short texts, or numbers in a column so named.
            distinct = set(values)
            is_repeated = len(values) >= FEWEST and 1 < len(distinct) <= min(MOST_CODES, len(values) - 1)
            if is_repeated and not column.primary_key and name not in keys:
                is_code = all(isinstance(value, int) for value in distinct) and _CODE_NAMES.search(name) is not None
                if len(texts) == len(values):
                    is_code = all(len(text) <= CODE_CHARS for text in texts)
                if is_code:
                    codes = ", ".join(sorted(map(str, distinct)))
                    findings.append(("codes", where, f"holds codes ({codes}): say in its description what they mean"))
    return [DatabaseFinding(*finding) for finding in findings]


def role(named: OpenableDatabase) -> tuple[Role, dict[str, int | None]]:
    """The rights of the connection's role, and the schemas that it may use (see `Dialect.schema_query`)."""
    dialect = DIALECTS[named.database.engine]
    try:
        with dialect.catalog(named.database.location, LIMITS.timeout_s) as opened:
            schemas = opened.query(dialect.schema_query) if dialect.schema_query else ()
            return dialect.role(opened.query), dict(schemas)
    except Exception as error:  # each driver has an error tree of its own
        why = addresses.why_unreachable(error)
        hint = f"A password comes from the variable {dialect.password_variable}." if "password" in why else ""
        raise DataError(f"{named.database.id} cannot be opened: {why}", hint) from None


def read(
    named: OpenableDatabase, password_env: str | None, schemas: Sequence[str] = ()
) -> tuple[DatabaseCard, list[DatabaseFinding]]:
    """Read the card of a database that can be opened, and its likely problems. `schemas` are those of a DuckDB file
    that are read; () for all.
    """
    database = named.database
    schema = introspect(database)
    if schemas:
        schema = schema.of_schemas(schemas)
    if not schema.tables:
        if not DIALECTS[database.engine].is_server:
            raise DataError(f"{database.id} has no tables", "Make some first, or pass another file.")
        hint = "Grant it SELECT, and on PostgreSQL the USAGE of the schema; or name another one with --schema."
        raise DataError(f"{database.id} has no tables that this role may read", hint)
    comments = catalogs.comments(database) if DIALECTS[database.engine].comments_query else {}

    # Some rows of each table, and their number; of a table that fails or comes too late there is nothing.
    samples: dict[str, Samples] = {}
    rows: dict[str, int | None] = {}
    deadline = time.monotonic() + SECONDS
    with SqlEngine(LIMITS) as sql:
        for start in range(0, len(schema.tables), AT_ONCE):
            tables = schema.tables[start : start + AT_ONCE]
            if time.monotonic() > deadline:
                break
            statements = []
            for table in tables:
                names = ", ".join(schema.quoted(column.name) for column in table.columns)
                statements.append(f"SELECT {names} FROM {schema.written(table.name)} LIMIT {LIMITS.max_rows}")
                statements.append(f"SELECT count(*) FROM {schema.written(table.name)}")
            results = sql.execute_many([(database, statement) for statement in statements])
            if all(result.status is ExecutionStatus.UNAVAILABLE for result in results):
                raise DataError(f"{database.id} cannot be read: {results[0].error}", "Nothing was written.")
            for table, sample, counted in zip(tables, results[::2], results[1::2], strict=True):
                if sample.ok:
                    values = zip(*sample.rows, strict=True) if sample.rows else ((),) * len(table.columns)
                    samples[table.name] = dict(zip((c.name for c in table.columns), values, strict=True))
                count = counted.rows[0][0] if counted.ok and counted.rows else None
                rows[table.name] = count if isinstance(count, int) else None

    findings, cards = examine(schema, samples, rows), {}
    for table in schema.tables:
        lacking = [] if table.name in samples else ["its example values"]
        lacking += ["the number of its rows"] if rows.get(table.name) is None else []
        if lacking:
            limit = LIMITS.timeout_s if table.name in rows else SECONDS
            advice = f"the card lacks {' and '.join(lacking)}: reading failed, or took more than {limit:.0f} s"
            findings.append(DatabaseFinding("not read", table.name, advice))
    personal = {finding.where for finding in findings if finding.kind == "personal data"}
    for table in schema.tables:
        columns = {}
        for column in table.columns:
            # The first few distinct values, as a person may read and edit them; none of personal data.
            sampled = samples.get(table.name, {}).get(column.name, ())
            shown = dict.fromkeys(
                value if isinstance(value, int | float) and value - value == 0 else text_of(value)[:VALUE_CHARS]
                for value in (() if f"{table.name}.{column.name}" in personal else sampled)
                if value is not None and not isinstance(value, bytes) and str(text_of(value)).isprintable()
            )
            columns[column.name] = ColumnCard(
                type=column.type,
                key=column.primary_key,
                description=comments.get((table.name, column.name), ""),
                values=tuple(shown)[:SHOWN_VALUES],
            )
        cards[table.name] = TableCard(
            description="; ".join(filter(None, (comments.get((table.name, "")), table.description))),
            rows=rows.get(table.name),
            columns=columns,
            references=tuple(Reference(**asdict(key)) for key in table.foreign_keys),
        )
    card = DatabaseCard(
        engine=database.engine,
        location=named.address,
        password_env=password_env,
        schemas=tuple(schemas),
        other_schemas=schema.other_schemas,
        tables=cards,
    )
    return card, findings
