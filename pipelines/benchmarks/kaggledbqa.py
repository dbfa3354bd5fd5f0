"""Reads KaggleDBQA (Lee et al., 2021) from its native layout.

    <path>/examples/<db_id>.json                     all questions of a database: split "dev"
    <path>/examples/<db_id>_fewshot.json             the part given for adaptation: split "train"
    <path>/examples/<db_id>_test.json                the part kept for the test: split "test"
    <path>/databases/<db_id>/<db_id>.sqlite          (or database/)

Rows are Spider's: question, query, db_id.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

from pipelines.benchmarks.base import Layout, Loaded, QuestionFile, source_folder
from pipelines.benchmarks.prompt_schema import tables_of
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.recipe.config import Section, Source

HINT = "KaggleDBQA's layout is examples/<db_id>_test.json and databases/<db_id>/<db_id>.sqlite"
ENDINGS = {"train": "_fewshot", "test": "_test", "dev": ""}
FOLDERS = ("databases", "database")


class KaggleOptions(Section):
    """It has none."""


@reader("kaggledbqa", options=KaggleOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split, by database in the order of their names."""
    return _layout(source).read(source, root)


def files(source: Source) -> Iterator[Path]:
    """The question files, the databases that they name, and the files that describe them."""
    return itertools.chain(_layout(source).paths(), tables_of(source_folder(source)))


def _layout(source: Source) -> Layout:
    folder = source_folder(source)
    ending, parts = ENDINGS[source.split], tuple(filter(None, ENDINGS.values()))
    paths = sorted((folder / "examples").glob(f"*{ending}.json"))
    files = [QuestionFile(path, path.name, path.stem) for path in paths if ending or not path.stem.endswith(parts)]
    if not files:
        raise DataError(f"no questions of split {source.split} under {folder / 'examples'}", HINT)
    home = next((folder / name for name in FOLDERS if (folder / name).is_dir()), folder / FOLDERS[0])
    return Layout("kaggledbqa", HINT, files, lambda id: [home / id / f"{id}.sqlite"])
