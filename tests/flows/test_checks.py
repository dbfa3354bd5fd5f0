"""What `sqltrain check` says of a gold SQL under which no verdict can be given."""

import json
import sqlite3
from pathlib import Path

import pytest

from flows import terminal
from flows.commands import train
from pipelines.core.types import Database, Example
from pipelines.recipe import recipes
from tests.flows.command_line import sqltrain


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT name FROM ship", "larger than a verdict may read (raise execution.max_rows or execution.max_bytes)"),
        ("SELECT flag FROM ship", "it does not run (no_such_column)"),
    ],
)
def test_a_gold_sql_that_is_too_large_is_told_from_one_that_fails(sql: str, said: str, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "harbour.sqlite")
    connection.executescript("CREATE TABLE ship (name TEXT); INSERT INTO ship VALUES ('a'), ('b'), ('c')")
    connection.close()
    example = Example("q", "?", Database("harbour", "sqlite", str(tmp_path / "harbour.sqlite")), sql)
    recipe = recipes.load("miniature", ["execution.max_rows=2"])
    (problem,), counts = train.check_gold(recipe, [[example]], terminal.Bars(terminal.console))
    assert said in problem
    assert counts == {"gold_checked": 1, "gold_full": 0}


def test_the_gold_sql_of_all_pools_is_checked_whatever_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training file and a test file both number their questions from 1; the training file's first is empty."""
    connection = sqlite3.connect(tmp_path / "harbour.sqlite")
    connection.executescript("CREATE TABLE ship (name TEXT); INSERT INTO ship VALUES ('a'), ('b'), ('c')")
    connection.close()
    asked = {"train": ["SELECT name FROM ship WHERE name > 'c'", "SELECT count(*) FROM ship"]}
    asked["test"] = ["SELECT min(name) FROM ship", "SELECT max(name) FROM ship", "SELECT name FROM ship"]
    for pool, queries in asked.items():
        rows = [
            {"id": id, "question": f"{sql}?", "database": "harbour.sqlite", "sql": sql}
            for id, sql in enumerate(queries)
        ]
        (tmp_path / f"{pool}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, test = (f"{{kind: jsonl, path: {tmp_path / pool}.jsonl}}" for pool in asked)
    own = [f"data.sft={train}", f"data.rl=[{train}]", f"data.dev={test}", f"data.test=[{test}]"]
    code, out, said = sqltrain(
        monkeypatch, capsys, "check", "miniature", *own, f"--store={tmp_path / 's'}", "--data", "--json"
    )
    assert code == 0, said
    facts = json.loads(out.splitlines()[-1])
    assert (facts["gold_checked"], facts["gold_full"], facts["health"]["empty"]) == (5, 5, 1)
    assert facts["empty_trained"] == 1
    assert "1 training questions have an empty gold result" in out + said


def test_a_recipe_of_ones_own_is_checked_with_its_own_variants_and_a_reward_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The miniature's variants name terms of its panel, which this recipe leaves out."""
    (tmp_path / "own.py").write_text(
        "from pipelines.core.registry import reward\n\n\n"
        "@reward('own_term')\ndef own_term(outcome):\n    return float(len(outcome.nothing))\n"
    )
    pool = "{kind: miniature, split: SPLIT, options: {databases: 1, questions: 2}}"
    train, dev, test = (pool.replace("SPLIT", name) for name in ("train", "dev", "test"))
    (tmp_path / "own.yaml").write_text(
        "include: [recipes/miniature]\nplugins: [own.py]\nrewards:\n  - {term: own_term, weight: 1}\n"
        f"data: {{sft: {train}, rl: [{train}], dev: {dev}, test: [{test}]}}\n"
        "variants:\n  short: [grpo.steps=3]\n"
    )
    command = ["check", str(tmp_path / "own.yaml"), f"store={tmp_path / 's'}"]
    code, out, err = sqltrain(monkeypatch, capsys, *command)
    assert "1 recipe with 1 variants: all load" in out
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: reward term 'own_term' fails on question ")
    assert "AttributeError: 'Outcome' object has no attribute 'nothing'" in line
    assert line.endswith(f"Look at {tmp_path / 'own.py'}, line 6.")
