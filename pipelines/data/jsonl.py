"""Reads a user's own questions: one JSON object a line.

    {"question": "...", "database": "sales.sqlite", "sql": "SELECT ...", "evidence": "...", "id": "..."}

`database` is a path relative to the file's folder, a `postgresql://` address without a password, or, with the option
`databases`, the name of a database in that folder. `evidence` and `id` may be left out.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.config import Section, Source
from pipelines.data.base import Loaded, check_file, collect, link, named, read_options, source_folder
from pipelines.errors import DataError
from pipelines.fields import BadRow, text_field
from pipelines.registry import reader
from pipelines.sql.dialects.dialect import file_suffixes, of_address, of_file
from pipelines.types import Database, Example

DATABASE = ("database", "db", "db_id", "db_path")  # names of the field that names a row's database


class JsonlOptions(Section):
    """`databases`: the folder in which a name is looked up, relative to the JSONL file's folder."""

    databases: str | None = None


@reader("jsonl", options=JsonlOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a JSONL file, in order.

    Raises:
        DataError: the path is missing or is a folder.
    """
    options = read_options(JsonlOptions, source)
    file = source_folder(source)
    if file.is_dir():
        raise DataError(f"{file} is a folder", "A jsonl source's path is the file with the questions")

    def make(row: Any) -> Example:
        number, text = row
        row = _parse(text)
        question, sql = text_field(row, "question"), text_field(row, "sql", "query", "SQL", "gold_sql")
        name = text_field(row, *DATABASE)
        id = _id(row) or f"{file.stem}_{number}"
        evidence = text_field(row, "evidence", required=False)
        return Example(id, question, _database(name, file.parent, options, root, source), sql, evidence, source="jsonl")

    return collect(_lines(file), make)


def files(source: Source) -> Iterator[Path]:
    """The file, and the database files that its lines name; a server's databases have no file to look at."""
    options, file = read_options(JsonlOptions, source), source_folder(source)
    yield file
    rows = (row for _, (_, text) in _lines(file) if (row := _row(text)) is not None)
    for name in named(rows, *DATABASE):
        with contextlib.suppress(ValueError, RuntimeError, OSError):  # no file's name: the reader rejects its row
            if "://" not in name:
                yield _find(name, file.parent, options)


def addresses(source: Source) -> Iterator[str]:
    """The servers' databases that the lines name."""
    rows = (row for _, (_, text) in _lines(source_folder(source)) if (row := _row(text)) is not None)
    yield from (name for name in named(rows, *DATABASE) if "://" in name)


def _row(line: bytes) -> Any:
    try:
        return _parse(line)
    except BadRow:
        return None


def _id(row: Any) -> str:
    """A question's id as text: many files number their questions."""
    id = row.get("id")
    return str(id) if isinstance(id, int) and not isinstance(id, bool) else text_field(row, "id", required=False)


def _lines(file: Path) -> Iterator[tuple[str, tuple[int, bytes]]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield f"{file.name}:{number}", (number, text)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except UnicodeDecodeError:
        raise BadRow("not_utf8", "the line is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("not_json", f"not JSON: {error}") from None


def _database(name: str, folder: Path, options: JsonlOptions, root: Path, source: Source) -> Database:
    if has_password(name):
        detail = "a password in an address would be kept in datasets: use PGPASSWORD or a password file"
        raise BadRow("password_in_address", detail)
    engine = of_address(name)
    if engine is not None:
        return Database(name.rpartition("/")[2].partition("?")[0] or engine, engine, name)
    try:
        path = _find(name, folder, options)
        id, apart = str(Path(name).with_suffix("")), str(Path(name).parent)
        there = path.is_file()
    except (ValueError, RuntimeError, OSError):  # ".", "~nobody/x.sqlite", a name of 300 characters
        raise BadRow("bad_database_id", f"{name!r} cannot be a file") from None
    if not there:
        raise BadRow("missing_database", f"no such file: {path}")
    engine = of_file(path) or "sqlite"
    if engine == "sqlite":
        check_file(path)
    return Database(id, engine, link(path, root, source, apart))


def _find(name: str, folder: Path, options: JsonlOptions) -> Path:
    suffixes = file_suffixes()
    if options.databases is None or Path(name).suffix in suffixes:
        return folder / Path(name).expanduser()
    home = folder / options.databases
    places = [home / f"{name}{suffix}" for suffix in suffixes]
    places += [home / name / f"{name}{suffix}" for suffix in suffixes]
    return next((place for place in places if place.is_file()), places[0])


def has_password(address: str) -> bool:
    """Whether a database's address holds a password: it would be kept in datasets."""
    return bool(re.search(r"\w+://[^/@]*:[^/@]+@", address)) or "password=" in address
