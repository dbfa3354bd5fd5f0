"""Reads ScienceBenchmark (Zhang et al., 2023) from its repository's layout.

    <path>/<db_id>/dev.json       db_id, question, query: written by experts, split "dev" and "test"
    <path>/<db_id>/seed.json      the experts' questions to learn from, split "train"
    <path>/databases/<db_id>/<db_id>.sqlite

Its three databases (cordis, oncomx, sdss) are PostgreSQL dumps (restore.sql); SQLite copies come with other bundles,
some of which have one dev.json for all three. With the option `address` a PostgreSQL server is asked that holds each
database under its own name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks.base import (
    Loaded,
    collect,
    database_file,
    link,
    named,
    read_json_list,
    read_options,
    source_folder,
    split_files,
)
from pipelines.core.registry import reader
from pipelines.core.types import SQL, BadRow, Database, Example, is_plain_name, text_field
from pipelines.recipe.config import Source
from pipelines.recipe.section import Section
from pipelines.sql.dialects.dialect import has_password

EQUALITY = "test_suite"  # of the figures, where a recipe names none
HINT = "ScienceBenchmark's layout is <db_id>/dev.json and databases/<db_id>/<db_id>.sqlite"
FILES = {"train": "seed.json", "dev": "dev.json", "test": "dev.json"}


class ScienceOptions(Section):
    """`address`: of a PostgreSQL server, such as postgresql://reader@localhost; null reads SQLite files."""

    address: str | None = None


@reader("sciencebenchmark", options=ScienceOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split, by database in the order of their names."""
    options, folder = read_options(ScienceOptions, source), source_folder(source)

    def make(row: Any) -> Example:
        number, row = row
        id = text_field(row, "db_id")
        question, sql = text_field(row, "question"), text_field(row, *SQL)
        database = _database(id, folder, options.address, root, source)
        return Example(f"sciencebenchmark_{number}", question, database, sql, source="sciencebenchmark")

    return collect(_rows(folder, source.split), make)


def files(source: Source) -> Iterator[Path]:
    """The question files and the databases that they name."""
    options, folder = read_options(ScienceOptions, source), source_folder(source)
    yield from split_files(folder, FILES[source.split], HINT)
    if options.address is None:
        rows = (row for _, (_, row) in _rows(folder, source.split))
        for id in filter(is_plain_name, named(rows, "db_id")):
            yield folder / "databases" / id / f"{id}.sqlite"


def _database(id: str, folder: Path, address: str | None, root: Path, source: Source) -> Database:
    if address is None:
        return Database(id, "sqlite", link(database_file(folder / "databases", id), root, source))
    if not is_plain_name(id):
        raise BadRow("bad_database_id", f"{id!r} is not a plain name")
    if has_password(address):
        detail = "a password in an address would be kept in datasets: use PGPASSWORD or a password file"
        raise BadRow("password_in_address", detail)
    return Database(id, "postgres", f"{address.rstrip('/')}/{id}")


def _rows(folder: Path, split: str) -> Iterator[tuple[str, Any]]:
    for file in split_files(folder, FILES[split], HINT):
        home = file.stem if file.parent == folder else f"{file.parent.name}_{file.stem}"
        for index, row in enumerate(read_json_list(file, HINT)):
            yield f"{file.relative_to(folder)}[{index}]", (f"{home}_{index}", row)
