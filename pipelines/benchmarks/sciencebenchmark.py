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

from pipelines.benchmarks import base
from pipelines.core.registry import reader
from pipelines.core.types import SQL, Database
from pipelines.recipe.config import Section, Source

HINT = "ScienceBenchmark's layout is <db_id>/dev.json and databases/<db_id>/<db_id>.sqlite"
FILES = {"train": "seed.json", "dev": "dev.json", "test": "dev.json"}


class ScienceOptions(Section):
    """The server that is asked."""

    # the address of a PostgreSQL server, such as postgresql://reader@localhost; null reads SQLite files.
    address: str | None = None


def sciencebenchmark_files(source: Source) -> Iterator[Path]:
    """The question files and the databases that they name."""
    return _layout(source).paths()


@reader("sciencebenchmark", options=ScienceOptions, files=sciencebenchmark_files, equality="test_suite")
def read_sciencebenchmark(source: Source, seed: int, root: Path) -> base.Loaded:
    """The questions of a split, by database in the order of their names."""
    return _layout(source).read(source, root)


def _layout(source: Source) -> base.Layout:
    address = ScienceOptions.model_validate(source.options).address
    folder = base.source_folder(source)
    files = []
    for path in base.split_files(folder, FILES[source.split], HINT):
        title = str(path.relative_to(folder))
        stem = path.stem
        if path.parent != folder:
            stem = f"{path.parent.name}_{path.stem}"
        file = base.QuestionFile(path, title, stem)
        files.append(file)

    def on_server(id: str) -> Database:
        base.check_address(str(address))
        server = str(address).rstrip("/")
        return Database(id, "postgres", f"{server}/{id}")

    def database(id: str) -> list[Path]:
        return [folder / "databases" / id / f"{id}.sqlite"]

    return base.Layout(
        name="sciencebenchmark",
        hint=HINT,
        files=files,
        databases=database,
        sql=SQL,
        on_server=None if address is None else on_server,
    )
