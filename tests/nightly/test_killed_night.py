"""A night that is killed before its line in the ledger, and one whose champion is rolled back while it is at work."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows import terminal
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.evaluation.record import EpisodeRecord
from pipelines.nightly.ledger import Ledger
from pipelines.nightly.night import NightContext, run_night
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import evaluate, graph, train
from pipelines.stages.context import Context, Silent
from tasks import contracts
from tasks.run import Tracker
from tests.evaluation.evaluation_world import RECORD
from tests.nightly import farms


class Killed(BaseException):
    """As kill -9: no handler of errors sees it, and the locks of the process are free afterwards."""


def model(ctx: Context) -> None:
    (ctx.folder / "model").mkdir(exist_ok=True)
    (ctx.folder / "model" / "model.safetensors").write_bytes(bytes(8))
    ctx.metrics({})


def evaluated(ctx: Context) -> None:
    """The base model answers nothing of twelve questions right; each training answers four more than the one before."""
    place = ctx.inputs.get("sft", ctx.folder) / "trainings"
    right = 4 * int(place.read_text()) if place.is_file() else 0
    records: list[EpisodeRecord] = [
        dataclasses.replace(
            RECORD, example_id=f"t{number}", database=f"d{number}", scores={ctx.recipe.headline: float(number < right)}
        )
        for number in range(12)
    ]
    rows = [{"pass": "greedy", "record": to_dict(record)} for record in records]
    (ctx.folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ctx.metrics({"ex": right / 12})


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    trainings = itertools.count(1)

    def sft(ctx: Context) -> None:
        model(ctx)
        (ctx.folder / "trainings").write_text(str(next(trainings)))

    monkeypatch.setattr(train, "model", model)
    monkeypatch.setattr(train, "sft", sft)
    monkeypatch.setattr(evaluate, "build", evaluated)
    monkeypatch.setattr(contracts, "check", lambda result, recipe: None)  # another test's
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    (tmp_path / "inbox").mkdir()
    return recipes.load("miniature", farms.overrides(tmp_path, base))


def a_night(
    recipe: Recipe, store: Store, before: Callable[[str, str], object] = lambda last, role: None
) -> dict[str, Any]:
    """A night; `before` is called with the last stage and the role of each part that it makes."""

    def walk(part: Recipe, at: Store, steps: Sequence[graph.Step], role: str) -> list[graph.StageResult]:
        before(steps[-1].name, role)
        with Tracker(part, at, pytest.fail) as tracker:
            tracker.recorder.off = True
            return terminal.walk(part, at, steps, Silent(), lambda *_: None, tracker, role)

    return run_night(NightContext("miniature", (), recipe, store, walk, contracts.check))


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


@pytest.mark.parametrize(
    ("start", "during", "decision", "reason"),
    [
        ("champion", ("gold_schema", "batch"), "promoted", "better: 33.3 to 100.0 % of 12 questions"),
        ("champion", ("sft", ""), "kept", "it was trained from a champion that was rolled back; better: 33.3 to 100"),
        ("champion", ("evaluate_sft", ""), "kept", "it was trained from a champion that was rolled back; better: 33.3"),
        ("base", ("evaluate_sft", ""), "promoted", "better: 33.3 to 100.0 % of 12 questions"),
    ],
)
def test_a_night_decides_against_the_champion_that_stands_when_it_ends(
    tmp_path: Path, recipe: Recipe, start: str, during: tuple[str, str], decision: str, reason: str
) -> None:
    """Three trainings answer 4, 8 and 12 of 12; the second one's is rolled back while the third night is at work."""
    recipe = recipe.model_copy(update={"nightly": recipe.nightly.model_copy(update={"start": start})})
    store, rolled_back = Store(tmp_path / "store"), list[str]()
    book = Ledger(store, "miniature")

    def roll_back(last: str, role: str) -> None:
        if (last, role) == during and not rolled_back:
            rolled_back.extend(champion.key for champion in book.rollback())

    keys = []
    for number in range(3):
        farms.questions(tmp_path / "inbox", f"{number}.jsonl", farms.named(f"n{number}", 2), [0, 1])
        line = a_night(recipe, store, roll_back if number == 2 else lambda last, role: None)
        keys.append(line["challenger"]["key"])
    assert rolled_back == [keys[1], keys[0]]
    assert line["decision"] == decision
    assert line["reason"].startswith(reason)
    assert line["champion"] == {"stage": "sft", "key": keys[0]}
    champion = book.champion()
    assert champion is not None
    assert champion.key == (keys[2] if decision == "promoted" else keys[0])
    assert len(book.usable()) == 3
    assert book.undecided() == []
