"""What an engine skips in a query: its comments, as that engine's own rules find them."""

from __future__ import annotations

from sqlglot import errors
from sqlglot.dialects.dialect import Dialect

from pipelines.types import EngineName


def without_comments(sql: str, engine: EngineName) -> str:
    """A query without its comments: nested ones, `#` of MySQL and optimiser hints too; quoted text is left as it is.

    What the engine's tokenizer cannot read is cut at the first sign of a comment.
    """
    text = sql.replace("/*+", "/* ")  # a hint to the optimiser, which sqlglot reads as words
    try:
        tokens = Dialect.get_or_raise(engine).tokenize(text)
    except (errors.SqlglotError, ValueError, AttributeError, TypeError, IndexError, KeyError):
        return text[: min(place for sign in ("--", "/*", "#") if (place := (text + sign).find(sign)) >= 0)]
    parts: list[str] = []
    end = 0
    for token in tokens:
        gap = text[end : token.start]
        parts += [gap if not gap.strip() else " ", text[token.start : token.end + 1]]
        end = token.end + 1
    return "".join(parts).strip()
