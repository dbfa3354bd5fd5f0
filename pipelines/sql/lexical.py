"""What is read off the signs of SQL text, without a parser and in time linear in its length: bigrams, an ORDER BY."""

from __future__ import annotations

import functools
import itertools
import re

KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "select from where group by having order limit offset join left right full outer cross natural on using union "
        "all intersect except distinct and or not in exists between like ilike is null case when then else end "
        "asc desc with recursive over partition rows values true false ",
    )
)
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|--[^\n]*|/\*.*?(?:\*/|$)|\d+(?:\.\d+)?|\w+|<>|[<>!=]=|\|\||::|->>?|\S""",
    re.DOTALL,
)

_QUOTES = r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*(?:\]|\Z)"""
_COMMENT = re.compile(rf"({_QUOTES})|--[^\n]*|/\*.*?(?:\*/|$)", re.DOTALL)
_ORDER = re.compile(rf"{_QUOTES}|[()]|\border\s+by\b", re.DOTALL | re.IGNORECASE)


@functools.lru_cache(maxsize=256)  # a gold query is compared with all answers of a group
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

    An ORDER BY belongs to it when it stands outside all brackets, or inside those around the whole. A comment counts
    as a blank, also between the two words. Any text gives a verdict, without a parser: this is asked of every gold
    query.
    """
    text = _COMMENT.sub(lambda match: match[1] or " ", sql).strip()
    around = text[: len(text) - len(text.lstrip("( \t\r\n"))].count("(")
    depth, at_depths = 0, set()
    for match in _ORDER.finditer(text.rstrip("); \t\r\n")):
        if match[0] == "(":
            depth += 1
        elif match[0] == ")":
            depth -= 1
            around = min(around, depth)  # these brackets close before the end
        elif match[0][0] in "oO":
            at_depths.add(depth)
    return around in at_depths
