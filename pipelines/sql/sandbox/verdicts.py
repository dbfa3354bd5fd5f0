"""Judging in the worker: both queries run, and their results compared where they are."""

import contextlib
import functools
import importlib
import marshal
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.core.registry import EQUALITIES
from pipelines.sql.dialects.base import (
    ERROR,
    LIMIT,
    OK,
    TIMEOUT,
    UNAVAILABLE,
    Bounds,
    Clock,
    DatabaseSession,
    Hidden,
    HiddenNames,
    OpenFailure,
    Raw,
    failure,
    identity,
)
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
        self.hidden: Mapping[str, HiddenNames] = {}  # what no statement may read, by the `identity` of its database.
        self._keep = bounds.memory_mb << 20 >> 5  # bytes, marshalled; Python's objects take some 4 times as many

    def refresh(self, locations: set[str]) -> None:
        """Forget what is known of databases whose file changed since it was last looked at."""
        for location in locations:
            stamp: Any = None
            with contextlib.suppress(OSError):  # a connection string, or a file that is not there
                info = os.stat(location)
                stamp = info.st_mtime_ns, info.st_size, info.st_ino
                log = os.stat(location + "-wal")  # of SQLite: it is written before the file itself changes
                if log.st_size:
                    stamp = *stamp, log.st_mtime_ns, log.st_size
            if self._stamps.setdefault(location, stamp) == stamp:
                continue
            self._stamps[location] = stamp
            if location in self._sessions:
                self._sessions.pop(location).close()
            for key in [key for key in self._gold if key[0] == location]:
                self._kept -= self._gold.pop(key)[1]

    def run(self, location: str, sql: str, max_rows: int) -> Raw:
        try:
            session = self._session(location)
        except OpenFailure as error:
            return failure(UNAVAILABLE, error.error_class, error.message)
        return session.run(sql, max_rows)

    def cold_ms(self, location: str, sql: str) -> float | None:
        """The milliseconds of a statement that has run well before, as `DatabaseSession.cold_ms` takes them."""
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
        with contextlib.suppress(OpenFailure):
            self._session(location).hold()

    def release(self, location: str) -> None:
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
            gold_text, predicted_text = gold_sql, predicted_sql
            if equality.rewrite is not None:
                gold_text, predicted_text = equality.rewrite(gold_sql), equality.rewrite(predicted_sql)
            scores[name] = 1.0  # the lowest score over the databases
            for location in locations if equality.suite else locations[:1]:
                expected, _ = self._gold(location, gold_text)
                if expected.status != OK:
                    return {}, _facts(expected), _facts(predicted)
                given = self._predicted(location, predicted_text, gold_text)
                score = equality.compare(expected, given, facts) if given.status == OK else 0.0
                scores[name] = min(scores[name], score)
                if not scores[name]:
                    break
            if scores[name] and equality.timed:  # the R-VES reward of a right prediction
                scores[name] = official.timed(
                    functools.partial(self._time, 1, locations[0], predicted_text),
                    functools.partial(self._time, 0, locations[0], gold_text),
                    self._bounds.timeout_s,
                )
        return scores, _facts(gold, is_cached), _facts(predicted, predicted is gold)

    def broken(self, raw: Raw) -> tuple[Any, ...]:
        """The reply when something broke: laid at the query that was at hand."""
        if self._board.at()[1] == 0:
            return {}, _facts(raw), None
        return {}, (OK, None, 0, None), _facts(_as_error(raw))

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
        if key in self._predictions:
            return self._predictions[key]
        # That the database is not available is believed only if gold cannot run either: else a prediction that makes
        # its engine fail would get out of being scored. It runs twice: if it was others, that may have passed.
        for _ in range(2):
            raw = whole(self._databases.run(location, sql, self._bounds.max_rows))
            if raw.status != UNAVAILABLE or self._databases.run(location, gold_sql, 1).status == UNAVAILABLE:
                break
        else:
            raw = _as_error(raw)
        self._predictions[key] = raw
        return raw


def _as_error(raw: Raw) -> Raw:
    """A failure beside a gold query that ran: the prediction's own, whatever its engine calls it."""
    return raw._replace(status=ERROR) if raw.status == UNAVAILABLE else raw


def _facts(raw: Raw, kept: bool = False) -> tuple[str, str | None, int, float | None]:
    """(status, error class, rows, ms); ms is None when nothing was run."""
    return raw.status, raw.error_class, len(raw.rows), None if kept else raw.ms
