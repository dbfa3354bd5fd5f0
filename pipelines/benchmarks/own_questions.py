"""Reads a user's own questions: one JSON object a line, or a CSV file whose header has the same names.

    {"question": "...", "database": "sales.sqlite", "sql": "SELECT ...", "evidence": "...", "id": "...",
     "history": [["question before", "its SQL"]]}

`database` is a path relative to the file's folder, a `postgresql://` address without a password, or, with the option
`databases`, the name of a database in that folder. `evidence`, `id` and `history` may be left out, and `database` if
the option of that name has it. Files of others need no new names: `db`, `db_id` or `db_path` is read for `database`,
and `query`, `SQL` or `gold_sql` for `sql`. `gold_sqls` lists further right queries. Other fields are not read, and a
warning names them. With the options `dev` or `test` the one file is cut into three parts, and `split` says which of
them is read (`splitting.py`).
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.benchmarks.splitting import Shares, cut_questions
from pipelines.core.errors import DataError, warn_once
from pipelines.core.registry import reader
from pipelines.core.rows import NOT_READ, Row, csv_rows, json_rows, kind_of, reject
from pipelines.core.types import (
    DATABASE,
    GOLD_SQLS,
    SQL,
    BadRow,
    Database,
    Example,
    gold_queries,
    history_field,
    shortened_line,
    text_field,
)
from pipelines.recipe.config import Section, Share, Source
from pipelines.sql.dialects.base import identity
from pipelines.sql.dialects.dialect import engine_of_address, engine_of_file, file_suffixes

log = logging.getLogger(__name__)
PlacedRow = tuple[str, Row]  # a row's place in its file, and the row
READ_FIELDS = frozenset(("id", "question", "evidence", "history", GOLD_SQLS, NOT_READ, *SQL, *DATABASE))
# Fields that `sqltrain` itself writes beside a question, for the page of `sqltrain review`.
WRITTEN_FIELDS = frozenset(("style", "teacher", "checker", "votes", "hardness"))
LISTED_CHARS = 200  # characters of the names of fields in a warning
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
    for file_source, options in _question_sources(source):
        file = base.source_folder(file_source)
        yield file
        for name in _database_names(file_source, options):
            if "://" in name:
                continue
            with contextlib.suppress(ValueError, RuntimeError, OSError):  # the reader rejects a name that no file has
                yield _database_path(name, file.parent, options)


def own_addresses(source: Source) -> Iterator[str]:
    """The servers' databases that the rows name."""
    for file_source, options in _question_sources(source):
        for name in _database_names(file_source, options):
            if "://" in name:
                yield name


@reader("csv", options=OwnOptions, files=own_files, addresses=own_addresses)
@reader("jsonl", options=OwnOptions, files=own_files, addresses=own_addresses)
def read_own_questions(source: Source, seed: int, root: Path) -> base.Loaded:
    """Your own questions in a file, in order; those of one part, if the file is cut into parts."""
    options = OwnOptions.model_validate(source.options)
    own = _read_file(source, root)
    if not (options.dev or options.test):
        return own
    invented = base.Loaded([], [])
    for second, _ in _question_sources(source)[1:]:
        invented = _read_file(second, root)
    shares = Shares(options.dev, options.test)
    own_examples = list(own.examples)
    invented_examples = list(invented.examples)
    parts, repeats = cut_questions(own_examples, invented_examples, shares)
    rejected: list[base.Rejected] = []
    if source.split == "train":  # the rejected rows of both files are reported once
        rejected = [*own.quarantine, *invented.quarantine]
        for example in repeats:
            reason = "it asks what a question of your own asks"
            rejected.append(base.Rejected(example.id, "repeats_own", reason, chosen=False))
    return base.Loaded(parts[source.split], rejected)


def _question_sources(source: Source) -> list[tuple[Source, OwnOptions]]:
    """The file of a person's own questions, and that of the invented ones if there is one."""
    options = OwnOptions.model_validate(source.options)
    sources = [(source, options)]
    if options.invented:
        kind = kind_of(Path(options.invented))
        second = source.model_copy(update={"kind": kind, "path": options.invented})
        sources.append((second, options))
    return sources


def _database_names(source: Source, options: OwnOptions) -> list[str]:
    """The databases that the rows, or the options, name."""
    values: list[Any] = []
    for _, row in _read_rows(source, options):
        if not isinstance(row.value, BadRow):
            values.append(row.value)
    values.append({"database": options.database})
    return base.distinct_texts(values, *DATABASE)


def _read_file(source: Source, root: Path) -> base.Loaded:
    options = OwnOptions.model_validate(source.options)
    file = base.source_folder(source)

    def make(numbered: Row) -> Example:
        row = numbered.value
        reject(row)
        question = text_field(row, "question")
        sql, meta = gold_queries(row, *SQL)
        name = _database_name(row, file.parent, options)
        id = id_of(row) or f"{file.stem}_{numbered.number}"
        evidence = text_field(row, "evidence", required=False)
        if row.get("history"):
            meta["history"] = history_field(row)
        database = _find_own_database(name, file.parent, source, root, options)
        return Example(
            id=id,
            question=question,
            database=database,
            gold_sql=sql,
            evidence=evidence,
            source="jsonl",
            meta=meta,
        )

    placed_rows = _read_rows(source, options)
    rows = _noting_unread_fields(file, placed_rows)
    return base.collect_examples(rows, make)


def _noting_unread_fields(file: Path, rows: Iterator[PlacedRow]) -> Iterator[PlacedRow]:
    """The same rows; a warning names the fields of a file that are not read."""
    unread: set[str] = set()
    for place, row in rows:
        if isinstance(row.value, dict):
            unread |= _unread_fields(row.value)
        yield place, row
    if unread:
        names = ", ".join(sorted(unread))
        listed = shortened_line(names, LISTED_CHARS)
        warn_once(log, "%s: fields that are not read: %s; a prompt shows question and evidence alone", file, listed)


def _unread_fields(row: Mapping[str, Any]) -> set[str]:
    """The fields that are not read: unknown ones, and a further name of the SQL or the database with another text."""
    unread = set(row.keys() - READ_FIELDS - WRITTEN_FIELDS)
    for names in (SQL, DATABASE):
        text_read = ""
        for name in names:
            value = row.get(name)
            text = value.strip() if isinstance(value, str) else ""
            if not text_read:
                text_read = text
            if text not in ("", text_read):
                unread.add(name)
    return unread


def id_of(row: dict[str, Any]) -> str:
    """The id of a row, which many files number; "" if it has none."""
    id = row.get("id")
    if isinstance(id, int) and not isinstance(id, bool):
        return str(id)
    return text_field(row, "id", required=False)


def _database_name(row: Any, folder: Path, options: OwnOptions) -> str:
    """The name of a row's database; the option's own spelling if the row means the option's database."""
    default = options.database
    if default is None:
        return text_field(row, *DATABASE)
    name = text_field(row, *DATABASE, required=False)
    if not name:
        return default
    try:
        if _identity(name, folder, options) == _identity(default, folder, options):
            return default
    except (ValueError, RuntimeError, OSError):  # a name that no file can have is another one
        pass
    return name


def _identity(name: str, folder: Path, options: OwnOptions) -> str:
    if "://" in name:
        return identity(name)
    path = _database_path(name, folder, options)
    return identity(str(path))


def _find_own_database(name: str, folder: Path, source: Source, root: Path, options: OwnOptions) -> Database:
    """The database of that name: a server's, or a file that is linked under `root`."""
    base.check_address(name)
    server_engine = engine_of_address(name)
    if server_engine is not None:
        _, _, last_step = name.rpartition("/")
        database_name, _, _ = last_step.partition("?")
        return Database(database_name or server_engine, server_engine, name)
    try:
        path = _database_path(name, folder, options)
        id = str(Path(name).with_suffix(""))
        namespace = str(Path(name).parent)
        if name == options.database:  # the same name however the rows write it, and wherever it lies
            id = path.stem
            namespace = ""
        is_file = path.is_file()
    except (ValueError, RuntimeError, OSError):  # ".", "~nobody/x.sqlite", a name of 300 characters
        raise BadRow("bad_database_id", f"{name!r} cannot be a file") from None
    if not is_file:
        raise BadRow("missing_database", f"no such file: {path}")
    engine = engine_of_file(path) or "sqlite"
    if engine == "sqlite":
        base.check_file(path)
    location = base.link_database(path, root, source, namespace)
    return Database(id, engine, location)


def _read_rows(source: Source, options: OwnOptions) -> Iterator[PlacedRow]:
    """Each row of a file behind its place."""
    file = base.source_folder(source)
    if file.is_dir():
        hint = f"A {source.kind} source's path is the file with the questions"
        raise DataError(f"{file} is a folder", hint)
    if source.kind == "csv":
        needed = [("question",), SQL]
        if options.database is None:
            needed.append(DATABASE)
        rows = csv_rows(file, needed, HINT)
    else:
        rows = json_rows(file)
    for row in rows:
        yield f"{file.name}:{row.line}", row


def _database_path(name: str, folder: Path, options: OwnOptions) -> Path:
    suffixes = file_suffixes()
    if options.databases is None or Path(name).suffix in suffixes:
        return folder / Path(name).expanduser()
    home = folder / options.databases
    candidates = [home / f"{name}{suffix}" for suffix in suffixes]
    candidates += [home / name / f"{name}{suffix}" for suffix in suffixes]
    existing = [path for path in candidates if path.is_file()]
    if not existing:
        return candidates[0]
    if len(existing) > 1:
        message = "%s and %s are databases of the name %r: the first is read; a suffix says which"
        warn_once(log, message, existing[0], existing[1], name)
    return existing[0]
