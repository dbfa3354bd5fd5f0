"""Names of tables and columns are compared as their engine compares them."""

from pathlib import Path

import pytest

from pipelines.databases import card, named
from pipelines.recipe.config import Execution
from pipelines.sql.dialects.dialect import find_name
from pipelines.sql.schema import ForeignKey, render
from tests.fakes import build_database

MIXED = (
    "CREATE TABLE artist (artistid INTEGER PRIMARY KEY)",
    'CREATE TABLE "Die Straße" ("Der Weg" INTEGER, b INTEGER, PRIMARY KEY ("Der Weg", b))',
    "CREATE TABLE ci (id INTEGER PRIMARY KEY, a INT REFERENCES ARTIST(ArtistID), w INT, b INT,"
    ' FOREIGN KEY (W, B) REFERENCES "die straße" ("DER WEG", "B"))',
)


@pytest.mark.parametrize(
    ("engine", "name", "names", "match"),
    [
        ("sqlite", "ARTIST", ["artist", "other"], "artist"),
        ("sqlite", "STRASSE", ["straße"], None),
        ("sqlite", "Über", ["über"], None),  # SQLite knows the case of ASCII letters alone
        ("duckdb", "Artist", ["ARTIST"], "ARTIST"),
        ("postgres", "Artist", ["artist", "Artist"], "Artist"),
        ("postgres", "ARTIST", ["artist", "Artist"], "artist"),  # without quotes it is in lower case
        ("postgres", "artist", ["Artist"], None),
        ("mysql", "Artist", ["artist", "Artist"], "Artist"),  # a server on Linux tells them apart
        ("mysql", "ARTIST", ["artist", "Artist"], None),
        ("mysql", "ÜBER", ["über"], "über"),
    ],
)
def test_a_name_is_found_as_the_engine_finds_it(engine, name, names, match):
    assert find_name(name, names, engine) == match


@pytest.mark.parametrize("suffix", ["sqlite", "duckdb"])
def test_a_key_that_is_written_in_another_case_is_in_the_prompt(suffix, tmp_path, monkeypatch, sqltrain):
    monkeypatch.chdir(tmp_path)
    build_database(tmp_path / f"music.{suffix}", ";".join(MIXED))
    sqltrain.ok("connect", f"music.{suffix}")
    music = named.find("music")
    with music.sql(Execution()) as sql:
        schema = music.schema(sql)
    (keys,) = [table.foreign_keys for table in schema.tables if table.name == "ci"]
    assert set(keys) == {
        ForeignKey("a", "artist", "artistid"),
        ForeignKey("w", "Die Straße", "Der Weg"),
        ForeignKey("b", "Die Straße", "b"),
    }
    assert "FOREIGN KEY (a) REFERENCES artist(artistid)" in render(schema, "ddl")


def test_a_table_that_was_made_again_in_another_case_keeps_what_a_person_wrote():
    email = card.ColumnCard(description="work address", hidden=True)
    old = card.DatabaseCard(
        engine="sqlite",
        location="x",
        tables={"Customer": card.TableCard(description="ours", columns={"EMail": email, "Id": card.ColumnCard()})},
    )
    columns = {"email": card.ColumnCard(), "id": card.ColumnCard()}
    fresh = old.model_copy(update={"tables": {"customer": card.TableCard(columns=columns)}})
    merged = card.merge_cards(fresh, old)
    assert list(merged.tables) == ["customer"]
    assert merged.tables["customer"].description == "ours"
    assert merged.hidden == ((), {"customer": ("email",)})
    both = old.model_copy(update={"tables": {**old.tables, **fresh.tables}})  # of which the upper one is gone
    merged = card.merge_cards(fresh, both.model_copy(update={"engine": "postgres"}))
    assert merged.hidden == ((), {"Customer": ("EMail",)})


def test_a_view_that_does_not_run_is_named(tmp_path, monkeypatch, sqltrain):
    monkeypatch.chdir(tmp_path)
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE t (a INTEGER); CREATE VIEW broken AS SELECT b FROM gone;")
    out = " ".join(sqltrain.ok("connect", "shop.sqlite").split())
    assert "left out: 1" in out
    assert "broken: the view does not run, so it is left out: no such table: main.gone" in out
    assert "broken" not in Path("databases/shop.yaml").read_text()
