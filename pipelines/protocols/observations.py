r"""Turns an execution result into text that an agent may read: rows in order, cut, and unable to end or forge a tag.

The escape, one rule everywhere (tables, error messages, questions, schemas): a `<` that could begin a tag or a chat
template's marker is written `\x3c` (`\u003c` in JSON), and the `[` of a marker such as `[INST]` or `[TOOL_CALLS]` is
written `\x5b`. So no text of a database, a question or an error message can hold `</observation>`, `<|im_end|>` or
`[/INST]`, which an endpoint that takes text would read as its own. Characters that nobody sees (control characters,
bidirectional marks, invisible letters, lone surrogates) are shown by their escapes; line breaks and tabs stay where
the text has lines. In cells they are escaped, too, and ` | ` cannot forge a column (`\|`). Where untrusted texts stand
under headings, their lines are indented, so that none of them can be a heading (`under_headings`).
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from pipelines.core.types import LONGEST_INTEGER, ExecutionResult, Scalar, escape_sequence, text_of

# "a < b", "a <= 3" and "<>" stay as they are, and so do names in brackets that hold a small letter.
_OPENING = re.compile(r"[<\uff1c](?=[^\W\d]|[/|\uff5c!?\[])|\[(?=/?(?:[A-Z][A-Z_]{2,31}|gMASK)\])")
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))  # Unicode's categories
_KEPT = frozenset("\n\t\u200c\u200d")  # lines, and the joiners that some scripts and emoji need
CUT = "\u2026"
NOTE_CHARS = 200  # characters of a note behind an error


def defuse(text: str) -> str:
    """The text with every sign that could begin a tag or a marker escaped, and all that cannot be seen; lines stay."""
    text = text.replace("\r\n", "\n")
    if not text.isprintable():
        text = "".join(map(_seen, text))
    return _OPENING.sub(lambda match: _escape(match[0]), text)


def _seen(sign: str) -> str:
    """A character, or its escape if nobody sees it."""
    if sign in _KEPT or unicodedata.category(sign) not in _UNSEEN:
        return sign
    return _escape(sign)


def under_headings(sections: Iterable[tuple[str, str]]) -> str:
    """Defused texts under their headings; every line of one, whatever ends it, stands behind four spaces, so that none
    can be taken for a heading.
    """
    paragraphs = []
    for heading, text in sections:
        lines = defuse(text).splitlines()
        indented = "\n".join(f"    {line}" for line in lines)
        paragraphs.append(f"{heading}:\n{indented}")
    return "\n\n".join(paragraphs)


def _escape(text: str) -> str:
    r"""`\x3c` for `<`: what `unicode_escape` gives characters that it does not take for plain ones."""
    code = ord(text)
    if 32 <= code < 127:
        return f"\\x{code:02x}"
    return escape_sequence(text)


def cell(value: Scalar, limit: int) -> str:
    """One value as the agent sees it: at most `limit` characters of it, then a cut mark.

    NULL is `NULL`, bytes are `x'...'`, an empty text is `''`.
    """
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        digits = value[: limit // 2].hex()
        if len(digits) < 2 * len(value):
            digits += CUT
        return f"x'{digits}'"
    text = text_of(value)
    if text == "":
        return "''"
    if len(text) > limit:
        text = text[:limit] + CUT
    if not text.isprintable():
        text = "".join(map(_printable, text))
    return defuse(text).replace("|", "\\|")


def _printable(sign: str) -> str:
    """A character, or its escape if it does not print, such as a line break."""
    if sign.isprintable():
        return sign
    return _escape(sign)


def text_table(result: ExecutionResult, rows: int, cell_chars: int, total_chars: int, brief: bool = False) -> str:
    """Header and rows, one a line, ` | ` between cells; then how many rows there are.

    Args:
        rows: most rows that are shown.
        cell_chars: most characters of a cell that are shown.
        total_chars: most characters of all rows that are shown, so that a wide table stays short.
        brief: for a tiny model: each line begins with a space, so that a word is one token wherever it stands, and
            nothing is said about the count but "no rows".
    """
    lines: list[str] = []
    spent = -1  # the header has no line break before it
    for values in (result.columns, *result.rows[:rows]):
        line = " | ".join(cell(value, cell_chars) for value in values)
        if len(line) > total_chars:
            line = line[:total_chars] + CUT
        spent += len(line) + 1
        if lines and spent > total_chars:
            break
        lines.append(line)
    n_rows = len(lines) - 1
    if brief:
        if not result.rows:
            lines.append("no rows")
        return "\n".join(f" {line}" for line in lines)
    if result.truncated:
        count = f"(first {n_rows} rows; there are more)"
    elif n_rows < len(result.rows):
        count = f"(first {n_rows} of {len(result.rows)} rows)"
    elif n_rows == 1:
        count = "(1 row)"
    else:
        count = f"({n_rows} rows)"
    return "\n".join([*lines, count])


def error_text(result: ExecutionResult, limit: int) -> str:
    """The engine's message about a query that did not run, and its notes, on one line, cut and escaped."""
    message = result.error or result.error_class or result.status.value
    notes = [cell(note, NOTE_CHARS) for note in result.notes]
    return "; ".join([cell(message, limit), *notes])


def json_text(value: Any) -> str:
    r"""JSON in which no text can begin a tag: `<` is `\u003c` where `defuse` would escape it; nothing unprintable."""
    dumped = json.dumps(value, ensure_ascii=False)
    if not dumped.isprintable():
        dumped = "".join(map(_json_sign, dumped))
    return _OPENING.sub(lambda match: f"\\u{ord(match[0]):04x}", dumped)


def _json_sign(sign: str) -> str:
    """A character of a JSON text, or its escape if it does not print."""
    if sign.isprintable():
        return sign
    quoted = json.dumps(sign)
    return quoted[1:-1]


def json_records(result: ExecutionResult, rows: int, cell_chars: int, total_chars: int) -> dict[str, Any]:
    """Columns and rows as JSON values, cut like a table; `more` says that rows were left out.

    Rows are lists, so that two columns of one name both show. Bytes become hexadecimal text, NaN and infinities text.
    A query that did not run gives its error, and the notes on it.
    """
    records: dict[str, Any]
    if not result.ok:
        message = result.error or result.error_class or result.status.value
        records = {"error": _json_cell(message, cell_chars)}
        if result.notes:
            records["notes"] = [_json_cell(note, NOTE_CHARS) for note in result.notes]
        return records
    columns: list[Any] = []
    spent = 0
    for name in result.columns:
        columns.append(_json_cell(name, cell_chars))
        spent += len(text_of(columns[-1])) + 4
        if spent > total_chars:
            return {"columns": columns[:-1], "data": [], "more": True}
    data: list[list[Any]] = []
    spent = 0
    for row in result.rows[:rows]:
        values = [_json_cell(value, cell_chars) for value in row]
        spent += sum(len(text_of(value)) + 4 for value in values)
        if spent > total_chars:
            break
        data.append(values)
    records = {"columns": columns, "data": data}
    if result.truncated or len(data) < len(result.rows):
        records["more"] = True
    return records


def _json_cell(value: Scalar, limit: int) -> Any:
    """One value as JSON has it: a text is cut, and what JSON cannot say becomes one."""
    if value is None:
        return None
    if isinstance(value, int) and value.bit_length() <= LONGEST_INTEGER:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return str(value)
    if isinstance(value, bytes):
        return cell(value, limit)
    text = text_of(value)
    if len(text) > limit:
        text = text[:limit] + CUT
    return text
