"""What a hostile statement can do to a real MariaDB server: nothing."""

import contextlib
import dataclasses
import json

import pymysql
import pytest
from copies import to_mysql
from servers import build_mysql
from shops import build_shop, run

from pipelines.benchmarks.prompt_schema import describe
from pipelines.core.types import Database
from pipelines.environment.core import Environment
from pipelines.sql import schema
from pipelines.sql.dialects.base import Bounds
from pipelines.sql.dialects.mysql import MysqlSession, open_readonly_connection
from pipelines.sql.engine import Limits
from pipelines.sql.schema import introspect, render
from tests.sql.test_sandbox_state import NoClock

pytestmark = pytest.mark.services

CROSS = f"SELECT count(*) FROM {', '.join(f'purchase {name}' for name in 'abcdefghijklmn')}"
LIMITS = Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)


def test_names_in_backticks_are_names_and_the_schema_is_read(engine, mysql_shop):
    sql = "SELECT `c`.`name` AS `its name`, '`x`' FROM `customer` AS `c` ORDER BY `c`.`name` LIMIT 1 -- `"
    result = run(engine, mysql_shop, sql)
    assert (result.rows, result.columns[0]) == ((("Ada", "`x`"),), "its name")
    (customer,) = (table for table in introspect(mysql_shop, 1).tables if table.name == "customer")
    assert [column.name for column in customer.columns] == ["id", "name", "city", "credit"]
    assert customer.columns[1].values == ("Ada",)


def test_a_statement_without_the_servers_clock_is_killed(mysql_shop, mysql_port):
    session = MysqlSession(mysql_shop.location, Bounds(1.0, 1000, 1_000_000, 256), NoClock())
    with session._connection.cursor() as cursor:
        cursor.execute("SET SESSION max_statement_time = 0")
    raw = session.run(CROSS, 10)
    assert (raw.status, raw.error_class) == ("timeout", "timeout"), raw
    session.close()
    with contextlib.closing(pymysql.connect(host="127.0.0.1", port=mysql_port, user="owner")) as admin:
        cursor = admin.cursor()
        cursor.execute("SELECT count(*) FROM information_schema.processlist WHERE info LIKE '%purchase n'")
        assert cursor.fetchone() == (0,)


def test_what_the_database_says_of_its_tables_and_columns_is_in_the_prompt(mysql_port):
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
    assert schema.read_comments(told) == {("farm", ""): "all farms", ("farm", "Id"): "its number in the register"}
    shown = render(describe(introspect(told), told), "ddl").lower()
    assert "all farms" in shown
    assert "its number in the register" in shown
    assert "-- view" not in shown


def test_zero_dates_and_bits_come_out_plain(engine, mysql_port):
    (database,) = build_mysql(
        mysql_port,
        "bits",
        "SET sql_mode = ''; CREATE TABLE old (id int PRIMARY KEY, day date, at datetime, flag bit(1), mask bit(12));"
        "INSERT INTO old VALUES (1, '0000-00-00', '0000-00-00 00:00:00', b'1', b'100000000001'),"
        " (2, '2024-00-00', '2024-02-30 00:00:00', b'0', b'11'), (3, NULL, NULL, NULL, NULL)",
    )
    whole = run(engine, database, "SELECT day, at, flag, mask FROM old ORDER BY id")
    assert whole.rows == (
        ("0000-00-00", "0000-00-00 00:00:00", b"\x01", b"\x08\x01"),
        ("2024-00-00", "0000-00-00 00:00:00", b"\x00", b"\x00\x03"),  # there is no 30th of February
        (None, None, None, None),
    )
    assert run(engine, database, "SELECT id FROM old WHERE mask = 2049 AND flag").rows == ((1,),)
    assert run(engine, database, "SELECT mask + 0 FROM old WHERE id = 2").rows == ((3,),)
    assert run(engine, database, "SELECT count(*) FROM old WHERE day = '0000-00-00'").rows == ((1,),)
    (table,) = introspect(database, 1).tables
    values = {column.name: column.values for column in table.columns}
    assert (values["day"], values["flag"], values["mask"]) == (("0000-00-00",), (b"\x01",), (b"\x08\x01",))


def test_a_mysql_server_that_cannot_encrypt_is_refused_where_the_address_wants_it(mysql_port):
    address = f"mysql://owner@127.0.0.1:{mysql_port}/mysql"
    open_readonly_connection(address, 5.0).close()
    with pytest.raises(pymysql.Error):
        open_readonly_connection(f"{address}?ssl-mode=REQUIRED", 5.0)


def test_a_connection_that_checks_no_certificate_loads_no_authorities(mysql_port, monkeypatch):
    def load(*_, **__):
        raise AssertionError("each statement would wait 30 ms for it")

    monkeypatch.setattr("ssl.create_default_context", load)
    open_readonly_connection(f"mysql://owner@127.0.0.1:{mysql_port}/mysql", 5.0).close()


def test_mini_dev_in_mysql_to_the_end(mysql_port, tmp_path, monkeypatch):
    to_mysql(dataclasses.replace(build_shop(tmp_path / "shop.sqlite"), id="bird"), mysql_port, "teller")
    monkeypatch.setenv("MYSQL_PWD", "secret")
    golds = ["SELECT `name` FROM `customer` ORDER BY `name` LIMIT 1", "SELECT `nothing` FROM `customer`"]
    rows = [{"db_id": "shop", "question": "Who comes first?", "evidence": "", "SQL": gold} for gold in golds]
    (tmp_path / "mini_dev_mysql.json").write_text(json.dumps(rows), encoding="utf-8")
    address = f"data.test.0.options.address=mysql://teller@127.0.0.1:{mysql_port}/bird"
    words = ["include=data/bird_mini_dev_mysql", f"data.test.0.path={tmp_path}", address]
    with Environment("skyrl_sql", words) as environment:
        rewards = []
        for question in environment.questions("bird_mini_dev_mysql"):
            session = environment.reset(question)
            assert "customer" in session.messages[-1]["content"]
            looked = session.step("<think>a</think>\n<sql>SELECT `name` FROM `customer` WHERE `name` = 'Ada'</sql>")
            assert "Ada" in (looked.observation or "")
            rewards.append(session.step(f"<think>a</think>\n<solution>{golds[0]}</solution>").reward)
    assert rewards == [1.0, None]  # the second gold SQL fails
