"""Judging in the worker: both queries run, and their results compared where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.parts import Equality
from pipelines.registry import EQUALITIES
from pipelines.sql import ves
from pipelines.sql.compare import Gold
from pipelines.sql.dialects.base import ERROR, OK, TIMEOUT, UNAVAILABLE, Bounds, Raw
from pipelines.sql.sandbox.sessions import Databases, whole
from pipelines.sql.sandbox.wire import Board
from pipelines.sql.value_units import value_units


class Verdicts:
    """Executes the two queries of a pair and compares their results, equality by equality.

    `job` is ("verdict", locations, gold SQL, predicted SQL or None, equality names, the first fields of `Gold`, the
    names of the database where an equality compares by value units).
    """

    def __init__(self, databases: Databases, bounds: Bounds, board: Board) -> None:
        self._databases = databases
        self._bounds = bounds
        self._board = board
        self._number = 0
        self._predictions: dict[tuple[str, str], Raw] = {}

    def __call__(self, number: int, job: Sequence[Any]) -> tuple[Any, ...]:
        """(scores, gold facts, predicted facts); scores are {} when a gold query gave nothing to compare with."""
        _, locations, gold_sql, predicted_sql, equalities, gold_facts, names = job
        self._number = number
        self._predictions.clear()
        gold, is_cached = self._gold(locations[0], gold_sql)
        if gold.status != OK or predicted_sql is None:
            return {}, _facts(gold, is_cached), None
        predicted = self._predicted(locations[0], predicted_sql, gold_sql)
        if predicted.status == TIMEOUT:  # wrong by all: no gold query is asked while a server may still be at it
            return dict.fromkeys(equalities, 0.0), _facts(gold, is_cached), _facts(predicted)
        facts = Gold(*gold_facts)
        if names is not None:
            facts = facts._replace(units=value_units(names, gold_sql, predicted_sql))
        scores: dict[str, float] = {}
        for name in equalities:
            equality = EQUALITIES[name]
            chosen = locations if equality.suite else locations[:1]
            score, failed = self._score(equality, chosen, gold_sql, predicted_sql, facts)
            if failed is not None:
                return {}, _facts(failed), _facts(predicted)
            scores[name] = score
        return scores, _facts(gold, is_cached), _facts(predicted, predicted is gold)

    def broken(self, raw: Raw) -> tuple[Any, ...]:
        """The reply when something broke: laid at the query that was at hand."""
        if self._board.at()[1] == 0:
            return {}, _facts(raw), None
        return {}, (OK, None, 0, None), _facts(_own(raw))

    def _score(
        self, equality: Equality, locations: Sequence[str], gold_sql: str, predicted_sql: str, facts: Gold
    ) -> tuple[float, Raw | None]:
        """The lowest score over the databases; beside it the gold result if there was none to compare with."""
        if equality.rewrite is not None:
            gold_sql, predicted_sql = equality.rewrite(gold_sql), equality.rewrite(predicted_sql)
        score = 1.0
        for location in locations:
            gold, _ = self._gold(location, gold_sql)
            if gold.status != OK:
                return 0.0, gold
            predicted = self._predicted(location, predicted_sql, gold_sql)
            score = min(score, equality.compare(gold, predicted, facts) if predicted.status == OK else 0.0)
            if not score:
                break
        if score and equality.timed:
            score = self._speed(locations[0], gold_sql, predicted_sql)
        return score, None

    def _speed(self, location: str, gold_sql: str, predicted_sql: str) -> float:
        """The R-VES reward of a right prediction."""
        return ves.timed(
            lambda: self._time(1, location, predicted_sql),
            lambda: self._time(0, location, gold_sql),
            self._bounds.timeout_s,
        )

    def _time(self, phase: int, location: str, sql: str) -> float | None:
        self._board.note(self._number, phase)
        return self._databases.cold_ms(location, sql)

    def _gold(self, location: str, sql: str) -> tuple[Raw, bool]:
        self._board.note(self._number, 0)
        return self._databases.gold(location, sql)

    def _predicted(self, location: str, sql: str, gold_sql: str) -> Raw:
        self._board.note(self._number, 1)
        if sql == gold_sql:
            return self._databases.gold(location, sql)[0]
        key = (location, sql)
        if key not in self._predictions:
            self._predictions[key] = self._confirmed(location, sql, gold_sql)
        return self._predictions[key]

    def _confirmed(self, location: str, sql: str, gold_sql: str) -> Raw:
        """The prediction's result; that the database is not available is believed only if gold cannot run either.

        Else a prediction that makes its engine fail would get out of being scored.
        """
        raw = whole(self._databases.run(location, sql, self._bounds.max_rows))
        if raw.status != UNAVAILABLE or self._databases.run(location, gold_sql, 1).status == UNAVAILABLE:
            return raw
        raw = whole(self._databases.run(location, sql, self._bounds.max_rows))  # it was others: that may have passed
        if raw.status != UNAVAILABLE or self._databases.run(location, gold_sql, 1).status == UNAVAILABLE:
            return raw
        return _own(raw)


def _own(raw: Raw) -> Raw:
    """A failure beside a gold query that ran: the prediction's own, whatever its engine calls it."""
    return raw._replace(status=ERROR) if raw.status == UNAVAILABLE else raw


def _facts(raw: Raw, kept: bool = False) -> tuple[str, str | None, int, float | None]:
    """(status, error class, rows, ms); ms is None when nothing was run."""
    return raw.status, raw.error_class, len(raw.rows), None if kept else raw.ms
