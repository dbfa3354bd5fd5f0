"""Values of engines with rich types, as the plain ones that all dialects give: int, float, text, bytes, NULL."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Sequence
from typing import Any

Row = tuple[Any, ...]
PLAIN = frozenset((int, str, bytes, type(None)))


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
    if kind is float:
        return "NaN" if math.isnan(value) else value
    if kind is bool:
        return int(value)
    if kind is decimal.Decimal:
        return _decimal(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple, dict, set)):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)


def _decimal(value: decimal.Decimal) -> Any:
    """A whole number as an int when it is declared whole, else a float: what SQLite computes with."""
    if not value.is_finite():
        return "NaN" if value.is_nan() else float(value)
    return int(value) if value.as_tuple().exponent == 0 else float(value)
