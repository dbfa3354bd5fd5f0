"""The page of `sqltrain adapt` beside its decision: which held-out questions count."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import pytest

from pipelines.adaptation.adapting import Adaptation, AdaptationDecision
from pipelines.core import frames
from pipelines.core.store import Store
from pipelines.core.types import Database, Example, to_dict
from pipelines.evaluation.evaluate import of_prediction
from pipelines.nightly import night
from pipelines.nightly.ledger import Champion
from pipelines.recipe import recipes
from pipelines.stages.stage import StageResult
from tests.evaluation.evaluation_world import RECORD
from tests.fakes import build_database

ASKED = {
    "t1": ("What is the name of each ship ?", "SELECT name FROM ship"),
    "t2": ("How many ships are there ?", "SELECT count(*) FROM ship"),
    "t3": ("What is the age of the oldest harbour master ?", "SELECT max(age) FROM master"),
}
RIGHT = {"champion": {"t1", "t3"}, "challenger": {"t2"}, "base": set()}


@pytest.fixture
def store(tmp_path):
    """A champion that was trained on what t1 and t3 ask, a challenger that was trained on nothing, and their base."""
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE ship (name); CREATE TABLE master (age);")
    database = Database("shop", "sqlite", str(tmp_path / "shop.sqlite"))
    store = Store(tmp_path / "store")

    def make_questions(stage, pool, ids):
        asked = [Example(id, ASKED[id][0], database, ASKED[id][1]) for id in ids]
        rows = frames.to_frame(asked, extra=[{"pool": pool, "part": 0}] * len(asked))
        store.make(stage, pool, lambda folder: frames.write(folder / frames.DATA, rows), {}, pytest.fail)

    make_questions("data", "sft", ["t1", "t3"])
    store.make("sft", "champion", lambda folder: None, {"inputs": {"data": "sft"}}, pytest.fail)
    return SimpleNamespace(store=store, make_questions=make_questions)


def write_evaluation(ids, right, folder):
    """A finished evaluation: a greedy answer and its record for each question."""
    records = []
    for id in ids:
        scores = {"strict": float(id in right)}
        record = dataclasses.replace(RECORD, example_id=id, database="shop", scores=scores, question_digest=id)
        records.append({"pass": "greedy", "record": to_dict(record)})
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    (folder / "summary.json").write_text("{}")
    answers = [of_prediction(id, "SELECT 1", "mine") for id in ids]
    frames.write(folder / frames.DATA, frames.to_frame(answers, extra=[{"pass": "greedy"}] * len(ids)))


@pytest.fixture
def adapted(store, tmp_path, monkeypatch):
    """A function that compares the challenger with a champion, or its base, on questions, and writes the page."""

    def run(ids, champion):
        store.make_questions("test", "test", ids)
        for key, right in RIGHT.items():
            about = {"inputs": {"sft": key, "test": "test"}}
            write = partial(write_evaluation, ids, right)
            store.store.make("evaluate_sft", key, write, about, pytest.fail)

        def evaluated(context, recipe, checkpoint, role):
            folder = store.store.folder("evaluate_sft", checkpoint.key)
            return StageResult("evaluate_sft", checkpoint.key, folder, {}, True)

        monkeypatch.setattr(night, "evaluated", evaluated)
        recipe = recipes.load("miniature", ["name=shop"])
        path = tmp_path / "shop.yaml"
        adaptation = Adaptation("shop", path, (), (), recipe, store.store, (), {}, 0)
        challenger = night.Challenger("sft", "challenger", "base", ())
        context = adaptation.night_context(pytest.fail, pytest.fail)
        verdict = night.compare_with_champion(context, challenger, champion, set())
        line = {"decision": verdict.decision, "reason": verdict.reason}
        before = champion or night.UntrainedModel("model", "base")
        decision = AdaptationDecision(line, before, challenger)
        sides = adaptation.compare(context, decision)
        test = StageResult("test", "test", store.store.folder("test", "test"), {}, True)
        tables = adaptation.write_page({"test": test}, decision, sides)
        return tables, path.with_suffix(".html").read_text()

    return run


def test_questions_that_the_champion_was_trained_on_do_not_count_on_the_page(adapted):
    """It knows the two that it was trained on; only the challenger knows the answer to the other one."""
    tables, page = adapted(["t1", "t2", "t3"], Champion("sft", "champion", (), 1))
    rows = {table.slug: [row[:4] for row in table.rows] for table in tables}
    assert rows == {"paired_hardness": [("easy", 1, 0.0, 1.0)], "paired_tables": [("ship", 1, 0.0, 1.0)]}
    assert "promoted: better: 0.0 to 100.0 % of 1 questions" in page
    assert "2 questions are left out (2 that the champion was trained on)." in page
    assert "How many ships are there ?" in page
    assert "What is the name of each ship ?" not in page


def test_a_page_without_a_question_that_counts_has_no_figures_of_the_champion(adapted):
    """The challenger was trained on neither, so what it still fails is of use."""
    tables, page = adapted(["t1", "t3"], Champion("sft", "champion", (), 1))
    assert tables == []
    assert "the champion was trained on all 2 questions that are held out now: nothing can be compared" in page
    assert page.count('<div class="figure-name">') == 1
    assert "2 of 2 held-out questions." in page


def test_against_the_base_model_every_question_counts(adapted):
    tables, page = adapted(["t1", "t2", "t3"], None)
    assert [row[:4] for row in tables[0].rows] == [("easy", 3, 0.0, 1 / 3)]
    assert "left out" not in page
