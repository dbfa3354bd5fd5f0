"""Schemas read from a database and rendered for a prompt."""

import contextlib
import re
import sqlite3
from pathlib import Path

import duckdb
import psycopg
import pymysql
import pytest

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database, SchemaItems
from pipelines.databases import named
from pipelines.recipe.config import Execution
from pipelines.sql import schema as catalogs
from pipelines.sql.dialects import sqlite
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, introspect, render
from tests.fakes import build_database

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS y FROM c WHERE x < 0"
ID = Column("id", "INTEGER", True)
CUSTOMER = (ID, Column("name", "TEXT"), Column("city", "TEXT"), Column("credit", "REAL"))
PURCHASE = (ID, Column("customer_id", "INTEGER"), Column("item", "TEXT"), Column("amount", "INTEGER"))
KEYS = (ForeignKey("customer_id", "customer", "id"),)
SHOP = Schema((Table("customer", CUSTOMER), Table("purchase", PURCHASE, KEYS)))
ODD_NAMES = re.split(
    r" ¦ |\n",
    """Album ¦ albumId ¦ SALES ¦ Rechnungen_2024 ¦ sales_2024 ¦ _hidden ¦ x ¦ n1 ¦ Straße ¦ größe ¦ Übung ¦ naïve ¦ été
имя ¦ Имя_2 ¦ 名前 ¦ 表2 ¦ π ¦ Ångström ¦ unit price ¦ Unit Cost ¦ a  b ¦ two words too ¦ say "hi" ¦ " ¦ ""
"quoted" ¦ it's ¦ ' ¦ ` ¦ a`b ¦ `` ¦ `ticks` ¦ a"b`c ¦ [x] ¦ a]b ¦ order.total ¦ .dot ¦ a.b.c ¦ a/b ¦ a\\b ¦ 100
1st ¦ 2024_sales ¦ 3 ¦ 1e5 ¦ 0x1F ¦ 50% ¦ a-b ¦ -1 ¦ a+b ¦ a=b ¦ a;b ¦ a,b ¦ (a) ¦ f(x) ¦ a:b ¦ $ ¦ a$b ¦ $1
@x ¦ # ¦ a#b ¦ ? ¦ ! ¦ ~ ¦ & ¦ | ¦ ^ ¦ {a} ¦ * ¦ -- no ¦ a--b ¦ /* a */ ¦ select 1 ¦ a b; DROP TABLE x ¦ é\u0301
½ ¦ a² ¦ procedure_2 ¦ count ¦ name ¦ date ¦ time ¦ value ¦ year ¦ status ¦ type ¦ position ¦ level ¦ coalesce
row""",
)


def names(schema):
    return [
        (t.name, [c.name for c in t.columns], [c.name for c in t.columns if c.primary_key], t.foreign_keys)
        for t in schema.tables
    ]


def test_a_schema_and_its_example_values_come_in_the_databases_own_order(shop):
    assert introspect(shop) == SHOP
    customer = introspect(shop, values=2).tables[0]
    assert [column.values for column in customer.columns] == [(1, 2), ("Ada", "Bo"), ("Paris", "Oslo"), (10.5, 3.25)]


@pytest.mark.parametrize("kind", ["duckdb", pytest.param("postgres", marks=pytest.mark.services)])
def test_another_engine_has_the_same_schema(kind, request):
    copy = request.getfixturevalue(f"{kind}_shop")
    assert names(introspect(copy)) == names(SHOP)
    assert introspect(copy, 2).tables[0].columns[2].values == ("Paris", "Oslo")
    if kind == "duckdb":
        assert [c.type for c in introspect(copy).tables[0].columns] == ["BIGINT", "VARCHAR", "VARCHAR", "DOUBLE"]


def test_keys_without_columns_mean_the_primary_key_in_its_order_and_computed_columns_are_columns(tmp_path):
    database = build_database(
        tmp_path / "odd.sqlite",
        'CREATE TABLE "odd ""name" ("a b" TEXT, k INTEGER, PRIMARY KEY (k));'
        'CREATE TABLE u (x REFERENCES "odd ""name"); CREATE VIEW v AS SELECT x FROM u;'
        "CREATE TABLE o (price, n, total GENERATED ALWAYS AS (price * n), twice AS (n * 2) STORED);"
        "CREATE TABLE p (a, b, PRIMARY KEY (b, a)); CREATE TABLE c (x, y, FOREIGN KEY (x, y) REFERENCES p);"
        "CREATE VIRTUAL TABLE words USING fts5 (word);",
    )
    schema = introspect(database, 1)
    tables = {table.name: table for table in schema.tables}
    assert list(tables) == ['odd "name', "u", "v", "o", "p", "c", "words"]
    assert tables["u"].foreign_keys == (ForeignKey("x", 'odd "name', "k"),)
    assert '"odd ""name"' in render(schema, "ddl")
    assert [column.name for column in tables["o"].columns] == ["price", "n", "total", "twice"]
    assert [column.name for column in tables["words"].columns] == ["word"]
    assert tables["c"].foreign_keys == (ForeignKey("x", "p", "b"), ForeignKey("y", "p", "a"))


def test_a_table_of_1600_columns_is_read_shown_and_queried(engine, tmp_path):
    names = [f"c{number}" for number in range(1600)]
    values = ", ".join(str(number) for number in range(1600))
    script = f"CREATE TABLE wide ({' INTEGER, '.join(names)} INTEGER); INSERT INTO wide VALUES ({values})"
    database = build_database(tmp_path / "wide.sqlite", script)
    (table,) = introspect(database, 1).tables
    assert [(column.name, column.type, column.values) for column in table.columns] == [
        (name, "INTEGER", (number,)) for number, name in enumerate(names)
    ]
    assert len(render(Schema((table,)), "ddl").splitlines()) == 1602  # a line each, the first and the last one
    (result,) = engine.execute_many([(database, "SELECT * FROM wide")])
    assert (result.columns, result.rows) == (tuple(names), (tuple(range(1600)),))


def test_strict_rowidless_and_rtree_tables_are_tables(engine, tmp_path):
    database = build_database(
        tmp_path / "kinds.sqlite",
        "CREATE TABLE exact (id INTEGER PRIMARY KEY, anything ANY) STRICT; INSERT INTO exact VALUES (1, 'one')",
        "CREATE TABLE pair (b TEXT, a INTEGER, PRIMARY KEY (a, b)) WITHOUT ROWID; INSERT INTO pair VALUES ('x', 2)",
        "CREATE VIRTUAL TABLE box USING rtree(id, low, high, +label TEXT); INSERT INTO box VALUES (7, 1.5, 3, 'sea')",
    )
    schema = introspect(database, 1)
    shown = {
        table.name: [(column.name, column.primary_key, column.values) for column in table.columns]
        for table in schema.tables
    }
    assert shown == {  # none of the tables in which the R*Tree keeps its nodes
        "exact": [("id", True, (1,)), ("anything", False, ("one",))],
        "pair": [("b", True, ("x",)), ("a", True, (2,))],
        "box": [("id", False, (7,)), ("low", False, (1.5,)), ("high", False, (3.0,)), ("label", False, ("sea",))],
    }
    queries = ["SELECT anything FROM exact", "SELECT * FROM pair WHERE a = 2", "SELECT label FROM box WHERE low < 2"]
    results = engine.execute_many([(database, query) for query in queries])
    assert [result.rows for result in results] == [(("one",),), (("x", 2),), (("sea",),)]


def test_a_virtual_table_of_an_absent_module_leaves_the_others(engine, tmp_path):
    database = build_database(tmp_path / "notes.sqlite", "CREATE TABLE note (body TEXT); INSERT INTO note VALUES ('x')")
    with contextlib.closing(sqlite3.connect(database.location)) as connection:
        connection.execute("PRAGMA writable_schema = 1")
        made = "CREATE VIRTUAL TABLE embedding USING vec0(body float[4])"
        connection.execute("INSERT INTO sqlite_master VALUES ('table', 'embedding', 'embedding', 0, ?)", [made])
        connection.commit()
    schema = introspect(database)
    assert [table.name for table in schema.tables] == ["note"]
    told = "the virtual table cannot be opened, so it is left out: no such module: vec0"
    assert schema.left_out == (("embedding", told),)
    (result,) = engine.execute_many([(database, "SELECT body FROM note")])
    assert result.rows == (("x",),)


def test_a_point_in_a_name_parts_nothing(tmp_path):
    made = 'CREATE TABLE "a.b" (id INTEGER PRIMARY KEY); CREATE TABLE b (id INTEGER);'
    referring = 'CREATE TABLE c (id INTEGER REFERENCES "a.b" (id))'
    schema = introspect(build_database(tmp_path / "odd.duckdb", made + referring))
    tables = {table.name: table for table in schema.tables}
    assert [name for name, table in tables.items() if table.columns[0].primary_key] == ["a.b"]
    assert tables["c"].foreign_keys == (ForeignKey("id", "a.b", "id"),)


def test_a_missing_database_is_the_users_to_mend(tmp_path):
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    for name, message in (("gone", "no such file"), ("text", "cannot be read")):
        with pytest.raises(DataError, match=message):
            introspect(Database(name, "sqlite", str(tmp_path / f"{name}.sqlite")))


def test_a_schema_is_rendered_as_statements_or_words_and_its_values_on_one_line():
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
    assert render(SHOP, "compact") == (
        "customer : id , name , city , credit ; purchase : id , customer_id , item , amount ; "
        "purchase . customer_id = customer . id"
    )
    assert render(SHOP, "lines") == (
        "customer(id, name, city, credit)\npurchase(id, customer_id, item, amount)\npurchase.customer_id = customer.id"
    )
    assert render(SHOP, "names") == "customer , purchase"
    column = Column("note", "TEXT", values=("a\nb", "x" * 99, 3))
    text = render(Schema((Table("t", (column,)),)), "ddl")
    assert text.splitlines()[1] == "    note TEXT -- e.g. 'a\\nb', '" + "x" * 36 + "..., 3"
    described = Column("unit price", "REAL", values=(2.5,), description="in euros\nnet")
    text = render(Schema((Table("t", (column, described), description="sold"),)), "lines")
    assert text == "t(note 'a\\nb' '" + "x" * 36 + '... 3, "unit price" 2.5 [in euros\\nnet]) -- sold'


def test_a_part_of_a_schema_keeps_its_keys():
    keep = SchemaItems(frozenset({"purchase"}), frozenset({("purchase", "item"), ("purchase", "customer_id")}))
    assert render(SHOP, "compact", keep) == "purchase : id , customer_id , item"
    keep = SchemaItems(frozenset({"purchase", "customer"}), frozenset({("purchase", "customer_id")}))
    assert render(SHOP, "compact", keep) == (
        "customer : id ; purchase : id , customer_id ; purchase . customer_id = customer . id"
    )


def test_a_duckdb_view_reads_no_file(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("key=abc123\n")
    database = build_database(
        tmp_path / "v.duckdb",
        "CREATE TABLE t AS SELECT 7 AS a; CREATE VIEW fine AS SELECT a + 1 AS b FROM t",
        f"CREATE VIEW leak AS SELECT content AS note FROM read_text('{secret}')",
    )
    found = [(t.name, [(c.name, c.values) for c in t.columns]) for t in introspect(database, 3).tables]
    assert found == [("fine", [("b", (8,))]), ("leak", [("note", ())]), ("t", [("a", (7,))])]


def test_a_duckdb_view_that_never_ends_has_no_values(tmp_path, monkeypatch):
    views = [f"CREATE VIEW endless AS {ENDLESS}", "CREATE VIEW later AS SELECT a FROM t"]
    database = build_database(tmp_path / "v.duckdb", "CREATE TABLE t AS SELECT 7 AS a", *views)
    monkeypatch.setattr(catalogs, "VIEW_SECONDS", 0.5)
    found = {table.name: table.columns[0].values for table in introspect(database, 3).tables}
    assert found == {"endless": (), "later": (), "t": (7,)}


def test_sqlite_views_are_read_in_the_sandbox(tmp_path, monkeypatch):
    database = build_database(
        tmp_path / "v.sqlite",
        "CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (7);"
        "CREATE VIRTUAL TABLE words USING fts5(word); INSERT INTO words VALUES ('ada');"
        "CREATE VIEW fine AS SELECT a + value AS b, char(9731) AS c FROM t, json_each('[1, 2]');"
        "CREATE VIEW huge AS SELECT a, zeroblob(900000000) AS z FROM t;"
        "CREATE VIEW paths AS SELECT file FROM pragma_database_list;"
        f"CREATE VIEW endless AS {ENDLESS};"
        "CREATE VIEW later AS SELECT a FROM t;"
        "CREATE TABLE u (b TEXT); INSERT INTO u VALUES ('x');",
    )
    monkeypatch.setattr(catalogs, "VIEW_SECONDS", 1.0)
    tables = introspect(database, 3).tables
    shown = {t.name: [(c.name, c.values) for c in t.columns] for t in tables if not t.name.startswith("words_")}
    assert shown == {
        "t": [("a", (7,))],
        "words": [("word", ("ada",))],
        "fine": [("b", (8, 9)), ("c", ("\u2603",))],
        "huge": [("a", ()), ("z", ())],
        "paths": [("file", ())],
        "endless": [("y", ())],
        "later": [("a", ())],
        "u": [("b", ("x",))],
    }


def test_sqlite_views_share_a_budget_of_work(tmp_path, monkeypatch):
    database = build_database(
        tmp_path / "v.sqlite",
        f"CREATE VIEW small AS {ENDLESS.replace('FROM c)', 'FROM c LIMIT 9)').replace('x < 0', 'x > 7')};"
        f"CREATE VIEW large AS {ENDLESS.replace('FROM c)', 'FROM c LIMIT 99999)').replace('x < 0', 'x > 9')};"
        "CREATE VIEW later AS SELECT 1 AS a;",
    )

    def values():
        return [table.columns[0].values for table in introspect(database, 2).tables]

    assert values() == [(8, 9), (10, 11), (1,)]
    monkeypatch.setattr(sqlite, "VIEW_WORK", 50)
    assert values() == [(8, 9), (), ()]


@pytest.mark.services
def test_a_postgres_view_ends_with_its_time(server, monkeypatch):
    with psycopg.connect(server.admin, autocommit=True) as admin:
        admin.execute(f"CREATE VIEW shop.endless AS {ENDLESS}".encode())
        admin.execute("GRANT SELECT ON shop.endless TO reader")
        try:
            monkeypatch.setattr(catalogs, "VIEW_SECONDS", 0.5)
            tables = {table.name: table for table in introspect(server.shop, 2).tables}
        finally:
            admin.execute("DROP VIEW shop.endless")
    assert [column.values for column in tables["endless"].columns] == [()]
    assert tables["customer"].columns[1].values == ("Ada", "Bo")


@pytest.mark.services
def test_postgresqls_comments(server):
    with psycopg.connect(server.admin, autocommit=True) as connection:
        connection.execute("COMMENT ON TABLE shop.customer IS 'what it holds'")
        connection.execute("COMMENT ON COLUMN shop.customer.id IS 'its key'")
    assert catalogs.read_comments(server.shop) == {("customer", ""): "what it holds", ("customer", "id"): "its key"}


@pytest.mark.services
def test_connect_reads_the_schemas_that_are_named(server, sqltrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("PGPASSWORD", "secret"), ("COLUMNS", "500")):
        monkeypatch.setenv(name, value)
    address = f"postgresql://reader@127.0.0.1:{re.findall('port=([0-9]+)', server.admin)[0]}/postgres"
    with psycopg.connect(server.admin, autocommit=True) as admin:
        for name in ("sales", '"My HR"', "vault"):
            admin.execute(f"CREATE SCHEMA {name}; GRANT USAGE ON SCHEMA {name} TO reader".encode())
            admin.execute(f"ALTER DEFAULT PRIVILEGES IN SCHEMA {name} GRANT SELECT ON TABLES TO reader".encode())
        admin.execute("CREATE TABLE sales.person (id INT PRIMARY KEY, name TEXT, marks INT[])")
        admin.execute("CREATE TABLE vault.safe (id INT PRIMARY KEY)")
        keys = "id INT REFERENCES sales.person, safe INT REFERENCES vault.safe"
        admin.execute(f'CREATE TABLE "My HR".person ({keys}, ssn TEXT)'.encode())
        admin.execute("INSERT INTO sales.person VALUES (1, 'Ada')")
        admin.execute("INSERT INTO \"My HR\".person VALUES (1, NULL, 'SECRET')")
        admin.execute("COMMENT ON COLUMN \"My HR\".person.safe IS 'their safe'")
        sqltrain.ok("connect", address, "--name", "staff", "--schema", "sales", "--schema", "My HR")
        code, _, err = sqltrain("connect", address, "--name", "x", "--schema", "sales", "--schema", "sale")
        assert (code, err.count("\n")) == (2, 1), err
        assert re.search("no schema sale.*My HR, .*, vault", err)
        assert "not for SQLite" in sqltrain("connect", "--example", "--schema", "sales")[2]
        path = Path("databases/staff.yaml")
        path.write_text(path.read_text().replace("      ssn:\n", "      ssn:\n        hidden: true\n"))
        assert sqltrain("connect", "staff")[0] == 0  # it keeps the schemas and what is hidden
        staff = named.find("staff")
        queries = [f"SELECT {read}" for read in ('id FROM "My HR".person', 'ssn FROM "My HR".person', "* FROM person")]
        with staff.sql(Execution()) as sql:
            shown = render(staff.schema(sql), "ddl")
            found = sql.execute_many([(staff.database, query) for query in [*queries, "SELECT id FROM vault.safe"]])
        for name in ("sales", '"My HR"', "vault"):
            admin.execute(f"DROP SCHEMA {name} CASCADE".encode())
    assert [result.error_class for result in found] == [None, "hidden", None, "not_authorized"]
    assert shown.splitlines() == [
        "CREATE TABLE person (",
        "    id INTEGER PRIMARY KEY, -- e.g. 1",
        "    name TEXT, -- e.g. 'Ada'",
        "    marks INTEGER[]",
        ");",
        'CREATE TABLE "My HR".person (',
        "    id INTEGER, -- e.g. 1",
        "    safe INTEGER, -- their safe",
        "    FOREIGN KEY (id) REFERENCES person(id)",
        ");",
    ]


@pytest.mark.parametrize(
    "kind", ["sqlite", "duckdb", *(pytest.param(kind, marks=pytest.mark.services) for kind in ("postgres", "mysql"))]
)
def test_a_query_finds_every_name_as_a_schema_prints_it(kind, tmp_path, request, engine):
    made = sorted({*ODD_NAMES, *(word for name in DIALECTS for word in DIALECTS[name].reserved)})
    quote, location = DIALECTS[kind].quote, str(tmp_path / f"odd.{kind}")
    begin = ["CREATE SCHEMA odd", "CREATE SCHEMA plain", "GRANT USAGE ON SCHEMA odd, plain TO reader"]
    begin += ["SET search_path = odd", "CREATE TYPE marks AS ENUM ('marker')"]
    begin.append("ALTER DEFAULT PRIVILEGES IN SCHEMA odd GRANT SELECT ON TABLES TO reader")
    if kind == "sqlite":
        connection, begin = sqlite3.connect(location, isolation_level=None), ["PRAGMA synchronous = OFF"]
    elif kind == "duckdb":
        connection, begin = duckdb.connect(location), []
    elif kind == "postgres":
        server = request.getfixturevalue("server")
        connection = psycopg.connect(server.admin, autocommit=True)
        location = f"{server.reader} options=-csearch_path=odd"
    else:
        port = request.getfixturevalue("mysql_port")
        connection = pymysql.connect(host="127.0.0.1", port=port, user="owner", autocommit=True)
        location = f"mysql://odd:secret@127.0.0.1:{port}/odd"
        begin = ["CREATE DATABASE odd", "CREATE USER odd@'%' IDENTIFIED BY 'secret'"]
        begin += ["GRANT SELECT ON odd.* TO odd@'%'", "USE odd", "SET default_storage_engine = MEMORY"]
    with contextlib.closing(connection), contextlib.closing(connection.cursor()) as cursor:
        for sql in begin:
            cursor.execute(sql)
        column = {"sqlite": "varchar(9)", "postgres": "marks"}.get(kind, "ENUM('marker')")
        for name in made:
            quoted = quote + name.replace(quote, quote * 2) + quote
            cursor.execute(f"CREATE TABLE {quoted} ({quoted} {column})")
            cursor.execute(f"INSERT INTO {quoted} VALUES ('marker')")
    check_printed_names(Database("odd", kind, location), made, engine)
    if kind == "postgres":
        second = Database("odd", kind, location.replace("=odd", "=plain,odd"))
        check_printed_names(second, [f"odd.{name}" for name in made], engine)


def check_printed_names(database, made, engine):
    schema = introspect(database)
    assert sorted(table.name for table in schema.tables) == made
    lines = render(schema, "ddl").splitlines()
    tables = [line.removeprefix("CREATE TABLE ").removesuffix(" (") for line in lines[::3]]
    columns = [line.strip().rpartition(" ")[0] for line in lines[1::3]]
    assert {line.rpartition(" ")[2] for line in lines[1::3]} < {"varchar(9)", "ENUM('marker')", "enum('marker')"}
    assert render(schema, "compact") == " ; ".join(map(" : ".join, zip(tables, columns, strict=True)))
    queries = [f"SELECT {column} FROM {table}" for column, table in zip(columns, tables, strict=True)]
    results = engine.execute_many([(database, query) for query in queries])
    assert [(query, one.error) for query, one in zip(queries, results, strict=True) if one.rows != (("marker",),)] == []
