"""Queries in the schema's words: the same rows, names that can be copied, aliases only where they are needed."""

import sqlite3

import pytest

from pipelines.core.types import Database
from pipelines.sql import analyst
from pipelines.sql.analysis.spelling import in_schema_words
from pipelines.sql.schema import introspect

SCRIPT = """
CREATE TABLE Singer (Singer_ID INTEGER PRIMARY KEY, Name TEXT, Birth_Year INTEGER);
CREATE TABLE concert (concert_id INTEGER PRIMARY KEY, "Hall Name" TEXT, singer_id INTEGER REFERENCES Singer);
INSERT INTO Singer VALUES (1, 'Ana', 1990), (2, 'Bo', 1985), (3, 'Cy', 1990);
INSERT INTO concert VALUES (1, 'Arena', 1), (2, 'Dome', 1), (3, 'Arena', 2);
"""
SPELLED = [
    ("SELECT NAME  FROM  SINGER", "SELECT Name FROM Singer"),
    ("select count(*) from singer where birth_year  =  1990", "SELECT COUNT(*) FROM Singer WHERE Birth_Year = 1990"),
    (  # aliases are gone, and each column has its own table's spelling
        "SELECT T1.name FROM singer AS T1 JOIN Concert AS T2 ON T1.SINGER_ID = T2.SINGER_ID WHERE T2.Concert_ID = 3",
        "SELECT Singer.Name FROM Singer JOIN concert ON Singer.Singer_ID = concert.singer_id "
        "WHERE concert.concert_id = 3",
    ),
    ('SELECT "hall name" FROM concert', 'SELECT "Hall Name" FROM concert'),
    ('SELECT birth_year FROM singer WHERE name = "Ana"', "SELECT Birth_Year FROM Singer WHERE Name = 'Ana'"),
    (  # a self-join needs its aliases
        "SELECT a.name FROM singer a JOIN singer b ON a.birth_year = b.birth_year AND a.singer_id < b.singer_id",
        "SELECT a.Name FROM Singer AS a JOIN Singer AS b ON a.Birth_Year = b.Birth_Year AND a.Singer_ID < b.Singer_ID",
    ),
    (  # so does a subquery that looks at the query around it
        "SELECT s.name FROM singer s WHERE EXISTS (SELECT 1 FROM concert c WHERE c.singer_id = s.singer_id)",
        "SELECT s.Name FROM Singer AS s WHERE EXISTS(SELECT 1 FROM concert AS c WHERE c.singer_id = s.Singer_ID)",
    ),
    (
        "SELECT name FROM singer EXCEPT SELECT T1.name FROM singer T1 JOIN concert T2 ON T1.singer_id = T2.singer_id",
        "SELECT Name FROM Singer EXCEPT SELECT Singer.Name FROM Singer JOIN concert "
        "ON Singer.Singer_ID = concert.singer_id",
    ),
    (  # names that the query makes are its own
        "SELECT birth_year AS year, count(*) AS n FROM singer GROUP BY year ORDER BY N",
        "SELECT Birth_Year AS year, COUNT(*) AS n FROM Singer GROUP BY year ORDER BY N",
    ),
    (  # a subquery's column is no table's: it is spelled if the schema has one spelling of it
        "SELECT t.n FROM (SELECT count(*) AS n, BIRTH_YEAR FROM singer GROUP BY 2) AS t WHERE t.BIRTH_YEAR = 1990",
        "SELECT t.n FROM (SELECT COUNT(*) AS n, Birth_Year FROM Singer GROUP BY 2) AS t WHERE t.Birth_Year = 1990",
    ),
    (
        "SELECT t.n FROM (SELECT count(*) AS n, singer_id FROM concert GROUP BY SINGER_ID) AS t WHERE t.SINGER_ID = 1",
        "SELECT t.n FROM (SELECT COUNT(*) AS n, singer_id FROM concert GROUP BY singer_id) AS t WHERE t.SINGER_ID = 1",
    ),
]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("singers") / "singers.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(SCRIPT)
    connection.close()
    return Database("singers", "sqlite", str(path))


@pytest.mark.parametrize(("sql", "expected"), SPELLED)
def test_names_are_those_of_the_schema_and_rows_stay(database, sql, expected):
    (spelled,) = analyst.in_schema_words([(sql, introspect(database), "sqlite")])
    with sqlite3.connect(database.location) as connection:
        rows = [connection.execute(query).fetchall() for query in (sql, spelled)]
    connection.close()
    assert spelled == expected
    assert rows[0] == rows[1]
    assert rows[0]


@pytest.mark.parametrize("sql", ["", "SELECT (", "DELETE FROM singer", "SELECT 1; SELECT 2"])
def test_what_is_no_query_has_no_spelling(database, sql):
    assert in_schema_words(sql, introspect(database)) is None


def test_a_name_that_the_schema_lacks_stays(database):
    sql = "SELECT nickname FROM singer JOIN albums ON albums.id = singer.singer_id"
    expected = "SELECT nickname FROM Singer JOIN albums ON albums.id = Singer.Singer_ID"
    assert in_schema_words(sql, introspect(database)) == expected
