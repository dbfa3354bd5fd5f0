"""Similarity of questions: the same words, or the same query but for its values."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable

from pipelines.core.types import Example, Trajectory, is_abstention
from pipelines.sql.dialects.base import fold
from pipelines.sql.lexical import KEYWORDS, blank_comments

_WORD = re.compile(r"\w+")
_FILLER_WORDS = "a an the of to in is are was were do does please what which who show list give find tell me all"
_FILLERS = frozenset(_FILLER_WORDS.split())
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|\[[^\]]*\]?|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\w+|<>|[<>!=]=|\|\||\S"""
)
_COMPARED = re.compile(r"(?:^| )(?:[<>!=]=?|<>|i?like|glob|in \(|\? ,|between(?: \? and)?)$")  # the end of a shape


@functools.lru_cache(maxsize=4096)
def sql_shape(sql: str, names: bool = False) -> str:
    """A query's tokens in lower case with every literal as `?` and without aliases and qualifiers; unless `names`, with
    every table and column as `x`. Any text has a shape; two layouts of one query have the same.

    It reads tokens and no tree: thousands of queries a second, in any dialect.
    """
    tokens = _TOKEN.findall(blank_comments(sql))
    shape: list[str] = []
    tokens_before = ["", *tokens]
    tokens_behind = [*tokens[1:], ""]
    for before, token, behind in zip(tokens_before, tokens, tokens_behind, strict=False):
        word = token.lower()
        is_qualifier = word == "." or behind == "."
        is_alias = bool(shape) and before.lower() == "as" and behind != "("
        if is_qualifier or is_alias or word in ("as", "inner", ";"):
            continue
        first = word[0]
        is_value = first == "'" or first.isdigit()
        # A text in double quotes is a value if something is compared with it, else a name: engines differ.
        if first == '"':
            is_value = _is_compared(word, before, shape)
        is_quoted_name = first in '`["'
        if is_value:
            shape.append("?")
        elif not names and (is_quoted_name or _is_bare_name(word, behind)):
            shape.append("x")
        elif is_quoted_name:
            shape.append(word[1:-1])
        else:
            shape.append(word)
    return " ".join(shape)


def _is_compared(word: str, before: str, shape: list[str]) -> bool:
    """Whether a text in double quotes stands where a value is compared; a lone quote passes for a value."""
    if word == '"':
        return True
    if before == ".":
        return False
    last_words = " ".join(shape[-3:])
    return _COMPARED.search(last_words) is not None


def _is_bare_name(word: str, behind: str) -> bool:
    """Whether an unquoted word is a name: no keyword, and no function."""
    if word in KEYWORDS or behind == "(":
        return False
    return word[0].isalpha() or word[0] == "_"


def example_shape(example: Example) -> str:
    """The shape of a question's gold SQL, with names; the words of one without an answer, whose gold SQL many share."""
    if is_abstention(example.gold_sql):
        return example.in_context()
    return sql_shape(example.gold_sql, names=True)


def normalised(question: str) -> tuple[str, ...]:
    """A question's words, sorted: without case, accents, punctuation and fillers."""
    words = [word for word in _WORD.findall(fold(question)) if word not in _FILLERS]
    return tuple(sorted(words))


def distinct_2(trajectories: Iterable[Trajectory]) -> float:
    """Distinct word pairs of the reasoning over all of them (Li et al., 2016): near 0 if teachers repeat themselves.

    It falls with the amount of text, so compare it between as many trajectories.
    """
    pairs: Counter[tuple[str, str]] = Counter()
    for trajectory in trajectories:
        for turn in trajectory.turns:
            words = _WORD.findall(turn.action.reasoning.lower())
            pairs.update(itertools.pairwise(words))
    if not pairs:
        return 0.0
    return len(pairs) / pairs.total()
