"""What is said of a query without running it, and what SQLite's authorizer says of the same query."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlglot import exp

from pipelines.core.types import HARDNESS_LEVELS, Database, SchemaItems
from pipelines.sql.analysis.hardness import hardness
from pipelines.sql.analysis.name_resolution import resolve_names, schema_items
from pipelines.sql.analysis.session import prepared_items
from pipelines.sql.lexical import bigrams, is_ordered
from pipelines.sql.schema import Column, Schema, Table, introspect
from pipelines.sql.splitter import asks_for_order


@pytest.fixture(scope="module")
def schema(shop):
    return introspect(shop)


def items(names):
    """Of columns with their tables, and of tables alone."""
    pairs = {tuple(name.split(".")) for name in names.split() if "." in name}
    return SchemaItems(frozenset(name.partition(".")[0] for name in names.split()), frozenset(pairs))


ALL = "customer.id customer.name customer.city customer.credit"
BUYERS = "customer.name customer.id purchase.customer_id"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT name FROM customer WHERE city = 'Paris'", "customer.name customer.city"),
        ("SELECT count(*) FROM customer", "customer"),
        (
            "WITH top AS (SELECT id AS customer_id FROM customer) "
            "SELECT count(*) FROM purchase WHERE customer_id IN (SELECT customer_id FROM top)",
            "customer.id purchase.customer_id",
        ),
        ("SELECT name FROM customer UNION SELECT city FROM customer ORDER BY name", "customer.name customer.city"),
        ("SELECT name AS city FROM customer ORDER BY city", "customer.name"),
        ("SELECT count(*) FROM customer, customer", "customer"),
        ("SELECT count(*) FROM (SELECT name FROM customer), (SELECT id FROM purchase)", "customer.name purchase.id"),
        ("SELECT name AS city FROM customer ORDER BY lower(credit)", "customer.name customer.credit"),
        ("SELECT * FROM customer", ALL),
        ("SELECT c.* FROM customer c JOIN purchase p ON c.id = p.customer_id", f"{ALL} purchase.customer_id"),
        (
            "SELECT T1.name FROM customer AS T1 JOIN purchase AS T2 ON T1.id = T2.customer_id WHERE T2.item = 'pen'",
            f"{BUYERS} purchase.item",
        ),
        ("SELECT NAME FROM Customer WHERE ID IN (SELECT customer_id FROM purchase)", BUYERS),
        ("SELECT name FROM customer c WHERE EXISTS (SELECT 1 FROM purchase WHERE customer_id = c.id)", BUYERS),
        ("WITH top AS (SELECT customer_id FROM purchase) SELECT name FROM customer WHERE id IN top", BUYERS),
        ("WITH z AS (SELECT city, credit FROM customer) SELECT city FROM z", "customer.city customer.credit"),
        ("SELECT x FROM (SELECT name AS x FROM customer)", "customer.name"),
        ("WITH c AS (SELECT * FROM customer) SELECT name FROM c WHERE city = 'Paris'", ALL),
        ("SELECT item FROM (SELECT * FROM customer), purchase", f"{ALL} purchase.item"),
        ("WITH c (n, place) AS (SELECT name, city FROM customer) SELECT n FROM c", "customer.name customer.city"),
        ("WITH c (a, b, d, e) AS (SELECT * FROM customer) SELECT a FROM c", ALL),
        ("SELECT city FROM (SELECT x.* FROM (SELECT * FROM customer UNION SELECT * FROM customer) AS x)", ALL),
        ("WITH RECURSIVE r AS (SELECT * FROM customer UNION ALL SELECT * FROM r WHERE 0) SELECT name FROM r", ALL),
        ("SELECT name AS n FROM customer ORDER BY n", "customer.name"),
        ("SELECT name FROM customer UNION SELECT item FROM purchase", "customer.name purchase.item"),
        ("SELECT 'x' FROM customer WHERE name = \"Ada\"", "customer.name"),
        ("SELECT sum(amount) OVER (PARTITION BY item) FROM purchase", "purchase.amount purchase.item"),
        ("SELECT 1", ""),
    ],
)
def test_two_readers_of_a_query_agree(shop, schema, sql, expected):
    assert schema_items(sql, schema) == prepared_items(shop, sql) == items(expected)


def test_the_authorizer_answers_for_sqlite_and_is_not_asked_about_using(shop, schema):
    sql = "SELECT a.name FROM customer a JOIN customer b USING (city)"
    assert schema_items(sql, schema) == items("customer.name customer.city")
    assert prepared_items(shop, sql) == items("customer.name")
    assert prepared_items(Database("x", "duckdb", shop.location), "SELECT 1") is None
    assert prepared_items(Database("x", "sqlite", shop.location + ".gone"), "SELECT 1") is None


def test_schema_items_mark_unknown_names_and_speak_other_dialects(shop, schema):
    nope = SchemaItems(frozenset({"customer"}), frozenset({("", "nope")}))
    assert schema_items("SELECT nope FROM customer", schema) == nope
    assert schema_items("SELECT c.nope FROM customer c", schema) == items("customer.nope")
    assert schema_items("SELECT a FROM nope", schema) == SchemaItems(frozenset({"nope"}), frozenset({("", "a")}))
    assert schema_items("SELECT nope FROM (SELECT * FROM purchase)", schema).columns >= {("", "nope")}
    assert prepared_items(shop, "SELECT nope FROM customer") is None
    found = schema_items("SELECT name::text FROM customer WHERE city ILIKE 'p%'", schema, "postgres")
    assert found == items("customer.name customer.city")
    assert schema_items("FROM customer SELECT name", schema, "duckdb") == items("customer.name")


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT ssn FROM hr.person", {("hr.person", "ssn")}),
        ("SELECT p.ssn, person.name FROM hr.person p, sales.person", {("hr.person", "ssn"), ("person", "name")}),
        ("SELECT hr.person.id, person.name FROM person, hr.person", {("hr.person", "id"), ("person", "name")}),
        ("SELECT person.id FROM HR.Person WHERE ssn > 'a'", {("hr.person", "id"), ("hr.person", "ssn")}),
        ("SELECT b.* FROM (SELECT * FROM hr.person) b", {("hr.person", "id"), ("hr.person", "ssn")}),
    ],
)
def test_columns_of_another_schema_are_those_of_its_table(sql, columns):
    tables = {"person": ("id", "name"), "hr.person": ("id", "ssn")}
    known = tuple(Table(name, tuple(Column(column, "") for column in own)) for name, own in tables.items())
    schema = Schema(known, "postgres", ("hr",))
    assert schema_items(sql, schema, "postgres").columns == columns
    resolved = resolve_names(sql, schema, "postgres")
    assert (resolved.tables, resolved.unknown) == ({table for table, _ in columns}, ())
    assert {(c.table, c.name) for c in resolved.tree.find_all(exp.Column) if c.table != "b" and c.table} <= columns


@pytest.mark.parametrize(
    "sql", ["", "SELECT", "SELEC name", "DROP TABLE customer", "SELECT 1; SELECT 2", "ATTACH 'x' AS y"]
)
def test_what_is_no_query_has_no_items(shop, schema, sql):
    assert prepared_items(shop, sql) is None
    if "1; " not in sql:
        assert schema_items(sql, schema) is None


def test_the_name_of_a_table_after_in_is_a_table(schema):
    found = schema_items("SELECT name FROM customer WHERE (id, name, city, credit) NOT IN Customer", schema)
    assert found == items(ALL)
    assert schema_items("SELECT name FROM customer WHERE id IN gone", schema) == SchemaItems(
        frozenset({"customer", "gone"}), frozenset({("customer", "name"), ("customer", "id")})
    )
    in_a_list = schema_items("SELECT name FROM customer WHERE id IN credit", schema, "duckdb")
    assert in_a_list == items("customer.name customer.id customer.credit")  # DuckDB looks in a column's list


def test_bigrams_by_hand():
    assert bigrams("SELECT a FROM t;") == {("select", "a"), ("a", "from"), ("from", "t")}
    assert bigrams("select A\nfrom T -- x") == bigrams("SELECT a FROM t")
    assert bigrams("SELECT 'A b' >= 1.5") == {("select", "'A b'"), ("'A b'", ">="), (">=", "1.5")}
    assert bigrams("SELECT") == frozenset()


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order\n by a LIMIT 1;", True),
        ("SELECT a FROM t", False),
        ("SELECT a FROM t WHERE b = (SELECT b FROM t ORDER BY c LIMIT 1)", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("(SELECT a FROM t ORDER BY a)", True),
        ("((SELECT a FROM t ORDER BY a));", True),
        ("(SELECT a FROM t ORDER BY a) UNION (SELECT a FROM u ORDER BY a)", False),
        ("SELECT a FROM t UNION SELECT a FROM u ORDER BY 1", True),
        ("WITH z AS (SELECT a FROM t ORDER BY a) SELECT a FROM z", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t WHERE b = 'ORDER BY'", False),
        ("SELECT a FROM t -- ORDER BY a", False),
        ("SELECT `order by` FROM t", False),
        ("SELECT a FROM t ORDER/**/BY a", True),
        ("SELECT a FROM t ORDER -- by what?\n BY a", True),
        ("/* all */ (SELECT a FROM t ORDER /* ( */ BY a) -- )", True),
        ("SELECT '/*' FROM t ORDER BY 'x' /* '*/", True),
        ("SELECT a /* ORDER BY */ FROM t", False),
        ("SELECT a FROM t /* never closed ORDER BY a", False),
        ("((SELECT a FROM t ORDER BY a) LIMIT 1)", False),
        ("(" * 5000 + "SELECT a FROM t ORDER BY f(a)" + ")" * 5000, True),
        ("", False),
    ],
)
def test_is_ordered(sql, expected):
    assert is_ordered(sql) is expected
    assert asks_for_order(sql, "sqlite") is expected


@pytest.mark.parametrize(
    ("engine", "sql", "expected"),
    [
        ("duckdb", r"SELECT a FROM t WHERE b <> E'it\'s' ORDER BY (b = 'x'), a", True),
        ("postgres", "SELECT a FROM t WHERE b <> $$it's$$ ORDER BY (b = 'x'), a", True),
        ("mysql", r"SELECT a FROM t WHERE b = 'it\'s' ORDER BY FIELD(a, 'x')", True),
        ("mysql", "SELECT a FROM t # order by a", False),
        ("postgres", "SELECT b[1] FROM t ORDER BY b[1]", True),
        ("postgres", "SELECT a /* /* inner */ ORDER BY */ FROM t", False),
    ],
)
def test_an_order_is_asked_for_in_the_texts_and_comments_of_each_dialect(engine, sql, expected):
    assert asks_for_order(sql, engine) is expected


def test_the_look_for_an_order_by_is_linear_in_brackets_that_never_close():
    start = time.perf_counter()
    assert not is_ordered("SELECT " + "[" * 200_000 + " ORDER BY 1")
    assert time.perf_counter() - start < 1.0


WORDS = "SELECT FROM WHERE ( ) , a b t * = 'x' \" ORDER BY GROUP UNION ; -- /* */ AS JOIN ON CASE WITH NOT IN 1 . [ ] `"


def bare(text):
    return re.sub(r"""["'`\[\]]""", "", text.casefold())


@settings(deadline=None)  # a busy machine is no fault
@given(st.lists(st.sampled_from([*WORDS.split(), "\n"]), max_size=40).map(" ".join) | st.text(max_size=60))
def test_of_any_text_nothing_is_said_that_it_does_not_hold(schema, text):
    found = schema_items(text, schema)
    if found is not None:
        assert {table for table, _ in found.columns} <= found.tables | {""}
        assert all(bare(name) in bare(text) for name in found.tables)
    assert hardness(text) in HARDNESS_LEVELS
    assert not is_ordered(text) or re.search(r"order\s+by", text, re.IGNORECASE)
    for pair in bigrams(text):
        assert all(word and word.casefold() in text.casefold() for word in pair)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT " + "(" * 50_000,
        "SELECT " + "(" * 59 + "1" + ")" * 59,
        "SELECT " + "CASE WHEN " * 2000,
        "SELECT " + "NOT " * 5000 + "1",
        "SELECT " + "a." * 3000 + "b FROM t",
        "SELECT 1 " + "UNION SELECT 1 " * 1500,
        "SELECT " + "- " * 9000 + "1",
        "SELECT a FROM t WHERE " + "a = 1 OR " * 2000 + "b = 2",
        "SELECT a FROM " + "(SELECT a FROM " * 55 + "t" + ")" * 55,
        "[" * 10_000,
        "'" * 9_999,
        "/*" * 10_000,
    ],
)
def test_no_text_takes_long(schema, text):
    start = time.process_time()
    schema_items(text, schema)
    assert hardness(text) in HARDNESS_LEVELS
    assert not is_ordered(text)
    assert len(bigrams(text)) < 20  # they repeat a few words thousands of times
    assert time.process_time() - start < 2.5
