"""Judging in the worker: both queries run, and their results compared where they are."""

import contextlib
import importlib
import marshal
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.core.registry import EQUALITIES, Equality
from pipelines.sql.dialects.base import (
    ERROR,
    LIMIT,
    OK,
    TIMEOUT,
    UNAVAILABLE,
    Bounds,
    Clock,
    DatabaseSession,
    OpenFailure,
    Raw,
    failure,
)
from pipelines.sql.dialects.hiding import Hidden, HiddenNames, identity
from pipelines.sql.equalities import official
from pipelines.sql.equalities.compare import Gold
from pipelines.sql.equalities.spider_grammar import value_units
from pipelines.sql.sandbox.wire import Board

# The databases that a worker has open, and the gold results that it keeps.

OPEN_DATABASES = 128

Opener = Callable[[str, Bounds, Clock], DatabaseSession]


def opener(session: str) -> Opener:
    """The class that opens databases, by "module:class"; imported here, so that a worker loads one driver only."""
    module, _, name = session.partition(":")
    opener: Opener = getattr(importlib.import_module(module), name)
    return opener


class OpenDatabases:
    """Open sessions and kept gold results; both are dropped when the file changes.

    Args:
        begin_opening, end_opening: called around the opening of a database, whose time is not the query's.
        clock: see `SqliteSession`.

    Attributes:
        hidden: what no statement may read, by the `identity` of its database.
    """

    def __init__(
        self,
        open_session: Opener,
        bounds: Bounds,
        clock: Clock,
        begin_opening: Callable[[], None],
        end_opening: Callable[[], None],
    ) -> None:
        self._open = open_session
        self._bounds = bounds
        self._clock = clock
        self._begin_opening = begin_opening
        self._end_opening = end_opening
        self._sessions: OrderedDict[str, DatabaseSession] = OrderedDict()
        self._stamps: dict[str, Any] = {}
        self._gold: OrderedDict[tuple[str, str], tuple[Raw, int]] = OrderedDict()
        self._kept = 0
        self.hidden: Mapping[str, HiddenNames] = {}
        self._keep = bounds.memory_mb << 20 >> 5  # bytes, marshalled; Python's objects take some 4 times as many

    def refresh(self, locations: set[str]) -> None:
        """Forget what is known of databases whose file changed since it was last looked at."""
        for location in locations:
            stamp = _stamp(location)
            if self._stamps.setdefault(location, stamp) == stamp:
                continue
            self._stamps[location] = stamp
            if location in self._sessions:
                self._sessions.pop(location).close()
            for key in [key for key in self._gold if key[0] == location]:
                self._kept -= self._gold.pop(key)[1]

    def run(self, location: str, sql: str, max_rows: int) -> Raw:
        """Run one statement."""
        try:
            session = self._session(location)
        except OpenFailure as error:
            return failure(UNAVAILABLE, error.error_class, error.message)
        return session.run(sql, max_rows)

    def cold_ms(self, location: str, sql: str) -> float | None:
        """The milliseconds of a statement that has run well before, as `Session.cold_ms` takes them."""
        session = self._session(location)
        self._clock.arm(self._bounds.timeout_s)
        return session.cold_ms(sql, self._bounds.max_rows, self._bounds.timeout_s)

    def _session(self, location: str) -> DatabaseSession:
        session = self._sessions.get(location)
        if session is not None:
            self._sessions.move_to_end(location)
            return session
        self._begin_opening()
        try:
            session = self._open(location, self._bounds, self._clock)
            hidden = self.hidden.get(identity(location)) if self.hidden else None
            if hidden is not None:
                session.hide(Hidden.of(hidden))
        finally:
            self._end_opening()
        self._sessions[location] = session
        if len(self._sessions) > OPEN_DATABASES:
            self._sessions.popitem(last=False)[1].close()
        return session

    def hold(self, location: str) -> None:
        """Several statements on this database follow."""
        with contextlib.suppress(OpenFailure):
            self._session(location).hold()

    def release(self, location: str) -> None:
        """The statements of `hold` are done."""
        session = self._sessions.get(location)
        if session is not None:
            session.release()

    def gold(self, location: str, sql: str) -> tuple[Raw, bool]:
        """The result of a gold query, and whether it was kept from the last time."""
        key = (location, sql)
        entry = self._gold.get(key)
        if entry is not None:
            self._gold.move_to_end(key)
            return entry[0], True
        raw = whole(self.run(location, sql, self._bounds.max_rows))
        if raw.status == OK:
            size = len(marshal.dumps(list(raw.rows), 2)) + 200
            self._gold[key] = raw, size
            self._kept += size
            while self._kept > self._keep and len(self._gold) > 1:
                self._kept -= self._gold.popitem(last=False)[1][1]
        return raw, False


def _stamp(location: str) -> Any:
    try:
        info = os.stat(location)
    except OSError:
        return None  # a connection string, or a file that is not there
    return info.st_mtime_ns, info.st_size, info.st_ino, _log_of(location)


def _log_of(location: str) -> Any:
    """Of SQLite's log beside a file, what is written before the file itself changes; None where it is empty."""
    try:
        info = os.stat(location + "-wal")
    except OSError:
        return None
    return (info.st_mtime_ns, info.st_size) if info.st_size else None


def whole(raw: Raw) -> Raw:
    """A verdict needs all rows: a result that was cut is none."""
    if raw.truncated:
        return failure(LIMIT, "result_limit", "the result is larger than a verdict may read")
    return raw


class Verdicts:
    """Executes the two queries of a pair and compares their results, equality by equality.

    `job` is ("verdict", locations, gold SQL, predicted SQL or None, equality names, the first fields of `Gold`, the
    names of the database where an equality compares by value units).
    """

    def __init__(self, databases: OpenDatabases, bounds: Bounds, board: Board) -> None:
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
        return official.timed(
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
