"""What the official parser of 2018 reads once it has a schema, and what it cannot read."""

from pathlib import Path

import pytest

from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.equalities import spider_grammar
from tests.fakes import build_database

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
        ("SELECT name FROM nobody", False),
        ("SELECT name FROM actor movie", True),  # read as two tables
        ("SELECT name FROM actor a", False),
    ],
)
def test_a_schema_says_what_is_a_name(sql: str, is_read: bool) -> None:
    assert (spider_grammar.read(sql, COLUMNS) is not None) is is_read


def test_spider_exec_pays_nothing_for_what_the_official_parser_cannot_read(tmp_path: Path) -> None:
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
