"""From `connect` to the first answer on each engine but PostgreSQL, which tests/serving/test_whole_path.py takes."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

import yaml
from served import asked

from tests.flows.command_line import sqltrain
from tests.sql.servers import mariadb, mariadb_programs

SHOP = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name VARCHAR(20), email VARCHAR(40));
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER, amount INTEGER);
INSERT INTO customer VALUES (1, 'Ada', 'ada@example.org'), (2, 'Bo', 'bo@example.org');
INSERT INTO purchase VALUES (1, 1, 30), (2, 1, 10), (3, 2, 5);
"""
JOIN = "SELECT c.name, SUM(p.amount) AS total FROM customer c JOIN purchase p ON p.customer_id = c.id GROUP BY c.name"


def sqlite(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "shop.sqlite")) as connection:
        connection.executescript(SHOP)
    return "shop.sqlite"


def duckdb(folder: Path) -> str:
    import duckdb

    with duckdb.connect(str(folder / "shop.duckdb")) as connection:
        connection.execute(SHOP)
    return "shop.duckdb"


@pytest.fixture
def mysql(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    programs = mariadb_programs()
    if programs is None:
        pytest.skip("MariaDB's programs are not installed (apt-get install mariadb-server)")
    import pymysql

    with mariadb(programs) as port:
        with pymysql.connect(host="127.0.0.1", port=port, user="owner", autocommit=True) as connection:
            grants = ["CREATE USER viewer@'%'", "GRANT SELECT, SHOW VIEW ON shop.* TO viewer@'%'"]
            for statement in ["CREATE DATABASE shop", "USE shop", *SHOP.split(";")[:-1], *grants]:
                connection.cursor().execute(statement)
        yield lambda _: f"mysql://viewer@127.0.0.1:{port}/shop"


def check(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Connect, hide the addresses, ask a question that is answered and one that is not."""
    code, out, err = sqltrain(monkeypatch, capsys, "connect", address)
    assert (code, err) == (0, "")
    assert "customer.email: looks like personal data" in out
    place = Path("databases/shop.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    known["tables"]["customer"]["columns"]["email"]["hidden"] = True
    place.write_text(yaml.safe_dump(known), encoding="utf-8")
    last = asked("shop", "What did each customer spend ?", f"{JOIN} ORDER BY c.name")[-1]
    assert last["columns"] == ["name", "total"]
    assert [[name, int(total)] for name, total in last["rows"]] == [["Ada", 40], ["Bo", 5]]
    refused = asked("shop", "Where do they get mail ?", "SELECT email FROM customer")[-1]
    assert (refused["type"], "example.org" in str(refused)) == ("error", False)


@pytest.mark.parametrize("make", [sqlite, duckdb])
def test_the_first_answer_of_a_file(
    make: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(make(tmp_path), tmp_path, monkeypatch, capsys)


@pytest.mark.services
def test_the_first_answer_of_mysql(
    mysql: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check(mysql(tmp_path), tmp_path, monkeypatch, capsys)
