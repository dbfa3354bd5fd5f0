"""Reads KaggleDBQA (Lee et al., 2021) from its native layout.

    <path>/examples/<db_id>.json                     all questions of a database: split "dev"
    <path>/examples/<db_id>_fewshot.json             the part given for adaptation: split "train"
    <path>/examples/<db_id>_test.json                the part kept for the test: split "test"
    <path>/databases/<db_id>/<db_id>.sqlite          (or database/)

Rows are Spider's: question, query, db_id.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Loaded, collect, database_file, link, named, read_json_list, source_folder
from pipelines.benchmarks.prompt_schema import tables_of
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.types import Database, Example, is_plain_name, text_field
from pipelines.recipe.config import Source
from pipelines.recipe.section import Section

HINT = "KaggleDBQA's layout is examples/<db_id>_test.json and databases/<db_id>/<db_id>.sqlite"
ENDINGS = {"train": "_fewshot", "test": "_test", "dev": ""}
FOLDERS = ("databases", "database")


class KaggleOptions(Section):
    """It has none."""


@reader("kaggledbqa", options=KaggleOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split, by database in the order of their names."""
    folder = source_folder(source)
    files = _files(folder, source.split)
    databases = _databases(folder)

    def make(row: Any) -> Example:
        number, row = row
        id = text_field(row, "db_id")
        question, sql = text_field(row, "question"), text_field(row, "query")
        database = Database(id, "sqlite", link(database_file(databases, id), root, source))
        return Example(f"kaggledbqa_{number}", question, database, sql, source="kaggledbqa")

    return collect(_rows(files), make)


def files(source: Source) -> Iterator[Path]:
    """The question files, the databases that they name, and what describes them."""
    folder = source_folder(source)
    files = _files(folder, source.split)
    yield from files
    for id in named((row for file in files for row in read_json_list(file, HINT)), "db_id"):
        if is_plain_name(id):
            yield _databases(folder) / id / f"{id}.sqlite"
    yield from tables_of(folder)


def _databases(folder: Path) -> Path:
    return next((folder / name for name in FOLDERS if (folder / name).is_dir()), folder / FOLDERS[0])


def _files(folder: Path, split: str) -> list[Path]:
    every = sorted((folder / "examples").glob("*.json"))
    parts = tuple(ending for ending in ENDINGS.values() if ending)
    ending = ENDINGS[split]
    files = [path for path in every if path.stem.endswith(ending) and (ending or not path.stem.endswith(parts))]
    if not files:
        raise DataError(f"no questions of split {split} under {folder / 'examples'}", HINT)
    return files


def _rows(files: list[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        for index, row in enumerate(read_json_list(file, HINT)):
            yield f"{file.name}[{index}]", (f"{file.stem}_{index}", row)
