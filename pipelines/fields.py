"""Fields of a row that somebody else wrote: text that is text, names that are names, and what is said of the others."""

from __future__ import annotations

import re
from typing import Any

from pipelines.types import is_sayable

# Names of the fields that hold a row's SQL and its database, in the order in which they are looked at.
SQL = ("sql", "query", "SQL", "gold_sql")
DATABASE = ("database", "db", "db_id", "db_path")
LONGEST_NAME = 200  # bytes of a database's name: file systems take 255, with suffixes


class BadRow(Exception):
    """A row that cannot become an example.

    Args:
        reason: a short stable word.
        detail: one line for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def text_field(row: Any, *names: str, required: bool = True) -> str:
    """The first of a row's fields that holds text, stripped; "" when none does and it is not required.

    Spider's files have the parsed tree under `sql` and the text under `query`.

    Raises:
        BadRow: the row is no JSON object, no field is valid text, or it is required and missing or empty.
    """
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a {type(row).__name__} where an object was expected")
    values = {name: row[name] for name in names if row.get(name) is not None}
    texts = [value.strip() for value in values.values() if isinstance(value, str)]
    if values and not texts:
        name, value = next(iter(values.items()))
        raise BadRow("wrong_type", f"{name} is a {type(value).__name__}, not text")
    text: str = next(filter(None, texts), "")
    if not is_sayable(text):
        raise BadRow("invalid_unicode", f"{names[0]} holds half a character, which no file or database takes")
    if required and not text:
        raise BadRow(f"empty_{names[0].lower()}", f"no {' or '.join(names)}")
    return text


def is_plain_name(id: str) -> bool:
    """Whether a database's name may be part of a path, and with a suffix is no longer than a file's name may be."""
    return bool(re.fullmatch(r"[\w.+ -]+", id)) and not id.startswith(".") and len(id.encode()) <= LONGEST_NAME
