"""Hidden tables and columns: no statement gets their values or names out, in any engine; what is shown still works."""

import random
import re
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pymysql
import pytest
from hidden_objects import with_other_values
from servers import build_mysql, postgres_schema

from pipelines.core.types import ExecutionStatus
from pipelines.sql.dialects import sqlite
from pipelines.sql.dialects.base import CATALOGUE_S, Hidden, StatementNames, fold
from pipelines.sql.dialects.guard import FUNCTIONS
from pipelines.sql.engine import Limits, SqlEngine
from tests.fakes import build_database

TABLES = """
CREATE TABLE person (id INTEGER PRIMARY KEY, name VARCHAR(20), ssn VARCHAR(40), boss_id INTEGER);
CREATE TABLE wage (person_id INTEGER, amount VARCHAR(40));
CREATE TABLE visit (id INTEGER PRIMARY KEY, person_id INTEGER, place VARCHAR(20), ssn_seen INTEGER);
CREATE VIEW staff AS SELECT id, name FROM person;
CREATE VIEW papers AS SELECT id, name, ssn AS number FROM person;
CREATE VIEW paid AS SELECT p.name, w.amount FROM person p JOIN wage w ON w.person_id = p.id;
CREATE VIEW deep AS SELECT number FROM papers;
INSERT INTO person VALUES (1, 'Ada', 'SECRET-1', NULL), (2, 'Bo', 'SECRET-2', 1);
INSERT INTO wage VALUES (1, 'SECRET-9000'), (2, 'SECRET-7000');
INSERT INTO visit VALUES (1, 1, 'Oslo', 0), (2, 2, 'Rome', 1);
"""
TWIN = with_other_values(TABLES)
HIDDEN = (("Wage",), {"PERSON": ("ssn",)})
NAMES = ("ssn", "wage", "amount")
SHOWN = [
    "SELECT count(*) FROM person",
    "SELECT name FROM person WHERE id = 1",
    "SELECT p.name, v.place FROM person p JOIN visit v ON v.person_id = p.id ORDER BY p.name",
    "SELECT * FROM visit",
    "SELECT name FROM staff ORDER BY name",
    "WITH t AS (SELECT id, name AS n FROM person) SELECT max(n) FROM t",
    "SELECT 2 * id FROM person",
]
LINES = [line.split(" | ", 1) for line in Path(__file__).with_name("hidden_tries.txt").read_text().splitlines()[1:]]
TRIES, DUCKDB_CALLS, POSTGRES_CALLS = (
    [sql for engine, sql in LINES if engine == wanted] for wanted in ("all", "duckdb", "postgres")
)


def leaks(sql, result):
    """What a result tells of what is hidden; names that the statement itself says are no news."""
    said = repr((result.columns, result.rows, result.error))
    known = [name for name in NAMES if name in sql.lower()]
    marks = [mark for mark in ("SECRET-1", "SECRET-2", "SECRET-9000", "SECRET-7000") if mark not in sql]
    # A result of a guess that the statement itself holds is a leak too, by its being there.
    if result.ok and result.rows and any(name in sql.lower() for name in ("ssn", "wage", "amount", "copy")):
        return said
    news = [name for name in NAMES if name in said.lower() and name not in known and f"{name}_seen" not in said.lower()]
    return said if news or any(mark in said for mark in marks) else ""


def check(database, tries, shown=(), hidden=HIDDEN, write=str):
    with SqlEngine(Limits(timeout_s=5), hidden={database.location: hidden}) as engine:
        statements = list(map(write, [*SHOWN, *shown, *tries]))
        results = engine.execute_many([(database, sql) for sql in statements])
        for place, (sql, result) in enumerate(zip(statements, results, strict=True)):
            assert result.ok if place < len(SHOWN) + len(shown) else not leaks(sql, result), (sql, result)
        own = [write(sql) for sql in tries if sql in DUCKDB_CALLS + POSTGRES_CALLS]
        assert {r.status for r in engine.execute_many([(database, sql) for sql in own])} <= {ExecutionStatus.REFUSED}


@pytest.fixture
def people(tmp_path):
    return build_database(
        tmp_path / "people.sqlite",
        TABLES,
        "CREATE INDEX by_ssn ON person (ssn); ALTER TABLE person ADD COLUMN copy TEXT AS (ssn || '') VIRTUAL;"
        "CREATE VIRTUAL TABLE note USING fts5(body, ssn); INSERT INTO note VALUES ('x', 'SECRET-1'); ANALYZE;",
    )


NO_EMAIL = ((), {"customer": ("email",)})


def classes(database, tries, hidden=NO_EMAIL):
    with SqlEngine(Limits(timeout_s=5), hidden={database.location: hidden}) as engine:
        return [result.error_class for result in engine.execute_many([(database, sql) for sql in tries])]


def test_sqlite_lets_nothing_hidden_out(people):
    check(people, TRIES)


def test_a_virtual_table_with_a_hidden_column_is_hidden_with_its_shadows(people):
    tries = ["SELECT body FROM note", "SELECT * FROM note_content", "SELECT body FROM note WHERE note MATCH 'secret'"]
    assert classes(people, tries, ((), {"note": ("ssn",)})) == ["hidden"] * 3


def test_a_text_index_over_a_hidden_column_is_hidden_with_its_shadows_and_its_words(tmp_path):
    indexed = build_database(
        tmp_path / "indexed.sqlite",
        "CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, ssn TEXT);"
        "INSERT INTO person VALUES (1, 'Ann', 'yak');"
        "CREATE VIRTUAL TABLE found USING fts5(ssn, content='person', content_rowid='id');"
        "INSERT INTO found (found) VALUES ('rebuild'); CREATE VIRTUAL TABLE words USING fts5vocab(found, 'row');"
        "CREATE VIRTUAL TABLE note USING fts5(body); INSERT INTO note VALUES ('a yak');",
    )
    tries = ["SELECT * FROM found_data", "SELECT count(*) FROM found WHERE found MATCH 'yak'", "SELECT term FROM words"]
    free = ["SELECT name FROM person", "SELECT body FROM note WHERE note MATCH 'yak'"]
    with SqlEngine(Limits(), hidden={indexed.location: ((), {"person": ("ssn",)})}) as engine:
        results = engine.execute_many([(indexed, sql) for sql in [*tries, *free]])
    assert [result.error_class for result in results] == ["hidden"] * 3 + [None] * 2
    assert results[4].rows == (("a yak",),)


def test_without_anything_hidden_the_same_statements_run(people):
    """The tries are real: most of them get the values out where nothing stands in the way."""
    with SqlEngine(Limits()) as engine:
        results = engine.execute_many([(people, sql) for sql in TRIES])
    assert sum(bool(leaks(sql, result)) for sql, result in zip(TRIES, results, strict=True)) > 50


COMPUTED = """
CREATE TABLE staff (id INTEGER, pay INTEGER, monthly INTEGER GENERATED ALWAYS AS (pay / 12) {stored});
INSERT INTO staff (id, pay) VALUES (1, 120000);
CREATE VIEW shown AS SELECT id, monthly FROM staff;
"""


def check_computed(database):
    """A column that is computed from a hidden one is as hidden, also through a view and under another name."""
    tries = ["SELECT monthly * 12 FROM staff", "SELECT MONTHLY AS x FROM staff", "SELECT monthly FROM shown"]
    found = classes(database, ["SELECT id FROM staff", *tries], ((), {"staff": ("pay",)}))
    assert found == [None, "hidden", "hidden", "hidden"]


def test_duckdb_hides_what_is_computed_from_a_hidden_column(tmp_path):
    check_computed(build_database(tmp_path / "staff.duckdb", COMPUTED.format(stored="")))


def test_duckdb_refuses_to_describe_where_something_is_hidden_and_opens_views_that_do(tmp_path):
    tables = "CREATE TABLE t (id INTEGER, secret TEXT); CREATE TABLE other (x INTEGER);"
    view = "CREATE VIEW v AS SELECT column_name FROM (DESCRIBE t)"
    described = build_database(tmp_path / "described.duckdb", tables, view)
    tries = ["DESCRIBE other", "SUMMARIZE other", "SELECT * FROM v", "SELECT id FROM t"]
    assert classes(described, tries, ((), {"t": ("secret",)})) == ["hidden", "hidden", "hidden", None]


def test_duckdb_lets_nothing_hidden_out(tmp_path):
    people = build_database(tmp_path / "people.duckdb", TABLES)
    check(people, [*TRIES, *DUCKDB_CALLS], ["SELECT p.name.upper() FROM person p"])


CUSTOMERS = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name VARCHAR(20), email VARCHAR(20));
INSERT INTO customer VALUES (1, 'Ada', 'SECRET');
CREATE VIEW contact AS SELECT id, email AS reach FROM customer;
"""


def check_a_later_view(shop, execute):
    """A view that is made after an engine read the catalogue is hidden too."""
    with SqlEngine(Limits(timeout_s=5), hidden={shop.location: NO_EMAIL}) as engine:
        assert engine.execute_many([(shop, "SELECT name FROM customer")])[0].ok
        execute("CREATE VIEW later AS SELECT email AS reach FROM customer")
        time.sleep(CATALOGUE_S)
        assert engine.execute_many([(shop, "SELECT reach FROM later")])[0].error_class == "hidden"


def test_duckdb_hides_a_view_whose_namesake_is_harmless_and_macros_with_the_names_of_functions(tmp_path):
    shop = build_database(
        tmp_path / "shop.duckdb",
        CUSTOMERS,
        "CREATE SCHEMA zoo; CREATE VIEW zoo.contact AS SELECT 1 AS id;",
        "CREATE MACRO md5(a, b) AS (SELECT string_agg(email) FROM customer);",
        "CREATE MACRO range(a) AS TABLE (SELECT * FROM customer);",
        "CREATE VIEW masked AS SELECT md5('a', 1) AS x;",
    )
    tries = ["SELECT reach FROM contact", "SELECT md5('a', 1)", "SELECT * FROM range(3)", "SELECT x FROM masked"]
    assert classes(shop, [*tries, "SELECT name, sha256(name) FROM customer"]) == ["hidden"] * 4 + [None]


@pytest.mark.services
def test_postgres_lets_nothing_hidden_out(server):
    shown = ["SELECT t.count FROM (SELECT count(*) FROM person) t", "SELECT (p.name).upper, p.ctid FROM person p"]
    part = "CREATE TABLE part () INHERITS (person); INSERT INTO part VALUES (3, 'Cy', 'SECRET-1', 1)"
    with postgres_schema(server, "people", TABLES + part) as (_, people):
        check(people, [*TRIES, *POSTGRES_CALLS], shown)


QUALIFIED = (("hr.Wage",), {"HR.person": ("ssn",)})  # as HIDDEN, where hr is not the first schema


def in_hr(sql):
    """A statement whose tables have their schema."""
    return re.sub(
        r"\b(FROM \(?|JOIN |TABLE )(person|wage|visit|staff|papers|paid|deep)\b", r"\1hr.\2", sql, flags=re.IGNORECASE
    )


def postgres_people(server, tables, database="postgres"):
    return postgres_schema(server, "people", tables, database)


@contextmanager
def behind_a_namesake(server, tables, database="postgres"):
    """A database whose schema hr comes behind one with a person whose ssn is not hidden."""
    person = "CREATE TABLE person (id INTEGER, name TEXT, ssn TEXT); INSERT INTO person VALUES (1, 'Ada', 'open')"
    with (
        postgres_schema(server, "sales", person, database) as (_, first),
        postgres_schema(server, "hr", tables, database) as (owner, _),
    ):
        yield owner, replace(first, location=first.location.replace("=sales", "=sales,hr"))


@pytest.mark.services
def test_postgres_hides_by_qualified_names(server):
    part = "CREATE TABLE part () INHERITS (person); INSERT INTO part VALUES (3, 'Cy', 'SECRET-1', 1)"
    with behind_a_namesake(server, TABLES + part) as (owner, people):
        check(people, [*TRIES, *POSTGRES_CALLS], hidden=QUALIFIED, write=in_hr)
        tries = ["SELECT ssn FROM hr.part", "SELECT amount FROM wage", "SELECT hr.person.ssn FROM hr.person, person"]
        shown = ["SELECT * FROM person", "SELECT s.ssn FROM sales.person s"]
        assert classes(people, [*tries, *shown], QUALIFIED) == ["hidden"] * 3 + [None] * 2
        owner.execute("CREATE VIEW sales.copied AS SELECT ssn AS x FROM hr.person; DROP TABLE sales.person")
        owner.execute("GRANT SELECT ON sales.copied TO reader")
        # A bare name is the second schema's where the first has none; other schemas are not read at all.
        assert classes(people, ["SELECT ssn FROM person", "SELECT x FROM copied"], QUALIFIED) == ["hidden"] * 2
        found = classes(people, ["SELECT * FROM shop.customer", "SELECT name FROM public.person"], QUALIFIED)
        assert found == ["not_authorized"] * 2
        # A hidden name without a schema, as of another card of the database, holds in each.
        assert classes(people, ["SELECT ssn FROM hr.person"], ((), {"person": ("ssn",)})) == ["hidden"]


@pytest.mark.services
def test_postgres_hides_what_is_computed_and_the_parents_of_what_is_hidden(server):
    more = "CREATE TABLE log (x TEXT); CREATE TABLE log_open () INHERITS (log);"
    more += "CREATE TABLE log_secret () INHERITS (log);"
    with postgres_schema(server, "staff", COMPUTED.format(stored="STORED") + more) as (_, database):
        check_computed(database)
        tries = [f"SELECT x FROM {table}" for table in ("log_open", "log", "log_secret")]
        assert classes(database, tries, (("log_secret",), {})) == [None, "hidden", "hidden"]


@pytest.mark.services
def test_postgres_hides_namesakes_own_functions_types_of_rows_and_new_views(server):
    own = (
        "CREATE FUNCTION month(text) RETURNS text LANGUAGE sql"
        " AS 'SELECT string_agg(email, $$,$$) FROM bazaar.customer';"
        "CREATE VIEW masked AS SELECT month('x') AS x;"
        "ALTER DEFAULT PRIVILEGES IN SCHEMA bazaar GRANT SELECT ON TABLES TO reader"
    )
    tries = [f"SELECT {read}" for read in ("reach FROM contact", "reach FROM bazaar.contact", "x FROM masked")]
    tries += ["SELECT month('x')", "SELECT row_to_json(json_populate_record(NULL::customer, '{}'))"]
    zoo = postgres_schema(server, "zoo", "CREATE VIEW zoo.contact AS SELECT 1 AS id")
    with zoo, postgres_schema(server, "bazaar", CUSTOMERS + own) as (connection, shop):
        assert classes(shop, [*tries, "SELECT upper(name)::text FROM customer"]) == ["hidden"] * 5 + [None]
        check_a_later_view(shop, connection.execute)


@pytest.mark.services
def test_mysql_hides_views_with_texts_in_other_databases_of_own_functions_and_new_ones(mysql_port):
    more = """
    CREATE VIEW quoted AS SELECT 'it''s' AS label, id, email AS reach FROM customer;
    CREATE VIEW plain AS SELECT 'it''s' AS label, id, upper(name) AS caller FROM customer;
    CREATE VIEW seller2.v AS SELECT id, email AS reach FROM seller1.customer;
    CREATE FUNCTION mail(i INT) RETURNS TEXT DETERMINISTIC READS SQL DATA
        RETURN (SELECT email FROM customer WHERE id = i);
    CREATE VIEW masked AS SELECT mail(1) AS reach
    """
    shop, _ = build_mysql(mysql_port, "seller", CUSTOMERS + more, "SELECT 1")
    tries = [f"SELECT reach FROM {view}" for view in ("contact", "quoted", "seller2.v", "masked")]
    assert classes(shop, [*tries, "SELECT caller FROM plain"]) == ["hidden"] * 4 + [None]
    with pymysql.connect(host="127.0.0.1", port=mysql_port, user="owner", database="seller1") as connection:
        check_a_later_view(shop, connection.cursor().execute)


@pytest.mark.services
def test_mysql_hides_what_is_computed_and_names_that_begin_with_a_digit(mysql_port):
    more = "CREATE TABLE 2023_pay (pin INTEGER, 2fa INTEGER); INSERT INTO 2023_pay VALUES (1, 2);"
    (database,) = build_mysql(mysql_port, "paymaster", COMPUTED.format(stored="") + more)
    check_computed(database)
    tries = ["SELECT pin FROM 2023_pay", "SELECT pin FROM `2023_pay`", "SELECT 0x41, 1.5e3, 12"]
    assert classes(database, tries, (("2023_pay",), {})) == ["not_authorized", "hidden", None]


@pytest.mark.services
def test_mysql_lets_nothing_hidden_out(mysql_port):
    (people,) = build_mysql(mysql_port, "viewer", TABLES)
    # In the server's own mode double quotes make a text, and backticks a name.
    check(people, TRIES, write=lambda sql: sql.replace('"', "`"))


GRAMMAR = [line.split(" ", 2) for line in Path(__file__).with_name("hidden_grammar.txt").read_text().splitlines()[1:]]
UNSTEADY = {"age", "clock_timestamp", "now", "random", "rand", "randomblob", "timeofday", "unix_timestamp", "sysdate"}
SAMPLED = {"column": ["name", "@.name"], "row": ["@.name"], "from": ["person @", "person @ JOIN visit v ON {test}"]}
ROWS_READ = re.compile(r"@|person|ssn|COLUMNS|\*|#|^FROM|TABLE|EXPLAIN")


def derive(engine, chance, is_shown):
    """A statement of an engine's grammar, or of its part without hidden columns; deep inside, a value is a column."""
    forms = {}
    for of, name, form in GRAMMAR:
        if of in ("all", engine) and (engine != "mysql" or " LIMIT " not in form):  # which of its ties is cut is chance
            forms.setdefault(name, []).append(form)
    if is_shown:
        kept = {
            name: [form for form in forms[name] if not ROWS_READ.search(form)]
            for name in ("value", "test", "query", "type")
        }
        forms |= {**kept, **SAMPLED, "query": [*kept["query"], "SELECT {value} FROM {from}"]}
    forms["call"] = sorted({"sqlite": sqlite.FUNCTIONS - {"->", "->>"}, **FUNCTIONS}[engine] - UNSTEADY)
    column = forms["column"][0]
    deep = {"value": column, "test": f"{column} > 'S'", "from": "person @", "query": f"SELECT {column} FROM person @"}

    def expand(name, depth):
        form = deep[name] if depth > 3 and name in deep else chance.choice(forms[name])
        return re.sub(r"\{(\w+)\}", lambda match: expand(match[1], depth + 1), form)

    return expand("query", 0).replace("{{", "{").replace("}}", "}").replace("@", chance.choice(("p", "person")))


def check_grammar(pair, count, hide=HIDDEN, write=str):
    """No statement has another answer where the hidden values are others, and none that reads shown columns is refused
    for what is hidden. The grammar is no empty threat: with nothing hidden one statement in twenty tells values.
    """
    chance, engine = random.Random(33), pair[0].engine
    statements = [write(derive(engine, chance, place % 10 == 9)) for place in range(count)]

    def answers(hidden):
        with SqlEngine(Limits(timeout_s=5, max_rows=100), hidden=hidden) as runner:
            results = [runner.execute_many([(database, sql) for sql in statements]) for database in pair]
        if engine == "mysql":  # the order of ties is the plan's, which may differ between two databases
            results = [[replace(r, rows=tuple(sorted(r.rows, key=repr))) for r in found] for found in results]
        return [[replace(r, error=r.error and r.error.replace("twin2", "twin1")) for r in found] for found in results]

    first, second = answers({database.location: hide for database in pair})
    told, known = sum(a != b for a, b in zip(first, second, strict=True)), answers({})
    lines = sum(a != b for a, b in zip(*known, strict=True))
    print(f"{engine}: of {count:,} statements {told} tell hidden values; with nothing hidden {lines:,} do")
    assert [row for row in zip(statements, first, second, strict=True) if row[1] != row[2]] == []
    assert [statements[place] for place in range(9, count, 10) if first[place].error_class == "hidden"] == []
    assert lines > count / 20


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_no_hidden_value_comes_out_of_the_grammar_of_a_file(tmp_path, engine, count):
    scripts = {"twin1": TABLES, "twin2": TWIN}
    check_grammar([build_database(tmp_path / f"{name}.{engine}", script) for name, script in scripts.items()], count)


@pytest.mark.services
@pytest.mark.parametrize(
    ("schema", "count", "write"), [(postgres_people, 5000, str), (behind_a_namesake, 2000, in_hr)], ids=["bare", "hr"]
)
def test_no_hidden_value_comes_out_of_the_grammar_of_postgres(server, schema, count, write):
    with psycopg.connect(server.admin, autocommit=True) as connection, ExitStack() as stack:
        pair = []
        for name, tables in (("twin1", TABLES), ("twin2", TWIN)):
            connection.execute(f"CREATE DATABASE {name}_{count}".encode())
            pair.append(stack.enter_context(schema(server, tables, f"{name}_{count}"))[1])
        check_grammar(pair, count, HIDDEN if write is str else QUALIFIED, write)


@pytest.mark.services
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])  # MariaDB takes minutes for 5,000
def test_no_hidden_value_comes_out_of_the_grammar_of_mysql(mysql_port, count):
    check_grammar(build_mysql(mysql_port, "twin", TABLES, TWIN), count)


def test_the_twin_has_its_hidden_values_in_another_order():
    """An answer that tells the order of hidden values alone has to differ between the twins."""
    values = ("SECRET-1 SECRET-2", "SECRET-7000 SECRET-9000")
    for smaller, larger in map(str.split, values):
        assert with_other_values(smaller) > with_other_values(larger)


def test_names_and_views_that_stand_for_what_is_hidden_are_hidden():
    assert {fold(name) for name in ("SSN", "ssn", "ſſn", "śsn")} == {"ssn"}

    def named(relation):
        return (
            None if relation == "?" else StatementNames(frozenset([relation]), frozenset(), frozenset(), False, False)
        )

    views = [("b", "a"), ("a", "wage"), ("c", "person"), ("d", "?"), ("e", "wage"), ("e", "person")]
    hidden = Hidden.of((("wage",), {})).with_views([(name, named(relation)) for name, relation in views])
    assert hidden.tables == {"wage", "a", "b", "d", "e"}
