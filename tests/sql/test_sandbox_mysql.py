"""What a hostile statement can do to a real MariaDB server: nothing."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest
from clocks import check_clock
from copies import to_mysql
from shops import USERS, build_shop, build_users, run

from pipelines.benchmarks.prompt_schema import describe
from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql import schema
from pipelines.sql.dialects.base import Bounds
from pipelines.sql.dialects.mysql import MysqlSession, connect
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect, render
from tests.sql.test_sandbox_state import NoClock

pytestmark = pytest.mark.services

REFUSED = r"""
INSERT INTO customer VALUES (9, 'Eve', 'Nice', 1)
UPDATE customer SET name = 'Eve'
DELETE FROM purchase
REPLACE INTO customer VALUES (1, 'Eve', 'Nice', 1)
TRUNCATE purchase
DROP TABLE purchase
ALTER TABLE customer ADD COLUMN evil text
CREATE TABLE t (a int)
CREATE TEMPORARY TABLE customer AS SELECT 9 AS id
CREATE FUNCTION f() RETURNS int RETURN 1
CREATE USER eve
GRANT ALL ON *.* TO reader
CALL f()
DO sleep(5)
HANDLER customer OPEN
LOAD DATA INFILE '/etc/passwd' INTO TABLE customer
LOCK TABLES customer WRITE
SET max_statement_time = 0
SET @x = 1
SET GLOBAL general_log = 1
SHOW PROCESSLIST
SHOW GRANTS
SHOW VARIABLES
USE mysql
BEGIN
COMMIT
ROLLBACK
START TRANSACTION READ WRITE
SAVEPOINT s
PREPARE p FROM 'SELECT 1'
EXECUTE IMMEDIATE 'SELECT sleep(5)'
KILL 1
FLUSH TABLES
ANALYZE TABLE customer
OPTIMIZE TABLE customer
EXPLAIN SELECT 1
DESCRIBE customer
ANALYZE SELECT 1
SELECT * FROM customer FOR UPDATE
SELECT * FROM customer LOCK IN SHARE MODE
SELECT * FROM customer INTO OUTFILE '/tmp/out'
SELECT name FROM customer LIMIT 1 INTO DUMPFILE '/tmp/out'
SELECT id FROM customer LIMIT 1 INTO @x
SELECT @x := 1
SELECT @@version
SELECT @@datadir
SELECT @@global.secure_file_priv
SELECT load_file('/etc/passwd')
SELECT sleep(5)
SELECT "sleep"(5)
SELECT SLEEP (5)
SELECT benchmark(1000000000, md5('a'))
SELECT get_lock('x', 5)
SELECT release_all_locks()
SELECT version()
SELECT user()
SELECT current_user
SELECT current_user()
SELECT session_user()
SELECT database()
SELECT connection_id()
SELECT last_insert_id(5)
SELECT extractvalue('<a/>', '/a')
SELECT master_pos_wait('x', 1)
SELECT * FROM information_schema.processlist
SELECT * FROM information_schema.user_privileges
SELECT * FROM information_schema.global_variables
SELECT * FROM "information_schema"."processlist"
SELECT * FROM mysql.user
SELECT * FROM "mysql"."global_priv"
SELECT * FROM performance_schema.threads
SELECT * FROM sys.version
SELECT 1 /*! , sleep(5) */
SELECT 1 /*!50000 , sleep(5) */
SELECT 1 /*M! , sleep(5) */
SELECT 1--sleep(5)
SELECT 1 # ' , sleep(5)
SELECT * FROM `mysql`.`user`
SELECT 1 AS `a```, sleep(5) -- `
SELECT 'a\' || sleep(5) -- '
SELECT 1; SELECT 2
SELECT 1; DROP TABLE purchase
SELECT * FROM customer PROCEDURE ANALYSE()
SELECT 1 /* /* ' */ , sleep(5) /* ' */
"""
HANGS = {
    "cross join": "SELECT count(*) FROM purchase a, purchase b, purchase c, purchase d, purchase e, purchase f,"
    " purchase g, purchase h, purchase i, purchase j, purchase k, purchase l, purchase m, purchase n",
    "recursive": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 1000000000)"
    " SELECT count(*) FROM c a, c b, c d, c e",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[SqlEngine]:
    with SqlEngine(Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)) as engine:
        yield engine


@pytest.fixture(scope="module")
def shop(mysql_port: int, tmp_path_factory: pytest.TempPathFactory) -> Database:
    return to_mysql(build_shop(tmp_path_factory.mktemp("source") / "shop.sqlite"), mysql_port, "clerk")


def test_every_statement_that_is_no_query_of_the_data_is_refused(engine: SqlEngine, shop: Database) -> None:
    statements = REFUSED.strip().splitlines()
    assert len(statements) >= 60
    results = engine.execute_many([(shop, sql) for sql in statements])
    refused = [result.status is ExecutionStatus.REFUSED for result in results]
    assert [sql for sql, is_refused in zip(statements, refused, strict=True) if not is_refused] == []
    assert not any("127.0.0.1" in (result.error or "") for result in results)
    assert run(engine, shop, "SELECT count(*), min(name) FROM customer").rows == ((4, "Ada"),)
    assert run(engine, shop, "SELECT count(*) FROM purchase").rows == ((5,),)


def test_a_table_and_a_column_may_be_called_user(engine: SqlEngine, mysql_port: int, tmp_path: Path) -> None:
    users = to_mysql(build_users(tmp_path / "users.sqlite"), mysql_port, "porter")
    for sql in USERS:
        assert run(engine, users, sql).rows == (("ada",),), sql
    assert run(engine, users, "SELECT max(pg_rating) FROM user").rows == ((13,),)
    for sql in ("SELECT user", "SELECT user()", "SELECT * FROM mysql.user", "SELECT current_user"):
        assert run(engine, users, sql).status is not ExecutionStatus.OK, sql


def test_names_in_backticks_are_names(engine: SqlEngine, shop: Database) -> None:
    """As MySQL's users, and BIRD's gold SQL, write them."""
    sql = "SELECT `c`.`name` AS `its name`, '`x`' FROM `customer` AS `c` ORDER BY `c`.`name` LIMIT 1 -- `"
    assert run(engine, shop, sql).rows == (("Ada", "`x`"),)
    assert run(engine, shop, sql).columns[0] == "its name"


@pytest.mark.parametrize("name", HANGS)
def test_the_clock_fires_within_a_fifth(engine: SqlEngine, shop: Database, name: str) -> None:
    check_clock(engine, shop, HANGS[name], 1.3)


def test_a_statement_is_killed_where_the_servers_own_clock_does_not_end_it(shop: Database, mysql_port: int) -> None:
    session = MysqlSession(shop.location, Bounds(1.0, 1000, 1_000_000, 256), NoClock())
    assert session._connection is not None
    with session._connection.cursor() as cursor:
        cursor.execute("SET SESSION max_statement_time = 0")
    raw = session.run(HANGS["cross join"], 10)
    assert (raw.status, raw.error_class) == ("timeout", "timeout"), raw
    session.close()
    with contextlib.closing(pymysql.connect(host="127.0.0.1", port=mysql_port, user="owner")) as admin:
        cursor = admin.cursor()
        cursor.execute("SELECT count(*) FROM information_schema.processlist WHERE info LIKE '%purchase n'")
        assert cursor.fetchone() == (0,)


def test_rows_are_cut_and_the_rest_is_not_fetched(engine: SqlEngine, shop: Database) -> None:
    many = ", ".join(f"purchase p{n}" for n in range(6))
    result = run(engine, shop, f"SELECT p0.id FROM {many}")
    assert result.truncated
    assert len(result.rows) == 1000
    assert run(engine, shop, "SELECT count(*) FROM customer").rows == ((4,),)


def test_a_user_who_may_do_more_is_turned_away(engine: SqlEngine, shop: Database, mysql_port: int) -> None:
    owner = Database("x", "mysql", f"mysql://owner@127.0.0.1:{mysql_port}/shop")
    result = run(engine, owner, "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "too_privileged")
    nobody = run(engine, Database("x", "mysql", "mysql://x:hidden@127.0.0.1:1/x"), "SELECT 1")
    assert (nobody.status, nobody.error_class) == (ExecutionStatus.UNAVAILABLE, "database_missing")
    assert "hidden" not in (nobody.error or "")


def test_the_server_refuses_by_itself_what_the_fence_refuses(shop: Database, mysql_port: int) -> None:
    connection = pymysql.connect(host="127.0.0.1", port=mysql_port, user="clerk", password="secret", database="shop")
    with contextlib.closing(connection), connection.cursor() as cursor:
        for sql in ("INSERT INTO customer VALUES (9, 'a', 'b', 1)", "SELECT * FROM mysql.user", "DROP TABLE purchase"):
            with pytest.raises(pymysql.Error):
                cursor.execute(sql)


def test_values_are_plain(engine: SqlEngine, shop: Database) -> None:
    sql = """SELECT 1, 1.5e0, 2.50, 7, true, 'a', NULL, DATE '2024-02-29', TIMESTAMP '2024-02-29 01:02:03', x'00ff',
        CAST('838:59:59' AS time), 99999999999999999999999999999999999999999999999999999999999999999"""
    assert run(engine, shop, sql).rows == (
        (1, 1.5, 2.5, 7, 1, "a", None, "2024-02-29", "2024-02-29 01:02:03", b"\0\xff", "838:59:59", "9" * 65),
    )


@pytest.mark.parametrize(
    ("sql", "error_class"),
    [
        ("SELECT FROM WHERE", "syntax"),
        ("SELECT nope FROM customer", "no_such_column"),
        ("SELECT 1 FROM nope", "no_such_table"),
        ("SELECT id FROM customer, purchase", "ambiguous_column"),
        ("SELECT city FROM customer GROUP BY name", "misuse"),
        ("", "empty"),
    ],
)
def test_an_error_has_a_class(engine: SqlEngine, shop: Database, sql: str, error_class: str) -> None:
    assert run(engine, shop, sql).error_class == error_class


def test_the_schema_is_read(shop: Database) -> None:
    tables = {table.name: table for table in introspect(shop, 1).tables}
    assert [column.name for column in tables["customer"].columns] == ["id", "name", "city", "credit"]
    assert tables["customer"].columns[1].values == ("Ada",)


def test_what_the_database_says_of_its_tables_and_columns_is_in_the_prompt(mysql_port: int) -> None:
    """The word VIEW, which the server gives as the comment of each view, is none."""
    owner = pymysql.connect(host="127.0.0.1", port=mysql_port, user="owner", autocommit=True)
    with contextlib.closing(owner), owner.cursor() as cursor:
        for statement in (
            "CREATE DATABASE told",
            "CREATE TABLE told.farm (Id int PRIMARY KEY COMMENT 'its number\n in the register', plain int)"
            " COMMENT 'all farms'",
            "CREATE VIEW told.small AS SELECT plain AS size FROM told.farm",
            "CREATE USER IF NOT EXISTS teller@'%' IDENTIFIED BY 'secret'",
            "GRANT SELECT, SHOW VIEW ON told.* TO teller@'%'",
        ):
            cursor.execute(statement)
    told = Database("told", "mysql", f"mysql://teller:secret@127.0.0.1:{mysql_port}/told")
    assert schema.comments(told) == {("farm", ""): "all farms", ("farm", "id"): "its number in the register"}
    shown = render(describe(introspect(told), told), "ddl").lower()
    assert "all farms" in shown
    assert "its number in the register" in shown
    assert "-- view" not in shown


@pytest.mark.services
def test_a_mysql_server_that_cannot_encrypt_is_refused_where_the_address_wants_it(mysql_port: int) -> None:
    import pymysql

    address = f"mysql://owner@127.0.0.1:{mysql_port}/mysql"
    connect(address, 5.0).close()
    with pytest.raises(pymysql.Error):
        connect(f"{address}?ssl-mode=REQUIRED", 5.0)
