"""Reading SQL text with sqlglot: within bounds of length, depth and steps, so that no text hangs or raises."""

import functools
import re

import sqlglot
from sqlglot import exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.parser import Parser

from pipelines.core.types import EngineName

MAX_CHARS = 20_000
MAX_DEPTH = 60  # of brackets
# Moves of the parser over its tokens. It backtracks, and its work can double with each JOIN or bracket: a Spider query
# takes some 3 moves a token. A count and not a clock, so that the same text is read, or is not, on every machine.
MAX_MOVES = 25_000
KEPT = 64  # trees: those of the longest texts take some 10 MB each

_SKIP = re.compile(r"""'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|--[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)


class TooComplex(sqlglot.errors.SqlglotError):
    """The parser has made more moves than it may."""


@functools.lru_cache(KEPT)
def parse(sql: str, engine: EngineName = "sqlite") -> exp.Expr | None:
    """The tree of a query; None for anything else, several statements included: the sandbox runs none of them.

    Callers must not change it: it is shared.
    """
    if len(sql) > MAX_CHARS or _depth(sql) > MAX_DEPTH:
        return None
    dialect = Dialect.get_or_raise(engine)
    try:
        trees = [tree for tree in _counting(dialect).parse(dialect.tokenize(sql), sql) if tree is not None]
    except (sqlglot.errors.SqlglotError, RecursionError, ValueError, AttributeError, TypeError, IndexError, KeyError):
        return None  # hostile text reaches corners of the parser that raise more than its own errors
    if len(trees) != 1 or not isinstance(trees[0], exp.Query | exp.Values):
        return None
    if isinstance(trees[0], exp.Select) and not trees[0].expressions:  # a bare "SELECT"
        return None
    if engine == "sqlite":
        _spell_out_tables_of_in(trees[0])
    return trees[0]


def _spell_out_tables_of_in(tree: exp.Expr) -> None:
    """Turn SQLite's `x IN t` into `x IN (SELECT * FROM t)`, which says the same; sqlglot takes t for a column."""
    for node in list(tree.find_all(exp.In)):
        name = node.args.get("field")
        if isinstance(name, exp.Column):
            table = exp.Table(this=name.this, db=name.args.get("table"))
            node.set("field", None)
            node.set("query", exp.select("*").from_(table).subquery())


def _counting(dialect: Dialect) -> Parser:
    """The dialect's parser, which gives up after `MAX_MOVES`."""
    parser = dialect.parser()
    advance, moves = parser._advance, 0

    def counted(times: int = 1) -> None:
        nonlocal moves
        moves += 1
        if moves > MAX_MOVES:
            raise TooComplex
        advance(times)

    parser._advance = counted  # type: ignore[method-assign]
    return parser


def _depth(sql: str) -> int:
    depth = deepest = 0
    for character in _SKIP.sub("", sql):
        if character in "([":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]":
            depth -= 1
    return deepest


def unwrap(query: exp.Expr) -> exp.Expr:
    """The query inside brackets."""
    while isinstance(query, exp.Subquery | exp.Paren):
        query = query.this
    return query


def first_select(query: exp.Expr) -> exp.Expr:
    """The leftmost SELECT of a set operation; the query itself when it is none."""
    query = unwrap(query)
    while isinstance(query, exp.SetOperation):
        query = unwrap(query.this)
    return query
