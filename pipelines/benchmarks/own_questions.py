"""Reads a user's own questions: one JSON object a line, or a CSV file whose header has the same names.

    {"question": "...", "database": "sales.sqlite", "sql": "SELECT ...", "evidence": "...", "id": "...",
     "history": [["question before", "its SQL"]]}

`database` is a path relative to the file's folder, a `postgresql://` address without a password, or, with the option
`databases`, the name of a database in that folder. `evidence`, `id` and `history` may be left out, and `database` where
the option of that name has it. With the options `dev` and `test` one file is all that there is: `split` says which of
its three parts is read (`splitting.py`).
"""

import contextlib
import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.benchmarks.splitting import Shares, cut
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.types import DATABASE, SQL, BadRow, Database, Example, gold_queries, history_field, text_field
from pipelines.recipe.config import Section, Share, Source
from pipelines.sql.dialects.base import identity
from pipelines.sql.dialects.dialect import engine_of_address, engine_of_file, file_suffixes

DELIMITERS = ",;\t"  # spreadsheets write the second where the comma parts a number's digits
HINT = "Its first line names the columns: question, sql and, where you have them, id, database and evidence."
Row = tuple[int, Any]  # the line that it stands in, and a JSON value or the `BadRow` that it is


def rows(file: Path, needed: Sequence[Sequence[str]]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a CSV file as the JSON objects of a JSONL file: each by the names of the header's columns, in lower
    case, with the line that it ends in. Columns that are needed come with the other names that each may have.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            records = _records(stream, max(DELIMITERS, key=first.count))
            header = [name.strip().lower() for name in next(records, (1, []))[1]]
            missing = [names[0] for names in needed if not {name.lower() for name in names} & set(header)]
            if missing:
                has = ", ".join(filter(None, header)) or "none"
                text = f"{file.name} has no column {' and no column '.join(missing)}; its columns: {has}"
                raise DataError(text, HINT)
            for line, cells in records:
                if len(cells) > len(header) and any(map(str.strip, cells)):
                    shown = f"a text with a comma needs quotes: {','.join(cells)[:200]}"
                    yield line, BadRow("too_many_cells", f"{len(cells)} cells under {len(header)} columns: {shown}")
                elif any(map(str.strip, cells)):
                    yield line, {name: cell for name, cell in zip(header, cells, strict=False) if cell.strip()}
    except UnicodeDecodeError:
        raise DataError(f"{file.name} is not UTF-8", "Save it as “CSV UTF-8”.") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    except csv.Error as error:
        raise DataError(f"{file.name} is not CSV: {error}", HINT) from None


def _records(stream: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row with the line that it ends in."""
    lines: list[str] = []  # of the row that is read

    def kept() -> Iterator[str]:
        for line in stream:
            lines.append(line)
            yield line

    records = csv.reader(kept(), delimiter=delimiter)
    for cells in records:
        if "".join(lines).count('"') % 2:  # a strict reader raises at a quote that is still open
            try:
                list(csv.reader(lines, delimiter=delimiter, strict=True))
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    line = records.line_num - len(lines) + 1
                    raise csv.Error(f"a quote that opens in line {line} is never closed") from None
        yield records.line_num, cells
        lines.clear()


class OwnOptions(Section):
    """The databases of own questions, and their parts."""

    databases: str | None = None  # the folder in which a name is looked up, relative to the file's folder.
    database: str | None = None  # the database of rows that name none; named as a row would.
    # dev, test: shares of the questions that are held out; with either, `split` names the part that is read.
    dev: Share = 0.0
    test: Share = 0.0
    invented: str | None = None  # a second file, of JSON lines, whose questions are trained on and never held out.


@reader("csv", options=OwnOptions)
@reader("jsonl", options=OwnOptions)
def read(source: Source, seed: int, root: Path) -> base.Loaded:
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


def files(source: Source) -> Iterator[Path]:
    """The files, and those of the databases that they name; a server's databases have no file to look at."""
    for file_source, options in _sources(source):
        file = base.source_folder(file_source)
        yield file
        for name in _names(file_source, options):
            with contextlib.suppress(ValueError, RuntimeError, OSError):  # no file's name: the reader rejects its row
                if "://" not in name:
                    yield _database_path(name, file.parent, options)


def addresses(source: Source) -> Iterator[str]:
    """The servers' databases that the rows name."""
    for file_source, options in _sources(source):
        yield from (name for name in _names(file_source, options) if "://" in name)


def _sources(source: Source) -> list[tuple[Source, OwnOptions]]:
    """The file of a person's own questions, and that of the invented ones if there is one."""
    options = OwnOptions.model_validate(source.options)
    invented = source.model_copy(update={"kind": "jsonl", "path": options.invented})
    return [(source, options), *([(invented, options)] if options.invented else [])]


def _names(source: Source, options: OwnOptions) -> list[str]:
    """The databases that the rows, or the options, name."""
    values = [row for _, (_, row) in _rows(source, options) if not isinstance(row, BadRow)]
    return base.distinct_texts([*values, {"database": options.database}], *DATABASE)


def _read_file(source: Source, root: Path) -> base.Loaded:
    options, file = OwnOptions.model_validate(source.options), base.source_folder(source)

    def make(numbered: Row) -> Example:
        number, row = numbered
        if isinstance(row, BadRow):
            raise row
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
        id = str(id) if is_number else text_field(row, "id", required=False) or f"{file.stem}_{number}"
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
    if source.kind == "csv":
        needed = [("question",), SQL, *([DATABASE] if options.database is None else [])]
        yield from ((f"{file.name}:{number}", (number, row)) for number, row in rows(file, needed))
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    with stream:
        for number, line in enumerate(stream, 1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not text.strip():
                continue
            value: Any
            try:
                value = json.loads(text)
            except UnicodeDecodeError:
                value = BadRow("not_utf8", "the line is not UTF-8")
            except (ValueError, RecursionError) as error:
                value = BadRow("not_json", f"not JSON: {error}")
            yield f"{file.name}:{number}", (number, value)


def _database_path(name: str, folder: Path, options: OwnOptions) -> Path:
    suffixes = file_suffixes()
    if options.databases is None or Path(name).suffix in suffixes:
        return folder / Path(name).expanduser()
    home = folder / options.databases
    places = [home / f"{name}{suffix}" for suffix in suffixes]
    places += [home / name / f"{name}{suffix}" for suffix in suffixes]
    return next((place for place in places if place.is_file()), places[0])
