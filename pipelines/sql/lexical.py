"""What is read off the signs of SQL text, without a parser and in time linear in its length: bigrams, an ORDER BY."""

import functools
import itertools
import re

_KEYWORDS = """
    select from where group by having order limit offset join left right full outer cross natural on using union all
    intersect except distinct and or not in exists between like ilike is null case when then else end asc desc with
    recursive over partition rows values true false
"""
KEYWORDS = frozenset(_KEYWORDS.split())
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


# Scripts of several SQL statements, by their signs alone: comments, words that write.

OUTCOME, ORDERED = "outcome", "outcome in order"  # as the last turn of a script: what it led to, as `outcome` tells
# Quoted texts and comments, whole if they are never closed.
_PIECE = re.compile(
    r"""'(?:[^']|'')*(?:'|\Z)|"(?:[^"]|"")*(?:"|\Z)|`[^`]*(?:`|\Z)|\[[^\]]*(?:\]|\Z)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))|[^'"`\[/-]+|.""",
    re.DOTALL,
)
_WORD_THAT_WRITES = re.compile(
    r"\b(?:insert|update|delete|replace\s+into|create|drop|alter|begin|commit|rollback|savepoint|reindex|analyze"
    r"|pragma)\b|(?:^|;)\s*(?:end|release)\b",
    re.IGNORECASE,
)


def without_comments(script: str) -> str:
    """A script with a blank in place of each comment."""
    return _PIECE.sub(lambda match: " " if match["comment"] is not None else match[0], script)


def differ_in_case_alone(sql: str, other: str) -> bool:
    """Whether the second text is the first with its bare words in lower case, which engines take for the same query."""
    quoted = (match[0] for match in _PIECE.finditer(sql) if match[0][0] in "'\"`[")
    return sql.isascii() and sql.lower() == other and all(text == text.lower() for text in quoted)


def writes(script: str) -> bool:
    """Whether a script may change data or schema, by a word outside quotes and comments; rather too often."""
    pieces = (match[0] for match in _PIECE.finditer(script) if match["comment"] is None)
    return _WORD_THAT_WRITES.search(" ".join(piece for piece in pieces if piece[0] not in "'\"`[")) is not None
