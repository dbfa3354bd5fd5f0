"""Reads Spider (Yu et al., 2018) and its variants from their native layout.

    <path>/train_spider.json + train_others.json, or train.json    question, query, db_id
    <path>/dev.json, <path>/test.json                              the same
    <path>/database/<db_id>/<db_id>.sqlite                         (for test, test_database/ where it exists)

`tables.json` is not read: a schema comes from the database itself, so that the prompt shows what the SQL will meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

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

HINT = "Spider's layout is train.json, dev.json and database/<db_id>/<db_id>.sqlite"
FILES = {"train": ("train_spider.json", "train_others.json"), "dev": ("dev.json",), "test": ("test.json",)}
VARIANTS = {  # the file and the field of the question, as each variant's authors ship them
    "dk": ("Spider-DK.json", "question"),  # Gan et al., 2021b
    "syn": ("dev.json", "SpiderSynQuestion"),  # Gan et al., 2021a
    "realistic": ("spider-realistic.json", "question"),  # Deng et al., 2021
}


class SpiderOptions(Section):
    """What else may be said of a source.

    Attributes:
        variant: Spider itself, or one of its robustness variants (evaluation only).
        databases: the folder of databases, relative to the path; null finds it.
    """

    variant: Literal["spider", "dk", "syn", "realistic"] = "spider"
    databases: str | None = None


def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split.

    Raises:
        DataError: the folder, its question file or its database folder is missing.
    """
    options = read_options(SpiderOptions, source)
    folder = source_folder(source)
    databases = _databases(folder, source.split, options)
    name = "spider" if options.variant == "spider" else f"spider_{options.variant}"
    field = VARIANTS[options.variant][1] if options.variant in VARIANTS else "question"

    def make(row: Any) -> Example:
        number, row = row
        id = text_field(row, "db_id")
        question, sql = text_field(row, field), text_field(row, "query")
        database = Database(id, "sqlite", link(database_file(databases, id), root, source))
        return Example(f"{name}_{number}", question, database, sql, source=name)

    return collect(_rows(_files(folder, source.split, options)), make)


def _rows(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        for index, row in enumerate(read_json_list(file, HINT)):
            yield f"{file.name}[{index}]", (f"{file.stem}_{index}", row)


def _files(folder: Path, split: str, options: SpiderOptions) -> list[Path]:
    if options.variant in VARIANTS:
        return [folder / VARIANTS[options.variant][0]]
    found = [folder / name for name in FILES[split] if (folder / name).is_file()]
    return found or [folder / f"{split}.json"]


def _databases(folder: Path, split: str, options: SpiderOptions) -> Path:
    if options.databases:
        return folder / options.databases
    special = folder / "test_database"
    return special if split == "test" and special.is_dir() else folder / "database"
