"""The gold schema by consensus: the tables and columns that a gold SQL reads, if extractors agree.

sqlglot's qualified scope reads the text and knows the schema; SQLite's authorizer reports what the prepared statement
reads; LLM extractors can be added as callables. A schema is accepted if two extractors give exactly the same (TRUST-SQL
accepts 2 of 3; with two extractors both must agree). If none is accepted, each extractor's view is kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import frames
from pipelines.core.types import Example, SchemaItems

if TYPE_CHECKING:
    from pipelines.sql.schema import Schemas

Extractor = Callable[[Example], SchemaItems | None]
Views = Mapping[str, SchemaItems | None]  # extractor -> the schema that it gives; None if it could not read the SQL
STATIC = ("scope", "authorizer")  # static extractors, in the order in which they are asked
QUORUM = 2


@dataclasses.dataclass(frozen=True)
class SchemaConsensus:
    """The extractors' views of one gold SQL, and the schema that they accept."""

    example_id: str
    items: SchemaItems | None  # the accepted tables and columns; None when too few extractors agree.
    views: Views  # the schema of each extractor.
    agree: tuple[str, ...]  # names of the extractors with the accepted schema.
    reason: str  # the differences between the extractors, in one line; "" if all agree.

    def record(self) -> dict[str, Any]:
        """JSON values with sorted lists, for a dataset."""
        views: dict[str, Any] = {}
        for name, view in self.views.items():
            views[name] = None
            if view is not None:
                views[name] = _as_lists(view)
        accepted = self.items
        if accepted is None:
            accepted = SchemaItems(frozenset(), frozenset())
        return {
            "example_id": self.example_id,
            "accepted": self.items is not None,
            **_as_lists(accepted),
            "agree": list(self.agree),
            "reason": self.reason,
            "views": views,
        }


def _as_lists(items: SchemaItems) -> dict[str, list[Any]]:
    columns = [[table, column] for table, column in sorted(items.columns)]
    return {"tables": sorted(items.tables), "columns": columns}


def static_extractors(schemas: Schemas) -> dict[str, Extractor]:
    """The two extractors that need no model. The authorizer reads SQLite databases only."""
    from pipelines.sql import analyst

    def scope(example: Example) -> SchemaItems | None:
        schema = schemas(example.database)
        engine = analyst.reading(example.database)
        query = (example.gold_sql, schema, engine)
        (items,) = analyst.schema_items([query])
        return items

    def authorizer(example: Example) -> SchemaItems | None:
        query = (example.database, example.gold_sql)
        (items,) = analyst.prepared_items([query])
        return items

    return {"scope": scope, "authorizer": authorizer}


def consensus(example_id: str, views: Views) -> SchemaConsensus:
    """Accept the schema that at least two extractors share exactly; among several, the most frequent, or the first."""
    groups: dict[SchemaItems, list[str]] = {}
    for name, view in views.items():
        if view is not None:
            names = groups.setdefault(view, [])
            names.append(name)
    best = max(groups, key=lambda items: len(groups[items]), default=None)
    accepted: SchemaItems | None = None
    names_that_agree: list[str] = []
    if best is not None and len(groups[best]) >= QUORUM:
        accepted = best
        names_that_agree = groups[best]
    reasons: list[str] = []
    for name, view in views.items():
        if view is None:
            reasons.append(f"{name} could not read it")
        elif best is not None and view != best:
            differences = _differences(view, best)
            reasons.append(f"{name} {differences}")
    return SchemaConsensus(
        example_id=example_id,
        items=accepted,
        views=dict(views),
        agree=tuple(names_that_agree),
        reason="; ".join(reasons),
    )


def _differences(view: SchemaItems, best: SchemaItems) -> str:
    """The differences of a view from the one that most extractors share, in words."""
    differences = []
    added = _names_without(view, best)
    if added:
        differences.append(f"adds {added}")
    lacking = _names_without(best, view)
    if lacking:
        differences.append(f"lacks {lacking}")
    return " and ".join(differences)


def _names_without(items: SchemaItems, others: SchemaItems) -> str:
    """The tables and columns of items that others lack, with commas between."""
    names = sorted(items.tables - others.tables)
    columns = items.columns - others.columns
    names += sorted(f"{table}.{column}" for table, column in columns)
    return ", ".join(names)


def gold_schemas(folder: Path | None) -> dict[str, SchemaItems] | None:
    """Accepted gold schemas by example id; None if the recipe has no such stage."""
    if folder is None:
        return None
    schemas = {}
    frame = frames.read(folder / frames.DATA)
    for texts in frame.iter_rows(named=True):
        row = {name: json.loads(text) for name, text in texts.items()}
        if row["accepted"]:
            columns = [(table, column) for table, column in row["columns"]]
            items = SchemaItems(frozenset(row["tables"]), frozenset(columns))
            schemas[row["example_id"]] = items
    return schemas
