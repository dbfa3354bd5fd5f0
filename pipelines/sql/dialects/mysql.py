"""MySQL and MariaDB: a user that may only read, a read-only transaction for each statement on a connection of its own.

The server has no parser that lists the calls of a statement, so names are looked up in its tokens alone (`guard`).
Behind that fence are the read-only transaction and the privileges of the user, who must hold none but SELECT.

Statements mean what they mean in the server's own SQL mode, or in the one that an address names (`sql_mode`). For the
lexer each is written anew, so that it and the server read the same tokens: a name stands in double quotes, a text in
single ones, and no backslash stands before a quote. That text is checked and run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from pipelines.core.registry import dialect
from pipelines.sql.dialects import base
from pipelines.sql.dialects.base import ERROR, LIMIT, REFUSED, TIMEOUT, UNAVAILABLE
from pipelines.sql.dialects.dialect import RESERVED, Catalog, Dialect, Query, Role
from pipelines.sql.dialects.guard import TOKEN, body, common_tables, lexed, token_refusal, word_refusal

if TYPE_CHECKING:
    import pymysql

# The mode of our own statements on the catalogue.
MODE = "ANSI_QUOTES,IGNORE_SPACE,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,ONLY_FULL_GROUP_BY,NO_ENGINE_SUBSTITUTION"
PORT = 3306
READING_SECONDS = 5.0  # time for a server to say its SQL mode
# Error numbers by status and class: errors of the statement, then of the server's limits and of the server itself.
_ERROR_NUMBERS = {
    (ERROR, "no_such_table"): (1146,),
    (ERROR, "no_such_column"): (1054,),
    (ERROR, "ambiguous_column"): (1052,),
    (ERROR, "no_such_function"): (1305,),
    (ERROR, "wrong_arguments"): (1582,),
    (ERROR, "syntax"): (1064,),
    (ERROR, "misuse"): (1055, 1111, 1140),
    (ERROR, "too_complex"): (1436,),
    (REFUSED, "not_authorized"): (1044, 1045, 1142, 1143, 1227, 1290, 1370, 1792),
    (LIMIT, "memory_limit"): (1037, 1038, 1041, 1114),
    (LIMIT, "cell_limit"): (1301,),
    (TIMEOUT, "timeout"): (1317, 1969, 3024),
    (UNAVAILABLE, "database_locked"): (1205,),
    (UNAVAILABLE, "database_missing"): (1053,),
    (UNAVAILABLE, "disk"): (1030,),
    (UNAVAILABLE, "database_corrupt"): (1034,),
    (UNAVAILABLE, "internal"): (1815,),
    (UNAVAILABLE, "connection"): (2006, 2013, 2014),
}
_RESERVED = """
    accessible add alter asensitive before between bigint blob call cascade change char character condition continue
    convert cube cume_dist cursor database databases day_hour day_microsecond day_minute day_second dec decimal declare
    delayed delete dense_rank deterministic distinctrow div double drop dual each elseif empty enclosed escaped exists
    exit explain first_value float float4 float8 force fulltext function generated get grouping groups high_priority
    hour_microsecond hour_minute hour_second if ignore index infile inout insensitive insert int int1 int2 int3 int4
    int8 integer interval io_after_gtids io_before_gtids iterate json_table key keys kill lag last_value lead leave
    library linear lines load lock long longblob longtext loop low_priority manual master_bind
    master_ssl_verify_server_cert match maxvalue mediumblob mediumint mediumtext middleint minute_microsecond
    minute_second mod modifies no_write_to_binlog nth_value ntile numeric of optimize optimizer_costs option optionally
    out outfile over parallel partition percent_rank precision procedure purge range rank read read_write reads real
    recursive regexp release rename repeat replace require resignal restrict return revoke rlike row row_number rows
    schema schemas second_microsecond sensitive separator set signal smallint spatial specific sql sql_big_result
    sql_calc_found_rows sql_small_result sqlexception sqlstate sqlwarning ssl starting stored straight_join system
    terminated tinyblob tinyint tinytext trigger undo unlock unsigned update usage use utc_date utc_time utc_timestamp
    values varbinary varchar varcharacter varying virtual while write xor year_month zerofill
"""
# The grants of a plain reader: nothing on the server, SELECT on databases and tables that are named.
_GRANT = re.compile(r"GRANT (USAGE ON \*\.\*|(SELECT|SELECT \([^)]*\))(, SHOW VIEW)? ON [`'\"])", re.IGNORECASE)
_PUBLIC_GRANT = re.compile(r"GRANT (?P<rights>.+) ON (?P<place>.+) TO \W?PUBLIC\W?(?P<option> WITH GRANT OPTION)?")
_RIGHT = re.compile(r"((?:[A-Z]+ ?)+)(\([^)]*\))?(?:, |$)")  # a right in a grant, with its columns
_BACKTICKED = re.compile(r"`(?:[^`\r\n]|``)+`")
# Comments whose text this engine runs, unlike the lexer of `guard`.
_RUNNING_COMMENTS = ("/*!", "/*M", "/*m", "/*+")
_SCHEMAS = frozenset(("mysql", "performance_schema", "sys"))
_FORBIDDEN_WORDS = frozenset(("#", "@", "into", "lock", "procedure"))
_DESCRIPTIONS = (
    "check_constraints", "columns", "key_column_usage", "referential_constraints", "schemata", "table_constraints",
    "tables", "views",
)  # fmt: skip
_BEFORE_STAR = frozenset((".", ",", "select", "distinct", "distinctrow", "all"))
_AFTER_STAR = frozenset((",", "from", "into", "union", "except", "intersect", "where", "limit", "order", "group", ""))
# The condition for all databases of users: a statement or a view may name another than its own. `sys` has views of the
# server.
_OTHERS = "table_schema NOT IN ('information_schema', 'mysql', 'performance_schema', 'sys')"
_VIEWS = f"SELECT table_name, view_definition FROM information_schema.views WHERE {_OTHERS}"
_COMPUTED = (
    f"SELECT table_name, column_name FROM information_schema.columns WHERE {_OTHERS} AND generation_expression > ''"
)
# Tables that show the rows of others (MERGE, FEDERATED, CONNECT and their kin), and sequences.
_ELSEWHERE = f"""
SELECT table_name FROM information_schema.tables WHERE {_OTHERS} AND table_type <> 'VIEW' AND (
    table_type = 'SEQUENCE'
    OR engine NOT IN ('InnoDB', 'MyISAM', 'Aria', 'MEMORY', 'CSV', 'ARCHIVE', 'ROCKSDB', 'ndbcluster')
)
"""
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_DIGITS = re.compile(r"0(x[0-9a-f]+|b[01]+)\b", re.IGNORECASE)  # a number, though letters follow its first digit
_OPTIONS = ("sql_mode", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key")
# The SQL modes that change no more than the meaning of the tokens that this module knows. A session's mode leaves out
# modes of other products, with a grammar of their own, and unknown ones.
_READABLE_MODES = frozenset(
    """
    ALLOW_INVALID_DATES ANSI ANSI_QUOTES EMPTY_STRING_IS_NULL ERROR_FOR_DIVISION_BY_ZERO HIGH_NOT_PRECEDENCE
    IGNORE_SPACE NO_AUTO_CREATE_USER NO_AUTO_VALUE_ON_ZERO NO_BACKSLASH_ESCAPES NO_DIR_IN_CREATE NO_ENGINE_SUBSTITUTION
    NO_UNSIGNED_SUBTRACTION NO_ZERO_DATE NO_ZERO_IN_DATE ONLY_FULL_GROUP_BY PAD_CHAR_TO_FULL_LENGTH PIPES_AS_CONCAT
    REAL_AS_FLOAT SIMULTANEOUS_ASSIGNMENT STRICT_ALL_TABLES STRICT_TRANS_TABLES TIME_ROUND_FRACTIONAL TRADITIONAL
    TIME_TRUNCATE_FRACTIONAL
    """.split()  # noqa: SIM905
)
_BACKSLASHED = re.compile(r"'(?:[^'\\]|\\.|'')*'", re.DOTALL)  # a text where a backslash escapes the next sign
_MODES = ("DISABLED", "PREFERRED", "REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY")
_PLAIN = "DATE TIME DATETIME DATETIME2 TIMESTAMP TIMESTAMP2 NEWDATE TIME2"


@dialect("mysql")
class Mysql(Dialect):
    """MySQL or MariaDB: a database on a server, named by the path of an address."""

    title = "MySQL"
    session = "pipelines.sql.dialects.mysql:MysqlSession"
    sqlglot = "mysql"
    text_type = "CHAR"
    quote = "`"  # a user's own client reads "name" as a text
    reserved = frozenset((RESERVED + _RESERVED).split())
    is_server = True
    schemes = ("mysql://", "mariadb://")
    password_variable = "MYSQL_PWD"
    tables_query = "SELECT table_name FROM information_schema.tables WHERE table_schema = database()"
    columns_query = (
        "SELECT table_name, column_name, IF(data_type IN ('enum', 'set'), column_type, data_type)"
        " FROM information_schema.columns WHERE table_schema = database() ORDER BY table_name, ordinal_position"
    )
    views_query = "SELECT table_name FROM information_schema.views WHERE table_schema = database()"
    keys_query = (
        "SELECT table_name, IF(constraint_name = 'PRIMARY', 'PRIMARY KEY', 'FOREIGN KEY'), column_name,"
        " IF(referenced_table_schema = database(), referenced_table_name, NULL), referenced_column_name"
        " FROM information_schema.key_column_usage"
        " WHERE table_schema = database() AND (constraint_name = 'PRIMARY' OR referenced_table_name IS NOT NULL)"
        " ORDER BY table_name, constraint_name, ordinal_position"
    )
    comments_query = (  # a view's comment is the word VIEW
        "SELECT table_name, '', table_comment FROM information_schema.tables"
        " WHERE table_schema = database() AND table_comment <> '' AND table_type <> 'VIEW' UNION ALL"
        " SELECT table_name, column_name, column_comment FROM information_schema.columns"
        " WHERE table_schema = database() AND column_comment <> ''"
    )

    @staticmethod
    def check_address(address: str) -> None:
        encryption_of(address)
        written_modes = _address_mode(address) or ""
        modes = {mode.strip() for mode in written_modes.upper().split(",")}
        unknown = sorted(modes - _READABLE_MODES - {""})
        if unknown:
            readable = ", ".join(sorted(_READABLE_MODES))
            raise ValueError(f"sql_mode={unknown[0]} cannot be read here: {readable} can")

    @classmethod
    def reading(cls, location: str) -> str:
        modes = _modes_of(cls.locate(location))
        suffixes = [name for mode, name in READINGS if mode in modes]
        return "_".join(["mysql", *suffixes])

    @classmethod
    def remarks(cls, location: str) -> list[str]:
        modes = _modes_of(cls.locate(location))
        whose = "the server's" if _address_mode(location) is None else "the address's"
        mode_names = ",".join(sorted(modes)) or "empty"
        quotes = "names" if "ANSI_QUOTES" in modes else "texts"
        pipes = "joins texts" if "PIPES_AS_CONCAT" in modes else "is OR"
        escapes = "no sign of its own" if "NO_BACKSLASH_ESCAPES" in modes else "an escape"
        lines = [
            f"SQL mode: {whose}, {mode_names}",
            f"  double quotes hold {quotes}, || {pipes}, a backslash in a text is {escapes}",
        ]
        dropped = ", ".join(sorted(modes - _READABLE_MODES))
        if dropped:
            lines.append(f"  left out, for the sandbox cannot read its grammar: {dropped}")
        return lines

    @staticmethod
    def role(query: Query) -> Role:
        """The rights beside reading; the sandbox refuses a user who has one."""
        writes: list[str] = []
        public: list[re.Match[str]] = []
        for row in query("SHOW GRANTS"):
            grant = str(row[0])
            if is_reader(grant):
                continue
            writes.append(grant)
            match = _PUBLIC_GRANT.fullmatch(grant)
            if match is not None:
                public.append(match)
        rights = [grant.partition(" TO ")[0] for grant in writes]
        return Role(
            writes=tuple(rights),
            is_turned_away=bool(writes),
            revocations=tuple(map(_revocation, public)),
            has_own_writes=len(public) < len(writes),
        )

    @staticmethod
    def reader_grants(address: str, schemas: Sequence[str]) -> list[str]:
        name = urlsplit(address).path.strip("/")
        escaped_name = name.replace("`", "``")
        database = f"`{escaped_name}`"
        return [
            f"CREATE USER '{name}_reader'@'%' IDENTIFIED BY 'a new password';",
            f"GRANT SELECT, SHOW VIEW ON {database}.* TO '{name}_reader'@'%';",
        ]

    @staticmethod
    @contextlib.contextmanager
    def catalog(location: str, view_seconds: float) -> Iterator[Catalog]:
        """An open catalog; the server holds views to their time."""
        with contextlib.closing(open_readonly_connection(location, view_seconds)) as connection:

            def query(sql: str) -> Iterable[Sequence[Any]]:
                with connection.cursor() as cursor:
                    cursor.execute(sql)
                    rows: Sequence[Sequence[Any]] = cursor.fetchall()
                    if sql == Mysql.keys_query:
                        return _keys_with_lists(rows)
                    return rows

            yield Catalog(query, query, time.monotonic() + view_seconds)

    @staticmethod
    def database_address(address: str, name: str) -> str:
        url = urlsplit(address)
        if url.scheme not in ("mysql", "mariadb") or not url.hostname:
            raise ValueError("this is not the address of a MySQL server")
        return url._replace(path=f"/{name.lower()}").geturl()


def _keys_with_lists(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The rows of `keys_query` as other engines give them: a key has a row for each column here, and one row with lists
    of columns there.
    """
    keys = []
    for table, kind, column, to_table, to_column in rows:
        keys.append((table, kind, [column], to_table, [to_column]))
    return keys


def _in_double_quotes(sql: str) -> str:
    """The statement with each name in backticks in double quotes, which `MODE` reads as the same name.

    Whatever comes of it, it is this text that is checked and run.
    """
    pieces: list[str] = []
    start = 0
    while start < len(sql):
        match = TOKEN.match(sql, start) or _BACKTICKED.match(sql, start)
        text = match[0] if match else sql[start]
        start += len(text)
        if text[0] == "`" and len(text) > 1:
            name = text[1:-1].replace("``", "`")
            text = base.quoted(name)
        pieces.append(text)
    return "".join(pieces)


def _server_refusal(sql: str) -> base.RawResult | None:
    """The refusal of a statement that passed `token_refusal`: the engine reads it otherwise, or it shows the server."""
    reason = _misread_sign(sql) or _server_word(sql)
    if not reason:
        return None
    return base.failure(REFUSED, "not_authorized", reason)


def _misread_sign(sql: str) -> str:
    """The reason to refuse a statement that the engine reads otherwise than `guard.lexed`; "" if there is none."""
    for match in TOKEN.finditer(sql):
        text = match[0]
        kind = match.lastgroup
        end = match.end()
        after = sql[end : end + 1]
        if kind == "comment" and text.startswith(_RUNNING_COMMENTS):
            return "this part of SQL is not allowed here: a comment that runs"
        # The server takes what looks like a number for a name: `2023_pay`, `2fa`, `1_2`.
        is_name = "_" in text or after == "_" or after.isalpha()
        if kind == "number" and is_name and not _DIGITS.match(sql, match.start()):
            return "a name that begins with a digit stands in backticks"
        if kind == "space" and text.startswith("--") and text[2:3].strip():
            return "a comment starts with two dashes and a space"
    return ""


def _server_word(sql: str) -> str:
    """The reason to refuse a statement whose words lock, write, or show the server; "" if there is none."""
    tokens, _ = lexed(sql)
    words = [word for _, word in tokens]
    words_after = [*words[1:], ""]
    for (kind, word), after in zip(tokens, words_after, strict=True):
        is_lock = word == "for" and after in ("update", "share")
        if (is_lock or word in _FORBIDDEN_WORDS) and kind != "name":
            return f"this part of SQL is not allowed here: {word}"
        if word in _SCHEMAS and after == ".":
            return f"not authorized to use {word}"
    for first, second, third in zip(words, words[1:], words[2:], strict=False):
        if (first, second) == ("information_schema", ".") and third not in _DESCRIPTIONS:
            return f"not authorized to use information_schema.{third}"
        if first in ("next", "previous") and (second, third) == ("value", "for"):
            return "not authorized to use a sequence"
    return ""


def _statement_names(sql: str) -> base.StatementNames:
    """The names of a statement, by its tokens: each may be that of a table and of a column, but what stands before a
    point is a table's. Each of its queries is a part with names of its own.
    """
    tokens, rest = lexed(sql)
    words: list[str] = []
    names: list[int] = []  # indices of names
    for index, (kind, word) in enumerate(tokens):
        if kind in ("word", "name"):
            names.append(index)
            word = base.fold(word)
        words.append(word)
    given_names = _given_names(tokens, words, names, sql)
    tables_of = _tables_of_names(words, names)
    names_of_queries = []
    for indices, outer in _queries(words):
        names_of_query = _query_names(tokens, words, indices, outer, given_names, tables_of)
        names_of_queries.append(names_of_query)
    return base.StatementNames(
        relations=frozenset(),
        rows=frozenset(),
        uses=frozenset(),
        unnamed=False,
        catalogue="information_schema" in words or bool(rest.strip("; \n")),
        parts=tuple(names_of_queries),
    )


def _tables_of_names(words: Sequence[str], names: Sequence[int]) -> dict[str, set[str]]:
    """The tables that each name may stand for: itself, one before it, one that has its alias further on."""
    tables_of: dict[str, set[str]] = {}
    for index in names:
        tables_of[words[index]] = {words[index]}
    for index in names:
        after = words[index + 1 : index + 3]
        if after[:1] in (["for"], ["partition"]):
            aliases = list(tables_of)
        elif after[:1] == ["as"]:
            aliases = list(after[1:2])
        else:
            aliases = list(after[:1])
        for alias in aliases:
            tables = tables_of.setdefault(alias, {alias})
            tables.add(words[index])
    return tables_of


def _given_names(tokens: Sequence[tuple[str, str]], words: Sequence[str], names: Sequence[int], sql: str) -> set[int]:
    """The indices of names that the statement gives: behind AS, and those of its common table expressions."""
    common = {base.fold(name): indices for name, indices in common_tables(sql).items()}
    given: set[int] = set()
    for index in names:
        name = words[index]
        if tokens[index - 1 : index] == [("word", "as")]:
            given.add(index)
        elif name in common and words[index - 1 : index] != ["."]:
            definition, scope_start = common[name]
            if index == definition or index > scope_start:
                given.add(index)
    return given


class _QueryWords(NamedTuple):
    """The words of a query, by their indices."""

    indices: list[int]  # Words outside its subqueries.
    around: list[list[int]]  # Words of each query around it.


def _queries(words: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """For each query, the indices of its words outside its subqueries, and of the words of the queries around it."""
    top = _QueryWords([], [])
    queries = [top]
    open_brackets = [top]  # the query that each open bracket is of, the innermost last
    for index, word in enumerate(words):
        query = open_brackets[-1]
        if word == ")" and len(open_brackets) > 1:
            open_brackets.pop()
            query = open_brackets[-1]
        query.indices.append(index)
        if word != "(":
            continue
        next_word = words[index + 1 : index + 2]
        if next_word in (["select"], ["with"], ["values"], ["table"]):
            query = _QueryWords([], [*query.around, query.indices])
            queries.append(query)
        open_brackets.append(query)
    with_outer: list[tuple[list[int], list[int]]] = []
    for query in queries:
        outer = list(itertools.chain.from_iterable(query.around))
        with_outer.append((query.indices, outer))
    return with_outer


def _query_names(
    tokens: Sequence[tuple[str, str]],
    words: Sequence[str],
    indices: Sequence[int],
    outer: Sequence[int],
    given_names: Container[int],
    tables_of: Mapping[str, set[str]],
) -> base.StatementNames:
    """The names in one query, by the indices of its words; `given` are indices of names that the statement gives."""
    names: set[str] = set()
    uses: set[tuple[str, ...]] = set()
    columns: set[tuple[str, str]] = set()
    starred: set[str] = set()
    reads_all = False
    query_words = [words[index] for index in indices]
    words_before = ["", *query_words[:-1]]
    words_after = [*query_words[1:], ""]
    for index, word, before, after in zip(indices, query_words, words_before, words_after, strict=False):
        kind, _ = tokens[index]
        owners: set[str] = set()
        if before == "." and index - 2 not in given_names:
            owners = tables_of.get(words[index - 2], set())
        if kind == "sign" and word == "*" and before == ".":
            starred |= owners
        elif kind == "sign" and word == "*" and before != "(":
            reads_all |= before in _BEFORE_STAR or after in _AFTER_STAR
        elif kind in ("word", "name") and index not in given_names:
            names.add(word)
            reads_all |= word in ("natural", "table") or (word, after) == ("partition", "(")
            columns.update((owner, word) for owner in owners)
            if before != ".":
                uses.add((word,))
    if reads_all:
        starred |= names
    outer_names: set[str] = set()
    for index in outer:
        kind, _ = tokens[index]
        if kind in ("word", "name") and index not in given_names:
            outer_names.add(words[index])
    return base.StatementNames(
        relations=frozenset(names),
        rows=frozenset(),
        uses=frozenset(uses),
        unnamed=False,
        catalogue=False,
        columns=frozenset(columns),
        starred=frozenset(starred),
        outer=frozenset(outer_names),
    )


def is_reader(grant: str) -> bool:
    """Whether a line of SHOW GRANTS grants reading and nothing else."""
    return _GRANT.match(grant) is not None and "WITH GRANT OPTION" not in grant


def _revocation(grant: re.Match[str]) -> str:
    """The statement that takes from PUBLIC the rights of a grant but those of a reader."""
    rights = []
    for written_name, columns in _RIGHT.findall(grant["rights"]):
        name = written_name.strip()
        if name not in ("SELECT", "SHOW VIEW", "USAGE"):
            rights.append(f"{name} {columns}".strip())
    if grant["option"]:
        rights.append("GRANT OPTION")
    revoked = ", ".join(rights)
    object_name = grant["place"]
    statement = f"REVOKE {revoked} ON {object_name} FROM PUBLIC;"
    # Any SQL mode reads names in backticks.
    return re.sub(r'"((?:[^"]|"")*)"', r"`\1`", statement)


def encryption_of(address: str) -> dict[str, Any]:
    """The driver's arguments for the encryption that an address's options ask for; `ssl-mode` is `ssl_mode`. As in
    MySQL's own client a certificate authority without a mode is VERIFY_CA.
    """
    options: dict[str, str] = {}
    files: dict[str, str] = {}  # certificates and keys
    for written_key, value in parse_qsl(urlsplit(address).query):
        key = written_key.replace("-", "_").lower()
        options[key] = value
        if key not in ("ssl_mode", "sql_mode"):
            files[key.removeprefix("ssl_")] = value
    unknown = [key for key in options if key not in _OPTIONS]
    if unknown:
        known = ", ".join(_OPTIONS)
        raise ValueError(f"the option {unknown[0]!r} of a MySQL address is not known: {known} are")
    default = "REQUIRED" if files else "PREFERRED"
    if "ca" in files:
        default = "VERIFY_CA"
    mode = options.get("ssl_mode", default).upper()
    if mode not in _MODES:
        known = ", ".join(_MODES)
        raise ValueError(f"ssl_mode={mode} is not known: {known} are")
    if mode in ("DISABLED", "PREFERRED") and files:
        first_file = next(iter(files))
        raise ValueError(f"ssl_mode={mode} asks for no certificate, and {first_file} names one")
    if mode == "DISABLED":
        return {"ssl_disabled": True}
    if mode == "PREFERRED":
        return {}
    if mode != "REQUIRED" and "ca" not in files:
        raise ValueError(f"ssl_mode={mode} needs ssl_ca, the file of the certificate authority")
    checks = "none" if mode == "REQUIRED" else "required"
    return {"ssl": {**files, "check_hostname": mode == "VERIFY_IDENTITY", "verify_mode": checks}}


def open_readonly_connection(
    location: str, seconds: float, unbuffered: bool = False, mode: str | None = MODE
) -> pymysql.Connection[Any]:
    """A connection whose statements may only read, and take so many seconds. Without a mode it has that of the address,
    or else the server's.
    """
    import pymysql
    from pymysql.cursors import Cursor, SSCursor

    address = urlsplit(location)
    encryption = encryption_of(location)
    password = unquote(address.password or "")
    database = unquote(address.path.strip("/"))
    if mode is None:
        mode = _address_mode(location)
    cursor_class = SSCursor if unbuffered else Cursor
    connection_class = _connection_class()
    connection = connection_class(
        host=address.hostname or "127.0.0.1",
        port=address.port or PORT,
        user=unquote(address.username or ""),
        password=password.encode(),  # the driver would send a str in Latin-1
        database=database or None,
        charset="utf8mb4",
        sql_mode=mode,
        autocommit=True,
        local_infile=False,
        connect_timeout=max(2, int(seconds)),
        read_timeout=max(2, int(seconds * 2)),
        conv=_conversions(),
        cursorclass=cursor_class,
        **encryption,
    )
    if "ssl" in encryption and not _is_encrypted(connection):  # the driver goes on without, where a server has none
        connection.close()
        raise pymysql.OperationalError(2026, "the server does not encrypt the connection")
    clock = f"max_execution_time = {int(seconds * 1000)}"
    if "MariaDB" in str(connection.server_version):
        clock = f"max_statement_time = {seconds:.3f}"
    lock_seconds = max(1, int(seconds * 0.9))
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION {clock}, lock_wait_timeout = {lock_seconds}")
        cursor.execute("SET SESSION TRANSACTION READ ONLY")
    return connection


@functools.cache
def _connection_class() -> type[pymysql.Connection[Any]]:
    """The driver's connection, which loads the system's certificate authorities only if it checks a certificate: that
    takes 30 ms, and each statement has a connection of its own.
    """
    import ssl

    from pymysql.connections import Connection

    class SqlConnection(Connection):  # type: ignore[misc]
        def _create_ssl_ctx(self, options: Any) -> ssl.SSLContext:
            if options:
                context: ssl.SSLContext = super()._create_ssl_ctx(options)
                return context
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context

    return SqlConnection


def _conversions() -> dict[Any, Any]:
    """The driver's conversions of values, without those of types that are read as text."""
    from pymysql.constants import FIELD_TYPE
    from pymysql.converters import conversions

    names = [name for name in _PLAIN.split() if hasattr(FIELD_TYPE, name)]
    as_text = {getattr(FIELD_TYPE, name) for name in names}
    return {kind: convert for kind, convert in conversions.items() if kind not in as_text}


def _is_encrypted(connection: pymysql.Connection[Any]) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
        return all(row[1] for row in cursor.fetchall())


def _address_mode(location: str) -> str | None:
    """The SQL mode that an address names; None if it names none."""
    for key, value in parse_qsl(urlsplit(location).query, keep_blank_values=True):
        if key.replace("-", "_").lower() == "sql_mode":
            return value
    return None


def server_mode(connection: pymysql.Connection[Any]) -> frozenset[str]:
    """The SQL modes of a connection that was opened without one of ours."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@sql_mode")
        ((text,),) = cursor.fetchall()
    return frozenset(str(text).upper().split(",")) - {""}


def session_mode(server: Set[str]) -> str:
    """The SQL mode of a session whose statements are meant in the server's: names stand in double quotes there."""
    modes = (server & _READABLE_MODES) | {"ANSI_QUOTES"}
    return ",".join(sorted(modes))


@functools.cache
def _pieces(has_ansi_quotes: bool, has_escapes: bool) -> re.Pattern[str]:
    """The pattern of a statement's comments, texts and names as the server reads them."""
    unit = r"[^{0}\\]|\\.|{0}{0}" if has_escapes else "[^{0}]|{0}{0}"
    in_single_quotes = unit.format("'")
    in_double_quotes = unit.format('"')
    double = 'name>"(?:[^"]|"")+"' if has_ansi_quotes else f'double>"(?:{in_double_quotes})*"'
    texts = f"(?P<single>'(?:{in_single_quotes})*')|(?P<{double})"
    comments = r"(?P<comment>--(?=\s|\Z)[^\n]*|/\*(?![!M+]).*?\*/)|(?P<hash>\#[^\n]*)"
    return re.compile(rf"{comments}|{texts}|(?P<ticks>`(?:[^`\r\n]|``)+`)|[^'\"`#/-]+|.", re.DOTALL)


def rewritten(sql: str, server: Set[str]) -> str:
    """A statement of the server's mode for a session in `session_mode`: the same tokens, as `guard` reads them."""
    has_escapes = "NO_BACKSLASH_ESCAPES" not in server

    def piece(match: re.Match[str]) -> str:
        text = match[0]
        kind = match.lastgroup
        inside = text[1:-1]
        if kind == "single" and has_escapes:
            return "'" + _unescaped(inside, "'", has_escapes) + "'"
        if kind == "double":  # blanks around it, for x"41" and 'a'"b" are two tokens
            return " '" + _unescaped(inside, '"', has_escapes) + "' "
        if kind == "ticks":
            return base.quoted(inside.replace("``", "`"))
        if kind == "hash":
            return " "
        return text

    pieces = _pieces("ANSI_QUOTES" in server, has_escapes)
    return pieces.sub(piece, sql)


def _unescaped(text: str, quote: str, has_escapes: bool) -> str:
    """The inside of a text for single quotes, with each of these doubled and no backslash before a quote."""

    def unit(match: re.Match[str]) -> str:
        sign = match[0][-1]
        if sign == "'":
            return "''"
        if sign == '"':
            return sign
        return match[0]

    escape = r"\\.|" if has_escapes else ""
    return re.sub(rf"{escape}{quote}{quote}|'", unit, text, flags=re.DOTALL)


# The modes that the analysis of a statement must know, and their part of a reading's name.
READINGS = (("ANSI_QUOTES", "ansi"), ("PIPES_AS_CONCAT", "pipes"), ("NO_BACKSLASH_ESCAPES", "raw"))
_known_modes: dict[str, frozenset[str]] = {}  # SQL modes by address, for servers that were asked once


def _modes_of(location: str) -> frozenset[str]:
    """The SQL modes in which a database's statements are meant; no modes if the server does not answer."""
    import pymysql

    if location not in _known_modes:
        try:
            with contextlib.closing(open_readonly_connection(location, READING_SECONDS, mode=None)) as connection:
                _known_modes[location] = server_mode(connection)
        except (pymysql.Error, OSError, ValueError):
            return frozenset()
    return _known_modes[location]


def _view_names(query: str) -> base.StatementNames | None:
    """The names in a view's query, as the server writes it: names in backticks, texts with backslashes, and the
    database before each function that is not its own. None if the server does not show the query, if the query calls
    such a function or another that no statement may call, or if we cannot read it to its end.
    """

    def unescape(match: re.Match[str]) -> str:
        return "''" if match[1] == "'" else match[1]

    unescaped = _ESCAPED.sub(unescape, query)
    text = _in_double_quotes(unescaped)
    tokens, rest = lexed(text)
    if not tokens or rest:
        return None
    for (kind, _), (_, after) in itertools.pairwise(tokens):
        if kind == "name" and after == "(":
            return None
    for index, (kind, word) in enumerate(tokens):
        if kind == "word" and word_refusal(tokens, index, word, "mysql"):
            return None
    return _statement_names(text)


class MysqlSession(base.DatabaseSession):
    """One connection at a time; `location` is an address such as mysql://reader@host/bench.

    Its user must be a plain reader, that holds SELECT and nothing else: another is turned away.
    """

    engine = "mysql"
    renewed_s = base.CATALOGUE_S
    _server_mode: frozenset[str] | None = None  # the SQL modes in which statements are meant

    def _connect(self, checks_grants: bool = True) -> Any:
        import pymysql

        timeout_s = self.bounds.timeout_s
        try:
            if self._server_mode is None:
                with contextlib.closing(open_readonly_connection(self._location, timeout_s, mode=None)) as first:
                    self._server_mode = server_mode(first)
            mode = session_mode(self._server_mode)
            connection = open_readonly_connection(self._location, timeout_s, unbuffered=True, mode=mode)
            if not checks_grants:
                return connection
            with connection.cursor() as cursor:
                cursor.execute("SHOW GRANTS")
                grants = [str(row[0]) for row in cursor.fetchall()]
        except (pymysql.Error, OSError, ValueError):
            raise base.OpenFailure(*base.UNREACHED) from None
        if not all(map(is_reader, grants)):
            connection.close()
            reason = "the user of this connection may do more than read; use a plain one"
            raise base.OpenFailure("too_privileged", reason)
        return connection

    def answer(self, sql: str, max_rows: int) -> base.RawResult:
        """Run one statement in a read-only transaction, on a connection that has run nothing else of a caller's."""
        connection = self._connection or self._connect(checks_grants=False)
        self._connection = connection
        server = self._server_mode or frozenset()
        sql = rewritten(sql, server)
        refused = token_refusal(sql, "mysql") or _server_refusal(sql)
        if refused is None and "NO_BACKSLASH_ESCAPES" not in server:
            texts = (match[0] for match in TOKEN.finditer(sql) if match.lastgroup == "text")
            if not all(map(_BACKSLASHED.fullmatch, texts)):  # `guard` and the server must read the same tokens
                refused = base.failure(ERROR, "syntax", "a text is not closed")
        if refused is None and self.hidden is not None:
            refused = self.hidden.refusal(_statement_names(sql))
        if refused is not None:
            return refused
        self.start_clock()
        self._connection = None  # variables, temporary tables, locks: with it goes all that a statement could leave
        cursor = connection.cursor()

        def kill() -> None:
            other = open_readonly_connection(self._location, self.bounds.timeout_s)
            with contextlib.closing(other), other.cursor() as killer:
                killer.execute(f"KILL QUERY {connection.thread_id()}")

        try:
            with base.interrupted_at(self.deadline, kill):
                cursor.execute(f"SET SESSION sql_select_limit = {max_rows + 1}")
                cursor.execute("START TRANSACTION READ ONLY")
                cursor.execute(body(sql))
                return self.result(cursor, max_rows)
        finally:
            cursor.connection = None  # it would fetch all rows that are left
            connection._force_close()

    def closure(self, hidden: base.Hidden) -> base.Hidden:
        """The hidden names, what is computed from them, and the views of all databases that read them."""
        self._connection = self._connection or self._connect(checks_grants=False)
        with self._connection.cursor() as cursor:
            cursor.execute(_COMPUTED)
            computed = [(str(table), str(column)) for table, column in cursor.fetchall()]
            cursor.execute(_ELSEWHERE)
            elsewhere = [str(row[0]) for row in cursor.fetchall()]
            cursor.execute(_VIEWS)
            views: list[tuple[str, base.StatementNames | None]] = []
            for name, sql in cursor.fetchall():
                names = _view_names(str(sql or ""))
                views.append((str(name), names))
        return hidden.extended(elsewhere, computed=computed).with_views(views)

    def explain(self, error: Exception) -> tuple[str, str, str] | None:
        import pymysql

        if not isinstance(error, pymysql.Error) or not error.args:
            return None
        number = error.args[0]
        if not isinstance(number, int):
            return None
        end = (ERROR, "runtime")
        for known_end, numbers in _ERROR_NUMBERS.items():
            if number in numbers:
                end = known_end
        status, error_class = end
        message = "the server gave no answer" if status == UNAVAILABLE else str(error.args[-1])
        return status, error_class, message

    def probe(self) -> None:
        self._connection = self._connect()
