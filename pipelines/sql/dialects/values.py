"""Values of engines with rich types, as the plain ones that all dialects give: int, float, text, bytes, NULL.

Whatever a driver makes of a value comes through here, so nothing in here may fail: a value of a type that nobody
thought of is shown as text.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = tuple[Any, ...]
PLAIN = frozenset((str, bytes, type(None)))
# An integer beyond this is text: Python refuses to write one of more than 4,300 digits, and no engine computes with it
# faster than with text. DuckDB's largest, UHUGEINT, is still a number.
LARGEST = 1 << 128
MAX_DEPTH = 100  # of lists in lists
FLOAT_DIGITS = 308  # a number with more digits before its point is no float


def plain_rows(rows: Sequence[Sequence[Any]]) -> list[Row]:
    """Rows of plain values."""
    return [row if PLAIN.issuperset(map(type, row)) else tuple(map(plain, row)) for row in map(tuple, rows)]


def plain(value: Any) -> Any:
    """A value as SQLite would hold it: truth as 1 and 0, dates as ISO text, lists and structs as JSON.

    NaN is the text "NaN": as a number it would be unequal to itself, and a right answer unequal to the gold.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is int:
        return value if -LARGEST < value < LARGEST else _digits(decimal.Decimal(value))
    if kind is float:
        return "NaN" if math.isnan(value) else value
    if kind is bool:
        return int(value)
    if kind is decimal.Decimal:
        return number(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple, Mapping, set, frozenset)):
        return json.dumps(_nested(value, MAX_DEPTH), ensure_ascii=False)
    return str(value)


def number(value: decimal.Decimal) -> int | float | str:
    """A whole number as an int when it is declared whole, else a float: what SQLite computes with. Text when it is
    beyond both.
    """
    if not value.is_finite():
        return "NaN" if value.is_nan() else float(value)
    if value.as_tuple().exponent == 0:
        return int(value) if -LARGEST < value < LARGEST else _digits(value)
    return float(value) if value.adjusted() < FLOAT_DIGITS else _digits(value)


def _digits(value: decimal.Decimal) -> str:
    return format(value, "f")


def _nested(value: Any, depth: int) -> Any:
    """A list or struct with nothing in it that JSON cannot say."""
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {_key(key): _nested(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_nested(item, depth - 1) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, decimal.Decimal):
        return str(value)
    item = plain(value)
    return str(item) if isinstance(item, bytes) or (isinstance(item, float) and math.isinf(item)) else item


def _key(key: Any) -> str:
    return key if isinstance(key, str) else str(plain(key))
