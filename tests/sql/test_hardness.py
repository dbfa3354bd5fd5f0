"""Spider's hardness by hand, and what its parser of 2018 reads: counts, habits, SQL that it cannot read."""

import json

import pytest

from pipelines.core.errors import DataError
from pipelines.core.types import Database
from pipelines.sql.analysis.hardness import Counts, count_components, hardness, level
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.equalities import spider_grammar
from tests.fakes import build_database


@pytest.mark.parametrize(
    ("sql", "counts", "expected"),
    [
        ("SELECT count(*) FROM singer", (0, 0, 0), "easy"),
        ("SELECT name FROM singer WHERE age > 20", (1, 0, 0), "easy"),
        ("SELECT name, age FROM singer", (0, 0, 1), "medium"),
        ("SELECT name FROM singer ORDER BY age LIMIT 1", (2, 0, 0), "medium"),
        ("SELECT T1.a FROM t AS T1 JOIN u AS T2 ON T1.id = T2.id WHERE T2.b = 'x'", (2, 0, 0), "medium"),
        ("SELECT max(a), min(b), avg(c) FROM t WHERE d = 1 AND e = 2", (1, 0, 3), "hard"),
        ("SELECT a, count(*) FROM t JOIN u ON t.i = u.i GROUP BY a ORDER BY count(*) DESC", (3, 0, 2), "hard"),
        ("SELECT a FROM t WHERE a NOT IN (SELECT a FROM u)", (1, 1, 0), "hard"),
        ("SELECT a FROM t WHERE b = 1 UNION SELECT a FROM t WHERE b = 2", (1, 1, 0), "hard"),
        ("SELECT a, b FROM t WHERE c > (SELECT avg(c) FROM t) AND d LIKE 'x'", (2, 1, 2), "extra"),
        # LIKE and OR count, in ON, WHERE and HAVING
        ("SELECT a FROM t WHERE b LIKE 'x' OR c = 'y'", (3, 0, 1), "hard"),
        # a NOT counts as an aggregation, an AND of HAVING too
        ("SELECT max(a) FROM t WHERE b NOT LIKE 'x'", (2, 0, 1), "medium"),
        ("SELECT a FROM t GROUP BY a HAVING count(*) > 1 AND sum(b) > 2 AND max(c) > 3", (1, 0, 1), "medium"),
        # after a column as a value, the parser skips to the next AND
        ("SELECT a FROM t WHERE b = c OR d = 1", (1, 0, 0), "easy"),
        ("SELECT a FROM t WHERE b = c OR d = 1 AND e = 2", (1, 0, 1), "medium"),
        ("SELECT a FROM t WHERE b = 'c' OR d = 1", (2, 0, 1), "medium"),
        # an item aggregates only if it starts with an aggregate
        ("SELECT (max(a) - min(a)), max(b) FROM t", (0, 0, 1), "medium"),
        # ORDER BY behind a set operation belongs to the second query; a subquery in FROM is not nested
        ("SELECT a FROM t UNION SELECT a FROM u ORDER BY a LIMIT 1", (0, 1, 0), "hard"),
        ("SELECT count(*) FROM (SELECT a FROM t WHERE b = 1)", (0, 0, 0), "easy"),
        # what follows the first statement is not read
        ("SELECT a FROM t; SELECT b, c FROM u", (0, 0, 0), "easy"),
        # beyond the official parser
        ("WITH z AS (SELECT a FROM t) SELECT a FROM z", (0, 1, 0), "hard"),
        ("SELECT a, row_number() OVER (ORDER BY b) FROM t", (0, 0, 1), "medium"),
        ("SELECT CASE WHEN a > 1 THEN 'x' ELSE 'y' END FROM t", (0, 0, 0), "easy"),
        ("SELECT a FROM t WHERE EXISTS (SELECT 1 FROM u)", (1, 1, 0), "hard"),
        ("SELECT a FROM t WHERE (b = 1 OR c = 2) AND d IS NOT NULL", (2, 0, 1), "medium"),
        ("SELECT t.a FROM t LEFT JOIN u ON t.i = u.i WHERE u.i IS NULL", (2, 0, 0), "medium"),
        ("SELECT a FROM t, u WHERE t.i = u.i", (2, 0, 0), "medium"),
        ("SELECT a, (SELECT max(b) FROM u) FROM t", (0, 1, 1), "extra"),
        ("SELECT round(avg(a), 2) FROM t", (0, 0, 0), "easy"),
        ("SELECT 1", (0, 0, 0), "easy"),
    ],
)
def test_counts_by_hand(sql, counts, expected):
    assert count_components(sql) == Counts(*counts)
    assert hardness(sql) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 0, 2), "medium"),
        ((2, 0, 2), "extra"),  # neither of the two lines of medium, nor of hard: the official rules' own gap
        ((2, 0, 3), "hard"),
        ((3, 0, 3), "extra"),
        ((4, 0, 0), "extra"),
        ((2, 1, 0), "extra"),
        ((0, 2, 0), "extra"),
    ],
)
def test_the_levels_that_no_query_above_has(counts, expected):
    assert level(Counts(*counts)) == expected


@pytest.mark.parametrize("text", ["", "garbage", "DELETE FROM t", "SELECT" * 5000, "((((" * 5000, "SELECT '", "\x00"])
def test_any_text_has_a_level(text):
    assert hardness(text) == "extra"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT a AS b FROM t",
        "SELECT a FROM t x",
        "SELECT a FROM t LEFT JOIN u ON t.a = u.b",
        "SELECT a FROM t WHERE b IS NOT NULL",
        "SELECT a FROM t WHERE b IN (1, 2)",
        "SELECT a FROM t WHERE (b = 1 OR c = 2)",
        "SELECT a FROM t WHERE a='x'",
        "SELECT a FROM t WHERE a <> 1",
        "SELECT max(a) - min(a) FROM t",
        "SELECT a FROM t UNION ALL SELECT a FROM u",
        "SELECT a FROM t WHERE a = 'it''s x",
        "SELECT a FROM `t`",
    ],
)
def test_what_the_official_parser_cannot_read(sql):
    assert spider_grammar.parse_query(sql) is None


COLUMNS = {"cast": ["aid", "role"], "actor": ["aid", "name", "end"], "movie": ["title"]}


@pytest.mark.parametrize(
    ("sql", "is_read"),
    [
        ("SELECT T2.name FROM cast AS T1 JOIN actor AS T2 ON T1.aid = T2.aid", True),  # the schema says what is a name
        ("SELECT end FROM actor", True),
        ("SELECT cast.role FROM cast", True),
        ("SELECT name FROM actor LIMIT 3", True),
        ("SELECT name FROM actor LIMIT '3'", False),
        ("SELECT name FROM actor LIMIT 3.0", False),
        ("SELECT name FROM actor LIMIT", False),
        ("SELECT actor.title FROM cast AS actor", False),  # an alias that is a table's name
        ("SELECT cast.x.role FROM cast", False),
        ("SELECT nobody FROM actor", False),
        ("SELECT title FROM actor", False),
        ("SELECT actor.name FROM actor JOIN cast", True),
        ("SELECT name FROM nobody", False),
        ("SELECT name FROM actor movie", True),  # read as two tables
        ("SELECT name FROM actor a", False),
    ],
)
def test_a_schema_says_what_is_a_name(sql, is_read):
    assert (spider_grammar.parse_query(sql, COLUMNS) is not None) is is_read
    assert spider_grammar.parse_query("SELECT nobody FROM nowhere") is not None  # without one any word is a name


def test_a_database_without_an_entry_in_tables_json_is_told_and_one_with_two_is_refused(tmp_path, caplog):
    entry = {"db_id": "shop", "table_names_original": ["t"], "column_names_original": [[-1, "*"], [0, "a"]]}
    entry |= {"foreign_keys": []}
    tables = tmp_path / "tables.json"
    tables.write_text(json.dumps([entry, entry | {"db_id": "other"}]))
    names = spider_grammar.DatabaseNames(tables)
    for id in ("shop", "gone", "gone"):
        location = build_database(tmp_path / f"{id}.sqlite", "CREATE TABLE IF NOT EXISTS t (a)").location
        assert names(Database(id, "sqlite", location)).keys == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"{tables} has no entry 'gone': spider_exec renames none of its columns"
    ]
    tables.write_text(json.dumps([entry, entry]))
    with pytest.raises(DataError, match=r"tables\.json has 2 entries of db_id 'shop'\. Take one of them out"):
        spider_grammar.DatabaseNames(tables)


def test_spider_exec_pays_nothing_for_what_the_official_parser_cannot_read(tmp_path):
    imdb = build_database(
        tmp_path / "imdb.sqlite",
        "CREATE TABLE actor (aid INT, name TEXT); CREATE TABLE 'cast' (aid INT, role TEXT);"
        "INSERT INTO actor VALUES (1, 'Ada'); INSERT INTO 'cast' VALUES (1, 'Eve')",
    )
    quoted = 'SELECT "cast".role FROM "cast"'
    gold = "SELECT name FROM actor LIMIT 1"
    pairs = [Pair(imdb, gold, f"SELECT name FROM actor LIMIT {count}") for count in ("1", "'1'", "1.0")]
    with SqlEngine(Limits(timeout_s=5)) as engine:
        verdicts = engine.verdicts(pairs, ["spider_exec", "bird"])
        assert [verdict.scores["spider_exec"] for verdict in verdicts] == [1.0, 0.0, 0.0]
        assert [verdict.scores["bird"] for verdict in verdicts] == [1.0, 1.0, 1.0]
        (verdict,) = engine.verdicts([Pair(imdb, "SELECT role FROM cast", quoted)], ["spider_exec", "bird"])
        assert verdict.scores == {"spider_exec": 0.0, "bird": 1.0}
