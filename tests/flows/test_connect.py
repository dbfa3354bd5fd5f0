"""`sqltrain connect`: the card that it writes, what it warns of, and what prompts take from an edited card."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from flows.commands import use
from pipelines.core.errors import DataError, ResourceError
from pipelines.core.store import Store
from pipelines.databases import card, catalogue, named
from pipelines.databases import named as addresses
from pipelines.databases.catalogue import find_problems
from pipelines.recipe import yaml_files
from pipelines.recipe.config import Execution
from pipelines.sql.dialects.dialect import has_password
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, render
from pipelines.stages.newest_model import newest_model
from tests.fakes import build_database

SHOP = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, email TEXT, city TEXT);
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customer(id), amount INTEGER,
    status INTEGER, bought TEXT);
CREATE TABLE "odd ""名"" select" (x1 INTEGER);
CREATE VIEW mails AS SELECT id, email AS contact FROM customer;
CREATE VIEW broken AS SELECT missing FROM nowhere;
INSERT INTO customer VALUES (1,'Ada','ada@x.org','Paris'),(2,'Bo','bo@x.org','Oslo'),(3,'Cy','cy@x.org','Paris');
INSERT INTO purchase VALUES (1,1,3,1,'2024-05-01'),(2,1,1,2,'01/05/2024'),(3,2,3,1,NULL),(4,3,7,2,'2024-06-01');
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_database(tmp_path / "shop.sqlite", SHOP)
    return tmp_path / "shop.sqlite"


def test_a_card_says_what_is_there_and_what_will_hurt(shop, sqltrain):
    out = sqltrain.ok("connect", "shop.sqlite", "--json")
    known = yaml.safe_load(Path("databases/shop.yaml").read_text(encoding="utf-8"))
    assert (known["engine"], known["location"]) == ("sqlite", str(shop))
    assert known["tables"]["customer"]["rows"] == 3
    assert known["tables"]["customer"]["columns"]["city"] == {"type": "TEXT", "values": ["Paris", "Oslo"]}
    assert "ada@x.org" not in Path("databases/shop.yaml").read_text(encoding="utf-8")
    assert known["tables"]["purchase"]["references"] == [
        {"column": "customer_id", "to_table": "customer", "to_column": "id"}
    ]
    for said in ("customer.email: looks like personal data", "purchase.status: holds codes (1, 2)", "several forms"):
        assert said in out
    assert 'odd "名" select: no rows' in out


def test_an_edited_card_is_what_the_prompt_shows_and_survives_a_second_look(shop, sqltrain):
    sqltrain("connect", "shop.sqlite")
    place = Path("databases/shop.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    known["tables"]["customer"]["columns"]["email"]["hidden"] = True
    known["tables"]["customer"]["synonyms"] = ["client"]
    known["tables"]["purchase"]["hidden"] = True
    known["metrics"] = {"big order": "amount over 5", "churn": "no order in 90 days"}
    place.write_text(yaml.safe_dump(known), encoding="utf-8")
    sqltrain("connect", "shop")
    for text in ("shop", str(shop), "shop.sqlite"):  # however a command is told of it
        where = named.find(text)
        with where.sql(Execution()) as sql:
            shown = render(where.schema(sql), "ddl")
            refused = sql.execute_many([(where.database, "SELECT email FROM customer")])[0]
        assert "CREATE TABLE customer ( -- also called client" in shown
        assert not any(word in shown for word in ("email", "contact", "purchase", "@"))
        assert refused.error_class == "hidden"
    assert named.find("shop").example("Who made a BIG order ?").evidence == "big order = amount over 5"


def test_a_renewed_card_keeps_what_is_hidden_also_of_what_is_not_there_now():
    """A table that a night's job makes anew is as hidden when it is back; what was open is not kept."""
    secret, plain = card.ColumnCard(type="TEXT", hidden=True, description="mine"), card.ColumnCard(type="TEXT")
    tables = {
        "t": card.TableCard(columns={"a": secret, "b": plain}),
        "u": card.TableCard(columns={"a": secret}),
        "pay": card.TableCard(hidden=True, columns={"x": plain}),
        "log": card.TableCard(columns={"ip": secret, "at": plain}),
        "open": card.TableCard(columns={"x": plain}),
    }
    fresh = {"t": card.TableCard(columns={"c": plain}), "u": card.TableCard(rows=2, columns={"a": card.ColumnCard()})}
    old, new = (card.DatabaseCard(engine="sqlite", location="x", tables=each) for each in (tables, fresh))
    renewed = card.merge_cards(new, old)
    found = {name: sorted(table.columns) for name, table in renewed.tables.items()}
    assert found == {"t": ["a", "c"], "u": ["a"], "pay": ["x"], "log": ["ip"]}
    assert renewed.hidden == (("pay",), {"t": ("a",), "u": ("a",), "log": ("ip",)})
    column = renewed.tables["u"].columns["a"]
    assert (renewed.tables["u"].rows, column.hidden, column.description) == (2, True, "mine")


def test_no_value_of_what_is_hidden_is_told_or_written_by_a_second_look(tmp_path, sqltrain, monkeypatch):
    """Its card has no example values any more, and the database still has them; codes of personal data are no hint."""
    monkeypatch.chdir(tmp_path)
    rows = [f"('{grade}', '{visa}', 'x')" for grade, visa in zip("QWQWQ", "ZVZVZ", strict=True)]
    build_database(
        "school.sqlite",
        "CREATE TABLE person (grade TEXT, passport_code TEXT, kind TEXT)",
        f"INSERT INTO person VALUES {', '.join(rows)}",
        "CREATE TABLE pay (grade TEXT)",
        "INSERT INTO pay VALUES ('K'), ('J'), ('K'), ('J'), ('K')",
    )
    said = sqltrain.ok("connect", "school.sqlite")
    assert "person.grade: holds codes (Q, W)" in said
    assert "(V, Z)" not in said
    place = Path("databases/school.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    known["tables"]["person"]["columns"]["grade"] = {"type": "TEXT", "hidden": True}
    known["tables"]["pay"] = {"hidden": True, "columns": {"grade": {"type": "TEXT"}}}
    place.write_text(yaml.safe_dump(known), encoding="utf-8")
    said = sqltrain.ok("connect", "school")
    assert "holds codes" not in said
    tables = card.read(place).tables
    assert tables["person"].columns["grade"].values == tables["pay"].columns["grade"].values == ()
    assert tables["person"].columns["kind"].values == ("x",)


def test_example_values_that_were_taken_out_stay_out(shop, sqltrain):
    """The tutorial takes them out, for a tiny model reads short prompts only; a table that was empty has them anew."""
    sqltrain.ok("connect", "shop.sqlite")
    place = Path("databases/shop.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    known["tables"]["customer"]["columns"]["city"].pop("values")
    known["tables"]["purchase"]["rows"] = 0
    known["tables"]["purchase"]["columns"]["status"].pop("values")
    place.write_text(yaml.safe_dump(known), encoding="utf-8")
    sqltrain.ok("connect", "shop")
    tables = card.read(place).tables
    assert tables["customer"].columns["city"].values == ()
    assert tables["customer"].columns["id"].values == (1, 2, 3)
    assert tables["purchase"].columns["status"].values == (1, 2)


def test_no_hidden_value_comes_back_through_a_view_or_another_spelling(tmp_path, sqltrain, monkeypatch):
    """A view shows it under another name, a generated column holds a part of it, and a column is spelt anew."""
    monkeypatch.chdir(tmp_path)
    rows = ", ".join(f"('secret{number}', '{grade}', {number})" for number, grade in enumerate("QWQWQ"))
    build_database(
        "school.sqlite",
        "CREATE TABLE pupil (nick TEXT, grade TEXT, age INTEGER, tag TEXT AS (nick || '!'))",
        f"INSERT INTO pupil (nick, grade, age) VALUES {rows}",
        "CREATE VIEW summary AS SELECT lower(nick) AS handle, upper(grade) AS mark, age FROM pupil",
    )
    sqltrain.ok("connect", "school.sqlite")
    place = Path("databases/school.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    for name in ("nick", "grade"):
        known["tables"]["pupil"]["columns"][name] = {"type": "TEXT", "hidden": True}
    known["tables"]["pupil"]["columns"]["tag"] = {"type": "TEXT"}
    known["tables"]["summary"]["columns"] = {"age": {"type": "INTEGER"}}
    place.write_text(yaml.safe_dump(known), encoding="utf-8")
    with closing(sqlite3.connect("school.sqlite")) as connection:
        connection.execute("ALTER TABLE pupil RENAME COLUMN nick TO Nick")
    said = sqltrain.ok("connect", "school")
    assert "secret" not in place.read_text(encoding="utf-8")
    assert "holds codes" not in said
    assert "the card lacks" not in said
    tables = card.read(place).tables
    assert tables["pupil"].columns["age"].values == (0, 1, 2)
    assert tables["pupil"].columns["Nick"].hidden


def test_an_example_value_that_is_cut_ends_in_an_ellipsis(tmp_path, sqltrain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = f"('{'x' * 40}'), ('{'y' * 41}')"
    build_database("notes.sqlite", "CREATE TABLE note (body TEXT)", f"INSERT INTO note VALUES {values}")
    sqltrain.ok("connect", "notes.sqlite")
    known = card.read(Path("databases/notes.yaml")).tables["note"].columns["body"]
    assert known.values == ("x" * 40, "y" * 39 + "…")


def test_descriptions_of_what_is_gone_are_named(shop, sqltrain):
    sqltrain.ok("connect", "shop.sqlite")
    place = Path("databases/shop.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    known["tables"]["purchase"]["description"] = "one row an order"
    known["tables"]["customer"]["columns"]["city"]["synonyms"] = ["town"]
    known["tables"]["customer"]["columns"]["email"] |= {"hidden": True, "description": "private"}
    place.write_text(yaml.safe_dump(known), encoding="utf-8")
    with closing(sqlite3.connect(shop)) as database:
        database.executescript("DROP VIEW mails; DROP VIEW broken; DROP TABLE purchase")
        database.executescript("ALTER TABLE customer DROP COLUMN city; ALTER TABLE customer DROP COLUMN email")
    said = " ".join(sqltrain.ok("connect", "shop").split())
    assert "so the card loses their descriptions and synonyms: customer.city, purchase" in said
    assert "so the card loses" not in sqltrain.ok("connect", "shop")


def test_notes_that_prompts_do_not_show_to_the_end_are_told(shop, sqltrain, caplog):
    sqltrain.ok("connect", "shop.sqlite")
    place = Path("databases/shop.yaml")
    known = yaml.safe_load(place.read_text(encoding="utf-8"))
    for length in (4_000, 4_001):
        place.write_text(yaml.safe_dump({**known, "notes": length * "n"}), encoding="utf-8")
        card.read(place)
    (told,) = (record.getMessage() for record in caplog.records if "notes" in record.getMessage())
    assert told == "databases/shop.yaml: its notes have 4,001 characters; prompts show the first 4,000"


def test_tables_that_were_not_read_in_time_are_named(shop, sqltrain, monkeypatch):
    monkeypatch.setattr(catalogue, "SECONDS", -1.0)
    said = " ".join(sqltrain.ok("connect", "shop.sqlite").split())
    assert "at least 0 rows" in said
    assert "customer: the card lacks its example values and the number of its rows" in said


@pytest.mark.parametrize(
    "command", [["connect"], ["mcp"], ["ask", "q", "--database"], ["invent", "--model", "t", "--database"]]
)
@pytest.mark.parametrize(
    ("database", "message"),
    [
        ("own.csv", "own.csv is not an SQLite or DuckDB file"),
        ("none.sqlite", "no such database: none.sqlite"),
        ("mysql://u:pw@localhost:1/", "the address names no database"),
        ("postgresql://u:pw@[x/y", "not an address"),
    ],
)
def test_a_wrong_database_is_one_plain_line(command, database, message, shop, sqltrain):  # fmt: skip
    Path("own.csv").write_text("a,b\n1,2\n")
    code, _, err = sqltrain(*command, database)
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err
    assert "pw" not in err


def test_connect_ends_with_a_command_that_works_and_an_endpoint_speaks_sql_trails_protocol(shop, monkeypatch, sqltrain):
    asked = []
    monkeypatch.setattr(use, "ask_model", lambda recipe, *_: asked.append(recipe))
    file = Path("endpoints.yaml")
    monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(file))
    _, out, _ = sqltrain("connect", "shop.sqlite")
    assert "sqltrain mcp shop serves the SQL tool" in " ".join(out.split())
    file.write_text("big: {base_url: 'http://127.0.0.1:9/v1', model: m}\n")
    _, out, _ = sqltrain("connect", "shop.sqlite")
    command = ["ask", "...", "--database", "shop", "--model", "endpoint:big"]
    assert f'sqltrain ask "..." {" ".join(command[2:])}' in " ".join(out.split())
    assert sqltrain(*command)[0] == 0
    sqltrain(*command, "--recipe", "miniature")
    assert [recipe.name for recipe in asked] == ["sql_trail", "miniature"]
    with pytest.raises(DataError) as untrained:
        newest_model(asked[0], Store(Path("store")))
    assert untrained.value.hint.startswith("Name a checkpoint folder, champion:RECIPE or (to ask) endpoint:NAME")


def test_a_card_with_a_mistake_is_named(shop):
    card.FOLDER.mkdir()
    card.path_of("shop").write_text("engine: sqlite\nlocation: shop.sqlite\ntables: {a: {hiden: true}}\n")
    with pytest.raises(DataError, match=r"shop\.yaml: tables\.a\.hiden: Extra inputs"):
        named.find("shop")


def test_a_password_is_taken_out_and_put_in_from_a_variable(monkeypatch):
    for given in ("mysql://me:p%40ss@host:3306/shop", "mysql://me@host:3306/shop?password=p%40ss"):
        assert addresses.split_password(given) == ("mysql://me@host:3306/shop", "p@ss")
    assert addresses.driver_address("mysql://me@host/shop", "mysql", "p@ss") == "mysql://me:p%40ss@host/shop"
    assert "password=p@ss" in addresses.driver_address("postgresql://me@host/shop", "postgres", "p@ss")
    monkeypatch.delenv("SHOP_PASSWORD", raising=False)
    with pytest.raises(ResourceError, match="SHOP_PASSWORD is not set"):
        addresses.password_of("mysql", "SHOP_PASSWORD")
    given = "postgresql://me@host/shop?sslkey=k&sslpassword=hunter2"
    with pytest.raises(DataError, match="the address holds a secret, sslpassword") as refused:
        addresses.split_password(given)
    assert "hunter2" not in str(refused.value)
    assert addresses.split_password("postgresql://me@host/shop?passfile=p")[0] == "postgresql://me@host/shop?passfile=p"


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "postgres", "postgresql"])
@pytest.mark.parametrize("raw", ["#1", "p@#1", "p/w", "p@ss/w", "1/2", "p?w", "p@?w", "p[w", "p]w", "p@h:9/w", "/@"])
def test_a_raw_sign_of_a_password_is_named_at_once_with_its_remedy(scheme, raw, sqltrain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = sqltrain.refused("connect", f"{scheme}://me:{raw}@127.0.0.1:1/shop")
    assert "holds a raw sign" in error
    assert "Write @ as %40" in error
    assert has_password(f"{scheme}://me:{raw}@127.0.0.1:1/shop")
    written = f"{scheme}://me:{quote(raw, safe='')}@127.0.0.1:1/shop"
    assert addresses.split_password(written) == (f"{scheme}://me@127.0.0.1:1/shop", raw)


@pytest.mark.parametrize("raw", ["p@w", "@", "p:w", "p%w", "p w", "p&w=1", "pä"])
def test_a_sign_of_a_password_that_ends_nothing_is_read(raw):
    assert addresses.split_password(f"mysql://me:{raw}@h:1/shop") == ("mysql://me@h:1/shop", raw)


@pytest.mark.parametrize("text", ["postgresql://h:5432/shop?user=a@b", "mysql://me@h/shop", "see http://x.org/@me"])
def test_a_sign_where_it_belongs_is_no_password(text):
    assert not has_password(text)


def test_text_that_looks_like_a_number_stays_text(tmp_path, monkeypatch):
    """Postcodes, months, and columns that are called by them."""
    monkeypatch.chdir(tmp_path)
    texts = ["01890", "08", "09", "1e5", "7e10", "0.10", "12", "1_000", "0x1F", "yes", ".5", "5."]
    with closing(sqlite3.connect(tmp_path / "post.sqlite")) as connection, connection:
        connection.execute('CREATE TABLE place (zip TEXT, "09" TEXT)')
        connection.executemany("INSERT INTO place VALUES (?, ?)", [(text, text) for text in texts[:3]])
    use.connect("post.sqlite")
    known = card.read(card.path_of("post")).tables["place"].columns
    assert known["zip"].values == known["09"].values == ("01890", "08", "09")
    each = {text: text for text in texts}
    (tmp_path / "each.yaml").write_text(yaml_files.yaml_text(each))
    assert yaml_files.read_yaml(tmp_path / "each.yaml") == each


def test_a_file_can_be_connected_again_by_its_name(shop, capsys):
    def connected(text):
        use.connect(text, json_output=True)
        return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))

    first = connected("shop.sqlite")
    for text in ("shop.sqlite", "./shop.sqlite", str(shop), "shop"):
        assert connected(text)["card"] == first["card"]
    Path("databases/shop.yaml").rename("databases/mine.yaml")
    for text in ("shop.sqlite", "./shop.sqlite"):
        assert connected(text)["name"] == "mine"
    assert [path.name for path in Path("databases").iterdir()] == ["mine.yaml"]


def test_findings_are_few_on_a_plain_table():
    table = Table(
        "orders",
        (Column("id", "INTEGER", True), Column("customer_id", "INTEGER")),
        (ForeignKey("customer_id", "customer", "id"),),
    )
    other = Table("customer", (Column("id", "INTEGER", True), Column("cst_nm", "TEXT")))
    samples = {"orders": {"id": [1, 2, 3, 4], "customer_id": [1, 1, 1, 2]}, "customer": {"cst_nm": ["Ada", "Bob"]}}
    found = find_problems(Schema((table, other)), samples, {"orders": 4, "customer": 2})
    assert [(one.kind, one.where) for one in found] == [("cryptic name", "customer.cst_nm")]


@pytest.mark.services
def test_a_role_that_can_write_is_refused_with_the_grants(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[1] / "sql"))
    from servers import binaries, make_reader, postgres

    programs = binaries() or pytest.skip("PostgreSQL's programs are not installed")

    def run(address, *more, **environment):
        command = [sys.executable, "-m", "flows.cli", "connect", address, *more]
        paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **paths, **environment}, capture_output=True, text=True
        )

    with postgres(programs) as admin:
        import psycopg

        make_reader(programs, admin, "reader", "secret")
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute("CREATE TABLE item (id int PRIMARY KEY, name text); INSERT INTO item VALUES (1, 'pen')")
            connection.execute(
                "COMMENT ON COLUMN item.name IS 'as on the label'; GRANT USAGE ON SCHEMA public TO reader"
            )
            connection.execute("GRANT SELECT ON item TO reader; CREATE ROLE writer LOGIN PASSWORD 'w'")
            connection.execute("GRANT CONNECT ON DATABASE postgres TO writer; GRANT USAGE ON SCHEMA public TO writer")
            connection.execute("GRANT SELECT, INSERT ON item TO writer; CREATE ROLE editor LOGIN PASSWORD 'e'")
            connection.execute("GRANT CONNECT ON DATABASE postgres TO editor; GRANT USAGE ON SCHEMA public TO editor")
            connection.execute("CREATE SCHEMA sales; CREATE TABLE sales.bill (id int, note text)")
            connection.execute("GRANT UPDATE (note) ON sales.bill TO editor")
            connection.execute("CREATE MATERIALIZED VIEW totals AS SELECT count(*) AS n FROM item")
            connection.execute("GRANT SELECT ON totals TO reader")
        port = admin.partition("port=")[2].partition(" ")[0]
        host = f"127.0.0.1:{port}/postgres"
        refused = run(f"postgresql://owner@{host}")
        assert refused.returncode == 2
        assert 'GRANT SELECT ON ALL TABLES IN SCHEMA "public" TO "postgres_reader";' in refused.stdout
        writer = run(f"postgresql://writer:w@{host}")
        assert (writer.returncode, "write to item" in writer.stdout) == (2, True)
        editor = run(f"postgresql://editor:e@{host}")  # columns alone, in another schema
        assert (editor.returncode, "write to sales.bill" in editor.stdout) == (2, True)
        assert not (tmp_path / "databases").exists()
        assert run(f"postgresql://writer:w@{host}", "--allow-writes", "--name", "open").returncode == 0
        done = run(f"postgresql://reader:secret@{host}", "--name", "items")
        assert done.returncode == 0, done.stderr
        known = (tmp_path / "databases" / "items.yaml").read_text()
        assert "secret" not in known
        assert "password_env: ITEMS_PASSWORD" in known
        assert "as on the label" in known
        assert yaml.safe_load(known)["tables"]["totals"]["columns"] == {"n": {"type": "BIGINT", "values": [1]}}
        assert run("items", ITEMS_PASSWORD="secret").returncode == 0
        assert "ITEMS_PASSWORD is not set" in run("items").stderr


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('connection failed: FATAL:  password authentication failed for user "me"', "refuses this user or password"),
        ("(1045, \"Access denied for user 'me'@'host' (using password: YES)\")", "refuses this user or password"),
        ('FATAL:  database "shop" does not exist', "no such database or user"),
        ("connection to server at 127.0.0.1, port 1 failed: Connection refused", "does not answer"),
        ("something with hunter2 in it", "ValueError"),
    ],
)
def test_why_a_server_cannot_be_used_is_said_without_its_own_text(said, reason):
    assert addresses.why_unreachable(ValueError(said)).endswith(reason)
