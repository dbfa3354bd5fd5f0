"""The schemas of a DuckDB file: read, selected, and named where they are left out."""

from pathlib import Path

import pytest

from pipelines.databases import card, named
from pipelines.recipe.config import Execution
from pipelines.sql.schema import ForeignKey, introspect, render
from tests.fakes import build_database

SHOP = (
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, note VARCHAR)",
    "CREATE SCHEMA sales",
    "CREATE TABLE sales.person (id INTEGER PRIMARY KEY, name VARCHAR, ssn VARCHAR)",
    "CREATE TABLE sales.orders (id INTEGER PRIMARY KEY, person INTEGER REFERENCES sales.Person(ID))",
    "COMMENT ON TABLE sales.orders IS 'those that were sold'; COMMENT ON COLUMN sales.orders.person IS 'who buys'",
    "CREATE VIEW sales.buyers AS SELECT name FROM sales.person",
    'CREATE SCHEMA "My HR"',
    'CREATE TABLE "My HR"."Pay Roll" ("Gross Pay" INTEGER)',
    "INSERT INTO sales.person VALUES (1, 'Ada', 'SECRET'); INSERT INTO sales.orders VALUES (1, 1), (2, 1)",
)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    return build_database(tmp_path / "shop.duckdb", ";".join(SHOP))


def test_all_schemas_of_a_file_are_read_and_a_query_finds_their_tables(shop, sqltrain):
    sqltrain.ok("connect", "shop.duckdb")
    known = card.read(Path("databases/shop.yaml"))
    assert list(known.tables) == ["orders", "My HR.Pay Roll", "sales.buyers", "sales.orders", "sales.person"]
    assert (known.tables["sales.orders"].rows, known.tables["orders"].rows) == (2, 0)
    assert known.tables["sales.orders"].description == "those that were sold"
    assert known.tables["sales.orders"].columns["person"].description == "who buys"
    assert known.tables["orders"].description == ""
    found = named.find("shop")
    with found.sql(Execution()) as sql:
        schema = found.schema(sql)
        queries = [f"SELECT count(*) FROM {name}" for name in ('"My HR"."Pay Roll"', "sales.buyers", "orders")]
        results = sql.execute_many([(found.database, query) for query in queries])
    assert [result.rows for result in results] == [((0,),), ((1,),), ((0,),)]
    keys = {table.name: table.foreign_keys for table in schema.tables}
    assert keys["sales.orders"] == (ForeignKey("person", "sales.person", "id"),)
    text = render(schema, "ddl")
    assert 'CREATE TABLE "My HR"."Pay Roll"' in text
    assert "FOREIGN KEY (person) REFERENCES sales.person(id)" in text


def test_a_file_whose_main_schema_is_empty_has_tables(tmp_path, monkeypatch, sqltrain):
    monkeypatch.chdir(tmp_path)
    build_database(tmp_path / "shop.duckdb", "CREATE SCHEMA sales; CREATE TABLE sales.orders(id INT)")
    sqltrain.ok("connect", "shop.duckdb")
    assert list(card.read(Path("databases/shop.yaml")).tables) == ["sales.orders"]


def test_schemas_are_selected_and_those_that_are_left_out_are_named(shop, sqltrain):
    out = sqltrain.ok("connect", "shop.duckdb", "--schema", "sales")
    assert "main: 1 tables of a schema that --schema did not name" in out
    assert "My HR: 1 tables of a schema that --schema did not name" in out
    tables = ["sales.buyers", "sales.orders", "sales.person"]
    assert list(card.read(Path("databases/shop.yaml")).tables) == tables
    sqltrain.ok("connect", "shop")  # again: the choice stays
    assert list(card.read(Path("databases/shop.yaml")).tables) == tables
    sqltrain.ok("connect", "shop", "--schema", "main", "--schema", "My HR")
    assert list(card.read(Path("databases/shop.yaml")).tables) == ["orders", "My HR.Pay Roll"]
    assert "no schema sale" in sqltrain.refused("connect", "shop", "--schema", "sale")


def test_what_is_hidden_in_a_schema_is_hidden(shop, sqltrain):
    sqltrain.ok("connect", "shop.duckdb")
    path = Path("databases/shop.yaml")
    path.write_text(path.read_text().replace("      ssn:\n", "      ssn:\n        hidden: true\n"))
    found = named.find("shop")
    queries = ["ssn FROM sales.person", "s.ssn FROM sales.person s", "* FROM sales.person", "name FROM sales.person"]
    with found.sql(Execution()) as sql:
        assert "ssn" not in render(found.schema(sql), "ddl")
        results = sql.execute_many([(found.database, f"SELECT {query}") for query in queries])
    assert [result.error_class for result in results] == ["hidden", "hidden", "hidden", None]


def test_a_schema_of_a_file_has_its_own_order_and_types(shop):
    tables = {table.name: table for table in introspect(shop, 1).tables}
    assert [(column.name, column.type) for column in tables["sales.person"].columns] == [
        ("id", "INTEGER"), ("name", "VARCHAR"), ("ssn", "VARCHAR"),
    ]  # fmt: skip
    assert tables["sales.buyers"].columns[0].values == ("Ada",)
