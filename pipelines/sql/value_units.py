"""What Spider's execution match of 2018 calls the columns of a result: the official parser's value units.

The official script first renames columns that a foreign key of tables.json joins, and forgets DISTINCT
(`evaluation.py: rebuild_sql_col`); the match itself (`eval_exec_match`) does neither. So here: with a tables.json both
are done, without it neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.errors import DataError
from pipelines.sql import spider

if TYPE_CHECKING:
    from pipelines.types import Database

Unit = tuple[Any, ...]
Units = tuple[tuple[Unit, ...] | None, tuple[Unit, ...] | None]


class Names(NamedTuple):
    """What the official parser knows of a database.

    Attributes:
        columns: lower-cased columns by lower-cased table.
        keys: what a column of a foreign key is called; None to leave names as they are.
    """

    columns: spider.Columns
    keys: Mapping[str, str] | None


class NamesOf:
    """The names that value units are read by, of each database.

    Args:
        tables: Spider's tables.json; None to leave names as they are.
    """

    def __init__(self, tables: Path | None = None) -> None:
        self._keys = None if tables is None else _read_tables(tables)
        self._names: dict[Database, Names] = {}

    def __call__(self, database: Database) -> Names:
        """The names of a database."""
        if database not in self._names:
            keys = None if self._keys is None else self._keys.get(database.id, {})
            self._names[database] = Names(_columns(database), keys)
        return self._names[database]


def value_units(names: Names, gold_sql: str, predicted_sql: str) -> Units:
    """Units of both queries; None where the official parser cannot read one. For a worker: it parses."""
    return _units(gold_sql, *names), _units(predicted_sql, *names)


def _columns(database: Database) -> spider.Columns:
    from pipelines.sql.catalogs import introspect

    try:
        schema = introspect(database)
    except DataError:  # the worker reports it; here there is just nothing to name
        return {}
    return {table.name.lower(): [column.name.lower() for column in table.columns] for table in schema.tables}


def _units(sql: str, columns: spider.Columns, keys: Mapping[str, str] | None) -> tuple[Unit, ...] | None:
    query = spider.read(sql, columns)
    if query is None:
        return None

    def unit(column: spider.Column) -> Unit:
        if keys is None:
            return tuple(column)
        is_in_query = column.name.partition(".")[0] in query.tables
        return column.aggregate, keys.get(column.name, column.name) if is_in_query else column.name

    # The aggregate that an item starts with is no part of its name: "max(a)" and "min(a)" are told apart by their
    # values.
    return tuple(
        unit(value.left) if value.right is None else (value.operator, unit(value.left), unit(value.right))
        for _, value in query.select
    )


def _key_map(names: Sequence[str], pairs: Sequence[Sequence[int]]) -> dict[str, str]:
    """Each column of a foreign key by the name of the first column that it is joined with."""
    groups: list[set[int]] = []
    for left, right in pairs:
        group = next((group for group in groups if left in group or right in group), None)
        if group is None:
            groups.append(group := set())
        group |= {left, right}
    return {names[index]: names[min(group)] for group in groups for index in sorted(group)}


def _read_tables(path: Path) -> dict[str, dict[str, str]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {entry["db_id"]: _entry_keys(entry) for entry in entries}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(f"{path} is not a tables.json as Spider's ({type(error).__name__}: {error})") from None


def _entry_keys(entry: Mapping[str, Any]) -> dict[str, str]:
    tables = entry["table_names_original"]
    names = [
        "*" if table < 0 else f"{tables[table]}.{column}".lower() for table, column in entry["column_names_original"]
    ]
    return _key_map(names, entry["foreign_keys"])
