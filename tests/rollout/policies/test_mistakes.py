"""The mistakes that an oracle shows: each looks for a column where it is not, and the database refuses it."""

import random
import sqlite3

import pytest

from pipelines.core.types import Database
from pipelines.rollout.policies.mistakes import draw_mistake
from pipelines.sql.schema import introspect

TABLES = """
CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);
CREATE TABLE concert (singer_id INTEGER REFERENCES singer (id), year INTEGER);
"""
JOINED = "SELECT singer.name FROM singer JOIN concert ON singer.id = concert.singer_id WHERE concert.year = 2014"


@pytest.fixture(scope="module")
def shows(tmp_path_factory):
    path = tmp_path_factory.mktemp("shows") / "shows.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(TABLES)
    yield connection, introspect(Database("shows", "sqlite", str(path)))
    connection.close()


def mistakes(sql, reads, schema):
    drawn = [draw_mistake(sql, reads, schema, random.Random(seed)) for seed in range(60)]
    return {(mistake.sql, mistake.column, mistake.table) for mistake in drawn}


def test_in_a_query_over_two_tables(shows):
    connection, schema = shows
    made = mistakes(JOINED, {"singer": ["name"], "concert": ["year"]}, schema)
    assert made == {
        ("SELECT name FROM singer WHERE year = 2014", "year", "concert"),
        (JOINED.replace("singer.name", "concert.name"), "name", "singer"),
        (JOINED.replace("concert.year", "singer.year"), "year", "concert"),
        (JOINED.replace("singer.name", "singer.singer_name"), "name", "singer"),
        (JOINED.replace("concert.year", "concert.concert_year"), "year", "concert"),
    }
    for sql, _, _ in made:
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            connection.execute(sql)


def test_in_a_query_over_one_table(shows):
    connection, schema = shows
    made = mistakes("SELECT name FROM singer WHERE age > 'name'", {"singer": ["name", "age"]}, schema)
    assert made == {
        ("SELECT name FROM concert WHERE age > 'name'", "name", "singer"),
        ("SELECT singer_name FROM singer WHERE age > 'name'", "name", "singer"),
        ("SELECT name FROM singer WHERE singer_age > 'name'", "age", "singer"),
    }
    for sql, _, _ in made:
        with pytest.raises(sqlite3.OperationalError, match="no such column"):
            connection.execute(sql)


def test_there_may_be_none_to_make(shows):
    _, schema = shows
    assert draw_mistake("SELECT COUNT(*) FROM singer", {"singer": []}, schema, random.Random(0)) is None
    assert draw_mistake("SELECT 1", {}, schema, random.Random(0)) is None


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT name FROM "singer"',
        "SELECT name FROM SINGER",  # not as the schema writes it
        "SELECT name FROM [singer]",
    ],
)
def test_what_is_not_written_as_the_schema_does_has_no_wrong_table(shows, sql):
    _, schema = shows
    for seed in range(20):
        mistake = draw_mistake(sql, {"singer": ["name"]}, schema, random.Random(seed))
        assert mistake is None or "singer_name" in mistake.sql


def test_a_query_of_two_parts_keeps_its_joins_and_texts_keep_their_words(shows):
    """Without its join the first part would still run, and the second alone would fail."""
    _, schema = shows
    sql = f"{JOINED} EXCEPT SELECT name FROM singer WHERE name = 'a year in concert'"
    made = mistakes(sql, {"singer": ["name"], "concert": ["year"]}, schema)
    assert made
    for wrong, _, _ in made:
        assert wrong.count("JOIN") == 1
        assert wrong.endswith("= 'a year in concert'")
        assert wrong != sql


def test_the_plan_says_what_the_mistake_reads(shows):
    _, schema = shows
    plans = {}
    for seed in range(60):
        mistake = draw_mistake(JOINED, {"singer": ["name"], "concert": ["year"]}, schema, random.Random(seed))
        plans[mistake.sql] = dict(mistake.reads)
    assert plans["SELECT name FROM singer WHERE year = 2014"] == {"singer": ["name", "year"]}
    assert plans[JOINED.replace("singer.name", "concert.name")] == {"singer": [], "concert": ["year", "name"]}
