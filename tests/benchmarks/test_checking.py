"""The data stage in shards: the same rows from one process and two, and after a kill nothing is done twice."""

import json
import re

import polars as pl
import pytest

from pipelines.benchmarks import base
from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.types import Example
from pipelines.recipe import recipes
from pipelines.stages import data, gold_check
from pipelines.stages.context import Context, Silent
from tests.fakes import build_database


class Steps(Silent):
    def __init__(self):
        self.total = 0
        self.done = []
        self.notes = []

    def begin(self, stage, total, unit):
        self.total, self.done = total, []

    def advance(self, count, note=""):
        self.done.append(count)
        self.notes.append(note)


def recipe_of(folder, rows, *overrides, bad=0):
    """All pools are one file of questions about one database; the last `bad` ones have gold SQL that fails."""
    build_database(folder / "shop.sqlite", "CREATE TABLE IF NOT EXISTS t (a)")
    golds = [f"SELECT {number} FROM t" if number < rows - bad else "SELECT nope FROM t" for number in range(rows)]
    lines = [{"question": f"what is {n} ?", "sql": sql, "database": "shop.sqlite"} for n, sql in enumerate(golds)]
    (folder / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = f"{{kind: jsonl, path: {folder / 'own.jsonl'}}}"
    pools = [f"data.{pool}={source}" for pool in ("sft", "dev", "test.0")]
    return recipes.load("miniature", [*pools, f"data.rl=[{source}]", *overrides])


def pooled(sft, rl, dev):
    return recipes.load("miniature", ["rollout.processes=1", f"data.sft={sft}", f"data.rl=[{rl}]", f"data.dev={dev}"])


def build(recipe, folder, steps=None):
    folder.mkdir(exist_ok=True)
    data.build_pools(Context("data", recipe, folder, {}, steps or Silent()))
    return folder


def test_two_processes_write_what_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(gold_check, "BATCH", 6)
    one = build(recipe_of(tmp_path, 10, "rollout.processes=1"), tmp_path / "one")
    two = build(recipe_of(tmp_path, 10, "rollout.processes=2"), tmp_path / "two")
    for name in ("data.parquet", "quarantine.jsonl", "metrics.json", "leakage.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    frame = frames.read(one / "data.parquet")
    assert frame.group_by("pool").len().sort("pool")["len"].to_list() == [10, 10, 10]
    assert frame["pool"].to_list() == ["sft"] * 10 + ["rl"] * 10 + ["dev"] * 10


def test_a_killed_run_goes_on_and_shows_progress(tmp_path, monkeypatch):
    """Thirty gold queries in five shards of six; the run dies in the fourth."""
    monkeypatch.setattr(gold_check, "BATCH", 6)
    recipe, check, asked = recipe_of(tmp_path, 10, "rollout.processes=1"), base.check_gold, []

    def dies(*args):
        if len(asked) == 5:  # the second and the fourth shard are of two sources each
            raise KeyboardInterrupt
        asked.append(args)
        return check(*args)

    monkeypatch.setattr(base, "check_gold", dies)
    with pytest.raises(KeyboardInterrupt):
        build(recipe, tmp_path / "stage")
    monkeypatch.setattr(base, "check_gold", lambda *args: asked.append(args) or check(*args))
    monkeypatch.setattr(base, "load", lambda *args: pytest.fail("a source was read again"))
    asked.clear()
    steps = Steps()
    whole = build(recipe, tmp_path / "stage", steps)
    assert (steps.total, sum(steps.done), max(steps.done)) == (30, 30, 6)
    assert sum(len(args[0]) for args in asked) == 30 - 3 * 6
    assert frames.read(whole / "data.parquet").height == 30


def test_every_bad_row_of_every_pool_is_named_before_the_stage_fails(tmp_path):
    recipe = recipe_of(tmp_path, 10, bad=2)
    with pytest.raises(DataError, match=r"pool sft: 2 of 10 .*pool rl: 2 of 10 .*pool dev: .*quarantine"):
        build(recipe, tmp_path / "stage")
    rows = [json.loads(line) for line in (tmp_path / "stage" / "quarantine.jsonl").read_text().splitlines()]
    assert [row["pool"] for row in rows] == ["sft", "sft", "rl", "rl", "dev", "dev"]
    assert {row["reason"] for row in rows} == {"gold_no_such_column"}


def test_a_further_gold_query_that_fails_is_noted_and_its_question_stays(tmp_path):
    recipe = recipe_of(tmp_path, 1)
    row = {"question": "what is 0 ?", "database": "shop.sqlite", "gold_sqls": ["SELECT 0 FROM t", "SELECT nope FROM t"]}
    (tmp_path / "own.jsonl").write_text(json.dumps(row) + "\n")
    folder = build(recipe, tmp_path / "stage")
    assert json.loads((folder / "metrics.json").read_text())["rl_examples"] == 1
    noted = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["pool"], row["row"], row["reason"]) for row in noted] == [
        (pool, "own_1", "further_gold_no_such_column") for pool in ("sft", "rl", "dev")
    ]
    told = r"the question stays, without its further gold query: .*nope.*: SELECT nope FROM t"
    assert re.fullmatch(told, noted[0]["detail"])


def synsql(folder, golds):
    place = folder / "synsql" / "databases" / "shop"
    place.mkdir(parents=True)
    build_database(place / "shop.sqlite", "CREATE TABLE t (a)")
    rows = [{"db_id": "shop", "question": f"what is {n} ?", "sql": sql} for n, sql in enumerate(golds)]
    (folder / "synsql" / "data.json").write_text(json.dumps(rows))
    return f"{{kind: synsql, path: {folder / 'synsql'}}}"


def test_a_source_is_read_in_windows_with_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "WINDOW", 4)
    given, written = [], []
    load, to_frame = base.load, frames.to_frame

    def counted(*args):
        loaded = load(*args)
        return base.Loaded((given.append(one.id) or one for one in loaded.examples), loaded.quarantine)

    def noted(*args, **names):
        written.append(len(given))
        return to_frame(*args, **names)

    monkeypatch.setattr(base, "load", counted)
    monkeypatch.setattr(frames, "to_frame", noted)
    big = synsql(tmp_path, [f"SELECT {number} FROM t" for number in range(10)])
    recipe = pooled(big, "", big)
    steps = Steps()
    steps.begin = lambda *_: None
    folder = build(recipe, tmp_path / "stage", steps)
    assert written == [4, 8, 10, 14, 18, 20]
    assert [note for note in steps.notes if note.startswith("sft")] == [f"sft: {n} questions" for n in (4, 8, 10, 10)]
    assert frames.read(folder / "data.parquet")["id"].to_list() == [f"synsql_{n}" for n in range(10)] * 2


def test_levels_and_count_choose_as_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "WINDOW", 4)
    shapes = ["SELECT a FROM t", "SELECT a, count(*) FROM t WHERE a > 1 GROUP BY a ORDER BY a LIMIT 1"]
    place = synsql(tmp_path, [shapes[n % 3 > 1] for n in range(30)])
    for asked in ("count: 5", "hardness: [easy], count: 7", "hardness: [easy]"):
        recipe = pooled(f"{place[:-1]}, {asked}}}", "", place)
        folder = build(recipe, tmp_path / f"stage {asked}")
        whole = base.read(recipe.data.sft, recipe.seed, tmp_path / "whole").examples
        rows = frames.read(folder / "data.parquet").filter(pl.col("pool") == "sft")
        assert frames.from_frame(rows, Example) == whole
        assert 0 < len(whole) < 30


def test_of_a_name_in_two_sources_of_a_pool_the_first_stays(tmp_path):
    place = synsql(tmp_path, [f"SELECT {number} FROM t" for number in range(3)])
    folder = build(pooled(place, f"{place}, {place}", place), tmp_path / "stage")
    rows = frames.read(folder / "data.parquet").filter(pl.col("pool") != "dev")
    assert rows.select("pool", "part", "id").rows() == [
        (pool, 0, f"synsql_{n}") for pool in ("sft", "rl") for n in range(3)
    ]


def test_a_row_of_a_name_in_two_sources_that_differs_is_told(tmp_path):
    """The second source of the RL pool has other SQL for the question 0, and other words for the question 1."""
    recipe_of(tmp_path, 4)
    rows = []
    for number in range(3):
        row = {"id": number, "question": f"what is {number} ?", "sql": f"SELECT {number} FROM t"}
        rows.append(row | {"database": "shop.sqlite"})
    changed = [rows[0] | {"sql": "SELECT 7 FROM t"}, rows[1] | {"question": "which is 1 ?"}, rows[2]]
    for name, lines in (("first", rows), ("second", changed)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    first, second = (f"{{kind: jsonl, path: {tmp_path / name}.jsonl}}" for name in ("first", "second"))
    steps = Steps()
    steps.warnings = []
    steps.warn = steps.warnings.append
    folder = build(pooled(first, f"{second}, {first}", first), tmp_path / "stage", steps)
    left_out = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    told = "an earlier source of the pool has a row of this id, with other"
    assert [(row["pool"], row["row"], row["reason"], row["detail"]) for row in left_out] == [
        ("rl", "0", "duplicate_id", f"{told} SQL"),
        ("rl", "1", "duplicate_id", f"{told} question"),
    ]
    assert json.loads((folder / "metrics.json").read_text())["quarantined"] == 2
    (warning,) = steps.warnings
    assert warning.startswith("2 questions of data.rl have the id of one of data.sft and other words or SQL:")


def test_two_questions_with_one_id_are_refused_and_one_question_in_two_pools_is_not(tmp_path):
    """Two files that number their rows from 0: the second row of each is another question, the first is the same."""
    recipe_of(tmp_path, 4)
    same = {"id": 0, "question": "what is 0 ?", "sql": "SELECT 0 FROM t", "database": "shop.sqlite"}
    for name, number in (("first", 1), ("second", 2)):
        other = same | {"id": 1, "question": f"what is {number} ?", "sql": f"SELECT {number} FROM t"}
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (same, other)))
    first, second, own = (f"{{kind: jsonl, path: {tmp_path / name}.jsonl}}" for name in ("first", "second", "own"))
    shared = build(pooled(first, f"{first}, {first}", own), tmp_path / "shared")
    assert json.loads((shared / "metrics.json").read_text())["rl_examples"] == 2  # each once
    told = r"1 training questions have the id of another.*'1' stands for 'what is 1 \?' and"
    for number, rl in enumerate((second, f"{first}, {second}")):
        with pytest.raises(DataError, match=told):
            build(pooled(first, rl, own), tmp_path / f"refused {number}")


def test_one_id_for_two_databases_is_refused_and_a_correction_of_all_of_a_question_is_not(tmp_path):
    recipe_of(tmp_path, 4)
    build_database(tmp_path / "crm.sqlite", "CREATE TABLE t (a)")
    row = {"id": 0, "question": "what is 0 ?", "sql": "SELECT 0 FROM t", "database": "shop.sqlite"}
    for name, changes in (("shop", {}), ("crm", {"database": "crm.sqlite"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row | changes) + "\n")
    correction = {"id": "0", "sql": "SELECT 9 FROM t", "question": "what is nine ?", "reason": "it was zero"}
    (tmp_path / "corrections.jsonl").write_text(json.dumps(correction) + "\n")
    shop, crm, own = (f"{{kind: jsonl, path: {tmp_path / name}.jsonl}}" for name in ("shop", "crm", "own"))
    corrected = f"{shop[:-1]}, corrections: {tmp_path / 'corrections.jsonl'}}}"
    build(pooled(shop, corrected, own), tmp_path / "corrected")
    with pytest.raises(DataError, match="1 training questions have the id of another question"):
        build(pooled(shop, crm, own), tmp_path / "refused")
