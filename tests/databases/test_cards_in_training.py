"""A recipe on a database that a card describes: nothing hidden in what its stages keep, and the card in their keys."""

import ast
import json
from pathlib import Path

import pytest
import yaml

from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.core.types import Database
from pipelines.databases import card, named
from pipelines.databases.card import ColumnCard, DatabaseCard, TableCard
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.recipe import recipes
from pipelines.sql.dialects.base import identity
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import render
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Silent, examples, trajectories
from tests.fakes import build_database, kept_text

ROOT = Path(__file__).resolve().parents[2]
SHOP = """
CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT, town TEXT, salary INTEGER);
CREATE TABLE payroll (id INTEGER PRIMARY KEY, iban TEXT);
CREATE VIEW earners AS SELECT name, salary AS pay FROM staff;
INSERT INTO staff VALUES (1,'Ada','Paris',987654),(2,'Bo','Oslo',876543),(3,'Cy','Paris',765432);
INSERT INTO payroll VALUES (1,'XK051212');
"""
HIDDEN = ("salary", "payroll", "iban", "earners", "987654", "876543", "765432", "xk051212")
QUESTIONS = {
    "how many staff are in Paris ?": "SELECT count(*) FROM staff WHERE town = 'Paris'",
    "name the staff of Oslo .": "SELECT name FROM staff WHERE town = 'Oslo'",
    "what is the headcount ?": "SELECT count(id) FROM staff",
    "list towns .": "SELECT DISTINCT town FROM staff",
    "who has the most ?": "SELECT name FROM staff ORDER BY salary DESC LIMIT 1",
    "show everything .": "SELECT * FROM staff",
    "count the accounts .": "SELECT count(*) FROM payroll",
    "who earns ?": "SELECT name FROM earners",
}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lake").mkdir()
    place = tmp_path / "lake" / "shop.sqlite"
    build_database(place, SHOP)
    (tmp_path / "mine.sqlite").symlink_to(place)
    rows = [{"question": asked, "sql": sql, "database": "mine.sqlite"} for asked, sql in QUESTIONS.items()]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def put_card(location, name="shop", **edits):
    staff = {"id": ColumnCard(type="INTEGER", key=True), "name": ColumnCard(type="TEXT", description="first name")}
    staff |= {"town": ColumnCard(type="TEXT", values=("Paris",)), "salary": ColumnCard(type="INTEGER", hidden=True)}
    payroll = TableCard(hidden=True, columns={"id": ColumnCard(), "iban": ColumnCard()})
    earners = TableCard(columns={"name": ColumnCard(), "pay": ColumnCard()})
    tables = {"staff": TableCard(columns=staff), "payroll": payroll, "earners": earners}
    known = DatabaseCard(engine="sqlite", location=str(location), tables=tables, metrics={"headcount": "rows of staff"})
    card.write(card.path_of(name), known.model_copy(update=edits))


def recipe_of(*overrides):
    source = f"{{kind: jsonl, path: {Path('own.jsonl').absolute()}}}"
    pools = [f"data.{pool}={source}" for pool in ("sft", "dev")]
    own = ["data.max_bad_share=0.6", "rollout.processes=1", "protocol.schema_values=3", *overrides]
    return recipes.load("miniature", [*pools, f"data.rl=[{source}]", *own])


def keys(recipe, store):
    return {step.name: step.key for step in graph.plan(recipe, Store(store), until="grpo")}


def test_no_stage_keeps_anything_hidden(shop, tmp_path):
    put_card(shop)
    recipe, store = recipe_of("synthesis.teacher.error_rate=1.0"), Store(tmp_path / "store")
    steps = graph.plan(recipe, store, until="synthesize")
    done = {step.name: stage_making.execute(step, recipe, store, Silent(), steps) for step in steps}

    data = done["data"].folder
    kept = examples(data, "sft")
    assert [one.question for one in kept] == list(QUESTIONS)[:4]
    assert [one.evidence for one in kept] == ["", "", "headcount = rows of staff", ""]
    bad = [json.loads(line) for line in (data / "quarantine.jsonl").read_text().splitlines()]
    reasons = ["gold_hidden", "gold_hidden", "gold_not_authorized", "gold_hidden"]
    assert [row["reason"] for row in bad if row["pool"] == "sft"] == reasons

    made = trajectories(done["synthesize"].folder)
    assert len(made) >= 4
    assert all("staff" in one.prompt[-1][1] for one in made)
    files = [path for path in store.root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in files} >= {"data.parquet", "quarantine.jsonl", "manifest.json"}
    said = {str(path): [word for word in HIDDEN if word in kept_text(path).lower()] for path in files}
    assert not {path: words for path, words in said.items() if words}


def test_a_stage_reads_what_asking_shows_and_refuses_the_rest(shop):
    put_card(shop)
    recipe, database = recipe_of(), Database("any", "sqlite", str(Path("mine.sqlite").absolute()))
    shown = render(schemas(recipe)(database), "ddl")
    assert "first name" in shown
    assert not any(word in shown.lower() for word in (*HIDDEN[:3], "pay", "987654"))
    with sql_engine(recipe) as sql:
        results = sql.execute_many([(database, f"SELECT {what}") for what in ("salary FROM staff", "town FROM staff")])
    assert [result.error_class for result in results] == ["hidden", None]


def test_a_database_is_one_however_its_location_is_written(shop, tmp_path):
    assert identity("mine.sqlite") == identity(str(tmp_path / "lake" / ".." / "mine.sqlite")) == str(shop.resolve())
    one = "//localhost:/shop"
    for address in ("postgresql://reader@localhost/shop", "postgres://owner@127.0.0.1:5432/shop?sslmode=disable"):
        assert identity(address) == one
    assert identity("postgresql:///shop?host=/run/postgresql&port=5432") == one
    assert identity("host=127.0.0.1 port=5432 user=reader password='a b' dbname=shop") == one
    assert identity("x=1.sqlite").endswith("/x=1.sqlite")
    assert identity("postgresql://localhost,spare.example:5433/?dbname=shop") == one
    assert one not in map(identity, ("postgresql://db.example/shop", "postgresql://localhost:5433/shop"))
    for text in ("postgresql://localhost:port/shop", "postgresql://[/shop", "a\0b"):  # nothing opens them
        assert identity(text) == text
    assert identity("mysql://db.example") == identity("mysql://db.example:3306") == "//db.example:/"
    with SqlEngine(Limits(), hidden={str(shop): (("staff",), {})}) as sql:
        database = Database("any", "sqlite", str(tmp_path / "mine.sqlite"))
        results = sql.execute_many([(database, f"SELECT {what} FROM staff") for what in ("1", "name")])
        assert sql.hides(database)
    assert [result.error_class for result in results] == ["not_authorized", "hidden"]


def test_an_edited_card_makes_the_stages_of_its_database_again(shop, tmp_path):
    recipe, store = recipe_of(), tmp_path / "store"
    plain = keys(recipe, store)
    put_card(tmp_path / "other.sqlite", "other")
    assert keys(recipe, store) == plain  # a card of a database that the recipe does not read
    put_card(shop)
    carded = keys(recipe, store)
    assert all(carded[name] != plain[name] for name in plain)
    put_card(shop, password_env="NOBODY_ASKS")  # what it does not show decides nothing
    assert keys(recipe, store) == carded
    put_card(shop, metrics={"headcount": "other words"})
    assert all(keys(recipe, store)[name] not in (carded[name], plain[name]) for name in plain)
    card.path_of("shop").unlink()
    assert keys(recipe, store) == plain


def test_the_card_of_a_servers_database_is_in_the_keys(shop, tmp_path):
    row = {"question": "how many ?", "sql": "SELECT 1", "database": "postgresql://owner@db.example/shop"}
    Path("own.jsonl").write_text(json.dumps(row) + "\n")
    recipe, store = recipe_of(), tmp_path / "store"
    plain = keys(recipe, store)
    put_card("postgresql://reader@db.example/other", engine="postgres")
    assert keys(recipe, store) == plain
    put_card("postgresql://reader@db.example:5432/shop", engine="postgres")
    assert keys(recipe, store)["data"] != plain["data"]


def test_what_any_card_of_a_database_hides_is_hidden(shop, caplog):
    put_card(shop, "a", tables={"staff": TableCard(columns={"name": ColumnCard(), "town": ColumnCard()})})
    put_card(Path("mine.sqlite").absolute(), "b")
    (known,) = card.by_database().values()
    assert known.hidden == (("payroll",), {"staff": ("salary",)})
    assert [column.name for table in known.shown().tables for column in table.columns] == ["name", "town"]
    assert named.find("a").card == named.find("mine.sqlite").card  # also where a command names one of them
    assert named.find("b").card.hidden == known.hidden
    assert "databases/a.yaml and databases/b.yaml describe one database: the first counts" in caplog.text


# Who may read a schema or run SQL without the cards of the working folder, and why.
WITHOUT_CARDS = {
    "pipelines/databases/named.py": "the door: what a card describes is read by it, all else as it is",
    "pipelines/databases/of_recipe.py": "the door of recipes",
    "pipelines/databases/catalogue.py": "it writes the card",
    "pipelines/report/writer.py": "it passes what the cards hide",
    "pipelines/rollout/policies/oracle.py": "outside of a recipe; stages pass the schemas of theirs",
    "pipelines/sql/analyst.py": "what two queries return decides; a database with hidden names has no counterexample",
    "pipelines/sql/dialects/sqlite.py": "example values of a view, for whoever reads the schema",
    "pipelines/sql/equalities/spider_grammar.py": "names by which an equality aligns columns; none is kept or shown",
    "pipelines/stages/added_benchmarks.py": "it passes what the cards hide",
    "pipelines/stages/prediction_scoring.py": "it passes what the cards hide",
}


def test_nothing_reads_a_database_past_its_card():
    found = set()
    for path in [path for folder in ("pipelines", "flows", "tasks") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "SqlEngine"
            if called or "introspect" in imported:
                found.add(str(path.relative_to(ROOT)))
    assert found == set(WITHOUT_CARDS)


def test_a_card_that_cannot_be_read_stops_a_run(shop):
    card.FOLDER.mkdir()
    card.path_of("shop").write_text(yaml.safe_dump({"engine": "sqlite"}))
    with pytest.raises(Exception, match=r"databases/shop\.yaml: location"):
        sql_engine(recipe_of())


def test_a_card_of_another_suffix_would_hide_nothing_and_is_refused(shop):
    put_card(shop)
    card.path_of("shop").rename(card.FOLDER / "shop.yml")
    remedy = (
        r"shop\.yml is not read: the name of a card ends with \.yaml\. Rename it: mv databases/shop\.yml databases/shop"
    )
    with pytest.raises(DataError, match=remedy):
        sql_engine(recipe_of())
    with pytest.raises(DataError, match=remedy):
        card.described_by(str(shop))
