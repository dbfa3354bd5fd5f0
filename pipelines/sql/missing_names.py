"""An error about a missing table or column, told with where such names are: PostgreSQL gives such hints of its own."""

import dataclasses

from pipelines.core.types import Database, ExecutionResult
from pipelines.sql import analyst
from pipelines.sql.diagnoses import MISSING_NAME_CLASSES
from pipelines.sql.schema import Schema


def explain_missing_names(result: ExecutionResult, sql: str, database: Database, schema: Schema) -> ExecutionResult:
    """The result with notes on the names that the query misses; as it is if it ran, or failed for another reason.

    Blocks while a worker reads the query, some milliseconds.

    Args:
        schema: what the agent may know of the database; notes name nothing else.
    """
    if result.error_class not in MISSING_NAME_CLASSES:
        return result
    (notes,) = analyst.missing_names([(sql, schema, analyst.reading(database))])
    return dataclasses.replace(result, notes=notes)
