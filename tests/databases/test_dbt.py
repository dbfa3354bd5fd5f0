"""A dbt manifest's facts in a card, by `sqltrain connect --dbt`."""

import json
import sqlite3
from contextlib import closing

import pytest

from pipelines.databases import card
from pipelines.sql.schema import ForeignKey
from tests.fakes import build_database

TABLES = """
CREATE TABLE Customers (id INTEGER PRIMARY KEY, name TEXT, kind TEXT);
CREATE TABLE fct_orders (id INTEGER PRIMARY KEY, customer INTEGER, amount INTEGER);
INSERT INTO Customers VALUES (1, 'Ada', 'a'), (2, 'Bo', 'b');
"""


def column_test(name, table, column, **kwargs):
    metadata = {"name": name, "kwargs": {"column_name": column, **kwargs}}
    return {"resource_type": "test", "attached_node": table, "test_metadata": metadata}


MANIFEST = {
    "nodes": {
        "model.shop.orders": {
            "resource_type": "model", "name": "orders", "alias": "FCT_ORDERS", "description": "One row an order.",
            "columns": {"AMOUNT": {"description": "in cents"}, "gone": {"description": "no such column"}},
        },
        "model.shop.customers": {"resource_type": "model", "name": "customers", "columns": {}},
        "model.shop.other": {"resource_type": "model", "name": "other", "description": "in another database"},
        "test.1": column_test("accepted_values", "model.shop.customers", "kind", values=["a", "b"]),
        "test.2": column_test("unique", "model.shop.customers", "name"),
        "test.3": column_test("not_null", "model.shop.customers", "name"),
        "test.4": column_test("relationships", "model.shop.orders", "customer", to="ref('customers')", field="id"),
        "test.5": column_test("not_null", "model.shop.orders", "gone"),
    },
    "metrics": {"m": {"name": "order_value", "label": None, "description": "sum of amount over orders"}},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_database(tmp_path / "shop.sqlite", TABLES)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "manifest.json").write_text(json.dumps(MANIFEST))
    return tmp_path


def test_descriptions_tests_and_metrics_of_a_dbt_project_become_the_card(folder, sqltrain):
    said = sqltrain.ok("connect", "shop.sqlite", "--dbt", "target")
    assert "dbt: 2 descriptions, 3 tests, 1 references, 1 metrics, 1 models without a table here" in said
    known = card.read(folder / "databases" / "shop.yaml")
    orders, customers = known.tables["fct_orders"], known.tables["Customers"]
    assert (orders.description, orders.columns["amount"].description) == ("One row an order.", "in cents")
    assert customers.columns["kind"].description == "one of: a, b"
    assert customers.columns["name"].description == "no value twice; never null"
    (reference,) = orders.references
    assert (reference.column, reference.to_table, reference.to_column) == ("customer", "Customers", "id")
    assert known.evidence("what is the order value of Ada ?") == "order value = sum of amount over orders"
    assert sqltrain("connect", "shop", "--dbt", "target/manifest.json")[0] == 0  # again: nothing comes twice
    assert card.read(folder / "databases" / "shop.yaml") == known


@pytest.mark.parametrize(
    ("to", "field", "table"),
    [
        ("ref('customers')", "ID", "Customers"),
        ('ref("shop", "customers")', '"id"', "Customers"),
        ("ref('customers', version=2)", "id", "Customers"),
        ("source('raw', 'customers')", "`Id`", "raw_customers"),
        ("{{ source( 'raw' , 'customers' ) }}", "id", "raw_customers"),
    ],
)
def test_relationships_are_keys_however_a_project_names_their_columns(to, field, table, folder, sqltrain):
    """A model and a source of one name are two tables; newer projects write a test's arguments apart."""
    with closing(sqlite3.connect(folder / "shop.sqlite")) as shop:
        shop.execute("CREATE TABLE raw_customers (id INTEGER PRIMARY KEY)")
    nodes = {**MANIFEST["nodes"], "test.4": column_test("relationships", "model.shop.orders", "CUSTOMER")}
    nodes["test.4"]["test_metadata"]["kwargs"]["arguments"] = {"to": to, "field": field}
    nodes["model.shop.customers"] = {**nodes["model.shop.customers"], "package_name": "shop"}
    raw = {"resource_type": "source", "name": "customers", "source_name": "raw", "identifier": "RAW_CUSTOMERS"}
    manifest = {**MANIFEST, "nodes": nodes, "sources": {"source.shop.raw.customers": raw}}
    (folder / "target" / "manifest.json").write_text(json.dumps(manifest))
    sqltrain.ok("connect", "shop.sqlite", "--dbt", "target")
    known = card.read(folder / "databases" / "shop.yaml")
    keys = {shown.name: shown.foreign_keys for shown in known.shown().tables}
    assert keys["fct_orders"] == (ForeignKey("customer", table, "id"),)


def test_relationships_to_what_is_not_in_the_card_are_counted(folder, sqltrain):
    nodes = {
        **MANIFEST["nodes"],
        "test.6": column_test("relationships", "model.shop.orders", "amount", to="ref('other')", field="id"),
        "test.7": column_test("relationships", "model.shop.orders", "amount", to="ref('customers')", field="gone"),
    }
    (folder / "target" / "manifest.json").write_text(json.dumps({**MANIFEST, "nodes": nodes}))
    said = sqltrain.ok("connect", "shop.sqlite", "--dbt", "target")
    assert "1 references" in said
    assert "2 relationships to what is not here" in said


def test_what_a_project_has_and_the_card_does_not_take_is_counted(folder, sqltrain):
    """Of a column and a model that are not here, of kinds without words in the card, without a text, of one name."""
    nodes = {
        **MANIFEST["nodes"],
        "test.6": column_test("unique", "model.shop.other", "id"),
        "test.7": column_test("at_least_one", "model.shop.customers", "name"),
        "test.8": {"resource_type": "test", "test_metadata": None},
    }
    metrics = {**MANIFEST["metrics"], "n": {"name": "churn", "label": None, "description": " "}}
    metrics["o"] = {"name": "net", "label": "Order value", "description": "sum of amount without tax"}
    metrics["p"] = {"name": "order_value", "label": None, "description": "sum of  amount over orders"}  # the same text
    (folder / "target" / "manifest.json").write_text(json.dumps({"nodes": nodes, "metrics": metrics}))
    said = " ".join(sqltrain.ok("connect", "shop.sqlite", "--dbt", "target").split())
    for told in (
        "2 tests of what is not here",
        "2 tests of other kinds",
        "1 metrics without a description",
        "1 metrics of a name that the card has",
        "1 descriptions of columns that are not here",
    ):
        assert told in said


def test_what_a_person_wrote_stays(folder, sqltrain):
    sqltrain("connect", "shop.sqlite")
    path = folder / "databases" / "shop.yaml"
    known = card.read(path)
    tables = {**known.tables, "fct_orders": known.tables["fct_orders"].model_copy(update={"description": "mine"})}
    card.write(path, known.model_copy(update={"tables": tables, "metrics": {"order value": "mine"}}))
    sqltrain("connect", "shop", "--dbt", "target")
    assert card.read(path).tables["fct_orders"].description == "mine"
    assert card.read(path).metrics == {"order value": "mine"}


def test_a_byte_order_mark_before_a_manifest_is_read(folder, sqltrain):
    path = folder / "target" / "manifest.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    code, _, error = sqltrain("connect", "shop.sqlite", "--dbt", "target")
    assert (code, error) == (0, "")


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"nodes": []}', '{"nodes": {}, "nodes": {}}', None])
def test_a_file_that_is_not_a_manifest_is_refused_in_one_line(folder, sqltrain, text):
    path = folder / "target" / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    error = sqltrain.refused("connect", "shop.sqlite", "--dbt", "target")
    assert "target/manifest.json is not a dbt manifest" in error
    assert "Run dbt parse" in error


MISSHAPEN = {
    "a list for a node": {"nodes": {"m": []}},
    "nothing for a node": {"nodes": {"m": None}},
    "a list of sources": {"nodes": {}, "sources": [1]},
    "a list of metrics": {"nodes": {}, "metrics": [1]},
    "a metric without a name": {"nodes": {}, "metrics": {"m": {"description": "x"}}},
    "a list of columns": {"nodes": {"m": {"resource_type": "model", "columns": [{"name": "id"}]}}},
    "a text for a column": {"nodes": {"m": {"resource_type": "model", "columns": {"id": "a key"}}}},
    "a text for a test": {"nodes": {"m": {"test_metadata": "unique"}}},
    "a number for a test's values": {"nodes": {"m": column_test("accepted_values", "m", "kind", values=5)}},
}


@pytest.mark.parametrize("manifest", MISSHAPEN.values(), ids=MISSHAPEN)
def test_a_manifest_of_another_shape_is_refused_in_one_line(folder, sqltrain, manifest):
    (folder / "target" / "manifest.json").write_text(json.dumps(manifest))
    error = sqltrain.refused("connect", "shop.sqlite", "--dbt", "target")
    assert "has another shape than dbt writes" in error
