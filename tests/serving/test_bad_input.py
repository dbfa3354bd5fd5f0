"""From `connect` to the first answer on each engine, also of databases that are not as one would like."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import aclosing, closing, contextmanager
from pathlib import Path

import pytest
import yaml
from served import asked, asked_of, says

from pipelines.core.types import ABSTENTION
from pipelines.databases import named
from pipelines.recipe import recipes
from pipelines.recipe.config import Execution
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.serving.agent import CANNOT_ANSWER, Agent, AnsweringModel, QuestionBudget
from tests.fakes import build_database
from tests.sql.servers import Cluster, binaries, make_reader, mariadb, mariadb_programs

ODD = ("my table", 'it\'s "quoted"', "naïve 🛒", "select", "group by", "drop table x; --", "a\nb", "Ünï")


def lines_of(statements):
    return lambda connection: connection.executescript(statements)


def large(connection):
    connection.execute("CREATE TABLE note (id INTEGER, body TEXT)")
    connection.execute("INSERT INTO note VALUES (1, printf('%.*c', 200000000, 'x'))")


def many(connection):
    tables = "".join(f"CREATE TABLE t{n} (id INTEGER PRIMARY KEY, a TEXT);" for n in range(3_000))
    connection.executescript(f"BEGIN; {tables} COMMIT")


def odd(connection):
    for name in ODD:
        quoted = '"' + name.replace('"', '""') + '"'
        connection.execute(f'CREATE TABLE {quoted} ({quoted} INTEGER, "order" TEXT)')
        connection.execute(f"INSERT INTO {quoted} VALUES (7, 'x')")


# What is in the database, the question, the SQL of the answer, and what it is: rows, or words of the one line.
CASES = {
    "three thousand tables": (many, "How many ?", "SELECT count(*) FROM t2999", [[0]]),
    "a table without rows": (lines_of("CREATE TABLE item (id INTEGER)"), "All ?", "SELECT * FROM item", []),
    "a name with spaces": (odd, "Which ?", 'SELECT "my table" FROM "my table"', [[7]]),
    "a name with quotes": (odd, "Which ?", 'SELECT "it\'s ""quoted""" FROM "it\'s ""quoted"""', [[7]]),
    "a name with an emoji": (odd, "🛒 ?", 'SELECT "naïve 🛒" FROM "naïve 🛒"', [[7]]),
    "a reserved word": (odd, "Which ?", 'SELECT "select", "order" FROM "select"', [[7, "x"]]),
    "a name that is a statement": (odd, "Which ?", 'SELECT "order" FROM "drop table x; --"', [["x"]]),
    "a cell of 200 MB": (large, "What does it say ?", "SELECT body FROM note", "the SQL does not run"),
    "a column beside such a cell": (large, "Which ?", "SELECT id FROM note", [[1]]),
    "a view that fails": (
        lines_of("CREATE TABLE item (id INTEGER); CREATE VIEW broken AS SELECT missing FROM nowhere"),
        "What is in it ?",
        "SELECT * FROM broken",
        "the SQL does not run",
    ),
    "a question in German": (
        lines_of("CREATE TABLE kunde (größe INTEGER); INSERT INTO kunde VALUES (3)"),
        "Wie viele Kunden gibt es, und wie groß sind sie?",
        "SELECT größe FROM kunde",
        [[3]],
    ),
    "a question in Japanese": (
        lines_of("CREATE TABLE 顧客 (名前 TEXT); INSERT INTO 顧客 VALUES ('花子')"),
        "顧客の名前は何ですか？",
        "SELECT 名前 FROM 顧客",
        [["花子"]],
    ),
    "a question without an answer": (lines_of("CREATE TABLE a (b)"), "Who will win?", ABSTENTION, [[CANNOT_ANSWER]]),
    "a question in Arabic": (lines_of("CREATE TABLE a (b)"), "كم عدد العملاء؟", "SELECT 'عميل'", [["عميل"]]),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.services if case[0] in (many, large) else ())
        for name, case in CASES.items()
    ],
)
def test_a_database_that_is_not_as_one_would_like(case, tmp_path, monkeypatch, sqltrain):
    make, question, sql, expected = CASES[case]
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect(tmp_path / "own.sqlite")) as connection, connection:
        make(connection)
    code, _, err = sqltrain("connect", "own.sqlite")
    assert (code, err) == (0, "")
    events = asked("own", question, sql)
    last = events[-1]
    if isinstance(expected, str):
        assert (last["type"], len(last["message"].splitlines()), expected in last["message"]) == ("error", 1, True)
    else:
        assert (last["type"], last.get("rows")) == ("answer", expected), last
    assert len(str(events)) < 100_000  # nothing of a large cell is told, nor in what the model saw


def test_an_answer_that_does_not_run_is_shown_and_mended_without_a_word_of_hidden_columns(
    tmp_path, monkeypatch, sqltrain
):
    """`protocol.returns_failed_answers` and `protocol.explains_missing_names` of the model's recipe."""
    monkeypatch.chdir(tmp_path)
    build_database(tmp_path / "own.sqlite", "CREATE TABLE person (name); CREATE TABLE home (city, street)")
    assert sqltrain("connect", "own.sqlite")[0] == 0
    card = Path("databases/own.yaml")
    known = yaml.safe_load(card.read_text(encoding="utf-8"))
    known["tables"]["home"]["columns"]["street"]["hidden"] = True
    card.write_text(yaml.safe_dump(known), encoding="utf-8")
    answers = ["SELECT name, city FROM person", "SELECT street FROM person", "SELECT count(*) AS n FROM home"]

    def say(request):
        return f"<reasoning>x</reasoning>\n<solution>{answers[request.turn]}</solution>"

    settings = ["protocol.returns_failed_answers=true", "protocol.explains_missing_names=true"]
    model = AnsweringModel("script", ScriptedPolicy(say, "script"), recipes.load("sql_trail", settings))
    events = asked_of(model, "own", "How many homes ?")
    kinds = ["reasoning", "sql", "result", "reasoning", "sql", "result", "reasoning", "answer"]
    assert [event["type"] for event in events] == kinds
    assert [event["sql"] for event in events if "sql" in event] == answers
    first, second = [event for event in events if event["type"] == "result"]
    assert first["text"].startswith("Error executing SQL: no such column: city; city is a column of home")
    assert "street is" not in second["text"]
    assert events[-1]["rows"] == [[0]]


def test_ask_says_that_the_database_cannot_answer(tmp_path, sqltrain):
    build_database(tmp_path / "own.sqlite", "CREATE TABLE a (b)")
    turn = f"<reasoning>x</reasoning><solution>{ABSTENTION}</solution>"
    (tmp_path / "lines.jsonl").write_text(json.dumps({"question": "*", "turns": [turn]}))
    words = ("--database", str(tmp_path / "own.sqlite"), "--model", f"script:{tmp_path / 'lines.jsonl'}")
    assert sqltrain.ok("ask", "Who will win ?", *words).endswith(f"SQL: {ABSTENTION}\n{CANNOT_ANSWER}\n")


def test_an_empty_database_is_one_plain_line(tmp_path, monkeypatch, sqltrain):
    monkeypatch.chdir(tmp_path)
    sqlite3.connect(tmp_path / "own.sqlite").close()
    code, _, err = sqltrain("connect", "own.sqlite")
    assert (code, len(err.splitlines()), "has no tables. " in err) == (2, 1, True)
    assert not (tmp_path / "databases").exists()


def run(folder, *words, **environment):
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words], cwd=folder, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(root), **environment},
    )  # fmt: skip


@pytest.mark.services
@pytest.mark.timeout(120)
def test_a_server_that_refuses_or_goes_away_is_one_plain_line(tmp_path, monkeypatch):
    programs = binaries() or pytest.skip("PostgreSQL's programs are not installed")
    import psycopg

    cluster = Cluster(programs)
    hba = cluster.folder / "data" / "pg_hba.conf"
    hba.write_text("host all reader,writer 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
    cluster.start()
    try:
        make_reader(programs, cluster.admin, "reader", "secret")
        host = f"127.0.0.1:{cluster.admin.partition('port=')[2].split()[0]}/postgres"
        assert "the USAGE of the schema" in run(tmp_path, "connect", f"postgresql://reader:secret@{host}").stderr
        with psycopg.connect(cluster.admin, autocommit=True) as connection:
            connection.execute("CREATE TABLE item (id int); INSERT INTO item VALUES (1); CREATE ROLE writer LOGIN")
            connection.execute("ALTER ROLE writer PASSWORD 'secret'; GRANT CONNECT ON DATABASE postgres TO writer")
            connection.execute("GRANT USAGE ON SCHEMA public TO reader, writer; GRANT SELECT ON item TO reader")
            connection.execute("GRANT SELECT, DELETE ON item TO writer")

        for words in (["connect"], ["serve", "--model", "script:none.jsonl"], ["mcp"]):
            refused = run(tmp_path, words[0], f"postgresql://reader:hunter2@{host}", *words[1:])
            assert refused.returncode != 0
            assert (len(refused.stderr.splitlines()), "hunter2" in refused.stderr) == (1, False), refused.stderr
        writes = run(tmp_path, "connect", f"postgresql://writer:secret@{host}")
        found = (writes.returncode, "write to item" in writes.stdout, "--allow-writes" in writes.stderr)
        assert found == (2, True, True)
        assert not (tmp_path / "databases").exists()

        monkeypatch.setenv("PGPASSWORD", "secret")
        monkeypatch.chdir(tmp_path)
        address = f"postgresql://reader@{host}"
        assert run(tmp_path, "connect", address, "--name", "items").returncode == 0
        card = (tmp_path / "databases" / "items.yaml").read_bytes()
        where = named.find(address)
        with where.sql(Execution(timeout_s=20)) as sql:
            agent = Agent(where, sql, where.schema(sql), lambda: says("SELECT id FROM item"), QuestionBudget(30, 100))
            last = asyncio.run(_killed_in_mid_answer(agent, cluster))
            assert (last["type"], len(last["message"].splitlines())) == ("error", 1)
            away = run(tmp_path, "connect", "items")
            assert (away.returncode, len(away.stderr.splitlines())) == (2, 1), away.stderr
            assert (tmp_path / "databases" / "items.yaml").read_bytes() == card
            cluster.start()
            until = time.monotonic() + 20
            while (last := asyncio.run(_last(agent)))["type"] != "answer":
                assert time.monotonic() < until, last
            assert last["rows"] == [[1]]
    finally:
        cluster.remove()


async def _killed_in_mid_answer(agent, cluster):
    last = {}
    async with aclosing(agent.answer("Which ?")) as events:
        async for event in events:
            if event["type"] == "result":
                cluster.kill()
            last = event
    return last


async def _last(agent):
    async with aclosing(agent.answer("Which ?")) as events:
        return [event async for event in events][-1]


SHOP = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name VARCHAR(20), email VARCHAR(40));
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER, amount INTEGER);
INSERT INTO customer VALUES (1, 'Ada', 'ada@example.org'), (2, 'Bo', 'bo@example.org');
INSERT INTO purchase VALUES (1, 1, 30), (2, 1, 10), (3, 2, 5);
"""
JOIN = "SELECT c.name, SUM(p.amount) AS total FROM customer c JOIN purchase p ON p.customer_id = c.id GROUP BY c.name"


@contextmanager
def shop_of(engine, folder):
    """The address of the shop's database of an engine."""
    if engine != "mysql":
        build_database(folder / f"shop.{engine}", SHOP)
        yield f"shop.{engine}"
        return
    programs = mariadb_programs() or pytest.skip("MariaDB is not installed (apt-get install mariadb-server)")
    import pymysql

    with mariadb(programs) as port:
        with pymysql.connect(host="127.0.0.1", port=port, user="owner", autocommit=True) as connection:
            grants = ["CREATE USER viewer@'%'", "GRANT SELECT, SHOW VIEW ON shop.* TO viewer@'%'"]
            for statement in ["CREATE DATABASE shop", "USE shop", *SHOP.split(";")[:-1], *grants]:
                connection.cursor().execute(statement)
        yield f"mysql://viewer@127.0.0.1:{port}/shop"


@pytest.mark.parametrize("engine", ["sqlite", "duckdb", pytest.param("mysql", marks=pytest.mark.services)])
def test_the_first_answer_of_an_engine(engine, tmp_path, monkeypatch, sqltrain):
    """Connect, hide the addresses, ask a question that is answered and one that is not."""
    monkeypatch.chdir(tmp_path)
    with shop_of(engine, tmp_path) as address:
        code, out, err = sqltrain("connect", address)
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
