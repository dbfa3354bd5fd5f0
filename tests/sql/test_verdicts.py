"""Judging pairs: what is executed, what is kept, and what is never counted as wrong."""

import asyncio
import json
import pickle
import sqlite3
import time

import duckdb
import pytest
from shops import build_shop

from pipelines.core.errors import RecipeError
from pipelines.core.registry import EQUALITIES
from pipelines.core.types import Database, Example, ExecutionStatus
from pipelines.evaluation.evaluate import of_prediction
from pipelines.recipe.config import Execution
from pipelines.rewards.outcome import make_outcomes
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.lexical import bigrams
from pipelines.sql.sandbox import pool, wire
from pipelines.sql.sandbox.pool import MalformedReply, check_reply
from pipelines.sql.schema import introspect
from tests.fakes import build_database

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
# One call of a function, which SQLite cannot interrupt: 4e10 comparisons of characters, 20 times the limit and more.
NATIVE = "SELECT printf('%.*c', 900000, 'a') LIKE '%' || printf('%.*c', 49000, 'a') || 'b'"
MANY = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 5000) SELECT x FROM c"
OK = ExecutionStatus.OK


def test_a_verdict_holds_both_sides(engine, shop):
    pair = Pair(shop, "SELECT city FROM customer", "SELECT DISTINCT city FROM customer")
    (verdict,) = engine.verdicts([pair], ["strict", "bird"])
    assert verdict.scores == {"strict": 0.0, "bird": 1.0}
    assert (verdict.gold, verdict.predicted, verdict.gold_rows, verdict.n_rows) == (OK, OK, 4, 3)
    assert (verdict.error_class, verdict.broken) == (None, False)


def test_of_several_gold_queries_any_may_match(engine, shop):
    first, second, fails = "SELECT name FROM customer", "SELECT city FROM customer", "SELECT nope"
    asked = [
        (first, second, (second,)),
        (first, "SELECT 1", (second,)),
        (fails, second, (second,)),
        (fails, second, ()),
    ]
    pairs = [Pair(shop, *each) for each in asked]
    verdicts = engine.verdicts(pairs, ["strict", "bird"])
    assert [tuple(verdict.scores.values()) for verdict in verdicts] == [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    assert [verdict.broken for verdict in verdicts] == [False, False, False, True]
    assert [asyncio.run(engine.decide(pair, ["strict", "bird"])) for pair in pairs] == verdicts
    example = Example("1", "?", shop, first, meta={"gold_sqls": [second]})
    (outcome,) = make_outcomes([of_prediction("1", second, "p")], {"1": example}, engine, introspect, "strict", 1)
    assert (outcome.correct, outcome.gold_bigrams) == (True, bigrams(first))  # what compares texts takes the first


BEHIND = [
    "", ";", " ; ", ";;", "; ;", ";\n;\n", "; -- a note", "; /* a; note */ -- and; another", "; -- a note\n;", ";/**/;",
    " -- a; note\n;", "; /* open", ";\f\t\r", " /* ; */ ; ;",
]  # fmt: skip
HANDED_ON = ["bird", "skyrl", "soft_f1", "spider_exec", "ehrsql", "test_suite_keep_distinct"]


@pytest.mark.parametrize("behind", BEHIND)
def test_more_semicolons_are_an_error_where_the_official_script_has_one(engine, shop, duckdb_shop, behind):
    gold = "SELECT name FROM customer WHERE name <> 'a;b'"
    with sqlite3.connect(shop.location) as connection:  # what the official scripts hand a prediction to
        try:
            connection.execute(gold + behind)
            official = 1.0
        except sqlite3.ProgrammingError:
            official = 0.0
    others = ["test_suite", "strict", "strict_nonempty", "proved"]  # the script of `test_suite` cuts the text first
    (verdict,) = engine.verdicts([Pair(shop, gold, gold + behind)], HANDED_ON + others)
    assert verdict.scores == dict.fromkeys(HANDED_ON, official) | dict.fromkeys(others, 1.0)
    (timed,) = engine.verdicts([Pair(shop, gold, gold + behind)], ["r_ves"])  # its reward depends on the clock
    assert (timed.scores["r_ves"] > 0) == (official > 0)
    # Python's sqlite3 is no judge of other engines.
    (verdict,) = engine.verdicts([Pair(duckdb_shop, gold, gold + ";;")], ["bird", "strict"])
    assert verdict.scores == {"bird": 1.0, "strict": 1.0}


def test_the_script_that_cuts_a_text_takes_the_empty_statement_before_a_semicolon(engine, shop):
    texts = ["SELECT 1", ";SELECT 1", " -- a\n; SELECT 1", "/* a */;SELECT 1"]
    verdicts = engine.verdicts([Pair(shop, "SELECT 1", sql) for sql in texts], ["test_suite", "bird", "strict"])
    assert [verdict.scores["test_suite"] for verdict in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert [verdict.scores["bird"] for verdict in verdicts] == [1.0] * 4
    assert [verdict.scores["strict"] for verdict in verdicts] == [1.0] * 4


def test_order_counts_where_the_gold_query_orders(engine, shop):
    asc, desc = "SELECT name FROM customer ORDER BY id", "SELECT name FROM customer ORDER BY id DESC"
    plain = "SELECT name FROM customer"
    verdicts = engine.verdicts([Pair(shop, asc, desc), Pair(shop, plain, desc), Pair(shop, asc, plain)], ["strict"])
    assert [verdict.scores["strict"] for verdict in verdicts] == [0.0, 1.0, 1.0]


def test_a_wrong_prediction_scores_0_and_says_why(engine, shop):
    two, large = "SELECT 1; SELECT 1", "SELECT zeroblob(2000000000)"
    wrong = ["SELECT nope", "DROP TABLE customer", "", ENDLESS, NATIVE, MANY, two, large]
    names = [name for name in EQUALITIES if not (EQUALITIES[name].by_file or EQUALITIES[name].by_outcome)]
    verdicts = engine.verdicts([Pair(shop, "SELECT 1", sql) for sql in wrong], names)
    assert [verdict.error_class for verdict in verdicts] == [
        "no_such_column", "not_authorized", "empty", "timeout", "timeout", "result_limit", "several_statements",
        "cell_limit",
    ]  # fmt: skip
    assert [verdict.predicted for verdict in verdicts] == [
        ExecutionStatus.ERROR, ExecutionStatus.REFUSED, ExecutionStatus.ERROR, ExecutionStatus.TIMEOUT,
        ExecutionStatus.TIMEOUT, ExecutionStatus.LIMIT, ExecutionStatus.REFUSED, ExecutionStatus.LIMIT,
    ]  # fmt: skip
    for verdict in verdicts:
        assert (set(verdict.scores.values()), verdict.gold, verdict.broken) == ({0.0}, OK, False)


@pytest.mark.parametrize("gold", ["SELECT nope", "DELETE FROM customer", ENDLESS, NATIVE, MANY])
def test_a_gold_query_without_a_result_breaks_the_pair(engine, shop, gold):
    (verdict,) = engine.verdicts([Pair(shop, gold, "SELECT 1")], ["strict", "test_suite"])
    assert verdict.gold is not OK
    assert (verdict.broken, verdict.predicted) == (True, None)
    assert verdict.scores == {"strict": 0.0, "test_suite": 0.0}


def test_a_missing_database_breaks_the_pair_and_no_answer_is_wrong(engine, shop):
    gone = Database("gone", "sqlite", shop.location + ".gone")
    (verdict,) = engine.verdicts([Pair(gone, "SELECT 1", "SELECT 1")], ["strict"])
    found = (verdict.gold, verdict.error_class, verdict.broken)
    assert found == (ExecutionStatus.UNAVAILABLE, "database_missing", True)
    (verdict,) = engine.verdicts([Pair(shop, "SELECT 1", None)], ["strict"])
    assert (verdict.predicted, verdict.gold, verdict.broken, verdict.scores) == (None, OK, False, {"strict": 0.0})


def test_a_gold_query_runs_once(shop, tmp_path, monkeypatch):
    # On a machine that stands still for a moment, a spare worker would take over, which has no gold results.
    monkeypatch.setattr(pool, "STUCK_SECONDS", float("inf"))
    monkeypatch.setattr(pool, "STUCK_WORK", float("inf"))
    audit = tmp_path / "audit.jsonl"
    group = [Pair(shop, "SELECT 1", sql) for sql in ("SELECT 1 ", "SELECT 2", "SELECT 2", "SELECT 1")]
    with SqlEngine(Limits(), audit=audit) as engine:
        first = engine.verdicts(group, ["strict"])
        again = asyncio.run(engine.decide(group[1], ["strict"]))
    assert [verdict.scores["strict"] for verdict in first] == [1.0, 0.0, 0.0, 1.0]
    assert again == first[1]
    ran = [(line["role"], line["sql"]) for line in map(json.loads, audit.read_text().splitlines())]
    assert ran == [("gold", "SELECT 1"), *(("prediction", sql) for sql in ("SELECT 1 ", "SELECT 2", "SELECT 2"))]


def test_a_kept_gold_result_goes_when_the_database_changes(engine, tmp_path):
    pair = Pair(build_shop(tmp_path / "a.sqlite"), "SELECT count(*) FROM customer", "SELECT 4")
    assert engine.verdicts([pair], ["strict"])[0].scores["strict"] == 1.0
    build_shop(tmp_path / "b" / "b.sqlite")
    build_database(tmp_path / "b" / "b.sqlite", "DELETE FROM customer")
    (tmp_path / "b" / "b.sqlite").replace(tmp_path / "a.sqlite")
    assert engine.verdicts([pair], ["strict"])[0].scores["strict"] == 0.0


def test_many_verdicts_keep_their_order_over_workers_and_databases(tmp_path):
    databases = [build_shop(tmp_path / f"{n}.sqlite") for n in range(7)]
    pairs = [Pair(databases[n % 7], f"SELECT {n % 3}", f"SELECT {n % 2}") for n in range(600)]
    with SqlEngine(Limits(), workers=3) as engine:
        verdicts = engine.verdicts(pairs, ["strict"])
    assert [verdict.scores["strict"] for verdict in verdicts] == [float(n % 3 == n % 2) for n in range(600)]


COUNT = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT (SELECT n FROM t)) SELECT count(*) FROM c"


def test_a_gold_query_that_ran_before_and_times_out_now_is_no_way_out_of_scoring(tmp_path):
    database = build_database(tmp_path / "a.sqlite", "CREATE TABLE t (n); INSERT INTO t VALUES (3)")
    pair = Pair(database, COUNT, "SELECT 3")
    with SqlEngine(Limits(timeout_s=0.5)) as engine:
        assert engine.verdicts([pair], ["strict"])[0].scores == {"strict": 1.0}
        build_database(database.location, "UPDATE t SET n = 1000000000000")
        (verdict,) = engine.verdicts([pair], ["strict"])
        found = (verdict.scores, verdict.predicted, verdict.broken)
        assert found == ({"strict": 0.0}, ExecutionStatus.TIMEOUT, False)
        assert asyncio.run(engine.decide(pair, ["strict"])) == verdict
    with SqlEngine(Limits(timeout_s=0.5)) as engine:  # it never ran: nothing is known of the prediction
        assert engine.verdicts([pair], ["strict"])[0].broken


def test_a_gold_query_of_a_server_that_times_out_is_asked_again_alone(monkeypatch):
    slow = ({}, ("timeout", "timeout", 0, 500.0), None)
    right = ({"strict": 1.0}, ("ok", None, 1, 1.0), ("ok", None, 1, 1.0))
    replies, asked = [[right, slow], [right], [slow], [slow], [slow]], []
    pairs = [Pair(Database("a", "postgres", "postgresql://host/a"), f"SELECT {n}", "SELECT 1") for n in range(3)]
    with SqlEngine(Limits()) as engine:
        monkeypatch.setattr(engine, "_run", lambda jobs: asked.append([job[2] for _, job in jobs]) or replies.pop(0))
        assert [verdict.scores["strict"] for verdict in engine.verdicts(pairs[:2], ["strict"])] == [1.0, 1.0]
        for _ in range(2):  # the second time it is known
            assert engine.verdicts(pairs[2:], ["strict"])[0].broken
    assert asked == [["SELECT 0", "SELECT 1"], ["SELECT 1"], ["SELECT 2"], ["SELECT 2"], ["SELECT 2"]]


def test_a_prediction_that_times_out_is_wrong_by_all_and_no_other_query_is_asked(shop):
    """The rewritten gold query would wait beside what the server may still be at."""
    pair = Pair(shop, "SELECT DISTINCT city FROM customer", f"SELECT DISTINCT * FROM ({ENDLESS})")
    names = ["strict", "test_suite", "bird"]
    with SqlEngine(Limits(timeout_s=2)) as engine:
        engine.verdicts([Pair(shop, "SELECT 1", None)], names)
        start = time.monotonic()
        (verdict,) = engine.verdicts([pair], names)
        assert time.monotonic() - start < 3.9  # another query would take two seconds more
    assert (verdict.scores, verdict.broken) == (dict.fromkeys(names, 0.0), False)


def test_judging_does_not_block_an_event_loop(shop):
    async def main(engine):
        slow = asyncio.create_task(engine.decide(Pair(shop, "SELECT 1", ENDLESS), ["strict"]))
        await asyncio.sleep(0.05)
        pairs = [Pair(shop, "SELECT 1", f"SELECT {n}") for n in range(50)]
        quick = await asyncio.gather(*(engine.decide(pair, ["strict"]) for pair in pairs))
        assert [verdict.scores["strict"] for verdict in quick] == [float(n == 1) for n in range(50)]
        assert not slow.done()
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)

    with SqlEngine(Limits(timeout_s=60)) as engine:
        asyncio.run(main(engine))


def test_an_unknown_equality_is_refused_and_limits_come_from_the_recipe(engine, shop):
    with pytest.raises(RecipeError, match="there is no equality 'exact'"):
        engine.verdicts([Pair(shop, "SELECT 1", "SELECT 1")], ["exact"])
    assert Limits.of(Execution(timeout_s=3, max_rows=5, max_bytes=7, memory_mb=9)) == Limits(3, 5, 7, 9)


class Evil:
    def __reduce__(self):
        return print, ("forged",)


def test_a_forged_reply_runs_nothing(capsys):
    with pytest.raises(pickle.UnpicklingError, match=r"may not name builtins\.print"):
        list(wire.unpack_replies(pickle.dumps(Evil(), 5)))
    assert capsys.readouterr().out == ""
    replies = [(1, "a"), [b"x", None, 1.5]]
    assert list(wire.unpack_replies(b"".join(pickle.dumps(reply, 5) for reply in replies))) == replies


EXECUTE = ("execute", ("db",), "SELECT 1", 10)
VERDICT_JOB = ("verdict", ("db",), "SELECT 1", "SELECT 1", ("strict",), (False, False), None)
GOOD = ("ok", ("a",), [(1,), (2,)], False, None, None, 0.5, 3)
FACTS = ("ok", None, 1, 0.1)
FIELDS = [  # (the place of a field of GOOD, what is no value of it)
    (0, "fine"), (0, ["ok"]), (0, "error"), (1, None), (1, (1,)), (1, ("a", "b")), (2, [1]), (2, [[1], [2]]),
    (2, {"a": 1}), (4, b"x"), (6, float("nan")), (7, "3"),
]  # fmt: skip
LIES = [7, (), "ok", GOOD[:7], (*GOOD, 1), *((*GOOD[:n], value, *GOOD[n + 1 :]) for n, value in FIELDS)]
VERDICT_LIES = [
    None,
    ({}, FACTS),
    *((scores, FACTS, FACTS) for scores in ({"bird": 1.0}, {"strict": "1"}, {"strict": float("nan")})),
    ({"strict": 1.0}, FACTS, ("ok", None, -1, 0.1)),
    *(({"strict": 1.0}, facts, FACTS) for facts in (("odd", None, 1, 0.1), None)),
]


@pytest.mark.parametrize(
    ("job", "good", "reply"),
    [
        *((EXECUTE, GOOD, lie) for lie in LIES),
        *((VERDICT_JOB, ({"strict": 1.0}, FACTS, FACTS), lie) for lie in VERDICT_LIES),
    ],
)
def test_a_malformed_result_or_verdict_is_rejected(job, good, reply):
    check_reply(job, good)
    with pytest.raises((MalformedReply, TypeError)):
        check_reply(job, reply)


@pytest.mark.parametrize("lie", [7, ("ok",), (*GOOD[:2], [1], *GOOD[3:]), None])
def test_a_nonsense_answer_means_a_dead_worker(shop, monkeypatch, lie):
    """Every reply is replaced on its way in: nothing raises, nothing hangs, nothing is scored."""
    monkeypatch.setattr(pool, "unpack_replies", lambda body: iter([pickle.loads(pickle.dumps(lie))]))
    with SqlEngine(Limits(timeout_s=5)) as engine:
        (result,) = engine.execute_many([(shop, "SELECT 1")])
        assert (result.ok, result.error_class) == (False, "worker_died")
        (verdict,) = engine.verdicts([Pair(shop, "SELECT 1", "SELECT 1")], ["strict"])
        assert verdict.scores == {"strict": 0.0}
    monkeypatch.undo()
    with SqlEngine(Limits(timeout_s=5)) as engine:
        assert engine.execute_many([(shop, "SELECT 1")])[0].status is ExecutionStatus.OK


def test_the_order_of_a_gold_query_counts_whatever_quotes_its_dialect_has(engine, tmp_path):
    """Read as SQLite reads it, the first text goes on to the end of this query, and no ORDER BY is left."""
    path = tmp_path / "t.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT * FROM (VALUES ('x', 2), ('y', 1)) AS made(b, a)")
    database = Database("t", "duckdb", str(path))
    gold = r"SELECT a FROM t WHERE b <> E'it\'s' ORDER BY (b = 'x') DESC, a"  # 2, 1
    pairs = [Pair(database, gold, f"SELECT a FROM t ORDER BY a{end}") for end in ("", " DESC")]
    assert [verdict.scores["strict"] for verdict in engine.verdicts(pairs, ["strict"])] == [0.0, 1.0]
