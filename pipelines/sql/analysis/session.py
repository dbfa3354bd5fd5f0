"""The worker's side of `sql/analyst.py`: one request is answered at a time, under the worker's clock and memory.

A request is (kind, arguments); its answer is one cell of JSON text, so that nothing but plain text goes back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.sql.analysis.authorizer import read_items
from pipelines.sql.analysis.comments import without_comments
from pipelines.sql.analysis.diagnosis import diagnose
from pipelines.sql.analysis.functions import functions
from pipelines.sql.analysis.hardness import hardness
from pipelines.sql.analysis.items import schema_items
from pipelines.sql.analysis.lookups import first_row, first_table, lookups
from pipelines.sql.analysis.naming import naming
from pipelines.sql.analysis.ties import tie_probes
from pipelines.sql.diagnoses import Failure
from pipelines.sql.dialects.base import ERROR, OK, Bounds, Clock, Raw, Session, failure
from pipelines.types import Scalar, SchemaItems


class AnalysisSession(Session):
    """Answers requests about SQL text. It is no database, and is kept as one."""

    def __init__(self, location: str, bounds: Bounds, clock: Clock) -> None:
        super().__init__(bounds, clock)

    def answer(self, sql: Any, max_rows: int) -> Raw:
        """Answer the request (kind, *arguments)."""
        kind, *arguments = sql
        return Raw(OK, ("answer",), [(json.dumps(KINDS[kind](*arguments)),)])

    def explain(self, error: Exception) -> Raw:
        """The text cannot be read: sqlglot raises freely on trees that parse but make no sense."""
        return failure(ERROR, "unreadable", type(error).__name__)

    def is_healthy(self) -> bool:
        """Always: there is no database."""
        return True

    def close(self) -> None:
        """Nothing is held."""


def _items(*arguments: Any) -> Any:
    return _listed(schema_items(*arguments))


def _reads(*arguments: Any) -> Any:
    return _listed(read_items(*arguments))


def _listed(items: SchemaItems | None) -> Any:
    return None if items is None else (sorted(items.tables), sorted(items.columns))


class _Asked(dict[tuple[str, str], Sequence[Scalar]]):
    """Stored values by column, which notes the columns that are asked for and not there."""

    def __init__(self, known: Mapping[tuple[str, str], Sequence[Scalar]]) -> None:
        super().__init__(known)
        self.missing: list[tuple[str, str]] = []

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """The values, or the default."""
        if key not in self:
            self.missing.append(key)
        return super().get(key, default)


def _diagnosis(wrong: Failure) -> Any:
    """The diagnosis, and the columns whose stored values would tell more."""
    values = _Asked(wrong.values)
    diagnosis = diagnose(dataclasses.replace(wrong, values=values))
    return dataclasses.asdict(diagnosis), sorted(set(values.missing))


KINDS: Mapping[str, Callable[..., Any]] = {
    "items": _items,
    "naming": naming,
    "without_comments": without_comments,
    "reads": _reads,
    "hardness": hardness,
    "functions": functions,
    "diagnosis": _diagnosis,
    "ties": tie_probes,
    "lookups": lookups,
    "first_table": first_table,
    "first_row": first_row,
}
