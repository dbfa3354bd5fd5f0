"""Decisions over verdicts that are counted by hand, unions of batches, and questions that a champion has seen."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.core import frames
from pipelines.core.errors import BoundaryError
from pipelines.core.files import read_json
from pipelines.core.frames import DATA
from pipelines.core.store import Store
from pipelines.core.types import HARDNESS_LEVELS, Database, Example, to_dict
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import sql_engine
from pipelines.evaluation.record_files import RECORDS
from pipelines.nightly import night
from pipelines.nightly.ledger import Champion
from pipelines.nightly.promotion import HeldOutRecords, decide_promotion, distance, question_drift, trained_on
from pipelines.nightly.union import UnionPart, unite
from pipelines.recipe import recipes
from pipelines.recipe.config import Nightly
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Silent, examples, rows_of, trajectories
from pipelines.stages.stage import StageResult
from tasks import checks
from tests.evaluation.evaluation_world import RECORD
from tests.nightly import farms


def records(right):
    """Question i is about database i // 4, at level i % 4."""
    return [
        dataclasses.replace(
            RECORD,
            example_id=f"q{index}",
            database=f"d{index // 4}",
            hardness=HARDNESS_LEVELS[index % 4],
            scores={"strict": float(good)},
        )
        for index, good in enumerate(right)
    ]


def held(before, after):
    return HeldOutRecords(records(before), records(after), "strict")


NONE, ALL = [False] * 48, [True] * 48
HALF = [index % 8 < 4 for index in range(48)]  # every second database


@pytest.mark.parametrize("test", ["bootstrap", "mcnemar"])
def test_clearly_better_is_promoted_and_clearly_worse_is_set_aside(test):
    settings = Nightly.model_validate({"test": test})
    better = decide_promotion(held(HALF, ALL), {}, settings, 0)
    assert better.decision == "promoted"
    assert better.numbers["difference"] == 0.5
    assert (better.numbers["gained"], better.numbers["lost"]) == (24, 0)
    assert better.numbers["p_mcnemar"] == 2 * 0.5**24
    assert decide_promotion(held(ALL, HALF), {}, settings, 0).decision == "worse"


def test_a_few_questions_more_are_no_proof():
    verdict = decide_promotion(held(NONE, [index < 5 for index in range(48)]), {}, Nightly(test="mcnemar"), 0)
    assert verdict.decision == "kept"
    assert verdict.numbers["p_mcnemar"] == 2 * 0.5**5  # 0.0625
    assert "not shown to be better" in verdict.reason
    six = [index < 6 for index in range(48)]
    assert decide_promotion(held(NONE, six), {}, Nightly(test="mcnemar"), 0).decision == "promoted"  # 0.03125


def test_a_guard_that_compares_nothing_lets_nobody_be_promoted():
    """Every answer of the challenger broke there, or the champion was trained on all of its questions."""
    broken = [dataclasses.replace(record, broken=True) for record in records(ALL)]
    for guard in (HeldOutRecords(records(HALF), broken, "strict"), HeldOutRecords([], [], "strict")):
        verdict = decide_promotion(held(HALF, ALL), {"farms": held(HALF, ALL), "ports": guard}, Nightly(), 0)
        assert verdict.decision == "kept"
        assert verdict.reason.startswith("whether it loses on ports cannot be told")
        assert verdict.numbers["guard/farms"] == 0.5


def test_a_level_that_loses_more_than_the_bound_stops_a_better_challenger():
    before = [index % 4 == 3 for index in range(48)]  # only the extra ones
    after = [index % 4 != 3 or index < 40 for index in range(48)]  # all others, and 10 of 12 extra ones
    verdict = decide_promotion(held(before, after), {}, Nightly(), 0)
    assert verdict.decision == "kept"
    assert verdict.numbers["level/extra"] == pytest.approx(-2 / 12)
    assert "extra -16.7" in verdict.reason
    assert decide_promotion(held(before, after), {}, Nightly(max_drop=0.2), 0).decision == "promoted"


def test_a_level_of_which_nothing_was_answered_decides_nothing():
    """The only question of a level broke on one side: the night still decides by the others."""
    pairs = held(NONE, ALL)
    broken = [dataclasses.replace(one, broken=True) if one.hardness == "extra" else one for one in pairs.after]
    verdict = decide_promotion(HeldOutRecords(pairs.before, broken, "strict"), {}, Nightly(), 0)
    assert verdict.decision == "promoted"
    assert "level/extra" not in verdict.numbers


def test_a_guard_that_is_answered_worse_stops_it_too():
    guard = held([True] * 20, [index > 0 for index in range(20)])  # one of twenty: five points
    verdict = decide_promotion(held(NONE, ALL), {"data/spider_dk": guard}, Nightly(), 0)
    assert verdict.decision == "kept"
    assert "data/spider_dk" in verdict.reason or "spider_dk -5.0" in verdict.reason
    assert (
        decide_promotion(held(NONE, ALL), {"data/spider_dk": guard}, Nightly(max_drop=0.05), 0).decision == "promoted"
    )


@pytest.mark.parametrize("test", ["bootstrap", "mcnemar"])
@pytest.mark.parametrize("right", [NONE, HALF, ALL], ids=["none", "half", "all"])
def test_a_challenger_without_a_difference_or_a_right_answer_is_not_promoted(test, right):
    assert decide_promotion(held(right, right), {}, Nightly(test=test), 0).decision == "kept"
    assert decide_promotion(held(right, NONE), {}, Nightly(test=test, max_drop=1.0), 0).decision != "promoted"


def test_drift_sees_other_levels_and_other_lengths_but_nothing_in_a_handful():
    def asked(hardness, words, count):
        database = Database("d", "sqlite", "d.sqlite")
        return [
            Example(f"q{n}", " ".join(["w"] * (words + n % 4)), database, "SELECT 1", hardness=hardness)
            for n in range(count)
        ]

    old = asked("easy", 4, 100)
    assert question_drift(old, asked("easy", 4, 100)) == {"hardness": 0.0, "length": 0.0}
    found = question_drift(old, asked("extra", 40, 100))
    assert found["hardness"] == 1.0
    assert found["length"] >= 0.5
    assert question_drift(old, asked("extra", 40, 49)) == {}
    assert distance("aabb", "aabb") == 0
    assert distance("aaaa", "bb") == 1
    assert distance("aaab", "ab") == 0.25


def curated(store, recipe):
    steps = graph.plan(recipe, store, among=("data", "synthesize", "filter", "gold_schema"))
    return {step.name: stage_making.execute(step, recipe, store, Silent(), steps).key for step in steps}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The base of four databases and a batch of two, two questions of each: eight rows and four."""
    folder = tmp_path_factory.mktemp("union")
    store = Store(folder / "store")
    made = []
    for name, count, families in (("base", 4, [0, 1]), ("new", 2, [2, 3])):
        file = farms.questions(folder / name, f"{name}.jsonl", farms.named(name, count), families)
        recipe = recipes.load("miniature", farms.overrides(folder, file))
        made.append(curated(store, recipe))
    return store, recipe, made


def united(parts, fresh, replay):
    store, _, made = parts
    both = [UnionPart(keys, is_new) for keys, is_new in zip(made, fresh, strict=True)]
    return {stage: store.folder(stage, key) for stage, key in unite(store, both, replay, seed=0).items()}


def test_a_union_holds_every_row_once_and_its_gold_runs(parts):
    found = united(parts, [False, True], None)
    data = found["data"]
    assert len(examples(data, "sft")) == 12
    assert len(examples(data, "rl")) == 4  # the champion has learned the others
    assert len(examples(data, "dev")) == 12  # the held-out ones once
    asked = examples(data, "sft", "rl", "dev")
    assert all(Path(one.database.location).is_file() for one in asked)
    with sql_engine(parts[1], workers=1) as sql:
        assert all(result.ok for result in sql.execute_many([(one.database, one.gold_sql) for one in asked]))
    assert {one.example_id for one in trajectories(found["filter"])} == {one.id for one in examples(data, "sft")}
    schemas = gold_schemas(found["gold_schema"])
    assert schemas is not None
    assert set(schemas) == {one.id for one in asked}


def test_each_source_of_the_rl_pool_keeps_a_number_of_its_own(parts):
    data = united(parts, [True, True], None)["data"]
    assert [len(rows_of(data, "rl", part=part)) for part in range(3)] == [8, 4, 0]
    assert read_json(data / "metrics.json")["rl_sources"] == 2
    first, again = united(parts, [False, True], 0.5), united(parts, [False, True], 0.5)
    assert first == again
    assert first["filter"] != united(parts, [False, True], 1.0)["filter"]
    more = (*parts[:2], [*parts[2], parts[2][1]])  # eight old rows and four old ones; as many as the four fresh stay
    assert frames.read(united(more, [False, False, True], 1.0)["filter"] / DATA).height == 8


@pytest.mark.parametrize(("replay", "kept"), [(None, 12), (0.0, 4), (0.5, 6), (1.0, 8), (9.0, 12)])
def test_old_demonstrations_are_replayed_by_the_number_of_new_ones(parts, replay, kept):
    assert frames.read(united(parts, [False, True], replay)["filter"] / DATA).height == kept


def test_a_row_that_was_set_aside_is_in_a_union_once_under_a_name_of_its_own(tmp_path):
    """A bad dev row, which each part reads again, and a row without a database in line 2 of two batches alike.

    The rows of batch 1 that no RL question is drawn from any more would count against the few of batch 2.
    """
    store = Store(tmp_path / "store")
    path = farms.questions(tmp_path / "base", "base.jsonl", ["b00"], [0, 1])
    words = [*farms.overrides(tmp_path, path), "stages=[data, sft]", "data.max_bad_share=0.5"]
    farms.questions(tmp_path / "held", "dev.jsonl", ["d00"], range(6), poison=["SELECT size FROM nowhere"])
    made = [curated(store, recipes.load("miniature", words))]
    for name in ("n00", "n01"):
        file = farms.questions(tmp_path / name, "questions.jsonl", [name], [0, 1, 2])
        rows = [{**json.loads(row), "id": f"{name}-{n}"} for n, row in enumerate(file.read_text().splitlines())]
        rows[1]["database"] = "gone.sqlite"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        source = f"{{kind: jsonl, path: {file}}}"
        batch = recipes.load("miniature", [*words, f"data.sft={source}", f"data.rl=[{source}]"])
        made.append(curated(store, batch))
    parts = [UnionPart(keys, fresh) for keys, fresh in zip(made, [False, False, True], strict=True)]
    folder = store.folder("data", unite(store, parts, None, seed=0)["data"])
    rows = checks.example_rows(folder)
    assert rows["row"].is_unique().all()
    assert rows.height == 2 + 2 + 2 + 2 + 5 + 4  # sft of three parts, rl of the fresh one, dev; the rows set aside
    rejected = rows.filter(rows["rejected"].is_not_null())
    assert rejected["row"].to_list() == [
        "dev/parts/0/dev_1",
        "sft/parts/1/questions.jsonl:2",
        "sft/parts/2/questions.jsonl:2",
        "rl/parts/2/questions.jsonl:2",
    ]


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


def questions(store, stage, key, asked, pool, name="harbour"):
    database = Database(name, "sqlite", f"{name}.sqlite")
    made = [Example(id, question, database, sql) for id, question, sql in asked]
    table = frames.to_frame(made, extra=[{"pool": pool, "part": 0}] * len(made))
    store.make(stage, key, lambda folder: frames.write(folder / DATA, table), {}, pytest.fail)


def trained(store, key, data):
    for stage, own, inputs in (("filter", key, {"data": data}), ("sft", key, {"filter": key})):
        store.make(stage, own, lambda folder: (folder / "x").write_text(""), {"inputs": inputs}, pytest.fail)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store")
    questions(store, "data", "old", OLD, "sft")
    questions(store, "data", "new", NEW, "rl")
    questions(store, "data", "watched", TEST, "dev")  # no model learns from them
    questions(store, "data", "far", TEST, "sft", "ocean")
    questions(store, "test", "t", TEST, "test")
    for key, data in (("champion", "old"), ("challenger", "new"), ("other", "watched"), ("far", "far")):
        trained(store, key, data)
    return store


def test_questions_that_a_champion_was_trained_on_are_found(store):
    test = store.folder("test", "t")
    assert trained_on(store, ("sft", "champion"), ("sft", "challenger"), test) == {"t1", "t3"}
    assert trained_on(store, ("sft", "other"), ("sft", "challenger"), test) == frozenset()
    assert trained_on(store, ("sft", "far"), ("sft", "challenger"), test) == frozenset()  # of another database
    assert trained_on(store, ("sft", "champion"), ("sft", "champion"), test) == frozenset()
    assert trained_on(store, ("model", "base"), ("sft", "challenger"), test) == frozenset()  # nobody trained it here


def write_text(text, folder):
    (folder / RECORDS).write_text(text)


def record(id, right):
    digests = {"question_digest": id, "gold_digest": id}
    return dataclasses.replace(RECORD, example_id=id, scores={"strict": float(right)}, **digests)


@pytest.mark.parametrize(
    ("held", "champion", "start", "withdrawn", "decided", "decision", "said"),
    [
        (["t1", "t2", "t3"], "champion", "", "", "promoted", "promoted", "better: 0.0 to 100.0 % of 1 questions"),
        (["t1", "t3"], "champion", "", "", "promoted", "kept", "the champion was trained on all 2 questions that are"),
        (["t2"], "", "", "", "worse", "kept", "no champion yet, against the base model: "),
        (["t2"], "champion", "old", "old", "worse", "kept", "it was trained from a champion that was rolled back; "),
        (["t2"], "champion", "", "challenger", "promoted", "kept", "it was rolled back before; "),
    ],
)
def test_they_do_not_count_when_a_challenger_is_held_against_it(
    store, monkeypatch, held, champion, start, withdrawn, decided, decision, said
):
    """The champion knows the two that it was trained on; only the challenger knows the answer to the other one."""
    right = {"champion": {"t1", "t3"}, "challenger": {"t2"}, "base": set()}
    for key in right:
        lines = [{"pass": "greedy", "record": to_dict(record(name, name in right[key]))} for name in held]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        about = {"inputs": {"sft": key, "test": "t"}}
        store.make("evaluate_sft", key, partial(write_text, text), about, pytest.fail)

    def evaluated(site, recipe, who, role):
        return StageResult("evaluate_sft", who.key, store.folder("evaluate_sft", who.key), {}, True)

    monkeypatch.setattr(night, "evaluated", evaluated)

    def promoted(test, *_):
        before, after = (sum(item.scores["strict"] for item in side) for side in (test.before, test.after))
        reason = f"better: {100 * before:.1f} to {100 * after:.1f} % of {len(test.before)} questions"
        return night.PromotionDecision(decided, reason, {})

    monkeypatch.setattr(night, "decide_promotion", promoted)
    site = SimpleNamespace(name="miniature", overrides=(), store=store, recipe=recipes.load("miniature"))
    challenger = night.Challenger("sft", "challenger", "base", (), start)
    stands = Champion("sft", champion, (), 1) if champion else None
    verdict = night.compare_with_champion(site, challenger, stands, {withdrawn} - {""})
    assert verdict.decision == decision
    assert verdict.reason.startswith(said)


@pytest.mark.parametrize(("broken", "share", "stops"), [(3, 0.05, True), (1, 0.05, True), (1, 1 / 3, False)])
def test_nothing_is_decided_by_an_evaluation_that_a_boundary_broke(store, broken, share, stops):
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
            night.evaluated(site, recipe, challenger, "")
    else:
        assert night.evaluated(site, recipe, challenger, "") == result
    assert store.has("evaluate_sft", "e") is not stops
