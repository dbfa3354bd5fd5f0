"""The worker's side of `sql/analyst.py`: one request is answered at a time, under the worker's clock and memory.

A request is (kind, arguments); its answer is one cell of JSON text, so that nothing but plain text goes back.
"""

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlglot import errors, exp
from sqlglot.dialects.dialect import Dialect

from pipelines.core.types import Database, EngineName, Scalar, SchemaItems
from pipelines.sql.analysis.diagnosis import diagnose
from pipelines.sql.analysis.hardness import hardness
from pipelines.sql.analysis.name_resolution import schema_items
from pipelines.sql.analysis.names import first_row, first_table, lookups, naming
from pipelines.sql.analysis.parsing import parse
from pipelines.sql.diagnoses import Failure
from pipelines.sql.dialects.base import ERROR, OK, Bounds, Clock, DatabaseSession, Raw, failure
from pipelines.sql.dialects.sqlite import ALLOW, DENY, READ, guard, open_readonly

# What SQLite itself says a query reads: its authorizer is asked about every table and column of a prepared statement.


def read_items(database: Database, sql: str) -> SchemaItems | None:
    """The tables and columns that the prepared statement reads; None if SQLite refuses to prepare it, or the database
    is not SQLite's or cannot be opened. Nothing is run: EXPLAIN only prepares.
    """
    if database.engine != "sqlite":
        return None
    try:
        connection = open_readonly(database.location)
    except (sqlite3.Error, OSError):
        return None
    try:
        return _prepare(connection, sql)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return None
    finally:
        connection.close()


def _prepare(connection: sqlite3.Connection, sql: str) -> SchemaItems:
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    real_tables = {name.lower() for (name,) in names}
    tables: set[str] = set()
    columns: set[tuple[str, str]] = set()

    def watch(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
        if guard(action, first, second, *rest) == DENY:
            return DENY
        # A CTE counted with count(*) is reported like a table; a view is reported beside what it reads.
        if action == READ and first is not None and first.lower() in real_tables:
            tables.add(first.lower())
            if second and second != "ROWID":
                columns.add((first.lower(), second.lower()))
        return ALLOW

    connection.set_authorizer(watch)
    connection.execute("EXPLAIN " + sql).close()
    return SchemaItems(frozenset(tables), frozenset(columns))


# What an engine skips in a query: its comments, as that engine's own rules find them.


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


# The functions that a query calls.


def functions(sql: str, engine: EngineName = "sqlite") -> list[str]:
    """The names of the functions that a query calls, in lower case, sorted, each once; [] if it does not parse."""
    tree = parse(sql, engine)
    if tree is None:
        return []
    called = (node for node in tree.find_all(exp.Func) if not isinstance(node, exp.Connector))
    return sorted({(node.name if isinstance(node, exp.Anonymous) else node.sql_name()).lower() for node in called})


# Queries that show whether the LIMIT of another query cuts through a tie of its ORDER BY.

Probe = tuple[str, int, int]  # its SQL; rows that the query reads before its cut; sort keys behind the columns


def tie_probes(sql: str, engine: EngineName) -> list[Probe]:
    """A probe for each SELECT that has a LIMIT under an ORDER BY."""
    tree = parse(sql, engine)
    return [probe for select in (tree.find_all(exp.Select) if tree else ()) if (probe := _tie_probe(select, engine))]


def _tie_probe(select: exp.Select, engine: EngineName) -> Probe | None:
    """A SELECT with its sort keys behind its columns, and one row more; None without a LIMIT under an ORDER BY."""
    limit = _number(select.args.get("limit"))
    if not limit or not select.args.get("order") or select.args.get("distinct"):
        return None
    n_kept = limit + (_number(select.args.get("offset")) or 0)
    items = select.expressions
    aliases = {item.alias.lower(): item.unalias() for item in items if isinstance(item, exp.Alias)}
    keys = [_key(ordered.this, items, aliases) for ordered in select.args["order"].expressions]
    probe = select.copy()
    probe.set("expressions", [*probe.expressions, *(exp.alias_(key.copy(), f"tie_{n}") for n, key in enumerate(keys))])
    probe.set("limit", exp.Limit(expression=exp.Literal.number(n_kept + 1)))
    probe.set("offset", None)
    return probe.sql(dialect=engine), n_kept, len(keys)


def _key(key: exp.Expr, items: Sequence[exp.Expr], aliases: Mapping[str, exp.Expr]) -> exp.Expr:
    """A sort key as an expression: positions and aliases stand for an item of the SELECT list."""
    if isinstance(key, exp.Literal) and not key.is_string and 0 < int(key.this) <= len(items):
        return items[int(key.this) - 1].unalias()
    if isinstance(key, exp.Column) and not key.table and key.name.lower() in aliases:
        return aliases[key.name.lower()]
    return key


def _number(clause: exp.Expr | None) -> int | None:
    value = clause.args.get("expression") if clause is not None else None
    return int(value.this) if isinstance(value, exp.Literal) and str(value.this).isdigit() else None


class AnalysisSession(DatabaseSession):
    """Answers requests about SQL text. It is no database, and is kept as one."""

    def __init__(self, location: str, bounds: Bounds, clock: Clock) -> None:
        super().__init__(bounds, clock)

    def answer(self, sql: Any, max_rows: int) -> Raw:
        """Answer the request (kind, *arguments)."""
        kind, *arguments = sql
        return Raw(OK, ("answer",), [(json.dumps(KINDS[kind](*arguments)),)])

    def explain(self, error: Exception) -> Raw:
        """The text cannot be read: sqlglot raises freely on trees that parse but make no sense."""
        return failure(ERROR, "unreadable", type(error).__name__)

    def is_healthy(self) -> bool:
        """Always: there is no database."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def _items(*arguments: Any) -> Any:
    return _listed(schema_items(*arguments))


def _reads(*arguments: Any) -> Any:
    return _listed(read_items(*arguments))


def _listed(items: SchemaItems | None) -> Any:
    return None if items is None else (sorted(items.tables), sorted(items.columns))


class _Asked(dict[tuple[str, str], Sequence[Scalar]]):
    """Stored values by column, which notes the columns that are asked for and not there."""

    def __init__(self, known: Mapping[tuple[str, str], Sequence[Scalar]]) -> None:
        super().__init__(known)
        self.missing: list[tuple[str, str]] = []

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """The values, or the default."""
        if key not in self:
            self.missing.append(key)
        return super().get(key, default)


def _diagnosis(wrong: Failure) -> Any:
    """The diagnosis, and the columns whose stored values would tell more."""
    values = _Asked(wrong.values)
    diagnosis = diagnose(dataclasses.replace(wrong, values=values))
    return dataclasses.asdict(diagnosis), sorted(set(values.missing))


KINDS: Mapping[str, Callable[..., Any]] = {
    "items": _items,
    "naming": naming,
    "without_comments": without_comments,
    "reads": _reads,
    "hardness": hardness,
    "functions": functions,
    "diagnosis": _diagnosis,
    "ties": tie_probes,
    "lookups": lookups,
    "first_table": first_table,
    "first_row": first_row,
}
