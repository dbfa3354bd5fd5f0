"""What is read off the signs of SQL text, without a parser and in time linear in its length: bigrams, an ORDER BY."""

from __future__ import annotations

import itertools
import re

_TOKEN = re.compile(
    r"""'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|--[^\n]*|/\*.*?(?:\*/|$)|\d+(?:\.\d+)?|\w+|<>|[<>!=]=|\|\||::|->>?|\S""",
    re.DOTALL,
)

_ORDER = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[()]|\border\s+by\b""",
    re.DOTALL | re.IGNORECASE,
)


def bigrams(sql: str) -> frozenset[tuple[str, str]]:
    """The set of adjacent token pairs, keywords and names lower-cased, comments and a closing semicolon left out (the
    n-gram term of Reasoning-SQL, section 3.2, and SQL-Trail). Any text gives a set.
    """
    tokens = [token for token in _TOKEN.findall(sql) if not token.startswith(("--", "/*"))]
    while tokens and tokens[-1] == ";":
        tokens.pop()
    words = [token if token[0] in "'\"" else token.lower() for token in tokens]
    return frozenset(itertools.pairwise(words))


def is_ordered(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY, so that the order of its rows is part of the answer.

    An ORDER BY belongs to it when it stands outside all brackets, or inside those around the whole. Any text gives a
    verdict, without a parser: this is asked of every gold query.
    """
    depth, opened, ordered = 0, -1, False
    text = sql.strip().rstrip(";").rstrip()
    for found in _ORDER.finditer(text):
        token = found[0]
        if token == "(":
            opened = found.start() if depth == 0 else opened
            depth += 1
        elif token == ")":
            depth -= 1
            if depth == 0 and text[:opened].strip() == "" and found.end() == len(text):
                return is_ordered(text[opened + 1 : -1])
        elif depth == 0 and token[0] in "oO":
            ordered = True
    return ordered
