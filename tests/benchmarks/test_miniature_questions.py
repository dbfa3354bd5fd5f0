"""What the generated questions promise: official hardness, answers that are no luck, wordings that are held out."""

import collections
import dataclasses
import functools
import re
import sqlite3

import duckdb
import pytest

from pipelines.benchmarks import base
from pipelines.benchmarks.miniature import world
from pipelines.benchmarks.miniature.questions import FAMILIES, expand, templates
from pipelines.benchmarks.miniature.world import CATEGORIES
from pipelines.core.types import HARDNESS_LEVELS
from pipelines.sql.analysis.hardness import hardness
from tests.fakes import engine_fixture

engine = engine_fixture("module", timeout_s=5, memory_mb=512)


@functools.cache
def connect(location):
    return sqlite3.connect(location)


def rows(example, sql):
    return connect(example.database.location).execute(sql).fetchall()


def everything(examples):
    return [example for split in examples.values() for example in split]


def test_families_have_official_levels_and_each_is_asked_in_every_split(examples):
    levels = collections.Counter(family.hardness for family in FAMILIES)
    assert len(FAMILIES) >= 16
    assert all(levels[level] >= 4 for level in HARDNESS_LEVELS)
    for example in everything(examples):
        assert example.hardness == hardness(example.gold_sql), example.gold_sql
    for split in examples.values():
        assert {example.meta["family"] for example in split} == {family.name for family in FAMILIES}
        levels = collections.Counter(example.hardness for example in split)
        assert all(count >= 0.12 * len(split) for count in levels.values())


def test_about_six_in_ten_filter_on_a_stored_value_and_half_need_a_probe(examples):
    for split in examples.values():
        filtered = sum(bool(example.meta["filters"]) for example in split) / len(split)
        needed = sum(example.meta["needs_probe"] for example in split) / len(split)
        assert 0.52 <= filtered <= 0.66
        assert 0.42 <= needed <= 0.57


def test_a_probe_is_needed_exactly_when_a_value_is_stored_otherwise_than_asked(examples):
    for example in examples["test"]:
        filters = example.meta["filters"]
        assert example.meta["needs_probe"] == any(one["asked"] != one["stored"] for one in filters)
        for one in filters:
            assert f"'{one['stored']}'" in example.gold_sql
            assert one["asked"] in example.question.split()
            assert (one["stored"],) in rows(example, f"SELECT DISTINCT {one['column']} FROM {one['table']}")


def test_no_stored_form_shows_in_a_question_that_needs_a_probe(examples):
    for example in everything(examples):
        for one in example.meta["filters"]:
            if one["asked"] != one["stored"]:
                assert one["stored"] not in example.question.split()


def test_no_answer_is_empty_zero_null_or_decided_by_a_tie(examples):
    for example in everything(examples):
        answer = rows(example, example.gold_sql)
        assert answer
        assert answer[0][-1] not in (None, 0)
        if "ORDER BY COUNT" in example.gold_sql:
            counts = rows(example, re.sub(r"^SELECT .*? FROM", "SELECT COUNT ( * ) FROM", example.gold_sql)[:-1] + "2")
            assert counts[0] != counts[1]


def test_another_value_or_no_filter_never_gives_the_right_answer(examples):
    """Nor does the asked word."""
    for example in examples["test"]:
        answer = rows(example, example.gold_sql)
        for one in example.meta["filters"]:
            found = rows(example, f"SELECT DISTINCT {one['column']} FROM {one['table']}")
            for other in {one["asked"], *(value for (value,) in found)} - {one["stored"]}:
                assert rows(example, example.gold_sql.replace(f"'{one['stored']}'", f"'{other}'")) != answer
            without = re.sub(rf"(\w+ \. )?{one['column']} = '{one['stored']}'", "1 = 1", example.gold_sql)
            assert without != example.gold_sql
            assert rows(example, without) != answer


def test_turning_an_order_or_a_comparison_round_never_gives_the_right_answer(examples):
    turned = {" DESC LIMIT": " ASC LIMIT", " > ": " < ", "MAX": "MIN"}
    turned |= {other: mark for mark, other in turned.items()}
    for example in examples["test"]:
        for mark, other in turned.items():
            if mark in example.gold_sql and "COUNT ( * ) DESC" not in example.gold_sql:
                assert rows(example, example.gold_sql.replace(mark, other)) != rows(example, example.gold_sql)


def test_no_question_repeats_and_sql_is_spaced_so_that_words_share_their_tokens(examples):
    for split in examples.values():
        asked = collections.Counter((example.database.id, example.question, example.gold_sql) for example in split)
        assert set(asked.values()) == {1}
    for example in everything(examples):
        bare = re.sub(r"'\w+'", "x", example.gold_sql)
        assert all(re.fullmatch(r"\w+|[(),.*=<>]", word) for word in bare.split(" ")), example.gold_sql
    assert all(re.fullmatch("[a-z]+", word) for values in CATEGORIES.values() for word in values)


def test_wordings_belong_to_one_split_and_use_words_that_training_has():
    for family in FAMILIES:
        parts = [set(templates(family.name, split)) for split in ("train", "dev", "test")]
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts))

    def words(split):
        return {word for family in FAMILIES for text in templates(family.name, split) for word in text.split()}

    assert words("test") | words("dev") <= words("train")
    assert expand("[with] x") == ["with {h} x", "that have {h} x", "having {h} x"]
    assert "how many {h}" in expand("[count:h]")
    assert len(expand("[open] [names:t] [filter]")) == 6 * 4 * 5


@pytest.mark.parametrize("split", ["train", "dev", "test"])
def test_every_gold_sql_runs_in_the_sandbox_and_has_rows(examples, split, engine):
    """So a query that never has rows is never paid for being right, and the recipes of the miniature drop nothing."""
    some = examples[split][:300]
    assert base.check_gold(some, engine, root=base.Path(), drop_empty=True) == (some, [])


def test_a_gold_that_fails_and_a_database_that_is_gone_are_told_apart(examples, engine):
    example = examples["dev"][0]
    wrong = dataclasses.replace(example, gold_sql="SELECT name FROM nowhere")
    large = dataclasses.replace(example, gold_sql="SELECT zeroblob(2000000000)")  # no verdict can be held against it
    gone = dataclasses.replace(example, database=dataclasses.replace(example.database, location="/nowhere.sqlite"))
    good, rejected = base.check_gold([example, wrong, large, gone], engine, root=base.Path())
    assert good == [example]
    assert [one.reason for one in rejected] == ["gold_no_such_table", "gold_cell_limit", "database_unavailable"]
    assert "nowhere" in rejected[0].detail


def test_empty_gold_is_parted_off_only_where_a_recipe_asks_for_it(examples, engine):
    """MTIR-SQL, 4.1: training questions whose gold SQL returns nothing are dropped; it is no fault of theirs."""
    empty = dataclasses.replace(examples["dev"][0], id="none", gold_sql="SELECT 1 WHERE 1 = 0")
    assert base.check_gold([empty], engine, root=base.Path()) == ([empty], [])
    good, rejected = base.check_gold([empty], engine, root=base.Path(), drop_empty=True)
    assert good == []
    assert [one.reason for one in rejected] == [base.EMPTY]


def test_the_sql_means_the_same_in_another_engine(examples):
    """Rows of DuckDB over the same tables, as bags; no gold orders more than one row."""
    drawn = {database.id: database for database in (world.draw_database("test", index, 0) for index in range(8))}
    connections = {}
    for id, database in drawn.items():
        connections[id] = duckdb.connect()
        for create, insert, rows_ in world.create_statements(database):
            connections[id].execute(create)
            connections[id].executemany(insert, rows_)
    asked = [example for example in examples["test"] if example.database.id in drawn]
    assert len(asked) == 96
    for example in asked:
        theirs = connections[example.database.id].execute(example.gold_sql).fetchall()
        assert sorted(theirs) == sorted(rows(example, example.gold_sql)), example.gold_sql


def test_a_follow_up_names_no_table_and_answers_otherwise_than_the_question_before(load, tmp_path):
    more = {"databases": 20, "questions": 2, "follow_ups": 6}
    loaded, alone = (load("test", tmp_path, **more, history=history).examples for history in (True, False))
    followed = [one for one in base.resolve_locations(loaded, tmp_path) if "history" in one.meta]
    assert len(followed) == 120
    for one in followed:
        ((_, before),) = one.meta["history"]
        assert not {word.rstrip("s") for word in one.question.split()} & set(world.KINDS)
        assert rows(one, before) != rows(one, one.gold_sql) != []
        assert all(f"'{each['stored']}'" not in before for each in one.meta["filters"])
    assert [one.question for one in alone] == [one.question for one in loaded]
    assert not any(one.meta.get("history") for one in alone)
    others = load("test", tmp_path, **more | {"follow_ups": 0}).examples  # the draw of no other question moves
    assert others == [one for one in loaded if "history" not in one.meta]
