"""The contract of every engine: errors have classes, values are plain, and time, size and rows are bounded."""

import psycopg
import pymysql
import pytest
from clocks import timed
from copies import to_duckdb, to_mysql
from shops import USERS, build_users, run

from pipelines.core.errors import DataError
from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect

RECURSIVE = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c{})"
TABLES = "purchase a, purchase b, purchase c, purchase d, purchase e, purchase f, purchase g"
CROSS = f"SELECT count(*) FROM {TABLES}, purchase h, purchase i, purchase j, purchase k, purchase l, purchase m"
HANGS = {
    "sqlite": [
        f"{RECURSIVE.format('')} SELECT count(*) FROM c",
        CROSS,
        f"{RECURSIVE.format('')} SELECT x FROM c WHERE x < 0",
        f"{RECURSIVE.format(' LIMIT 90000')} SELECT count(*) FROM (SELECT sum(x) OVER"
        " (ORDER BY -x ROWS BETWEEN 50000 PRECEDING AND 50000 FOLLOWING EXCLUDE TIES) FROM c)",
        # One call, which SQLite cannot interrupt, of 4e10 comparisons of characters: beyond the limit on any machine.
        "SELECT printf('%.*c', 900000, 'a') LIKE '%' || printf('%.*c', 49000, 'a') || 'b'",
        "SELECT printf('%.*c', 900000, 'a') GLOB '*' || printf('%.*c', 49000, 'a') || 'b'",
    ],
    "duckdb": [
        "SELECT count(*) FROM range(1000000000) a, range(1000000) b WHERE a.range + b.range = 3",
        f"{RECURSIVE.format('')} SELECT count(*) FROM c",
        "SELECT levenshtein(repeat('ab', 400000), repeat('ba', 400000))",
    ],
    "postgres": [
        "SELECT count(*) FROM generate_series(1, 100000000000)",
        "SELECT count(*) FROM generate_series(1, 1000000) a, generate_series(1, 1000000) b WHERE a + b = 3",
        "WITH RECURSIVE c(x) AS (SELECT 1::bigint UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
        "SELECT count(*) FROM generate_series(1, 10000000) g WHERE md5(repeat('a', 100000) || g) = 'x'",
    ],
    "mysql": [CROSS, f"{RECURSIVE.format(' WHERE x < 1000000000')} SELECT count(*) FROM c a, c b, c d, c e"],
}
BOMBS = {
    "sqlite": [
        "SELECT zeroblob(2000000000)",
        "SELECT randomblob(900000000)",
        "SELECT hex(zeroblob(900000))",
        "SELECT printf('%.*c', 900000000, 'x')",
        "SELECT replace(hex(zeroblob(400000)), '0', 'abcdefgh')",
        f"{RECURSIVE.format(' LIMIT 300000')} SELECT group_concat('0123456789') FROM c",
        f"{RECURSIVE.format(' LIMIT 300000')} SELECT json_group_array(x) FROM c",
        "WITH RECURSIVE c(x) AS (SELECT 'ab' UNION ALL SELECT x || x FROM c) SELECT max(length(x)) FROM c",
        f"{RECURSIVE.format(' LIMIT 100000')} SELECT x, zeroblob(100000) AS b FROM c ORDER BY b, x DESC",
        f"{RECURSIVE.format(' LIMIT 100000')} SELECT count(*) FROM (SELECT DISTINCT randomblob(100000) FROM c)",
    ],
    "duckdb": [
        "SELECT repeat('x', 2000000000)",
        "SELECT string_agg(repeat('x', 1000000), '') FROM range(2000)",
        "SELECT list(i) FROM range(100000000) r(i)",
        "SELECT * FROM (SELECT repeat(i::VARCHAR, 100) x FROM range(20000000) r(i)) ORDER BY x LIMIT 3000000",
    ],
    "postgres": ["SELECT repeat('x', 900000000)"],
}
ENDLESS_ROWS = {
    "sqlite": [f"{RECURSIVE.format('')} SELECT x FROM c"],
    "duckdb": ["SELECT range FROM range(100000)"],
    "postgres": ["SELECT generate_series(1, 100000)"],
    "mysql": ["SELECT p0.id FROM purchase p0, purchase p1, purchase p2, purchase p3, purchase p4, purchase p5"],
}
WIDE_ROWS = {  # (the query, the least and the most rows of a million bytes)
    "sqlite": [(f"{RECURSIVE.format(' LIMIT 900')} SELECT printf('%.*c', 9000, 'x') FROM c", 100, 111)],
    "postgres": [("SELECT repeat('x', 10000) FROM generate_series(1, 900)", 90, 100)],
}
COMMON = [
    ("SELECT nope FROM customer", "no_such_column"),
    ("SELECT 1 FROM nope", "no_such_table"),
    ("SELECT id FROM customer, purchase", "ambiguous_column"),
    ("", "empty"),
]
ERRORS = {
    "sqlite": [
        *COMMON,
        ("SELEC 1", "syntax"),
        ("SELECT 'a", "syntax"),
        ("SELECT (", "syntax"),
        ("  -- nothing", "empty"),
        ("SELECT nope(1)", "no_such_function"),
        ("SELECT max(1, 2) FROM customer WHERE count(*) > 1", "misuse"),
        ("SELECT abs(1, 2)", "wrong_arguments"),
        ("SELECT 1 UNION SELECT 1, 2", "runtime"),
        ("SELECT abs(-9223372036854775808)", "runtime"),
        ("SELECT json('{')", "runtime"),
        ("SELECT " + "(" * 2000 + "1" + ")" * 2000, "too_complex"),
        ("SELECT 1" + " + 1" * 5000, "too_complex"),
        ("SELECT '" + "x" * 2_000_000 + "'", "sql_too_long"),
        ("SELECT 1;; SELECT 2", "several_statements"),
        ("SELECT 1; ;DROP TABLE customer", "several_statements"),
    ],
    "duckdb": [
        *COMMON,
        ("SELEC 1", "syntax"),
        ("SELECT city FROM customer GROUP BY name", "misuse"),
        ("SELECT 'a'::INTEGER", "conversion"),
        ("-- nothing", "empty"),
        ("SELECT '\ud800'", "syntax"),
        ("SELECT " + "(" * 3000 + "1" + ")" * 3000, "too_complex"),
        *((f"SELECT * FROM {variable}", "no_such_table") for variable in ("bounds", "databases", "session", "row")),
    ],
    "postgres": [
        *COMMON,
        ("SELEC 1", "syntax"),
        ("SELECT FROM WHERE", "syntax"),
        ("SELECT city FROM customer GROUP BY name", "misuse"),
        ("SELECT 1 / 0", "runtime"),
        ("SELECT '\ud800'", "syntax"),
    ],
    "mysql": [*COMMON, ("SELECT FROM WHERE", "syntax"), ("SELECT city FROM customer GROUP BY name", "misuse")],
}
VALUES = {  # SQL: the value that comes out
    "sqlite": [{"1": 1, "1.0": 1.0, "'a'": "a", "x'00ff'": b"\x00\xff", "NULL": None, "1e999": float("inf")}],
    "duckdb": [
        {
            "1": 1, "1.5": 1.5, "2.50::DECIMAL(9, 2)": 2.5, "7::DECIMAL(9, 0)": 7, "true": 1, "'a'": "a", "NULL": None,
            "'NaN'::DOUBLE": "NaN", "DATE '2024-02-29'": "2024-02-29", "[1, 2]": "[1, 2]", "{'a': 1}": '{"a": 1}',
            "TIMESTAMP '2024-02-29 01:02:03'": "2024-02-29 01:02:03", "'\\x00\\xFF'::BLOB": b"\0\xff",
            "170141183460469231731687303715884105727": 2**127 - 1, "'infinity'::DATE": "infinity",
            "DATE '9999-12-31'": "9999-12-31", "'-infinity'::TIMESTAMP": "-infinity",
        }
    ],
    "postgres": [
        {
            "1": 1, "1.5::float8": 1.5, "2.50::numeric": 2.5, "7::numeric": 7, "true": 1, "'a'": "a", "NULL": None,
            "'NaN'::float8": "NaN", "DATE '2024-02-29'": "2024-02-29", "ARRAY[1, 2]": "[1, 2]",
            "TIMESTAMP '2024-02-29 01:02:03'": "2024-02-29 01:02:03", "'\\x00ff'::bytea": b"\0\xff",
            "'{\"a\": 1}'::json": '{"a": 1}',
        }
    ],
    "mysql": [
        {
            "1": 1, "1.5e0": 1.5, "2.50": 2.5, "7": 7, "true": 1, "'a'": "a", "NULL": None, "x'00ff'": b"\0\xff",
            "DATE '2024-02-29'": "2024-02-29", "TIMESTAMP '2024-02-29 01:02:03'": "2024-02-29 01:02:03",
            "CAST('838:59:59' AS time)": "838:59:59", "9" * 65: "9" * 65,
        }
    ],
}  # fmt: skip
SCHEMAS = {  # (a query of the schema, its first column)
    "sqlite": [
        ("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name", ["customer", "purchase"]),
        ("SELECT name FROM pragma_table_info('customer')", ["id", "name", "city", "credit"]),
        ("SELECT name FROM pragma_table_info('customer') WHERE pk", ["id"]),
        ("PRAGMA table_info(customer)", [0, 1, 2, 3]),
    ],
    "duckdb": [
        ("SHOW TABLES", ["customer", "purchase"]),
        ("DESCRIBE customer", ["id", "name", "city", "credit"]),
        ("SELECT table_name FROM information_schema.tables ORDER BY 1", ["customer", "purchase"]),
    ],
}
SERVERS = {"postgres", "mysql"}
LIMITS = Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)


def each(table):
    """A case (engine, case) for each of a table's cases; those of servers under their marker."""
    return [
        pytest.param(engine, case, marks=[pytest.mark.services] if engine in SERVERS else [], id=f"{engine}-{place}")
        for engine, cases in table.items()
        for place, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def database(request):
    return request.getfixturevalue({"sqlite": "shop"}.get(request.param, f"{request.param}_shop"))


@pytest.mark.parametrize(("database", "sql"), each(HANGS), indirect=["database"])
def test_the_clock_fires_within_a_fifth(engine, database, sql):
    bound = 1.3 if database.engine == "mysql" else 1.2
    result, took = timed(engine, database, sql, bound)
    assert (result.status, result.error_class) == (ExecutionStatus.TIMEOUT, "timeout"), result
    assert 0.95 <= took <= bound, took
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


@pytest.mark.parametrize(("database", "sql"), each(BOMBS), indirect=["database"])
def test_a_bomb_ends_at_a_limit_and_the_next_query_runs(engine, database, sql):
    result = run(engine, database, sql)
    assert result.status in (ExecutionStatus.LIMIT, ExecutionStatus.TIMEOUT), result
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


@pytest.mark.parametrize(("database", "sql"), each(ENDLESS_ROWS), indirect=["database"])
def test_rows_are_cut_at_the_row_limit(engine, database, sql):
    result = run(engine, database, sql)
    assert (result.ok, result.truncated, len(result.rows)) == (True, True, 1000)
    if database.engine == "sqlite":
        assert result.rows == tuple((n,) for n in range(1, 1001))
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


@pytest.mark.parametrize(("database", "case"), each(WIDE_ROWS), indirect=["database"])
def test_rows_are_cut_at_the_byte_limit(engine, database, case):
    sql, least, most = case
    result = run(engine, database, sql)
    assert (result.ok, result.truncated) == (True, True)
    assert least <= len(result.rows) <= most


@pytest.mark.parametrize(("database", "case"), each(ERRORS), indirect=["database"])
def test_an_error_has_a_class(engine, database, case):
    result = run(engine, database, case[0])
    assert (result.error_class, result.ok, result.rows) == (case[1], False, ()), result.error


@pytest.mark.parametrize(("database", "values"), each(VALUES), indirect=["database"])
def test_values_are_plain(engine, database, values):
    (row,) = run(engine, database, f"SELECT {', '.join(values)}").rows
    assert [(value, type(value)) for value in row] == [(value, type(value)) for value in values.values()]


@pytest.mark.parametrize(("database", "case"), each(SCHEMAS), indirect=["database"])
def test_the_schema_can_be_asked_for_in_sql(engine, database, case):
    assert [row[0] for row in run(engine, database, case[0]).rows] == case[1]


@pytest.mark.parametrize("engine_name", ["duckdb", pytest.param("mysql", marks=pytest.mark.services)])
def test_a_table_may_be_called_user(request, tmp_path, engine_name):
    """An unquoted `user` is the table's own, if there is one; elsewhere it is a constant of the engine."""
    source = build_users(tmp_path / "users.sqlite")
    with SqlEngine(Limits(timeout_s=20)) as engine:  # a busy machine opens a file slowly
        if engine_name == "duckdb":
            users, refused = to_duckdb(source, tmp_path / "users.duckdb"), ["SELECT user()"]
            assert run(engine, users, "SELECT user").rows == (("duckdb",),)
        else:
            users = to_mysql(source, request.getfixturevalue("mysql_port"), "porter")
            refused = ["SELECT user()", "SELECT * FROM mysql.user", "SELECT current_user"]
            assert run(engine, users, "SELECT user").error_class == "no_such_column"
            assert run(engine, users, "SELECT max(pg_rating) FROM user").rows == ((13,),)
        for sql in USERS:
            assert run(engine, users, sql).rows == (("ada",),), sql
        for sql in refused:
            assert run(engine, users, sql).status is ExecutionStatus.REFUSED, sql


@pytest.mark.parametrize("kind", ["sqlite", "duckdb"])
def test_a_file_that_holds_no_database_is_unavailable(engine, tmp_path, kind):
    text, gone = tmp_path / f"text.{kind}", tmp_path / f"gone.{kind}"
    text.write_text("this is not a database, though its name says so" * 99)
    found = [run(engine, Database(path.stem, kind, str(path)), "SELECT 1") for path in (text, gone)]
    assert {result.status for result in found} == {ExecutionStatus.UNAVAILABLE}
    assert [result.error_class for result in found] == ["database_corrupt", "database_missing"]
    assert str(tmp_path) not in (found[1].error or "")
    assert not gone.exists()


@pytest.mark.services
@pytest.mark.parametrize(("kind", "at"), [("postgres", "host=127.0.0.1 port=1 user=x"), ("mysql", "127.0.0.1:1/x")])
def test_a_missing_server_is_unavailable(engine, kind, at):
    database = Database("x", kind, f"mysql://x:hidden@{at}" if kind == "mysql" else f"{at} password=hidden")
    result = run(engine, database, "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_missing")
    with pytest.raises(DataError) as raised:
        introspect(database)
    assert "hidden" not in str(raised.value) + (result.error or "")


@pytest.mark.services
def test_a_user_who_may_do_more_is_turned_away(engine, server, mysql_port):
    for kind, owner in (("postgres", server.admin), ("mysql", f"mysql://owner@127.0.0.1:{mysql_port}/shop")):
        result = run(engine, Database("x", kind, owner), "SELECT 1")
        assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "too_privileged"), kind


@pytest.mark.services
def test_a_server_refuses_by_itself_what_the_fences_refuse(postgres_shop, mysql_shop):
    refused = psycopg.errors.InsufficientPrivilege
    with psycopg.connect(postgres_shop.location, autocommit=True) as connection:
        for call in ("pg_sleep(0)", "lo_create(0)", "set_config('work_mem', '1GB', false)", "pg_notify('x', 'y')"):
            with pytest.raises(refused):
                connection.execute(f"SELECT {call}".encode())
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("CREATE TEMP TABLE t (a int)")
        with pytest.raises((refused, psycopg.errors.ReadOnlySqlTransaction)):
            connection.execute("INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1)")
    port = int(mysql_shop.location.rpartition(":")[2].partition("/")[0])
    reader = {"host": "127.0.0.1", "port": port, "user": "clerk", "password": "secret", "database": "shop"}
    with pymysql.connect(**reader) as mysql, mysql.cursor() as cursor:
        for sql in ("INSERT INTO customer VALUES (9, 'a', 'b', 1)", "SELECT * FROM mysql.user", "DROP TABLE purchase"):
            with pytest.raises(pymysql.Error):
                cursor.execute(sql)
