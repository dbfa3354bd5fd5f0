"""What SQL text says, asked of worker processes: no text of a model or of a benchmark is parsed in this one.

One pool of such workers serves the whole process. It starts when it is first asked, and ends with the process. A text
that the worker cannot read within its bounds is answered like one that nobody can read: with None, "extra", or a
diagnosis that says so.
"""

import dataclasses
import functools
import json
import os
import threading
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pipelines.core.types import Database, EngineName, Hardness, SchemaItems
from pipelines.sql.diagnoses import Diagnosis, Failure
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema

# The bounds on length and on the parser's moves end a text long before this clock (see `analysis/parsing.py`).
LIMITS = Limits(timeout_s=10.0, max_rows=1, memory_mb=1024)
WORKERS = 2
UNREAD = "the analysis could not read it within its limits"
Item = tuple[str, str]  # (table, column)
Value = TypeVar("Value")


class Naming(NamedTuple):
    """What a query names, in lower case."""

    names: frozenset[str]  # tables and columns that it reads of the database.
    own: frozenset[str]  # words that it writes itself: aliases, and texts that it selects.
    is_made_up: bool  # whether its result may hold a text of its own, or one that was put together.


class TieProbe(NamedTuple):
    """A query that shows whether a cut goes through a tie."""

    sql: str
    kept: int  # rows that the query reads before its cut.
    keys: int  # sort keys behind the columns.


class Compared(NamedTuple):
    """A text that a query compares with a column, and the query that shows the column's values."""

    table: str
    column: str
    text: str
    probe: str


def schema_items(queries: Sequence[tuple[str, Schema, EngineName]]) -> list[SchemaItems | None]:
    """The tables and columns that each query reads; None where it does not parse.

    A column that no table in its scope has comes with the table "".
    """
    return _ask("schema_items", queries, SchemaItems | None, None)


def prepared_items(queries: Sequence[tuple[Database, str]]) -> list[SchemaItems | None]:
    """The tables and columns that SQLite says a prepared query reads; None where SQLite refuses it.

    None too where the database is not SQLite's or cannot be opened.
    """
    return _ask("read_items", queries, SchemaItems | None, None)


def hardness(queries: Sequence[tuple[str, EngineName]]) -> list[Hardness]:
    """Spider's level of each query; "extra" where it cannot be read."""
    return _ask("hardness", queries, Hardness, "extra")


def functions(queries: Sequence[tuple[str, EngineName]]) -> list[list[str]]:
    """The functions that each query calls, in lower case; [] where it cannot be read."""
    return _ask("functions", queries, list[str], [])


def tie_probes(queries: Sequence[tuple[str, EngineName]]) -> list[list[TieProbe]]:
    """For each query the probes of its SELECTs that have a LIMIT under an ORDER BY."""
    return _ask("tie_probes", queries, list[TieProbe], [])


def lookups(queries: Sequence[tuple[str, Schema | None, EngineName]]) -> list[list[Compared]]:
    """For each query the texts that it compares with columns of known tables, in reading order."""
    return _ask("lookups", queries, list[Compared], [])


def first_table(sql: str, engine: EngineName) -> str | None:
    """The first table that a query names; None where it names none, or cannot be read."""
    return _ask("first_table", [(sql, engine)], str | None, None)[0]


def first_row(table: str, engine: EngineName) -> str:
    """The query that shows the first row of a table."""
    return _ask("first_row", [(table, engine)], str, "")[0]


def diagnose(failures: Sequence[Failure]) -> list[tuple[Diagnosis, list[Item]]]:
    """Why each answer is wrong, and the columns whose stored values would add to that."""
    unread: tuple[Diagnosis, list[Item]] = (Diagnosis("semantic", UNREAD), [])
    return _ask("diagnosis", [(failure,) for failure in failures], tuple[Diagnosis, list[Item]], unread)


def without_comments(sql: str, engine: EngineName) -> str:
    """A query without its comments, by the engine's own rules; "" where it cannot be read within the bounds."""
    return _ask("without_comments", [(sql, engine)], str, "")[0]


def naming(queries: Sequence[str]) -> list[Naming | None]:
    """What each query's text shows of the database by itself; None where it is no query that can be read."""
    return _ask("naming", [(sql,) for sql in queries], Naming | None, None)


def _ask(request: str, queries: Sequence[tuple[Any, ...]], form: Any, unread: Value) -> list[Value]:
    """Each request's answer, as a value of the type `form`; `unread` where the worker gave none."""
    results = _engine().analyse_many([(request, *query) for query in queries])
    return [_decode(json.loads(str(result.rows[0][0])), form) if result.ok else unread for result in results]


_fields = functools.cache(get_type_hints)


def _decode(value: Any, form: Any) -> Any:
    """A value of a type from its JSON: a dataclass is an object, sets and tuples are lists. No pydantic: it refuses
    half a character, which SQL of a model may hold.
    """
    kind, parts = get_origin(form) or form, get_args(form)
    if kind in (UnionType, Union):
        return None if value is None else _decode(value, parts[0])
    if kind is Literal:
        return parts[parts.index(value)]
    if dataclasses.is_dataclass(kind):
        return form(**{name: _decode(item, _fields(form)[name]) for name, item in value.items()})
    if kind is tuple and parts[1:] != (...,):
        return tuple(_decode(item, part) for item, part in zip(value, parts, strict=True))
    if parts:
        return kind(_decode(item, parts[0]) for item in value)
    if issubclass(kind, tuple):
        return kind(*map(_decode, value, _fields(form).values()))
    return kind(value)


_lock = threading.Lock()
_started: list[tuple[int, SqlEngine]] = []  # (process id, its pool): at most one


def _engine() -> SqlEngine:
    """This process's pool; a forked child has one of its own."""
    with _lock:
        if not _started or _started[0][0] != os.getpid():
            _started[:] = [(os.getpid(), SqlEngine(LIMITS, WORKERS))]
        return _started[0][1]
