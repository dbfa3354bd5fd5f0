"""What will hurt an agent in a database: no keys, codes, several ways to write a date, cryptic names, empty tables; and
columns that look like personal data. By names and by a few rows, so a finding is a reason to look, and no proof.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.sql.schema import Column, Schema, Table
from pipelines.types import Scalar

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
class Finding:
    """One thing to look at: its `kind`, where it is ("table" or "table.column"), and what to do."""

    kind: str
    where: str
    advice: str


def examine(schema: Schema, samples: Mapping[str, Samples], rows: Mapping[str, int | None]) -> list[Finding]:
    """All findings, table by table.

    Args:
        samples: by table; a table whose rows could not be read has none.
        rows: rows of each table; None where not counted.
    """
    findings = [finding for table in schema.tables for finding in _of_table(table, samples.get(table.name, {}), rows)]
    if len(schema.tables) > 1 and not any(table.foreign_keys for table in schema.tables):
        advice = "no foreign keys: say in the descriptions which columns join"
        findings.insert(0, Finding("no keys", "the database", advice))
    return findings


def _of_table(table: Table, samples: Samples, rows: Mapping[str, int | None]) -> Iterator[Finding]:
    if rows.get(table.name) == 0:
        yield Finding("no rows", table.name, "no rows: hide it if nobody asks for it")
    if not any(column.primary_key for column in table.columns):
        yield Finding("no keys", table.name, "no primary key: say in its description what one row is")
    if _is_cryptic(table.name):
        yield Finding("cryptic name", table.name, "a cryptic name: describe it")
    keys = {key.column for key in table.foreign_keys}
    for column in table.columns:
        where = f"{table.name}.{column.name}"
        is_key = column.primary_key or column.name in keys
        yield from (
            Finding(*parts[:1], where, parts[1]) for parts in _of_column(column, is_key, samples.get(column.name, ()))
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
