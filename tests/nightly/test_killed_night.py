"""A night that is killed between its evaluation and its line in the ledger: the next one ends it, and makes nothing."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flows import nights, run
from pipelines import recipes
from pipelines.config import Recipe
from pipelines.evaluation.record import EpisodeRecord
from pipelines.nightly.ledger import Ledger
from pipelines.stages import evaluate, graph, train
from pipelines.stages.context import Context, Silent
from pipelines.store import Store
from pipelines.types import to_dict
from tasks import contracts
from tasks.tracking import Tracker
from tests.evaluation.evaluation_world import RECORD

from . import farms


class Killed(BaseException):
    """As kill -9: no handler of errors sees it, and the locks of the process are free afterwards."""


def trained(ctx: Context) -> None:
    (ctx.folder / "model").mkdir(exist_ok=True)
    (ctx.folder / "model" / "model.safetensors").write_bytes(bytes(8))
    ctx.metrics({})


def evaluated(ctx: Context) -> None:
    """The base model answers nothing right, the trained one everything."""
    scores = {ctx.recipe.headline: float(ctx.stage == "evaluate_sft")}
    records: list[EpisodeRecord] = [
        dataclasses.replace(RECORD, example_id=f"t{number}", database=f"d{number}", scores=scores)
        for number in range(12)
    ]
    rows = [{"pass": "greedy", "record": to_dict(record)} for record in records]
    (ctx.folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ctx.metrics({"ex": scores[ctx.recipe.headline]})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    for name in ("model", "sft"):
        monkeypatch.setattr(train, name, trained)
    monkeypatch.setattr(evaluate, "build", evaluated)
    monkeypatch.setattr(contracts, "check", lambda result, recipe: None)  # another test's
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    (tmp_path / "inbox").mkdir()
    return recipes.load("miniature", farms.overrides(tmp_path, base))


def a_night(recipe: Recipe, store: Store) -> dict[str, Any]:
    def walk(part: Recipe, at: Store, steps: Sequence[graph.Step], role: str) -> list[graph.StageResult]:
        with Tracker(part, at, pytest.fail) as tracker:
            tracker.recorder.off = True
            return run.walk(part, at, steps, Silent(), lambda *_: None, tracker, role)

    return nights.night("miniature", (), recipe, store, walk)


def test_the_next_night_decides_the_same_and_makes_nothing_again(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")

    def die(ledger: Ledger, event: str, **facts: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", die)
        with pytest.raises(Killed):
            a_night(recipe, store)
    book = Ledger(store, "miniature")
    assert book.lines() == []
    before = store.made()
    line = a_night(recipe, store)
    assert (line["decision"], line["made"]) == ("promoted", [])
    assert store.made() == before
    assert [row["decision"] for row in book.lines()] == ["promoted"]
    assert a_night(recipe, store)["decision"] == "nothing"
