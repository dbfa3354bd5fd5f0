"""The SQL engine: runs statements in sandboxed workers and decides by named equalities, for sync and async code."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import pkgutil
import selectors
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.core.errors import DatabaseError, DataError
from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.types import Database, Example, ExecutionResult, ExecutionStatus
from pipelines.recipe import config
from pipelines.sql.audit import AuditEntry, AuditLog
from pipelines.sql.dialects.base import OK, Bounds, HiddenNames, identity
from pipelines.sql.equalities.spider_grammar import DatabaseNames
from pipelines.sql.sandbox.pool import ANALYSIS, Pool, Task, WorkerDeath
from pipelines.sql.splitter import asks_for_order

TICK = 0.02  # seconds between two looks at the workers' clocks
Job = tuple[Any, ...]  # a worker's job: its kind, and what that takes
EngineJob = tuple[str, Job]  # the engine that runs a job, and the job
_STATUS = {status.value: status for status in ExecutionStatus}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one statement."""

    timeout_s: float = 30.0  # Wall clock, in seconds.
    max_rows: int = 100_000  # Rows of one result; more are cut off for `execute`, and fail for a verdict.
    max_bytes: int = 64_000_000  # Bytes of one result, treated as `max_rows`; also the limit of a cell.
    memory_mb: int = 2048  # Address space that a worker may add, in MiB.

    @classmethod
    def of(cls, execution: config.Execution) -> Limits:
        return cls(execution.timeout_s, execution.max_rows, execution.max_bytes, execution.memory_mb)


@dataclass(frozen=True, slots=True)
class Pair:
    """A gold query and the prediction to compare with it."""

    database: Database
    gold_sql: str
    predicted_sql: str | None  # Prediction; None if there is none.
    more: tuple[str, ...] = ()  # Further gold queries of the question: a match with any counts.

    @classmethod
    def of(cls, example: Example, predicted_sql: str | None) -> Pair:
        """A prediction for a question."""
        return cls(example.database, example.gold_sql, predicted_sql, example.annotations.gold_sqls)

    def with_single_gold(self) -> list[Pair]:
        """The prediction with each gold query alone."""
        golds = [self.gold_sql, *self.more]
        return [Pair(self.database, gold, self.predicted_sql) for gold in golds]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The scores of a pair, and how its queries ended."""

    scores: Mapping[str, float]  # Score by equality: 1.0 or 0.0, or a grade in [0, 1]; all 0.0 when `broken`.
    predicted: ExecutionStatus | None  # End of the prediction; None if there is none or gold gave no result.
    gold: ExecutionStatus  # End of the gold query.
    error_class: str | None  # Class of the prediction's error, or of the gold query's if that failed; None if both ran.
    n_rows: int  # Rows that the prediction returned.
    gold_rows: int  # Rows that the gold query returned.
    counterexample: str = ""  # Script of a database on which the two queries differ.
    failed_golds: int = 0  # Number of the question's gold queries that gave no result, if another one did.

    @property
    def broken(self) -> bool:
        """Whether a boundary failed or the gold query gave no result: nothing may be scored."""
        return self.gold is not ExecutionStatus.OK or self.predicted is ExecutionStatus.UNAVAILABLE


@dataclass(eq=False)
class RunningStatement:
    """A statement that has been sent to a worker."""

    task: Task
    reply: Awaitable[Any]
    read_reply: Callable[[Any], ExecutionResult]
    _result: ExecutionResult | None = None
    _highest_work: int = 0

    async def result(self) -> ExecutionResult:
        reply = await self.reply
        self._result = self.read_reply(reply)
        return self._result

    def work(self) -> float:
        """The work that it has done so far, or took in all once it is done (see `ExecutionResult.work`).

        It never decreases and never exceeds the total, so a scheduler may rely on it; infinite for a statement that the
        clock ended, for a clock counts no work. Of a statement that ends its worker only the start is known.
        """
        if self._result is None:
            # A worker's figure falls to 0 when it has gone on to the next job before its answer is read.
            self._highest_work = max(self._highest_work, self.task.work())
            return self._highest_work
        if self._result.status is ExecutionStatus.TIMEOUT:
            return math.inf
        return self._result.work


class SqlEngine(contextlib.AbstractContextManager["SqlEngine"]):
    """Owner of the worker processes, which may be shared between threads and event loops.

    Args:
        workers: processes that run statements, at most, for each engine; up to three more while all are in long ones.
        audit: a JSONL file that gets a line for every statement.
        tables: Spider's tables.json, by which `spider_exec` renames columns (see `sql/equalities/spider_grammar.py`).
        hidden: tables and columns that no statement may read, by a location of their database: it holds however a
            statement's own location of that database is written (see `identity`).
    """

    def __init__(
        self,
        limits: Limits,
        workers: int = 1,
        audit: Path | None = None,
        tables: Path | None = None,
        hidden: Mapping[str, HiddenNames] | None = None,
    ) -> None:
        max_bytes = min(limits.max_bytes, limits.memory_mb << 20 >> 4)  # rows take far more memory than their bytes
        self._bounds = Bounds(limits.timeout_s, limits.max_rows, max_bytes, limits.memory_mb)
        self._workers = workers
        self._hidden: dict[str, HiddenNames] = {}
        for location, names in (hidden or {}).items():
            self._hidden[identity(location)] = names
        self._selector = selectors.DefaultSelector()
        self._pools: dict[str, Pool] = {}
        # Whether a gold query has run (True) or failed when it was asked alone (False).
        self._gold_ran: dict[GoldKey, bool] = {}
        self._names = DatabaseNames(tables)
        self._audit = None if audit is None else AuditLog(audit)
        self._lock = threading.RLock()
        # Tasks of each event loop's present tick; each loop has a list of its own, for they run in several threads.
        self._gathered: dict[asyncio.AbstractEventLoop, list[tuple[str, Task]]] = {}
        self._waiting: dict[asyncio.AbstractEventLoop, int] = {}
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, _close_pools, self._selector, self._pools, self._owner)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers. Jobs under way are answered as unavailable."""
        with self._lock:
            self._closer()

    def hides(self, database: Database) -> bool:
        """Whether a database has hidden tables or columns."""
        return bool(self._hidden) and identity(database.location) in self._hidden

    def execute_many(self, jobs: Sequence[tuple[Database, str]], max_rows: int | None = None) -> list[ExecutionResult]:
        """Run statements and return their results in the same order. Blocks."""
        databases = []
        executions = []
        jobs_of_engines: list[EngineJob] = []
        for database, sql in jobs:
            execution = self._execution(database, sql, max_rows)
            databases.append(database)
            executions.append(execution)
            jobs_of_engines.append((database.engine, execution))
        replies = self._run(jobs_of_engines)
        self._log(zip(databases, executions, replies, strict=True))
        return list(map(_execution_result, replies))

    async def execute(self, database: Database, sql: str, max_rows: int | None = None) -> ExecutionResult:
        """Run one statement; calls of one event-loop tick share a batch."""
        statement = self.begin(database, sql, max_rows)
        return await statement.result()

    def begin(self, database: Database, sql: str, max_rows: int | None = None) -> RunningStatement:
        """Send a statement off, from a running event loop; its result is to be awaited."""
        job = self._execution(database, sql, max_rows)
        task, reply = self._ask(database.engine, job)
        task.urgent = True

        def read_reply(reply: Any) -> ExecutionResult:
            self._log([(database, job, reply)])
            return _execution_result(reply)

        return RunningStatement(task, reply, read_reply)

    def analyse_many(self, requests: Sequence[tuple[Any, ...]]) -> list[ExecutionResult]:
        """Read SQL text without running it, for `pipelines/sql/analyst.py`. Blocks."""
        no_locations = ("",)
        jobs: list[EngineJob] = []
        for request in requests:
            job = ("execute", no_locations, request, 1)
            jobs.append((ANALYSIS, job))
        replies = self._run(jobs)
        return list(map(_execution_result, replies))

    def verdicts(self, pairs: Sequence[Pair], equalities: Sequence[str]) -> list[Verdict]:
        """Decide on pairs under each equality and return the verdicts in the same order. Blocks.

        A gold query runs once and its result is kept; the same prediction for the same gold query runs once.
        """
        if any(pair.more for pair in pairs):
            return self._verdicts_of_several_golds(pairs, equalities)
        unique = list(dict.fromkeys(pairs))
        jobs = self._verdict_jobs(unique, equalities)
        replies = self._run(jobs)
        databases = [pair.database for pair in unique]
        bare_jobs = [job for _, job in jobs]
        self._log(zip(databases, bare_jobs, replies, strict=True))
        verdict_of: dict[Pair, Verdict] = {}
        for pair, job, reply in zip(unique, jobs, replies, strict=True):
            verdict = _verdict_of_reply(reply, equalities)
            if self._is_starved(pair, verdict):  # all others are done: it is asked again alone
                (second_reply,) = self._run([job])
                second_verdict = _verdict_of_reply(second_reply, equalities)
                verdict = self._settled(pair, second_verdict)
            verdict_of[pair] = self._proved(pair, verdict)
        return [verdict_of[pair] for pair in pairs]

    def _verdicts_of_several_golds(self, pairs: Sequence[Pair], equalities: Sequence[str]) -> list[Verdict]:
        single_pairs: list[Pair] = []
        for pair in pairs:
            single_pairs += pair.with_single_gold()
        decided = iter(self.verdicts(single_pairs, equalities))
        best = []
        for pair in pairs:
            n_golds = 1 + len(pair.more)
            verdicts = list(itertools.islice(decided, n_golds))
            best.append(_best(verdicts))
        return best

    async def decide(self, pair: Pair, equalities: Sequence[str]) -> Verdict:
        """Decide on one pair; calls of one event-loop tick share a batch."""
        if pair.more:
            decisions = [self.decide(single, equalities) for single in pair.with_single_gold()]
            verdicts = await asyncio.gather(*decisions)
            return _best(verdicts)
        ((engine, job),) = self._verdict_jobs([pair], equalities)
        _, pending_reply = self._ask(engine, job)
        reply = await pending_reply
        self._log([(pair.database, job, reply)])
        verdict = _verdict_of_reply(reply, equalities)
        if self._is_starved(pair, verdict):
            _, pending_reply = self._ask(engine, job)
            second_reply = await pending_reply
            second_verdict = _verdict_of_reply(second_reply, equalities)
            verdict = self._settled(pair, second_verdict)
        if any(EQUALITIES[name].proof for name in equalities):
            return await asyncio.to_thread(self._proved, pair, verdict)
        return verdict

    def _proved(self, pair: Pair, verdict: Verdict) -> Verdict:
        """The verdict in which an equality with a proof has its own score, where the proof succeeds."""
        if pair.database.engine != "sqlite" or verdict.error_class:
            return verdict
        for name in verdict.scores:
            proof = EQUALITIES[name].proof
            if not proof:
                continue
            prove = pkgutil.resolve_name(proof)
            score, script = prove(pair, self)
            verdict = replace(verdict, counterexample=script)
            if score is not None:
                scores = {**verdict.scores, name: score}
                verdict = replace(verdict, scores=scores)
        return verdict

    def _is_starved(self, pair: Pair, verdict: Verdict) -> bool:
        """Whether another statement may have brought a gold query to its limit: the query has run before, or a server,
        which others share, was never asked alone.
        """
        if verdict.gold is ExecutionStatus.OK:
            self._gold_ran[pair.database.location, pair.gold_sql, True] = True
            return False
        if verdict.gold is not ExecutionStatus.TIMEOUT and verdict.error_class != "memory_limit":
            return False
        is_server = bool(DIALECTS[pair.database.engine].is_server)
        return self._gold_ran.get(_gold_key(pair, verdict), is_server)

    def _settled(self, pair: Pair, verdict: Verdict) -> Verdict:
        """The verdict of a pair that was asked again. A gold query that ran before and reaches its limit twice counts
        as the prediction's doing: else a prediction that burdens the server would get out of being scored.
        """
        if not self._is_starved(pair, verdict):
            return verdict
        key = _gold_key(pair, verdict)
        if not self._gold_ran.get(key):
            self._gold_ran[key] = False
            return verdict
        return Verdict(verdict.scores, ExecutionStatus.TIMEOUT, ExecutionStatus.OK, "timeout", 0, 0)

    def _log(self, answered: Iterable[tuple[Database, Job, Any]]) -> None:
        """Audit the statements of jobs, each with its database and reply, but no kept results and no rewritten ones."""
        if self._audit is None:
            return
        entries = []
        for database, job, reply in answered:
            for role, sql, end in _statements_of(job, reply):
                if end is None:  # there is no prediction
                    continue
                status, error_class, n_rows, ms = end
                if ms is None:  # a cached result has no time
                    continue
                entry = AuditEntry(
                    database=database.id,
                    engine=database.engine,
                    role=role,
                    sql=sql,
                    ms=ms,
                    rows=n_rows,
                    outcome=status,
                    error_class=error_class,
                )
                entries.append(entry)
        self._audit.write(entries)

    def _execution(self, database: Database, sql: str, max_rows: int | None) -> Job:
        dialect = DIALECTS[database.engine]
        location = dialect.locate(database.location)
        return "execute", (location,), sql, max_rows or self._bounds.max_rows

    def _verdict_jobs(self, pairs: Iterable[Pair], equalities: Sequence[str]) -> list[EngineJob]:
        """The jobs of pairs, each with its engine; what follows from the database alone is found once for all pairs."""
        equality_names = tuple(equalities)
        locate = functools.cache(functools.partial(self._locations_and_names, equality_names))
        jobs: list[EngineJob] = []
        for pair in pairs:
            locations, names = locate(pair.database)
            gold_facts = _gold_facts(pair.gold_sql, pair.database.engine)
            job = ("verdict", locations, pair.gold_sql, pair.predicted_sql, equality_names, gold_facts, names)
            jobs.append((pair.database.engine, job))
        return jobs

    def _locations_and_names(self, equalities: Sequence[str], database: Database) -> tuple[tuple[str, ...], Any]:
        """The locations to ask, and the database's names if an equality compares by value units."""
        engine = DIALECTS[database.engine]
        rules = [EQUALITIES[name] for name in equalities]
        compares_outcomes = any(rule.by_outcome for rule in rules)
        if compares_outcomes and not engine.keeps_state:
            asked = ", ".join(equalities)
            raise DataError(
                f"an equality of {asked} compares what statements change, and {database.engine} lets none change "
                "anything",
                "Take the engine sqlite_stateful (`--engine`, or a data source that asks for it).",
            )
        location = engine.locate(database.location)
        locations: tuple[str, ...] = (location,)
        if any(rule.suite for rule in rules):
            locations = (location, *neighbours_of_suite(database, location))
        names = None
        if any(rule.by_units for rule in rules):
            names = self._names(database)
        return locations, names

    def _run(self, jobs: Sequence[EngineJob]) -> list[Any]:
        """Hand jobs over and drive the workers until all are answered."""
        replies: dict[int, Any] = {}  # key: the place of a job
        deliver = replies.__setitem__
        tasks = []
        for index, (engine, job) in enumerate(jobs):
            task = Task(job, deliver, index)
            tasks.append((engine, task))
        self._submit(tasks)
        while len(replies) < len(jobs):
            events = self._selector.select(TICK)
            self._pump(events)
        finished = []
        for index, (_, job) in enumerate(jobs):
            reply = self._as_reply(job, replies[index])
            finished.append(reply)
        return finished

    def _ask(self, engine: str, job: Job) -> tuple[Task, Awaitable[Any]]:
        """A job on its way, and its reply, which is to be awaited once; the event loop drives the workers meanwhile."""
        self._require_open()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(tag: object, reply: Any) -> None:  # in whatever thread drives the workers
            if asyncio._get_running_loop() is not loop:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits it any more
                    loop.call_soon_threadsafe(deliver, tag, reply)
            elif not future.done():
                future.set_result(reply)

        def beat() -> None:
            if loop in self._waiting and self._closer.alive:
                self._pump()
                loop.call_later(TICK, beat)

        async def reply() -> Any:
            try:
                return self._as_reply(job, await future)
            except asyncio.CancelledError:  # a statement ends when its caller leaves
                with self._lock:
                    task.done = True
                    if engine in self._pools and self._closer.alive:
                        self._pools[engine].cancel(task)
                raise
            finally:
                self._waiting[loop] -= 1
                if not self._waiting[loop]:
                    del self._waiting[loop]
                    if self._closer.alive:
                        loop.remove_reader(self._selector.fileno())

        task = Task(job, deliver, None)
        gathered = self._gathered.setdefault(loop, [])
        if not gathered:
            loop.call_soon(self._submit_gathered, loop)
        gathered.append((engine, task))
        self._waiting[loop] = self._waiting.get(loop, 0) + 1
        if self._waiting[loop] == 1:
            loop.add_reader(self._selector.fileno(), self._pump)
            loop.call_later(TICK, beat)
        return task, reply()

    def _require_open(self) -> None:
        if not self._closer.alive or os.getpid() != self._owner:
            raise DatabaseError("the SQL engine is closed, or belongs to the process that this one was forked from")

    def _submit_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        """Submit the tasks of an event loop's tick; a closed engine answers them as it does jobs under way."""
        tasks = self._gathered.pop(loop)
        try:
            self._submit(tasks)
        except DatabaseError:
            for _, task in tasks:
                task.finish(WorkerDeath(False, 0))

    def _submit(self, tasks: Sequence[tuple[str, Task]]) -> None:
        """Hand tasks to the pools of their engines."""
        with self._lock:
            self._require_open()
            by_engine: dict[str, list[Task]] = {}
            for engine, task in tasks:
                waiting = by_engine.setdefault(engine, [])
                if not task.done:
                    waiting.append(task)
            for engine, waiting in by_engine.items():
                pool = self._pool(engine)
                pool.submit(waiting)

    def _pool(self, engine: str) -> Pool:
        """The pool of an engine, which starts when it is first asked."""
        if engine not in self._pools:
            self._pools[engine] = Pool(engine, self._bounds, self._workers, self._selector, self._hidden)
        return self._pools[engine]

    def _pump(self, events: Sequence[tuple[selectors.SelectorKey, int]] | None = None) -> None:
        with self._lock:
            if events is None:
                events = self._selector.select(0)
            for key, mask in events:
                pool, slot = key.data
                pool.ready(slot, mask)
            for pool in self._pools.values():
                pool.tick()

    def _as_reply(self, job: Job, reply: Any) -> Any:
        """A worker's reply; for a worker that died, the reply that it would have given."""
        if not isinstance(reply, WorkerDeath):
            return reply
        status = ExecutionStatus.UNAVAILABLE
        error_class = "worker_died"
        message = "the process that ran the query died"
        if reply.timeout:
            status = ExecutionStatus.TIMEOUT
            error_class = "timeout"
            message = f"the query ran longer than {self._bounds.timeout_s:g} s"
        elif reply.proven:
            status = ExecutionStatus.ERROR
            message = "the query ended the process that ran it, twice"
        if job[0] != "verdict":
            return status.value, (), (), False, message, error_class, 0.0, 0
        end = (status.value, error_class, 0, 0.0)
        if reply.phase == 0:  # at the gold query
            return {}, end, None
        return {}, (OK, None, 0, None), end


GoldKey = tuple[str, str, bool]  # location, text, and whether it is as given (or rewritten)


def _gold_key(pair: Pair, verdict: Verdict) -> GoldKey:
    """The key of the gold query that a verdict was reached with: without a prediction it ran as given."""
    return pair.database.location, pair.gold_sql, verdict.predicted is None


def _execution_result(reply: Any) -> ExecutionResult:
    status, columns, rows, truncated, error, error_class, ms, work = reply
    return ExecutionResult(
        status=_STATUS[status],
        columns=tuple(columns),
        rows=tuple(rows),
        truncated=truncated,
        error=error,
        error_class=error_class,
        elapsed_ms=ms,
        work=work,
    )


End = tuple[str, str | None, int, float | None]  # status, error class, rows, milliseconds


def _statements_of(job: Job, reply: Any) -> list[tuple[str, str, End | None]]:
    """The role, the text and the end of each statement of a job."""
    if job[0] == "verdict":
        _, _, gold_sql, predicted_sql, *_ = job
        _, gold_end, predicted_end = reply
        return [("gold", gold_sql, gold_end), ("prediction", predicted_sql, predicted_end)]
    status, _, rows, _, _, error_class, ms, _ = reply
    _, _, sql, _ = job
    end = (status, error_class, len(rows), ms)
    return [("query", sql, end)]


def _verdict_of_reply(reply: Any, equalities: Sequence[str]) -> Verdict:
    scores, gold, predicted = reply
    gold_status, gold_error, gold_rows, _ = gold
    nothing = dict.fromkeys(equalities, 0.0)
    if predicted is None:
        return Verdict(nothing, None, _STATUS[gold_status], gold_error, 0, gold_rows)
    predicted_status, predicted_error, n_rows, _ = predicted
    return Verdict(
        scores=scores or nothing,
        predicted=_STATUS[predicted_status],
        gold=_STATUS[gold_status],
        error_class=gold_error or predicted_error,
        n_rows=n_rows,
        gold_rows=gold_rows,
    )


def _best(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a prediction for several gold queries: under each equality the best score; the rest is that of
    the first gold query that it matches, else of the first that gave a result.
    """
    sound = [verdict for verdict in verdicts if not verdict.broken]
    if not sound:
        sound = list(verdicts)
    base = sound[0]
    for verdict in sound:
        if 1.0 in verdict.scores.values():
            base = verdict
            break
    scores: dict[str, float] = {}
    counterexample = ""
    for name in base.scores:
        scores[name] = max(verdict.scores[name] for verdict in sound)
        if EQUALITIES[name].proof and not scores[name]:
            counterexample = base.counterexample
    failed_golds = 0
    if base.gold is ExecutionStatus.OK:
        failed_golds = sum(verdict.gold is not ExecutionStatus.OK for verdict in verdicts)
    return replace(base, scores=scores, counterexample=counterexample, failed_golds=failed_golds)


def neighbours_of_suite(database: Database, location: str) -> list[str]:
    """The other databases of a test suite: all `.sqlite` files beside the database (Zhong et al. 2020), in the official
    layout, in which the directory bears the database's name; elsewhere neighbours are strangers.
    """
    folder = os.path.dirname(location)
    if database.engine != "sqlite" or os.path.basename(folder) != database.id:
        return []
    try:
        changed_ns = os.stat(folder).st_mtime_ns
        files = _suite_files(folder, changed_ns)
    except OSError:
        return []
    return [path for path in files if path != location]


@functools.lru_cache(4096)
def _suite_files(folder: str, changed_ns: int) -> tuple[str, ...]:
    paths = []
    for name in sorted(os.listdir(folder)):
        if ".sqlite" in name and not name.endswith(("-wal", "-shm", "-journal")):
            paths.append(os.path.join(folder, name))
    return tuple(paths)


@functools.lru_cache(4096)
def _gold_facts(gold_sql: str, engine: str) -> tuple[bool, bool]:
    """The fields of `compare.Gold` that the text of the gold query decides."""
    ordered = asks_for_order(gold_sql, engine)
    mentions_order = "order by" in gold_sql.lower()
    return ordered, mentions_order


def _close_pools(selector: selectors.BaseSelector, pools: dict[str, Pool], owner: int) -> None:
    if os.getpid() != owner:  # a forked copy must not end its parent's workers
        return
    for pool in pools.values():
        pool.close()
    selector.close()
