"""Hidden names behind objects of the database itself: views, indices of text, computed columns, types and the like."""

import pytest

from pipelines.core.types import Database
from pipelines.sql.engine import Limits, SqlEngine
from tests.fakes import build_database

TABLES = """
CREATE TABLE person (id INTEGER PRIMARY KEY, name VARCHAR(20), ssn VARCHAR(20));
CREATE TABLE badge (ssn VARCHAR(20), door VARCHAR(20));
CREATE TABLE wage (id INTEGER, amount INTEGER);
CREATE TABLE visit (id INTEGER, place VARCHAR(20));
INSERT INTO person VALUES (1, 'Ada', 's1'), (2, 'Bo', 's2');
INSERT INTO badge VALUES ('s2', 'north');
INSERT INTO wage VALUES (1, 10);
INSERT INTO visit VALUES (1, 'Oslo');
CREATE VIEW staff AS SELECT id, name FROM person;
"""
HIDDEN = (("wage",), {"person": ("ssn",)})
REFUSED = ("hidden", "not_authorized")


def answers(database: Database, *statements, hidden=HIDDEN):
    """The rows of each statement, or "hidden" where it is refused."""
    with SqlEngine(Limits(timeout_s=5), hidden={database.location: hidden}) as engine:
        results = engine.execute_many([(database, sql) for sql in statements])
    return ["hidden" if r.error_class in REFUSED else list(r.rows) if r.ok else r.error_class for r in results]


@pytest.fixture
def sqlite(tmp_path):
    return lambda *scripts: build_database(tmp_path / "people.sqlite", TABLES, *scripts)


def test_sqlite_hides_views_that_join_by_a_hidden_column_without_saying_so(sqlite):
    people = sqlite(
        "CREATE VIEW x AS SELECT id, door FROM person JOIN badge USING (ssn)",
        "CREATE VIEW n AS SELECT 1 AS one FROM person NATURAL JOIN badge",
        "CREATE VIEW deep AS SELECT count(*) AS many FROM n",
        "CREATE VIEW seen AS SELECT name, place FROM staff JOIN visit USING (id)",
    )
    reads = ["* FROM x", "count(*) FROM x", "one FROM n", "count(*) FROM n", "many FROM deep", "* FROM seen"]
    found = answers(people, *(f"SELECT {read}" for read in reads))
    assert found == ["hidden"] * 5 + [[("Ada", "Oslo")]]


def test_sqlite_hides_an_index_of_text_over_a_view_that_reads_something_hidden(sqlite):
    people = sqlite(
        """CREATE VIEW "it's" AS SELECT id, ssn AS n FROM person""",
        "CREATE VIRTUAL TABLE f USING fts5(n, content='it''s', content_rowid='id')",
        "INSERT INTO f(f) VALUES ('rebuild')",
        "CREATE VIRTUAL TABLE words USING fts5vocab(f, 'row')",
        "CREATE VIRTUAL TABLE g USING fts5(name, content='staff', content_rowid='id')",
        "INSERT INTO g(g) VALUES ('rebuild')",
    )
    tries = ["rowid FROM f WHERE f MATCH 's2'", "count(*) FROM f", "term FROM words", "count(*) FROM f_data"]
    found = answers(people, *(f"SELECT {read}" for read in [*tries, "rowid FROM g WHERE g MATCH 'bo'"]))
    assert found == ["hidden"] * 4 + [[(2,)]]


def test_sqlite_hides_computed_columns_whatever_letters_their_table_has(sqlite):
    people = sqlite("CREATE TABLE Größe (id, ssn, copy TEXT AS (ssn || '')); INSERT INTO Größe VALUES (1, 's1')")
    assert answers(people, "SELECT copy FROM größe", hidden=((), {"Größe": ("ssn",)})) == ["hidden"]


def test_sqlite_answers_beside_a_broken_view(sqlite):
    people = sqlite("CREATE VIEW broken AS SELECT missing FROM person")
    tries = ["SELECT name FROM staff WHERE id = 2", "SELECT count(*) FROM broken"]
    assert answers(people, *tries) == [[("Bo",)], "no_such_column"]


HONEST = [
    ("SELECT b.ssn FROM badge b JOIN person p ON p.name <> b.door WHERE p.id = 1", [("s2",)]),
    ("SELECT v.* FROM visit v JOIN person p ON p.id = v.id", [(1, "Oslo")]),
    ("SELECT * FROM visit WHERE id IN (SELECT id FROM person)", [(1, "Oslo")]),
    ("SELECT name FROM person WHERE id = 1 AND 's2' IN (SELECT ssn FROM badge)", [("Ada",)]),
    ("WITH wage AS (SELECT 7 AS id) SELECT id FROM wage", [(7,)]),
    ("WITH wage AS (SELECT 7 AS id) SELECT count(*) FROM wage", [(1,)]),
    ("WITH t AS (SELECT id, name FROM person) SELECT * FROM t WHERE id = 2", [(2, "Bo")]),
    ("SELECT * FROM (SELECT id AS ssn FROM person) p WHERE ssn = 1", [(1,)]),
    ("SELECT name, place FROM person JOIN visit USING (id)", [("Ada", "Oslo")]),
    ("SELECT s.* FROM staff s JOIN person p ON p.id = s.id WHERE p.name = 'Bo'", [(2, "Bo")]),
]
DISHONEST = """
WITH wage AS (SELECT count(*) AS n FROM wage) SELECT n FROM wage
WITH t AS (SELECT count(*) AS n FROM wage), wage AS (SELECT 1 AS id) SELECT n FROM t
SELECT (WITH wage AS (SELECT 1 AS id) SELECT id FROM wage), count(*) FROM wage
WITH staff AS (SELECT ssn FROM person) SELECT ssn FROM staff
SELECT b.ssn FROM badge x JOIN person b ON b.name <> x.door
SELECT b.ssn FROM badge a, person b
SELECT v.* FROM badge b JOIN person v ON v.name <> b.door
SELECT b.* FROM visit a CROSS JOIN person AS b
SELECT * FROM badge WHERE EXISTS (SELECT 1 FROM person p WHERE p.ssn = badge.ssn)
SELECT name FROM person WHERE 1 IN (SELECT 1 FROM visit WHERE ssn = 's2')
SELECT x.ssn FROM (SELECT p.* FROM person p) x
SELECT x.ssn FROM (SELECT * FROM visit v JOIN person p ON p.id = v.id) x
SELECT name, door FROM person JOIN badge USING (ssn)
""".strip().splitlines()


def check_resolved(database, harmless=()):
    """Names are judged by what they mean where they stand; `harmless` statements mean something else in this engine."""
    assert answers(database, *(sql for sql, _ in HONEST)) == [rows for _, rows in HONEST]
    dishonest = [sql for sql in DISHONEST if sql not in harmless]
    told = zip(dishonest, answers(database, *dishonest), strict=True)
    failures = ("hidden", "runtime", "ambiguous_column", "no_such_column")
    assert [(sql, found) for sql, found in told if found not in failures] == []


def test_sqlite_judges_names_by_what_they_mean(sqlite):
    # Here all common table expressions of a WITH see each other.
    check_resolved(sqlite(), ["WITH t AS (SELECT count(*) AS n FROM wage), wage AS (SELECT 1 AS id) SELECT n FROM t"])
