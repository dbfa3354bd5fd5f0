"""Similarity of questions: the same words, or the same query but for its values."""

import functools
import itertools
import re
from collections.abc import Iterable

from pipelines.core.types import Example, Trajectory, is_abstention
from pipelines.sql.dialects.base import fold
from pipelines.sql.lexical import KEYWORDS, without_comments

_WORD = re.compile(r"\w+")
_FILLING = "a an the of to in is are was were do does please what which who show list give find tell me all"
_FILLERS = frozenset(_FILLING.split())
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
    tokens = _TOKEN.findall(without_comments(sql))
    shape: list[str] = []
    for index, token in enumerate(tokens):
        follows = tokens[index + 1] if index + 1 < len(tokens) else ""
        word = token.lower()
        if word == "." or follows == "." or word == ";":
            continue
        if word in ("as", "inner") or (shape and tokens[index - 1].lower() == "as" and follows != "("):
            continue
        is_name = (word[0].isalpha() or word[0] == "_") and word not in KEYWORDS and follows != "("
        # A text in double quotes is a value if something is compared with it, else a name: engines differ.
        is_value = word == '"' or (tokens[index - 1] != "." and _COMPARED.search(" ".join(shape[-3:])))
        if word[0] == "'" or word[0].isdigit() or (word[0] == '"' and is_value):
            word = "?"
        elif word[0] in '`["':
            word = word[1:-1] if names else "x"
        elif is_name and not names:
            word = "x"
        shape.append(word)
    return " ".join(shape)


def example_shape(example: Example) -> str:
    """The shape of a question's gold SQL, with names; the words of one without an answer, whose gold SQL many share."""
    return example.in_context() if is_abstention(example.gold_sql) else sql_shape(example.gold_sql, names=True)


def normalised(question: str) -> tuple[str, ...]:
    """A question's words, sorted: without case, accents, punctuation and fillers."""
    return tuple(sorted(word for word in _WORD.findall(fold(question)) if word not in _FILLERS))


def distinct_2(trajectories: Iterable[Trajectory]) -> float:
    """Distinct word pairs of the reasoning over all of them (Li et al., 2016): near 0 if teachers repeat themselves.

    It falls with the amount of text, so compare it between as many trajectories.
    """
    texts = [turn.action.reasoning.lower() for trajectory in trajectories for turn in trajectory.turns]
    pairs = [pair for text in texts for pair in itertools.pairwise(_WORD.findall(text))]
    return len(set(pairs)) / len(pairs) if pairs else 0.0
