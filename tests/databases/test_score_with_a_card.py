"""`sqltrain score` on a connected database: its card's name stands for it, and what it hides no query reads."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from flows.commands.evaluate import score
from pipelines.core.errors import UserError
from pipelines.databases import card
from pipelines.databases.card import ColumnCard, DatabaseCard, TableCard
from tests.fakes import build_database

app = typer.Typer()
app.command()(score)
PAIRS = {  # gold and prediction
    "SELECT count(*) FROM staff": "SELECT count(id) FROM staff",
    "SELECT name FROM staff WHERE salary > 5": "SELECT name FROM staff",
    "SELECT name FROM staff": "SELECT salary FROM staff",
    "SELECT max(id) FROM staff": "SELECT 1",
}


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "lake" / "shop" / "shop.sqlite"
    build_database(
        place,
        "CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT, salary INTEGER)",
        "INSERT INTO staff VALUES (1, 'Ada', 987654)",
    )
    columns = {"id": ColumnCard(), "name": ColumnCard(), "salary": ColumnCard(hidden=True)}
    known = DatabaseCard(engine="sqlite", location=str(place), tables={"staff": TableCard(columns=columns)})
    card.write(card.path_of("shop"), known)
    Path("gold.sql").write_text("".join(f"{sql}\tshop\n" for sql in PAIRS))
    Path("pred.sql").write_text("".join(f"{sql}\n" for sql in PAIRS.values()))
    return place


def run(databases, *more):
    files = ["--gold", "gold.sql", "--pred", "pred.sql", "--database", databases, "--workers", "1"]
    result = CliRunner().invoke(app, [*files, "--equality", "strict", *more])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("databases", ["shop", "lake"])
def test_nothing_hidden_is_read_however_the_database_is_named(shop, databases):
    code, said = run(databases, "--out", "verdicts.jsonl", "--report", "report", "--json")
    facts = json.loads(said.splitlines()[-1])
    assert code == 0
    assert facts["gold_errors"] == [{"idx": 1, "error": "gold_hidden"}]
    assert facts["scored"] == 3
    assert facts["equalities"]["strict"]["all"] == pytest.approx(200 / 3, abs=1e-3)
    assert facts["errors"] == {"hidden": 1}
    written = (path.read_bytes() for path in Path("report").rglob("*") if path.is_file())
    assert not any(b"987654" in text or b"salary INTEGER" in text for text in written)


def test_a_gold_file_of_several_databases_is_not_one(shop):
    Path("gold.sql").write_text("SELECT 1\tshop\nSELECT 1\tfarm\n")
    Path("pred.sql").write_text("SELECT 1\nSELECT 1\n")
    with pytest.raises(UserError, match="the gold file asks 2 databases, and shop is one"):
        run("shop")
