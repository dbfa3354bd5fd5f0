"""Benchmarks in the layouts that their authors ship, written here at the size of a few rows."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from pipelines.benchmarks import base, synsql
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.registry import EQUALITIES
from pipelines.core.store import Store
from pipelines.core.types import ABSTENTION, Action, ActionKind, ExecutionResult, ExecutionStatus
from pipelines.evaluation.evaluate import evaluate
from pipelines.evaluation.summary import summarise
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.config import Sampling, Source
from pipelines.rewards.outcome import make_outcomes
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.equalities import official
from pipelines.sql.schema import introspect
from pipelines.stages import graph, preflight
from tests.fakes import build_database


def make_database(path):
    build_database(
        path,
        "CREATE TABLE ship (id INTEGER PRIMARY KEY, name TEXT, flag TEXT)",
        "INSERT INTO ship VALUES (1, 'Aurora', 'NO'), (2, 'Egret', 'LR')",
    )


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read(kind, path, root, split="dev", **settings):
    return base.read(Source(kind=kind, path=str(path), split=split, **settings), seed=0, root=root)


def reasons(loaded):
    return [(rejected.row, rejected.reason) for rejected in loaded.quarantine]


def spider_row(db="harbour", **changes):
    return {"db_id": db, "question": "How many ships?", "query": "SELECT count(*) FROM ship"} | changes


# Spider's variants, in their own repositories' folders beside Spider's databases


@pytest.fixture
def spider(tmp_path):
    folder = tmp_path / "spider"
    make_database(folder / "database" / "harbour" / "harbour.sqlite")
    return folder


def test_a_split_of_several_files_of_which_one_is_missing_is_told(spider, tmp_path, caplog):
    write(spider / "train_spider.json", json.dumps([spider_row()]))
    read("spider", spider, tmp_path / "own alone", "train", options={"others": False})
    assert not caplog.records
    for number in range(2):
        assert len(read("spider", spider, tmp_path / f"stage {number}", "train").examples) == 1
    (told,) = caplog.records
    words = "the questions of split train are those of train_spider.json alone (options.others=false asks for no other)"
    assert told.getMessage() == f"{spider} has no train_others.json: {words}"
    write(spider / "train_others.json", json.dumps([spider_row(question="All?")]))
    assert len(read("spider", spider, tmp_path / "all", "train").examples) == 2
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("variant", "file", "stem"),
    [("sparc", "dev.json", "dev"), ("cosql", "sql_state_tracking/cosql_dev.json", "cosql_dev")],
)
def test_a_question_of_a_conversation_has_those_before_it_as_history(spider, tmp_path, variant, file, stem):
    first, second = ("How many ships?", "SELECT count(*) FROM ship"), ("Their names?", "SELECT name FROM ship")
    turns = [{"utterance": text, "query": sql} for text, sql in (first, second)]
    whole = {"database_id": "harbour", "interaction": [*turns, {"utterance": "Thanks"}, "x"], "final": {}}
    write(spider / file, json.dumps([{"database_id": "harbour"}, whole]))
    loaded = read("spider", spider, tmp_path / "stage", options={"variant": variant})
    assert [(one.question, one.gold_sql) for one in loaded.examples] == [first, second]
    assert [one.meta["history"] for one in loaded.examples] == [[], [list(first)]]
    assert [one.id for one in loaded.examples] == [f"spider_{variant}_{stem}_1_{turn}" for turn in (0, 1)]
    assert {one.meta["interaction"] for one in loaded.examples} == {f"spider_{variant}_{stem}_1"}
    assert {one.meta["interaction_questions"] for one in loaded.examples} == {2}  # what has no SQL is no question
    bad = [("[0][0]", "empty_db_id"), ("[1][2]", "empty_query"), ("[1][3]", "not_an_object")]
    assert reasons(loaded) == [(f"{file.rpartition('/')[2]}{place}", reason) for place, reason in bad]


def test_a_count_takes_conversations_whole(spider, tmp_path):
    """Of eight conversations of 2 or 3 questions; with one left out, the interaction match would have none to count."""
    sizes = [2, 3] * 4
    turns = {"utterance": "How many ships?", "query": "SELECT count(*) FROM ship"}
    rows = [{"database_id": "harbour", "interaction": [turns] * size} for size in sizes]
    write(spider / "dev.json", json.dumps(rows))
    drawn = {}
    for count in (1, 10, 19):
        loaded = read("spider", spider, tmp_path / f"stage {count}", options={"variant": "sparc"}, count=count)
        drawn[count] = Counter(example.meta["interaction"] for example in loaded.examples)
        assert count - 2 <= drawn[count].total() <= count
    for count in (10, 19):
        assert all(size == sizes[int(name.rpartition("_")[2])] for name, size in drawn[count].items())
    assert drawn[1].total() == 1
    assert list(drawn[10]) != [f"spider_sparc_dev_{number}" for number in range(4)]


def test_spider_dk_asks_of_its_own_databases_and_of_spiders(spider, tmp_path):
    write(spider / "Spider-DK" / "Spider-DK.json", json.dumps([spider_row(), spider_row("new_harbour")]))
    make_database(spider / "Spider-DK" / "database" / "new_harbour" / "new_harbour.sqlite")
    loaded = read("spider", spider, tmp_path / "stage", options={"variant": "dk"})
    found = [(one.id, one.database.id) for one in loaded.examples]
    assert found == [("spider_dk_Spider-DK_0", "harbour"), ("spider_dk_Spider-DK_1", "new_harbour")]
    assert all((tmp_path / "stage" / one.database.location).is_file() for one in loaded.examples)


def test_spider_syn_has_a_train_part_and_its_own_question(spider, tmp_path):
    row = spider_row(SpiderQuestion="How many ships?", SpiderSynQuestion="How many vessels?")
    write(spider / "Spider-Syn" / "Spider-Syn" / "train_spider.json", json.dumps([row]))
    (example,) = read("spider", spider, tmp_path / "stage", "train", options={"variant": "syn"}).examples
    assert (example.question, example.source) == ("How many vessels?", "spider_syn")
    write(spider / "dev.json", json.dumps([row]))
    (example,) = read("spider", spider, tmp_path / "stage", options={"variant": "syn"}).examples
    assert example.question == "How many vessels?"


def test_spider_realistic_keeps_its_name_and_a_missing_file_is_named(spider, tmp_path):
    write(spider / "spider-realistic.json", json.dumps([spider_row()]))
    (example,) = read("spider", spider, tmp_path / "stage", options={"variant": "realistic"}).examples
    assert example.source == "spider_realistic"
    with pytest.raises(DataError, match=r"Spider-DK\.json"):
        read("spider", spider, tmp_path / "stage", options={"variant": "dk"})


def test_a_test_database_may_bear_a_dev_databases_name(spider, tmp_path):
    make_database(spider / "test_database" / "harbour" / "harbour.sqlite")
    places = set()
    for split in ("dev", "test"):
        write(spider / f"{split}.json", json.dumps([spider_row()]))
        places.add(read("spider", spider, tmp_path / "stage", split).examples[0].database.location)
    assert len(places) == 2


# KaggleDBQA


def test_kaggledbqa_splits_are_files_of_each_database(tmp_path):
    make_database(tmp_path / "kaggle" / "databases" / "harbour" / "harbour.sqlite")
    for ending, count in (("", 3), ("_fewshot", 1), ("_test", 2)):
        write(tmp_path / "kaggle" / "examples" / f"harbour{ending}.json", json.dumps([spider_row()] * count))
    for split, count in (("dev", 3), ("train", 1), ("test", 2)):
        assert len(read("kaggledbqa", tmp_path / "kaggle", tmp_path / "stage", split).examples) == count
    with pytest.raises(DataError, match="no questions of split test"):
        read("kaggledbqa", tmp_path, tmp_path / "stage", "test")


# BIRD's column descriptions


@pytest.fixture
def bird(tmp_path):
    folder = tmp_path / "bird"
    make_database(folder / "dev_databases" / "harbour" / "harbour.sqlite")
    row = {"question_id": 7, "db_id": "harbour", "question": "Norwegian ships?", "evidence": "Norwegian: flag = 'NO'"}
    row |= {"SQL": "SELECT name FROM ship WHERE flag = 'NO'", "difficulty": "simple"}
    write(folder / "dev.json", json.dumps([row]))
    head = "original_column_name,column_name,column_description,data_format,value_description\n"
    text = head + 'flag,,country of registry,text,"NO: Norway\nLR: Liberia"\nname,,name,text,\n id ,,number,integer,\n'
    place = folder / "dev_databases" / "harbour" / "database_description" / "ship.csv"
    place.parent.mkdir()
    place.write_bytes(text.replace("number", "num\xe9ro").encode("cp1252"))  # some of BIRD's files are Windows text
    return folder


def test_bird_descriptions_join_the_evidence_where_they_say_more_than_the_name(bird, tmp_path):
    (example,) = read("bird", bird, tmp_path / "stage", options={"descriptions": True}).examples
    assert example.evidence.splitlines() == [
        "Norwegian: flag = 'NO'",
        "ship.flag: country of registry; NO: Norway LR: Liberia",
        "ship.id: numéro",
    ]
    (plain,) = read("bird", bird, tmp_path / "stage").examples
    assert plain.evidence == "Norwegian: flag = 'NO'"


def test_descriptions_that_are_not_there_or_of_another_form_are_told(bird, tmp_path, caplog):
    place = bird / "dev_databases" / "harbour" / "database_description"
    described = {"options": {"descriptions": True}}
    read("bird", bird, tmp_path / "stage", **described)
    assert not caplog.records
    table = place / "ship.csv"
    table.write_bytes(table.read_bytes().replace(b",", b";"))
    for number in range(2):
        (example,) = read("bird", bird, tmp_path / f"other form {number}", **described).examples
        assert example.evidence == "Norwegian: flag = 'NO'"
    table.unlink()
    read("bird", bird, tmp_path / "gone", **described)
    assert [record.getMessage() for record in caplog.records] == [
        f"{table} describes no column: its first line names no original_column_name, with commas between",
        f"no CSV file in {place}: no column of this database is described",
    ]


# Spider 2.0-lite


def instance(id, db, question, document=None):
    return {"instance_id": id, "db": db, "question": question, "external_knowledge": document}


@pytest.fixture
def spider2(tmp_path):
    folder = tmp_path / "spider2-lite"
    make_database(folder / "resource" / "databases" / "spider2-localdb" / "harbour.sqlite")
    write(folder / "resource" / "documents" / "ships.md", "A ship sails under one flag.\n")
    rows = [
        instance("bq001", "ga4", "?"),
        instance("local001", "harbour", "Which ships?", "ships.md"),
        instance("local002", "harbour", "Flags?"),
        instance("local003", "nowhere", "Gone?"),
        instance("local004", "harbour", "No gold?"),
    ]
    write(folder / "spider2-lite.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    gold = folder / "evaluation_suite" / "gold"
    standard = [{"instance_id": row["instance_id"], "condition_cols": [], "ignore_order": True} for row in rows]
    standard[2] |= {"condition_cols": [1]}
    write(gold / "spider2lite_eval.jsonl", "".join(json.dumps(row) + "\n" for row in standard))
    write(gold / "exec_result" / "local001.csv", "name\nAurora\nEgret\n")
    write(gold / "exec_result" / "local002_a.csv", "n,flag\n1,NO\n1,LR\n")
    write(gold / "exec_result" / "local002_b.csv", "n,flag\n2,NO\n")
    write(gold / "exec_result" / "local003.csv", "n\n1\n")
    write(gold / "sql" / "local001.sql", "SELECT name FROM ship\n")
    return folder


def test_spider2_takes_the_instances_that_run_on_sqlite(spider2, tmp_path):
    loaded = read("spider2", spider2, tmp_path / "stage", "test")
    first, second = loaded.examples
    assert (first.id, second.id) == ("spider2_local001", "spider2_local002")
    assert (first.evidence, first.gold_sql) == ("A ship sails under one flag.", "SELECT name FROM ship")
    results = [[["name"], ["Aurora"], ["Egret"]]]
    assert first.meta["gold_results"] == {"results": results, "columns": [[]], "ignore_order": True}
    assert second.gold_sql == ""
    assert second.meta["gold_results"]["columns"] == [[1], [1]]
    assert reasons(loaded) == [
        ("spider2-lite.jsonl:local003", "missing_database"),
        ("spider2-lite.jsonl:local004", "missing_gold"),
    ]
    with SqlEngine(Limits(timeout_s=5)) as engine:  # gold results without gold SQL only need their database
        assert base.check_gold(loaded.examples, engine, tmp_path / "stage") == (loaded.examples, [])


def set_condition_columns(spider2, instance_id, listed):
    standards = spider2 / "evaluation_suite" / "gold" / "spider2lite_eval.jsonl"
    rows = [json.loads(line) for line in standards.read_text().splitlines()]
    for row in rows:
        if row["instance_id"] == instance_id:
            row["condition_cols"] = listed
    write(standards, "".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("listed", [["a"], "x", [[None]], 3, {"a": 1}, [[0], 1], [True]])
def test_spider2_sets_a_row_aside_whose_columns_are_no_numbers(spider2, tmp_path, listed):
    set_condition_columns(spider2, "local001", listed)
    loaded = read("spider2", spider2, tmp_path / "stage", "test")
    assert reasons(loaded)[0] == ("spider2-lite.jsonl:local001", "bad_standard")
    assert [example.id for example in loaded.examples] == ["spider2_local002"]


@pytest.mark.parametrize(
    ("listed", "counted"),
    [([[0], [1]], [[0], [1]]), ([[0]], [[0], [0]]), ([1], [[1], [1]]), ([[]], [[], []]), ([None], [[], []])],
)
def test_spider2_counts_the_columns_of_all_results_or_of_each(spider2, tmp_path, listed, counted):
    set_condition_columns(spider2, "local002", listed)
    example = read("spider2", spider2, tmp_path / "stage", "test").examples[1]
    assert example.meta["gold_results"]["columns"] == counted


def test_spider2_questions_and_results_may_hold_anything(spider2, tmp_path):
    rows = [instance("local001", "harbour", "a\u2028b\u0085c"), instance("local002", "x" * 300, "?")]
    write(spider2 / "spider2-lite.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write(spider2 / "evaluation_suite" / "gold" / "exec_result" / "local001.csv", "n\n" + "x" * 140_000 + "\n")
    loaded = read("spider2", spider2, tmp_path / "stage", "test")
    (one,) = loaded.examples
    assert (one.question, len(one.meta["gold_results"]["results"][0][1][0])) == ("a\u2028b\u0085c", 140_000)
    assert reasons(loaded) == [("spider2-lite.jsonl:local002", "unreadable_database")]


# SynSQL-2.5M


@pytest.fixture
def synthetic(tmp_path):
    folder = tmp_path / "synsql"
    make_database(folder / "databases" / "harbour" / "harbour.sqlite")
    levels = ("Simple", "Moderate", "Complex", "Highly Complex")
    row = {"db_id": "harbour", "sql": "SELECT name FROM ship", "cot": "x" * 50, "question_style": "Formal"}
    row["external_knowledge"] = ""
    rows = [row | {"question": f"Question {n} ?", "sql_complexity": levels[n % 4]} for n in range(40)]
    rows[3] |= {"db_id": "harbour.db", "external_knowledge": "NO is Norway."}
    rows.append("no row")
    write(folder / "data.json", json.dumps(rows, indent=1))
    return folder


@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_synsql_rows_are_the_same_however_the_file_is_cut(synthetic, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(synsql, "CHUNK", chunk)
    loaded = read("synsql", synthetic, tmp_path / "stage", "train")
    assert [one.id for one in loaded.examples] == [f"synsql_{number}" for number in range(40)]
    third = loaded.examples[3]
    assert (third.database.id, third.evidence) == ("harbour", "NO is Norway.")
    assert third.meta == {"difficulty": "Highly Complex", "style": "Formal"}
    assert reasons(loaded) == [("data.json[40]", "not_an_object")]


@pytest.mark.parametrize("chunk", [16, 1 << 20])
def test_a_synsql_file_that_goes_on_behind_its_list_is_refused(synthetic, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(synsql, "CHUNK", chunk)
    file = synthetic / "data.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(f"{text}\n \n", encoding="utf-8")
    assert read("synsql", synthetic, tmp_path / "stage", "train").examples
    file.write_text(f"{text}\n{text}", encoding="utf-8")
    with pytest.raises(DataError, match=r"data\.json goes on behind the end of its list\. Join what it holds"):
        read("synsql", synthetic, tmp_path / "refused", "train")


def test_synsql_levels_and_a_seeded_sample(synthetic, tmp_path):
    options = {"complexity": ["Moderate", "Complex"]}
    every = read("synsql", synthetic, tmp_path / "stage", "train", options=options).examples
    assert len(every) == 20
    some = read("synsql", synthetic, tmp_path / "stage", "train", options=options, count=5).examples
    assert some == read("synsql", synthetic, tmp_path / "stage", "train", options=options, count=5).examples
    assert len(some) == 5
    assert [one.id for one in every if one in some] == [one.id for one in some]  # in the file's order


def test_synsql_gives_as_many_of_each_level_as_a_recipe_asks_for(synthetic, tmp_path):
    """TRUST-SQL's table 5 counts its questions by level; a row that is no object is still told."""

    def drawn(seed=0, **counts):
        levels = {level.replace("_", " "): count for level, count in counts.items()}
        settings = Source(kind="synsql", path=str(synthetic), options={"complexity": levels})
        return base.read(settings, seed, tmp_path / "stage")

    loaded = drawn(Moderate=3, Highly_Complex=2)
    assert sorted(one.meta["difficulty"] for one in loaded.examples) == ["Highly Complex"] * 2 + ["Moderate"] * 3
    assert reasons(loaded) == [("data.json[40]", "not_an_object")]
    numbers = [int(one.id.removeprefix("synsql_")) for one in loaded.examples]
    assert numbers == sorted(numbers)  # in the file's order
    assert drawn(Moderate=3, Highly_Complex=2).examples == loaded.examples
    assert drawn(1, Moderate=3, Highly_Complex=2).examples != loaded.examples
    with pytest.raises(DataError, match="10 rows of the level 'Complex', and 11 are asked for"):
        drawn(Complex=11)
    with pytest.raises(ValueError, match="complexity"):
        drawn(Hard=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"db_id": 1}', "does not begin with a JSON list"),
        (b'[{"db_id": "a"}, {"db_id"', "ends within item 1"),
        (b"", "does not begin with a JSON list"),
        (b'[{"db_id": nonsense ' + b"x" * 5000, "item 0 is not JSON"),  # it does not fill the memory
        (b'[{"db_id": "Norv\xe8ge"}]', r"data\.json is not UTF-8"),
    ],
)
def test_a_torn_synsql_file_says_where(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(synsql, "CHUNK", 64)
    monkeypatch.setattr(synsql, "MOST_CHARS", 256)
    (tmp_path / "data.json").write_bytes(text)
    with pytest.raises(DataError, match=message):
        read("synsql", tmp_path, tmp_path / "stage", "train")


def patient(number, query, **changes):
    row = {"id": f"q{number}", "db_id": "harbour", "question": f"Question {number}?", "query": query}
    return row | {"is_impossible": False, "q_tag": "how many"} | changes


@pytest.fixture
def records(tmp_path):
    home = tmp_path / "EHRSQL" / "dataset" / "ehrsql" / "harbour"
    make_database(home / "harbour.sqlite")
    rows = [
        patient(1, "SELECT COUNT(*) FROM ship WHERE name < current_time"),
        patient(2, "null", is_impossible=True),
        patient(3, "SELECT name FROM ship WHERE flag = 'NO'"),
        patient(4, "SELECT flag FROM ship", db_id="../x"),
        patient(5, "null", is_impossible=True),
        patient(6, "select id from ship where id between temperature_lower and temperature_upper"),
    ]
    write(home / "valid.json", json.dumps(rows))
    return tmp_path / "EHRSQL"


def test_ehrsql_reads_what_can_be_answered_as_the_official_script_repairs_it(records, tmp_path):
    loaded = read("ehrsql", records, tmp_path / "stage")
    assert [one.id for one in loaded.examples] == ["ehrsql_q1", "ehrsql_q3", "ehrsql_q6"]
    assert loaded.examples[0].gold_sql == "select count(*) from ship where name < '2105-12-31 23:59:00'"
    assert loaded.examples[2].gold_sql == "select id from ship where id between 35.5 and 38.1"
    assert reasons(loaded) == [("harbour/valid.json[3]", "bad_database_id")]
    home = records / "dataset" / "ehrsql" / "harbour"
    found = set(base.files(Source(kind="ehrsql", path=str(records), split="dev")))
    assert found == {home / "valid.json", home / "harbour.sqlite"}
    with pytest.raises(DataError, match=r"no test\.json under"):
        read("ehrsql", records, tmp_path / "stage", "test")


ANSWERS = {  # right, abstained rightly and wrongly, and two that are wrong
    "ehrsql_q1": "SELECT count(*) FROM ship WHERE name < '2105'",  # 0 ships, as gold
    "ehrsql_q2": "select 'unanswerable' -- the database lacks it",
    "ehrsql_q3": "select 'unanswerable' AS answer;",
    "ehrsql_q5": "SELECT 'Aurora'",
    "ehrsql_q6": "SELECT name FROM ship",
}


def test_an_agent_may_abstain_and_is_right_where_the_database_has_no_answer(records, tmp_path):
    loaded = read("ehrsql", records, tmp_path / "stage", options={"unanswerable": True})
    asked = {example.id: example for example in base.resolve_locations(loaded.examples, tmp_path / "stage")}
    assert [id for id, example in asked.items() if example.gold_sql == ABSTENTION] == ["ehrsql_q2", "ehrsql_q5"]
    recipe = recipes.load("sql_trail", ["protocol.abstains=true"])
    prompts, protocol = [], build_protocol(recipe.protocol)

    def say(request):
        prompts.append(request.messages[0][1])
        return protocol.write(Action(ActionKind.SOLUTION, ANSWERS[request.example.id], "x"))

    requests = [EpisodeRequest(example, 0, 0) for example in asked.values()]
    with SqlEngine(Limits(timeout_s=5), workers=1) as sql:
        engine = RolloutEngine(ScriptedPolicy(say, "script"), protocol, sql, Sampling(), 4, introspect)
        played = engine.run(requests)
        records = evaluate(played, asked, sql, introspect, ["ehrsql"], "greedy")
        outcomes = make_outcomes(played, asked, sql, introspect, "ehrsql", 4)
    assert {prompt.count(ABSTENTION) for prompt in prompts} == {1}
    assert [outcome.correct for outcome in outcomes] == [True, True, False, False, False]
    figures = summarise(records, "ehrsql").flat()
    fates = ("answered_rightly", "abstained_rightly", "abstained_wrongly", "answered_wrongly")
    assert [figures[fate] for fate in fates] == pytest.approx([1 / 5, 1 / 5, 1 / 5, 2 / 5])
    answered = summarise([record for record in records if record.example_id in ("ehrsql_q1", "ehrsql_q6")], "ehrsql")
    assert not set(fates) & answered.flat().keys()
    resolved = [one.slice("protocol")["protocol"] for one in (recipe, recipes.load("sql_trail"))]
    assert resolved[0].keys() - resolved[1].keys() == {"abstains"}  # so no stage key of other recipes changes
    options = f"kind: ehrsql, path: {tmp_path / 'EHRSQL'}, split: dev, options: {{unanswerable: true}}"
    untold = recipes.load("sql_trail", [f"data.test=[{{{options}}}]"])
    with pytest.raises(RecipeError, match="may abstain"):
        preflight.check_run(untold, graph.plan(untold, Store(tmp_path)))


def test_the_six_official_figures_by_hand():
    # 3 answerable questions: one right, one wrong, one not answered; 2 without an answer: one abstained.
    cases = [(True, True, True), (True, True, False), (True, False, False), (False, False, False), (False, True, False)]
    figures = official.reliability(cases)
    answered = dict.fromkeys(("precision_ans", "recall_ans", "f1_ans"), 100 * 2 / 3)  # of 3 answers 2 could be given
    assert figures == pytest.approx(answered | dict.fromkeys(("precision_exec", "recall_exec", "f1_exec"), 100 / 3))
    assert set(official.reliability([(True, False, False)]).values()) == {0.0}


def test_answers_are_the_same_when_their_first_columns_are():
    for gold, predicted, same in (
        ([(1, "a"), (2, "b")], [(2,), (1,)], True),
        ([("1",)], [(1,)], True),
        ([(1,)], [(1,), (1,)], False),
        ([(1.0,)], [(1,)], False),
        ([], [], True),
    ):
        results = (ExecutionResult(ExecutionStatus.OK, rows=tuple(rows)) for rows in (gold, predicted))
        assert EQUALITIES["ehrsql"].compare(*results) == same


def test_score_counts_abstentions(records, tmp_path):
    from flows.cli import app

    predicted = {"q1": "SELECT count(id) FROM ship WHERE name < current_time", "q2": "null", "q3": "null"}
    predicted |= {"q5": "SELECT 1", "q6": "SELECT id, name FROM ship WHERE id > 35"}
    (tmp_path / "pred.json").write_text(json.dumps(predicted))
    home = records / "dataset" / "ehrsql"
    rows = json.loads((home / "harbour" / "valid.json").read_text())
    (tmp_path / "gold.json").write_text(json.dumps([row for row in rows if row["id"] != "q4"]))
    files = ["--gold", str(tmp_path / "gold.json"), "--pred", str(tmp_path / "pred.json"), "--database", str(home)]
    options = ["--equality", "ehrsql", "--out", str(tmp_path / "out.jsonl"), "--report", str(tmp_path / "report")]
    result = CliRunner().invoke(app, ["score", *files, *options, "--workers", "1", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output.splitlines()[-1])
    assert facts["scored"] == 3
    assert facts["equalities"]["ehrsql"]["all"] == pytest.approx(66.6667)
    # answered: q1 right, q5 (no answer), q6 right (both empty); answerable: q1, q3, q6
    assert facts["reliability"]["ehrsql"] == {
        "precision_ans": 66.6667, "recall_ans": 66.6667, "f1_ans": 66.6667,
        "precision_exec": 66.6667, "recall_exec": 66.6667, "f1_exec": 66.6667,
    }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["ehrsql"], line.get("abstained")) for line in lines] == [
        (True, None), (None, True), (False, None), (None, False), (True, None),
    ]  # fmt: skip
    assert "with the questions that have no answer: precision ans 66.7" in result.output


@pytest.mark.parametrize("together", [False, True])
def test_sciencebenchmark_has_a_file_for_each_database_or_one_for_all(tmp_path, together):
    folder = tmp_path / "science"
    make_database(folder / "databases" / "harbour" / "harbour.sqlite")
    row = {"db_id": "harbour", "question": "How many ships?", "query": "SELECT count(*) FROM ship", "values": []}
    write(folder / ("dev.json" if together else "harbour/dev.json"), json.dumps([row, row | {"db_id": "cordis"}]))
    loaded = read("sciencebenchmark", folder, tmp_path / "stage")
    assert [one.id for one in loaded.examples] == [f"sciencebenchmark_{'dev' if together else 'harbour_dev'}_0"]
    assert [reason for _, reason in reasons(loaded)] == ["missing_database"]
    server = read("sciencebenchmark", folder, tmp_path / "stage", options={"address": "postgresql://reader@db/"})
    found = [one.database.location for one in server.examples]
    assert found == ["postgresql://reader@db/harbour", "postgresql://reader@db/cordis"]
    with pytest.raises(DataError, match=r"no seed\.json under"):
        read("sciencebenchmark", folder, tmp_path / "stage", "train")
