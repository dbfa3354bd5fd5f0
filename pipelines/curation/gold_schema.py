"""The gold schema by consensus: the tables and columns that a gold SQL reads, if extractors agree.

sqlglot's qualified scope reads the text and knows the schema; SQLite's authorizer reports what the prepared statement
reads; LLM extractors can be added as callables. A schema is accepted if two extractors give exactly the same (TRUST-SQL
accepts 2 of 3; of two, both must agree). One that is not accepted is kept with each extractor's view.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core import frames
from pipelines.core.types import Database, Example, SchemaItems

if TYPE_CHECKING:
    from pipelines.sql.schema import Schema

Extractor = Callable[[Example], SchemaItems | None]
STATIC = ("scope", "authorizer")  # in the order in which they are asked
QUORUM = 2


@dataclasses.dataclass(frozen=True)
class SchemaConsensus:
    """The extractors' views of one gold SQL, and the schema that they accept."""

    example_id: str
    items: SchemaItems | None  # the accepted tables and columns; None when too few extractors agree.
    views: Mapping[str, SchemaItems | None]  # of each extractor; None if it could not read the SQL.
    agree: tuple[str, ...]  # names of the extractors with the accepted schema.
    reason: str  # the differences between the extractors, in one line; "" if all agree.

    def record(self) -> dict[str, Any]:
        """JSON values with sorted lists, for a dataset."""
        listed = {
            items: {"tables": sorted(items.tables), "columns": [list(pair) for pair in sorted(items.columns)]}
            for items in (self.items, *self.views.values())
            if items is not None
        }
        return {
            "example_id": self.example_id,
            "accepted": self.items is not None,
            **(listed[self.items] if self.items is not None else {"tables": [], "columns": []}),
            "agree": list(self.agree),
            "reason": self.reason,
            "views": {name: listed[view] if view is not None else None for name, view in self.views.items()},
        }


def static_extractors(schemas: Callable[[Database], Schema]) -> dict[str, Extractor]:
    """The two extractors that need no model. The authorizer reads SQLite databases only."""
    from pipelines.sql import analyst

    return {
        "scope": lambda of: analyst.schema_items([(of.gold_sql, schemas(of.database), analyst.reading(of.database))])[
            0
        ],
        "authorizer": lambda of: analyst.prepared_items([(of.database, of.gold_sql)])[0],
    }


def consensus(example_id: str, views: Mapping[str, SchemaItems | None]) -> SchemaConsensus:
    """Accept the schema that at least two extractors share exactly; among several, the most frequent, or the first."""
    groups: dict[SchemaItems, list[str]] = {}
    for name, view in views.items():
        if view is not None:
            groups.setdefault(view, []).append(name)
    best = max(groups, key=lambda items: len(groups[items]), default=None)
    accepted = best if best is not None and len(groups[best]) >= QUORUM else None
    # How each extractor differs from the view that most share.
    reasons: list[str] = []
    for name, view in views.items():
        if view is None:
            reasons.append(f"{name} could not read it")
        elif best is not None and view != best:
            differences = []
            for word, one, other in (("adds", view, best), ("lacks", best, view)):
                columns = sorted(f"{table}.{column}" for table, column in one.columns - other.columns)
                if names := sorted(one.tables - other.tables) + columns:
                    differences.append(f"{word} {', '.join(names)}")
            reasons.append(f"{name} {' and '.join(differences)}")
    agree = tuple(groups[accepted]) if accepted is not None else ()
    return SchemaConsensus(example_id, accepted, dict(views), agree, "; ".join(reasons))


def gold_schemas(folder: Path | None) -> dict[str, SchemaItems] | None:
    """Accepted gold schemas by example id; None if the recipe has no such stage."""
    if folder is None:
        return None
    rows = frames.read(folder / frames.DATA).iter_rows(named=True)
    parsed = ({name: json.loads(value) for name, value in row.items()} for row in rows)
    return {
        row["example_id"]: SchemaItems(frozenset(row["tables"]), frozenset((t, c) for t, c in row["columns"]))
        for row in parsed
        if row["accepted"]
    }
