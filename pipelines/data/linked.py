"""The part of its schema that a question is shown (`schema_view: filtered`), in `meta["linked_schema"]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pipelines.sql import analyst
from pipelines.sql.schema import Schema
from pipelines.types import Database, Example, SchemaItems

GOLD = "gold"  # as the linker: no endpoint, the gold SQL's own tables and columns
Schemas = Callable[[Database], Schema]


def link(example: Example, items: SchemaItems | None, schema: Schema) -> Example:
    """The example with what of its schema is shown; all of it where nothing was chosen."""
    chosen = items or _whole(schema)
    columns = [list(pair) for pair in sorted(chosen.columns) if pair[0]]
    linked = {"tables": sorted(chosen.tables), "columns": columns}
    return dataclasses.replace(example, meta={**example.meta, "linked_schema": linked})


def gold_items(examples: Sequence[Example], schema: Schemas) -> dict[str, SchemaItems | None]:
    """What each example's gold SQL reads, by the example's id; None where it cannot be read."""
    queries = [(example.gold_sql, schema(example.database), example.database.engine) for example in examples]
    return dict(zip((example.id for example in examples), analyst.schema_items(queries), strict=True))


def gold_linked(examples: Sequence[Example], schema: Schemas) -> list[Example]:
    """The examples, each with the schema that its gold SQL reads (Reasoning-SQL, 5.1, "correct schema")."""
    gold = gold_items(examples, schema)
    return [link(example, gold[example.id], schema(example.database)) for example in examples]


def _whole(schema: Schema) -> SchemaItems:
    pairs = {(table.name.lower(), column.name.lower()) for table in schema.tables for column in table.columns}
    return SchemaItems(frozenset(table.name.lower() for table in schema.tables), frozenset(pairs))
