"""Question-relevant values: what of a database's texts a prompt shows for a question."""

import sqlite3
from pathlib import Path

import pytest

from pipelines.benchmarks.prompt_schema import ValueIndex, closeness, retrieve, show
from pipelines.core.types import Database, Example
from pipelines.protocols.base import build
from pipelines.recipe import recipes
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Schema, introspect


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Database:
    path = tmp_path_factory.mktemp("databases") / "world.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE country (id INTEGER PRIMARY KEY, name TEXT, region TEXT, area REAL)")
        names = ["French Guiana", "France", "San Marino", "St. John's", 'a "b" c', "x" * 90]
        connection.executemany("INSERT INTO country (name, region) VALUES (?, 'Western Europe')", [(n,) for n in names])
        connection.execute("CREATE TABLE city (name TEXT, country TEXT, note)")
        connection.executemany("INSERT INTO city VALUES (?, 'France', ?)", [("Paris", 5), ("Lyon", b"x"), (None, "")])
    connection.close()
    return Database("world", "sqlite", str(path))


@pytest.fixture(scope="module")
def schema(database: Database) -> Schema:
    return introspect(database)


@pytest.fixture(scope="module")
def sql() -> SqlEngine:
    with SqlEngine(Limits(timeout_s=0.3), workers=1) as engine:
        yield engine  # type: ignore[misc]


def test_closeness_is_the_share_that_stands_in_the_question() -> None:
    assert closeness("France", "cities of FRANCE?") == 1.0
    assert closeness("Western Europe", "countries in Europe") == 8 / 14  # "n europe"
    assert closeness("abcd", "wxyz") == 0.0


def test_the_likeliest_come_first_with_their_columns(database: Database, schema: Schema, sql: SqlEngine) -> None:
    """Prose, a number and an empty text are no values."""
    with ValueIndex(database, schema, sql) as index:
        assert len(index) == 5 + 1 + 2  # names, the region, cities; France is in two columns
        assert index.find("Which cities of france does San Marino trade with?", 5) == [
            ("San Marino", [("country", "name")]),
            ("France", [("country", "name"), ("city", "country")]),
        ]
        assert index.find("Which cities of france does San Marino trade with?", 1)[0][0] == "San Marino"
        assert index.find("countries of western europe", 3) == [("Western Europe", [("country", "region")])]
        assert index.find('what is a "b" c, st. john\'s?', 2)[0][0] == "St. John's"
        assert index.find("how many are there?", 5) == []


def test_a_view_that_never_ends_has_no_values(tmp_path: Path, sql: SqlEngine) -> None:
    with sqlite3.connect(tmp_path / "a.sqlite") as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.execute("INSERT INTO t VALUES ('Paris')")
        endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n WHERE i = 2"
        connection.execute(f"CREATE VIEW v AS {endless}")
    connection.close()
    database = Database("a", "sqlite", str(tmp_path / "a.sqlite"))
    with ValueIndex(database, introspect(database), sql) as index:
        assert index.find("in paris?", 5) == [("Paris", [("t", "a")])]


def test_a_prompt_shows_matching_values_first(database: Database, sql: SqlEngine) -> None:
    schema = introspect(database, 2)
    example = Example("q", "Which city of France is it?", database, "SELECT 1")
    (made,) = retrieve([example], 5, lambda _: schema, sql)
    assert made.meta["values"] == [["country", "name", "France"], ["city", "country", "France"]]
    assert show(made, schema).tables[0].columns[1].values == ("France", "French Guiana")
    assert show(example, schema) == schema
    text = "\n".join(text for _, text in build(recipes.load("mtir_sql").protocol).prompt(made, schema, 6))
    assert "name TEXT, -- e.g. 'France', 'French Guiana'" in text


def test_mtir_sql_asks_for_six_matching_values() -> None:
    assert recipes.load("mtir_sql").data.values == 6
    assert recipes.load("mini_mtir_sql").data.values == 0
