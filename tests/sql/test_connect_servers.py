"""`sqltrain connect` on real servers: rights that are too many, partitions, names, the server's own SQL mode."""

import contextlib
import re
from pathlib import Path
from urllib.parse import quote

import psycopg
import pymysql
import pytest
from servers import binaries, make_reader

from pipelines.core.types import Database
from pipelines.databases import card
from pipelines.sql import analyst
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, introspect, render

pytestmark = pytest.mark.services


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    return tmp_path


@pytest.fixture
def mariadb_admin(mysql_port):
    owner = pymysql.connect(host="127.0.0.1", port=mysql_port, user="owner", autocommit=True)
    with contextlib.closing(owner), owner.cursor() as cursor:
        yield cursor.execute


@pytest.fixture
def postgres_admin(server):
    with psycopg.connect(server.admin, autocommit=True) as connection:
        yield lambda sql: connection.execute(sql.encode())


def postgres_address(server, user="reader:secret"):
    port = re.findall("port=([0-9]+)", server.admin)[0]
    return f"postgresql://{user}@127.0.0.1:{port}/postgres"


def revocations(output):
    return [line.strip() for line in output.splitlines() if line.strip().startswith("REVOKE")]


def test_the_remedy_for_rights_of_mariadbs_public_is_to_revoke_them(mariadb_admin, mysql_port, sqltrain, folder):
    """The installer of MariaDB gives everyone all rights of the databases `test` and `test_...`."""
    address = f"mysql://plain:secret@127.0.0.1:{mysql_port}/ware"
    for statement in (
        "CREATE DATABASE ware",
        "CREATE TABLE ware.item (`the id` int PRIMARY KEY)",
        "CREATE USER plain@'%' IDENTIFIED BY 'secret'",
        "GRANT SELECT, SHOW VIEW ON ware.* TO plain@'%'",
        "GRANT ALL ON test.* TO PUBLIC",
        r"GRANT ALL ON `test\_%`.* TO PUBLIC",
        "GRANT SELECT, INSERT (`the id`), DELETE ON ware.item TO PUBLIC WITH GRANT OPTION",
    ):
        mariadb_admin(statement)
    code, out, err = sqltrain("connect", address)
    assert (code, "refuses a role with such rights" in err) == (2, True)
    assert "CREATE USER" not in out  # a new user would have these rights, too
    assert sorted(revocations(out)) == [
        r"REVOKE ALL PRIVILEGES ON `test\_%`.* FROM PUBLIC;",
        "REVOKE ALL PRIVILEGES ON `test`.* FROM PUBLIC;",
        "REVOKE INSERT (`the id`), DELETE, GRANT OPTION ON `ware`.`item` FROM PUBLIC;",
    ]
    mariadb_admin("GRANT INSERT ON ware.* TO plain@'%'")
    assert "CREATE USER" in sqltrain("connect", address)[1]
    mariadb_admin("REVOKE INSERT ON ware.* FROM plain@'%'")
    for statement in revocations(out):
        mariadb_admin(statement)
    sqltrain.ok("connect", address)


def test_the_remedy_for_rights_of_postgresqls_public_is_to_revoke_them(server, postgres_admin, sqltrain, folder):
    for statement in (
        'CREATE SCHEMA "Ware"; GRANT USAGE ON SCHEMA "Ware" TO reader',
        'CREATE TABLE "Ware".item (id int, "a b" int); CREATE TABLE "Ware".bill (id int)',
        'GRANT ALL ON "Ware".item TO PUBLIC; GRANT SELECT, UPDATE (id) ON "Ware".bill TO PUBLIC',
    ):
        postgres_admin(statement)
    words = ("connect", postgres_address(server), "--schema", "Ware", "--name", "ware")
    try:
        code, out, err = sqltrain(*words)
        assert (code, "this role may write" in err) == (2, True)
        assert "CREATE ROLE" not in out
        assert revocations(out) == [
            'REVOKE UPDATE (id) ON "Ware".bill FROM PUBLIC;',
            'REVOKE DELETE, INSERT, TRUNCATE, UPDATE ON "Ware".item FROM PUBLIC;',
        ]
        for statement in revocations(out):
            postgres_admin(statement)
        sqltrain.ok(*words)
    finally:
        postgres_admin('DROP SCHEMA "Ware" CASCADE')


def test_a_partitioned_table_is_one_table_with_a_word_that_it_has_partitions(server, postgres_admin, sqltrain, folder):
    """Partitions of partitions too, some of another schema; a key to the table is no key to its partitions."""
    for statement in (
        "CREATE SCHEMA metered; CREATE SCHEMA metered_parts",
        "CREATE TABLE metered.reading (id int, month int, PRIMARY KEY (id, month)) PARTITION BY LIST (month)",
        *(f"CREATE TABLE metered.reading_{n} PARTITION OF metered.reading FOR VALUES IN ({n})" for n in range(1, 12)),
        "CREATE TABLE metered_parts.december PARTITION OF metered.reading FOR VALUES IN (12) PARTITION BY HASH (id)",
        "CREATE TABLE metered_parts.d0 PARTITION OF metered_parts.december FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE metered_parts.d1 PARTITION OF metered_parts.december FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "COMMENT ON TABLE metered.reading IS 'what meters show'",
        "CREATE TABLE metered.note (reading int, month int,"
        " FOREIGN KEY (reading, month) REFERENCES metered.reading (id, month))",
        "GRANT USAGE ON SCHEMA metered, metered_parts TO reader",
        "GRANT SELECT ON ALL TABLES IN SCHEMA metered, metered_parts TO reader",
        "INSERT INTO metered.reading SELECT n, 1 + n % 12 FROM generate_series(1, 30) n",
    ):
        postgres_admin(statement)
    try:
        both = ("--schema", "metered", "--schema", "metered_parts", "--name", "both")
        sqltrain.ok("connect", postgres_address(server), *both)
        tables = card.read(folder / "databases" / "both.yaml").tables
        assert list(tables) == ["note", "reading"]
        assert (tables["reading"].description, tables["reading"].rows) == ("what meters show; has 13 partitions", 30)
        pairs = [(key.column, key.to_table, key.to_column) for key in tables["note"].references]
        assert pairs == [("reading", "reading", "id"), ("month", "reading", "month")]
        located = f"{server.reader} options=-csearch_path=metered"
        shown = render(introspect(Database("metered", "postgres", located)), "ddl")
        assert shown.count("CREATE TABLE") == 2
        assert "CREATE TABLE reading ( -- has 13 partitions" in shown
        # Where their table is not shown, the partitions are all that there is of its rows.
        parts = Database("parts", "postgres", f"{server.reader} options=-csearch_path=metered_parts")
        found = [(table.name, table.description) for table in introspect(parts).tables]
        assert found == [("december", "has 2 partitions")]
        postgres_admin("REVOKE SELECT ON metered.reading FROM reader")
        tables = introspect(Database("metered", "postgres", located)).tables
        assert [table.name for table in tables] == ["note", *sorted(f"reading_{n}" for n in range(1, 12))]
    finally:
        postgres_admin("DROP SCHEMA metered, metered_parts CASCADE")


def test_names_that_differ_in_case_are_two_tables_of_postgresql(server, postgres_admin, sqltrain, folder):
    for statement in (
        "CREATE SCHEMA cased; GRANT USAGE ON SCHEMA cased TO reader",
        'CREATE TABLE cased.artist (id int PRIMARY KEY); CREATE TABLE cased."Artist" ("Id" int PRIMARY KEY, id int)',
        'CREATE TABLE cased.song (a int REFERENCES cased.artist, b int REFERENCES cased."Artist")',
        """COMMENT ON TABLE cased."Artist" IS 'the upper one'; COMMENT ON COLUMN cased."Artist"."Id" IS 'its key'""",
        "GRANT SELECT ON ALL TABLES IN SCHEMA cased TO reader",
    ):
        postgres_admin(statement)
    try:
        sqltrain.ok("connect", postgres_address(server), "--schema", "cased", "--name", "cased")
        known = card.read(folder / "databases" / "cased.yaml")
        tables = {table.name: table for table in known.shown().tables}
        assert tables["song"].foreign_keys == (ForeignKey("a", "artist", "id"), ForeignKey("b", "Artist", "Id"))
        assert [tables[name].description for name in ("artist", "Artist")] == ["", "the upper one"]
        described = [(column.name, column.description) for column in tables["Artist"].columns]
        assert described == [("Id", "its key"), ("id", "")]
    finally:
        postgres_admin("DROP SCHEMA cased CASCADE")


def test_columns_that_a_role_may_not_read_are_in_no_card_and_no_prompt(server, postgres_admin, sqltrain, folder):
    for statement in (
        "CREATE SCHEMA clinic; GRANT USAGE ON SCHEMA clinic TO reader",
        "CREATE TABLE clinic.patient (id int PRIMARY KEY, name text, illness text); CREATE TABLE clinic.bill (id int)",
        "INSERT INTO clinic.patient VALUES (1, 'Ada', 'secret'), (2, 'Bo', 'secret')",
        "GRANT SELECT (id, name) ON clinic.patient TO reader",
    ):
        postgres_admin(statement)
    try:
        sqltrain.ok("connect", postgres_address(server), "--schema", "clinic", "--name", "clinic")
        known = card.read(folder / "databases" / "clinic.yaml")
        assert {name: list(table.columns) for name, table in known.tables.items()} == {"patient": ["id", "name"]}
        assert (known.tables["patient"].rows, known.tables["patient"].columns["name"].values) == (2, ("Ada", "Bo"))
        database = Database("clinic", "postgres", f"{server.reader} options=-csearch_path=clinic")
        assert "illness" not in render(introspect(database, 3), "ddl")
        with SqlEngine(Limits(timeout_s=5)) as sql:
            queries = ["SELECT name FROM patient WHERE id = 1", "SELECT illness FROM patient", "SELECT * FROM patient"]
            results = sql.execute_many([(database, query) for query in [*queries, "SELECT id FROM bill"]])
        assert [result.error_class for result in results] == [None] + ["not_authorized"] * 3
        assert results[0].rows == (("Ada",),)
    finally:
        postgres_admin("DROP SCHEMA clinic CASCADE")


ODD_PASSWORD = "p@s:s/w%41?#[é] +&="


def check_encoded_password(address, engine_name, sqltrain, folder, monkeypatch):
    """Connect by an address with the password, by its card with the password in a variable, and by a wrong password."""
    encoded = quote(ODD_PASSWORD, safe="")
    right = address.format(encoded)
    wrong = address.format(f"{encoded}x")
    sqltrain.ok("connect", right, "--name", "locked")
    path = folder / "databases" / "locked.yaml"
    assert list(card.read(path).tables) == ["chest"]
    text = path.read_text(encoding="utf-8")
    assert ODD_PASSWORD not in text
    assert encoded not in text
    monkeypatch.setenv("LOCKED_PASSWORD", ODD_PASSWORD)
    sqltrain.ok("connect", "locked")
    assert "refuses this user or password" in sqltrain.refused("connect", wrong, "--name", "other")
    with SqlEngine(Limits(timeout_s=5)) as sql:
        jobs = [(Database("locked", engine_name, each), "SELECT id FROM chest") for each in (right, wrong)]
        opened, refused = sql.execute_many(jobs)
    assert (opened.rows, refused.ok) == (((5,),), False)


def test_an_encoded_password_is_the_one_that_postgresql_gets(server, postgres_admin, sqltrain, folder, monkeypatch):
    """This role is asked for its password, unlike the others of this server."""
    make_reader(binaries(), server.admin, "keyed", ODD_PASSWORD)
    (rules,) = postgres_admin("SHOW hba_file").fetchone()
    rules_file = Path(rules)
    rules_file.write_text("host all keyed all scram-sha-256\n" + rules_file.read_text())
    for statement in (
        "SELECT pg_reload_conf()",
        "CREATE SCHEMA keys; CREATE TABLE keys.chest (id int); INSERT INTO keys.chest VALUES (5)",
        "GRANT USAGE ON SCHEMA keys TO keyed; GRANT SELECT ON keys.chest TO keyed",
    ):
        postgres_admin(statement)
    address = postgres_address(server, "keyed:{}") + "?options=-csearch_path%3Dkeys"
    try:
        check_encoded_password(address, "postgres", sqltrain, folder, monkeypatch)
    finally:
        postgres_admin("DROP SCHEMA keys CASCADE; DROP OWNED BY keyed; DROP ROLE keyed")


def test_an_encoded_password_is_the_one_that_mariadb_gets(mariadb_admin, mysql_port, sqltrain, folder, monkeypatch):
    for statement in (
        "CREATE DATABASE locked",
        "CREATE TABLE locked.chest (id int PRIMARY KEY)",
        "INSERT INTO locked.chest VALUES (5)",
        f"CREATE USER keyed@'%' IDENTIFIED BY '{ODD_PASSWORD}'",
        "GRANT SELECT, SHOW VIEW ON locked.* TO keyed@'%'",
    ):
        mariadb_admin(statement)
    address = f"mysql://keyed:{{}}@127.0.0.1:{mysql_port}/locked"
    check_encoded_password(address, "mysql", sqltrain, folder, monkeypatch)


def test_mariadbs_keys_and_views_that_do_not_run(mariadb_admin, mysql_port, sqltrain, folder):
    for statement in (
        "CREATE DATABASE tune; CREATE DATABASE elsewhere",
        "CREATE TABLE elsewhere.artist (id int PRIMARY KEY)",
        "CREATE TABLE tune.Artist (`Artist Id` int PRIMARY KEY)",
        "CREATE TABLE tune.artist (id int PRIMARY KEY)",
        "CREATE TABLE tune.song (A int, b int, c int, FOREIGN KEY (a) REFERENCES tune.Artist (`ARTIST ID`),"
        " FOREIGN KEY (B) REFERENCES tune.artist (ID), FOREIGN KEY (c) REFERENCES elsewhere.artist (id))",
        "CREATE TABLE tune.gone (id int)",
        "CREATE VIEW tune.broken AS SELECT id FROM tune.gone",
        "DROP TABLE tune.gone",
        "CREATE USER tuner@'%' IDENTIFIED BY 'secret'",
        "GRANT SELECT, SHOW VIEW ON tune.* TO tuner@'%'",
    ):
        for single in statement.split("; "):
            mariadb_admin(single)
    out = sqltrain.ok("connect", f"mysql://tuner:secret@127.0.0.1:{mysql_port}/tune")
    assert "broken: the view does not run" in out
    tables = {table.name: table for table in card.read(folder / "databases" / "tune.yaml").shown().tables}
    assert set(tables) == {"Artist", "artist", "song"}
    assert set(tables["song"].foreign_keys) == {ForeignKey("A", "Artist", "Artist Id"), ForeignKey("b", "artist", "id")}


OWN_GOLDS = {
    "": [  # MariaDB's and MySQL's own way, whatever else the mode holds
        ("SELECT 'a' || 'b'", 0),
        ('SELECT name FROM t WHERE name = "Zoë"', "Zoë"),
        (r"SELECT name FROM t WHERE name = 'O\'Brien'", "O'Brien"),
        (r'SELECT name FROM t WHERE name = "O\'Brien"', "O'Brien"),
        ('SELECT name FROM t WHERE name = "O\'Brien"', "O'Brien"),
        (r"SELECT 'tab\tend'", "tab\tend"),
        (r"SELECT count(*) FROM t WHERE name LIKE '50\%'", 1),
        (r"SELECT 'ends in \\', 1", "ends in \\"),
        ('SELECT `name` FROM `t` WHERE id = 1 # it\'s the "first"', "Zoë"),
        ('SELECT x"41" FROM (SELECT 7 AS x) AS s', 7),  # a column and its alias
        ("""SELECT 'a'"b" """, "ab"),
        ("SELECT name FROM t GROUP BY id % 1 ORDER BY id", "Zoë"),  # without ONLY_FULL_GROUP_BY
    ],
    "ANSI_QUOTES": [('SELECT "name" FROM "t" WHERE id = 1', "Zoë"), (r"SELECT 'O\'Brien'", "O'Brien")],
    "PIPES_AS_CONCAT": [("SELECT 'a' || \"b\"", "ab")],
    "NO_BACKSLASH_ESCAPES": [(r"SELECT 'a\'", "a\\"), (r'SELECT "a\tb"', r"a\tb"), ("SELECT 'a''b'", "a'b")],
    "ANSI": [('SELECT "name" || \'!\' FROM "t" WHERE id = 1', "Zoë!")],
    "HIGH_NOT_PRECEDENCE": [("SELECT NOT 1 BETWEEN -5 AND 5", 1)],
    "NO_UNSIGNED_SUBTRACTION": [("SELECT CAST(0 AS UNSIGNED) - 1", -1)],
    "EMPTY_STRING_IS_NULL": [("SELECT '' IS NULL", 1)],
}


@pytest.fixture(scope="module")
def own_golds(mysql_port):
    owner = pymysql.connect(host="127.0.0.1", port=mysql_port, user="owner", autocommit=True, charset="utf8mb4")
    with contextlib.closing(owner), owner.cursor() as cursor:
        cursor.execute("CREATE DATABASE golds CHARACTER SET utf8mb4")
        cursor.execute("CREATE TABLE golds.t (id int PRIMARY KEY, name text)")
        cursor.execute("INSERT INTO golds.t VALUES (1, 'Zoë'), (2, 'O''Brien'), (3, '50%')")
        cursor.execute("CREATE USER golds@'%' IDENTIFIED BY 'secret'")
        cursor.execute("GRANT SELECT ON golds.* TO golds@'%'")
        cursor.execute("SELECT @@global.sql_mode")
        ((before,),) = cursor.fetchall()
        yield f"mysql://golds:secret@127.0.0.1:{mysql_port}/golds", cursor
        cursor.execute("SET GLOBAL sql_mode = %s", (before,))


@pytest.mark.parametrize("mode", OWN_GOLDS)
@pytest.mark.parametrize("is_address", [False, True])
def test_a_statement_means_what_it_means_in_the_servers_own_mode_or_the_addresss(mode, is_address, own_golds):
    address, owner = own_golds
    other = "" if mode else "ANSI,ONLY_FULL_GROUP_BY,NO_BACKSLASH_ESCAPES"  # an address goes before the server's
    owner.execute("SET GLOBAL sql_mode = %s", (other if is_address else mode,))
    database = Database("golds", "mysql", f"{address}?sql_mode={mode}" if is_address else address)
    with SqlEngine(Limits(timeout_s=5, max_rows=10, memory_mb=256)) as sql:
        results = sql.execute_many([(database, query) for query, _ in OWN_GOLDS[mode]])
    answers = [(result.error, result.rows[0][0] if result.rows else None) for result in results]
    assert answers == [(None, value) for _, value in OWN_GOLDS[mode]]


HOSTILE = r"""
SELECT 'a\' , sleep(9) , 'b'
SELECT 'a\\' , sleep(9) , 'b\'
SELECT "a\" , sleep(9) , "b"
SELECT 'a' "\" , sleep(9) #"
SELECT "' , sleep(9) , '"  , sleep(9)
SELECT `a\` , sleep(9) , `b`
SELECT 'a\'' , sleep(9) -- '
SELECT 1 /*! , sleep(9) */
SELECT 1 --sleep(9)
SELECT 'a"' , sleep(9) , '"'
SELECT "a`" , sleep(9) , "`"
SELECT '\\\' , sleep(9) , '
"""


@pytest.mark.parametrize(
    "mode", ["", "ANSI_QUOTES", "NO_BACKSLASH_ESCAPES", "ANSI_QUOTES,NO_BACKSLASH_ESCAPES", "ORACLE"]
)
def test_no_quote_of_any_mode_hides_a_call(mode, own_golds):
    """A statement is refused, or the server takes the call for a text, as a reader of that mode does: none waits."""
    address, owner = own_golds
    owner.execute("SET GLOBAL sql_mode = %s", (mode,))
    queries = HOSTILE.strip().splitlines()
    with SqlEngine(Limits(timeout_s=2, max_rows=10, memory_mb=256)) as sql:
        results = sql.execute_many([(Database("golds", "mysql", address), query) for query in queries])
    assert [query for query, result in zip(queries, results, strict=True) if result.error_class == "timeout"] == []


def test_the_analysis_reads_the_mode_and_connect_says_which(own_golds, sqltrain, folder):
    address, owner = own_golds
    schema = Schema((Table("t", (Column("id", "INT"), Column("name", "TEXT"))),), "mysql")
    query = 'SELECT "id" FROM t WHERE name = "x" || "y"'
    names = {}
    for mode in ("", "ANSI_QUOTES", "ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES"):
        database = Database("golds", "mysql", f"{address}?sql_mode={mode}")
        reading = analyst.reading(database)
        (items,) = analyst.schema_items([(query, schema, reading)])
        names[reading] = sorted(column for _, column in items.columns)
    assert names == {
        "mysql": ["name"],
        "mysql_ansi": ["id", "name"],
        "mysql_ansi_pipes_raw": ["id", "name"],
    }
    owner.execute("SET GLOBAL sql_mode = 'ORACLE'")
    out = sqltrain.ok("connect", f"{address}?sql_mode=PIPES_AS_CONCAT")
    assert "SQL mode: the address's, PIPES_AS_CONCAT" in out
    assert "double quotes hold texts, || joins texts, a backslash in a text is an escape" in out
    out = sqltrain.ok("connect", address, "--name", "oracle")
    assert "SQL mode: the server's, " in out
    assert "left out, for the sandbox cannot read its grammar: NO_FIELD_OPTIONS" in out
    assert "sql_mode=ORACLE cannot be read here" in sqltrain.refused("connect", f"{address}?sql_mode=ORACLE")
    assert card.read(folder / "databases" / "golds.yaml").location.endswith("?sql_mode=PIPES_AS_CONCAT")
