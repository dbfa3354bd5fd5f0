"""Reads EHRSQL (Lee et al., 2022) from its repository's layout.

    <path>/dataset/ehrsql/<db_id>/{train,valid,test}.json    id, db_id, question, query, is_impossible
    <path>/dataset/ehrsql/<db_id>/<db_id>.sqlite             made from MIMIC-III or eICU by preprocess_db.py; bundles
                                                             have databases/<db_id>/<db_id>.sqlite instead

Some questions cannot be answered from the database (`is_impossible`, or the query "null"): they have no gold SQL to
learn from or to compare with, and are passed over here. `sqltrain score` counts on them whether a system abstained.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import (
    Loaded,
    check_file,
    collect,
    link,
    named,
    read_json_list,
    source_folder,
    split_files,
)
from pipelines.core.registry import reader
from pipelines.core.types import BadRow, Database, Example, is_plain_name, text_field
from pipelines.recipe.config import Source
from pipelines.recipe.section import Section
from pipelines.sql.equalities.official import is_unanswerable, repaired

EQUALITY = "ehrsql"  # of the figures, where a recipe names none
HINT = "EHRSQL's layout is dataset/ehrsql/<mimic_iii or eicu>/valid.json and its .sqlite file beside it"
FILES = {"train": "train.json", "dev": "valid.json", "test": "test.json"}


class EhrsqlOptions(Section):
    """It has none."""


@reader("ehrsql", options=EhrsqlOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The answerable questions of a split, over both databases where both are there."""
    home = _home(source_folder(source))

    def make(row: Any) -> Example:
        id, name = text_field(row, "id"), text_field(row, "db_id")
        question, sql = text_field(row, "question"), repaired(text_field(row, "query"))
        if not is_plain_name(name):
            raise BadRow("bad_database_id", f"{name!r} is not a plain name")
        path = _database(home, name)
        check_file(path)
        meta = {key: row[key] for key in ("template", "q_tag", "t_tag") if isinstance(row.get(key), str | list)}
        database = Database(name, "sqlite", link(path, root, source))
        return Example(f"ehrsql_{id}", question, database, sql, source="ehrsql", meta=meta)

    return collect(((where, row) for where, row in _rows(home, source.split) if not is_unanswerable(row)), make)


def files(source: Source) -> Iterator[Path]:
    """The question files and the databases that they name."""
    home = _home(source_folder(source))
    yield from split_files(home, FILES[source.split], HINT)
    for id in filter(is_plain_name, named((row for _, row in _rows(home, source.split)), "db_id")):
        yield _database(home, id)


def _home(folder: Path) -> Path:
    nested = folder / "dataset" / "ehrsql"
    return nested if nested.is_dir() else folder


def _rows(home: Path, split: str) -> Iterator[tuple[str, Any]]:
    for file in split_files(home, FILES[split], HINT):
        for index, row in enumerate(read_json_list(file, HINT)):
            yield f"{file.parent.name}/{file.name}[{index}]", row


def _database(home: Path, id: str) -> Path:
    beside = home / id / f"{id}.sqlite"
    return beside if beside.is_file() else home / "databases" / id / f"{id}.sqlite"
