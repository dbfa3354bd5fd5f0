"""Text that people and other programs wrote, read to the letter or refused with its line: UTF-8, and JSON.

No character is replaced and no name of an object is dropped: what was damaged would be trained on, or judged.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from pipelines.core.errors import DataError

UTF_8_MARK = b"\xef\xbb\xbf"  # Windows' editors begin a file with it
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
MARK = "\ufeff"  # the UTF-8 mark in text
_MARKS = re.compile(f"^{MARK}+", re.MULTILINE)  # marks of the file, and of files that were joined to it
SAVE_AS_UTF_8 = "Save it as UTF-8."


class RepeatedName(ValueError):
    """A JSON object that has one name twice: each reader would take another of the two values."""


def read_text(path: Path, hint: str = "") -> str:
    """The text of a file without byte order marks before its lines, with plain line feeds.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint) from None
    require_utf_8(path, data, hint)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise not_utf_8(path, data, hint) from None
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    before, nul, _ = plain.partition("\0")
    if nul:
        line = 1 + before.count("\n")
        remedy = f"UTF-16 has such bytes. {SAVE_AS_UTF_8} {hint}".strip()
        raise DataError(f"{path}, line {line} is not UTF-8 text: it holds a byte of zeros", remedy)
    return _MARKS.sub("", plain)


def require_utf_8(path: Path, head: bytes, hint: str = "") -> None:
    """Refuse a file by its first bytes if it is UTF-16, whose plain letters are UTF-8 with a NUL beside each."""
    if head.startswith(UTF_16_MARKS) or b"\0" in head[:2]:
        remedy = f"{SAVE_AS_UTF_8} {hint}".strip()
        raise DataError(f"{path}, line 1 is not UTF-8 but UTF-16", remedy)


def not_utf_8(path: Path, data: bytes, hint: str = "") -> DataError:
    """The error of a file that is not UTF-8, with the line of its first bad byte."""
    remedy = f"{SAVE_AS_UTF_8} {hint}".strip()
    try:
        data.decode()
    except UnicodeDecodeError as error:
        up_to_bad_byte = data[: error.start] + b"."
        line = len(up_to_bad_byte.splitlines())
        return DataError(f"{path}, line {line} is not UTF-8", remedy)
    return DataError(f"{path} is not UTF-8", remedy)  # it was written to meanwhile


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError, in words for a person, for any other and for an object with a name twice.

    Bytes are UTF-8, with or without a mark: `json.loads` would guess UTF-16 as well. Others are a UnicodeDecodeError.
    """
    if not isinstance(text, str):
        text = text.removeprefix(UTF_8_MARK).decode()
    plain = text.removeprefix(MARK)
    try:
        return DECODER.decode(plain)
    except RecursionError:
        raise ValueError("it nests too deep") from None


def read_json_text(path: Path, hint: str = "") -> Any:
    """The value of a JSON file of a user; DataError with the line if it is not JSON."""
    text = read_text(path, hint)
    try:
        return parse_json(text)
    except ValueError as error:
        raise_not_json(path, error, hint)


def raise_not_json(path: Path, error: ValueError, hint: str = "") -> NoReturn:
    """Raise the DataError of a JSON file that could not be read."""
    if isinstance(error, json.JSONDecodeError):
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg})", hint) from None
    if isinstance(error, RepeatedName):
        raise DataError(f"{path}: {error}", hint) from None
    raise DataError(f"{path}: not JSON ({error})", hint) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise RepeatedName(f"{repeated[:60]!r} stands twice in one object")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_object)
