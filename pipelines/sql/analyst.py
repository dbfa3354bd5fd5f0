"""What SQL text says, asked of worker processes: no text of a model or of a benchmark is parsed in this one.

One pool of such workers serves the whole process. It starts when it is first asked, and ends with the process. A text
that the worker cannot read within its bounds is answered like one that nobody can read: with None, "extra", or a
diagnosis that says so.
"""

import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pipelines.core.types import HARDNESS_LEVELS, Database, EngineName, Hardness, SchemaItems
from pipelines.sql.diagnoses import Diagnosis, Failure, Hint
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema

# The bounds on length and on the parser's moves end a text long before this clock (see `analysis/parsing.py`).
LIMITS = Limits(timeout_s=10.0, max_rows=1, memory_mb=1024)
WORKERS = 2
UNREAD = "the analysis could not read it within its limits"
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
    return _ask("items", queries, _schema_items, None)


def prepared_items(queries: Sequence[tuple[Database, str]]) -> list[SchemaItems | None]:
    """The tables and columns that SQLite says a prepared query reads; None where SQLite refuses it.

    None too where the database is not SQLite's or cannot be opened.
    """
    return _ask("reads", queries, _schema_items, None)


def hardness(queries: Sequence[tuple[str, EngineName]]) -> list[Hardness]:
    """Spider's level of each query; "extra" where it cannot be read."""
    return _ask("hardness", queries, _level, "extra")


def functions(queries: Sequence[tuple[str, EngineName]]) -> list[list[str]]:
    """The functions that each query calls, in lower case; [] where it cannot be read."""
    return _ask("functions", queries, lambda answer: [str(name) for name in answer], [])


def tie_probes(queries: Sequence[tuple[str, EngineName]]) -> list[list[TieProbe]]:
    """For each query the probes of its SELECTs that have a LIMIT under an ORDER BY."""
    return _ask("ties", queries, lambda answer: [TieProbe(*probe) for probe in answer], [])


def lookups(queries: Sequence[tuple[str, Schema | None, EngineName]]) -> list[list[Compared]]:
    """For each query the texts that it compares with columns of known tables, in reading order."""
    return _ask("lookups", queries, lambda answer: [Compared(*fields) for fields in answer], [])


def first_table(sql: str, engine: EngineName) -> str | None:
    """The first table that a query names; None where it names none, or cannot be read."""
    return _ask("first_table", [(sql, engine)], lambda answer: answer and str(answer), None)[0]


def first_row(table: str, engine: EngineName) -> str:
    """The query that shows the first row of a table."""
    return _ask("first_row", [(table, engine)], str, "")[0]


def diagnose(failures: Sequence[Failure]) -> list[tuple[Diagnosis, list[tuple[str, str]]]]:
    """Why each answer is wrong, and the columns, as (table, column), whose stored values would tell more."""
    unread = Diagnosis("semantic", UNREAD), list[tuple[str, str]]()
    return _ask("diagnosis", [(failure,) for failure in failures], _diagnosis, unread)


def without_comments(sql: str, engine: EngineName) -> str:
    """A query without its comments, by the engine's own rules; "" where it cannot be read within the bounds."""
    return _ask("without_comments", [(sql, engine)], str, "")[0]


def naming(queries: Sequence[str]) -> list[Naming | None]:
    """What each query's text shows of the database by itself; None where it is no query that can be read."""
    return _ask("naming", [(sql,) for sql in queries], _naming, None)


def _naming(answer: Any) -> Naming | None:
    return None if answer is None else Naming(frozenset(answer[0]), frozenset(answer[1]), bool(answer[2]))


def _schema_items(answer: Any) -> SchemaItems | None:
    if answer is None:
        return None
    tables, columns = answer
    return SchemaItems(frozenset(tables), frozenset((table, column) for table, column in columns))


def _level(answer: Any) -> Hardness:
    return HARDNESS_LEVELS[HARDNESS_LEVELS.index(answer)]


def _diagnosis(answer: Any) -> tuple[Diagnosis, list[tuple[str, str]]]:
    facts, columns = answer
    hints = tuple(Hint(**hint) for hint in facts["hints"])
    return Diagnosis(facts["error"], facts["evidence"], hints), [(table, column) for table, column in columns]


def _ask(kind: str, queries: Sequence[tuple[Any, ...]], reader: Callable[[Any], Value], unread: Value) -> list[Value]:
    """Each request's answer; `unread` where the worker gave none."""
    results = _engine().analyse_many([(kind, *query) for query in queries])
    return [reader(json.loads(str(result.rows[0][0]))) if result.ok else unread for result in results]


_lock = threading.Lock()
_started: list[tuple[int, SqlEngine]] = []  # (process id, its pool): at most one


def _engine() -> SqlEngine:
    """This process's pool; a forked child has one of its own."""
    with _lock:
        if not _started or _started[0][0] != os.getpid():
            _started[:] = [(os.getpid(), SqlEngine(LIMITS, WORKERS))]
        return _started[0][1]
