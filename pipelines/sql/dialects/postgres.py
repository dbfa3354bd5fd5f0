"""PostgreSQL: a role that may only read, a read-only transaction for each statement, a cursor that takes only
queries, and a session that forgets everything after each of them.
"""

from __future__ import annotations

import contextlib
import decimal
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pipelines.core.registry import dialect
from pipelines.sql.dialects import base
from pipelines.sql.dialects.base import ERROR, LIMIT, REFUSED, TIMEOUT, UNAVAILABLE
from pipelines.sql.dialects.dialect import Catalog, Dialect, Query, Role
from pipelines.sql.dialects.guard import body, token_refusal
from pipelines.sql.dialects.parse_trees import postgres_names, postgres_refusal

if TYPE_CHECKING:
    import psycopg

Answer = TypeVar("Answer")
# Status and error class by the class of the SQLSTATE (its first two characters), or by all of it.
_STATES = {
    "57014": (TIMEOUT, "timeout"),
    "25P03": (TIMEOUT, "timeout"),
    "55P03": (UNAVAILABLE, "database_locked"),
    "42P01": (ERROR, "no_such_table"),
    "42703": (ERROR, "no_such_column"),
    "42702": (ERROR, "ambiguous_column"),
    "42883": (ERROR, "no_such_function"),
    "42803": (ERROR, "misuse"),
    "42601": (ERROR, "syntax"),
    "42501": (REFUSED, "not_authorized"),
    "42P03": (REFUSED, "not_authorized"),
    "0A000": (REFUSED, "not_authorized"),
    "25006": (REFUSED, "not_authorized"),
    "54001": (ERROR, "too_complex"),
    "54000": (LIMIT, "cell_limit"),
    "53": (LIMIT, "memory_limit"),
    "22": (ERROR, "runtime"),
    "42": (ERROR, "syntax"),
    "08": (UNAVAILABLE, "database_missing"),
    "57": (UNAVAILABLE, "database_missing"),
    "58": (UNAVAILABLE, "disk"),
    "XX": (UNAVAILABLE, "database_corrupt"),
}
# Types whose text is the server's own: Python has no infinite dates, no year 10000, no months in a duration.
_AS_TEXT = """
    date time timetz timestamp timestamptz interval json jsonb uuid inet cidr record int4range int8range numrange
    daterange tsrange tstzrange int4multirange int8multirange nummultirange datemultirange tsmultirange tstzmultirange
"""
_FILES = ("PGPASSFILE", "PGSERVICEFILE", "PGSSLCERT", "PGSSLKEY", "PGSSLROOTCERT", "PGSSLCRL")
# The attributes and memberships that make a role more than a reader.
PRIVILEGES = """
SELECT r.rolsuper OR r.rolcreaterole OR r.rolcreatedb OR r.rolreplication OR r.rolbypassrls
    OR pg_has_role(current_user, 'pg_read_server_files', 'member')
    OR pg_has_role(current_user, 'pg_write_server_files', 'member')
    OR pg_has_role(current_user, 'pg_execute_server_program', 'member')
    OR pg_has_role(current_user, 'pg_signal_backend', 'member')
FROM pg_roles r WHERE r.rolname = current_user
"""
_WRITABLE = """
SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND c.relkind IN ('r', 'p', 'v', 'f')
    AND (has_table_privilege(c.oid, 'DELETE, TRUNCATE') OR has_any_column_privilege(c.oid, 'INSERT, UPDATE'))
ORDER BY 1
"""
_MAX_LISTED = 3  # tables that a role may write to, as a person sees them
# The rights of PUBLIC to write, table by table, with the columns that it may write alone.
_PUBLIC_WRITES = """
SELECT 'REVOKE ' || string_agg(DISTINCT privilege_type || columns, ', ') || ' ON ' || relation || ' FROM PUBLIC;'
FROM (
    SELECT oid, privilege_type, '' AS columns FROM pg_class, aclexplode(relacl) WHERE grantee = 0
    UNION ALL SELECT attrelid, privilege_type, ' (' || quote_ident(attname) || ')'
    FROM pg_attribute, aclexplode(attacl) WHERE grantee = 0
) AS of_public JOIN pg_class c USING (oid)
    CROSS JOIN LATERAL (SELECT relnamespace::regnamespace || '.' || quote_ident(relname)) AS named(relation)
WHERE privilege_type IN ('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE') AND relkind IN ('r', 'p', 'v', 'f')
    AND relnamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
GROUP BY relation ORDER BY relation
"""
# The schemas that are read: those that the address itself has in its search path; of any other path the first.
_READ = """(
    SELECT CASE source WHEN 'client' THEN current_schemas(false) ELSE ARRAY[current_schema()] END
    FROM pg_settings WHERE name = 'search_path'
)::name[]"""
# The name of a relation in cards and prompts: qualified if its schema is not the first; null if that is not read.
_SHOWN = f"""(
    SELECT CASE nspname WHEN current_schema() THEN '' ELSE nspname || '.' END || relname
    FROM pg_class r JOIN pg_namespace s ON s.oid = relnamespace WHERE r.oid = {{}} AND nspname = ANY({_READ})
)"""
# Each partition, at any depth, beside each partitioned table above it.
_PARTITIONS = """WITH RECURSIVE partition(above, oid) AS (
    SELECT inhparent, inhrelid FROM pg_inherits JOIN pg_class p ON p.oid = inhparent WHERE p.relkind = 'p'
    UNION ALL SELECT above, inhrelid FROM partition JOIN pg_inherits ON inhparent = partition.oid
)"""
# Whether a relation is no partition of a table that is shown: that one has its rows.
_IS_WHOLE = f"""NOT EXISTS (
    SELECT FROM partition JOIN pg_class r ON r.oid = above JOIN pg_namespace s ON s.oid = relnamespace
    WHERE partition.oid = {{}} AND nspname = ANY({_READ}) AND has_any_column_privilege(above, 'SELECT')
)"""
# The names by which `Hidden` is enforced have their schema, always.
_QUALIFIED = (
    "(SELECT nspname || '.' || relname FROM pg_class r JOIN pg_namespace s ON s.oid = relnamespace WHERE r.oid = {})"
)
_RELATIONS = f"SELECT relname::text, {_QUALIFIED.format('c.oid')}, pg_table_is_visible(oid) FROM pg_class c"
# The SQL of views and of policies, which pick the rows that a reader sees.
_BODIES = f"""
SELECT schemaname || '.' || viewname, definition FROM pg_views
WHERE schemaname NOT IN ('pg_catalog', 'information_schema')
UNION ALL SELECT schemaname || '.' || matviewname, definition FROM pg_matviews
UNION ALL SELECT {_QUALIFIED.format("polrelid")},
    format('SELECT 1 FROM %s WHERE %s', polrelid::regclass, pg_get_expr(polqual, polrelid))
FROM pg_policy JOIN pg_class c ON c.oid = polrelid WHERE relrowsecurity AND polqual IS NOT NULL
"""
_CONDITIONS = """
SELECT nspname || '.' || typname, regexp_replace(pg_get_constraintdef(c.oid), '^CHECK', 'SELECT 1 WHERE')
FROM pg_constraint c JOIN pg_type t ON t.oid = c.contypid JOIN pg_namespace n ON n.oid = t.typnamespace
WHERE contype = 'c' AND nspname <> 'information_schema'
"""
_FOREIGN = f"SELECT {_QUALIFIED.format('ftrelid')}, array_to_string(ftoptions, ' ') FROM pg_foreign_table"
# Functions of the server that read no table by its name: neither do they run a text.
_PURE = """
SELECT proname::text FROM pg_proc GROUP BY proname
HAVING bool_and(provolatile IN ('i', 's') AND pronamespace::regnamespace::text = 'pg_catalog')
    AND proname !~ '(_to_xml|^pg_|^ts_|^lo_)'
"""
_SEQUENCES = f"SELECT {_QUALIFIED.format('c.oid')} FROM pg_class c WHERE relkind = 'S'"
_PARTITIONED = f"""
SELECT {_QUALIFIED.format("partrelid")}, coalesce(attname::text, '') FROM pg_partitioned_table p
    CROSS JOIN unnest(partattrs) k(n) LEFT JOIN pg_attribute a ON a.attrelid = partrelid AND attnum = k.n
"""
# Types of the database's own with the columns that have them; the types of rows, and of lists of either.
_TYPES = f"""
SELECT nspname || '.' || typname, {_QUALIFIED.format("c.oid")}, attname::text
FROM pg_type t JOIN pg_namespace n ON n.oid = typnamespace LEFT JOIN pg_class own ON own.oid = typrelid
    LEFT JOIN (pg_attribute a JOIN pg_class c ON c.oid = attrelid AND c.relkind IN ('r', 'p', 'f'))
        ON attnum > 0 AND (atttypid IN (t.oid, typarray) OR t.typelem <> 0 AND atttypid = t.typelem)
WHERE nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
    AND (typtype IN ('e', 'd', 'r', 'm') OR own.relkind = 'c' OR typelem <> 0 AND NOT EXISTS (
        SELECT FROM pg_type e WHERE e.oid = t.typelem AND e.typrelid <> 0))
"""
_ROW_TYPES = f"""
SELECT {_QUALIFIED.format("e.typrelid")}, nspname || '.' || t.typname
FROM pg_type t JOIN pg_type e ON e.oid IN (t.oid, t.typelem) AND e.typrelid <> 0
    JOIN pg_namespace n ON n.oid = t.typnamespace
WHERE nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
"""
_ATTRIBUTES = (
    f"SELECT {_QUALIFIED.format('attrelid')}, array_agg(attname::text) FROM pg_attribute"
    " WHERE has_any_column_privilege(attrelid, 'SELECT') GROUP BY attrelid"
)
# Functions that (value).name calls, and whether table.name calls them too, with a row; not the names of columns.
_CALLS = """
SELECT proname::text, bool_or(typtype IN ('c', 'd', 'p')) FROM pg_proc JOIN pg_type t ON t.oid = proargtypes[0]
WHERE pronargs - pronargdefaults < 2 AND NOT EXISTS (
    SELECT FROM pg_attribute JOIN pg_class c ON c.oid = attrelid WHERE attname = proname
        AND relnamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
) GROUP BY 1
"""
# Partitions, and what inherits otherwise.
_PARTS = f"SELECT {_QUALIFIED.format('inhparent')}, {_QUALIFIED.format('inhrelid')} FROM pg_inherits"
_COMPUTED = f"SELECT {_QUALIFIED.format('attrelid')}, attname::text FROM pg_attribute WHERE attgenerated <> ''"
# Own functions and operators; an extension's are known by their names, as the engine's are.
_FUNCTIONS = """
SELECT DISTINCT proname::text FROM pg_proc
WHERE pronamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
    AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_proc'::regclass AND objid = pg_proc.oid AND deptype = 'e')
UNION SELECT oprname::text
FROM pg_operator o JOIN pg_proc ON pg_proc.oid = oprcode JOIN pg_language l ON l.oid = prolang
WHERE lanname NOT IN ('internal', 'c') AND oprnamespace::regnamespace::text <> 'pg_catalog'
    AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_operator'::regclass AND objid = o.oid AND deptype = 'e')
"""


@dialect("postgres")
class Postgres(Dialect):
    """PostgreSQL: one or more schemas on a server, named by the search path of an address."""

    title = "PostgreSQL"
    session = "pipelines.sql.dialects.postgres:PostgresSession"
    sqlglot = "postgres"
    folds_names = True
    is_server = True
    schemes = ("postgresql://", "postgres://")
    schema_query = f"""
SELECT nspname::text, array_position({_READ}, nspname) FROM pg_namespace
WHERE has_schema_privilege(oid, 'USAGE') AND nspname !~ '^pg_' AND nspname <> 'information_schema' ORDER BY 2, 1
"""
    password_variable = "PGPASSWORD"
    tables_query = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    # information_schema leaves materialized views out, and does not say what an array or a type of the user's holds.
    columns_query = f"""
{_PARTITIONS}
SELECT CASE nspname WHEN current_schema() THEN '' ELSE nspname || '.' END || relname, attname, CASE typtype
    WHEN 'e' THEN (SELECT 'ENUM(' || string_agg(quote_literal(enumlabel), ', ' ORDER BY enumsortorder) || ')'
        FROM pg_enum WHERE enumtypid = t.oid)
    ELSE format_type(CASE typtype WHEN 'd' THEN typbasetype ELSE t.oid END, NULL) END
FROM pg_attribute JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace n ON n.oid = relnamespace
    JOIN pg_type t ON t.oid = atttypid
WHERE nspname = ANY({_READ}) AND relkind IN ('r', 'p', 'v', 'f', 'm') AND attnum > 0 AND NOT attisdropped
    AND has_column_privilege(c.oid, attnum, 'SELECT') AND {_IS_WHOLE.format("c.oid")}
ORDER BY array_position({_READ}, nspname), relname, attnum
"""
    views_query = f"""
SELECT CASE table_schema WHEN current_schema() THEN '' ELSE table_schema || '.' END || table_name
FROM information_schema.tables WHERE table_schema = ANY({_READ}) AND table_type <> 'BASE TABLE'
"""
    # information_schema shows constraints to their owner only; the catalog shows them to every reader.
    keys_query = f"""
{_PARTITIONS} SELECT {_SHOWN.format("c.conrelid")},
    CASE c.contype WHEN 'p' THEN 'PRIMARY KEY' ELSE 'FOREIGN KEY' END,
    ARRAY(SELECT a.attname::text FROM unnest(c.conkey) WITH ORDINALITY k(n, o)
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.n ORDER BY k.o),
    CASE WHEN {_IS_WHOLE.format("c.confrelid")} THEN {_SHOWN.format("c.confrelid")} END,
    ARRAY(SELECT a.attname::text FROM unnest(c.confkey) WITH ORDINALITY k(n, o)
        JOIN pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.n ORDER BY k.o)
FROM pg_constraint c JOIN pg_namespace n ON n.oid = c.connamespace
WHERE n.nspname = ANY({_READ}) AND c.contype IN ('p', 'f') ORDER BY c.conrelid, c.oid
"""
    partitions_query = f"""
{_PARTITIONS} SELECT {_SHOWN.format("above")}, count(*) FROM partition JOIN pg_class p ON p.oid = partition.oid
WHERE p.relkind <> 'p' GROUP BY above
"""
    comments_query = f"""
SELECT {_SHOWN.format("c.oid")}, coalesce(a.attname::text, ''), d.description
FROM pg_description d JOIN pg_class c ON d.classoid = 'pg_class'::regclass AND c.oid = d.objoid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.objsubid AND d.objsubid > 0
WHERE n.nspname = ANY({_READ})
"""

    @staticmethod
    def with_password(address: str, password: str) -> str:
        return _conninfo(address, password=password)

    @classmethod
    def worker_environment(cls) -> dict[str, str]:
        """The variables of libpq: a worker must reach the same server in the same way as `sqltrain connect` does."""
        variables = {}
        for name, value in os.environ.items():
            if name.startswith("PG") or name == "HOME":
                variables[name] = value
        for name in _FILES:  # a worker's working folder is another one
            if os.path.exists(variables.get(name, "")):
                variables[name] = os.path.abspath(variables[name])
        return variables

    @staticmethod
    def role(query: Query) -> Role:
        if any(row[0] for row in query(PRIVILEGES)):
            right = "act as a superuser, or make roles and databases, or reach the server's files"
            return Role((right,), is_turned_away=True)
        writable = [str(row[0]) for row in query(_WRITABLE)]
        writes = [f"write to {name}" for name in writable[:_MAX_LISTED]]
        n_more = len(writable) - len(writes)
        if n_more:
            writes.append(f"write to {n_more} more tables")
        revocations = tuple(str(row[0]) for row in query(_PUBLIC_WRITES))
        has_own_writes = len(revocations) < len(writable)
        return Role(tuple(writes), revocations=revocations, has_own_writes=has_own_writes)

    @staticmethod
    def reader_grants(address: str, schemas: Sequence[str]) -> list[str]:
        name = urlsplit(address).path.strip("/")
        role = f'"{name}_reader"'
        granted_schemas = ", ".join(map(base.quoted, schemas or ("public",)))
        return [
            f"CREATE ROLE {role} LOGIN PASSWORD 'a new password' NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT;",
            f'GRANT CONNECT ON DATABASE "{name}" TO {role};',
            f"GRANT USAGE ON SCHEMA {granted_schemas} TO {role};",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA {granted_schemas} TO {role};",
            f"ALTER ROLE {role} SET default_transaction_read_only = on;",
        ]

    @staticmethod
    @contextlib.contextmanager
    def catalog(location: str, view_seconds: float) -> Iterator[Catalog]:
        """An open catalog; the server holds views to their time."""
        import psycopg
        from psycopg.conninfo import conninfo_to_dict

        given_options = conninfo_to_dict(location).get("options") or ""
        timeout_ms = int(view_seconds * 1000)
        options = f"{given_options} -c default_transaction_read_only=on -c statement_timeout={timeout_ms}"
        with psycopg.connect(location, options=options, autocommit=True, connect_timeout=10) as connection:

            def query(sql: str) -> Iterable[Sequence[Any]]:
                return connection.execute(sql.encode()).fetchall()

            yield Catalog(query, query, time.monotonic() + view_seconds)

    @staticmethod
    def database_address(address: str, name: str) -> str:
        """The address with the schema of that name, in lower case, as its search path."""
        schema = f'"{name.lower()}"'.replace(" ", "\\ ")
        return _conninfo(address, options=f"-csearch_path={schema}")

    @classmethod
    def with_schemas(cls, address: str, schemas: Sequence[str]) -> str:
        url = urlsplit(address)
        options = dict(parse_qsl(url.query, keep_blank_values=True))
        names = ",".join(map(cls.identifier, schemas))
        path = re.sub(r"([\\\s])", r"\\\1", names)
        given_options = options.get("options", "")
        options["options"] = f"{given_options} -csearch_path={path}".strip()
        query = urlencode(options, quote_via=quote)
        return url._replace(query=query).geturl()


def _conninfo(address: str, **changes: str) -> str:
    from psycopg import ProgrammingError
    from psycopg.conninfo import make_conninfo

    try:
        return make_conninfo(address, **changes)
    except ProgrammingError:  # its message may quote a password
        raise ValueError("this is not the address of a PostgreSQL server") from None


Columns = dict[str, frozenset[str]]  # hidden columns by table


def _qualified_names(hidden: base.Hidden, relations: Sequence[Sequence[Any]]) -> tuple[set[str], Columns]:
    """The hidden tables and columns with the qualified names of their relations: a hidden name without a schema holds
    in every schema, for cards of one database may begin with others.
    """
    tables = set(hidden.tables)
    columns = dict(hidden.columns)
    for bare, qualified, _ in relations:
        name = base.fold(bare)
        full_name = base.fold(qualified)
        if name in hidden.tables:
            tables.add(full_name)
        if name in hidden.columns:
            known = columns.get(full_name, frozenset())
            columns[full_name] = known | hidden.columns[name]
    return tables, columns


def _with_partitions(
    tables: set[str], columns: Columns, partitions: Sequence[tuple[str, str]]
) -> tuple[set[str], Columns]:
    """The same with all partitions, down from a table, and all tables that show them, up from a partition; `partitions`
    are pairs of a table and one of its partitions.
    """
    all_tables = set(tables)
    all_columns = dict(columns)
    upwards = [(part, parent) for parent, part in partitions]
    for steps in (partitions, upwards):
        reached = set(tables)
        carried = dict(columns)
        for _ in steps:  # partitions nest no deeper than there are steps
            for start, end in steps:
                if start in reached:
                    reached.add(end)
                if start in carried:
                    carried[end] = carried.get(end, frozenset()) | carried[start]
        all_tables |= reached
        for table, names in carried.items():
            all_columns[table] = all_columns.get(table, frozenset()) | names
    return all_tables, all_columns


def _certain_attributes(listed: Iterable[tuple[str, Sequence[str]]]) -> dict[str, frozenset[str]]:
    """The columns of each table by its folded name; of tables whose names fold alike those that all of them have."""
    attributes: dict[str, frozenset[str]] = {}
    for written_table, written_names in listed:
        table = base.fold(written_table)
        names = frozenset(written_names)
        attributes[table] = attributes.get(table, names) & names
    return attributes


class PostgresSession(base.DatabaseSession):
    """A connection; `location` is its connection string.

    Its role must be a plain reader (`infra/postgres/reader.sql` makes one): a superuser is turned away.
    """

    engine = "postgres"
    renewed_s = base.CATALOGUE_S
    _connection: psycopg.Connection[Any]
    _visible: Mapping[str, str] = {}  # Qualified names of relations by bare ones, if something is hidden.

    def _connect(self) -> psycopg.Connection[Any]:
        import psycopg
        import psycopg.conninfo
        from psycopg.adapt import Loader

        timeout_ms = max(1, int(self.bounds.timeout_s * 1000))
        lock_ms = max(1, int(timeout_ms * 0.9))
        options = (
            f"-c default_transaction_read_only=on -c statement_timeout={timeout_ms}"
            f" -c lock_timeout={lock_ms} -c standard_conforming_strings=on"
            " -c idle_in_transaction_session_timeout=60000 -c cursor_tuple_fraction=1.0"
            " -c client_encoding=UTF8 -c datestyle=ISO -c intervalstyle=postgres -c bytea_output=hex"
        )
        try:
            given_options = psycopg.conninfo.conninfo_to_dict(self._location).get("options", "")
            connection = psycopg.connect(
                self._location,
                options=f"{given_options} {options}",
                connect_timeout=max(2, int(self.bounds.timeout_s)),
                autocommit=True,
                application_name="sqltrain",
                prepare_threshold=None,
            )
            row = connection.execute(PRIVILEGES).fetchone()
            self._calls: dict[str, bool] = dict(connection.execute(_CALLS).fetchall())
            ((self._schemas,),) = connection.execute("SELECT current_schemas(false)::text[]").fetchall()
        except psycopg.Error:
            raise base.OpenFailure(*base.UNREACHED) from None
        if row is None or row[0]:
            connection.close()
            reason = "the role of this connection may do more than read; use a plain one"
            raise base.OpenFailure("too_privileged", reason)

        # Values are read as text that psycopg would make more of.
        class TextLoader(Loader):
            def load(self, data: Any) -> str:
                return bytes(data).decode("utf-8", "replace")

        class NumericLoader(Loader):
            """A numeric may have 131,072 digits."""

            def load(self, data: Any) -> Any:
                text = bytes(data).decode("ascii")
                return base.plain_number(decimal.Decimal(text))

        for name in _AS_TEXT.split():
            connection.adapters.register_loader(name, TextLoader)
        connection.adapters.register_loader("numeric", NumericLoader)
        return connection

    def answer(self, sql: str, max_rows: int) -> base.RawResult:
        refused = token_refusal(sql, "postgres")
        if refused is None:
            refused = postgres_refusal(sql, self.hidden, self._calls, self._schemas, self._visible)
        if refused is not None:
            return refused
        return self._reconnecting(lambda: self._rows(sql, max_rows))

    def closure(self, hidden: base.Hidden) -> base.Hidden:
        """The hidden names, what is computed from them, and the views that read them. Partitions of a table hold its
        rows under names of their own, and it shows theirs.
        """
        return self._reconnecting(lambda: self._closed(hidden))

    def _closed(self, hidden: base.Hidden) -> base.Hidden:
        execute = self._connection.execute
        relations = execute(_RELATIONS).fetchall()
        self._visible = {name: qualified for name, qualified, is_visible in relations if is_visible}
        partitions = []
        for parent, part in execute(_PARTS).fetchall():
            partitions.append((base.fold(parent), base.fold(part)))
        tables, columns = _qualified_names(hidden, relations)
        tables, columns = _with_partitions(tables, columns, partitions)
        # A partition by a hidden column tells of it by its name and by the number of its rows; one by an expression,
        # which has no column here, may read a hidden column.
        for written_table, column in execute(_PARTITIONED).fetchall():
            table = base.fold(written_table)
            if table in columns and (not column or base.fold(column) in columns[table]):
                columns[table] |= {"tableoid"}
                tables |= {part for parent, part in partitions if parent == table}
        attributes = _certain_attributes(execute(_ATTRIBUTES).fetchall())
        functions = [str(row[0]) for row in execute(_FUNCTIONS).fetchall()]
        sequences = [str(row[0]) for row in execute(_SEQUENCES).fetchall()]
        computed = execute(_COMPUTED).fetchall()
        closure = base.Hidden(frozenset(tables), columns, attributes=attributes)
        closure = closure.extended(sequences, computed, functions)
        return self._with_bodies(self._with_types(closure))

    def _with_types(self, hidden: base.Hidden) -> base.Hidden:
        """The hidden names with the types of the rows of hidden tables, those that no shown column has, and lists."""
        execute = self._connection.execute
        veiled = hidden.tables | hidden.columns.keys()
        names: set[str] = set()
        for table, name in execute(_ROW_TYPES).fetchall():
            if base.fold(table) in veiled:
                names.add(str(name))
        types = execute(_TYPES).fetchall()
        visible: set[str] = set()
        for name, table, column in types:
            if table and not hidden.hides(table, column):
                visible.add(name)
        for name, _, _ in types:
            if name not in visible:
                names.add(str(name))
        bare_names = {name.partition(".")[2] for name in names}
        return hidden.extended(types=names | bare_names)

    def _with_bodies(self, hidden: base.Hidden) -> base.Hidden:
        """The hidden names with the objects whose own SQL reads them: views, tables whose rows a policy picks, foreign
        tables whose options name something hidden, and types with conditions.
        """
        execute = self._connection.execute
        pure = frozenset(str(row[0]) for row in execute(_PURE).fetchall())
        bodies: list[tuple[str, base.StatementNames | None]] = []
        for name, sql in execute(_BODIES).fetchall():
            body_names = postgres_names(str(sql), self._visible, pure)
            bodies.append((str(name), body_names))
        for name, options in execute(_FOREIGN).fetchall():
            option_names = self._names_in_options(str(options))
            bodies.append((str(name), option_names))
        closure = hidden.with_views(bodies)
        types: list[str] = []
        for name, sql in execute(_CONDITIONS).fetchall():
            condition = postgres_names(str(sql), self._visible, pure)
            if condition is None or closure.is_read_by(condition):
                _, _, bare_name = name.partition(".")
                types += [name, bare_name]
        return closure.extended(types=types)

    def _names_in_options(self, options: str) -> base.StatementNames:
        """The relations that the options of a foreign table may name, of which all columns may be read."""
        words = re.findall(r"\w+", options)
        relations: set[str] = set()
        for word in words:
            relations.add(self._visible.get(word, word))
            relations.update(f"{schema}.{word}" for schema in words)
        return base.StatementNames(
            relations=frozenset(relations), rows=frozenset(), uses=frozenset(), unnamed=True, catalogue=False
        )

    def _reconnecting(self, step: Callable[[], Answer]) -> Answer:
        """Take a step, and repeat it once on a new connection if the old one broke, for the server may have restarted.
        If it breaks again under the same statement, see `DatabaseSession.run`.
        """
        import psycopg

        try:
            return step()
        except psycopg.OperationalError as error:
            if not self._connection.closed or error.sqlstate == "57014":  # ended by us at its limit
                raise
        self._connection = self._connect()
        self.start_clock()
        return step()

    def _rows(self, sql: str, max_rows: int) -> base.RawResult:
        """Columns and rows, by a cursor of the server.

        It is declared for the statement, which the server allows for queries only, and with the extended protocol,
        which takes one statement only.
        """
        connection = self._connection
        cancelled: list[float] = []
        with connection.cursor() as cursor:
            try:
                # `statement_timeout` runs anew for each FETCH.
                with base.interrupted_at(self.deadline, connection.cancel_safe) as cancelled:
                    # From PostgreSQL 14 on a statement also ends when its worker is gone.
                    begin = b"BEGIN READ ONLY"
                    if connection.info.server_version >= 140000:
                        begin += b"; SET LOCAL client_connection_check_interval = 100"
                    query = body(sql).encode()
                    cursor.execute(begin)
                    cursor.execute(b"DECLARE answer NO SCROLL CURSOR FOR " + query, binary=True)
                    forward = b"FETCH FORWARD %d FROM answer"
                    return self.result(cursor, max_rows, lambda count: cursor.execute(forward % count).fetchall())
            finally:
                if cancelled:
                    connection.close()  # a late signal would end the next statement
                if not connection.closed:
                    cursor.execute(b"ROLLBACK")
                    cursor.execute(b"DISCARD ALL")  # settings, advisory locks, temporary tables, prepared statements

    def explain(self, error: Exception) -> tuple[str, str, str] | None:
        """The meaning of an exception by its SQLSTATE; without it the server gave no answer, or an unreadable one."""
        import psycopg

        if not isinstance(error, psycopg.Error):
            return None
        state = error.sqlstate or ""
        message = error.diag.message_primary or "the server gave no answer"
        if not state and isinstance(error, psycopg.OperationalError):
            return UNAVAILABLE, "connection", message
        if not state:
            return ERROR, "conversion", message
        status, error_class = _STATES.get(state) or _STATES.get(state[:2]) or (ERROR, "runtime")
        return status, error_class, message

    def probe(self) -> None:
        if self._connection.closed:
            self._connection = self._connect()
        self._connection.execute("SELECT count(*) FROM pg_catalog.pg_class")
