"""Reads Spider (Yu et al., 2018) and its variants from their native layout.

    <path>/train_spider.json + train_others.json, or train.json    question, query, db_id
    <path>/dev.json, <path>/test.json                              the same
    <path>/database/<db_id>/<db_id>.sqlite                         (for test, test_database/ where it exists)

A variant's files may lie in the path itself or in their own repository's folder beside Spider's databases: Spider-DK
brings three databases and asks of Spider's too, Spider-Syn and Spider-Realistic bring none.

A schema comes from the database itself, so that the prompt shows what the SQL will meet; of `tables.json` only the
natural names are read, where a recipe asks for descriptions (`data/descriptions.py`).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
from pipelines.benchmarks.prompt_schema import tables_of
from pipelines.core.registry import reader
from pipelines.core.types import BadRow, Database, Example, is_plain_name, text_field
from pipelines.recipe.config import Source
from pipelines.recipe.section import Section

OTHERS = "train_others.json"
HINT = "Spider's layout is train.json, dev.json and database/<db_id>/<db_id>.sqlite"


@dataclasses.dataclass(frozen=True)
class Variant:
    """How one variant's authors ship it."""

    # a split's question files, all of them; where none is there, `<split>.json` is asked for.
    files: Mapping[str, tuple[str, ...]]
    folders: tuple[str, ...] = (".",)  # where, relative to the path, its files may lie; the first that has them counts.
    question: str = "question"  # the field that holds the question.


VARIANTS = {
    "spider": Variant({"train": ("train_spider.json", OTHERS), "dev": ("dev.json",), "test": ("test.json",)}),
    # Gan et al., 2021b: 535 questions that need domain knowledge
    "dk": Variant(dict.fromkeys(("dev", "test"), ("Spider-DK.json",)), (".", "Spider-DK")),
    # Gan et al., 2021a: schema words replaced by synonyms; its files bear Spider's own names
    "syn": Variant(
        {"train": ("train_spider.json",), **dict.fromkeys(("dev", "test"), ("dev.json",))},
        ("Spider-Syn/Spider-Syn", "Spider-Syn", "."),
        "SpiderSynQuestion",
    ),
    # Deng et al., 2021: column names left out of the questions
    "realistic": Variant(dict.fromkeys(("dev", "test"), ("spider-realistic.json",)), (".", "spider-realistic")),
}


class SpiderOptions(Section):
    """What else may be said of a source."""

    variant: Literal["spider", "dk", "syn", "realistic"] = "spider"  # Spider itself, or one of its robustness variants.
    databases: str | None = None  # the folder of databases, relative to the path; null finds it.
    # whether train has the 1,659 questions of older benchmarks too (train_others.json), beside Spider's own 7,000.
    others: bool = True


@reader("spider", options=SpiderOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split."""
    options = read_options(SpiderOptions, source)
    folder = source_folder(source)
    variant = VARIANTS[options.variant]
    files = _files(folder, source.split, variant, options.others)
    homes = _homes(folder, source.split, options, files[0].parent)
    name = "spider" if options.variant == "spider" else f"spider_{options.variant}"

    def make(row: Any) -> Example:
        number, row = row
        id = text_field(row, "db_id")
        question, sql = text_field(row, variant.question), text_field(row, "query")
        path = _database(homes, id)
        home = path.parent.parent.name
        apart = "" if home == "database" else home  # a test database may bear a dev database's name
        database = Database(id, "sqlite", link(path, root, source, apart))
        return Example(f"{name}_{number}", question, database, sql, source=name)

    return collect(_rows(files), make)


def files(source: Source) -> Iterator[Path]:
    """The question files, each database that they name in every folder where it may lie, and what describes them."""
    options, folder = read_options(SpiderOptions, source), source_folder(source)
    files = _files(folder, source.split, VARIANTS[options.variant], options.others)
    yield from files
    homes = _homes(folder, source.split, options, files[0].parent)
    for id in named((row for file in files for row in read_json_list(file, HINT)), "db_id"):
        if is_plain_name(id):
            yield from (home / id / f"{id}.sqlite" for home in homes)
    yield from tables_of(folder)


def _rows(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    for file in files:
        for index, row in enumerate(read_json_list(file, HINT)):
            yield f"{file.name}[{index}]", (f"{file.stem}_{index}", row)


def _files(folder: Path, split: str, variant: Variant, others: bool) -> list[Path]:
    names = [name for name in variant.files.get(split, ()) if others or name != OTHERS]
    for home in variant.folders:
        files = [folder / home / name for name in names if (folder / home / name).is_file()]
        if files:
            return files
    own = variant is VARIANTS["spider"] or not names
    return [folder / (f"{split}.json" if own else names[0])]


def _homes(folder: Path, split: str, options: SpiderOptions, beside: Path) -> list[Path]:
    """Folders of databases, the likeliest first."""
    if options.databases:
        return [folder / options.databases]
    special = folder / "test_database"
    if options.variant == "spider" and split == "test" and special.is_dir():
        return [special]
    return list(dict.fromkeys((folder / "database", beside / "database")))


def _database(homes: Sequence[Path], id: str) -> Path:
    """The database in the first folder that has it."""
    for home in homes[1:]:
        try:
            return database_file(homes[0], id)
        except BadRow:
            if (home / id / f"{id}.sqlite").is_file():
                return database_file(home, id)
    return database_file(homes[0], id)
