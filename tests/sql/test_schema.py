"""Schemas read from a database and rendered for a prompt."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from servers import Server

from pipelines.errors import DataError
from pipelines.sql.dialects.copies import to_duckdb
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, introspect, render
from pipelines.types import Database, SchemaItems

SHOP = Schema(
    (
        Table(
            "customer",
            (Column("id", "INTEGER", True), Column("name", "TEXT"), Column("city", "TEXT"), Column("credit", "REAL")),
        ),
        Table(
            "purchase",
            (
                Column("id", "INTEGER", True),
                Column("customer_id", "INTEGER"),
                Column("item", "TEXT"),
                Column("amount", "INTEGER"),
            ),
            (ForeignKey("customer_id", "customer", "id"),),
        ),
    )
)


def names(schema: Schema) -> list[tuple[str, list[str], list[str], tuple[ForeignKey, ...]]]:
    """What does not depend on how an engine calls its types."""
    return [
        (t.name, [c.name for c in t.columns], [c.name for c in t.columns if c.primary_key], t.foreign_keys)
        for t in schema.tables
    ]


def test_a_schema_is_read_in_the_databases_own_order(shop: Database) -> None:
    assert introspect(shop) == SHOP


def test_example_values_come_in_the_order_of_the_table(shop: Database) -> None:
    customer = introspect(shop, values=2).tables[0]
    assert [column.values for column in customer.columns] == [(1, 2), ("Ada", "Bo"), ("Paris", "Oslo"), (10.5, 3.25)]


def test_duckdb_has_the_same_schema(shop: Database, tmp_path: Path) -> None:
    copy = to_duckdb(shop, tmp_path / "shop.duckdb")
    assert names(introspect(copy)) == names(SHOP)
    assert [c.type for c in introspect(copy).tables[0].columns] == ["BIGINT", "VARCHAR", "VARCHAR", "DOUBLE"]
    assert introspect(copy, 2).tables[0].columns[2].values == ("Paris", "Oslo")


@pytest.mark.services
def test_postgres_has_the_same_schema(server: Server) -> None:
    assert names(introspect(server.shop)) == names(SHOP)
    assert introspect(server.shop, 2).tables[0].columns[2].values == ("Paris", "Oslo")


def test_a_key_without_a_column_means_the_primary_key(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "odd.sqlite")
    connection.executescript(
        'CREATE TABLE "odd ""name" ("a b" TEXT, k INTEGER, PRIMARY KEY (k));'
        'CREATE TABLE u (x REFERENCES "odd ""name");'
        "CREATE VIEW v AS SELECT x FROM u;"
    )
    connection.close()
    schema = introspect(Database("odd", "sqlite", str(tmp_path / "odd.sqlite")), 1)
    assert [table.name for table in schema.tables] == ['odd "name', "u", "v"]
    assert schema.tables[1].foreign_keys == (ForeignKey("x", 'odd "name', "k"),)
    assert '"odd ""name"' in render(schema, "ddl")


def test_a_missing_database_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        introspect(Database("gone", "sqlite", str(tmp_path / "gone.sqlite")))
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    with pytest.raises(DataError, match="cannot be read"):
        introspect(Database("text", "sqlite", str(tmp_path / "text.sqlite")))


def test_ddl() -> None:
    assert render(SHOP, "ddl") == (
        "CREATE TABLE customer (\n"
        "    id INTEGER PRIMARY KEY,\n"
        "    name TEXT,\n"
        "    city TEXT,\n"
        "    credit REAL\n"
        ");\n"
        "CREATE TABLE purchase (\n"
        "    id INTEGER PRIMARY KEY,\n"
        "    customer_id INTEGER,\n"
        "    item TEXT,\n"
        "    amount INTEGER,\n"
        "    FOREIGN KEY (customer_id) REFERENCES customer(id)\n"
        ");"
    )


def test_compact_is_one_line_of_words_apart() -> None:
    assert render(SHOP, "compact") == (
        "customer : id , name , city , credit ; purchase : id , customer_id , item , amount ; "
        "purchase . customer_id = customer . id"
    )
    assert render(SHOP, "names") == "customer , purchase"


def test_values_are_shown_on_one_line_and_cut() -> None:
    column = Column("note", "TEXT", values=("a\nb", "x" * 99, 3))
    text = render(Schema((Table("t", (column,)),)), "ddl")
    assert text.splitlines()[1] == "    note TEXT -- e.g. 'a\\nb', '" + "x" * 36 + "..., 3"


def test_a_part_of_a_schema_keeps_its_keys() -> None:
    keep = SchemaItems(frozenset({"purchase"}), frozenset({("purchase", "item"), ("purchase", "customer_id")}))
    assert render(SHOP, "compact", keep) == "purchase : id , customer_id , item"
    keep = SchemaItems(frozenset({"purchase", "customer"}), frozenset({("purchase", "customer_id")}))
    assert render(SHOP, "compact", keep) == (
        "customer : id ; purchase : id , customer_id ; purchase . customer_id = customer . id"
    )
