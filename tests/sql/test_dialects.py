"""The same database and the same questions in three engines: the same rows, and the same verdicts."""

import dataclasses
import random
import re
from pathlib import Path

import pytest
from copies import to_duckdb, to_mysql, to_postgres

from pipelines.benchmarks.miniature.questions import read_miniature
from pipelines.core.registry import DIALECTS
from pipelines.recipe.config import Source
from pipelines.sql.analysis.hardness import hardness
from pipelines.sql.analysis.name_resolution import schema_items
from pipelines.sql.dialects.base import REFUSED
from pipelines.sql.dialects.dialect import Role, engine_of_head
from pipelines.sql.dialects.guard import token_refusal
from pipelines.sql.engine import Limits, Pair
from pipelines.sql.schema import introspect

LIMITS = Limits(timeout_s=10)
DATABASES = 6
EQUALITIES = ("strict", "bird", "test_suite")  # soft_f1 pairs rows by position, which no query without ORDER BY fixes


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    examples = read_miniature(Source(split="dev", options={"databases": DATABASES}), 0, root).examples
    return [
        dataclasses.replace(one, database=dataclasses.replace(one.database, location=str(root / one.database.location)))
        for one in examples
    ]


def verdicts(engine, world, copies):
    """Verdicts in SQLite and in the copies: of each gold query, and of another question's gold query in its place."""
    rng = random.Random(0)
    pairs = []
    for one in world:
        others = [other.gold_sql for other in world if other.database == one.database]
        pairs += [
            Pair(one.database, one.gold_sql, one.gold_sql.lower()),
            Pair(one.database, one.gold_sql, rng.choice(others)),
        ]
    moved = [dataclasses.replace(pair, database=copies[pair.database.id]) for pair in pairs]
    return engine.verdicts(pairs, EQUALITIES), engine.verdicts(moved, EQUALITIES)


def facts(verdicts):
    return [(verdict.broken, verdict.scores, verdict.n_rows, verdict.gold_rows) for verdict in verdicts]


def check_right_and_wrong(world, ours):
    """The pairs hold right and wrong answers, so that an engine that says the same of all of them is noticed."""
    assert [verdict.error_class for verdict in ours if verdict.broken] == []
    right = [verdict.scores["strict"] for verdict in ours]
    plain = [all(value.islower() for value in re.findall(r"'([^']*)'", one.gold_sql)) for one in world]
    assert 0 < sum(plain) < len(plain)
    assert all(score == 1.0 for score, same in zip(right[::2], plain, strict=True) if same)  # SQL's words have no case
    assert sum(right[::2]) < sum(plain) + 3  # stored values have: 'cairo' finds no 'Cairo', but by chance
    assert 0 < sum(right[1::2]) < len(world) / 4  # another question's gold query is right by chance


@pytest.mark.parametrize(
    "kind", ["duckdb", *(pytest.param(kind, marks=pytest.mark.services) for kind in ("postgres", "mysql"))]
)
def test_an_engine_gives_the_verdicts_of_sqlite(engine, world, kind, tmp_path, request):
    def copy(database):
        if kind == "duckdb":
            return to_duckdb(database, tmp_path / f"{database.id}.duckdb")
        if kind == "mysql":
            return to_mysql(database, request.getfixturevalue("mysql_port"), "reader")
        server = request.getfixturevalue("server")
        return to_postgres(database, server.admin, server.reader)

    copies = {database.id: copy(database) for database in dict.fromkeys(one.database for one in world)}
    ours, theirs = verdicts(engine, world, copies)
    check_right_and_wrong(world, ours)
    assert facts(theirs) == facts(ours)
    schema, original = introspect(copies[world[0].database.id]), introspect(world[0].database)
    for one in world:
        if kind == "postgres" and one.database == world[0].database:
            assert schema_items(one.gold_sql, schema, "postgres") == schema_items(one.gold_sql, original)
            assert hardness(one.gold_sql, "postgres") == one.hardness


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT ( * ) FROM t",
        "SELECT a, count(*) FILTER (WHERE b IN (1, 2)) OVER (PARTITION BY c) FROM t AS q(a, b, c)",
        "WITH x(a) AS (SELECT 1), y (b) AS MATERIALIZED (SELECT 2) SELECT * FROM x, y",
        "SELECT x FROM (SELECT 1) t(x)",
        "SELECT CAST(a AS varchar(10)), a::numeric(5, 2) FROM t",
        "SELECT 'it''s; $$ -- /*' -- x\n FROM t;",
        "SELECT name AS user FROM t",
        'SELECT "odd name" FROM "t"',
        "SELECT a FROM t WHERE b LIKE'x'",
        "(SELECT 1) UNION (SELECT 2)",
        "VALUES (1), (2)",
        "SELECT extract(year FROM d), coalesce(a, 'b') FROM t GROUP BY GROUPING SETS ((a), (b))",
    ],
)
def test_the_allow_list_lets_plain_queries_through(sql):
    assert token_refusal(sql, "postgres") is None
    assert token_refusal(sql, "duckdb") is None


CALL, PART = "not authorized to use function: foo", "this part of SQL is not allowed here: "


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT foo(1)", CALL),
        ("SELECT a, foo (b) FROM t", CALL),
        ("SELECT x.foo(1)", CALL),
        ('SELECT "foo"(1)', CALL),
        ("SELECT foo/**/(1)", CALL),
        ("SELECT foo -- c\n (1)", CALL),
        ("SELECT * FROM foo(a) AS (b int)", CALL),
        ("SELECT * FROM t, foo(a) AS (b int)", CALL),
        ("WITH foo(a) AS (SELECT 1) SELECT foo(5)", CALL),
        ("SELECT pg_sleep (1)", "not authorized to use pg_sleep"),
        ("SELECT * FROM pg_class", "not authorized to use pg_class"),
        ("SELECT 1 /* /* ' */ */ , foo(1) /* ' */", PART + repr("/* /* ' */ */ , foo(")),
        ("SELECT U&'a' || foo(1)", PART + repr("&'a' || foo(1)")),
        ("SELECT 1 -- \r , foo(1)", PART + repr("-- \r , foo(1)")),
        ("SELECT 1\x00; foo(1)", PART + repr("\x00; foo(1)")),
        ("SELECT `a`", PART + repr("`a`")),
        ("SELECT a; foo(1)", "only one statement may be run at a time"),
    ],
)
def test_the_allow_list_finds_a_call_however_it_is_written(sql, said):
    for engine in ("postgres", "duckdb"):
        refused = token_refusal(sql, engine)
        assert (refused.status, refused.error) == (REFUSED, said)


@pytest.mark.parametrize("sql", ["SELECT E'\\' || foo(1) || '", "SELECT $x$ foo(1) $x$"])
def test_a_call_inside_a_text_of_duckdb_is_no_call(sql):
    """Both are one text there; PostgreSQL's lexer of ours does not read such texts, and refuses them."""
    assert token_refusal(sql, "duckdb") is None
    refused = token_refusal(sql, "postgres")
    assert (refused.status, refused.error) == (REFUSED, PART + repr(sql.removeprefix("SELECT ")))


def test_an_engine_is_told_by_a_files_first_bytes_then_by_its_suffix():
    heads = {"sqlite": b"SQLite format 3\0", "duckdb": b"checksumDUCK", None: b"%PDF-1.4"}
    assert {engine_of_head(head, Path("shop.dat")): head for head in heads.values()} == heads


def test_each_server_tells_how_its_address_takes_a_password_and_who_makes_a_reader():
    postgres, mysql = DIALECTS["postgres"], DIALECTS["mysql"]
    assert mysql.with_password("mysql://me@host/shop", "p@ss") == "mysql://me:p%40ss@host/shop"
    assert "password=p@ss" in postgres.with_password("postgresql://me@host/shop", "p@ss")
    grants = mysql.reader_grants("mysql://me@host/shop", ())
    assert grants[-1] == "GRANT SELECT, SHOW VIEW ON `shop`.* TO 'shop_reader'@'%';"
    grants = postgres.reader_grants("postgresql://me@host/shop", ("sales", "hr"))
    assert 'GRANT USAGE ON SCHEMA "sales", "hr" TO "shop_reader";' in grants
    assert DIALECTS["sqlite"].reader_grants("shop.sqlite", ()) == []
    told = {"SHOW GRANTS": [("GRANT ALL ON *.* TO root",)]}
    assert mysql.role(told.__getitem__) == Role(("GRANT ALL ON *.*",), True)
