"""The worker's side of `sql/analyst.py`: one request is answered at a time, under the worker's clock and memory.

A request is (name of a function, its arguments); its answer is one cell of JSON text, so that nothing but plain text
goes back.
"""

import contextlib
import dataclasses
import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sqlglot
from sqlglot import errors, exp
from sqlglot.dialects.dialect import Dialect

from pipelines.core.types import Database, SchemaItems
from pipelines.sql.analysis.diagnosis import diagnose, missing_names
from pipelines.sql.analysis.equivalence import proof_plan
from pipelines.sql.analysis.hardness import hardness
from pipelines.sql.analysis.name_resolution import schema_items
from pipelines.sql.analysis.names import first_table, function_name, lookups, naming
from pipelines.sql.analysis.parsing import parse
from pipelines.sql.analysis.spelling import in_schema_words
from pipelines.sql.dialects.base import ERROR, OK, DatabaseSession, RawResult
from pipelines.sql.dialects.sqlite import ALLOW, DENY, READ, executed, guard, open_readonly

_COMMENT_SIGN = re.compile(r"--|/\*|#")


def prepared_items(database: Database, sql: str) -> SchemaItems | None:
    """The tables and columns that the prepared statement reads; None if SQLite refuses to prepare it, or the database
    is not SQLite's or cannot be opened. Nothing is run: EXPLAIN only prepares.
    """
    if database.engine != "sqlite":
        return None
    tables: set[str] = set()
    columns: set[tuple[str, str]] = set()
    try:
        with contextlib.closing(open_readonly(database.location)) as connection:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            real_tables = {name.lower() for (name,) in names}

            def watch(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
                if guard(action, first, second, *rest) == DENY:
                    return DENY
                if action != READ or first is None:
                    return ALLOW
                table = first.lower()
                # A CTE counted with count(*) is reported like a table; a view is reported beside what it reads.
                if table in real_tables:
                    tables.add(table)
                    if second and second != "ROWID":
                        columns.add((table, second.lower()))
                return ALLOW

            connection.set_authorizer(watch)
            cursor = executed(connection, "EXPLAIN " + sql)
            cursor.close()
    except (sqlite3.Error, sqlite3.Warning, OSError, ValueError):
        return None
    return SchemaItems(frozenset(tables), frozenset(columns))


def without_comments(sql: str, engine: str) -> str:
    """A query without its comments: nested ones, `#` of MySQL and optimiser hints too; quoted text is left as it is.

    What the engine's tokenizer cannot read is cut at the first sign of a comment.
    """
    text = sql.replace("/*+", "/* ")  # a hint to the optimiser, which sqlglot reads as words
    try:
        tokens = Dialect.get_or_raise(engine).tokenize(text)
    except (errors.SqlglotError, ValueError, AttributeError, TypeError, IndexError, KeyError):
        return _COMMENT_SIGN.split(text, maxsplit=1)[0]
    pieces: list[str] = []
    end = 0
    for token in tokens:
        gap = text[end : token.start]
        if gap.strip():  # a comment
            gap = " "
        pieces.append(gap)
        end = token.end + 1
        pieces.append(text[token.start : end])
    return "".join(pieces).strip()


def functions(sql: str, engine: str = "sqlite") -> list[str]:
    """The names of the functions that a query calls, in lower case, sorted, each once; [] if it does not parse."""
    tree = parse(sql, engine)
    if tree is None:
        return []
    names: set[str] = set()
    for node in tree.find_all(exp.Func):
        if not isinstance(node, exp.Connector):
            names.add(function_name(node).lower())
    return sorted(names)


Probe = tuple[str, int, int]  # its SQL; rows that the query reads before its cut; sort keys behind the columns


def tie_probes(sql: str, engine: str) -> list[Probe]:
    """A probe for each SELECT that has a LIMIT under an ORDER BY: sort keys behind its columns, and one row more."""
    tree = parse(sql, engine)
    if tree is None:
        return []
    probes = []
    for select in tree.find_all(exp.Select):
        limit = _count_in(select.args.get("limit"))
        offset = _count_in(select.args.get("offset"))
        is_ordered = bool(select.args.get("order"))
        is_distinct = bool(select.args.get("distinct"))
        if not limit or not is_ordered or is_distinct:
            continue
        n_kept = limit + offset
        keys = _sort_keys(select)
        probe = _tie_probe(select, keys, n_kept + 1)
        text = probe.sql(dialect=engine)
        probes.append((text, n_kept, len(keys)))
    return probes


def _tie_probe(select: exp.Select, keys: Sequence[exp.Expr], n_rows: int) -> exp.Select:
    """A copy of a SELECT that returns its first rows, with the sort keys behind its columns."""
    probe = select.copy()
    for number, key in enumerate(keys):
        item = exp.alias_(key.copy(), f"tie_{number}")
        probe.append("expressions", item)
    row_count = exp.Literal.number(n_rows)
    probe.set("limit", exp.Limit(expression=row_count))
    probe.set("offset", None)
    return probe


def _count_in(clause: exp.Expr | None) -> int:
    """The number of a LIMIT or OFFSET; 0 if there is none, or it is computed."""
    if clause is None:
        return 0
    value = clause.args.get("expression")
    if isinstance(value, exp.Literal) and str(value.this).isdigit():
        return int(value.this)
    return 0


def _sort_keys(select: exp.Select) -> list[exp.Expr]:
    """The keys of an ORDER BY, where a position or an alias stands for an item of the SELECT list."""
    items = select.expressions
    aliases: dict[str, exp.Expr] = {}
    for item in items:
        if isinstance(item, exp.Alias):
            aliases[item.alias.lower()] = item.unalias()
    keys = []
    for ordered in select.args["order"].expressions:
        key = ordered.this
        if isinstance(key, exp.Literal) and not key.is_string:
            position = int(key.this)
            if 0 < position <= len(items):
                key = items[position - 1].unalias()
        elif isinstance(key, exp.Column) and not key.table:
            key = aliases.get(key.name.lower(), key)
        keys.append(key)
    return keys


def is_readable(sql: str, engine: str) -> bool:
    """Whether a text is one statement to the parser, of whatever kind."""
    try:
        trees = sqlglot.parse(sql, dialect=engine)
    except (errors.SqlglotError, RecursionError, ValueError, AttributeError, TypeError, IndexError, KeyError):
        return False
    return len(trees) == 1 and trees[0] is not None


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    diagnose,
    first_table,
    functions,
    hardness,
    in_schema_words,
    is_readable,
    lookups,
    missing_names,
    naming,
    prepared_items,
    proof_plan,
    schema_items,
    tie_probes,
    without_comments,
)
REQUESTS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}


def _json_default(value: Any) -> Any:
    """A set as a sorted list, and a dataclass as an object."""
    if isinstance(value, frozenset):
        return sorted(value)
    return dataclasses.asdict(value)


class AnalysisSession(DatabaseSession):
    """The session of a worker that answers requests about SQL text; it has no database."""

    def answer(self, sql: Any, max_rows: int) -> RawResult:
        """Answer the request (name, *arguments) with one cell of JSON."""
        name, *arguments = sql
        answer = REQUESTS[name](*arguments)
        text = json.dumps(answer, default=_json_default)
        return RawResult(OK, ("answer",), [(text,)])

    def explain(self, error: Exception) -> tuple[str, str, str]:
        """The text cannot be read: sqlglot raises freely on trees that parse but make no sense."""
        return ERROR, "unreadable", type(error).__name__

    def probe(self) -> None:
        """There is no database."""
