"""The small shop that tests of SQL run on."""

import hashlib
from dataclasses import replace

from tests.fakes import build_database

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


USERS = """
SELECT user FROM user WHERE user.pg_rating = 13
SELECT u.user FROM user u JOIN user v ON u.pg_rating = v.pg_rating
SELECT max(user) FROM user
SELECT "user" FROM "user"
""".strip().splitlines()  # each answers "ada"


def build_shop(path):
    return replace(build_database(path, SHOP), id="shop")


def build_users(path):
    """A table and a column with the name that some engines have for who is connected, as an SQLite file."""
    return build_database(
        path, "CREATE TABLE user (user TEXT, pg_rating INTEGER); INSERT INTO user VALUES ('ada', 13);"
    )


def run(engine, database, sql):
    return engine.execute_many([(database, sql)])[0]


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
