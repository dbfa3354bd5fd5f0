"""New questions from a folder of JSONL and CSV files or from a table: each row is taken once, and a night's new rows
become one frozen batch.

A batch is a folder that nobody edits: `questions.jsonl`, links to its databases, and the digests of its rows. An edited
row is a new row. The rows of a batch whose folder was removed, as that of a refused one is, are new again.
"""

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_atomic, write_json, writing
from pipelines.core.rows import CSV_SUFFIXES, read_rows, set_aside
from pipelines.core.store_remote import LINKS
from pipelines.core.types import DATABASE, BadRow
from pipelines.recipe.config import Nightly
from pipelines.recipe.recipes import digest
from pipelines.sql.dialects.dialect import has_password
from pipelines.stages.context import QUARANTINE

QUESTIONS, ROWS = "questions.jsonl", "rows.json"
HELD_OUT = "held_out.jsonl"  # of a batch: its rows that ask held-out questions, and so take no part
OWN = (QUESTIONS, ROWS, HELD_OUT, QUARANTINE, LINKS)  # a link of such a name would lead what is written to the inbox
WITHHELD = "postgresql://user:***@host/"  # in place of an address with a password: the store keeps none
READ = (".jsonl", *CSV_SUFFIXES)
UNREAD = (".json", ".ndjson", ".txt", ".xlsx", ".parquet")  # beside databases, which questions name
Row = dict[str, Any] | BadRow  # what cannot be read is copied with its place, and the data stage sets it aside


def inbox_path(settings: Nightly) -> Path:
    if settings.inbox is None:
        raise DataError("the recipe names no inbox", "Set nightly.inbox=FOLDER.")
    return Path(settings.inbox).expanduser().resolve()


def delivered(file: Path) -> date:
    # in UTC, as cron's nights are
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).date()


def days(settings: Nightly, since: date) -> list[date]:
    inbox = inbox_path(settings)
    if inbox.is_file():
        raise DataError(f"{inbox} is a file: the rows of a table have no day", "Without --since one night takes all.")
    every = sorted({delivered(file) for file in inbox.glob("[!.]*") if file.suffix.lower() in READ})
    found = [day for day in every if day >= since]
    if not found:
        newest = f"its newest is of {every[-1]}" if every else "it has no file of questions"
        raise DataError(f"the inbox {inbox} has no file of {since} or later: {newest}")
    return found


def collect(settings: Nightly, batches: Path, day: date | None = None) -> Path | None:
    """Freeze the inbox's new rows, or those of one day's files, as the next batch under `batches`; None without any."""
    inbox = inbox_path(settings)
    taken = {row for path in batches.glob(f"[!.]*/{ROWS}") for row in read_json(path)}
    fresh: dict[str, tuple[str, Row]] = {}  # each with the name of its file, by its digest
    for name, row in _rows(inbox, settings.table, day):
        mark = digest(row if isinstance(row, dict) else [row.reason, row.detail])
        if mark not in taken:
            fresh[mark] = (name, row)
    if not fresh:
        return None
    number = max((int(path.name[:4]) for path in batches.glob("[0-9]*")), default=0) + 1
    folder = batches / f"{number:04d}-{digest(sorted(fresh))[:8]}"
    work = batches / f".{folder.name}"
    work.mkdir(parents=True, exist_ok=True)
    home = inbox if inbox.is_dir() else inbox.parent
    # A lone surrogate has no UTF-8; written as its escape it is JSON, and the data stage sets the row aside.
    with writing(work), (work / QUESTIONS).open("w", encoding="utf-8", errors="backslashreplace") as file:
        for mark, (name, row) in fresh.items():
            if isinstance(row, BadRow):
                detail = WITHHELD if has_password(row.detail) else row.detail
                file.write(json.dumps(set_aside(BadRow(row.reason, detail)), ensure_ascii=False) + "\n")
                continue
            # A unique name, and a link in the batch to a database file of the inbox. A path that leads nowhere stays as
            # it is, and an address is kept without its password: the data stage sets both aside.
            own_id = row.get("id")
            has_id = isinstance(own_id, str) and own_id
            row = {**row, "id": f"{own_id}-{mark[:8]}" if has_id else f"{name}-{mark[:8]}"}
            for field in (field for field in DATABASE if isinstance(row.get(field), str)):
                database = row[field]
                target = home / database
                if has_password(database):
                    row[field] = WITHHELD
                elif "://" in database or Path(database).is_absolute() or not os.path.isfile(target):
                    continue
                elif ".." in Path(database).parts:
                    row[field] = str(target.resolve())
                elif Path(database).parts[0] not in OWN and not os.path.lexists(work / database):
                    (work / database).parent.mkdir(parents=True, exist_ok=True)
                    (work / database).symlink_to(target.resolve())
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
    write_json(work / ROWS, list(fresh))
    work.rename(folder)
    return folder


def _rows(inbox: Path, table: str | None, day: date | None) -> Iterator[tuple[str, Row]]:
    """Every row with the name of its file or table; a table's rows without their empty fields."""
    if inbox.is_file() and table is not None:
        query = 'SELECT * FROM "' + table.replace('"', '""') + '"'
        try:
            if inbox.suffix == ".duckdb":
                import duckdb

                with duckdb.connect(str(inbox), read_only=True) as lake:
                    result = lake.execute(query)
                    columns, cells = [column[0] for column in result.description or ()], result.fetchall()
            else:
                with closing(sqlite3.connect(f"{inbox.as_uri()}?mode=ro", uri=True)) as file:
                    file.text_factory = _text_or_bytes
                    cursor = file.execute(query)
                    columns, cells = [column[0] for column in cursor.description], cursor.fetchall()
        except Exception as error:  # each library has a tree of its own
            raise DataError(f"cannot read table {table!r} of {inbox}: {error}") from None
        for number, values in enumerate(cells, 1):
            row = {name: value for name, value in zip(columns, values, strict=True) if value is not None}
            damaged = next((name for name, value in row.items() if isinstance(value, NotUtf8)), None)
            if damaged is not None:
                yield table, BadRow("not_utf8", f"row {number} of table {table}: {damaged} is not UTF-8")
            else:
                yield table, {name: _plain(value) for name, value in row.items()}
        return
    if inbox.is_file():
        raise DataError(f"{inbox} is a file", "Set nightly.table, or give a folder of JSONL files.")
    if not inbox.is_dir():
        raise DataError(f"no inbox at {inbox}", "Make that folder, or set nightly.inbox.")
    files = [path for path in sorted(inbox.iterdir()) if not path.name.startswith(".")]
    deeper = [path for path in sorted(inbox.glob("[!.]*/*")) if path.suffix.lower() in READ]
    unread = [path for path in files if path.is_file() and path.suffix.lower() in UNREAD] + deeper
    if unread:
        names = ", ".join(str(path.relative_to(inbox)) for path in unread)
        raise DataError(
            f"the inbox {inbox} holds files that are not read: {names}",
            "Questions are taken from .jsonl, .csv and .tsv files that are in the folder itself; take the others out.",
        )
    read = (path for path in files if path.suffix.lower() in READ)
    for path in (path for path in read if day is None or delivered(path) == day):
        for line, _, row in read_rows(path, hint="Take it out of the inbox."):
            if isinstance(row, dict):
                yield path.stem, row
                continue
            bad = row if isinstance(row, BadRow) else BadRow("not_an_object", f"a {type(row).__name__}, no object")
            yield path.stem, BadRow(bad.reason, f"{path.name}, line {line}: {bad.detail}")


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
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value if value is None or isinstance(value, str | int | float) else str(value)


def leave_out(batch: Path, repeats: Mapping[str, str]) -> bool:
    """Move rows that ask held-out questions from a batch into its `held_out.jsonl`; True if some went and some stay.

    They count as taken: the same rows do not come again. `repeats` gives the held-out question of each such row's id.
    """
    text = (batch / QUESTIONS).read_text(encoding="utf-8")
    lines = [f"{line}\n" for line in text.split("\n") if line]  # `splitlines` would cut at a U+2028
    ids = [str(json.loads(line).get("id")) for line in lines]
    stay = [line for line, id in zip(lines, ids, strict=True) if id not in repeats]
    if len(stay) in (0, len(lines)):
        return False
    gone = {id: repeats[id] for id in ids if id in repeats}
    with writing(batch):
        rows = [{"id": id, "asks": asks} for id, asks in (held_out(batch) | gone).items()]
        write_atomic(batch / HELD_OUT, "".join(json.dumps(row) + "\n" for row in rows))
        write_atomic(batch / QUESTIONS, "".join(stay))
    return True


def held_out(batch: Path) -> dict[str, str]:
    """The ids of a batch's rows that ask held-out questions, each with the question that it asks."""
    path = batch / HELD_OUT
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()
    return {row["id"]: row["asks"] for row in rows}
