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
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.types import Database, Hardness, SchemaItems
from pipelines.sql.diagnoses import Diagnosis, Failure
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.equalities.compare import Gold
from pipelines.sql.lexical import TURN_SEPARATOR, is_ordered
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
# The query that shows whether the cut goes through a tie, the rows before the cut, and the number of sort keys behind
# the columns.
TieProbe = tuple[str, int, int]
# Gold, the prediction, their schema, the statements that make its tables, and its columns without NULL.
ProofQuery = tuple[str, str, Schema, Mapping[str, str], Sequence[Item]]
# Whether the normal forms are equal, gold with either end of what chance may choose, and scripts of databases on which
# the two may differ.
ProofPlan = tuple[bool, tuple[str, ...], tuple[str, ...]]


class Naming(NamedTuple):
    """What a query names, in lower case."""

    names: frozenset[str]  # Tables and columns that it reads of the database.
    written_words: frozenset[str]  # Words that it brings along: aliases, and texts that it selects.
    is_made_up: bool  # True if its result may hold a text that the query writes or puts together.


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
    if not dialect.is_server:
        return database.engine
    name: str = dialect.reading(database.location)
    return name


@dataclasses.dataclass(frozen=True)
class SqlAnalysis(Generic[Query, Answer]):
    """A function of `analysis/session.py`, asked about many queries: each is its argument, or a tuple of them."""

    function: str
    form: Any  # Type of an answer.
    unread: Answer  # Answer if the worker gave none.

    def __call__(self, queries: Sequence[Query]) -> list[Answer]:
        requests: list[tuple[Any, ...]] = []
        for query in queries:
            if isinstance(query, tuple):
                requests.append((self.function, *query))
            else:
                requests.append((self.function, query))
        answers = []
        for result in _engine().analyse_many(requests):
            if not result.ok:
                answers.append(self.unread)
                continue
            text = str(result.rows[0][0])
            value = json.loads(text)
            answers.append(_decode(value, self.form))
        return answers


# The tables and columns that each query reads; a column that no table in its scope has comes with the table "".
schema_items: SqlAnalysis[tuple[str, Schema, str], SchemaItems | None]
schema_items = SqlAnalysis("schema_items", SchemaItems | None, None)
# The same by SQLite itself; None if it refuses to prepare the query, or the database is another's or unreadable.
prepared_items: SqlAnalysis[tuple[Database, str], SchemaItems | None]
prepared_items = SqlAnalysis("prepared_items", SchemaItems | None, None)
# Spider's level of each query.
hardness: SqlAnalysis[tuple[str, str], Hardness] = SqlAnalysis("hardness", Hardness, "extra")
# The functions that each query calls, in lower case.
functions: SqlAnalysis[tuple[str, str], tuple[str, ...]] = SqlAnalysis("functions", tuple[str, ...], ())
# Probes of the ties of each query, one for each SELECT that has a LIMIT under an ORDER BY.
tie_probes: SqlAnalysis[tuple[str, str], tuple[TieProbe, ...]]
tie_probes = SqlAnalysis("tie_probes", tuple[TieProbe, ...], ())
# The plan of a proof that two queries are equivalent.
proof_plan: SqlAnalysis[ProofQuery, ProofPlan]
proof_plan = SqlAnalysis("proof_plan", ProofPlan, (False, (), ()))
# The texts that each query compares with columns of known tables, in reading order.
lookups: SqlAnalysis[tuple[str, Schema | None, str], tuple[Compared, ...]]
lookups = SqlAnalysis("lookups", tuple[Compared, ...], ())
# Each query in the words of its schema; None for what cannot be read as one query.
in_schema_words: SqlAnalysis[tuple[str, Schema, str], str | None]
in_schema_words = SqlAnalysis("in_schema_words", str | None, None)
# The first table that a query names.
first_table: SqlAnalysis[tuple[str, str], str | None] = SqlAnalysis("first_table", str | None, None)
# The class of each wrong answer, and the columns whose stored values would add to its clues.
diagnose: SqlAnalysis[Failure, tuple[Diagnosis, tuple[Item, ...]]]
diagnose = SqlAnalysis("diagnose", tuple[Diagnosis, tuple[Item, ...]], (Diagnosis("semantic", UNREAD), ()))
# What an agent is told about the names of each query that are not where it looks for them.
missing_names: SqlAnalysis[tuple[str, Schema, str], tuple[str, ...]]
missing_names = SqlAnalysis("missing_names", tuple[str, ...], ())
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
    kind = get_origin(form) or form
    arguments = get_args(form)
    if kind in (UnionType, Union):
        if value is None:
            return None
        return _decode(value, arguments[0])
    if kind is Literal:
        index = arguments.index(value)
        return arguments[index]
    if dataclasses.is_dataclass(kind):
        types = _fields(form)
        fields = {name: _decode(item, types[name]) for name, item in value.items()}
        return form(**fields)
    if kind is tuple and arguments[1:] != (...,):
        return tuple(_decode_each(value, arguments))
    if arguments:
        return kind(_decode(item, arguments[0]) for item in value)
    if issubclass(kind, tuple):  # a named tuple
        types_of_fields = _fields(form).values()
        return kind(*map(_decode, value, types_of_fields))
    return kind(value)


def _decode_each(values: Sequence[Any], forms: Sequence[Any]) -> Iterator[Any]:
    """The values of a tuple whose items have a type each."""
    for value, form in zip(values, forms, strict=True):
        yield _decode(value, form)


_lock = threading.Lock()
_engine_of: dict[int, SqlEngine] = {}  # key: a process id; at most one


def _engine() -> SqlEngine:
    """This process's pool; a forked child has one of its own."""
    process = os.getpid()
    with _lock:
        if process not in _engine_of:
            engine = SqlEngine(LIMITS, WORKERS)
            _engine_of.clear()
            _engine_of[process] = engine
        return _engine_of[process]


def prove(pair: Pair, sql: SqlEngine) -> tuple[float | None, str]:
    """Whether two SQLite queries are equivalent on every database of the schema: 1.0 if their normal forms are equal;
    0.0 with the script of a database on which they differ and chance has no part in gold; None if neither is so.
    """
    database = pair.database
    ddl, required = sql.execute_many([(database, _TABLES), (database, _REQUIRED)])
    if not ddl.ok or not required.ok:
        return None, ""
    gold = pair.gold_sql
    predicted = pair.predicted_sql or ""
    statements = {str(name): str(text) for name, text in ddl.rows}
    never_null = [(str(table), str(column)) for table, column in required.rows]
    schema = introspect(database)
    (plan,) = proof_plan([(gold, predicted, schema, statements, never_null)])
    is_same, extremes, scripts = plan
    generated = Database(database.id, "sqlite_stateful", os.devnull)
    for script in scripts:
        if _is_refuted_on(generated, script, gold, [predicted, *extremes], sql):
            return 0.0, script
    if is_same:
        return 1.0, ""
    return None, ""


def _is_refuted_on(database: Database, script: str, gold: str, others: Sequence[str], sql: SqlEngine) -> bool:
    """Whether on the database that a script makes the gold query differs from the prediction, the first of the others,
    and not from itself with either end of what chance may choose.
    """
    jobs = []
    for query in (gold, *others):
        turns = script + TURN_SEPARATOR + query
        jobs.append((database, turns))
    results = sql.execute_many(jobs)
    if not all(result.ok for result in results):
        return False
    expected, *answers = results
    strict = EQUALITIES["strict"]
    gold_query = Gold(ordered=is_ordered(gold))
    scores = [strict.compare(expected, answer, gold_query) for answer in answers]
    return scores == [0.0, 1.0, 1.0]
