"""Results of a query as JSON that any client reads without loss."""

from __future__ import annotations

from typing import Any

from pipelines.report.terminal import plain
from pipelines.types import ExecutionResult, ExecutionStatus, Scalar, text_of

CELL_CHARS = 10_000
SAFE_BITS = 53  # of an integer that JavaScript reads exactly
TOO_LONG = "the question and the schema are longer than the model's context: hide tables in the database's card"
FAILURES = {
    "ContextOverflow": TOO_LONG,
    "EndpointError": "the model's server does not answer",
    "database_corrupt": "the database is damaged",
    "database_locked": "another process writes to the database",
    "disk": "the disk of the database is full or fails",
    "worker_died": "the process that ran the query was ended; ask again",
}


def event(sql: str, result: ExecutionResult) -> dict[str, Any]:
    """What became of a statement: an `answer` with its rows, or an `error` in one plain line."""
    if result.status is ExecutionStatus.UNAVAILABLE:
        return failure(why_broken(str(result.error_class))) | {"sql": sql}
    if not result.ok:
        return failure(f"the SQL does not run: {plain(str(result.error))}") | {"sql": sql}
    return {"type": "answer", "sql": sql, **_table(result)}


def failure(message: str) -> dict[str, Any]:
    """An `error` event."""
    return {"type": "error", "message": " ".join(plain(message).split())}


def why_broken(failure: str) -> str:
    """What a boundary's failure means for a person: the class of an execution's error, or that of an exception."""
    away = "the database is away" if failure.islower() else "the model failed; the server's log says more"
    return f"no answer: {FAILURES.get(failure, away)}"


def _table(result: ExecutionResult) -> dict[str, Any]:
    """Columns and rows; `more` says that rows were left out."""
    return {
        "columns": [_cell(name) for name in result.columns],
        "rows": [[_cell(value) for value in row] for row in result.rows],
        "more": bool(result.truncated),
    }


def _cell(value: Scalar) -> Any:
    """A value of JSON: integers beyond 53 bits, numbers that are none, and bytes are text."""
    if value is None or (isinstance(value, int) and value.bit_length() <= SAFE_BITS):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    text = f"x'{value[:CELL_CHARS].hex()}'" if isinstance(value, bytes) else text_of(value)
    return text if len(text) <= CELL_CHARS else text[:CELL_CHARS] + "\u2026"
