"""What a prompt shows of a database beside its schema: descriptions of columns, and values that a question names."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from pipelines.benchmarks.prompt_schema import (
    ValueIndex,
    closeness,
    describe,
    description_files,
    retrieve,
    with_question_values,
)
from pipelines.core.types import Database, Example
from pipelines.databases.of_recipe import schemas
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.sql.schema import introspect, render
from tests.fakes import build_database, engine_fixture

sql = engine_fixture("module", timeout_s=0.3)
SHARED = Path(os.environ.get("SQLTRAIN_SHARED_DATA", "../shared/data"))


def tables_of_spider(folder, table, columns):
    """Spider's tables.json beside its folder of databases, with natural names of the table and of its columns."""
    entry = {"db_id": "schools", "table_names": [table], "table_names_original": ["frpm"]}
    for kind, names in (("column_names", columns), ("column_names_original", ["CDSCode", "rtype", "city"])):
        entry[kind] = [[-1, "*"], *([0, name] for name in names)]
    (folder / "tables.json").write_text(json.dumps([entry]))
    return made(folder / "database" / "schools" / "schools.sqlite")


def made(path):
    return build_database(
        path,
        "CREATE TABLE frpm (CDSCode TEXT PRIMARY KEY, rtype TEXT, city TEXT)",
        "INSERT INTO frpm VALUES ('1', 'S', 'Paris')",
    )


def shown(database, values=0):
    return render(describe(introspect(database, values), database), "ddl").splitlines()


def test_birds_csv_files(tmp_path):
    """A link to the database, as the data stage makes them, leads to the files beside the database itself."""
    database = made(tmp_path / "dev_databases" / "schools" / "schools.sqlite")
    folder = tmp_path / "dev_databases" / "schools" / "database_description"
    folder.mkdir()
    head = "original_column_name,column_name,column_description,data_format,value_description\n"
    rows = "CDSCode,CDSCode,CDSCode,text,\nrtype,,rtype,text,unuseful\ncity,city,the city\x92s name,text,\n"
    (folder / "frpm.csv").write_bytes((head + rows).encode("cp1252", "replace").replace(b"?s", b"\x92s"))
    os.symlink(database.location, tmp_path / "link.sqlite")
    linked = Database("schools", "sqlite", str(tmp_path / "link.sqlite"))
    assert shown(linked, 1) == [
        "CREATE TABLE frpm (",
        "    CDSCode TEXT PRIMARY KEY, -- e.g. '1'",
        "    rtype TEXT, -- unuseful; e.g. 'S'",
        "    city TEXT -- the city\u2019s name; e.g. 'Paris'",
        ");",
    ]


def test_spiders_natural_names_where_they_say_more(tmp_path):
    assert shown(tables_of_spider(tmp_path, "free meals", ["cds code", "record type", "city"])) == [
        "CREATE TABLE frpm ( -- free meals",
        "    CDSCode TEXT PRIMARY KEY,",
        "    rtype TEXT, -- record type",
        "    city TEXT",
        ");",
    ]


def test_broken_files_and_a_database_near_the_root_describe_nothing(tmp_path, caplog):
    assert list(description_files(Path("/shop.sqlite"))) == []
    database = made(tmp_path / "database" / "schools" / "schools.sqlite")
    (tmp_path / "tables.json").write_text('[{"db_id": "schools", "table_names": 5}, 7]')
    assert shown(database) == render(introspect(database), "ddl").splitlines()
    assert "2 entries are malformed, so their natural names are not shown; the first named: schools" in caplog.text


def test_duckdbs_comments(tmp_path):
    build_database(
        tmp_path / "a.duckdb",
        "CREATE TABLE t (a INTEGER, b TEXT)",
        "COMMENT ON TABLE t IS 'all of it'",
        "COMMENT ON COLUMN t.b IS 'the second\none'",
    )
    lines = shown(Database("a", "duckdb", str(tmp_path / "a.duckdb")))
    assert lines[0] == "CREATE TABLE t ( -- all of it"
    assert "    b VARCHAR -- the second one" in lines


@pytest.mark.parametrize(("name", "wanted"), [("skyrl_sql", True), ("mtir_sql", True), ("sql_trail", False)])
def test_a_recipe_shows_column_descriptions_where_its_paper_does(name, wanted, tmp_path):
    database = tables_of_spider(tmp_path, "frpm", ["cds", "record type", "city"])
    assert ("record type" in render(schemas(recipes.load(name))(database), "ddl")) == wanted


@pytest.mark.skipif(not (SHARED / "spider").is_dir(), reason="no shared data")
def test_real_benchmarks():
    def column(benchmark, name, table, at):
        database = Database(name, "sqlite", str(SHARED / benchmark / "database" / name / f"{name}.sqlite"))
        return describe(introspect(database), database).tables[table].columns[at].description

    assert column("spider", "college_2", 1, 0) == "department name"
    assert column("spider", "college_2", 1, 1) == ""
    assert column("kaggledbqa", "GeoNuclearData", 0, 4) == "the country of the nuclear_power_plants"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("databases") / "world.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE country (id INTEGER PRIMARY KEY, name TEXT, region TEXT, area REAL)")
        names = ["French Guiana", "France", "San Marino", "St. John's", 'a "b" c', "x" * 90]
        connection.executemany("INSERT INTO country (name, region) VALUES (?, 'Western Europe')", [(n,) for n in names])
        connection.execute("CREATE TABLE city (name TEXT, country TEXT, note)")
        connection.executemany("INSERT INTO city VALUES (?, 'France', ?)", [("Paris", 5), ("Lyon", b"x"), (None, "")])
    connection.close()
    return Database("world", "sqlite", str(path))


@pytest.fixture(scope="module")
def schema(database):
    return introspect(database)


def test_closeness_is_the_share_that_stands_in_the_question():
    assert closeness("France", "cities of FRANCE?") == 1.0
    assert closeness("Western Europe", "countries in Europe") == 8 / 14  # "n europe"
    assert closeness("abcd", "wxyz") == 0.0
    assert recipes.load("mtir_sql").data.values == 6
    assert recipes.load("mini_mtir_sql").data.values == 0


def test_the_likeliest_come_first_with_their_columns(database, schema, sql):
    """Prose, a number and an empty text are no values."""
    with ValueIndex(database, schema, sql) as index:
        assert len(index) == 5 + 1 + 2  # names, the region, cities; France is in two columns
        found = index.find("Which cities of france does San Marino trade with?", 5)
        assert found == [("San Marino", [("country", "name")]), ("France", [("country", "name"), ("city", "country")])]
        assert index.find("Which cities of france does San Marino trade with?", 1)[0][0] == "San Marino"
        assert index.find("countries of western europe", 3) == [("Western Europe", [("country", "region")])]
        assert index.find('what is a "b" c, st. john\'s?', 2)[0][0] == "St. John's"
        assert index.find("how many are there?", 5) == []


def test_a_view_that_never_ends_has_no_values(tmp_path, sql):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n WHERE i = 2"
    table = "CREATE TABLE t (a TEXT); INSERT INTO t VALUES ('Paris')"
    database = build_database(tmp_path / "a.sqlite", table, f"CREATE VIEW v AS {endless}")
    with ValueIndex(database, introspect(database), sql) as index:
        assert index.find("in paris?", 5) == [("Paris", [("t", "a")])]


def test_a_prompt_shows_matching_values_first(database, sql):
    schema = introspect(database, 2)
    example = Example("q", "Which city of France is it?", database, "SELECT 1")
    (made,) = retrieve([example], 5, lambda _: schema, sql)
    assert made.meta["values"] == [["country", "name", "France"], ["city", "country", "France"]]
    assert with_question_values(made, schema).tables[0].columns[1].values == ("France", "French Guiana")
    assert with_question_values(example, schema) == schema
    text = "\n".join(text for _, text in build_protocol(recipes.load("mtir_sql").protocol).prompt(made, schema, 6))
    assert "name TEXT, -- e.g. 'France', 'French Guiana'" in text
