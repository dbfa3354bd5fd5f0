"""A night whose batch breaks a contract: every bad row is named, and no good row is lost."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from flows import terminal
from pipelines.core.errors import DataError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger
from pipelines.nightly.night import NightContext, run_night
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.context import Silent
from tasks import contracts
from tasks.run import Tracker
from tests.nightly import farms

BROKEN = "SELECT size FROM nowhere"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    return recipes.load("miniature", [*farms.overrides(tmp_path, base), "stages=[data, sft]"])


def a_night(recipe: Recipe, store: Store) -> None:
    def walk(part: Recipe, at: Store, steps: Sequence[graph.Step], role: str) -> list[graph.StageResult]:
        with Tracker(part, at, pytest.fail) as tracker:
            tracker.recorder.off = True  # what a night records is another test's
            return terminal.walk(part, at, steps, Silent(), lambda *_: None, tracker, role)

    run_night(NightContext("miniature", (), recipe, store, walk, contracts.check))


def test_after_mending_the_bad_rows_all_rows_come_again(tmp_path: Path, recipe: Recipe) -> None:
    store, names = Store(tmp_path / "store"), farms.named("n", 20)
    book = Ledger(store, "miniature")
    farms.questions(tmp_path / "inbox", "new.jsonl", names, [2, 3], poison=[BROKEN] * 4)
    with pytest.raises(DataError, match=r"4 of 40 rows .* are in .*All rows of the batch are new again"):
        a_night(recipe, store)
    assert book.undecided() == []
    (line,) = book.lines()
    assert (line["decision"], line["rows"]) == ("refused", 40)
    (file,) = (book.folder / "refused").glob("*/quarantine.jsonl")
    bad = [json.loads(row) for row in file.read_text().splitlines() if '"sft"' in row]
    assert len(bad) == 4  # each of them, with its reason
    assert {row["reason"] for row in bad} == {"gold_no_such_table"}
    farms.questions(tmp_path / "inbox", "new.jsonl", names, [2, 3])  # the four are mended
    from pipelines.nightly import inbox

    batch = inbox.collect(recipe.nightly, book.batches)
    assert batch is not None
    assert len(read_json(batch / "rows.json")) == 40


def test_rows_that_ask_what_is_held_out_take_no_part_and_the_others_go_on(tmp_path: Path) -> None:
    """A person has confirmed an answer to a test question: the batch is learned without that row, once."""
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    recipe = recipes.load("miniature", [*farms.overrides(tmp_path, base), "sft.epochs=1"])
    store, book = Store(tmp_path / "store"), Ledger(Store(tmp_path / "store"), "miniature")
    file = farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 4), [2, 3])
    held = tmp_path / "held" / "t00.sqlite"
    question, sql = farms.FAMILIES[1]
    row = {"id": "confirmed", "question": question, "database": str(held), "sql": sql}
    file.write_text(file.read_text() + json.dumps(row) + "\n")
    a_night(recipe, store)
    (batch,) = book.batches.glob("[0-9]*")
    (gone,) = [json.loads(line) for line in (batch / "held_out.jsonl").read_text().splitlines()]
    assert gone["id"].startswith("confirmed")
    assert len((batch / "questions.jsonl").read_text().splitlines()) == 8
    (line,) = book.lines()
    assert (line["decision"] != "refused", line["rows"], line["held_out"]) == (True, 9, 1)
    from pipelines.nightly import inbox

    assert inbox.collect(recipe.nightly, book.batches) is None
