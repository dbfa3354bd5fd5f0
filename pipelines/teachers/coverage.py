"""What a set of questions asks of a schema: its tables, its joins, functions of SQL and levels, and what none asks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pipelines.sql import analyst
from pipelines.sql.schema import Schema
from pipelines.types import HARDNESS_LEVELS, Example

SHOWN = 10  # names of a line


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How many questions there are for each part, 0 for a part of the schema that none asks.

    Attributes:
        tables: by name.
        joins: by foreign key ("purchase.customer_id = customer.id"): questions that read both of its tables.
        functions: by name, those that are used.
        hardness: by level.
    """

    tables: Mapping[str, int]
    joins: Mapping[str, int]
    functions: Mapping[str, int]
    hardness: Mapping[str, int]


def coverage(examples: Sequence[Example], schema: Schema) -> Coverage:
    """What the gold SQL of these questions uses; a query that cannot be read counts for its level alone."""
    engines = [example.database.engine for example in examples]
    queries = [example.gold_sql for example in examples]
    items = analyst.schema_items([(sql, schema, engine) for sql, engine in zip(queries, engines, strict=True)])
    table_sets = [item.tables if item is not None else frozenset[str]() for item in items]
    used = Counter(name for names in analyst.functions(list(zip(queries, engines, strict=True))) for name in names)
    levels = Counter(example.hardness for example in examples)
    return Coverage(
        {table.name: sum(table.name.lower() in tables for tables in table_sets) for table in schema.tables},
        {
            f"{table.name}.{key.column} = {key.to_table}.{key.to_column}": sum(
                {table.name.lower(), key.to_table.lower()} <= tables for tables in table_sets
            )
            for table in schema.tables
            for key in table.foreign_keys
        },
        dict(sorted(used.items(), key=lambda pair: (-pair[1], pair[0]))),
        {level: levels[level] for level in HARDNESS_LEVELS},
    )


def lines(coverage: Coverage) -> Iterator[str]:
    """The report for a person."""
    for what, counts in (("tables", coverage.tables), ("joins over a foreign key", coverage.joins)):
        if counts:
            without = [name for name, count in counts.items() if not count]
            rest = f"; no question about {_listed(without)}" if without else ""
            yield f"{what}: {len(counts) - len(without)} of {len(counts)}{rest}"
    for what, counts in (("functions", coverage.functions), ("hardness", coverage.hardness)):
        yield f"{what}: {_listed([f'{name} {count}' for name, count in counts.items()]) or 'none'}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
