"""Reading SQL text with sqlglot, without ever raising or hanging on it."""

from __future__ import annotations

import functools
import re

import sqlglot
from sqlglot import exp

from pipelines.types import EngineName

MAX_CHARS = 20_000
MAX_DEPTH = 60  # of brackets: the parser backtracks, and its time can double with each level

_SKIP = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|--[^\n]*|/\*.*?\*/""", re.DOTALL)


@functools.lru_cache(4096)
def parse(sql: str, engine: EngineName = "sqlite") -> exp.Expr | None:
    """The tree of a single query; None for anything else. Callers must not change it: it is shared."""
    if len(sql) > MAX_CHARS or _depth(sql) > MAX_DEPTH:
        return None
    try:
        trees = [tree for tree in sqlglot.parse(sql, read=engine) if tree is not None]
    except (sqlglot.errors.SqlglotError, RecursionError, ValueError, AttributeError, TypeError, IndexError, KeyError):
        return None  # hostile text reaches corners of the parser that raise more than its own errors
    if not trees or not isinstance(trees[0], exp.Query | exp.Values):
        return None
    if isinstance(trees[0], exp.Select) and not trees[0].expressions:  # a bare "SELECT"
        return None
    return trees[0]


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
