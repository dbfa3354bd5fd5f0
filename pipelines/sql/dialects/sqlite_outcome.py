"""What a script led to on a private copy: the rows of its last statement, and what it has made of the database."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pipelines.sql.dialects.base import quoted

COLUMNS = ("query", "rows", "as_set", "in_order", "ordered", "changed", "state")
PLACES = 2  # decimal places that count (`preprocess_results` of LiveSQLBench's evaluator)
_OBJECTS = "SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"


def outcome(
    rows: Sequence[tuple[Any, ...]], query: bool, ordered: bool, changed: bool, digest_of_state: str
) -> tuple[Any, ...]:
    """The one row of an outcome (`COLUMNS`): digests of the last statement's rows, as a set and in order, and `state`.

    Args:
        query: whether the last statement was one.
        ordered: whether the order of its rows counts; passed on.
        changed: whether the script changed the database; `digest_of_state` is then what `state` says.
    """
    texts = [repr(rounded(row)) for row in rows]
    return int(query), len(rows), digest(sorted(set(texts))), digest(texts), int(ordered), int(changed), digest_of_state


def state(connection: sqlite3.Connection) -> str:
    """A digest that two databases share whose tables and views have the same names, columns and rows (as bags, numbers
    to `PLACES`), the same indices (by table, columns and whether unique) and as many triggers on each table.

    A text that begins with the current day is the same as any other: two runs write different times.

    Raises:
        sqlite3.Error: a view cannot be read, or the time is over.
    """
    today = time.strftime("%Y-%m-%d", time.gmtime())
    objects: list[Any] = []
    for kind, name, table in connection.execute(_OBJECTS).fetchall():
        if kind in ("table", "view"):
            cursor = connection.execute(f"SELECT * FROM {quoted(name)}")
            columns = [item[0].lower() for item in cursor.description]
            objects.append([kind, name.lower(), columns, *_bag(cursor, today)])
        elif kind == "index":
            indices = connection.execute(f"PRAGMA index_list({quoted(table)})").fetchall()
            columns = [row[2] for row in connection.execute(f"PRAGMA index_info({quoted(name)})")]
            objects.append([kind, table.lower(), [row[2] for row in indices if row[1] == name], columns])
        else:
            objects.append([kind, table.lower()])
    return digest(sorted(map(repr, objects)))


def _bag(rows: Iterable[tuple[Any, ...]], today: str) -> tuple[int, int]:
    """How many rows there are, and the sum of their digests, which no order changes and no row is kept for."""
    count = total = 0
    for row in rows:
        cells = ["now" if isinstance(cell, str) and cell.startswith(today) else cell for cell in rounded(row)]
        total = (total + int(digest([repr(cells)]), 16)) % (1 << 128)
        count += 1
    return count, total


def rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row's cells, numbers to `PLACES`; a whole number is the same whatever its type."""
    cells = [round(cell, PLACES) if isinstance(cell, float) else cell for cell in row]
    return tuple([int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in cells])


def digest(texts: Iterable[str]) -> str:
    """32 hex digits of texts in order."""
    whole = hashlib.blake2b(digest_size=16)
    for text in texts:
        whole.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return whole.hexdigest()
