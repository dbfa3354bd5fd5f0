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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Layout, Loaded, QuestionFile, check_address, source_folder
from pipelines.core.registry import reader
from pipelines.core.types import BadRow, Database, Example, text_field
from pipelines.recipe.config import Section, Source
from pipelines.sql.dialects.dialect import engine_of_address

HINT = "BIRD's layout is dev.json and dev_databases/<db_id>/<db_id>.sqlite"
WITHOUT_SIGN = (b"\x81", b"\x8d", b"\x8f", b"\x90", b"\x9d")  # bytes that Windows-1252 gives no meaning
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


def bird_files(source: Source) -> Iterator[Path]:
    """The question file, and the databases that it names with the descriptions of their columns."""
    return _layout(source)[0].paths()


@reader("bird", options=BirdOptions, files=bird_files, equality="bird")
def read_bird(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split; `meta` keeps BIRD's own difficulty and question id."""
    layout, home = _layout(source)
    descriptions = functools.cache(describe)

    def finish(example: Example, row: Any) -> Example:
        own = {key: row[key] for key in ("question_id", "difficulty") if isinstance(row.get(key), str | int)}
        evidence = text_field(row, "evidence", required=False)
        if BirdOptions.model_validate(source.options).descriptions:
            evidence = "\n".join(filter(None, [evidence, descriptions(home / example.database.id)]))
        return dataclasses.replace(example, evidence=evidence, meta={**own, **example.meta})

    return layout.read(source, root, finish)


def _layout(source: Source) -> tuple[Layout, Path]:
    """The layout, and the folder of databases."""
    options, folder, split = BirdOptions.model_validate(source.options), source_folder(source), source.split
    file, mini = folder / (options.questions or f"{split}.json"), folder / "mini_dev_sqlite.json"
    if not options.questions and split == "dev" and mini.is_file() and not file.is_file():
        file = mini
    home = folder / (options.databases or f"{split}_databases")

    def on_server(id: str) -> Database:  # a part of the one database that BIRD_dev.sql makes
        address = str(options.address)
        check_address(address)
        engine = engine_of_address(address)
        if engine is None:
            raise BadRow("bad_address", f"no engine has addresses such as {address!r}")
        return Database(id, engine, address)

    layout = Layout(
        "bird",
        HINT,
        [QuestionFile(file, file.name, file.stem)],
        lambda id: [home / id / f"{id}.sqlite"],
        sql=("SQL",),
        on_server=None if options.address is None else on_server,
        described_by=lambda id: (home / id / "database_description").glob("*.csv"),
    )
    return layout, home


def describe(folder: Path) -> str:
    """The content of `database_description/*.csv`, a line a column: `table.column: meaning; its values`."""
    paths = sorted((folder / "database_description").glob("*.csv"), key=lambda path: path.name.lower())
    described = ((path.stem.strip(), column, words) for path in paths for column, words in columns_described(path))
    return "\n".join(f"{table}.{column}: {words}" for table, column, words in described)


def windows_text(data: bytes) -> str:
    """Windows-1252 as browsers read it: each of the five bytes without a sign is a control character."""
    signs = (bytes([byte]) for byte in data)
    return "".join(sign.decode("latin-1" if sign in WITHOUT_SIGN else "cp1252") for sign in signs)


def columns_described(path: Path) -> Iterator[tuple[str, str]]:
    """A table's columns with their meanings; a column of which no more than its name is said is left out."""
    data = path.read_bytes()
    try:  # BIRD's files are UTF-8 with or without a mark, and some are Windows text
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = windows_text(data)
    for row in csv.DictReader(io.StringIO(text, newline=None)):
        cells = {name: " ".join(value.split()) for name, value in row.items() if name and isinstance(value, str)}
        column = cells.get("original_column_name", "")
        parts = (cells.get("column_description"), cells.get("value_description"))
        words = "; ".join(dict.fromkeys(part for part in parts if part and part.lower() != column.lower()))
        if column and words:
            yield column, words if len(words) <= DESCRIPTION_CHARS else words[: DESCRIPTION_CHARS - 1] + "…"
