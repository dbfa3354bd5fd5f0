"""Reads a user's own questions: one JSON object a line, or a CSV file whose header has the same names.

    {"question": "...", "database": "sales.sqlite", "sql": "SELECT ...", "evidence": "...", "id": "...",
     "history": [["question before", "its SQL"]]}

`database` is a path relative to the file's folder, a `postgresql://` address without a password, or, with the option
`databases`, the name of a database in that folder. `evidence`, `id` and `history` may be left out, and `database` where
the option of that name has it. With the options `dev` and `test` one file is all that there is: `split` says which of
its three parts is read (`splitting.py`).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipelines.benchmarks import base
from pipelines.benchmarks.splitting import Shares, cut
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.rows import Row, csv_rows, json_rows, kind_of, reject
from pipelines.core.types import DATABASE, SQL, BadRow, Database, Example, gold_queries, history_field, text_field
from pipelines.recipe.config import Section, Share, Source
from pipelines.sql.dialects.base import identity
from pipelines.sql.dialects.dialect import engine_of_address, engine_of_file, file_suffixes

HINT = "Its first line names the columns: question, sql and, where you have them, id, database and evidence."


class OwnOptions(Section):
    """The databases of own questions, and their parts."""

    databases: str | None = None  # the folder in which a name is looked up, relative to the file's folder.
    database: str | None = None  # the database of rows that name none; named as a row would.
    # dev, test: shares of the questions that are held out; with either, `split` names the part that is read.
    dev: Share = 0.0
    test: Share = 0.0
    invented: str | None = None  # a second file, whose questions are trained on and never held out.


def own_files(source: Source) -> Iterator[Path]:
    """The files, and those of the databases that they name; a server's databases have no file to look at."""
    for file_source, options in _sources(source):
        file = base.source_folder(file_source)
        yield file
        for name in _names(file_source, options):
            with contextlib.suppress(ValueError, RuntimeError, OSError):  # no file's name: the reader rejects its row
                if "://" not in name:
                    yield _database_path(name, file.parent, options)


def own_addresses(source: Source) -> Iterator[str]:
    """The servers' databases that the rows name."""
    for file_source, options in _sources(source):
        yield from (name for name in _names(file_source, options) if "://" in name)


@reader("csv", options=OwnOptions, files=own_files, addresses=own_addresses)
@reader("jsonl", options=OwnOptions, files=own_files, addresses=own_addresses)
def read_own_questions(source: Source, seed: int, root: Path) -> base.Loaded:
    """The questions of a file, in order; of a part, those of the part."""
    options = OwnOptions.model_validate(source.options)
    own = _read_file(source, root)
    if not (options.dev or options.test):
        return own
    invented = next((_read_file(second, root) for second, _ in _sources(source)[1:]), base.Loaded([], []))
    parts, repeats = cut(list(own.examples), list(invented.examples), Shares(options.dev, options.test))
    bad = [*own.quarantine, *invented.quarantine] if source.split == "train" else []  # of the file, told once
    reason = "it asks what a question of your own asks"
    aside = [base.Rejected(example.id, "repeats_own", reason, chosen=False) for example in repeats]
    return base.Loaded(parts[source.split], [*bad, *(aside if source.split == "train" else [])])


def _sources(source: Source) -> list[tuple[Source, OwnOptions]]:
    """The file of a person's own questions, and that of the invented ones if there is one."""
    options = OwnOptions.model_validate(source.options)
    kind = kind_of(Path(options.invented or ""))
    invented = source.model_copy(update={"kind": kind, "path": options.invented})
    return [(source, options), *([(invented, options)] if options.invented else [])]


def _names(source: Source, options: OwnOptions) -> list[str]:
    """The databases that the rows, or the options, name."""
    values = [row.value for _, row in _rows(source, options) if not isinstance(row.value, BadRow)]
    return base.distinct_texts([*values, {"database": options.database}], *DATABASE)


def _read_file(source: Source, root: Path) -> base.Loaded:
    options, file = OwnOptions.model_validate(source.options), base.source_folder(source)

    def make(numbered: Row) -> Example:
        row = numbered.value
        reject(row)
        question, (sql, meta) = text_field(row, "question"), gold_queries(row, *SQL)
        default = options.database
        name = text_field(row, *DATABASE, required=default is None)
        if default is not None:
            # A row may write the option's database in another way; no file's name is another one.
            with contextlib.suppress(ValueError, RuntimeError, OSError):
                place, other = (
                    address if "://" in address else str(_database_path(address, file.parent, options))
                    for address in (name or default, default)
                )
                name = default if identity(place) == identity(other) else name
        id = row.get("id")  # many files number their questions
        is_number = isinstance(id, int) and not isinstance(id, bool)
        id = str(id) if is_number else text_field(row, "id", required=False) or f"{file.stem}_{numbered.number}"
        evidence = text_field(row, "evidence", required=False)
        meta |= {"history": history_field(row)} if row.get("history") else {}
        base.check_address(name)
        engine = engine_of_address(name)
        if engine is not None:
            database = Database(name.rpartition("/")[2].partition("?")[0] or engine, engine, name)
            return Example(id, question, database, sql, evidence, source="jsonl", meta=meta)
        try:
            path = _database_path(name, file.parent, options)
            database_id, apart = str(Path(name).with_suffix("")), str(Path(name).parent)
            if name == default:  # however the rows write it, and wherever it lies
                database_id, apart = path.stem, ""
            there = path.is_file()
        except (ValueError, RuntimeError, OSError):  # ".", "~nobody/x.sqlite", a name of 300 characters
            raise BadRow("bad_database_id", f"{name!r} cannot be a file") from None
        if not there:
            raise BadRow("missing_database", f"no such file: {path}")
        engine = engine_of_file(path) or "sqlite"
        if engine == "sqlite":
            base.check_file(path)
        database = Database(database_id, engine, base.link(path, root, source, apart))
        return Example(id, question, database, sql, evidence, source="jsonl", meta=meta)

    return base.collect(_rows(source, options), make)


def _rows(source: Source, options: OwnOptions) -> Iterator[tuple[str, Row]]:
    """Each row of a file behind the place where it stands."""
    file = base.source_folder(source)
    if file.is_dir():
        raise DataError(f"{file} is a folder", f"A {source.kind} source's path is the file with the questions")
    needed = [("question",), SQL, *([DATABASE] if options.database is None else [])]
    found = csv_rows(file, needed, HINT) if source.kind == "csv" else json_rows(file)
    yield from ((f"{file.name}:{row.line}", row) for row in found)


def _database_path(name: str, folder: Path, options: OwnOptions) -> Path:
    suffixes = file_suffixes()
    if options.databases is None or Path(name).suffix in suffixes:
        return folder / Path(name).expanduser()
    home = folder / options.databases
    places = [home / f"{name}{suffix}" for suffix in suffixes]
    places += [home / name / f"{name}{suffix}" for suffix in suffixes]
    return next((place for place in places if place.is_file()), places[0])
