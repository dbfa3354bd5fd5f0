"""Reads BIRD (Li et al., 2024) and its mini-dev from their native layout.

<path>/dev.json, train.json or mini_dev_sqlite.json            question_id, db_id, question, evidence, SQL, difficulty
<path>/dev_databases/<db_id>/<db_id>.sqlite                    (train_databases/ for train)
<path>/dev_databases/<db_id>/database_description/<table>.csv  what each column means

The mini-dev comes in three dialects. Of the two for servers (mini_dev_postgresql.json, mini_dev_mysql.json) all tables
lie in one database, made from the BIRD_dev.sql of each; the option `address` says where.
"""

import csv
import functools
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import (
    Loaded,
    collect,
    database_file,
    link,
    named,
    read_json_list,
    read_options,
    source_folder,
)
from pipelines.core.registry import reader
from pipelines.core.types import BadRow, Database, Example, is_plain_name, text_field
from pipelines.recipe.config import Source
from pipelines.recipe.section import Section
from pipelines.sql.dialects.dialect import has_password, of_address

EQUALITY = "bird"  # of the figures, where a recipe names none
HINT = "BIRD's layout is dev.json and dev_databases/<db_id>/<db_id>.sqlite"
DESCRIPTION_CHARS = 200  # of one column; a few of BIRD's run over a page


class BirdOptions(Section):
    """Names that differ from BIRD's own, and what is told beside the evidence."""

    # the question file, relative to the path; null takes `<split>.json`, else mini-dev's file.
    questions: str | None = None
    databases: str | None = None  # the folder of databases, relative to the path; null takes `<split>_databases`.
    descriptions: bool = False  # add what the benchmark says of each column to the evidence, a line a column.
    # of a server's database that holds all tables ("postgresql://" or "mysql://"), without a password; null reads
    # SQLite files.
    address: str | None = None


@reader("bird", options=BirdOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split; `meta` keeps BIRD's own difficulty and question id."""
    options = read_options(BirdOptions, source)
    folder = source_folder(source)
    file = _questions(folder, source.split, options)
    databases = folder / (options.databases or f"{source.split}_databases")
    descriptions = functools.cache(describe)

    def make(row: Any) -> Example:
        number, row = row
        id = text_field(row, "db_id")
        question, sql = text_field(row, "question"), text_field(row, "SQL")
        if options.address is not None:
            database = _on_server(id, options.address)
        else:
            database = Database(id, "sqlite", link(database_file(databases, id), root, source))
        meta = {key: row[key] for key in ("question_id", "difficulty") if isinstance(row.get(key), str | int)}
        evidence = text_field(row, "evidence", required=False)
        if options.descriptions:
            evidence = "\n".join(filter(None, [evidence, descriptions(databases / id)]))
        return Example(f"bird_{file.stem}_{number}", question, database, sql, evidence, None, "bird", meta)

    rows = read_json_list(file, HINT)
    return collect(((f"{file.name}[{index}]", (index, row)) for index, row in enumerate(rows)), make)


def files(source: Source) -> Iterator[Path]:
    """The question file, and the databases that it names with what is said of their columns."""
    options, folder = read_options(BirdOptions, source), source_folder(source)
    file = _questions(folder, source.split, options)
    yield file
    databases = folder / (options.databases or f"{source.split}_databases")
    for id in filter(is_plain_name, named(read_json_list(file, HINT), "db_id")):
        if options.address is None:
            yield databases / id / f"{id}.sqlite"
        yield from (databases / id / "database_description").glob("*.csv")


def _on_server(id: str, address: str) -> Database:
    """A question's part of the one database that BIRD_dev.sql makes."""
    if not is_plain_name(id):
        raise BadRow("bad_database_id", f"{id!r} is not a plain name")
    if has_password(address):
        detail = "a password in an address would be kept in datasets: use PGPASSWORD, MYSQL_PWD or a password file"
        raise BadRow("password_in_address", detail)
    engine = of_address(address)
    if engine is None:
        raise BadRow("bad_address", f"no engine has addresses such as {address!r}")
    return Database(id, engine, address)


def describe(folder: Path) -> str:
    """What `database_description/*.csv` says, a line a column: `table.column: meaning; its values`."""
    lines = []
    for path in sorted((folder / "database_description").glob("*.csv"), key=lambda path: path.name.lower()):
        for column, words in columns_described(path):
            lines.append(f"{path.stem.strip()}.{column}: {words}")
    return "\n".join(lines)


def columns_described(path: Path) -> Iterator[tuple[str, str]]:
    """A table's columns with their meanings; a column of which no more than its name is said is left out."""
    for row in csv.DictReader(io.StringIO(_decoded(path.read_bytes()), newline=None)):
        cells = {name: " ".join(value.split()) for name, value in row.items() if name and isinstance(value, str)}
        column = cells.get("original_column_name", "")
        parts = (cells.get("column_description"), cells.get("value_description"))
        words = "; ".join(dict.fromkeys(part for part in parts if part and part.lower() != column.lower()))
        if column and words:
            yield column, words if len(words) <= DESCRIPTION_CHARS else words[: DESCRIPTION_CHARS - 1] + "…"


def _decoded(data: bytes) -> str:
    """BIRD's files are UTF-8 with or without a mark, and some are Windows text."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


def _questions(folder: Path, split: str, options: BirdOptions) -> Path:
    if options.questions:
        return folder / options.questions
    mini = folder / "mini_dev_sqlite.json"
    own = folder / f"{split}.json"
    return mini if split == "dev" and mini.is_file() and not own.is_file() else own
