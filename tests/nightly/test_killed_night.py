"""A night that is killed or refused, whose champion is rolled back meanwhile, or whose guards cannot be asked."""

import dataclasses
import itertools
import json
import os
import struct
from datetime import UTC, date, datetime

import pytest

from flows import terminal
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.nightly import inbox, night
from pipelines.nightly.ledger import Ledger
from pipelines.nightly.night import NightContext, run_night
from pipelines.recipe import recipes
from pipelines.stages import evaluation_stage, train
from pipelines.stages.context import Silent
from tasks import contracts
from tasks.run import Tracker
from tests.evaluation.evaluation_world import RECORD
from tests.nightly import farms

CHECK = contracts.check  # the real one: most nights here have none


class Killed(BaseException):
    """As kill -9: no handler of errors sees it, and the locks of the process are free afterwards."""


def model(ctx):
    (ctx.folder / "model").mkdir(exist_ok=True)
    no_tensors = struct.pack("<Q", 2) + b"{}"  # a head without names
    (ctx.folder / "model" / "model.safetensors").write_bytes(no_tensors)
    ctx.metrics({})


def evaluated(ctx):
    """The base model answers nothing of twelve questions right; each training answers four more than the one before."""
    place = ctx.inputs.get("sft", ctx.folder) / "trainings"
    right = 4 * int(place.read_text()) if place.is_file() else 0
    records = [
        dataclasses.replace(
            RECORD, example_id=f"t{number}", database=f"d{number}", scores={ctx.recipe.headline: float(number < right)}
        )
        for number in range(12)
    ]
    rows = [{"pass": "greedy", "record": to_dict(record)} for record in records]
    (ctx.folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ctx.metrics({"ex": right / 12})


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    trainings = itertools.count(1)

    def sft(ctx):
        model(ctx)
        (ctx.folder / "trainings").write_text(str(next(trainings)))

    monkeypatch.setattr(train, "model", model)
    monkeypatch.setattr(train, "sft", sft)
    monkeypatch.setattr(evaluation_stage, "build", evaluated)
    monkeypatch.setattr(contracts, "check", lambda result, recipe: None)  # another test's
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    (tmp_path / "inbox").mkdir()
    return recipes.load("miniature", farms.overrides(tmp_path, base))


def a_night(recipe, store, before=lambda last, role: None, day=None, words=()):
    """A night, or a day's replay; `before` is called with the last stage and the role of each part that it makes.

    Guards are read with the overrides `words`.
    """

    def walk(part, at, steps, role):
        before(steps[-1].name, role)
        with Tracker(part, at, pytest.fail) as tracker:
            tracker.recorder.off = True
            return terminal.walk(part, at, steps, role, progress=Silent(), tracker=tracker)

    return run_night(NightContext("miniature", words, recipe, store, walk, contracts.check), day)


def test_past_days_are_replayed_in_order_each_once_and_a_killed_replay_goes_on(tmp_path, recipe):
    """Three days of which the first is before the date; the night of the third dies in training, its batch frozen."""
    store, trained = Store(tmp_path / "store"), list[str]()
    book, since = Ledger(store, "miniature"), date(2026, 11, 3)
    for number in (2, 3, 5):
        file = farms.questions(tmp_path / "inbox", f"{number}.jsonl", farms.named(f"n{number}", number), [0])
        moment = datetime(2026, 11, number, 23, 59, tzinfo=UTC).timestamp()
        os.utime(file, (moment, moment))

    def die(last, role):
        trained.extend([last] if role == "" and last == "sft" else [])
        if len(trained) == 2:
            raise Killed

    days = inbox.delivery_days(recipe.nightly, since)
    assert days == [since, date(2026, 11, 5)]
    with pytest.raises(Killed):
        [a_night(recipe, store, die, day) for day in days]
    assert [row["rows"] for row in book.lines()] == [3]
    assert [a_night(recipe, store, day=day)["decision"] for day in days] == ["promoted", "nothing"]
    assert [a_night(recipe, store, day=day)["decision"] for day in days] == ["nothing", "nothing"]
    assert [(row["decision"], row["rows"]) for row in book.lines()] == [("promoted", 3), ("promoted", 5)]
    assert a_night(recipe, store)["rows"] == 2  # the next night without a date takes the older day's
    with pytest.raises(DataError, match="has no file of 2026-11-06 or later: its newest is of 2026-11-05"):
        inbox.delivery_days(recipe.nightly, date(2026, 11, 6))


def test_the_next_night_decides_the_same_and_makes_nothing_again(tmp_path, recipe, monkeypatch):
    store = Store(tmp_path / "store")

    def die(ledger, event, **facts):
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
    tmp_path, recipe, start, during, decision, reason
):
    """Three trainings answer 4, 8 and 12 of 12; the second one's is rolled back while the third night is at work."""
    recipe = recipe.model_copy(update={"nightly": recipe.nightly.model_copy(update={"start": start})})
    store, rolled_back = Store(tmp_path / "store"), list[str]()
    book = Ledger(store, "miniature")

    def roll_back(last, role):
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
    assert champion.key == (keys[2] if decision == "promoted" else keys[0])
    assert len(book.usable()) == 3
    assert book.undecided() == []


def test_a_night_of_staging_begins_with_the_champion_of_prod_and_leaves_it_there(tmp_path, recipe):
    store = Store(tmp_path / "store")
    first = a_night(recipe, store)
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 2), [0, 1])
    staging = recipe.model_copy(update={"nightly": recipe.nightly.model_copy(update={"tier": "staging"})})
    line = a_night(staging, store)
    assert "tier" not in first
    assert (line["decision"], line["tier"], line["champion"]) == ("promoted", "staging", first["challenger"])
    champions = [Ledger(store, "miniature").champion(tier).key for tier in ("prod", "staging")]
    assert champions == [row["challenger"]["key"] for row in (first, line)]


def test_a_champion_that_comes_while_the_first_night_of_prod_is_at_work_is_compared_with(tmp_path, recipe):
    """A person promotes staging's champion, which answers 4 of 12, while the second training, with 8, is evaluated."""
    store = Store(tmp_path / "store")
    book = Ledger(store, "miniature")
    staging = recipe.model_copy(update={"nightly": recipe.nightly.model_copy(update={"tier": "staging"})})
    first = a_night(staging, store)
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 2), [0, 1])
    promoted = []

    def promote(last, role):
        if (last, role) == ("evaluate_sft", "") and not promoted:
            promoted.append(book.promote())

    line = a_night(recipe, store, promote)
    assert line["champion"] == first["challenger"]
    assert line["reason"].startswith("better: 33.3 to 66.7 % of 12 questions")


def test_a_night_without_new_rows_takes_nothing_back(tmp_path, recipe, monkeypatch):
    """Prod has no champion yet and staging's batch is decided: the union breaks its contract, and the night fails."""
    store = Store(tmp_path / "store")
    staging = recipe.model_copy(update={"nightly": recipe.nightly.model_copy(update={"tier": "staging"})})
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 2), [0, 1])
    a_night(staging, store)

    def refuse(result, recipe):
        if (result.folder / "parts").is_dir():
            raise DataError("the union breaks its contract", "Mend the rows.")

    monkeypatch.setattr(contracts, "check", refuse)
    with pytest.raises(DataError) as caught:
        a_night(recipe, store)
    assert str(caught.value) == "the union breaks its contract. Mend the rows."
    assert [row["decision"] for row in Ledger(store, "miniature").lines()] == ["promoted"]


def test_an_exploration_set_by_parts_is_drawn_from_the_recipes_own_sources_alone(tmp_path, recipe, monkeypatch):
    """Its numbers are those of the SFT pool and of one RL source; a new batch is one source too, and not that one."""
    by_parts = recipe.difficulty.model_copy(update={"explore": 2, "explore_parts": (1, 1)})
    recipe = recipe.model_copy(update={"difficulty": by_parts})
    store, parts, walk = Store(tmp_path / "store"), [], terminal.walk

    def noted(part, at, steps, role, **more):
        if (steps[-1].name, role) == ("sft", ""):
            parts.append(part.difficulty.explore_parts)
        return walk(part, at, steps, role, **more)

    monkeypatch.setattr(terminal, "walk", noted)
    a_night(recipe, store)
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 2), [0, 1])
    a_night(recipe, store)
    assert parts == [(1, 1), ()]


def test_a_batch_that_was_decided_on_stays_when_its_databases_are_gone(tmp_path, recipe):
    """The night fails, whatever else is new, until they are back or the batch is removed."""
    store = Store(tmp_path / "store")
    book = Ledger(store, "miniature")
    farms.questions(tmp_path / "inbox", "old.jsonl", ["n00"], [0, 1])
    (old,) = a_night(recipe, store)["learned"]
    (tmp_path / "inbox" / "n00.sqlite").rename(tmp_path / "n00.sqlite")
    farms.questions(tmp_path / "inbox", "new.jsonl", ["n01"], [0, 1])
    with pytest.raises(DataError) as caught:
        a_night(recipe, store)
    message = str(caught.value)
    assert message.startswith(f"the batch {old}, on which an earlier night decided, cannot be used any more: ")
    assert "pool sft: 2 of 2 rows of the jsonl source are bad" in message
    assert message.endswith(f"put them back; to go on without it, remove {book.batches / old}")
    assert "new again" not in message
    assert [row["decision"] for row in book.lines()] == ["promoted"]
    assert not (book.folder / "refused").exists()
    (tmp_path / "n00.sqlite").rename(tmp_path / "inbox" / "n00.sqlite")
    line = a_night(recipe, store)
    assert (line["decision"], line["learned"]) == ("promoted", (old, *line["new"]))


BROKEN = "SELECT size FROM nowhere"


def test_after_mending_the_bad_rows_all_rows_come_again(tmp_path):
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    recipe = recipes.load("miniature", [*farms.overrides(tmp_path, base), "stages=[data, sft]"])
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
    assert len(read_json(inbox.freeze_batch(recipe.nightly, book.batches) / "rows.json")) == 40


def test_rows_that_ask_what_is_held_out_take_no_part_and_the_others_go_on(tmp_path):
    """A person has confirmed an answer to a test question: the batch is learned without that row, once.

    A question of the same shape that asks for more rows is another one, and stays.
    """
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    recipe = recipes.load("miniature", [*farms.overrides(tmp_path, base), "sft.epochs=1"])
    store, book = Store(tmp_path / "store"), Ledger(Store(tmp_path / "store"), "miniature")
    file = farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 4), [2, 3])
    held = tmp_path / "held" / "t00.sqlite"
    add_row(file, held, 1, "confirmed")
    alike = {"question": "name the two oldest farms .", "sql": "SELECT name FROM farm ORDER BY built LIMIT 2"}
    file.write_text(file.read_text() + json.dumps({**alike, "database": str(held)}) + "\n")
    a_night(recipe, store)
    (batch,) = book.batches.glob("[0-9]*")
    (gone,) = [json.loads(line) for line in (batch / "held_out.jsonl").read_text().splitlines()]
    assert gone["id"].startswith("confirmed")
    assert len((batch / "questions.jsonl").read_text().splitlines()) == 9
    (line,) = book.lines()
    assert (line["decision"] != "refused", line["rows"], line["held_out"]) == (True, 10, 1)
    assert inbox.freeze_batch(recipe.nightly, book.batches) is None


def add_row(file, database, family, id=None):
    """Add a row that asks a family of a database to a file of questions."""
    question, sql = farms.FAMILIES[family]
    row = {"id": id, "question": question, "database": str(database), "sql": sql}
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


def test_rows_that_ask_what_a_guard_or_a_further_benchmark_asks_take_no_part_either(tmp_path, recipe, monkeypatch):
    """Also those that were learned before the guard came; the recipe's own questions may be a guard's."""
    monkeypatch.setattr(contracts, "check", CHECK)
    local = tmp_path / "conf" / "local"
    local.mkdir(parents=True)
    monkeypatch.setattr(recipes, "LOCAL", local)
    guard = farms.questions(tmp_path / "guard", "guard.jsonl", ["g00"], [0, 1])
    add_row(guard, tmp_path / "base" / "b00.sqlite", 0)
    (local / "guard.yaml").write_text(f"data: {{test: [{{kind: jsonl, split: test, path: {guard}}}]}}\n")
    further = farms.questions(tmp_path / "further", "further.jsonl", ["f00"], [0, 1])
    store, book = Store(tmp_path / "store"), Ledger(Store(tmp_path / "store"), "miniature")
    inbox_file = farms.questions(tmp_path / "inbox", "old.jsonl", ["n00"], [2, 3])
    add_row(inbox_file, tmp_path / "guard" / "g00.sqlite", 0, "guarded")
    a_night(recipe, store)
    inbox_file = farms.questions(tmp_path / "inbox", "new.jsonl", ["n01"], [2, 3])
    add_row(inbox_file, tmp_path / "guard" / "g00.sqlite", 1, "guarded too")
    add_row(inbox_file, tmp_path / "further" / "f00.sqlite", 0, "further")
    first = f"{{kind: jsonl, path: {tmp_path / 'held' / 'test.jsonl'}, split: test}}"
    others = [f"{{name: {path.stem}, kind: jsonl, path: {path}}}" for path in (further, tmp_path / "gone.jsonl")]
    words = farms.overrides(tmp_path, tmp_path / "base" / "base.jsonl")
    words += [f"data.test=[{', '.join([first, *others])}]", "nightly.guards=[local/guard]"]
    line = a_night(recipes.load("miniature", words), store, words=words)
    old, new = book.batch_folders()
    set_aside = [[id.rpartition("-")[0] for id in inbox.held_out_rows(batch)] for batch in (old, new)]
    assert set_aside == [["guarded"], ["further", "guarded too"]]
    assert [len((batch / inbox.QUESTIONS).read_text().splitlines()) for batch in (old, new)] == [2, 2]
    assert (line["decision"], line["held_out"], line["learned"]) == ("promoted", 2, (old.name, new.name))
    assert all(store.has(stage, key) for stage, key in line["stages"])  # gc keeps them by these names


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The overrides of a night with one new question; two guards are added, and the questions of one are gone."""
    local = tmp_path / "conf" / "local"
    local.mkdir(parents=True)
    monkeypatch.setattr(recipes, "LOCAL", local)
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    for name, path in (("farms", base), ("moved", tmp_path / "moved.jsonl")):
        source = f"data: {{test: [{{name: {name}, kind: jsonl, split: test, path: {path}}}]}}\n"
        (local / f"{name}.yaml").write_text(source)
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 1), [0])
    return farms.overrides(tmp_path, base)


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ("local/spider_dj", "spider_dj"),
        ("data/spider_dk", "nightly.guards: data/spider_dk: no path to its questions"),
        ("local/moved", r"nightly.guards: local/moved: nothing is at .*moved\.jsonl"),
    ],
)
def test_a_guard_that_cannot_be_asked_stops_a_night_before_it_begins(tmp_path, words, guard, said):
    words = [*words, f"nightly.guards=[local/farms, {guard}]"]
    store = Store(tmp_path / "store")

    def walk(*_):
        pytest.fail("a stage was made")

    with pytest.raises(RecipeError, match=said):
        run_night(NightContext("miniature", words, recipes.load("miniature", words), store, walk, walk))
    assert Ledger(store, "miniature").usable() == []  # its questions wait for the next night


def test_a_guard_is_the_recipe_over_other_questions(words):
    for name, benchmark in (("local/farms", "farms"), ("data/miniature", "miniature_test")):
        given = [*words, f"nightly.guards=[{name}]"]
        (guard,) = night.guards("miniature", given, recipes.load("miniature", given)).values()
        assert guard.benchmark.name == benchmark
        assert "gold_schema" not in guard.stages
