"""The analysis of SQL text, asked of worker processes: no text of a model or of a benchmark is parsed in this one.

One pool of such workers serves the whole process. It starts when it is first asked, and ends with the process. A text
that the worker cannot read within its bounds is answered like one that nobody can read: with None, "extra", or a
diagnosis that says so.
"""

import dataclasses
import functools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.types import Database, Hardness, SchemaItems
from pipelines.sql.diagnoses import Diagnosis, Failure
from pipelines.sql.dialects.base import TURN_SEPARATOR
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.equalities.compare import Gold
from pipelines.sql.lexical import is_ordered
from pipelines.sql.schema import Schema, introspect

# The bounds on length and on the parser's moves end a text long before this clock (see `analysis/parsing.py`).
LIMITS = Limits(timeout_s=10.0, max_rows=1, memory_mb=1024)
WORKERS = 2
# Tables, each with the statements that make it and its indices; of virtual ones and other collations nothing is proved.
_TABLES = """
SELECT name, (SELECT group_concat(sql, ';') FROM sqlite_master WHERE tbl_name = t.name AND type <> 'trigger')
FROM sqlite_master AS t WHERE type = 'table' AND sql NOT LIKE '%COLLATE%' AND sql NOT LIKE 'CREATE VIRTUAL%'
"""
# The columns of tables that are taken to hold no NULL: those declared so, and primary keys, as SQL has it.
_REQUIRED = """
SELECT t.name, c.name FROM sqlite_master AS t JOIN pragma_table_xinfo(t.name) AS c
WHERE t.type = 'table' AND t.sql NOT LIKE 'CREATE VIRTUAL%' AND (c."notnull" OR c.pk)
"""
UNREAD = "the analysis could not read it within its limits"
Item = tuple[str, str]  # (table, column)


class Naming(NamedTuple):
    """What a query names, in lower case."""

    names: frozenset[str]  # tables and columns that it reads of the database.
    own: frozenset[str]  # words that it writes itself: aliases, and texts that it selects.
    is_made_up: bool  # whether its result may hold a text of its own, or one that was put together.


class Compared(NamedTuple):
    """A text that a query compares with a column, and the query that shows the column's values."""

    table: str
    column: str
    text: str
    probe: str


Query = TypeVar("Query")
Answer = TypeVar("Answer")


def reading(database: Database) -> str:
    """How the statements of a database are read: as its engine does, for MySQL in the SQL mode of its sessions."""
    dialect = DIALECTS[database.engine]
    return dialect.reading(database.location) if dialect.is_server else database.engine


@dataclasses.dataclass(frozen=True)
class SqlAnalysis(Generic[Query, Answer]):
    """A function of `analysis/session.py`, asked about many queries: each is its argument, or a tuple of them."""

    function: str
    form: Any  # the type of an answer.
    unread: Answer  # the answer where the worker gave none.

    def __call__(self, queries: Sequence[Query]) -> list[Answer]:
        jobs = [(self.function, *(query if isinstance(query, tuple) else (query,))) for query in queries]
        results = _engine().analyse_many(jobs)
        return [
            _decode(json.loads(str(result.rows[0][0])), self.form) if result.ok else self.unread for result in results
        ]


# The tables and columns that each query reads; a column that no table in its scope has comes with the table "".
schema_items: SqlAnalysis[tuple[str, Schema, str], SchemaItems | None]
schema_items = SqlAnalysis("schema_items", SchemaItems | None, None)
# The same by SQLite itself; None if it refuses to prepare the query, or the database is another's or unreadable.
prepared_items: SqlAnalysis[tuple[Database, str], SchemaItems | None]
prepared_items = SqlAnalysis("read_items", SchemaItems | None, None)
# Spider's level of each query.
hardness: SqlAnalysis[tuple[str, str], Hardness] = SqlAnalysis("hardness", Hardness, "extra")
# The functions that each query calls, in lower case.
functions: SqlAnalysis[tuple[str, str], tuple[str, ...]] = SqlAnalysis("functions", tuple[str, ...], ())
# For each SELECT of a query that has a LIMIT under an ORDER BY: a query that shows whether the cut goes through a tie,
# the rows that the SELECT reads before its cut, and the number of sort keys behind the columns.
tie_probes: SqlAnalysis[tuple[str, str], tuple[tuple[str, int, int], ...]]
tie_probes = SqlAnalysis("tie_probes", tuple[tuple[str, int, int], ...], ())
# Of two queries, a schema, the statements that make its tables and the columns without NULL: whether the normal forms
# are equal, gold with either end of what chance may choose, and scripts of databases on which the two may differ.
proof_plan: SqlAnalysis[
    tuple[str, str, Schema, Mapping[str, str], Sequence[Item]], tuple[bool, tuple[str, ...], tuple[str, ...]]
]
proof_plan = SqlAnalysis("proof_plan", tuple[bool, tuple[str, ...], tuple[str, ...]], (False, (), ()))
# The texts that each query compares with columns of known tables, in reading order.
lookups: SqlAnalysis[tuple[str, Schema | None, str], tuple[Compared, ...]]
lookups = SqlAnalysis("lookups", tuple[Compared, ...], ())
# The first table that a query names.
first_table: SqlAnalysis[tuple[str, str], str | None] = SqlAnalysis("first_table", str | None, None)
# The class of each wrong answer, and the columns whose stored values would add to its clues.
diagnose: SqlAnalysis[Failure, tuple[Diagnosis, tuple[Item, ...]]]
diagnose = SqlAnalysis("diagnose", tuple[Diagnosis, tuple[Item, ...]], (Diagnosis("semantic", UNREAD), ()))
# A query without its comments, by the engine's own rules.
without_comments: SqlAnalysis[tuple[str, str], str] = SqlAnalysis("without_comments", str, "")
# Whether each text is one statement to the parser of its dialect.
is_readable: SqlAnalysis[tuple[str, str], bool] = SqlAnalysis("is_readable", bool, False)
# The names in each query's text.
naming: SqlAnalysis[str, Naming | None] = SqlAnalysis("naming", Naming | None, None)
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


def prove(pair: Pair, sql: SqlEngine) -> tuple[float | None, str]:
    """Whether two SQLite queries are equivalent on every database of the schema: 1.0 if their normal forms are equal;
    0.0 with the script of a database on which they differ and chance has no part in gold; None if neither is so.
    """
    database, texts = pair.database, (pair.gold_sql, pair.predicted_sql or "")
    ddl, required = sql.execute_many([(database, _TABLES), (database, _REQUIRED)])
    never_null = [(str(table), str(column)) for table, column in required.rows]
    request = (*texts, introspect(database), {str(name): str(text) for name, text in ddl.rows}, never_null)
    is_same, ends, scripts = proof_plan([request])[0] if ddl.ok and required.ok else (False, (), ())
    made, facts = Database(database.id, "sqlite_stateful", os.devnull), Gold(ordered=is_ordered(pair.gold_sql))
    strict = EQUALITIES["strict"].compare
    for script in scripts:
        jobs = [(made, script + TURN_SEPARATOR + text) for text in (*texts, *ends)]
        right, *others = sql.execute_many(jobs)
        if right.ok and [strict(right, other, facts) if other.ok else None for other in others] == [0.0, 1.0, 1.0]:
            return 0.0, script
    return (1.0 if is_same else None), ""
