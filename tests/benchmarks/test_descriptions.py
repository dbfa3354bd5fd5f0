"""Schemas as the papers show them: with what tables and columns mean, wherever that is written."""

import json
import os
from pathlib import Path

import pytest

from pipelines.benchmarks.prompt_schema import describe, files
from pipelines.core.types import Database
from pipelines.databases.of_recipe import schemas
from pipelines.recipe import recipes
from pipelines.sql.schema import introspect, render
from tests.fakes import build_database

SHARED = Path(os.environ.get("SQLTRAIN_SHARED_DATA", "../shared/data"))


def made(path: Path) -> Database:
    return build_database(
        path,
        "CREATE TABLE frpm (CDSCode TEXT PRIMARY KEY, rtype TEXT, city TEXT)",
        "INSERT INTO frpm VALUES ('1', 'S', 'Paris')",
    )


def shown(database: Database, values: int = 0) -> list[str]:
    return render(describe(introspect(database, values), database), "ddl").splitlines()


def test_birds_csv_files(tmp_path: Path) -> None:
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


def test_spiders_natural_names_where_they_say_more(tmp_path: Path) -> None:
    database = made(tmp_path / "database" / "schools" / "schools.sqlite")
    entry = {
        "db_id": "schools",
        "table_names": ["free meals"],
        "table_names_original": ["frpm"],
        "column_names": [[-1, "*"], [0, "cds code"], [0, "record type"], [0, "city"]],
        "column_names_original": [[-1, "*"], [0, "CDSCode"], [0, "rtype"], [0, "city"]],
    }
    (tmp_path / "tables.json").write_text(json.dumps([entry]))
    assert shown(database) == [
        "CREATE TABLE frpm ( -- free meals",
        "    CDSCode TEXT PRIMARY KEY,",
        "    rtype TEXT, -- record type",
        "    city TEXT",
        ");",
    ]


def test_a_database_near_the_root_of_the_file_system_has_no_files_beside_it() -> None:
    assert list(files(Path("/shop.sqlite"))) == []


def test_a_file_that_is_broken_describes_nothing(tmp_path: Path) -> None:
    database = made(tmp_path / "database" / "schools" / "schools.sqlite")
    (tmp_path / "tables.json").write_text('[{"db_id": "schools", "table_names": 5}]')
    assert shown(database) == render(introspect(database), "ddl").splitlines()


def test_duckdbs_comments(tmp_path: Path) -> None:
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
def test_a_recipe_shows_column_descriptions_where_its_paper_does(name: str, wanted: bool, tmp_path: Path) -> None:
    database = made(tmp_path / "database" / "schools" / "schools.sqlite")
    columns = [[-1, "*"], [0, "cds"], [0, "record type"], [0, "city"]]
    entry = {"db_id": "schools", "table_names": ["frpm"], "table_names_original": ["frpm"], "column_names": columns}
    originals = {"column_names_original": [[-1, "*"], [0, "CDSCode"], [0, "rtype"], [0, "city"]]}
    (tmp_path / "tables.json").write_text(json.dumps([entry | originals]))
    text = render(schemas(recipes.load(name))(database), "ddl")
    assert ("record type" in text) == wanted


@pytest.mark.skipif(not (SHARED / "spider").is_dir(), reason="no shared data")
def test_real_benchmarks() -> None:
    def column(benchmark: str, name: str, table: int, at: int) -> str:
        database = Database(name, "sqlite", str(SHARED / benchmark / "database" / name / f"{name}.sqlite"))
        return describe(introspect(database), database).tables[table].columns[at].description

    assert column("spider", "college_2", 1, 0) == "department name"
    assert column("spider", "college_2", 1, 1) == ""
    assert column("kaggledbqa", "GeoNuclearData", 0, 4) == "the country of the nuclear_power_plants"
