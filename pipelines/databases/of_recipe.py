"""The databases of a recipe: the sandbox that runs its SQL, and their schemas as its prompts show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pipelines.types import Database

if TYPE_CHECKING:
    from pipelines.config import Recipe
    from pipelines.sql.engine import SqlEngine
    from pipelines.sql.schema import Schema


def schemas(recipe: Recipe) -> Callable[[Database], Schema]:
    """Schemas by database, each read once."""
    from pipelines.data.descriptions import describe
    from pipelines.sql.catalogs import introspect

    known: dict[str, Schema] = {}

    def schema(database: Database) -> Schema:
        if database.location not in known:
            read = introspect(database, recipe.protocol.schema_values)
            known[database.location] = describe(read, database) if recipe.protocol.schema_descriptions else read
        return known[database.location]

    return schema


def sql_engine(recipe: Recipe, workers: int | None = None) -> SqlEngine:
    """The recipe's sandbox; close it (it is a context manager)."""
    from pipelines.sql.engine import Limits, SqlEngine

    return SqlEngine(Limits.of(recipe.execution), workers or recipe.hardware.sql_workers)
