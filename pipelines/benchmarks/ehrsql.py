"""Reads EHRSQL (Lee et al., 2022) from its repository's layout.

    <path>/dataset/ehrsql/<db_id>/{train,valid,test}.json    id, db_id, question, query, is_impossible
    <path>/dataset/ehrsql/<db_id>/<db_id>.sqlite             made from MIMIC-III or eICU by preprocess_db.py; bundles
                                                             have databases/<db_id>/<db_id>.sqlite instead

Some questions cannot be answered from the database (`is_impossible`, or the query "null"): they are skipped, or their
gold SQL is `ABSTENTION` (option `unanswerable`). `sqltrain score` counts on them whether a system abstained.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import Layout, Loaded, QuestionFile, source_folder, split_files
from pipelines.core.registry import reader
from pipelines.core.types import ABSTENTION, Example
from pipelines.recipe.config import Section, Source
from pipelines.sql.equalities.official import ehrsql_query, is_unanswerable

HINT = "EHRSQL's layout is dataset/ehrsql/<mimic_iii or eicu>/valid.json and its .sqlite file beside it"
FILES = {"train": "train.json", "dev": "valid.json", "test": "test.json"}


class EhrsqlOptions(Section):
    unanswerable: bool = False  # keep the questions that the database cannot answer; needs `protocol.abstains`.


def ehrsql_files(source: Source) -> Iterator[Path]:
    """The question files and the databases that they name."""
    return _layout(source).paths()


@reader("ehrsql", options=EhrsqlOptions, files=ehrsql_files, equality="ehrsql")
def read_ehrsql(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split, over both databases if both are there."""
    return _layout(source).read(source, root, _with_ehrsql_fields)


def _with_ehrsql_fields(example: Example, row: Any) -> Example:
    """The example with its template and tags in `meta`, and with the gold SQL that EHRSQL's own script runs."""
    meta = {}
    for name in ("template", "q_tag", "t_tag"):
        value = row.get(name)
        if isinstance(value, str | list):
            meta[name] = value
    meta |= example.meta
    gold_sql = ehrsql_query(example.gold_sql)
    if is_unanswerable(row):
        gold_sql = ABSTENTION
    return dataclasses.replace(example, gold_sql=gold_sql, meta=meta)


def _layout(source: Source) -> Layout:
    folder = source_folder(source)
    home = folder / "dataset" / "ehrsql"
    if not home.is_dir():
        home = folder
    options = EhrsqlOptions.model_validate(source.options)
    files = []
    for path in split_files(home, FILES[source.split], HINT):
        name = f"{path.parent.name}/{path.name}"
        files.append(QuestionFile(path, name, path.stem))

    def database(id: str) -> list[Path]:
        published = home / id / f"{id}.sqlite"
        if published.is_file():
            return [published]
        return [home / "databases" / id / f"{id}.sqlite"]

    def skip(row: Any) -> bool:
        return not options.unanswerable and is_unanswerable(row)

    return Layout("ehrsql", HINT, files, database, id="id", skip=skip)
