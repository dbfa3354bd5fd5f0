"""New questions from a folder of JSONL and CSV files or from a table: a night's new rows become one frozen batch.

Each row is taken once. A batch is a folder that nobody edits: `questions.jsonl`, links to its databases, and the
digests of its rows. An edited row is a new row. The rows of a batch whose folder was removed, as that of a refused one
is, are new again.

Databases are not copied: cards, which may hide columns, and descriptions belong to a database by its place.
"""

import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.files import digest, read_json, write_atomic, write_json, writing
from pipelines.core.rows import CSV_SUFFIXES, read_rows, set_aside
from pipelines.core.store_remote import LINKS
from pipelines.core.types import DATABASE, BadRow, shortened_line
from pipelines.recipe.config import Nightly
from pipelines.sql.dialects.dialect import engine_of_head, file_suffixes, has_password
from pipelines.stages.context import QUARANTINE

log = logging.getLogger(__name__)
# Files of a batch.
QUESTIONS = "questions.jsonl"
ROWS = "rows.json"  # digests of its rows
HELD_OUT = "held_out.jsonl"  # rows that ask held-out questions, and so take no part
RESERVED = (QUESTIONS, ROWS, HELD_OUT, QUARANTINE, LINKS)  # a link of such a name would lead writes to the inbox

WITHHELD = "postgresql://user:***@host/"  # stands for an address with a password: the store keeps none
READ = (".jsonl", *CSV_SUFFIXES)
# Files that look like questions and are not read; others are databases, which questions name, or a warning names them.
OTHER_TEXTS = (".json", ".ndjson", ".jsonlines", ".jl", ".txt", ".tab", ".psv")
SHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods")
COLUMN_FILES = (".parquet", ".feather", ".arrow", ".avro", ".orc")
ARCHIVES = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz")
UNREAD = (*OTHER_TEXTS, *SHEETS, *COLUMN_FILES, *ARCHIVES)
SIDE_FILES = ("-wal", "-shm", "-journal", ".wal")  # ends of the names of files that engines keep beside a database
HEAD = 64  # bytes of a file by which a database is known
LISTED_CHARS = 200  # characters of the names of files in a warning
Row = dict[str, Any] | BadRow  # an unreadable row is copied with its place, and the data stage sets it aside
NamedRow = tuple[str, Row]  # the name of its file or table, and the row
TableContent = tuple[list[str], list[Any]]  # the names of its columns, and its rows


def inbox_path(settings: Nightly) -> Path:
    if settings.inbox is None:
        raise DataError("the recipe names no inbox", "Set nightly.inbox=FOLDER.")
    return Path(settings.inbox).expanduser().resolve()


def delivery_day(file: Path) -> date:
    """When a file was last changed, in UTC, as cron's nights are."""
    changed = file.stat().st_mtime
    return datetime.fromtimestamp(changed, UTC).date()


def delivery_days(settings: Nightly, since: date) -> list[date]:
    """The days from `since` on at which files of questions came, the oldest first."""
    inbox = inbox_path(settings)
    if inbox.is_file():
        hint = "Without --since one night takes all."
        raise DataError(f"{inbox} is a file: the rows of a table have no day", hint)
    days: set[date] = set()
    for file in inbox.glob("[!.]*"):
        if file.suffix.lower() in READ:
            days.add(delivery_day(file))
    days_since = sorted(day for day in days if day >= since)
    if not days_since:
        newest = "it has no file of questions"
        if days:
            newest = f"its newest is of {max(days)}"
        raise DataError(f"the inbox {inbox} has no file of {since} or later: {newest}")
    return days_since


def freeze_batch(settings: Nightly, batches: Path, day: date | None = None) -> Path | None:
    """Freeze the inbox's new rows, or those of one day's files, as the next batch under `batches`; None without any."""
    inbox = inbox_path(settings)
    fresh = _fresh_rows(inbox, settings.table, batches, day)
    if not fresh:
        return None
    earlier_batches = batches.glob("[0-9]*")
    numbers = [int(path.name[:4]) for path in earlier_batches]
    number = max(numbers, default=0) + 1
    marks_digest = digest(sorted(fresh))
    folder = batches / f"{number:04d}-{marks_digest[:8]}"
    work = batches / f".{folder.name}"
    work.mkdir(parents=True, exist_ok=True)
    databases = inbox
    if inbox.is_file():
        databases = inbox.parent
    # A lone surrogate has no UTF-8; written as its escape it is JSON, and the data stage sets the row aside.
    questions = work / QUESTIONS
    with writing(work), questions.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for mark, (name, row) in fresh.items():
            if isinstance(row, BadRow):
                bad_row = set_aside(_without_password(row))
                line = json.dumps(bad_row, ensure_ascii=False)
            else:
                row_id = _unique_id(row.get("id"), name, mark)
                with_id = {**row, "id": row_id}
                question = _with_databases(with_id, databases, work)
                line = json.dumps(question, ensure_ascii=False, sort_keys=True)
            file.write(line + "\n")
    write_json(work / ROWS, list(fresh))
    work.rename(folder)
    return folder


def _fresh_rows(inbox: Path, table: str | None, batches: Path, day: date | None) -> dict[str, NamedRow]:
    """Rows that no batch has taken: digest -> (name of its file, row)."""
    taken: set[str] = set()
    for path in batches.glob(f"[!.]*/{ROWS}"):
        taken.update(read_json(path))
    fresh: dict[str, NamedRow] = {}
    for name, row in _rows(inbox, table, day):
        content: Any = row
        if isinstance(row, BadRow):
            content = [row.reason, row.detail, row.text]
        mark = digest(content)
        if mark not in taken:
            fresh[mark] = (name, row)
    return fresh


def _without_password(row: BadRow) -> BadRow:
    if has_password(row.detail):
        return BadRow(row.reason, WITHHELD)
    return row


def _unique_id(id_in_row: Any, file: str, mark: str) -> str:
    """A row's id in its batch: its own, or the name of its file, with the beginning of its digest.

    It has no blanks around it, which a reader of the batch would strip: the row would not be found again.
    """
    own_id = ""
    if isinstance(id_in_row, int | str) and not isinstance(id_in_row, bool):
        own_id = str(id_in_row).strip()
    name = own_id or file.strip()
    return f"{name}-{mark[:8]}"


def _with_databases(row: Mapping[str, Any], home: Path, batch: Path) -> dict[str, Any]:
    """A row whose databases are found from the batch's folder, by links to the files of the inbox.

    A path that leads nowhere stays as it is, and an address loses its password: the data stage sets both aside.
    """
    located = dict(row)
    for field in DATABASE:
        database = row.get(field)
        if not isinstance(database, str):
            continue
        if has_password(database):
            located[field] = WITHHELD
            continue
        path = Path(database)
        target = home / database
        is_relative = "://" not in database and not path.is_absolute()
        if not is_relative or not os.path.isfile(target):
            continue
        if ".." in path.parts:
            located[field] = str(target.resolve())
            continue
        link = batch / database
        is_reserved = path.parts[0] in RESERVED
        if not is_reserved and not os.path.lexists(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target.resolve())
    return located


def _rows(inbox: Path, table: str | None, day: date | None) -> Iterator[NamedRow]:
    """Every row with the name of its file or table."""
    if inbox.is_file():
        if table is None:
            raise DataError(f"{inbox} is a file", "Set nightly.table, or give a folder of JSONL files.")
        for row in _table_rows(inbox, table):
            yield table, row
        return
    if not inbox.is_dir():
        raise DataError(f"no inbox at {inbox}", "Make that folder, or set nightly.inbox.")
    entries = sorted(inbox.iterdir())
    files = [path for path in entries if not path.name.startswith(".")]
    _refuse_unread_files(inbox, files)
    _warn_of_unread_files(inbox, files)
    for path in files:
        if path.suffix.lower() not in READ:
            continue
        if day is None or delivery_day(path) == day:
            yield from _file_rows(path)


def _file_rows(path: Path) -> Iterator[NamedRow]:
    """Every row of a file with its name; a bad row tells its place."""
    for line, _, row in read_rows(path, hint="Take it out of the inbox."):
        if isinstance(row, dict):
            yield path.stem, row
            continue
        place = f"{path.name}, line {line}"
        if isinstance(row, BadRow):
            bad = BadRow(row.reason, f"{place}: {row.detail}", row.text)
        else:
            kind = type(row).__name__
            bad = BadRow("not_an_object", f"{place}: a {kind}, no object", json.dumps(row))
        yield path.stem, bad


def _refuse_unread_files(inbox: Path, files: Sequence[Path]) -> None:
    unread = []
    for path in files:
        if path.is_file() and path.suffix.lower() in UNREAD:
            unread.append(path)
    in_subfolders = sorted(inbox.glob("[!.]*/*"))
    unread += [path for path in in_subfolders if path.suffix.lower() in READ]
    if unread:
        raise DataError(
            f"the inbox {inbox} holds files that are not read: {_names_within(inbox, unread)}",
            "Questions are taken from .jsonl, .csv and .tsv files that are in the folder itself; take the others out.",
        )


def _names_within(folder: Path, paths: Sequence[Path]) -> str:
    relative_paths = [str(path.relative_to(folder)) for path in paths]
    return ", ".join(relative_paths)


def _warn_of_unread_files(inbox: Path, files: Sequence[Path]) -> None:
    """Name the files that are neither questions nor databases, and files of questions far down in subfolders."""
    unread = []
    for path in files:
        is_known = path.suffix.lower() in READ or _is_database(path)
        if path.is_file() and not is_known:
            unread.append(path)
    for path in sorted(inbox.glob("[!.]*/**/*")):
        folders_and_name = path.relative_to(inbox).parts
        is_hidden = any(name.startswith(".") for name in folders_and_name)
        has_questions = path.suffix.lower() in (*READ, *UNREAD)
        if has_questions and path.is_file() and not is_hidden:
            unread.append(path)
    if unread:
        names = shortened_line(_names_within(inbox, unread), LISTED_CHARS)
        log.warning("the inbox %s holds files that are not read: %s", inbox, names)


def _is_database(path: Path) -> bool:
    """Whether a file is a database by its suffix or its first bytes, or one that an engine keeps beside a database."""
    if path.suffix in file_suffixes() or path.name.endswith(SIDE_FILES):
        return True
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return engine_of_head(head, path) is not None


def _table_rows(file: Path, table: str) -> Iterator[Row]:
    """The rows of a table of a DuckDB or SQLite file, without their empty fields."""
    quoted_table = table.replace('"', '""')
    query = f'SELECT * FROM "{quoted_table}"'
    try:
        if file.suffix == ".duckdb":
            columns, cells = _duckdb_rows(file, query)
        else:
            columns, cells = _sqlite_rows(file, query)
    except Exception as error:  # each library has a tree of its own
        raise DataError(f"cannot read table {table!r} of {file}: {error}") from None
    for number, values in enumerate(cells, 1):
        row = {}
        damaged = None
        for name, value in zip(columns, values, strict=True):
            if value is None:
                continue
            if isinstance(value, NotUtf8) and damaged is None:
                damaged = name
            row[name] = _plain(value)
        if damaged is None:
            yield row
        else:
            detail = f"row {number} of table {table}: {damaged} is not UTF-8"
            yield BadRow("not_utf8", detail, json.dumps(row))


def _duckdb_rows(file: Path, query: str) -> TableContent:
    """The columns and the rows of a query's result."""
    import duckdb

    with duckdb.connect(str(file), read_only=True) as lake:
        result = lake.execute(query)
        columns = [column[0] for column in result.description or ()]
        return columns, result.fetchall()


def _sqlite_rows(file: Path, query: str) -> TableContent:
    """The columns and the rows of a query's result; a text that is not UTF-8 is a `NotUtf8`."""
    address = f"{file.as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as database:
        database.text_factory = _text_or_bytes
        cursor = database.execute(query)
        columns = [column[0] for column in cursor.description]
        return columns, cursor.fetchall()


class NotUtf8(bytes):
    """A text of a table that is not UTF-8."""


def _text_or_bytes(data: bytes) -> str | NotUtf8:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return NotUtf8(data)


def _plain(value: Any) -> Any:
    """A table's value as JSON: a time as its text; bytes as an object, which no reader takes for a text."""
    if isinstance(value, dict):
        fields = {}
        for name, inner in value.items():
            fields[str(name)] = _plain(inner)
        return fields
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def set_held_out_aside(batch: Path, repeats: Mapping[str, str]) -> bool:
    """Move rows that ask held-out questions from a batch into its `held_out.jsonl`.

    They count as taken: the same rows do not come again.

    Args:
        repeats: id of each such row -> the held-out question that it asks.

    Returns:
        True if some rows went and some stay; else the batch is as it was.
    """
    text = (batch / QUESTIONS).read_text(encoding="utf-8")
    staying = []
    leaving = {}
    for line in text.split("\n"):  # `splitlines` would cut at a U+2028
        if not line:
            continue
        row_id = str(json.loads(line).get("id"))
        if row_id in repeats:
            leaving[row_id] = repeats[row_id]
        else:
            staying.append(f"{line}\n")
    if not staying or not leaving:
        return False
    with writing(batch):
        held_out = {**held_out_rows(batch), **leaving}
        lines = []
        for row_id, question in held_out.items():
            row = json.dumps({"id": row_id, "asks": question})
            lines.append(f"{row}\n")
        write_atomic(batch / HELD_OUT, "".join(lines))
        write_atomic(batch / QUESTIONS, "".join(staying))
    return True


def held_out_rows(batch: Path) -> dict[str, str]:
    """The ids of a batch's rows that ask held-out questions, each with the question that it asks."""
    path = batch / HELD_OUT
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    questions = {}
    for line in text.splitlines():
        row = json.loads(line)
        questions[row["id"]] = row["asks"]
    return questions
