"""Scripts of several SQL statements, by their signs alone: where statements end, what is a comment, what may write."""

from __future__ import annotations

import re
import sqlite3

OUTCOME, ORDERED = "outcome", "outcome in order"  # as the last turn of a script: what it led to, as `outcome` tells
MOST_STATEMENTS = 1000  # of one turn
# Quoted texts and comments, whole where they are never closed, and what parts statements.
_PIECE = re.compile(
    r"""'(?:[^']|'')*(?:'|\Z)|"(?:[^"]|"")*(?:"|\Z)|`[^`]*(?:`|\Z)|\[[^\]]*(?:\]|\Z)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))|(?P<end>;)|[^'"`\[;/-]+|.""",
    re.DOTALL,
)
_CREATE = re.compile(r"\s*create\b", re.IGNORECASE)
_WORD_THAT_WRITES = re.compile(
    r"\b(?:insert|update|delete|replace\s+into|create|drop|alter|begin|commit|rollback|savepoint|reindex|analyze"
    r"|pragma)\b|(?:^|;)\s*(?:end|release)\b",
    re.IGNORECASE,
)


def statements(script: str) -> list[str]:
    """The statements of a script, without comments and semicolons. Linear in its length, but for bodies of triggers.

    Raises:
        ValueError: there are more than `MOST_STATEMENTS`.
    """
    parts, text = [], ""
    for match in _PIECE.finditer(script):
        if match["end"] is None:
            text += " " if match["comment"] is not None else match[0]
        elif _CREATE.match(text) and not sqlite3.complete_statement(text + ";"):
            text += ";"  # inside the body of a trigger
        else:
            parts.append(text.strip())
            text = ""
    parts = [part for part in (*parts, text.strip()) if part]
    if len(parts) > MOST_STATEMENTS:
        raise ValueError(f"there are more than {MOST_STATEMENTS} statements")
    return parts


def without_comments(script: str) -> str:
    """A script with a blank in place of each comment."""
    return _PIECE.sub(lambda match: " " if match["comment"] is not None else match[0], script)


def writes(script: str) -> bool:
    """Whether a script may change data or schema: a word outside quotes and comments says so, rather too often."""
    pieces = (match[0] for match in _PIECE.finditer(script) if match["comment"] is None)
    return _WORD_THAT_WRITES.search(" ".join(piece for piece in pieces if piece[0] not in "'\"`[")) is not None
