"""What is held out may change between two trainings: a champion is not measured by questions that it was trained on."""

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.core import frames
from pipelines.core.errors import BoundaryError
from pipelines.core.frames import DATA
from pipelines.core.store import Store
from pipelines.core.types import Database, Example, ExecutionStatus, StopReason, to_dict
from pipelines.evaluation.record import EpisodeRecord
from pipelines.nightly import night
from pipelines.nightly.ledger import Champion
from pipelines.nightly.promotion import trained_on
from pipelines.recipe import recipes
from pipelines.stages.evaluate import RECORDS
from pipelines.stages.graph import StageResult

TEST = [
    ("t1", "How many ships are there ?", "SELECT count(*) FROM ship"),
    ("t2", "Which port is the oldest ?", "SELECT name FROM port ORDER BY built LIMIT 1"),
    ("t3", "Who sails the Ada ?", "SELECT captain FROM ship WHERE name = 'Ada'"),
]
OLD = [  # the champion's: t1's question in other words, and t3's query with another value
    ("a", "there are how many ships", "SELECT count(id) FROM ship"),
    ("b", "Who sails the Bo ?", "SELECT captain FROM ship WHERE name = 'Bo'"),
    ("c", "Which ship is the longest ?", "SELECT name FROM ship ORDER BY length DESC LIMIT 1"),
]
NEW = [("d", "What is the name of each port ?", "SELECT name FROM port")]


def questions(store: Store, stage: str, key: str, asked: Sequence[tuple[str, str, str]], pool: str) -> None:
    database = Database("harbour", "sqlite", "harbour.sqlite")
    made = [Example(id, question, database, sql) for id, question, sql in asked]
    rows = [{"pool": pool, "part": 0}] * len(made)
    store.make(
        stage, key, lambda folder: frames.write(folder / DATA, frames.to_frame(made, extra=rows)), {}, pytest.fail
    )


def trained(store: Store, key: str, data: str) -> None:
    """A checkpoint whose filter read a data stage."""
    for stage, own, inputs in (("filter", key, {"data": data}), ("sft", key, {"filter": key})):
        store.make(stage, own, lambda folder: (folder / "x").write_text(""), {"inputs": inputs}, pytest.fail)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    questions(store, "data", "old", OLD, "sft")
    questions(store, "data", "new", NEW, "rl")
    questions(store, "data", "watched", TEST, "dev")  # no model learns from them
    questions(store, "test", "t", TEST, "test")
    for key, data in (("champion", "old"), ("challenger", "new"), ("other", "watched")):
        trained(store, key, data)
    return store


def test_questions_that_a_champion_was_trained_on_are_found(store: Store) -> None:
    test = store.folder("test", "t")
    assert trained_on(store, ("sft", "champion"), ("sft", "challenger"), test) == {"t1", "t3"}
    assert trained_on(store, ("sft", "other"), ("sft", "challenger"), test) == frozenset()
    assert trained_on(store, ("sft", "champion"), ("sft", "champion"), test) == frozenset()
    assert trained_on(store, ("model", "base"), ("sft", "challenger"), test) == frozenset()  # nobody trained it here


def write_text(text: str, folder: Path) -> None:
    (folder / RECORDS).write_text(text)


def record(id: str, right: bool) -> EpisodeRecord:
    return EpisodeRecord(
        id, "harbour", "easy", "greedy", 0, "SELECT 1", {"strict": float(right)}, False, None, ExecutionStatus.OK, 1, 1,
        None, StopReason.SOLUTION, False, True, 1, 0, 0, None, None, 0, None, 0.0,
        question_digest=id, gold_digest=id,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("held", "decision", "said"),
    [
        (["t1", "t2", "t3"], "promoted", "better: 0.0 to 100.0 % of 1 questions"),
        (["t1", "t3"], "kept", "the champion was trained on all 2 questions that are held out now"),
    ],
)
def test_they_do_not_count_when_a_challenger_is_held_against_it(
    store: Store, monkeypatch: pytest.MonkeyPatch, held: list[str], decision: str, said: str
) -> None:
    """The champion knows the two that it was trained on; only the challenger knows the answer to the other one."""
    right = {"champion": {"t1", "t3"}, "challenger": {"t2"}}
    for key in right:
        lines = [{"pass": "greedy", "record": to_dict(record(name, name in right[key]))} for name in held]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        about = {"inputs": {"sft": key, "test": "t"}}
        store.make("evaluate_sft", key, partial(write_text, text), about, pytest.fail)

    def evaluated(site: object, recipe: object, who: night.Challenger | Champion, role: str) -> StageResult:
        return StageResult("evaluate_sft", who.key, store.folder("evaluate_sft", who.key), {}, True)

    monkeypatch.setattr(night, "evaluated", evaluated)
    monkeypatch.setattr(night, "decide", lambda test, *_: night.PromotionDecision("promoted", say(test), {}))
    site = SimpleNamespace(name="miniature", overrides=(), store=store, recipe=recipes.load("miniature"))
    challenger = night.Challenger("sft", "challenger", "base", ())
    verdict = night.compare_with_champion(site, challenger, Champion("sft", "champion", (), 1), set())  # type: ignore[arg-type]
    assert verdict.decision == decision
    assert verdict.reason.startswith(said)


@pytest.mark.parametrize(("broken", "share", "stops"), [(3, 0.05, True), (1, 0.05, True), (1, 0.5, False)])
def test_nothing_is_decided_by_an_evaluation_that_a_boundary_broke(
    store: Store, broken: int, share: float, stops: bool
) -> None:
    """It is asked again the next night: kept in the store, it would decide on every night to come."""
    made = [record(id, True) for id, _, _ in TEST]
    made[:broken] = [dataclasses.replace(row, broken=True, failure="connection") for row in made[:broken]]
    text = "".join(json.dumps({"pass": "greedy", "record": to_dict(row)}) + "\n" for row in made)
    store.make("evaluate_sft", "e", partial(write_text, text), {}, pytest.fail)
    result = StageResult("evaluate_sft", "e", store.folder("evaluate_sft", "e"), {}, False)
    site = SimpleNamespace(store=store, make=lambda recipe, steps, role: {"evaluate_sft": result})
    recipe = recipes.load("miniature", [f"contracts.max_broken={share}"])
    challenger = night.Challenger("sft", "challenger", "base", ())
    if stops:
        with pytest.raises(BoundaryError, match=f"{broken} of 3 held-out questions of miniature_test broke: connec"):
            night.evaluated(site, recipe, challenger, "")  # type: ignore[arg-type]
    else:
        assert night.evaluated(site, recipe, challenger, "") == result  # type: ignore[arg-type]
    assert store.has("evaluate_sft", "e") is not stops


def say(test: night.HeldOutRecords) -> str:
    before, after = (sum(item.scores["strict"] for item in side) for side in (test.before, test.after))
    return f"better: {100 * before:.1f} to {100 * after:.1f} % of {len(test.before)} questions"
