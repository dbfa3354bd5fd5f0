"""The small shop that tests of SQL run on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from pipelines.types import Database

SHOP = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT, credit REAL);
CREATE TABLE purchase (
    id INTEGER PRIMARY KEY,
    customer_id INTEGER REFERENCES customer(id),
    item TEXT,
    amount INTEGER
);
CREATE INDEX purchase_item ON purchase (item);
INSERT INTO customer VALUES (1,'Ada','Paris',10.5),(2,'Bo','Oslo',NULL),(3,'Cy','Paris',3.25),(4,'Di','Rome',0.0);
INSERT INTO purchase VALUES (1,1,'pen',3),(2,1,'ink',1),(3,2,'pen',3),(4,3,'cap',7),(5,NULL,'pen',2);
"""


def build_shop(path: Path) -> Database:
    """The shop as an SQLite file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(SHOP)
    connection.close()
    return Database("shop", "sqlite", str(path))
