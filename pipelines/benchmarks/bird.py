"""Reads BIRD (Li et al., 2024) and its mini-dev from their native layout.

<path>/dev.json, train.json or mini_dev_sqlite.json            question_id, db_id, question, evidence, SQL, difficulty
<path>/dev_databases/<db_id>/<db_id>.sqlite                    (train_databases/ for train)
<path>/dev_databases/<db_id>/database_description/<table>.csv  what each column means

The mini-dev comes in three dialects. Of the two for servers (mini_dev_postgresql.json, mini_dev_mysql.json) all tables
lie in one database, made from the BIRD_dev.sql of each; the option `address` says where.
"""

import csv
import dataclasses
import functools
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Layout, Loaded, QuestionFile, check_address, source_folder
from pipelines.core.errors import warn_once
from pipelines.core.registry import reader
from pipelines.core.types import BadRow, Database, Example, shortened, text_field
from pipelines.recipe.config import Section, Source
from pipelines.sql.dialects.dialect import engine_of_address

log = logging.getLogger(__name__)
HINT = "BIRD's layout is dev.json and dev_databases/<db_id>/<db_id>.sqlite"
DESCRIPTIONS = "database_description"  # the folder that describes a database's columns, beside its file
UNDEFINED_BYTES = (b"\x81", b"\x8d", b"\x8f", b"\x90", b"\x9d")  # bytes without a meaning in Windows-1252
NAME_COLUMN = "original_column_name"  # the column of a description's file that names the columns of its table
DESCRIPTION_CHARS = 200  # characters of one column's description; a few of BIRD's run over a page


class BirdOptions(Section):
    """Names that differ from BIRD's own, and additions to the evidence."""

    # the question file, relative to the path; null takes `<split>.json`, else mini-dev's file.
    questions: str | None = None
    databases: str | None = None  # the folder of databases, relative to the path; null takes `<split>_databases`.
    descriptions: bool = False  # add what the benchmark says of each column to the evidence, a line a column.
    # the address of a server's database that holds all tables ("postgresql://" or "mysql://"), without a password; null
    # reads SQLite files.
    address: str | None = None


def bird_files(source: Source) -> Iterator[Path]:
    """The question file, and the databases that it names with the descriptions of their columns."""
    layout, _ = _layout(source)
    return layout.paths()


@reader("bird", options=BirdOptions, files=bird_files, equality="bird")
def read_bird(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split; `meta` keeps BIRD's own difficulty and question id."""
    layout, home = _layout(source)
    options = BirdOptions.model_validate(source.options)
    descriptions = functools.cache(describe_columns)

    def finish(example: Example, row: Any) -> Example:
        meta = {}
        for name in ("question_id", "difficulty"):
            value = row.get(name)
            if isinstance(value, str | int):
                meta[name] = value
        paragraphs = [text_field(row, "evidence", required=False)]
        if options.descriptions:
            paragraphs.append(descriptions(home / example.database.id))
        evidence = "\n".join(filter(None, paragraphs))
        meta |= example.meta
        return dataclasses.replace(example, evidence=evidence, meta=meta)

    return layout.read(source, root, finish)


def _layout(source: Source) -> tuple[Layout, Path]:
    """The layout, and the folder of databases."""
    options = BirdOptions.model_validate(source.options)
    folder = source_folder(source)
    file = folder / (options.questions or f"{source.split}.json")
    mini_dev = folder / "mini_dev_sqlite.json"
    may_be_mini_dev = not options.questions and source.split == "dev"
    if may_be_mini_dev and mini_dev.is_file() and not file.is_file():
        file = mini_dev
    home = folder / (options.databases or f"{source.split}_databases")

    def on_server(id: str) -> Database:
        """A part of the one database that BIRD_dev.sql makes."""
        address = str(options.address)
        check_address(address)
        engine = engine_of_address(address)
        if engine is None:
            raise BadRow("bad_address", f"no engine has addresses such as {address!r}")
        return Database(id, engine, address)

    def database(id: str) -> list[Path]:
        return [home / id / f"{id}.sqlite"]

    def described_by(id: str) -> Iterator[Path]:
        return (home / id / DESCRIPTIONS).glob("*.csv")

    layout = Layout(
        name="bird",
        hint=HINT,
        files=[QuestionFile(file, file.name, file.stem)],
        databases=database,
        sql=("SQL",),
        on_server=None if options.address is None else on_server,
        described_by=described_by,
    )
    return layout, home


def describe_columns(folder: Path) -> str:
    """The content of `database_description/*.csv`, a line a column: `table.column: meaning; its values`.

    A warning says that there is no such file.
    """
    lines = []
    paths = description_tables(folder)
    if not paths:
        log.warning("no CSV file in %s: no column of this database is described", folder / DESCRIPTIONS)
    for path in paths:
        table = path.stem.strip()
        for column, meaning in columns_described(path):
            lines.append(f"{table}.{column}: {meaning}")
    return "\n".join(lines)


def description_tables(folder: Path) -> list[Path]:
    """The files that describe the tables of a database in this folder, in the order of the tables' names."""
    paths = (folder / DESCRIPTIONS).glob("*.csv")
    return sorted(paths, key=lambda path: path.name.lower())


def windows_text(data: bytes) -> str:
    """Windows-1252 as browsers read it: each of the five undefined bytes is a control character."""
    characters = []
    for number in data:
        byte = bytes([number])
        encoding = "latin-1" if byte in UNDEFINED_BYTES else "cp1252"
        characters.append(byte.decode(encoding))
    return "".join(characters)


def columns_described(path: Path) -> Iterator[tuple[str, str]]:
    """A table's columns with their meanings; a column whose description repeats its name is left out.

    BIRD's files are UTF-8 with or without a byte order mark, and some are Windows text. A warning names a file of
    another form.
    """
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = windows_text(data)
    rows = csv.DictReader(io.StringIO(text, newline=None))
    if NAME_COLUMN not in (rows.fieldnames or ()):
        warn_once(log, "%s describes no column: its first line names no %s, with commas between", path, NAME_COLUMN)
    for row in rows:
        cells = {}
        for name, value in row.items():
            if name and isinstance(value, str):
                cells[name] = " ".join(value.split())
        column = cells.get(NAME_COLUMN, "")
        descriptions: list[str] = []
        for field in ("column_description", "value_description"):
            description = cells.get(field, "")
            repeats_name = description.lower() == column.lower()
            if description and not repeats_name and description not in descriptions:
                descriptions.append(description)
        meaning = shortened("; ".join(descriptions), DESCRIPTION_CHARS)
        if column and meaning:
            yield column, meaning
