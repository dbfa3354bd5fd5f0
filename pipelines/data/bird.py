"""Reads BIRD (Li et al., 2024) and its mini-dev from their native layout.

<path>/dev.json, train.json or mini_dev_sqlite.json      question_id, db_id, question, evidence, SQL, difficulty
<path>/dev_databases/<db_id>/<db_id>.sqlite              (train_databases/ for train)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.config import Section, Source
from pipelines.data.base import (
    Loaded,
    collect,
    database_file,
    link,
    read_json_list,
    read_options,
    source_folder,
    text_field,
)
from pipelines.types import Database, Example

HINT = "BIRD's layout is dev.json and dev_databases/<db_id>/<db_id>.sqlite"


class BirdOptions(Section):
    """Names that differ from BIRD's own.

    Attributes:
        questions: the question file, relative to the path; null takes `<split>.json`, else mini-dev's file.
        databases: the folder of databases, relative to the path; null takes `<split>_databases`.
    """

    questions: str | None = None
    databases: str | None = None


def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split; `meta` keeps BIRD's own difficulty and question id.

    Raises:
        DataError: the folder or its question file is missing.
    """
    options = read_options(BirdOptions, source)
    folder = source_folder(source)
    file = _questions(folder, source.split, options)
    databases = folder / (options.databases or f"{source.split}_databases")

    def make(row: Any) -> Example:
        number, row = row
        id = text_field(row, "db_id")
        question, sql = text_field(row, "question"), text_field(row, "SQL")
        database = Database(id, "sqlite", link(database_file(databases, id), root, source))
        meta = {key: row[key] for key in ("question_id", "difficulty") if isinstance(row.get(key), str | int)}
        evidence = text_field(row, "evidence", required=False)
        return Example(f"bird_{file.stem}_{number}", question, database, sql, evidence, None, "bird", meta)

    rows = read_json_list(file, HINT)
    return collect(((f"{file.name}[{index}]", (index, row)) for index, row in enumerate(rows)), make)


def _questions(folder: Path, split: str, options: BirdOptions) -> Path:
    if options.questions:
        return folder / options.questions
    mini = folder / "mini_dev_sqlite.json"
    own = folder / f"{split}.json"
    return mini if split == "dev" and mini.is_file() and not own.is_file() else own
