"""From trajectories to outcomes: gold and final SQL executed once, compared by a named equality, and taken apart."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipelines.core.registry import ANALYSES
from pipelines.core.types import Database, EngineName, Example, Hardness, Outcome, SchemaItems, StopReason, Trajectory
from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import Schema, Schemas

GoldQuery = tuple[str, EngineName]  # the text of a gold query, and the engine that reads it
# Caches of what gold queries come to, for the life of the process. An answer that may be a failure of the worker is not
# kept.
_GOLD_ITEMS: dict[tuple[Database, str], tuple[Schema, SchemaItems]] = {}
_GOLD_LEVELS: dict[GoldQuery, Hardness] = {}
MAX_CACHED_GOLD = 50_000  # gold queries in a cache; beyond them it is emptied


def make_outcomes(
    trajectories: Sequence[Trajectory],
    examples: Mapping[str, Example],
    sql: SqlEngine,
    schemas: Schemas | None,
    equality: str,
    max_turns: int,
    gold_schemas: Mapping[str, SchemaItems] | None = None,
    reads: Collection[str] = ANALYSES,
) -> list[Outcome]:
    """One outcome a trajectory, in order.

    A broken episode, or a verdict whose database, worker or gold SQL failed, gives a `broken` outcome: never a score.

    Args:
        examples: by id.
        schemas: gives a database's schema; None if nothing of it is read.
        max_turns: the turn cap T of the episodes.
        gold_schemas: consensus gold schemas by example id; an example that is not among them has none. Without the
            mapping, the gold SQL's own tables and columns are taken.
        reads: the analyses (`core.registry.ANALYSES`) that the outcomes hold. They cost more than the execution.
    """
    questions = [examples[trajectory.example_id] for trajectory in trajectories]
    pairs = []
    for example, trajectory in zip(questions, trajectories, strict=True):
        pair = Pair.of(example, trajectory.final_sql)
        pairs.append(pair)
    verdicts = sql.verdicts(pairs, [equality])
    broken = []
    unbroken = []
    for pair, verdict, trajectory in zip(pairs, verdicts, trajectories, strict=True):
        is_broken = verdict.broken or trajectory.stop is StopReason.BROKEN
        broken.append(is_broken)
        if not is_broken:
            unbroken.append(pair)

    analysis = Analysis(schemas, gold_schemas)
    reads_schema = "schema" in reads
    reads_gold_items = "gold_schema" in reads and gold_schemas is None
    if reads_schema or reads_gold_items:
        analysis.parse_queries(unbroken, reads_schema)
    level_of: dict[str, Hardness] = {}
    if "level" in reads:
        level_of = levels(questions)
    outcomes = []
    for trajectory, example, verdict, is_broken in zip(trajectories, questions, verdicts, broken, strict=True):
        queries = AnalysedQueries()
        if not is_broken:  # the database of a broken one may be gone
            queries = analysis.of_answer(trajectory.final_sql, example, reads)
        outcome = Outcome(
            example_id=trajectory.example_id,
            trajectory=trajectory,
            equality=equality,
            correct=verdict.scores.get(equality, 0.0) == 1.0,
            status=verdict.predicted,
            n_rows=verdict.n_rows,
            broken=is_broken,
            hardness=example.hardness or level_of.get(example.id),
            max_turns=max_turns,
            predicted_schema=queries.predicted_schema,
            gold_items=queries.gold_items,
            gold_schema=queries.gold_schema,
            predicted_bigrams=queries.predicted_bigrams,
            gold_bigrams=queries.gold_bigrams,
        )
        outcomes.append(outcome)
    return outcomes


def levels(examples: Iterable[Example]) -> dict[str, Hardness]:
    """Each example's level, by its id; if it has none, its gold SQL's."""
    by_id = {example.id: example for example in examples}
    query_of: dict[str, GoldQuery] = {}  # the gold SQL to measure, by example id
    for id, example in by_id.items():
        if example.hardness is None:
            query_of[id] = (example.gold_sql, analyst.reading(example.database))
    measured = _measured_levels(set(query_of.values()))
    return {id: example.hardness or measured[query_of[id]] for id, example in by_id.items()}


def _measured_levels(queries: Collection[GoldQuery]) -> dict[GoldQuery, Hardness]:
    """The levels of gold queries, from the cache or by the analyst."""
    measured: dict[GoldQuery, Hardness] = {}
    new: list[GoldQuery] = []
    for query in sorted(queries):
        cached = _GOLD_LEVELS.get(query)  # Another thread may empty the cache at any moment.
        if cached is None:
            new.append(query)
        else:
            measured[query] = cached
    if not new:
        return measured
    if len(_GOLD_LEVELS) > MAX_CACHED_GOLD:
        _GOLD_LEVELS.clear()
    for query, level in zip(new, analyst.hardness(new), strict=True):
        measured[query] = level
        if level != "extra":  # which a worker that failed gives, too
            _GOLD_LEVELS[query] = level
    return measured


class AnalysedQueries(NamedTuple):
    """The analyses of an answer and of its gold SQL, by the names of an outcome's fields."""

    predicted_schema: SchemaItems | None = None
    gold_items: SchemaItems | None = None
    gold_schema: SchemaItems | None = None
    predicted_bigrams: frozenset[tuple[str, str]] = frozenset()
    gold_bigrams: frozenset[tuple[str, str]] = frozenset()


@dataclass
class Analysis:
    """The static side of a verdict, for rewards and for evaluation; each query is taken apart once."""

    schemas: Schemas | None  # Function that gives a database's schema.
    gold_schemas: Mapping[str, SchemaItems] | None  # Gold schema by example id; None takes the gold SQL's own items.
    _items: dict[tuple[Database, str], SchemaItems | None] = field(default_factory=dict)

    def parse_queries(self, pairs: Iterable[Pair], predicted: bool = True) -> None:
        """Read tables and columns off the queries of these pairs, or off their gold queries alone, together."""
        assert self.schemas is not None, "tables and columns are resolved by the schema"
        gold: dict[tuple[Database, str], None] = {}
        answers: dict[tuple[Database, str], None] = {}
        for pair in pairs:
            if pair.gold_sql:
                gold[pair.database, pair.gold_sql] = None
            if predicted and pair.predicted_sql:
                answers[pair.database, pair.predicted_sql] = None
        queries = list(gold | answers)
        schema_of: dict[Database, Schema] = {}
        for database, _ in queries:
            if database not in schema_of:
                schema_of[database] = self.schemas(database)
        for query in gold:
            cached = _GOLD_ITEMS.get(query)
            if cached is None:
                continue
            schema, items = cached
            database, _ = query
            if schema == schema_of[database]:
                self._items[query] = items

        new = [query for query in queries if query not in self._items]
        requests = [(sql, schema_of[database], analyst.reading(database)) for database, sql in new]
        if len(_GOLD_ITEMS) > MAX_CACHED_GOLD:
            _GOLD_ITEMS.clear()
        parsed = analyst.schema_items(requests)
        for query, new_items in zip(new, parsed, strict=True):
            self._items[query] = new_items
            if query in gold and new_items is not None:
                database, _ = query
                _GOLD_ITEMS[query] = (schema_of[database], new_items)

    def of_answer(self, sql: str | None, example: Example, reads: Collection[str]) -> AnalysedQueries:
        """The analyses of a question's final SQL, and of its gold SQL, that are read."""
        queries = AnalysedQueries()
        if "gold_schema" in reads:
            queries = queries._replace(gold_schema=self.gold(example))
        if "schema" in reads:
            predicted_schema = self.items(sql, example.database)
            gold_items = self.items(example.gold_sql, example.database)
            queries = queries._replace(predicted_schema=predicted_schema, gold_items=gold_items)
        if "bigrams" in reads:
            predicted_bigrams = bigrams(sql or "")
            gold_bigrams = bigrams(example.gold_sql)
            queries = queries._replace(predicted_bigrams=predicted_bigrams, gold_bigrams=gold_bigrams)
        return queries

    def items(self, sql: str | None, database: Database) -> SchemaItems | None:
        """Tables and columns of a query that was parsed; None without a query, or if it does not parse."""
        if not sql:
            return None
        return self._items[database, sql]

    def gold(self, example: Example) -> SchemaItems | None:
        if self.gold_schemas is not None:
            return self.gold_schemas.get(example.id)
        return self.items(example.gold_sql, example.database)
