"""Read a database for its card: catalogue, comments, sizes and a few rows, each within limits."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, ExecutionResult, ExecutionStatus, Scalar, shortened, text_of
from pipelines.databases.card import ColumnCard, DatabaseCard, Reference, TableCard
from pipelines.databases.named import OpenableDatabase, hidden_parts, why_unreachable
from pipelines.sql.dialects.dialect import Role
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema, Table, introspect, read_comments

# Findings about a database that mislead an agent: no keys, codes, several ways to write a date, cryptic names, empty
# tables; and columns that look like personal data. They come from names and a few rows, so a finding is a reason to
# look, and no proof.

Samples = Mapping[str, Sequence[Scalar]]  # some values of each column of a table, in the order of its rows

MOST_CODES = 12  # distinct values of a column of codes, at most
CODE_CHARS = 3
FEWEST = 4  # values that a column must have to be judged
LIMITS = Limits(timeout_s=5.0, max_rows=200, max_bytes=4_000_000)  # limits of a statement that reads or counts rows
SECONDS = 120.0  # time for all counts and samples; tables after that have none
AT_ONCE = 10  # tables that are read at once: the time is looked at behind them
SHOWN_VALUES = 3  # example values of a column
VALUE_CHARS = 40  # characters of an example value
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
    """A likely problem: its `kind`, where it is ("table" or "table.column"), and the advice."""

    kind: str
    where: str
    advice: str


@dataclass
class TablesRead:
    """What could be read of a database's tables."""

    samples: dict[str, Samples] = field(default_factory=dict)  # some rows by table.
    rows: dict[str, int | None] = field(default_factory=dict)  # number of rows by table; None if it failed.
    hidden: set[str] = field(default_factory=set)  # tables of which some part is hidden.


def find_problems(
    schema: Schema, samples: Mapping[str, Samples], rows: Mapping[str, int | None]
) -> list[DatabaseFinding]:
    """All findings, table by table.

    Args:
        samples: some rows of each table that could be read.
        rows: the number of rows by table; None if they were not counted.
    """
    findings = [DatabaseFinding("left out", name, reason) for name, reason in schema.left_out]
    has_foreign_keys = any(table.foreign_keys for table in schema.tables)
    if len(schema.tables) > 1 and not has_foreign_keys:
        advice = "no foreign keys: say in the descriptions which columns join"
        findings.append(DatabaseFinding("no keys", "the database", advice))
    for table in schema.tables:
        samples_of_table = samples.get(table.name, {})
        n_rows = rows.get(table.name)
        findings += _examine_table(table, samples_of_table, n_rows)
    return findings


def _examine_table(table: Table, samples: Samples, rows: int | None) -> Iterator[DatabaseFinding]:
    if rows == 0:
        yield DatabaseFinding("no rows", table.name, "no rows: hide it if nobody asks for it")
    has_primary_key = any(column.primary_key for column in table.columns)
    if not has_primary_key:
        yield DatabaseFinding("no keys", table.name, "no primary key: say in its description what one row is")
    if _is_cryptic(table.name):
        yield DatabaseFinding("cryptic name", table.name, "a cryptic name: describe it")
    foreign_keys = {key.column for key in table.foreign_keys}
    for column in table.columns:
        where = f"{table.name}.{column.name}"
        is_key = column.primary_key or column.name in foreign_keys
        stored = samples.get(column.name, ())
        values = [value for value in stored if value is not None]
        yield from _examine_column(where, column.name, values, is_key)


def _examine_column(where: str, name: str, values: Sequence[Scalar], is_key: bool) -> Iterator[DatabaseFinding]:
    texts = [value.strip() for value in values if isinstance(value, str)]
    is_personal = _PERSONAL.search(name) is not None or _are_mostly_emails(values, texts)
    if is_personal:
        advice = "looks like personal data: set `hidden: true` unless questions may reach it"
        yield DatabaseFinding("personal data", where, advice)
    if _is_cryptic(name):
        yield DatabaseFinding("cryptic name", where, "a cryptic name: describe it")
    formats = []
    for form, pattern in _DATES.items():
        if any(map(pattern.fullmatch, texts)):
            formats.append(form)
    if len(formats) > 1:
        shown_formats = ", ".join(formats)
        advice = f"dates in several forms ({shown_formats}): comparing them as text goes wrong"
        yield DatabaseFinding("mixed dates", where, advice)
    if not is_key and not is_personal and _holds_codes(name, values, texts):
        distinct = set(values)
        codes = ", ".join(sorted(map(str, distinct)))
        advice = f"holds codes ({codes}): say in its description what they mean"
        yield DatabaseFinding("codes", where, advice)


def _are_mostly_emails(values: Sequence[Scalar], texts: Sequence[str]) -> bool:
    n_emails = sum(_EMAIL.fullmatch(text) is not None for text in texts)
    return 2 * n_emails > len(values)


def _is_cryptic(name: str) -> bool:
    return name.lower() not in _KNOWN and _CRYPTIC.fullmatch(name) is not None


def _holds_codes(name: str, values: Sequence[Scalar], texts: Sequence[str]) -> bool:
    """Whether a column holds codes: a few repeated values, as short texts, or as numbers in a column so named."""
    if len(values) < FEWEST:
        return False
    distinct = set(values)
    most_distinct = min(MOST_CODES, len(values) - 1)
    if not 1 < len(distinct) <= most_distinct:
        return False
    if len(texts) == len(values):
        return all(len(text) <= CODE_CHARS for text in texts)
    are_whole_numbers = all(isinstance(value, int) for value in distinct)
    return are_whole_numbers and _CODE_NAMES.search(name) is not None


def connection_role(named: OpenableDatabase) -> tuple[Role, dict[str, int | None]]:
    """The rights of the connection's role, and the schemas that it may use (see `Dialect.schema_query`)."""
    dialect = DIALECTS[named.database.engine]
    try:
        with dialect.catalog(named.database.location, LIMITS.timeout_s) as opened:
            schemas: dict[str, int | None] = {}
            if dialect.schema_query:
                schemas = dict(opened.query(dialect.schema_query))
            return dialect.role(opened.query), schemas
    except Exception as error:  # each driver has an error tree of its own
        reason = why_unreachable(error)
        hint = ""
        if "password" in reason:
            hint = f"A password comes from the variable {dialect.password_variable}."
        raise DataError(f"{named.database.id} cannot be opened: {reason}", hint) from None


def read_catalogue(
    named: OpenableDatabase, password_env: str | None, schemas: Sequence[str] = ()
) -> tuple[DatabaseCard, list[DatabaseFinding]]:
    """Read the card of a database that can be opened, and its likely problems.

    No value of what an earlier card hides is looked at, told or written, be it through a view or a computed column.

    Args:
        password_env: the environment variable that holds the password, for the card.
        schemas: those of a DuckDB file that are read; () for all.
    """
    database = named.database
    schema = introspect(database)
    if schemas:
        schema = schema.of_schemas(schemas)
    if not schema.tables:
        raise _no_tables(database)
    comments = read_comments(database)
    tables_read = _sample_tables(named, schema)
    samples = tables_read.samples
    rows = tables_read.rows
    findings = find_problems(schema, samples, rows)
    findings += _unread_tables(schema, tables_read)
    personal = {finding.where for finding in findings if finding.kind == "personal data"}
    tables = {}
    for table in schema.tables:
        samples_of_table: dict[str, Sequence[Scalar]] = {}
        for name, values in samples.get(table.name, {}).items():
            if f"{table.name}.{name}" not in personal:
                samples_of_table[name] = values
        n_rows = rows.get(table.name)
        tables[table.name] = _table_card(table, comments, samples_of_table, n_rows)
    card = DatabaseCard(
        engine=database.engine,
        location=named.address,
        password_env=password_env,
        schemas=tuple(schemas),
        other_schemas=schema.other_schemas,
        tables=tables,
    )
    return card, findings


def _table_card(
    table: Table, comments: Mapping[tuple[str, str], str], samples: Samples, n_rows: int | None
) -> TableCard:
    """The card of a table, with the database's own comments and example values."""
    columns = {}
    for column in table.columns:
        values = samples.get(column.name, ())
        columns[column.name] = ColumnCard(
            type=column.type,
            key=column.primary_key,
            description=comments.get((table.name, column.name), ""),
            values=_example_values(values),
        )
    descriptions = (comments.get((table.name, "")), table.description)
    references = [Reference(**asdict(key)) for key in table.foreign_keys]
    return TableCard(
        description="; ".join(filter(None, descriptions)),
        rows=n_rows,
        columns=columns,
        references=tuple(references),
    )


def _no_tables(database: Database) -> DataError:
    """The error about a database without tables, or without any that its role may read."""
    if not DIALECTS[database.engine].is_server:
        return DataError(f"{database.id} has no tables", "Make some first, or pass another file.")
    hint = "Grant it SELECT, and on PostgreSQL the USAGE of the schema; or name another one with --schema."
    return DataError(f"{database.id} has no tables that this role may read", hint)


def _unread_tables(schema: Schema, tables_read: TablesRead) -> Iterator[DatabaseFinding]:
    """The tables whose rows could not be read or counted within the limits; one with hidden parts is no news."""
    for table in schema.tables:
        missing = []
        if table.name not in tables_read.samples:
            missing.append("its example values")
        if tables_read.rows.get(table.name) is None and table.name not in tables_read.hidden:
            missing.append("the number of its rows")
        if missing:
            limit_s = LIMITS.timeout_s if table.name in tables_read.rows else SECONDS
            lacks = " and ".join(missing)
            advice = f"the card lacks {lacks}: reading failed, or took more than {limit_s:.0f} s"
            yield DatabaseFinding("not read", table.name, advice)


def _sample_tables(named: OpenableDatabase, schema: Schema) -> TablesRead:
    """Some rows of each table, and the number of its rows; tables after `SECONDS` have neither."""
    database = named.database
    tables_read = TablesRead()
    deadline = time.monotonic() + SECONDS
    with SqlEngine(LIMITS, hidden=hidden_parts([named])) as sql:
        for start in range(0, len(schema.tables), AT_ONCE):
            if time.monotonic() > deadline:
                break
            tables = schema.tables[start : start + AT_ONCE]
            jobs = []
            for table in tables:
                jobs.append((database, schema.rows_query(table, table.columns, LIMITS.max_rows)))
                jobs.append((database, f"SELECT count(*) FROM {schema.written(table.name)}"))
            results = sql.execute_many(jobs)
            if all(result.status is ExecutionStatus.UNAVAILABLE for result in results):
                raise DataError(f"{database.id} cannot be read: {results[0].error}", "Nothing was written.")
            sampled = results[::2]
            counts = results[1::2]
            for table, sample, counted in zip(tables, sampled, counts, strict=True):
                if sample.ok:
                    tables_read.samples[table.name] = _by_column(table, sample)
                elif sample.error_class == "hidden":
                    tables_read.hidden.add(table.name)
                    tables_read.samples[table.name] = _sample_readable_columns(sql, database, schema, table)
                tables_read.rows[table.name] = _count(counted)
    return tables_read


def _sample_readable_columns(sql: SqlEngine, database: Database, schema: Schema, table: Table) -> Samples:
    """Values of each column that the sandbox lets be read alone."""
    jobs = [(database, schema.rows_query(table, [column], LIMITS.max_rows)) for column in table.columns]
    results = sql.execute_many(jobs)
    values = {}
    for column, result in zip(table.columns, results, strict=True):
        if result.ok:
            values[column.name] = [row[0] for row in result.rows]
    return values


def _count(counted: ExecutionResult) -> int | None:
    """The number that a count gave; None if it failed."""
    if not counted.ok or not counted.rows:
        return None
    count = counted.rows[0][0]
    if not isinstance(count, int):
        return None
    return count


def _by_column(table: Table, sample: ExecutionResult) -> Samples:
    """The values of a sample by the names of the table's columns."""
    values = {}
    for index, column in enumerate(table.columns):
        values[column.name] = [row[index] for row in sample.rows]
    return values


def _example_values(values: Sequence[Scalar]) -> tuple[str | int | float, ...]:
    """The first few distinct values, as a person may read and edit them; an ellipsis ends one that is cut."""
    examples: dict[str | int | float, None] = {}
    for value in values:
        if value is None or isinstance(value, bytes):
            continue
        text = text_of(value)
        if not text.isprintable():
            continue
        if isinstance(value, int | float) and value - value == 0:  # neither infinite nor NaN
            examples[value] = None
        else:
            examples[shortened(text, VALUE_CHARS)] = None
    return tuple(examples)[:SHOWN_VALUES]
