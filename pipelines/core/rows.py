"""The rows of a file of questions, each behind its line: JSON lines, one JSON list, or CSV with a header."""

import csv
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import DataError, warn_once
from pipelines.core.text_files import (
    DECODER,
    MARK,
    UTF_8_MARK,
    RepeatedName,
    not_utf_8,
    parse_json,
    raise_not_json,
    require_utf_8,
)
from pipelines.core.types import BadRow

log = logging.getLogger(__name__)
csv.field_size_limit(2**31 - 1)  # a cell is as long as it is; the default is 128 KiB
CSV_SUFFIXES = (".csv", ".tsv")
DELIMITERS = ",;\t"  # spreadsheets write the second where the comma parts a number's digits
EDGE = 4096  # bytes of a file's two ends, by which a JSON list is told from JSON lines
NOT_READ = "not_read"  # the field of a copied row that says why the original could not be read
QUESTION = "question"  # the column that every file of questions has
MESSAGE_CHARS = 200  # characters of a row's text in a message
_BLANKS = re.compile(r"[ \t\r\n]*")
Needed = Sequence[Sequence[str]]  # columns that a CSV file must have, each with the other names that it may bear


class Row(NamedTuple):
    """A row of a file."""

    line: int  # the line that it begins in; a CSV row's last line.
    number: int  # its line, or its place in a JSON list, from 1.
    value: Any  # a JSON value, or the `BadRow` that it is.


def kind_of(path: Path) -> str:
    """The reader of a file of questions by its name: "csv" or "jsonl"."""
    if path.suffix.lower() in CSV_SUFFIXES:
        return "csv"
    return "jsonl"


def read_rows(path: Path, needed: Needed = (), hint: str = "") -> Iterator[Row]:
    """The rows of a CSV or a JSON file, whichever its name says."""
    if kind_of(path) == "csv":
        return csv_rows(path, needed, hint)
    return json_rows(path, hint)


def set_aside(bad: BadRow) -> dict[str, Any]:
    """A row that cannot be read as a row of JSON lines, which `reject` finds there."""
    return {NOT_READ: {"reason": bad.reason, "detail": bad.detail}}


def reject(row: Any) -> None:
    """Raise the `BadRow` that a row is, or that it was before it was copied."""
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        return
    mark = row.get(NOT_READ)
    if isinstance(mark, dict):
        reason = str(mark.get("reason"))
        detail = str(mark.get("detail"))
        raise BadRow(reason, detail)


def good_rows(path: Path, needed: Needed = (), hint: str = "") -> Iterator[Row]:
    """The rows of a file in which each must be one: DataError with the line of the first that cannot be read."""
    for row in read_rows(path, needed, hint):
        if isinstance(row.value, BadRow):
            raise DataError(f"{path}, line {row.line}: {row.value.detail}", hint)
        yield row


def json_rows(path: Path, hint: str = "") -> Iterator[Row]:
    """The values of JSON lines, or the items of the one JSON list that a file holds; blank lines are skipped.

    A line ends in a line feed, a carriage return or both: `bytes.splitlines` does not cut at a U+2028 inside a text, as
    `str.splitlines` does.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(EDGE)
            require_utf_8(path, head)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - EDGE))
            tail = stream.read()
            stream.seek(0)
            is_list = _text(head).startswith(b"[") and _text(tail).endswith(b"]")
            if is_list:
                yield from _items(path, stream.read(), hint)
            else:
                lines = itertools.chain.from_iterable(map(bytes.splitlines, stream))
                for number, line in enumerate(lines, 1):
                    if _text(line):
                        yield Row(number, number, _value(line))
    except FileNotFoundError:
        raise DataError(f"no such file: {path}", hint) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint) from None


def _text(data: bytes) -> bytes:
    """Bytes without the byte order mark before them and the blanks around them."""
    return data.removeprefix(UTF_8_MARK).strip()


def _value(line: bytes) -> Any:
    try:
        return parse_json(line)
    except UnicodeDecodeError as error:
        return BadRow("not_utf8", f"it is not UTF-8 (byte {error.start} of the line)", _decoded(line))
    except RepeatedName as error:
        return BadRow("repeated_name", str(error), _decoded(line))
    except ValueError as error:  # also a number of 5,000 digits, and brackets in thousands of brackets
        return BadRow("not_json", f"not JSON: {error}", _decoded(line))


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _items(path: Path, data: bytes, hint: str) -> Iterator[Row]:
    """The items of a JSON list, each behind the line that it begins in."""
    try:
        text = data.removeprefix(UTF_8_MARK).decode()
    except UnicodeDecodeError:
        raise not_utf_8(path, data) from None
    bracket = _behind_blanks(text, 0)
    begin = _behind_blanks(text, bracket + 1)
    line = 1 + text.count("\n", 0, begin)
    number = 0
    try:
        while not text.startswith("]", begin):
            value, end = _item(text, begin)
            number += 1
            yield Row(line, number, value)
            end = _behind_blanks(text, end)
            if text.startswith(",", end):
                end = _behind_blanks(text, end + 1)
            elif not text.startswith("]", end):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
            line += text.count("\n", begin, end)
            begin = end
        if text[begin + 1 :].strip():
            raise json.JSONDecodeError("Extra data", text, begin + 1)
    except ValueError as error:
        raise_not_json(path, error, hint)


def _item(text: str, begin: int) -> tuple[Any, int]:
    """The value that begins at a place of a JSON text, or the `BadRow` that it is, and the place behind it."""
    try:
        return DECODER.raw_decode(text, begin)
    except RecursionError:
        raise json.JSONDecodeError("It nests too deep", text, begin) from None
    except RepeatedName as error:
        _, end = json.JSONDecoder().raw_decode(text, begin)
        return BadRow("repeated_name", str(error), text[begin:end]), end


def _behind_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    assert match is not None  # the pattern matches no blanks, too
    return match.end()


def csv_rows(path: Path, needed: Needed, hint: str = "") -> Iterator[Row]:
    """The rows of a CSV file as the JSON objects of a JSONL file, each with the line that it ends in.

    Names are those of the header's columns, in lower case. A blank cell is left out, and so is one under a column
    without a name; a warning says so, but for the first column, in which pandas writes row numbers.
    """
    try:
        with path.open("rb") as raw:
            require_utf_8(path, raw.read(EDGE))
        with path.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            lines = (line.lstrip(MARK) for line in stream)  # a joined file's own mark stands before its first line
            delimiter = max(DELIMITERS, key=first.count)
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
            records = _records(reader)
            _, names = next(records, (1, []))
            header = _header(path, names, needed, hint)
            if not needed and header and QUESTION not in header:
                columns = ", ".join(header)[:MESSAGE_CHARS]
                yield Row(1, 1, BadRow("no_header", f"the first line names no column {QUESTION}: {columns}"))
            unnamed: set[int] = set()  # numbers of columns without a name, from 1, that hold something
            for line, cells in records:
                if any(map(str.strip, cells)):
                    unnamed |= _unnamed_columns(header, cells)
                    yield Row(line, line, _by_name(header, cells))
            for number in sorted(unnamed):
                warn_once(log, "%s: column %d has cells and no name in line 1, and is not read", path, number)
    except UnicodeDecodeError:
        raise not_utf_8(path, path.read_bytes()) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except csv.Error as error:
        raise DataError(f"{path.name} is not CSV: {error}", hint) from None


def _records(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row with the line that it ends in; a `csv.Error` has the lines of the row that it is in."""
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise csv.Error(f"a quote that opens in line {begin} is never closed") from None
            lines = f"line {begin}"
            if reader.line_num != begin:
                lines = f"line {begin} to line {reader.line_num}"
            advice = "a quote inside a cell stands twice, and the cell in quotes"
            raise csv.Error(f"{lines}: {error}; {advice}") from None
        yield reader.line_num, cells


def _header(path: Path, cells: Sequence[str], needed: Needed, hint: str) -> list[str]:
    """The names of the columns up to the last that has one; "" for any other, such as the row numbers of pandas."""
    header = [name.strip().lower() for name in cells]
    counts = Counter(filter(None, header))
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise DataError(f"{path.name}, line 1 names the column {repeated[0]!r} twice", "Give each column its own name.")
    missing = []
    for names in needed:
        if not any(name.lower() in header for name in names):
            missing.append(names[0])
    if missing:
        lacks = " and no column ".join(missing)
        has = ", ".join(filter(None, header)) or "none"
        raise DataError(f"{path.name} has no column {lacks}; its columns: {has}", hint)
    while header and not header[-1]:
        header.pop()
    return header


def _unnamed_columns(header: Sequence[str], cells: Sequence[str]) -> set[int]:
    """The numbers of the columns without a name, but for the first one, under which a row has cells."""
    numbers = set()
    for number, (name, cell) in enumerate(zip(header, cells, strict=False), 1):
        if number > 1 and not name and cell.strip():
            numbers.add(number)
    return numbers


def _by_name(header: Sequence[str], cells: Sequence[str]) -> dict[str, str] | BadRow:
    """A row's cells that are not blank, by the names of their columns."""
    n_columns = len(header)
    if any(map(str.strip, cells[n_columns:])):
        text = ",".join(cells)
        hint = f"a text with a comma needs quotes: {text[:MESSAGE_CHARS]}"
        detail = f"{len(cells)} cells under {n_columns} columns: {hint}"
        return BadRow("too_many_cells", detail, text)
    row = {}
    for name, cell in zip(header, cells, strict=False):
        if name and cell.strip():
            row[name] = cell
    return row
