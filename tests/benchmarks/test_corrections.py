"""Corrected gold SQL is laid over any source, and what was published stays beside it with the reason."""

import json

import pytest
from test_benchmarks import make_database, write

from pipelines.benchmarks import base, corrections
from pipelines.core.errors import DataError
from pipelines.recipe import recipes
from pipelines.recipe.config import Source
from pipelines.review import items
from pipelines.review.decisions import Decision, Review, ReviewFiles
from pipelines.sql import scoring
from pipelines.stages import data
from pipelines.stages.context import Context, Silent

PUBLISHED = "SELECT count(*) FROM ship"
BETTER = "SELECT count(DISTINCT flag) FROM ship"


@pytest.fixture
def bird(tmp_path):
    folder = tmp_path / "bird"
    for split in ("train", "dev"):
        make_database(folder / f"{split}_databases" / "harbour" / "harbour.sqlite")
        row = {"db_id": "harbour", "SQL": PUBLISHED}
        rows = [row | {"question_id": 40 + number, "question": f"How many flags, {number}?"} for number in range(3)]
        write(folder / f"{split}.json", json.dumps(rows))
    return folder


def read(folder, overlay, tmp_path):
    source = Source(kind="bird", path=str(folder), split="dev", corrections=str(overlay))
    assert overlay in set(base.files(source))  # which decide a stage's key
    return base.read(source, seed=0, root=tmp_path / "stage").examples


def test_a_corrected_gold_sql_is_taken_and_the_published_one_kept(bird, tmp_path):
    lines = [
        {"id": "bird_dev_1", "sql": BETTER, "reason": "ships were counted, not flags"},
        {"question_id": 42, "SQL": PUBLISHED},  # as published: nothing to say
    ]
    write(tmp_path / "overlay.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    found = read(bird, tmp_path / "overlay.jsonl", tmp_path)
    assert [one.gold_sql for one in found] == [PUBLISHED, BETTER, PUBLISHED]
    assert found[1].meta["corrected"] == {"reason": "ships were counted, not flags", "sql": PUBLISHED}
    assert found[1].meta["question_id"] == 41
    assert corrections.count_corrected(found) == 1


def test_corrections_of_a_table_are_read_and_one_without_a_header_is_refused(bird, tmp_path):
    overlay = tmp_path / "overlay.csv"
    write(overlay, f"question_id,sql,reason\n41,{BETTER},not ships\n")
    found = read(bird, overlay, tmp_path)
    assert [one.gold_sql for one in found] == [PUBLISHED, BETTER, PUBLISHED]
    write(overlay, f"41,{BETTER},not ships\n")
    with pytest.raises(DataError, match=r"overlay\.csv has no column id and no column sql"):
        read(bird, overlay, tmp_path)


def test_several_gold_queries_are_read_and_a_correction_replaces_them(bird, tmp_path):
    rows = json.loads((bird / "dev.json").read_text())
    for row in rows[:2]:
        row |= {"gold_sqls": [PUBLISHED, BETTER]}
    del rows[0]["SQL"]  # the first of the list is the gold query
    rows[2]["gold_sqls"] = "SELECT 1"
    write(bird / "dev.json", json.dumps(rows))
    loaded = base.read(Source(kind="bird", path=str(bird), split="dev"), seed=0, root=tmp_path / "stage")
    assert [(one.gold_sql, one.meta["gold_sqls"]) for one in loaded.examples] == [(PUBLISHED, [BETTER])] * 2
    assert [row.reason for row in loaded.quarantine] == ["wrong_type"]
    write(tmp_path / "overlay.jsonl", json.dumps({"id": "bird_dev_1", "sql": BETTER}))
    assert "gold_sqls" not in read(bird, tmp_path / "overlay.jsonl", tmp_path)[1].meta
    write(bird / "dev.json", json.dumps(rows[:2]))
    assert [one.more for one in scoring.read_gold(bird / "dev.json")] == [(BETTER,)] * 2


def test_a_further_gold_query_alone_is_a_correction(bird, tmp_path):
    entry = {"id": "bird_dev_1", "sql": PUBLISHED, "gold_sqls": [PUBLISHED, BETTER], "reason": "flags are meant, too"}
    write(tmp_path / "overlay.jsonl", json.dumps(entry))
    found = read(bird, tmp_path / "overlay.jsonl", tmp_path)[1]
    assert (found.gold_sql, found.meta["gold_sqls"]) == (PUBLISHED, [BETTER])
    assert found.meta["corrected"] == {"reason": "flags are meant, too"}
    assert found.hardness == "easy"
    rows = json.loads((bird / "dev.json").read_text())
    rows[1]["gold_sqls"] = [PUBLISHED, BETTER]
    write(bird / "dev.json", json.dumps(rows))
    assert "corrected" not in read(bird, tmp_path / "overlay.jsonl", tmp_path)[1].meta  # it is published by now


def test_a_corrected_copy_of_birds_question_file_is_an_overlay(bird, tmp_path):
    rows = json.loads((bird / "dev.json").read_text())
    rows[0] |= {"SQL": BETTER, "question": "How many different flags?"}
    write(tmp_path / "plat.json", json.dumps(rows))
    found = read(bird, tmp_path / "plat.json", tmp_path)
    assert (found[0].question, found[0].gold_sql) == ("How many different flags?", BETTER)
    assert found[0].meta["corrected"] == {"reason": "", "sql": PUBLISHED, "question": "How many flags, 0?"}


def test_a_row_with_several_sql_fields_is_read_alike_everywhere(bird, tmp_path):
    row = {"question_id": 41, "db_id": "harbour", "database": "a.sqlite", "question": "How many flags, 1?"}
    row |= {"sql": {"from": []}, "SQL": PUBLISHED, "query": BETTER}  # the first is Spider's parsed tree
    make_database(tmp_path / "a.sqlite")
    write(tmp_path / "own.jsonl", json.dumps(row))
    own = Source(kind="jsonl", path=str(tmp_path / "own.jsonl"))
    assert base.read(own, seed=0, root=tmp_path / "stage").examples[0].gold_sql == BETTER
    assert read(bird, tmp_path / "own.jsonl", tmp_path)[1].gold_sql == BETTER
    write(tmp_path / "gold.json", json.dumps([row]))
    assert scoring.read_gold(tmp_path / "gold.json")[0].sql == BETTER
    assert items.read_file(tmp_path / "own.jsonl", None)[0][0].example.gold_sql == BETTER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "bird_dev_9", "sql": "SELECT 1"}\n', "no correction of .* is of a question of this source"),
        ('{"id": "bird_dev_1"}\n', "line 1: no sql"),
        ('{"id": "bird_dev_1", "sql": 5}\n', "line 1: sql is a int, not text"),
        ('{"id": "bird_dev_1", "sql": "a"}\n{"id": "bird_dev_1", "sql": "b"}\n', "line 2: a second correction"),
        ("[5]", "line 1: a int where an object"),
        ('[{"id": "bird_dev_1", "sql": "a"},\n{"id": 5 "sql": "b"}]', "line 2: not JSON .Expecting ',' delimiter"),
        ("[", "line 1: not JSON"),
        ('{"sql": "SELECT 1"}\n', "line 1 names no question"),
        ('{"id": "bird_dev_1", "sql": "a", "sql": "b"}\n', "line 1: 'sql' stands twice in one object"),
        (None, "no such file"),
    ],
)
def test_a_damaged_overlay_is_the_users_mistake(bird, tmp_path, text, words):
    if text is not None:
        write(tmp_path / "overlay", text)
    with pytest.raises(DataError, match=words):
        read(bird, tmp_path / "overlay", tmp_path)


def test_a_question_id_that_two_questions_have_is_no_name_for_a_correction(bird, tmp_path):
    rows = json.loads((bird / "dev.json").read_text())
    rows[2]["question_id"] = 40
    write(bird / "dev.json", json.dumps(rows))
    write(tmp_path / "overlay", json.dumps({"question_id": 40, "sql": BETTER}))
    with pytest.raises(DataError, match=r"line 1 corrects question_id 40, which is of two .* bird_dev_0 and"):
        read(bird, tmp_path / "overlay", tmp_path)
    write(tmp_path / "overlay", json.dumps({"id": "bird_dev_2", "sql": BETTER}))
    assert [one.gold_sql for one in read(bird, tmp_path / "overlay", tmp_path)] == [PUBLISHED, PUBLISHED, BETTER]
    both = [{"id": "bird_dev_1", "sql": BETTER}, {"question_id": 41, "sql": PUBLISHED}]
    write(tmp_path / "overlay", json.dumps(both))
    with pytest.raises(DataError, match="corrects bird_dev_1 twice: by its id bird_dev_1 and by its question_id 41"):
        read(bird, tmp_path / "overlay", tmp_path)


def test_a_correction_of_no_question_is_told_with_its_line(bird, tmp_path):
    lines = [{"id": "bird_dev_1", "sql": BETTER}, {"id": "bird_dev_9", "sql": BETTER}]
    write(tmp_path / "overlay", "".join(json.dumps(line) + "\n" for line in lines))
    source = Source(kind="bird", path=str(bird), split="dev", corrections=str(tmp_path / "overlay"), count=2)
    loaded = base.read(source, seed=0, root=tmp_path / "stage")
    assert [(row.row, row.reason, row.chosen) for row in loaded.quarantine] == [
        ("overlay:2", "unused_correction", False)
    ]


def test_a_review_writes_one_correction_of_a_question_that_had_another_name(bird, tmp_path):
    overlay = tmp_path / "overlay.jsonl"
    entries = [{"question_id": number, "sql": BETTER, "reason": "flags"} for number in (40, 41)]
    write(overlay, "".join(json.dumps(entry) + "\n" for entry in entries))
    own = json.dumps({"kind": "bird", "path": str(bird), "split": "dev", "corrections": str(overlay)})
    recipe = recipes.load("miniature", [f"data.sft={own}", f"data.rl=[{own}]", f"data.dev={own}", f"data.test=[{own}]"])
    given = items.read_sources(recipe, tmp_path / "stage")
    files = ReviewFiles.of(tmp_path / "new.jsonl")
    review = Review("bird", given, files, items.corrected(recipe, given))
    texts = {**given[1].texts, "sql": "SELECT 2", "reason": "again"}
    review.keep(Decision(given[1].key, given[1].example.id, "mended", "2026-01-01T00:00:00Z", **texts))
    review.write()
    review.close()
    assert [json.loads(line) for line in files.out.read_text().splitlines()] == [
        {"question_id": "40", "sql": BETTER, "reason": "flags"},
        {"id": "bird_dev_1", "sql": "SELECT 2", "reason": "again"},
    ]
    assert [one.gold_sql for one in read(bird, files.out, tmp_path)] == [BETTER, "SELECT 2", PUBLISHED]


def test_the_metrics_count_the_corrections(bird, tmp_path):
    write(tmp_path / "overlay.jsonl", json.dumps({"id": "bird_dev_1", "sql": BETTER, "reason": "flags"}) + "\n")
    test = f"data.test=[{{kind: bird, split: dev, path: {bird}, corrections: {tmp_path / 'overlay.jsonl'}}}]"
    recipe = recipes.load("miniature", [test])
    (tmp_path / "made").mkdir()
    data.build_test(Context("data", recipe, tmp_path / "made", {}, Silent()))
    metrics = json.loads((tmp_path / "made" / "metrics.json").read_text())
    assert (metrics["test_corrected"], metrics["test_examples"]) == (1.0, 3.0)
