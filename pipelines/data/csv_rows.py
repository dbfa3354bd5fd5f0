"""The rows of a CSV file with a header, as the JSON objects that a JSONL file would have."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.errors import DataError
from pipelines.fields import BadRow

DELIMITERS = ",;\t"  # spreadsheets write the second where the comma parts a number's digits
HINT = "Its first line names the columns: question, sql and, where you have them, id, database and evidence."


def rows(file: Path, needed: Sequence[Sequence[str]]) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Each row by the names of the header's columns, in lower case, with the line that it ends in.

    Args:
        needed: columns that must be there, each with the other names that it may have.

    Raises:
        DataError: it cannot be read, is not UTF-8, or lacks a column; the message names it.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            records = _records(stream, max(DELIMITERS, key=first.count))
            header = [name.strip().lower() for name in next(records, (1, []))[1]]
            _check(file, header, needed)
            yield from ((line, _row(header, cells)) for line, cells in records if any(map(str.strip, cells)))
    except UnicodeDecodeError:
        raise DataError(f"{file.name} is not UTF-8", "Save it as “CSV UTF-8”.") from None
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from None
    except csv.Error as error:
        raise DataError(f"{file.name} is not CSV: {error}", HINT) from None


def _records(stream: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row with the line that it ends in.

    Raises:
        csv.Error: the file ends within quotes: what follows the first of them was read as one cell.
    """
    lines: list[str] = []  # of the row that is read

    def kept() -> Iterator[str]:
        for line in stream:
            lines.append(line)
            yield line

    reader = csv.reader(kept(), delimiter=delimiter)
    for cells in reader:
        if "".join(lines).count('"') % 2 and _is_open(lines, delimiter):
            raise csv.Error(f"a quote that opens in line {reader.line_num - len(lines) + 1} is never closed")
        yield reader.line_num, cells
        lines.clear()


def _is_open(lines: Sequence[str], delimiter: str) -> bool:
    try:
        list(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error as error:
        return "unexpected end of data" in str(error)
    return False


def _check(file: Path, header: Sequence[str], needed: Sequence[Sequence[str]]) -> None:
    missing = [names[0] for names in needed if not {name.lower() for name in names} & set(header)]
    if missing:
        has = ", ".join(filter(None, header)) or "none"
        raise DataError(f"{file.name} has no column {' and no column '.join(missing)}; its columns: {has}", HINT)


def _row(header: Sequence[str], cells: Sequence[str]) -> dict[str, Any] | BadRow:
    """The filled cells of a row by their columns."""
    if len(cells) > len(header):
        shown = ",".join(cells)[:200]
        reason = f"{len(cells)} cells under {len(header)} columns: a text with a comma in it needs quotes: {shown}"
        return BadRow("too_many_cells", reason)
    return {name: cell for name, cell in zip(header, cells, strict=False) if cell.strip()}
