"""SQLite: a read-only connection behind an authorizer allow-list, a heap limit and a progress clock.

A read-only connection alone is not a sandbox: ATTACH and VACUUM INTO still write files, PRAGMA database_list still
tells paths, load_extension still runs code. So every action that SQLite reports at prepare time is refused unless
listed here.

Statements that change data run on a private copy in memory, which ends with the script (`StatefulSession`): the
read-only connection reads the file into it, and runs nothing else. So a statement may write as it likes: it has no
connection to the file, the worker may make no file larger, and its changes are gone with its answer. An episode's later
statements must meet those of its earlier ones, so the script of a later turn begins with the texts of the earlier turns
that may have written; a turn that failed is not among them and has left nothing behind.
"""

import contextlib
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import quote

from pipelines.core.registry import dialect
from pipelines.sql.dialects import base
from pipelines.sql.dialects.base import ERROR, LIMIT, OK, REFUSED, TIMEOUT, UNAVAILABLE
from pipelines.sql.dialects.dialect import SAMPLED_ROWS, Catalog, Dialect, ViewLimitExceeded
from pipelines.sql.lexical import ORDERED, OUTCOME, TURN_SEPARATOR, blank_comments
from pipelines.sql.splitter import MAX_STATEMENTS, statement_texts

# The actions that SQLite's authorizer allows, and the meaning of SQLite's errors.

# Action codes of sqlite3_set_authorizer; the module names only some of them before Python 3.12.
PRAGMA = 19
READ = 20
SELECT = 21
UPDATE = 23
FUNCTION = 31
RECURSIVE = 33
ALLOW = sqlite3.SQLITE_OK
DENY = sqlite3.SQLITE_DENY

# Pragmas that only read; a full-text table asks data_version.
_PRAGMAS = """
    collation_list data_version foreign_key_list index_info index_list index_xinfo table_info table_list table_xinfo
"""
PRAGMAS = frozenset(_PRAGMAS.split())
# Eponymous virtual tables that show raw pages, prepared statements or paths instead of data.
_HIDDEN = "dbstat sqlite_dbpage sqlite_dbdata sqlite_dbptr sqlite_stmt bytecode tables_used"
HIDDEN_TABLES = frozenset(_HIDDEN.split())
_FUNCTIONS = """
    abs char coalesce concat concat_ws format glob hex ifnull iif if instr length like likelihood likely lower ltrim
    max min nullif octet_length printf quote random randomblob replace round rtrim sign soundex substr substring trim
    typeof unhex unicode unlikely upper zeroblob changes total_changes last_insert_rowid
    date time datetime julianday unixepoch strftime timediff current_date current_time current_timestamp
    avg count group_concat string_agg sum total median percentile percentile_cont percentile_disc
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value nth_value
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10 log2 mod pi pow power
    radians sin sinh sqrt tan tanh trunc
    json json_array json_array_length json_error_position json_extract json_insert json_object json_patch json_pretty
    json_quote json_remove json_replace json_set json_type json_valid json_group_array json_group_object -> ->>
    match highlight snippet bm25 offsets matchinfo
"""
FUNCTIONS = frozenset(_FUNCTIONS.split())
MAX_SQL = 1_000_000
# Status and error class by the name of the result code.
_CODES = {
    "SQLITE_INTERRUPT": (TIMEOUT, "timeout"),
    "SQLITE_AUTH": (REFUSED, "not_authorized"),
    "SQLITE_READONLY": (REFUSED, "not_authorized"),
    "SQLITE_TOOBIG": (LIMIT, "cell_limit"),
    "SQLITE_NOMEM": (LIMIT, "memory_limit"),
    "SQLITE_BUSY": (UNAVAILABLE, "database_locked"),
    "SQLITE_LOCKED": (UNAVAILABLE, "database_locked"),
    "SQLITE_READONLY_ROLLBACK": (UNAVAILABLE, "database_recovering"),
    "SQLITE_READONLY_RECOVERY": (UNAVAILABLE, "database_recovering"),
    "SQLITE_READONLY_CANTINIT": (UNAVAILABLE, "database_recovering"),
    "SQLITE_CANTOPEN": (UNAVAILABLE, "database_unreadable"),
    "SQLITE_NOTADB": (UNAVAILABLE, "database_corrupt"),
    "SQLITE_CORRUPT": (UNAVAILABLE, "database_corrupt"),
    "SQLITE_IOERR": (UNAVAILABLE, "disk"),
    "SQLITE_FULL": (UNAVAILABLE, "disk"),
}
# Error classes by the message: all of these have the one code SQLITE_ERROR.
_MISTAKES = (
    ("no such table", "no_such_table"),
    ("no such column", "no_such_column"),
    ("no such function", "no_such_function"),
    ("ambiguous column", "ambiguous_column"),
    ("misuse of", "misuse"),
    ("wrong number of arguments", "wrong_arguments"),
    ("too many", "too_complex"),
    ("too large", "too_complex"),
    ("stack overflow", "too_complex"),
    ("syntax error", "syntax"),
    ("unrecognized token", "syntax"),
    ("incomplete input", "syntax"),
)
# SQLite refuses these before it asks the authorizer.
_PROTECTED = ("may not be modified", "unsafe use of", "is prohibited", "vtable constructor failed")


def guard(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's authorizer callback: whether a prepared statement may do this."""
    if action == READ:
        return DENY if first in HIDDEN_TABLES else ALLOW
    if action in (SELECT, RECURSIVE):
        return ALLOW
    if action == FUNCTION:
        return ALLOW if second is not None and second.lower() in FUNCTIONS else DENY
    if action == PRAGMA:
        return ALLOW if first is not None and first.lower() in PRAGMAS else DENY
    return DENY


def general_code(error: Exception) -> str:
    """The name of SQLite's primary result code: SQLITE_IOERR_READ is an SQLITE_IOERR; "" if the error has none."""
    name = str(getattr(error, "sqlite_errorname", ""))
    words = name.split("_")
    return "_".join(words[:2])


def classify(error: Exception) -> tuple[str, str]:
    """(status, error class) of what SQLite or its Python module raised."""
    name = str(getattr(error, "sqlite_errorname", ""))
    if not name:  # an error of the Python module: a second statement, or a cell that it cannot decode
        if isinstance(error, sqlite3.ProgrammingError | sqlite3.Warning):
            return REFUSED, "several_statements"
        return ERROR, "runtime"
    code = _CODES.get(name) or _CODES.get(general_code(error))
    if code is not None:
        return code
    message = str(error).lower()
    if any(mark in message for mark in _PROTECTED):
        return REFUSED, "not_authorized"
    for mark, error_class in _MISTAKES:
        if mark in message:
            return ERROR, error_class
    return ERROR, "runtime"


def unreadable(sql: str) -> base.RawResult | None:
    """The failure of a text that Python's module would refuse before SQLite sees it, with an error without a code."""
    if "\x00" in sql:
        return base.failure(ERROR, "syntax", "the query contains a null character")
    try:
        size = len(sql) if sql.isascii() else len(sql.encode())
    except UnicodeEncodeError:
        return base.failure(ERROR, "syntax", "the query is not valid text")
    if size > MAX_SQL:
        return base.failure(LIMIT, "sql_too_long", "the query is longer than a million bytes")
    return None


# The work of all views of one file, in thousands of virtual machine steps: some twenty seconds. A bound on work gives
# the same values on a slow machine; the bound on time ends only a view that never ends.
VIEW_WORK = 3_000_000
# Codes of sqlite3_limit.
LENGTH = 0
SQL_LENGTH = 1
ATTACHED = 7
# Its first row read and the second not, it keeps the read lock: a quarter of a short query's time goes into taking it,
# looking for a hot journal, and asking whether the file changed.
HOLD = "SELECT rootpage FROM sqlite_master UNION ALL SELECT 0 UNION ALL SELECT 0"
PROGRESS_OPS = 5_000  # virtual machine steps between two looks at the clock: well under a millisecond
TICK_WORK = PROGRESS_OPS // 1000

_RESERVED = """
    add all alter and as autoincrement between case cast check collate commit constraint create current_date
    current_time current_timestamp default deferrable delete distinct drop else escape except exists foreign from group
    having in index insert intersect into is isnull join limit not nothing notnull null on or order primary raise
    references returning select set table then to transaction union unique update using values when where
"""
# SQLite does not ask the authorizer about columns that a join takes by name (USING, NATURAL), nor an index's order.
_UNASKED = re.compile(
    r"""('(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|$))|\b(?:using|natural|indexed)\b""",
    re.DOTALL | re.IGNORECASE,
)
# The columns of a USING, within quotes or without; a comment among them is not understood.
_USING = re.compile(r"""\s*\(((?:[^()'"`\[/-]|'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\])*)\)""")
# The signs that part the definitions of a CREATE TABLE, and quoted texts, which may hold them.
_TABLE_SIGN = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^\]]*\]|[(),]""")
_FIRST_NAME = re.compile(
    r"""\s*(?:(?P<quoted>'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`)|\[(?P<bracketed>[^\]]*)\]|(?P<word>[\w$]+))"""
)
# The columns of EXPLAIN, whose rows name indices and what these hold.
_PLANS = (
    ("addr", "opcode", "p1", "p2", "p3", "p4", "p5", "comment"),
    ("id", "parent", "notused", "detail"),
)


def open_readonly(location: str) -> sqlite3.Connection:
    """A connection that cannot write. A database in WAL mode with nothing left in its log is opened as immutable:
    a read-only connection to it would otherwise create its -wal and -shm files.
    """
    with open(location, "rb") as file:
        header = file.read(20)
    is_immutable = len(header) == 20 and header[18] == 2  # in WAL mode
    if is_immutable:
        with contextlib.suppress(OSError):
            is_immutable = os.path.getsize(location + "-wal") == 0
    uri = f"file:{quote(location)}?mode=ro"
    if is_immutable:
        uri += "&immutable=1"
    # Nothing is kept of a statement: one that runs again would go on counting its steps where it ended.
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, cached_statements=0)


def _decode_any_text(data: bytes) -> str:
    """The text of a cell, with the replacement character for what is not UTF-8."""
    return data.decode("utf-8", "replace")


def executed(connection: sqlite3.Connection, sql: str) -> sqlite3.Cursor:
    """The cursor of a statement: more semicolons behind it are no second one, as on the other engines."""
    try:
        return connection.execute(sql)
    except (sqlite3.Warning, sqlite3.ProgrammingError):
        texts = statement_texts(sql) if sql.count(";") < MAX_STATEMENTS else []
        if len(texts) != 1:
            raise
        return connection.execute(texts[0])


def mentions(sql: str, names: Iterable[str]) -> bool:
    """Whether a text has any of these folded names as a word, within quotes or without."""
    words = "|".join(map(re.escape, names))
    if not words:
        return False
    text = _without_doubled_quotes(base.fold(sql))
    return re.search(rf"(?<!\w)(?:{words})(?!\w)", text) is not None


def _without_doubled_quotes(text: str) -> str:
    """A text in which one quote stands for each two."""
    for quote_sign in "'\"`":
        text = text.replace(quote_sign * 2, quote_sign)
    return text


def reads_unasked(sql: str, hidden: base.Hidden) -> bool:
    """Whether a statement may read something hidden without SQLite's asking the authorizer: it has the name of a table
    with hidden columns, and joins it by columns that it leaves unsaid or that are hidden.
    """
    joins = [match for match in _UNASKED.finditer(sql) if match[1] is None]
    if not joins or not mentions(sql, hidden.tables | hidden.columns.keys()):
        return False
    if mentions(sql, hidden.tables):
        return True
    columns: set[str] = set()
    for table, names in hidden.columns.items():
        if mentions(sql, [table]):
            columns |= names
    for join in joins:
        if join[0].lower() != "using":
            return True
        using = _USING.match(sql, join.end())
        if using is None or mentions(using[1], columns):
            return True
    return False


def computed_from(table_sql: str, generated: Iterable[str], hidden: Set[str]) -> list[str]:
    """The generated columns of a table that are computed from hidden ones, also through one another: those whose
    definition mentions one, and those whose definition is not found.

    Args:
        table_sql: the CREATE TABLE statement, as SQLite keeps it.
        generated: names of generated columns.
        hidden: folded names of the table's hidden columns.
    """
    definition_of = _column_definitions(table_sql)
    reached = set(hidden)
    computed: list[str] = []
    waiting = list(generated)
    while True:
        new = []
        for column in waiting:
            definition = definition_of.get(base.fold(column))
            if definition is None or mentions(definition, reached):
                new.append(column)
        if not new:
            return computed
        computed += new
        reached.update(map(base.fold, new))
        waiting = [column for column in waiting if column not in new]


def _column_definitions(table_sql: str) -> dict[str, str]:
    """The definitions of a CREATE TABLE by their first words, folded: these are the names of columns."""
    sql = blank_comments(table_sql)
    definitions: dict[str, str] = {}
    depth = 0
    start = 0
    for match in _TABLE_SIGN.finditer(sql):
        sign = match[0]
        if sign in (",", ")") and depth == 1:
            definition = sql[start : match.start()]
            name = _FIRST_NAME.match(definition)
            if name is not None:
                key = _folded_name(name)
                definitions[key] = f"{definitions.get(key, '')} {definition}"
            start = match.end()
        if sign == "(":
            depth += 1
            if depth == 1:
                start = match.end()
        elif sign == ")":
            depth -= 1
            if depth == 0:
                break
    return definitions


def _folded_name(match: re.Match[str]) -> str:
    """The name that `_FIRST_NAME` found, without its quotes, folded."""
    name = match["bracketed"] or match["word"] or ""
    if match["quoted"]:
        name = match["quoted"][1:-1]
    return base.fold(_without_doubled_quotes(name))


@dialect("sqlite")
class Sqlite(Dialect):
    """SQLite: a file, and a sandbox of its own."""

    title = "SQLite"
    session = "pipelines.sql.dialects.sqlite:SqliteSession"
    sqlglot = "sqlite"
    reserved = frozenset(_RESERVED.split())
    suffixes = (".sqlite", ".sqlite3", ".db")
    magic = (0, b"SQLite format 3\0")
    tables_query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    needs_packages = False

    @staticmethod
    @contextlib.contextmanager
    def catalog(location: str, view_seconds: float) -> Iterator[Catalog]:
        """An open catalog; views run in the sandbox."""
        from pipelines.core.types import Database
        from pipelines.sql.engine import Limits, SqlEngine

        work_left = VIEW_WORK

        def view(sql: str) -> Iterable[Sequence[Any]]:
            nonlocal work_left
            if work_left < 0:
                raise ViewLimitExceeded
            database = Database("", "sqlite", location)
            (result,) = sandbox.execute_many([(database, sql)], SAMPLED_ROWS)
            work_left -= result.work
            if result.status.value == TIMEOUT:
                work_left = -1
            if work_left < 0 or not result.ok:
                raise ViewLimitExceeded
            return result.rows

        with (
            contextlib.closing(open_readonly(location)) as connection,
            SqlEngine(Limits(timeout_s=view_seconds)) as sandbox,
        ):
            connection.text_factory = _decode_any_text
            yield Catalog(lambda sql: connection.execute(sql).fetchall(), view)


@dialect("sqlite_stateful")
class StatefulSqlite(Sqlite):
    """SQLite for questions that change data: an episode has a private copy of the database."""

    session = "pipelines.sql.dialects.sqlite:StatefulSession"
    keeps_state = True


class SqliteSession(base.DatabaseSession):
    """An open SQLite file.

    The clock is armed before each statement: it ends the whole worker if the progress handler cannot, for a native
    function never comes back to the virtual machine.
    """

    engine = "sqlite"
    takes_bare_text = True
    counts_work = True
    has_plain_values = True
    _connection: sqlite3.Connection
    _guard: Callable[..., int] = staticmethod(guard)
    _sql = ""  # Running statement.
    _common_tables: frozenset[str] = frozenset()  # Common table expressions of the statement, if something is hidden.
    _shadowed: frozenset[str] = frozenset()  # Names that stand for one of these wherever the statement has them.
    _holder: sqlite3.Cursor | None = None  # Cursor that keeps the read lock.

    def _connect(self) -> sqlite3.Connection:
        try:
            connection = open_readonly(self._location)
            self._confine(connection)
        except OSError as error:
            reason = "database_missing" if isinstance(error, FileNotFoundError) else "database_unreadable"
            raise base.OpenFailure(reason, f"the database cannot be opened: {error.strerror}") from None
        except sqlite3.Error as error:
            _, error_class = classify(error)
            message = self._without_location(error)
            raise base.OpenFailure(error_class, f"the database cannot be opened: {message}") from None
        return connection

    def _without_location(self, error: Exception) -> str:
        """The message of an error, which may name the file."""
        return str(error).replace(self._location, "the database")

    def _confine(self, connection: sqlite3.Connection) -> None:
        bounds = self.bounds
        busy_ms = int(bounds.timeout_s * 900)  # before the hard timer
        cache_kib = max(2000, bounds.memory_mb * 4)  # sorts fit in it if they can
        connection.execute(f"PRAGMA busy_timeout={busy_ms}")
        connection.execute(f"PRAGMA cache_size=-{cache_kib}")
        connection.execute("PRAGMA trusted_schema=0")
        # The first use of a virtual table makes a table, which the authorizer will not allow later.
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE VIRTUAL TABLE%'"
        names = [row[0] for row in connection.execute(query)]
        pragma_tables = [f"pragma_{pragma}" for pragma in sorted(PRAGMAS)]
        for name in (*pragma_tables, "json_each", "json_tree", *names):
            with contextlib.suppress(sqlite3.Error):  # a module that this SQLite lacks; a query for it will say so
                cursor = connection.execute(f"SELECT * FROM {base.quoted(name)} LIMIT 0")
                cursor.close()

        def is_late() -> bool:
            self.work += TICK_WORK
            self.clock.worked(self.work)
            return perf_counter() > self.deadline

        connection.setlimit(LENGTH, min(bounds.max_bytes, 1_000_000_000))
        connection.setlimit(SQL_LENGTH, MAX_SQL)
        connection.setlimit(ATTACHED, 0)
        connection.set_progress_handler(is_late, PROGRESS_OPS)
        connection.set_authorizer(self._guard)

    def closure(self, hidden: base.Hidden) -> base.Hidden:
        """The hidden names; views that read them, or whose query is not understood; a virtual table with its shadow
        tables, also one that is made over a hidden table, view or column (a text index holds their words); columns
        that are generated from a hidden one, for SQLite computes them without asking the authorizer. From here on the
        authorizer denies what is hidden, also through views.
        """
        connection = self._connection
        connection.set_authorizer(None)
        definitions: dict[str, str] = {}
        for name, sql in connection.execute("SELECT name, sql FROM sqlite_master"):
            definitions[str(name)] = str(sql)
        names: dict[str, list[str]] = {"table": [], "view": [], "virtual": [], "shadow": []}
        for schema, name, kind, *_ in connection.execute("PRAGMA table_list").fetchall():
            if schema == "main":
                names[kind].append(name)
        computed: list[tuple[str, str]] = []
        for table in names["table"]:
            hidden_columns = hidden.columns.get(base.fold(table))
            if hidden_columns:
                computed += self._computed_columns(table, definitions[table], hidden_columns)
        closure = hidden.extended(computed=computed)
        view_names = frozenset(map(base.fold, names["view"]))
        while True:
            hidden_views = closure.tables & view_names
            self._guard = self._hiding_guard(closure, hidden_views)
            connection.set_authorizer(self._guard)
            more_hidden: list[str] = []
            for view in names["view"]:
                if reads_unasked(definitions[view], closure) or not self._may_read(view):
                    more_hidden.append(view)
            hidden_names = closure.tables | closure.columns.keys()
            virtual = [name for name in names["virtual"] if mentions(definitions[name], hidden_names)]
            more_hidden += virtual
            more_hidden += _shadows_of(virtual, names["shadow"])
            if closure.tables.issuperset(map(base.fold, more_hidden)):
                return closure
            closure = closure.extended(more_hidden)

    def _computed_columns(
        self, table: str, definition: str, hidden_columns: frozenset[str]
    ) -> Iterator[tuple[str, str]]:
        """(table, column) of each column that a table generates from a hidden one."""
        query = "SELECT name FROM pragma_table_xinfo(?) WHERE hidden IN (2, 3)"
        rows = self._connection.execute(query, (table,))
        generated = [row[0] for row in rows]
        if not generated:
            return
        for column in computed_from(definition, generated, hidden_columns):
            yield table, column

    def _may_read(self, view: str) -> bool:
        """Whether the authorizer lets a statement read a view; the view is compiled and not run."""
        try:
            cursor = self._connection.execute(f"EXPLAIN SELECT * FROM {base.quoted(view)}")
            cursor.close()
        except sqlite3.Error:
            return False
        return True

    def _hiding_guard(self, closure: base.Hidden, hidden_views: frozenset[str]) -> Callable[..., int]:
        """The authorizer's callback for a database with hidden names."""

        def hiding_guard(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
            schema, within = rest
            if action == PRAGMA and first != "data_version":  # a text index asks for it by itself
                return DENY
            # A view whose columns are not read, as in count(*), is named here alone; so is a common table expression.
            if action == SELECT and within is not None:
                name = base.fold(within)
                if name in hidden_views and name not in self._shadowed:
                    return DENY
            if action == READ and first is not None:  # the engine's own tables name and sample what is hidden
                is_catalogue = first.lower().startswith(("sqlite_", "pragma_"))
                if is_catalogue or closure.hides(first, second or ""):
                    # A common table expression without a column read is asked about as a table is.
                    is_common = schema is None and not second and base.fold(first) in self._common_tables
                    return ALLOW if is_common else DENY
            return guard(action, first, second, *rest)

        return hiding_guard

    def answer(self, sql: str, max_rows: int) -> base.RawResult:
        """Run a statement; again, within the same time, when it failed for a setting of ours that can be changed."""
        self._sql = sql
        refused = unreadable(sql)
        if refused is not None:
            return refused
        if self.hidden is not None:
            if reads_unasked(sql, self.hidden):
                reason = "join with ON here, without USING and NATURAL, and without INDEXED BY"
                return base.failure(REFUSED, "hidden", reason)
            from pipelines.sql.dialects import guard as tokens  # only here: other workers start without it

            common_tables = tokens.common_tables(sql)
            self._common_tables = frozenset(map(base.fold, common_tables))
            self._shadowed = tokens.shadowed_names(sql)
        is_decoded = False
        is_in_memory = False
        try:
            while True:
                try:
                    return self._run_query(sql, max_rows)
                except sqlite3.Error as error:
                    code = general_code(error)
                    # Only the decoding of a cell fails without a code of SQLite's.
                    is_text = not code and isinstance(error, sqlite3.OperationalError)
                    if is_text and not is_decoded:
                        # Only now: a factory in Python costs 150 ns a cell, the built-in one next to nothing.
                        self._connection.text_factory = _decode_any_text
                        is_decoded = True
                    elif not is_in_memory and code in ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN"):
                        # A sort or a distinct outgrew its cache, and this process may write no file. Only now: in
                        # memory all sorts are slower, Spider's bike_1 by 11 %.
                        self._sort_in("MEMORY")
                        is_in_memory = True
                    else:
                        raise
        finally:
            if is_decoded or is_in_memory:  # the next statement meets what this one met, whatever ran before it
                self._connection.text_factory = str
                self._sort_in("DEFAULT")

    def _run_query(self, sql: str, max_rows: int) -> base.RawResult:
        cursor = executed(self._connection, sql)
        try:
            if cursor.description is None:
                return base.failure(ERROR, "empty", "there is no query to run")
            if self.hidden is not None:
                columns = tuple([item[0] for item in cursor.description])
                if columns in _PLANS:
                    return base.failure(REFUSED, "hidden", base.HIDDEN_REFUSAL)
            return self.result(cursor, max_rows)
        finally:
            cursor.close()

    def _sort_in(self, store: str) -> None:
        """Change where our own connection sorts; the authorizer would not let a query do it."""
        self.hold(False)
        self._connection.set_authorizer(None)
        self._connection.execute(f"PRAGMA temp_store={store}")
        self._connection.set_authorizer(self._guard)

    def explain(self, error: Exception) -> tuple[str, str, str]:
        """See `classify`; what the authorizer denied is refused, however SQLite says so."""
        status, error_class = classify(error)
        if status == ERROR:
            # The statement is prepared once more, for what the authorizer denies in it: to note that in every statement
            # would cost each of them some 5 %.
            answers: list[int] = []

            def watch(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
                answer = self._guard(action, first, second, *rest)
                answers.append(answer)
                return answer

            explanation = self._sql
            if explanation.lstrip()[:7].lower() != "explain":
                explanation = f"EXPLAIN {explanation}"
            self._connection.set_authorizer(watch)
            with contextlib.suppress(sqlite3.Error, sqlite3.Warning):
                cursor = self._connection.execute(explanation)
                cursor.close()
            self._connection.set_authorizer(self._guard)
            if DENY in answers:
                status = REFUSED
                error_class = "not_authorized"
        return status, error_class, self._without_location(error)

    def probe(self) -> None:
        with contextlib.closing(open_readonly(self._location)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchall()

    def hold(self, on: bool) -> None:
        """Keep the read lock, or let it go; without it every statement takes its own."""
        if on:
            with contextlib.suppress(sqlite3.Error):
                self._holder = self._connection.execute(HOLD)
        elif self._holder is not None:
            self._holder.close()
            self._holder = None

    def cold_ms(self, sql: str, max_rows: int, timeout_s: float) -> float | None:
        """The milliseconds as BIRD's script takes them: on a new connection, whose opening and closing count."""

        def timing_guard(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
            if (action, first) == (UPDATE, "sqlite_master"):  # SQLite notes, in memory, a virtual table that it meets
                return ALLOW
            return guard(action, first, second, *rest)

        connection = open_readonly(self._location)
        with contextlib.closing(connection):
            connection.execute("PRAGMA temp_store = MEMORY")  # a worker may write no file, and large sorts would
            connection.set_authorizer(timing_guard)
            start = perf_counter()
            connection.set_progress_handler(lambda: perf_counter() > start + timeout_s, PROGRESS_OPS)
            try:
                executed(connection, sql).fetchall()
                connection.close()
            except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError):
                return None
            return (perf_counter() - start) * 1000


# Scripts that change data: each runs on a private copy, and its outcome is one row.

OUTCOME_COLUMNS = ("query", "rows", "as_set", "in_order", "ordered", "changed", "state")
OUTCOME_PLACES = 2  # decimal places that count (`preprocess_results` of LiveSQLBench's evaluator)
CHANGED = ("rows changed",)  # the column of a statement that returns no rows
SETUP_SUFFIX = ".setup.sql"  # the end of the name of the script beside a database that prepares each copy
COPY_SHARE = 4  # a copy may take one in so many bytes of the worker's memory

# Action codes of sqlite3_set_authorizer that change data or schema, and nothing beyond the connection's own databases.
# ATTACH (which VACUUM and VACUUM INTO are, too), DETACH and virtual tables are not among them.
_WRITES = frozenset((*range(1, 19), 22, 23, 26, 27, 28, 32))
_COPY_PRAGMAS = ("foreign_keys", "quick_check")  # the second is what ADD COLUMN asks
_ALTER_FUNCTIONS = ("sqlite_rename_", "sqlite_drop_column")  # ALTER TABLE calls them, and no statement can


def copy_guard(action: int, first: str | None, second: str | None, *rest: str | None) -> int:
    """SQLite's authorizer callback for a private copy: also allows changes of the copy alone."""
    if action in _WRITES:
        return ALLOW
    if action == PRAGMA and first is not None and first.lower() in _COPY_PRAGMAS:
        return ALLOW
    if action == FUNCTION and second is not None and second.lower().startswith(_ALTER_FUNCTIONS):
        return ALLOW
    return guard(action, first, second, *rest)


def _shadows_of(virtual_tables: Iterable[str], shadows: Iterable[str]) -> list[str]:
    """The shadow tables of virtual tables, by the beginning of their names."""
    starts = tuple(f"{base.fold(name)}_" for name in virtual_tables)
    return [name for name in shadows if base.fold(name).startswith(starts)]


def database_digest(connection: sqlite3.Connection) -> str:
    """A digest that two databases share whose tables and views have the same names, columns and rows (as bags, numbers
    to `OUTCOME_PLACES`), the same indices (by table, columns and whether unique) and as many triggers on each table.

    A text that begins with the current day is the same as any other: two runs write different times.
    """
    today = time.strftime("%Y-%m-%d", time.gmtime())
    objects: list[Any] = []
    query = "SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    for kind, name, table in connection.execute(query).fetchall():
        if kind in ("table", "view"):
            cursor = connection.execute(f"SELECT * FROM {base.quoted(name)}")
            columns = [item[0].lower() for item in cursor.description]
            rows_digest = _rows_digest(cursor, today)
            objects.append([kind, name.lower(), columns, *rows_digest])
        elif kind == "index":
            properties = _index_properties(connection, table, name)
            objects.append([kind, table.lower(), *properties])
        else:
            objects.append([kind, table.lower()])
    texts = map(repr, objects)
    return texts_digest(sorted(texts))


def _index_properties(connection: sqlite3.Connection, table: str, index: str) -> tuple[list[int], list[str]]:
    """Whether an index is unique, and its columns, as SQLite lists them."""
    uniqueness: list[int] = []
    indices_of_table = connection.execute(f"PRAGMA index_list({base.quoted(table)})")
    for _, name, is_unique, *_ in indices_of_table:
        if name == index:
            uniqueness.append(is_unique)
    rows = connection.execute(f"PRAGMA index_info({base.quoted(index)})")
    columns = [column for _, _, column in rows]
    return uniqueness, columns


def _rows_digest(rows: Iterable[tuple[Any, ...]], today: str) -> tuple[int, int]:
    """The number of rows, and the sum of their digests, which no order changes and no row is kept for."""
    count = 0
    total = 0
    for row in rows:
        cells = []
        for cell in rounded_cells(row):
            if isinstance(cell, str) and cell.startswith(today):
                cell = "now"
            cells.append(cell)
        row_digest = texts_digest([repr(cells)])
        total = (total + int(row_digest, 16)) % (1 << 128)
        count += 1
    return count, total


def rounded_cells(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row's cells, numbers to `OUTCOME_PLACES`; a whole number is the same whatever its type."""
    return tuple(map(_rounded_cell, row))


def _rounded_cell(cell: Any) -> Any:
    if not isinstance(cell, float):
        return cell
    number = round(cell, OUTCOME_PLACES)
    if number.is_integer():
        return int(number)
    return number


def texts_digest(texts: Iterable[str]) -> str:
    """32 hex digits of texts in order."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


class StatefulSession(SqliteSession):
    """An SQLite file, and for each script a copy of it, which may take a part of the worker's memory (`COPY_SHARE`).

    Beside the file may lie the script that prepares each copy (`SETUP_SUFFIX`).
    """

    takes_bare_text = False  # a script has several statements

    def __init__(self, location: str, bounds: base.Bounds, clock: base.StatementTimer) -> None:
        super().__init__(location, bounds, clock)
        self._max_bytes = (bounds.memory_mb << 20) // COPY_SHARE
        self._source = self._connection
        self._guard = copy_guard
        self._source.set_authorizer(None)  # no statement of anybody else runs on it
        setup = Path(location + SETUP_SUFFIX)
        self._setup: list[str] = []
        try:
            if setup.is_file():
                script = setup.read_text(encoding="utf-8")
                self._setup = statement_texts(script)
        except (OSError, ValueError):
            raise base.OpenFailure("setup_failed", "the script that prepares the database cannot be read") from None

    def run(self, sql: str, max_rows: int) -> base.RawResult:
        self._sql = sql
        try:
            return super().run(sql, max_rows)
        finally:
            if self._connection is not self._source:
                self._connection.close()
                self._connection = self._source

    def answer(self, sql: str, max_rows: int) -> base.RawResult:
        """Run a script on a copy of its own: the turns before the last one, then that one, whose last result it is."""
        refused = unreadable(sql.replace(TURN_SEPARATOR, "\n"))
        if refused is not None:
            return refused
        self._connection = self._copy_source()
        self._confine(self._connection)
        try:
            for statement in self._setup:
                cursor = self._connection.execute(statement)
                cursor.close()
            self._connection.commit()
        except sqlite3.Error as error:
            raise base.OpenFailure("setup_failed", f"the database cannot be prepared: {error}") from None
        before = self._changes()
        *earlier, last = sql.split(TURN_SEPARATOR)
        asks_outcome = bool(earlier) and last in (OUTCOME, ORDERED)
        is_ordered = last == ORDERED
        if asks_outcome:
            last = earlier.pop()
        for turn in earlier:
            self._turn(turn, 1)
        raw = self._turn(last, max_rows)
        if asks_outcome:
            raw = base.untruncated(raw)
        if not asks_outcome or raw.status != OK:
            return raw
        # The only row holds digests of the last statement's rows, and of the database if it was changed.
        texts = [repr(rounded_cells(row)) for row in raw.rows]
        distinct = set(texts)
        as_set = texts_digest(sorted(distinct))
        in_order = texts_digest(texts)
        is_changed = self._changes() != before
        state = ""
        if is_changed:
            state = database_digest(self._connection)
        is_query = raw.columns != CHANGED
        row = (int(is_query), len(texts), as_set, in_order, int(is_ordered), int(is_changed), state)
        return base.RawResult(OK, OUTCOME_COLUMNS, [row])

    def _copy_source(self) -> sqlite3.Connection:
        """A copy of the file in memory, which cannot grow beyond its part of it."""
        source = self._source
        try:
            source.execute("BEGIN")
            source.execute("SELECT 1 FROM sqlite_master").fetchall()  # takes the read lock, within the time for it
            (n_pages,) = source.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
            if n_pages * page_bytes > self._max_bytes:
                reason = f"the database is larger than {self._max_bytes >> 20} MiB"
                raise base.OpenFailure("database_too_large", reason)
            copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False, cached_statements=0)
            source.backup(copy)
            max_pages = self._max_bytes // page_bytes
            copy.execute(f"PRAGMA max_page_count={max_pages}")
            copy.execute("PRAGMA temp_store=MEMORY")
        except sqlite3.Error as error:
            _, error_class = classify(error)
            message = self._without_location(error)
            raise base.OpenFailure(error_class, f"the database cannot be copied: {message}") from None
        finally:
            source.rollback()
        copy.text_factory = _decode_any_text
        return copy

    def _changes(self) -> tuple[list[tuple[str, ...]], int]:
        """The objects of the copy and the number of rows changed so far."""
        cursor = self._connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2")
        return cursor.fetchall(), self._connection.total_changes

    def _turn(self, script: str, max_rows: int) -> base.RawResult:
        raw = base.failure(ERROR, "empty", "there is no statement to run")
        try:
            texts = statement_texts(script)
        except ValueError as error:
            return base.failure(LIMIT, "too_many_statements", str(error))
        for statement in texts:
            self._sql = statement
            cursor = self._connection.execute(statement)
            if cursor.description is None:
                n_changed = max(0, cursor.rowcount)
                raw = base.RawResult(OK, CHANGED, [(n_changed,)])
            else:
                raw = self.result(cursor, max_rows)
            cursor.close()
        return raw

    def explain(self, error: Exception) -> tuple[str, str, str]:
        """See `SqliteSession.explain`; a copy that may not grow is the statement's own fault."""
        if general_code(error) == "SQLITE_FULL":
            return LIMIT, "size_limit", f"the database may not grow beyond {self._max_bytes >> 20} MiB"
        return super().explain(error)

    # Nothing can be hidden, for a statement that writes could carry it elsewhere; no script touches the file, so none
    # locks it; a script is timed on its copy.
    closure = base.DatabaseSession.closure
    hold = base.DatabaseSession.hold
    cold_ms = base.DatabaseSession.cold_ms
