"""From trajectories to outcomes: gold and final SQL executed once, compared by a named equality, and taken apart."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.core.registry import ANALYSES
from pipelines.core.types import Database, EngineName, Example, Hardness, Outcome, SchemaItems, StopReason, Trajectory
from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import Schema

Schemas = Callable[[Database], Schema]
# What gold queries come to, for the life of the process; an answer that may be a failure of the worker is not kept.
_GOLD_ITEMS: dict[tuple[Database, str], tuple[Schema, SchemaItems]] = {}
_GOLD_LEVELS: dict[tuple[str, EngineName], Hardness] = {}
GOLD_KEPT = 50_000  # gold queries; beyond them all are forgotten


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
    of = [examples[trajectory.example_id] for trajectory in trajectories]
    both = zip(of, trajectories, strict=True)
    pairs = [Pair.of(example, trajectory.final_sql) for example, trajectory in both]
    verdicts = sql.verdicts(pairs, [equality])
    broke = [
        verdict.broken or trajectory.stop is StopReason.BROKEN
        for verdict, trajectory in zip(verdicts, trajectories, strict=True)
    ]
    analysis = Analysis(schemas, gold_schemas)
    if "schema" in reads or ("gold_schema" in reads and gold_schemas is None):
        whole = [pair for pair, is_broken in zip(pairs, broke, strict=True) if not is_broken]
        analysis.parse_queries(whole, predicted="schema" in reads)
    level = levels(of) if "level" in reads else {}
    outcomes = []
    for trajectory, example, verdict, is_broken in zip(trajectories, of, verdicts, broke, strict=True):
        final, database = trajectory.final_sql, example.database
        taken = () if is_broken else reads  # its database may be gone, and the rest of it is not looked at
        outcomes.append(
            Outcome(
                example_id=trajectory.example_id,
                trajectory=trajectory,
                equality=equality,
                correct=verdict.scores.get(equality, 0.0) == 1.0,
                status=verdict.predicted,
                n_rows=verdict.n_rows,
                broken=is_broken,
                hardness=example.hardness or level.get(example.id),
                max_turns=max_turns,
                predicted_schema=analysis.items(final, database) if "schema" in taken else None,
                gold_items=analysis.items(example.gold_sql, database) if "schema" in taken else None,
                gold_schema=analysis.gold(example) if "gold_schema" in taken else None,
                predicted_bigrams=bigrams(final or "") if "bigrams" in taken else frozenset(),
                gold_bigrams=bigrams(example.gold_sql) if "bigrams" in taken else frozenset(),
            )
        )
    return outcomes


def levels(examples: Iterable[Example]) -> dict[str, Hardness]:
    """Each example's level, by its id; if it has none, its gold SQL's."""
    by_id = {example.id: example for example in examples}
    unrated = {(one.gold_sql, analyst.reading(one.database)) for one in by_id.values() if one.hardness is None}
    measured = {query: level for query in unrated if (level := _GOLD_LEVELS.get(query))}
    if new := sorted(unrated - measured.keys()):
        if len(_GOLD_LEVELS) > GOLD_KEPT:
            _GOLD_LEVELS.clear()
        measured |= zip(new, analyst.hardness(new), strict=True)
        _GOLD_LEVELS.update({query: level for query, level in measured.items() if level != "extra"})
    return {id: one.hardness or measured[one.gold_sql, analyst.reading(one.database)] for id, one in by_id.items()}


@dataclass
class Analysis:
    """The static side of a verdict, for rewards and for evaluation; each query is taken apart once."""

    schemas: Schemas | None  # gives a database's schema
    gold_schemas: Mapping[str, SchemaItems] | None  # by example id; None takes the gold SQL's own items
    _items: dict[tuple[Database, str], SchemaItems | None] = field(default_factory=dict)

    def parse_queries(self, pairs: Iterable[Pair], predicted: bool = True) -> None:
        """Read tables and columns off the queries of these pairs, or off their gold queries alone, together."""
        assert self.schemas is not None, "tables and columns are resolved by the schema"
        pairs = list(pairs)
        gold = dict.fromkeys((pair.database, pair.gold_sql) for pair in pairs if pair.gold_sql)
        others = [(pair.database, pair.predicted_sql) for pair in pairs if predicted and pair.predicted_sql]
        of = {database: self.schemas(database) for database, _ in (*gold, *others)}
        kept = {query: pair for query in gold if (pair := _GOLD_ITEMS.get(query))}
        self._items |= {query: items for query, (schema, items) in kept.items() if schema == of[query[0]]}
        new = [query for query in dict.fromkeys((*gold, *others)) if query not in self._items]
        answers = analyst.schema_items([(sql, of[database], analyst.reading(database)) for database, sql in new])
        self._items |= zip(new, answers, strict=True)
        if len(_GOLD_ITEMS) > GOLD_KEPT:
            _GOLD_ITEMS.clear()
        for query, items in zip(new, answers, strict=True):
            if query in gold and items is not None:
                _GOLD_ITEMS[query] = of[query[0]], items

    def items(self, sql: str | None, database: Database) -> SchemaItems | None:
        """Tables and columns of a query that was parsed; None without a query, or if it does not parse."""
        return self._items[database, sql] if sql else None

    def gold(self, example: Example) -> SchemaItems | None:
        if self.gold_schemas is not None:
            return self.gold_schemas.get(example.id)
        return self.items(example.gold_sql, example.database)
