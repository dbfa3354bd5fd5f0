"""Statements that change data: each episode has a copy of its own, and the file stays byte for byte as it was."""

import hashlib
import shutil
from pathlib import Path

import pytest
from hostiles import hostile
from shops import build_shop

from pipelines.core.errors import DataError
from pipelines.core.types import Database, Example, ExecutionStatus
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import ProtocolSection, Sampling
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.equalities.official import IN_ORDER, cleaned_query
from pipelines.sql.lexical import writes
from pipelines.sql.schema import introspect
from pipelines.sql.splitter import statement_texts
from tests.fakes import build_database

COUNT = "SELECT count(*) FROM customer"
TRIGGER = "CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END"
NOW = "CREATE TABLE log (at TEXT); INSERT INTO log VALUES (CURRENT_TIMESTAMP)"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_shop(tmp_path_factory.mktemp("built") / "shop.sqlite").location


@pytest.fixture
def shop(built, tmp_path):
    return Database("shop", "sqlite_stateful", str(shutil.copy(built, tmp_path / "shop.sqlite")))


@pytest.fixture
def ask(engine, shop):
    return lambda sql: engine.execute_many([(shop, sql)])[0]


def beside(path):
    """The files of a database's folder, by their bytes and the time of their last change."""
    folder = Path(path).parent
    return {
        each.name: (hashlib.sha256(each.read_bytes()).hexdigest(), each.stat().st_mtime_ns) for each in folder.iterdir()
    }


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_a_hundred_writes_leave_the_file_as_it_was(engine, shop, journal):
    build_database(shop.location, f"PRAGMA journal_mode={journal}")
    before = beside(shop.location)
    kinds = (
        "INSERT INTO customer SELECT id + 100 * {n}, name, city, credit FROM customer",
        "UPDATE customer SET name = 'Eve {n}'",
        "DELETE FROM purchase WHERE id % 2 = {n} % 2",
        "CREATE TABLE extra_{n} AS SELECT * FROM customer; DROP TABLE purchase; REINDEX; ANALYZE",
        "ALTER TABLE customer RENAME TO client_{n}; ALTER TABLE client_{n} DROP COLUMN credit",
    )
    jobs = [(shop, kinds[n % len(kinds)].format(n=n)) for n in range(1, 101)]
    results = engine.execute_many([*jobs, (Database("shop", "sqlite", shop.location), COUNT), (shop, COUNT)])
    assert {result.status for result in results} == {ExecutionStatus.OK}
    assert results[-1].rows == results[-2].rows == ((4,),)
    assert beside(shop.location) == before


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '{folder}/stolen.db' AS stolen",
        "ATTACH ':memory:' AS scratch",
        "DETACH main",
        "VACUUM",
        "VACUUM INTO '{folder}/copy.db'",
        "CREATE TABLE t (a); VACUUM INTO '{folder}/copy.db'",
        "CREATE VIRTUAL TABLE f USING fts5(a)",
        "PRAGMA journal_mode = WAL",
        "PRAGMA writable_schema = ON",
        "PRAGMA max_page_count = 4000000000",
        "PRAGMA temp_store_directory = '{folder}'",
        "PRAGMA database_list",
        "UPDATE sqlite_master SET sql = 'CREATE TABLE customer (x)'",
        "INSERT INTO customer SELECT 1, load_extension('{folder}/evil'), '', 0",
        "CREATE TRIGGER g AFTER INSERT ON customer BEGIN SELECT load_extension('x'); END; INSERT INTO customer (id) "
        "VALUES (77)",
        "SELECT readfile('/etc/passwd')",
        "SELECT * FROM sqlite_dbpage",
    ],
)
def test_what_reaches_beyond_the_copy_is_refused(ask, shop, sql):
    before = beside(shop.location)
    assert ask(sql.format(folder=Path(shop.location).parent)).status in (ExecutionStatus.REFUSED, ExecutionStatus.ERROR)
    assert beside(shop.location) == before


def test_hostile_statements_that_may_write_now_reach_nothing_but_their_copy(engine, tmp_path):
    folder = tmp_path / "guarded"
    shop = Database("shop", "sqlite_stateful", build_shop(folder / "shop.sqlite").location)
    (folder / "secret.csv").write_text("the secret\n1\n")
    before = beside(shop.location)
    statements = [sql for outcome, sql in hostile("sqlite", folder) if outcome != "limit"]
    results = engine.execute_many([(shop, sql) for sql in statements])
    assert ExecutionStatus.UNAVAILABLE not in {result.status for result in results}
    assert not any("the secret" in f"{result.rows}{result.error}" for result in results)
    ran = [sql for sql, result in zip(statements, results, strict=True) if result.ok]
    assert not any(word in sql.lower() for sql in ran for word in ("attach", "vacuum", "load_extension", "virtual"))
    assert engine.execute_many([(shop, COUNT)])[0].rows == ((4,),)
    assert beside(shop.location) == before


def test_time_and_size_of_a_copy_are_bounded_and_a_database_too_large_for_one_is_not_available(shop):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    tries = [
        endless + "INSERT INTO customer (id, name) SELECT i + 1000, hex(zeroblob(1000000)) FROM n",
        endless + "UPDATE customer SET credit = (SELECT count(*) FROM n)",
        ";".join(["SELECT 1"] * 1001),
        COUNT,
    ]
    with SqlEngine(Limits(timeout_s=0.5, memory_mb=64)) as tight:
        found = [tight.execute_many([(shop, sql)])[0] for sql in tries]
        build_database(shop.location, "CREATE TABLE wide AS SELECT zeroblob(17000000) AS a")
        found += tight.execute_many([(shop, COUNT)])
    assert [(result.status, result.error_class) for result in found] == [
        (ExecutionStatus.LIMIT, "size_limit"), (ExecutionStatus.TIMEOUT, "timeout"),
        (ExecutionStatus.LIMIT, "too_many_statements"), (ExecutionStatus.OK, None),
        (ExecutionStatus.UNAVAILABLE, "database_too_large"),
    ]  # fmt: skip


def test_an_episode_meets_what_it_wrote_and_no_other_does(engine, shop):
    before = beside(shop.location)
    turns = [
        "DELETE FROM customer WHERE id = 1; INSERT INTO customer (id, name) VALUES (50, 'Zoe'), (51, 'Yan')",
        "UPDATE customer SET name = 'lost'; SELECT * FROM nowhere",  # fails, so none of it stays
        "SELECT count(*) FROM customer WHERE name IN ('Zoe', 'Yan', 'lost')",
    ]

    def say(request):
        tag, sql = ("sql", turns[request.turn]) if request.turn < len(turns) else ("solution", turns[0])
        return f"<reasoning>r</reasoning><{tag}>{sql if request.sample == 0 else COUNT}</{tag}>"

    protocol = build_protocol(ProtocolSection(name="react", prompt="stateful"))
    rollouts = RolloutEngine(ScriptedPolicy(say), protocol, engine, Sampling(), 10, introspect)
    question = Example("q", "add Zoe and Yan", shop, turns[0])
    wrote, looked = rollouts.run([EpisodeRequest(question, sample, 0) for sample in (0, 1)])
    found = [turn.observation and turn.observation.split("\n")[1:3] for turn in wrote.turns[:3:2]]
    assert found == [["rows changed", "2"], ["count(*)", "2"]]
    assert wrote.turns[1].error_class == "no_such_table"
    assert len({turn.observation and turn.observation.split("\n")[2] for turn in looked.turns[:3]}) == 1
    (verdict,) = engine.verdicts([Pair(shop, turns[0], wrote.final_sql)], ["livesqlbench"])
    assert verdict.scores == {"livesqlbench": 1.0}
    assert beside(shop.location) == before


def test_a_script_beside_the_database_prepares_every_copy(ask, shop):
    setup = Path(shop.location + ".setup.sql")
    setup.write_text("CREATE TABLE seen (a); INSERT INTO seen VALUES (1), (2);", encoding="utf-8")
    assert ask("DELETE FROM seen WHERE a = 1\0SELECT count(*) FROM seen").rows == ((1,),)
    assert ask("SELECT count(*) FROM seen").rows == ((2,),)


def test_a_script_that_fails_makes_the_database_unavailable(ask, shop):
    Path(shop.location + ".setup.sql").write_text("INSERT INTO nowhere VALUES (1)", encoding="utf-8")
    assert ask(COUNT).status is ExecutionStatus.UNAVAILABLE


@pytest.mark.parametrize(
    ("gold", "predicted", "right"),
    [
        ("UPDATE customer SET credit = 1 WHERE id = 1", "UPDATE customer SET credit=1.001 WHERE id IN (1)", 1.0),
        ("UPDATE customer SET credit = 1 WHERE id = 1", "UPDATE customer SET credit = 1", 0.0),
        ("UPDATE customer SET credit = 1 WHERE id = 1", "SELECT 1", 0.0),
        ("DELETE FROM purchase", "DELETE FROM purchase; SELECT 'done'", 1.0),
        ("CREATE VIEW v AS SELECT id FROM customer", "CREATE VIEW v AS SELECT c.id FROM customer AS c", 1.0),
        ("CREATE VIEW v AS SELECT id FROM customer", "CREATE TABLE v AS SELECT id FROM customer", 0.0),
        ("CREATE INDEX i ON customer (name)", "CREATE INDEX by_name ON customer (name)", 1.0),
        ("CREATE INDEX i ON customer (name)", "CREATE UNIQUE INDEX i ON customer (id)", 0.0),
        (NOW, f"{NOW};", 1.0),
        ("DELETE FROM customer WHERE id = -1", "DELETE FROM customer WHERE id = -1", 0.0),  # changes nothing
        ("SELECT DISTINCT city FROM customer", "SELECT city FROM customer -- all", 1.0),
        ("SELECT ROUND(credit, 1) FROM customer", "SELECT credit FROM customer", 1.0),
        ("SELECT 1.004", "SELECT 1.0", 1.0),
        ("SELECT name FROM customer ORDER BY id DESC", "SELECT name FROM customer", 1.0),
        (IN_ORDER + "SELECT name FROM customer ORDER BY id DESC", "SELECT name FROM customer ORDER BY id", 0.0),
        ("SELECT id FROM customer WHERE id < 0", "SELECT id FROM customer WHERE id = 0", 0.0),  # never right if empty
    ],
)
def test_an_answer_is_right_by_its_rows_or_by_what_it_makes_of_the_database(engine, shop, gold, predicted, right):
    (verdict,) = engine.verdicts([Pair(shop, gold, predicted)], ["livesqlbench"])
    assert (verdict.scores, verdict.broken) == ({"livesqlbench": right}, False)


def test_an_outcome_needs_an_engine_that_has_one(engine, shop):
    with pytest.raises(DataError, match="sqlite lets none change anything"):
        engine.verdicts([Pair(Database("shop", "sqlite", shop.location), COUNT, COUNT)], ["livesqlbench"])


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("SELECT 1; SELECT 2 ;; ", ["SELECT 1", "SELECT 2"]),
        ("SELECT 'a;b' -- c; d\n, \"e;f\"; /* ; */ SELECT [g;h]", ["SELECT 'a;b'  \n, \"e;f\"", "SELECT [g;h]"]),
        ("-- all\nCREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END; SELECT 1", [TRIGGER, "SELECT 1"]),
        ("SELECT 'never closed; SELECT 1", ["SELECT 'never closed; SELECT 1"]),
        ("SELECT 1 /* never closed; SELECT 2", ["SELECT 1"]),
        ("-- nothing\n;", []),
    ],
)
def test_a_script_is_cut_where_its_statements_end(script, parts):
    assert statement_texts(script) == parts


def test_writes_are_words_outside_quotes_and_a_query_is_cleaned_as_officially():
    assert not writes("SELECT replace(name, 'update', \"delete\") FROM t -- drop\n/* insert */")
    assert not writes("SELECT CASE WHEN a THEN 1 END, release FROM t")
    ends = ("END", "  end transaction", "SELECT 1; RELEASE s", "/* all */ End")  # what ends a transaction writes
    for script in ("WITH a AS (SELECT 1) INSERT INTO t SELECT * FROM a", *ends):
        assert writes(script), script
    assert cleaned_query("SELECT DISTINCT a, COUNT(DISTINCT b) FROM t") == "SELECT a, COUNT(DISTINCT b) FROM t"
    assert cleaned_query("SELECT ROUND(AVG(ROUND(a, 2)), 1), round (b) FROM t") == "SELECT AVG(a), b FROM t"
    assert cleaned_query("SELECT '--a' -- b") == "SELECT '--a'"
    assert cleaned_query("SELECT ROUND(1") == "SELECT ROUND(1"
