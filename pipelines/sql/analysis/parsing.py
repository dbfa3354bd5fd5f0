"""Reading SQL text with sqlglot: within bounds of length, depth and steps, so that no text hangs or raises."""

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

import sqlglot
from sqlglot import TokenType, exp
from sqlglot.dialects.dialect import Dialect
from sqlglot.dialects.mysql import MySQL
from sqlglot.parser import Parser

MAX_CHARS = 20_000
MAX_DEPTH = 60  # brackets in brackets
# Moves of the parser over its tokens. It backtracks, and its work can double with each JOIN or bracket: a Spider query
# takes some 3 moves a token. A count and not a clock, so that the same text is read, or is not, on every machine.
MAX_MOVES = 25_000
CACHED_TREES = 64  # a tree of one of the longest texts takes some 10 MB


def _mysql_reading(modes: Sequence[str]) -> None:
    """Make MySQL's dialect in some of its SQL modes; sqlglot finds it by the name that `Mysql.reading` gives it."""
    tokens: dict[str, Any] = {}
    parsing: dict[str, Any] = {}
    if "ansi" in modes:
        tokens |= {"QUOTES": ["'"], "IDENTIFIERS": ["`", '"']}
    if "raw" in modes:
        tokens["STRING_ESCAPES"] = ["'", '"']
    if "pipes" in modes:
        joining = {**MySQL.Parser.EXPONENT, TokenType.DPIPE: exp.DPipe}
        parsing = {"DISJUNCTION": Parser.DISJUNCTION, "EXPONENT": joining}
    members: dict[str, Any] = {
        "Tokenizer": type("Tokenizer", (MySQL.Tokenizer,), tokens),
        "Parser": type("Parser", (MySQL.Parser,), parsing),
    }
    name = "_".join(["mysql", *modes])
    make_dialect: Any = type(MySQL)
    make_dialect(name, (MySQL,), members)


for _number in (1, 2, 3):
    for _modes in itertools.combinations(("ansi", "pipes", "raw"), _number):
        _mysql_reading(_modes)

_SKIP = re.compile(r"""'(?:[^']|'')*'?|"(?:[^"]|"")*"?|`[^`]*`?|--[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)


class TooComplex(sqlglot.errors.SqlglotError):
    """More moves of the parser than `MAX_MOVES`."""


@functools.lru_cache(CACHED_TREES)
def parse(sql: str, engine: str = "sqlite") -> exp.Expr | None:
    """The tree of a query; None for anything else, several statements included: the sandbox runs none of them.

    Callers must not change it: it is shared.
    """
    if len(sql) > MAX_CHARS or _bracket_depth(sql) > MAX_DEPTH:
        return None
    dialect = Dialect.get_or_raise(engine)
    parser = dialect.parser()
    advance = parser._advance
    moves = 0

    def counted(times: int = 1) -> None:
        nonlocal moves
        moves += 1
        if moves > MAX_MOVES:
            raise TooComplex
        advance(times)

    parser._advance = counted  # type: ignore[method-assign]
    try:
        tokens = dialect.tokenize(sql)
        trees = [tree for tree in parser.parse(tokens, sql) if tree is not None]
    except (sqlglot.errors.SqlglotError, RecursionError, ValueError, AttributeError, TypeError, IndexError, KeyError):
        return None  # hostile text reaches corners of the parser that raise more than its own errors
    # A comment behind the last semicolon is a tree of its own, and no statement.
    statements = [tree for tree in trees if not isinstance(tree, exp.Semicolon)]
    if len(statements) != 1:
        return None
    (query,) = statements
    if not isinstance(query, exp.Query | exp.Values):
        return None
    if isinstance(query, exp.Select) and not query.expressions:  # a bare "SELECT"
        return None
    if engine == "sqlite":
        _write_in_as_subquery(query)
    return query


def _bracket_depth(sql: str) -> int:
    """The depth of brackets outside texts, quoted names and comments."""
    depth = 0
    deepest = 0
    bare_sql = _SKIP.sub("", sql)
    for sign in re.findall(r"[(\[)\]]", bare_sql):
        if sign in "([":
            depth += 1
        else:
            depth -= 1
        deepest = max(deepest, depth)
    return deepest


def _write_in_as_subquery(query: exp.Expr) -> None:
    """Write SQLite's `x IN t` as `x IN (SELECT * FROM t)`, for sqlglot takes t for a column."""
    for node in list(query.find_all(exp.In)):
        name = node.args.get("field")
        if not isinstance(name, exp.Column):
            continue
        database_schema = name.args.get("table")
        table = exp.Table(this=name.this, db=database_schema)
        every_row = exp.select("*").from_(table)
        node.set("field", None)
        node.set("query", every_row.subquery())


def unwrap(query: exp.Expr) -> exp.Expr:
    """The query inside brackets."""
    while isinstance(query, exp.Subquery | exp.Paren):
        query = query.this
    return query


def joined_clauses(select: exp.Expr) -> list[exp.Expr]:
    """The FROM and the JOINs of a SELECT; of a table or a subquery in brackets its JOINs."""
    joins = list(select.args.get("joins") or ())
    start = select.args.get("from_")
    if start is None:
        return joins
    return [start, *joins]
