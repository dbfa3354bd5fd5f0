"""The statements of a text by the quotes and comments of its dialect, without a parser and linear in its length."""

import re
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from pipelines.sql.lexical import blank_comments, is_ordered

MAX_STATEMENTS = 1000  # statements of one turn

# Signs of a dialect. A quote that is never closed holds all the rest.
_TEXT = r"'(?:[^']|'')*+'"
_NAME = r'"(?:[^"]|"")*+"'
_STANDARD_COMMENT = r"--[^\n]*"
_SQLITE = rf"(?P<quoted>{_TEXT}|{_NAME}|`[^`]*+`|\[[^\]]*+\])|(?P<comment>{_STANDARD_COMMENT})|(?P<open>['\"`\[])"
# A backslash takes the next sign into a text; two dashes open a comment only before a blank.
_MYSQL = (
    r"""(?P<quoted>'(?:[^'\\]|''|\\.)*+'|"(?:[^"\\]|""|\\.)*+"|`[^`]*+`)"""
    r"""|(?P<comment>--(?![^\s])[^\n]*|\#[^\n]*)|(?P<open>['"`])"""
)
# A text may stand between two equal $tags$, and behind an E a backslash takes the next sign into it.
_POSTGRES = (
    rf"(?P<quoted>[eE]'(?:[^'\\]|''|\\.)*+'|{_TEXT}|{_NAME}|(?P<tag>\$(?:[^\W\d]\w*)?\$).*?(?P=tag))"
    rf"|(?P<comment>{_STANDARD_COMMENT})|(?P<open>['\"]|\$(?:[^\W\d]\w*)?\$)"
)
_REST = r"|(?P<block>/\*)|(?P<end>;)|\s+|\w[\w$]*|."
_SQLITE_SIGNS = re.compile(_SQLITE + _REST, re.DOTALL)
_POSTGRES_SIGNS = re.compile(_POSTGRES + _REST, re.DOTALL)
_SIGNS = {
    "sqlite": _SQLITE_SIGNS,
    "sqlite_stateful": _SQLITE_SIGNS,
    "mysql": re.compile(_MYSQL + _REST, re.DOTALL),
    "postgres": _POSTGRES_SIGNS,
    "duckdb": _POSTGRES_SIGNS,
}
_NESTING = frozenset(("postgres", "duckdb"))  # dialects in which a block comment may hold another
_BLOCK_SIGN = re.compile(r"/\*|\*/")
_END_OF_LINE = re.compile(r";[ \t\r]*(?:\n|\Z)")
_ORDER = re.compile(r"\border\b", re.IGNORECASE)
_CREATE = re.compile(r"\s*create\b", re.IGNORECASE)


class Statement(NamedTuple):
    """A statement of a script."""

    text: str  # Text without its comments and the semicolon at its end.
    begin: int  # Place of its first sign that is no comment, or of a comment that is never closed.
    end: int  # Place behind its last sign that is no comment; the end of the script if it is not closed.
    after: int  # Place behind its semicolon.
    is_closed: bool  # False if a quote or a comment of it is never closed.
    # Place of the first semicolon at the end of a line that a quoted text or a block comment of it holds: it would end
    # there if a quote was meant otherwise. None if there is no such semicolon.
    inner_end: int | None


def split_script(script: str, engine: str = "sqlite", position: int = 0) -> Iterator[Statement]:
    """The statements of a script from a place on."""
    while position < len(script):
        statement = _next_statement(script, engine, position)
        position = statement.after
        if statement.text or not statement.is_closed:
            yield statement


def _next_statement(script: str, engine: str, position: int) -> Statement:
    """The statement from a place on, without text if there is only a comment or nothing."""
    signs = _SIGNS.get(engine, _POSTGRES_SIGNS)
    has_triggers = engine.startswith("sqlite")
    text = ""
    begin = position
    end = position
    has_begun = False
    inner_end: int | None = None
    is_closed = True
    while position < len(script):
        match = signs.match(script, position)
        kind = match.lastgroup if match else None
        start = position
        position = match.end() if match else position + 1
        if kind == "end":
            may_be_trigger = has_triggers and _CREATE.match(text) is not None
            if not may_be_trigger or sqlite3.complete_statement(text + ";"):
                break
            text += ";"  # inside the body of a trigger
            continue
        if kind == "open":
            position = len(script)
            is_closed = False
        elif kind == "block":
            position, is_closed = _block_end(script, start, engine in _NESTING)
        is_comment = kind in ("comment", "block")
        text += " " if is_comment else script[start:position]
        is_blank = is_comment or script[start].isspace()
        if not has_begun:
            begin = start
            has_begun = not is_blank
        if not is_blank:
            end = position
        if inner_end is None and kind in ("quoted", "open", "block") and (has_begun or not is_closed):
            inner = _END_OF_LINE.search(script, start, position)
            inner_end = inner.start() if inner else None
    if not is_closed:
        end = len(script)
    return Statement(text.strip(), begin, end, position, is_closed, inner_end)


def _block_end(script: str, start: int, nests: bool) -> tuple[int, bool]:
    """The place behind a block comment, and whether it is closed."""
    depth = 1
    for match in _BLOCK_SIGN.finditer(script, start + 2):
        if match[0] == "*/":
            depth -= 1
        elif nests:
            depth += 1
        if depth == 0:
            return match.end(), True
    return len(script), False


def statement_texts(script: str, engine: str = "sqlite") -> list[str]:
    """The statements of a script, without comments and semicolons; ValueError for more than `MAX_STATEMENTS`."""
    texts = [statement.text for statement in split_script(script, engine) if statement.text]
    if len(texts) > MAX_STATEMENTS:
        raise ValueError(f"there are more than {MAX_STATEMENTS} statements")
    return texts


def blank_quoted(text: str, engine: str = "sqlite") -> str:
    """A text without comments, each quoted text or name of it as an empty one."""
    signs = _SIGNS.get(engine, _POSTGRES_SIGNS)
    return signs.sub(_blank_if_quoted, text)


def _blank_if_quoted(match: re.Match[str]) -> str:
    if match.lastgroup == "quoted":
        return "''"
    return match[0]


def asks_for_order(sql: str, engine: str) -> bool:
    """Whether the outermost query of a statement has an ORDER BY, by the quotes and comments of its dialect.

    The words in a text, a name, a window or an inner query ask for no order of the rows.
    """
    if not _ORDER.search(sql):
        return False
    statements = split_script(sql, engine)
    return any(is_ordered(blank_quoted(statement.text, engine)) for statement in statements)


def has_more_behind(sql: str) -> bool:
    """Whether anything but blanks and comments stands behind the first statement, be it a semicolon alone. Python's
    sqlite3 takes no such text.
    """
    first = next(split_script(sql), None)
    if first is None:
        return False
    rest = blank_comments(sql[first.after :])
    return rest.strip(" \t\n\f\r") != ""


def line_of(script: str, place: int) -> int:
    """The line of a place, from 1."""
    return 1 + script.count("\n", 0, place)
