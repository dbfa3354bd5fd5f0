"""The base of all dialects in a worker: a session that runs one statement at a time and never raises for a bad one.

Only the standard library and what needs no more are imported here: a worker must start in some 30 ms.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import decimal
import functools
import json
import marshal
import math
import os
import re
import signal
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from time import perf_counter
from typing import Any, NamedTuple

from pipelines.sql.splitter import asks_for_order

OK = "ok"
ERROR = "error"
REFUSED = "refused"
TIMEOUT = "timeout"
LIMIT = "limit"
UNAVAILABLE = "unavailable"
# Classes of failures that no statement can bring about: others hold the database, or took it away.
EXTERNAL_FAULTS = frozenset(("database_locked", "database_recovering", "database_missing"))
FIRST_FETCH = 64  # rows of the first chunk of a result
MAX_MESSAGE_CHARS = 500
# Factors of the limit: the dialect's clock has its chance before the hard timer.
TIMER_GRACE = 1.05
TIMER_SLACK = 0.05
CATALOGUE_S = 1.0  # seconds after which the catalogue of a server is asked again (`DatabaseSession.renewed_s`)

Row = tuple[Any, ...]


class Bounds(NamedTuple):
    """The limits of a worker, as numbers (see `pipelines.sql.engine.Limits`)."""

    timeout_s: float
    max_rows: int
    max_bytes: int
    memory_mb: int


class StatementTimer:
    """Ends this process, also inside a native function that never returns, if a statement is past its limit.

    A system call for each statement would cost some 1 % of Spider's queries, so a timer that was set a moment ago is
    left to serve the next statement: it fires at 1.05 to 1.1 times the limit.
    """

    def __init__(self, worked: Callable[[int], None]) -> None:
        self.worked = worked  # is called now and then with the work of the running statement (see `RawResult.work`)
        self._set_at = 0.0
        self._seconds = 0.0

    def arm(self, seconds: float) -> None:
        """A statement starts that may take this long; 0 disarms the timer."""
        now = perf_counter()
        if seconds != self._seconds or now - self._set_at > seconds * TIMER_SLACK:
            fires_in = seconds * (TIMER_GRACE + TIMER_SLACK)
            signal.setitimer(signal.ITIMER_REAL, fires_in)
            self._set_at = now
            self._seconds = seconds


class RawResult(NamedTuple):
    """The result of a statement in a worker: `ExecutionResult` without its imports."""

    status: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Any, ...]] = ()
    truncated: bool = False
    error: str | None = None
    error_class: str | None = None
    ms: float = 0.0
    work: int = 0  # Cost in thousands of virtual machine steps, whatever the load; 0 if the engine counts none.


class OpenFailure(Exception):
    """A database cannot be opened. Its arguments are the error class, a short stable word, and the message, which names
    no path and no host.
    """


UNREACHED = ("database_missing", "the database server cannot be reached, or turned us away")


class DatabaseSession(abc.ABC):
    """An open database in a worker.

    A dialect defines how it answers a statement, what its driver's exceptions mean, and whether the database still
    works. What follows from that is decided here, once for all dialects: one clock runs from the first look at the text
    to the last row, anew after a new connection, and nothing that a driver raises gets past `run`.
    """

    engine = ""  # Name of the engine, whose comments its statements have.
    counts_work = False  # True if its results carry their cost (see `RawResult.work`).
    takes_bare_text = False  # True if official scripts hand its statements to a driver that takes nothing behind them.
    has_plain_values = False  # True if its driver gives no values but those that all dialects give (see `plain_value`).
    hidden: Hidden | None = None  # Names that no statement may read.
    # Seconds after which the closure of what is hidden is computed again, for somebody may make a view while the
    # session is open. None for a file, which is opened again when it changes.
    renewed_s: float | None = None
    _last_closure: tuple[Hidden, float] | None = None  # Names to hide, and when the catalogue was last asked for more.
    _connection: Any = None  # Connection of the driver; None if the next statement opens one.
    work = 0  # Work of the running statement so far (see `RawResult.work`).

    def __init__(self, location: str, bounds: Bounds, clock: StatementTimer) -> None:
        self._location = location
        self.bounds = bounds
        self.clock = clock
        self.deadline = 0.0  # end of the running statement's time, as `time.perf_counter` counts
        self._connection = self._connect()

    def _connect(self) -> Any:
        """Open the database; OpenFailure if it cannot be opened."""
        return None

    def start_clock(self) -> float:
        """The running statement has all of its limit from now on: what it took to reconnect is not its own time."""
        start = perf_counter()
        self.deadline = start + self.bounds.timeout_s
        self.work = 0
        self.clock.arm(self.bounds.timeout_s)
        return start

    def run(self, sql: str, max_rows: int) -> RawResult:
        """Run one statement; every failure is a `RawResult` with its status and class, and names nothing hidden."""
        if self._last_closure is not None:
            try:
                self._renew_closure()
            except OpenFailure as error:
                return failure(UNAVAILABLE, *error.args)
        start = self.start_clock()
        try:
            raw = self.answer(sql, max_rows)
        except OpenFailure as error:
            raw = failure(UNAVAILABLE, *error.args)
        except MemoryError:
            raw = failure(LIMIT, "memory_limit", "the query needs more memory than it may have")
        except Exception as error:  # each driver has an error tree of its own, and raises from outside it too
            raw = self._explained(error)
        ms = 0.0
        if raw.status == OK:
            ms = (perf_counter() - start) * 1000
        # `_replace` takes twice the time of the constructor: 1 % of a short query.
        raw = RawResult(raw.status, raw.columns, raw.rows, raw.truncated, raw.error, raw.error_class, ms, self.work)
        if self.hidden is None:
            return raw
        return self.hidden.without_names(in_shown_order(sql, raw, self.engine))

    def _renew_closure(self) -> None:
        """Compute the closure of what is hidden again if it is old."""
        if self._last_closure is None or self.renewed_s is None:
            return
        hidden, closed_at = self._last_closure
        if perf_counter() - closed_at > self.renewed_s:
            self.clock.arm(self.bounds.timeout_s)
            self.hide(hidden)

    def _explained(self, error: Exception) -> RawResult:
        """The failure of a statement that an exception of the driver stands for."""
        explanation = self.explain(error)
        if explanation is None:
            explanation = UNAVAILABLE, "internal", f"the query could not be run ({type(error).__name__})"
        raw = failure(*explanation)
        if raw.status == TIMEOUT:
            return failure(TIMEOUT, "timeout", f"the query ran longer than {self.bounds.timeout_s:g} s")
        # A failure of the engine is the statement's own if the database still works: else a statement that makes its
        # engine fail would get out of being scored.
        if raw.status == UNAVAILABLE and raw.error_class not in EXTERNAL_FAULTS:
            self.clock.arm(self.bounds.timeout_s)
            with contextlib.suppress(Exception):  # whatever the driver raises: the database does not work
                self.probe()
                return failure(ERROR, "engine_failure", "the database engine failed at this query")
        return raw

    def result(
        self, cursor: Any, max_rows: int, fetchmany: Callable[[int], Sequence[Sequence[Any]]] | None = None
    ) -> RawResult:
        """The columns and rows of a cursor that has run a query, within the limits of a result."""
        fetch_rows = fetchmany or cursor.fetchmany
        rows, truncated = fetch(fetch_rows, max_rows, self.bounds.max_bytes, self.has_plain_values)
        columns = [item[0] for item in cursor.description or ()]
        return RawResult(OK, tuple(columns), rows, truncated)

    @abc.abstractmethod
    def answer(self, sql: str, max_rows: int) -> RawResult:
        """Run one statement. What it changes in the session must be undone before this returns or raises."""

    @abc.abstractmethod
    def explain(self, error: Exception) -> tuple[str, str, str] | None:
        """The status, error class and message of an exception, by its type and result code; None if it is not the
        driver's. Its text, of which a statement can choose parts, may only pick a name among the errors of a statement.
        """

    @abc.abstractmethod
    def probe(self) -> None:
        """Run a trivial query, if need be on a new connection; raises if the database does not work now."""

    def hide(self, hidden: Hidden) -> None:
        """Refuse from here on every statement that reads these names, or values that the engine derives from them."""
        try:
            self.hidden = self.closure(hidden)
        except OpenFailure:
            raise
        except Exception as error:  # each driver has an error tree of its own
            raise OpenFailure("database_unreadable", f"its views cannot be read ({type(error).__name__})") from None
        self._last_closure = hidden, perf_counter()

    def closure(self, hidden: Hidden) -> Hidden:
        """The hidden names with the views that read them and whatever else holds the same values."""
        raise OpenFailure("cannot_hide", "nothing can be hidden from statements of this engine")

    def hold(self, on: bool) -> None:  # noqa: B027  optional
        """Several statements follow, or are done: acquire or release what they can share, such as a lock."""

    def cold_ms(self, sql: str, max_rows: int, timeout_s: float) -> float | None:
        """The milliseconds of a statement, all rows fetched, on a connection that has run nothing; None if it fails.

        The default is this connection, for engines that take longer to open one than for most queries.
        """
        raw = self.run(sql, max_rows)
        if raw.status != OK:
            return None
        return raw.ms

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            with contextlib.suppress(Exception):  # it may be shut already
                self._connection.close()
            self._connection = None


class _Watchdog:
    """A thread of this process, which interrupts the running statement at its limit."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running: tuple[float, Callable[[], object], list[float]] | None = None
        try:
            threading.Thread(target=self._watch, daemon=True).start()
        except RuntimeError:  # there is no room for its stack
            raise MemoryError from None

    def _watch(self) -> None:
        with self.changed:
            while True:
                if self.running is None:
                    self.changed.wait()
                    continue
                deadline, interrupt, calls = self.running
                remaining_s = deadline - perf_counter()
                if remaining_s > 0:
                    self.changed.wait(remaining_s)
                    continue
                calls.append(perf_counter())
                with contextlib.suppress(Exception):  # the driver's own: the timer of the worker comes next
                    interrupt()
                self.running = None


_watchdog = functools.cache(_Watchdog)


@contextlib.contextmanager
def interrupted_at(deadline: float, interrupt: Callable[[], object]) -> Iterator[list[float]]:
    """Call `interrupt` from another thread if the block runs past the deadline; it never runs after the block. After
    the block the yielded list holds the time of the call, if there was one.
    """
    calls: list[float] = []
    watch = _watchdog()
    with watch.changed:
        watch.running = deadline, interrupt, calls
        watch.changed.notify()
    try:
        yield calls
    finally:
        with watch.changed:  # the thread holds it during a call
            watch.running = None


def failure(status: str, error_class: str, message: str) -> RawResult:
    return RawResult(status, error=message[:MAX_MESSAGE_CHARS], error_class=error_class)


def untruncated(raw: RawResult) -> RawResult:
    """The same result, or a failure if rows were cut off: a verdict needs all of them."""
    if raw.truncated:
        return failure(LIMIT, "result_limit", "the result is larger than a verdict may read")
    return raw


def fetch(
    fetchmany: Callable[[int], Sequence[Sequence[Any]]], max_rows: int, max_bytes: int, is_plain: bool = False
) -> tuple[list[Row], bool]:
    """At most `max_rows` rows and about `max_bytes` bytes of plain values, and whether more were left.

    Rows come in growing chunks; the size of a chunk is that of its marshalled form, the cheapest true measure there is
    (some 15 ns a cell, where asking each cell its length would cost as much as fetching it).
    """
    rows: list[Row] = []
    size = 0
    step = FIRST_FETCH
    while True:
        chunk: Any = fetchmany(min(step, max_rows + 1 - len(rows)))
        if not is_plain:
            chunk = list(map(_plain_row, chunk))
        if not chunk:
            return rows, False
        chunk_size = len(marshal.dumps(chunk, 2))
        if size + chunk_size > max_bytes:
            rows += _first_rows_within(chunk, max_bytes - size)
            return rows, True
        size += chunk_size
        rows += chunk
        if len(rows) > max_rows:
            del rows[max_rows:]
            return rows, True
        if len(chunk) < min(step, max_rows + 1):
            return rows, False
        step = min(step * 4, 4096)


def _plain_row(values: Sequence[Any]) -> Row:
    row = tuple(values)
    if PLAIN.issuperset(map(type, row)):
        return row
    return tuple(map(plain_value, row))


def _first_rows_within(rows: Sequence[Row], max_bytes: int) -> Iterator[Row]:
    """The first rows of a chunk that fit."""
    left = max_bytes
    for row in rows:
        left -= len(marshal.dumps(row, 2))
        if left < 0:
            return
        yield row


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


# Values of engines with rich types, as the plain ones that all dialects give: int, float, text, bytes, NULL.

PLAIN = frozenset((str, bytes, type(None)))
# An integer beyond this is text: Python refuses to write one of more than 4,300 digits, and no engine computes with it
# faster than with text. DuckDB's largest, UHUGEINT, is still a number.
LARGEST = 1 << 128
MAX_DEPTH = 100  # lists in lists
FLOAT_DIGITS = 308  # digits before the point of the largest float


def plain_value(value: Any) -> Any:
    """A value as SQLite would hold it: truth as 1 and 0, dates as ISO text, lists and structs as JSON.

    NaN is the text "NaN": as a number it would be unequal to itself, and a right answer unequal to the gold.
    """
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is int:
        return _plain_integer(value)
    if kind is float:
        return "NaN" if math.isnan(value) else value
    if kind is bool:
        return int(value)
    if kind is decimal.Decimal:
        return plain_number(value)
    if isinstance(value, datetime.datetime):
        return value.isoformat(sep=" ")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (list, tuple, Mapping, set, frozenset)):
        return json.dumps(_nested(value, MAX_DEPTH), ensure_ascii=False)
    return str(value)


def _plain_integer(value: int) -> int | str:
    if -LARGEST < value < LARGEST:
        return value
    return format(decimal.Decimal(value), "f")


def plain_number(value: decimal.Decimal) -> int | float | str:
    """A number as SQLite computes with it: an int if it is declared whole, else a float; text if it is beyond both."""
    if value.is_nan():
        return "NaN"
    if not value.is_finite():
        return float(value)
    is_whole = value.as_tuple().exponent == 0
    if is_whole and -LARGEST < value < LARGEST:
        return int(value)
    if not is_whole and value.adjusted() < FLOAT_DIGITS:
        return float(value)
    return format(value, "f")


def _nested(value: Any, depth: int) -> Any:
    """A list or struct in which all values are JSON's."""
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        fields = {}
        for key, item in value.items():
            name = key if isinstance(key, str) else str(plain_value(key))
            fields[name] = _nested(item, depth - 1)
        return fields
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_nested(item, depth - 1) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, decimal.Decimal):
        return str(value)
    item = plain_value(value)
    if isinstance(item, bytes) or (isinstance(item, float) and math.isinf(item)):
        return str(item)
    return item


# Hidden tables and columns of a database: no statement may read them, and no message may name them.

HIDDEN_REFUSAL = "the query reads what is not shown here: name tables and columns of the schema, without a star"
LOCAL_HOSTS = ("", "127.0.0.1", "::1", "localhost")
DEFAULT_PORTS = ("5432", "3306")  # PostgreSQL's and MySQL's
CONNINFO_PAIR = re.compile(r"\s*(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|[^\s']*)")
CONNINFO = re.compile(rf"(?:{CONNINFO_PAIR.pattern})+\s*")
# Tables, and columns by table, as they are sent to a worker.
HiddenNames = tuple[tuple[str, ...], Mapping[str, tuple[str, ...]]]


def fold(name: str) -> str:
    """A name without case and accents: names that some engine takes for one are equal."""
    signs = unicodedata.normalize("NFKD", name)
    bare_signs = [sign for sign in signs if not unicodedata.combining(sign)]
    return "".join(bare_signs).casefold()


def identity(location: str) -> str:
    """The identity of a database, however its location is written: a file behind links, a server's by any user.

    Of an address it is "//host:port/database", without a default port; an address without a database gives the prefix
    of those of its server.
    """
    host = ""
    port = ""
    name = ""
    try:
        if "://" in location:
            host, port, name, options = _address_fields(location)
        else:  # libpq's other form: host=... dbname=...
            options = _conninfo_options(location)
            if not options.keys() & {"host", "hostaddr", "dbname"}:
                return os.path.realpath(os.path.expanduser(location))
    except ValueError:  # such as a port that is not a number, or a path with a zero byte: it cannot be opened
        return location
    # The reading of libpq: an option goes before the same part of the address, and the first of several hosts counts.
    hosts = options.get("host") or options.get("hostaddr") or host
    ports = options.get("port", "")
    first_host = hosts.partition(",")[0].lower()
    if first_host in LOCAL_HOSTS or first_host.startswith("/"):  # "/": the folder of a Unix socket
        first_host = "localhost"
    first_port = ports.partition(",")[0]
    if first_port:
        port = first_port
    if port in DEFAULT_PORTS:
        port = ""
    name = options.get("dbname") or name
    return f"//{first_host}:{port}/{name}"


def _address_fields(address: str) -> tuple[str, str, str, dict[str, str]]:
    """The first host, the port, the database and the options of an address; ValueError for a wrong one."""
    from urllib.parse import parse_qsl, unquote, urlsplit

    url = urlsplit(address)
    servers = url.netloc.rpartition("@")[2]
    first_server = servers.partition(",")[0]
    server = urlsplit(f"//{first_server}")
    host = unquote(server.hostname or "")
    port = str(server.port or "")
    name = unquote(url.path).strip("/")
    options = dict(parse_qsl(url.query))
    return host, port, name, options


def _conninfo_options(location: str) -> dict[str, str]:
    """The options of libpq's form `host=... dbname=...`; {} for anything else."""
    if not CONNINFO.fullmatch(location):
        return {}
    options: dict[str, str] = {}
    for pair in CONNINFO_PAIR.finditer(location):
        options[pair[1]] = pair[2].strip("'")
    return options


def in_shown_order(sql: str, raw: RawResult, engine: str) -> RawResult:
    """The same result with its rows in an order of their own values, if the statement asks for none: the engine's tells
    of hidden keys and indices.
    """
    if not raw.rows or asks_for_order(sql, engine):
        return raw
    rows = sorted(raw.rows, key=_row_sort_key)
    return raw._replace(rows=rows)


def _row_sort_key(row: Row) -> list[tuple[str, Any]]:
    return list(map(_sort_key, row))


def _sort_key(value: Any) -> tuple[str, Any]:
    """A plain value, comparable to those of other types."""
    if isinstance(value, (int, float)):
        return "number", value
    kind = type(value).__name__
    if value is None:
        return kind, 0
    return kind, value


class StatementNames(NamedTuple):
    """The names in a statement, or in a part of one, as its engine's parser reads it."""

    relations: frozenset[str]  # Tables and views that it reads, or may read.
    # Pairs (name, relation): names under which it may take a relation's row as a value; relation "" is a subquery's.
    rows: frozenset[tuple[str, str]]
    uses: frozenset[tuple[str, ...]]  # Every other name with its qualifiers: a column's, a row's, or neither's.
    unnamed: bool  # True if it reads columns that it does not name.
    catalogue: bool  # True if it reads the engine's own description of the tables.
    types: frozenset[str] = frozenset()  # Types that it casts to, or whose values it could tell.
    functions: frozenset[str] = frozenset()  # Functions that it calls.
    # Pairs (table, column) of all that it reads, also through views, where the engine itself says so, and (table, "");
    # `relations` are views then.
    reads: frozenset[tuple[str, str]] | None = None
    columns: frozenset[tuple[str, str]] = frozenset()  # Pairs (relation, column) that it names with a table, or may.
    starred: frozenset[str] = frozenset()  # Relations whose columns it reads all.
    outer: frozenset[str] = frozenset()  # Relations of the queries around it, whose columns it may name.
    parts: tuple[StatementNames, ...] = ()  # Queries in it, each with names of its own.


class Hidden(NamedTuple):
    """Hidden names, folded (see `fold`)."""

    tables: frozenset[str] = frozenset()
    columns: Mapping[str, frozenset[str]] = {}  # Hidden columns by table.
    functions: frozenset[str] = frozenset()  # Functions of the database: a call of one does not show its reads.
    types: frozenset[str] = frozenset()  # Types of hidden columns alone, and of a hidden table's rows.
    # All columns of each table, as they are written, for an engine that reads t.f as f(t).
    attributes: Mapping[str, frozenset[str]] | None = None

    @classmethod
    def of(cls, names_hidden: HiddenNames) -> Hidden:
        tables, columns = names_hidden
        by_table: dict[str, frozenset[str]] = {}
        for table, names in columns.items():
            if names:
                by_table[fold(table)] = frozenset(map(fold, names))
        return cls(frozenset(map(fold, tables)), by_table)

    def hides(self, table: str, column: str) -> bool:
        """Whether a column may not be read; column "" asks for the table itself."""
        name = fold(table)
        if name in self.tables:
            return True
        hidden_columns = self.columns.get(name, frozenset())
        return fold(column) in hidden_columns

    def extended(
        self,
        tables: Iterable[str] = (),
        computed: Iterable[Sequence[str]] = (),
        functions: Iterable[str] = (),
        types: Iterable[str] = (),
    ) -> Hidden:
        """The same with more tables, with the columns computed from others of their row, as (table, column), in tables
        with hidden columns, with functions of the database's own, which no statement may call, and with types.
        """
        columns = dict(self.columns)
        for table, column in computed:
            name = fold(table)
            if name in columns:
                columns[name] |= {fold(column)}
        return self._replace(
            tables=self.tables.union(map(fold, tables)),
            columns=columns,
            functions=self.functions.union(map(fold, functions)),
            types=self.types.union(map(fold, types)),
        )

    def is_read_by(self, statement: StatementNames) -> bool:
        """Whether a statement reads something hidden, or could."""
        calls = self._calls_of_rows(statement)
        if statement.catalogue or self._is_named_in(statement, calls):
            return True
        if any(self.is_read_by(part) for part in statement.parts):
            return True
        if statement.reads is not None:
            return self._hides_any(statement.reads)
        # Tables that have hidden columns are left.
        relations = frozenset(map(fold, statement.relations))
        veiled = relations.union(map(fold, statement.outer)) & self.columns.keys()
        if not veiled:
            return False
        if statement.unnamed or not veiled.isdisjoint(map(fold, statement.starred)):
            return True
        if self._hides_any(statement.columns):
            return True
        if self._is_veiled_row_read(statement, veiled, calls):
            return True
        return self._is_veiled_column_read(statement, veiled, relations)

    def _is_named_in(self, statement: StatementNames, calls: Set[tuple[str, str]]) -> bool:
        """Whether a statement names a hidden table, function or type."""
        if not self.tables.isdisjoint(map(fold, statement.relations)):
            return True
        if not self.functions.isdisjoint(map(fold, statement.functions)):
            return True
        if not self.functions.isdisjoint(function for _, function in calls):
            return True
        return not self.types.isdisjoint(map(fold, statement.types))

    def _hides_any(self, columns: Iterable[tuple[str, str]]) -> bool:
        return any(self.hides(table, column) for table, column in columns)

    def _calls_of_rows(self, statement: StatementNames) -> set[tuple[str, str]]:
        """The uses t.f, as (row, function), that may be a call f(t) in an engine that reads them so."""
        if self.attributes is None:
            return set()
        columns_of: dict[str, frozenset[str]] = {}  # columns that each name of a row certainly has
        for row, relation in statement.rows:
            name = fold(row)
            columns = self.attributes.get(fold(relation), frozenset())
            columns_of[name] = columns & columns_of.get(name, columns)
        calls: set[tuple[str, str]] = set()
        for use in statement.uses:
            if len(use) < 2:
                continue
            *_, row, function = use
            if function not in columns_of.get(fold(row), ()):
                calls.add((fold(row), fold(function)))
        return calls

    def _is_veiled_row_read(self, statement: StatementNames, veiled: Set[str], calls: Set[tuple[str, str]]) -> bool:
        """Whether a statement may take the row of a table with hidden columns as a value."""
        values = {row for row, _ in calls}
        values.update(fold(use[-1]) for use in statement.uses)
        veiled_rows = {fold(row) for row, relation in statement.rows if fold(relation) in veiled}
        return not veiled_rows.isdisjoint(values)

    def _is_veiled_column_read(self, statement: StatementNames, veiled: Set[str], relations: Set[str]) -> bool:
        """Whether a name of a statement may be a hidden column of one of the tables that have some."""
        relations_of: dict[str, list[str]] = {}  # key: the name of a row
        for row, relation in statement.rows:
            with_name = relations_of.setdefault(fold(row), [])
            with_name.append(fold(relation))
        bare: set[str] = set()  # names that may stand for a column of any table
        for use in statement.uses:
            *qualifiers, name = map(fold, use)
            qualified: list[str] = []
            if qualifiers:
                qualified = relations_of.get(qualifiers[-1], [])
            for relation in qualified:
                if relation in veiled and name in self.columns[relation]:
                    return True
            bare.update(qualifiers)
            if not qualified:
                bare.add(name)
        return any(self._is_column_of(table, bare, relations) for table in veiled)

    def _is_column_of(self, table: str, names: set[str], relations: Set[str]) -> bool:
        """Whether names without a qualifier may be hidden columns of a table: those of the query's own `relations` go
        before those of the queries around it.
        """
        hidden = names & self.columns[table]
        if table in relations or not hidden:
            return bool(hidden)
        if self.attributes is None:
            return True
        nearer: set[str] = set()
        for relation in relations:
            columns = self.attributes.get(relation, ())
            nearer.update(map(fold, columns))
        return not hidden <= nearer

    def with_views(self, views: Iterable[tuple[str, StatementNames | None]]) -> Hidden:
        """The same with all views that read any of it, or a view that does; they are of several schemas, so a name may
        come more than once. A view is hidden too if its query is not understood (None).
        """
        unreadable: list[str] = []
        bodies: list[tuple[str, StatementNames]] = []
        for name, body in views:
            if body is None:
                unreadable.append(name)
            else:
                bodies.append((name, body))
        hidden = self.extended(unreadable)
        while True:
            readers = [name for name, body in bodies if hidden.is_read_by(body)]
            if hidden.tables.issuperset(map(fold, readers)):
                return hidden
            hidden = hidden.extended(readers)

    def refusal(self, statement: StatementNames) -> RawResult | None:
        if not self.is_read_by(statement):
            return None
        return failure(REFUSED, "hidden", HIDDEN_REFUSAL)

    def without_names(self, raw: RawResult) -> RawResult:
        """The same failure without hidden names: engines help with names that are like the wrong one."""
        if raw.status == OK or raw.error is None:
            return raw
        names = self.tables.union(*self.columns.values())
        any_name = "|".join(map(re.escape, names))
        if not re.search(rf"(?<!\w)(?:{any_name})(?!\w)", fold(raw.error)):
            return raw
        if raw.status in (REFUSED, ERROR) and raw.error_class == "not_authorized":
            return failure(REFUSED, "hidden", HIDDEN_REFUSAL)
        message = str(raw.error_class).replace("_", " ")
        return raw._replace(error=message)
