"""From trajectories to outcomes: gold and final SQL executed once, compared by a named equality, and taken apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine, Verdict
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import Schema
from pipelines.types import Database, Example, Hardness, Outcome, SchemaItems, StopReason, Trajectory

Schemas = Callable[[Database], Schema]


def make_outcomes(
    trajectories: Sequence[Trajectory],
    examples: Mapping[str, Example],
    sql: SqlEngine,
    schemas: Schemas | None,
    equality: str,
    max_turns: int,
    gold_schemas: Mapping[str, SchemaItems] | None = None,
) -> list[Outcome]:
    """One outcome a trajectory, in order.

    A broken episode, or a verdict whose database, worker or gold SQL failed, gives a `broken` outcome: never a score.

    Args:
        examples: by id.
        schemas: gives a database's schema; without it outcomes lack what reading the SQL would tell (schemas, bigrams),
            which costs several times the execution.
        equality: a name of `pipelines/sql/compare.py`.
        max_turns: the turn cap T of the episodes.
        gold_schemas: consensus gold schemas by example id; an example that is not among them has none. Without the
            mapping, the gold SQL's own tables and columns are taken.
    """
    pairs = [_pair(trajectory, examples[trajectory.example_id]) for trajectory in trajectories]
    verdicts = sql.verdicts(pairs, [equality])
    whole = [
        pair
        for pair, verdict, trajectory in zip(pairs, verdicts, trajectories, strict=True)
        if not _broke(trajectory, verdict)
    ]
    analysis = None if schemas is None else Analysis(schemas, gold_schemas)
    if analysis is not None:
        analysis.learn(whole)
    level = levels(examples[trajectory.example_id] for trajectory in trajectories)
    return [
        _outcome(trajectory, examples[trajectory.example_id], verdict, equality, max_turns, analysis, level)
        for trajectory, verdict in zip(trajectories, verdicts, strict=True)
    ]


def levels(examples: Iterable[Example]) -> dict[str, Hardness]:
    """Each example's level, by its id; where it has none, its gold SQL's."""
    by_id = {example.id: example for example in examples}
    untold = [example for example in by_id.values() if example.hardness is None]
    levels_measured = (
        analyst.hardness([(example.gold_sql, example.database.engine) for example in untold]) if untold else []
    )
    measured = {example.id: level for example, level in zip(untold, levels_measured, strict=True)}
    return {id: example.hardness or measured[id] for id, example in by_id.items()}


def _broke(trajectory: Trajectory, verdict: Verdict) -> bool:
    return verdict.broken or trajectory.stop is StopReason.BROKEN


def _pair(trajectory: Trajectory, example: Example) -> Pair:
    return Pair(example.database, example.gold_sql, trajectory.final_sql)


@dataclass
class Analysis:
    """The static side of a verdict, for rewards and for evaluation; each query is taken apart once.

    Attributes:
        schemas: gives a database's schema.
        gold_schemas: consensus gold schemas by example id; None takes the gold SQL's own items.
    """

    schemas: Schemas
    gold_schemas: Mapping[str, SchemaItems] | None
    _items: dict[tuple[str, str], SchemaItems | None] = field(default_factory=dict)
    _pairs: dict[str, frozenset[tuple[str, str]]] = field(default_factory=dict)

    def learn(self, pairs: Iterable[Pair]) -> None:
        """Have the queries of these pairs taken apart, all at once."""
        queries = {
            (pair.database.location, sql): (sql, self.schemas(pair.database), pair.database.engine)
            for pair in pairs
            for sql in (pair.gold_sql, pair.predicted_sql)
            if sql and (pair.database.location, sql) not in self._items
        }
        self._items |= zip(queries, analyst.schema_items(list(queries.values())), strict=True)

    def items(self, sql: str | None, database: Database) -> SchemaItems | None:
        """Tables and columns of a query that was learned; None when there is none or it does not parse."""
        return self._items[database.location, sql] if sql else None

    def gold(self, example: Example) -> SchemaItems | None:
        """The gold schema of an example; None where it has none."""
        if self.gold_schemas is not None:
            return self.gold_schemas.get(example.id)
        return self.items(example.gold_sql, example.database)

    def bigrams(self, sql: str | None) -> frozenset[tuple[str, str]]:
        """Adjacent token pairs of a query; none of no query."""
        if sql is None:
            return frozenset()
        if sql not in self._pairs:
            self._pairs[sql] = bigrams(sql)
        return self._pairs[sql]


def _outcome(
    trajectory: Trajectory,
    example: Example,
    verdict: Verdict,
    equality: str,
    max_turns: int,
    analysis: Analysis | None,
    level: Mapping[str, Hardness],
) -> Outcome:
    final = trajectory.final_sql
    broken = _broke(trajectory, verdict)
    if broken:
        analysis = None  # its database may be gone, and nobody looks at the rest of it
    return Outcome(
        example_id=trajectory.example_id,
        trajectory=trajectory,
        equality=equality,
        correct=verdict.scores.get(equality, 0.0) == 1.0,
        status=verdict.predicted,
        n_rows=verdict.n_rows,
        broken=broken,
        hardness=level[example.id],
        max_turns=max_turns,
        predicted_schema=analysis.items(final, example.database) if analysis else None,
        gold_items=analysis.items(example.gold_sql, example.database) if analysis else None,
        gold_schema=analysis.gold(example) if analysis else None,
        predicted_bigrams=analysis.bigrams(final) if analysis else frozenset(),
        gold_bigrams=analysis.bigrams(example.gold_sql) if analysis else frozenset(),
    )
