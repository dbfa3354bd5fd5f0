"""What tables and columns mean, as a benchmark or the database itself says, put into a schema for prompts.

BIRD            <db_id>/database_description/<table>.csv beside <db_id>.sqlite: descriptions of columns and values
Spider          tables.json above the folder of databases: natural names; only those that say more than the name
KaggleDBQA      its tables.json has descriptions too, which go before the natural names
DuckDB, PostgreSQL    COMMENT ON TABLE, COMMENT ON COLUMN
MySQL, MariaDB        COMMENT of a table and of a column; views have none
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.data.bird import columns_described
from pipelines.sql import catalogs
from pipelines.sql.schema import Schema
from pipelines.types import Database

Words = Mapping[tuple[str, str], str]  # by (table, column), lower-cased; a table's own under column ""
TABLES = ("tables.json", "test_tables.json", "KaggleDBQA_tables.json")


def describe(schema: Schema, database: Database) -> Schema:
    """The schema with descriptions of its tables and columns, where there are any.

    Raises:
        DataError: the database cannot be read.
    """
    words = catalogs.comments(database) if database.engine != "sqlite" else beside(Path(database.location))
    tables = []
    for table in schema.tables:
        name = table.name.lower()
        columns = tuple(
            dataclasses.replace(column, description=words.get((name, column.name.lower()), ""))
            for column in table.columns
        )
        tables.append(dataclasses.replace(table, columns=columns, description=words.get((name, ""), "")))
    return dataclasses.replace(schema, tables=tuple(tables))


def beside(location: Path) -> Words:
    """What the files of a benchmark say of an SQLite database among them; {} where there are none."""
    file = location.resolve()
    words: dict[tuple[str, str], str] = {}
    for path in files(file):
        if path.suffix == ".csv":
            words |= {
                (path.stem.strip().lower(), name.lower()): words_about for name, words_about in columns_described(path)
            }
        else:
            words |= _natural(_entries(path).get(file.parent.name, {}))
    return words


def files(location: Path) -> Iterator[Path]:
    """The files that describe an SQLite database of a benchmark."""
    file = location.resolve()
    yield from tables_of(file.parents[min(2, len(file.parents) - 1)])
    yield from sorted((file.parent / "database_description").glob("*.csv"), key=lambda path: path.name.lower())


def tables_of(folder: Path) -> Iterator[Path]:
    """The files of a benchmark's folder that hold natural names."""
    yield from (path for name in TABLES if (path := folder / name).is_file())


@functools.cache
def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """The databases of a tables.json by name; {} where it is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return {row["db_id"]: row for row in rows}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}


def _natural(entry: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """Natural names and descriptions of one database, where they say more than the names themselves."""
    try:
        tables, originals = entry["table_names"], entry["table_names_original"]
        columns = zip(entry["column_names"], entry["column_names_original"], strict=True)
        texts = entry.get("column_descriptions") or [""] * len(entry["column_names"])
        columns_named = [(originals[at], name, natural) for (_, natural), (at, name) in columns if at >= 0]
        more = texts[len(texts) - len(columns_named) :]
        pairs = [
            (table, name, words or natural) for (table, name, natural), words in zip(columns_named, more, strict=True)
        ]
        pairs += [(name, "", natural) for name, natural in zip(originals, tables, strict=True)]
        return {(table.lower(), name.lower()): words for table, name, words in pairs if _says(words, name or table)}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return {}


def _says(words: str, name: str) -> bool:
    """Whether words tell more than a name."""
    plain = "".join(name.lower().split("_"))
    return bool(words.strip()) and "".join(words.lower().split()) not in (plain, name.lower())
