"""The input and the result of an error analysis: a wrong answer, and its diagnosis. The analysis runs in a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pipelines.core.types import ExecutionStatus, Scalar, StopReason

if TYPE_CHECKING:
    from pipelines.sql.schema import Schema

ErrorClass = Literal["hallucination", "schema_linking", "semantic", "syntax", "generation"]
ERROR_CLASSES: tuple[ErrorClass, ...] = ("hallucination", "schema_linking", "semantic", "syntax", "generation")
MISSING_NAME_CLASSES = frozenset({"no_such_table", "no_such_column"})  # the sandbox's error classes of a missing name
KINDS: Mapping[str, str] = {
    "unknown_table": "names a table that does not exist",
    "unknown_column": "names a column that no table has",
    "column_of_another_table": "looks for a column in a table that does not have it",
    "missing_join": "leaves out a table that gold reads",
    "extra_join": "reads a table that gold does not",
    "wrong_column": "uses one column where gold uses another",
    "missing_column": "leaves out a column that gold uses",
    "extra_column": "uses a column that gold does not",
    "wrong_literal": "compares the right column with another constant",
    "operator": "compares the right column in another way",
    "missing_condition": "leaves out a condition",
    "extra_condition": "adds a condition",
    "logic": "joins its conditions otherwise (AND, OR, NOT)",
    "join_kind": "joins otherwise (inner, left)",
    "order": "orders rows otherwise",
    "limit": "takes another number of rows",
    "distinct": "differs in DISTINCT",
    "grouping": "groups by something else",
    "having": "filters groups otherwise",
    "aggregation": "aggregates otherwise",
    "set_operation": "combines queries otherwise (UNION, INTERSECT, EXCEPT)",
    "nesting": "nests queries otherwise",
    "output": "shows other columns, or in another order",
    "empty_result": "returns no rows where gold returns some",
    "other_equality": "counts as right under another equality",
    "too_slow": "runs into a limit of the sandbox",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A wrong answer, as an error analysis is given it."""

    predicted_sql: str | None  # Answer; None if there is none.
    gold_sql: str
    schema: Schema
    engine: str = "sqlite"
    status: ExecutionStatus | None = ExecutionStatus.OK  # End of the answer's execution; None if nothing was executed.
    error_class: str | None = None  # Class of its error, as in `ExecutionResult`.
    stop: StopReason = StopReason.SOLUTION  # Reason why the episode ended.
    turns: int = 1  # Turns of the episode.
    n_rows: int = 0  # Rows that the answer returned.
    gold_rows: int = 0  # Rows that the gold SQL returned.
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)  # Verdict under each equality.
    # Distinct values that are stored in a column, by (table, column); a column that is not there is not known.
    values: Mapping[tuple[str, str], Sequence[Scalar]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Hint:
    """A finer clue about a failure, for people: one failure can have several."""

    kind: str  # Short stable word ("wrong_literal", "missing_join", ...); `KINDS` lists them.
    detail: str  # Fact of this failure, in one line.


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an answer is wrong (TRUST-SQL, section 3.1)."""

    error: ErrorClass  # Class, of which there is exactly one.
    evidence: str  # Fact that decided the class, in one line.
    hints: tuple[Hint, ...] = ()  # Finer clues.
