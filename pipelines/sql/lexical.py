"""Facts read off the signs of SQL text, without a parser and in time linear in its length: bigrams, an ORDER BY."""

import functools
import itertools
import re

# The sign between the turns of an episode's script (`Dialect.keeps_state`); no statement may hold it.
TURN_SEPARATOR = "\0"

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
    words: list[str] = []
    for token in _TOKEN.findall(sql):
        if token.startswith(("'", '"')):
            words.append(token)
        elif not token.startswith(("--", "/*")):
            words.append(token.lower())
    while words and words[-1] == ";":
        words.pop()
    return frozenset(itertools.pairwise(words))


def is_ordered(sql: str) -> bool:
    """Whether the outermost query has an ORDER BY, so that the order of its rows is part of the answer.

    An ORDER BY belongs to it when it stands outside all brackets, or inside those around the whole. A comment counts
    as a blank, also between the two words. Any text gives a verdict, without a parser: this is asked of every gold
    query.
    """
    text = _COMMENT.sub(lambda match: match[1] or " ", sql).strip()
    n_leading = len(text) - len(text.lstrip("( \t\r\n"))
    around = text[:n_leading].count("(")
    depth = 0
    at_depths: set[int] = set()
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

# Either as the last turn of a script asks for what it led to (see `dialects.sqlite.outcome`).
OUTCOME = "outcome"
ORDERED = "outcome in order"
# Quoted texts and comments; one that is never closed goes to the end.
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


def blank_comments(script: str) -> str:
    """A script with a blank in place of each comment."""
    return _PIECE.sub(_blank_if_comment, script)


def _blank_if_comment(match: re.Match[str]) -> str:
    if match["comment"] is not None:
        return " "
    return match[0]


def differ_in_case_alone(sql: str, other: str) -> bool:
    """Whether the second text is the first with its bare words in lower case, which engines take for the same query."""
    if not sql.isascii() or sql.lower() != other:
        return False
    pieces = [match[0] for match in _PIECE.finditer(sql)]
    return all(piece == piece.lower() for piece in pieces if _is_quoted(piece))


def writes(script: str) -> bool:
    """Whether a script may change data or schema, by a word outside quotes and comments; rather too often."""
    bare = []
    for match in _PIECE.finditer(script):
        is_comment = match["comment"] is not None
        if not is_comment and not _is_quoted(match[0]):
            bare.append(match[0])
    return _WORD_THAT_WRITES.search(" ".join(bare)) is not None


def _is_quoted(piece: str) -> bool:
    return piece[0] in "'\"`["
