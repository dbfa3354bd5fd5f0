"""Only right and well-formed episodes are kept; SQL-Trail's selection takes medium and hard questions first (A.6)."""

import dataclasses

import polars as pl
import pytest

from pipelines.core.types import Action, ActionKind, ExecutionStatus, StopReason, Turn
from pipelines.curation import card, filtering
from pipelines.curation.filtering import fault
from pipelines.recipe import recipes
from pipelines.recipe.config import Filter
from pipelines.sql import similarity
from pipelines.sql.similarity import sql_shape
from tests.curation.conftest import select

EVERYTHING = Filter(keep=None, per_example=None)


def test_a_right_answer_does_not_excuse_a_malformed_turn(outcome):
    assert fault(outcome()) is None
    malformed = outcome(format_error="two_actions", correct=True)
    assert select([malformed], EVERYTHING).left == [("a", "format_two_actions")]
    assert fault(malformed)[1] == "turn 1 of 2"


def test_a_recipe_may_keep_what_is_right_whatever_its_form(outcome):
    """SQL-Trail, A.6: trajectories "that produce correct final SQL predictions"."""
    right_answers = Filter(keep=None, per_example=None, well_formed=False)
    malformed = outcome(format_error="two_actions", correct=True)
    wrong = outcome(format_error="two_actions", correct=False)
    assert select([malformed], right_answers).kept == [("a", 0)]
    assert select([wrong], right_answers).left == [("a", "wrong_result")]
    assert "well_formed" not in EVERYTHING.model_dump()  # recipes that do not set it keep their keys


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"stop": StopReason.BROKEN, "failure": "worker_died"}, "broken_worker_died"),
        ({"broken": True, "status": ExecutionStatus.UNAVAILABLE}, "broken_execution"),
        ({"format_error": "missing_reasoning"}, "format_missing_reasoning"),
        ({"final_sql": None, "stop": StopReason.TURN_LIMIT, "status": None}, "no_answer_turn_limit"),
        ({"final_sql": None, "stop": StopReason.TOKEN_LIMIT, "status": None}, "no_answer_token_limit"),
        ({"status": ExecutionStatus.ERROR, "correct": False}, "sql_error"),
        ({"status": ExecutionStatus.TIMEOUT, "correct": False}, "sql_timeout"),
        ({"correct": False}, "wrong_result"),
    ],
)
def test_each_fault_has_its_own_reason(outcome, facts, reason):
    assert fault(outcome(**facts))[0] == reason


def test_nothing_vanishes_order_is_kept_and_a_reason_is_one_line(outcome):
    selection = select([outcome(id, correct=id != "b") for id in "abcd"], EVERYTHING, seed=0)
    assert selection.kept == [("a", 0), ("c", 0), ("d", 0)]
    assert selection.left == [("b", "wrong_result")]
    settings = Filter(keep=3, per_example=2, per_plan=1)
    assert filtering.detail("over_keep", "", settings) == "3 are kept"
    assert filtering.detail("over_per_example", "", settings) == "2 a question"
    assert filtering.detail("near_duplicate", "", settings) == "1 of one plan"
    assert filtering.detail("format_two_actions", "turn 1 of 2", settings) == "turn 1 of 2"


def test_each_question_gives_at_most_per_example_trajectories_before_keep_binds(outcome):
    outcomes = [outcome("a", sample, correct=sample != 0) for sample in range(4)]
    selection = select(outcomes, Filter(per_example=2), seed=0)
    assert selection.kept == [("a", 1), ("a", 2)]
    assert card.quality(selection.table, 0.0)["left_out"] == {"over_per_example": 1, "wrong_result": 1}
    assert select(outcomes[::-1], Filter(per_example=2), seed=0).kept == [("a", 2), ("a", 1)]  # in whatever order
    outcomes = [outcome("a", sample, hardness="hard") for sample in range(5)] + [outcome("b"), outcome("c")]
    assert select(outcomes, Filter(keep=3, per_example=1), seed=0).kept == [("a", 0), ("b", 0), ("c", 0)]


def test_medium_and_hard_come_first_where_keep_binds(outcome):
    levels = ["easy", "medium", "hard", "extra"] * 5
    outcomes = [outcome(f"q{number}", hardness=level) for number, level in enumerate(levels)]
    selection = select(outcomes, Filter(keep=12), seed=0)
    kept = [levels[int(id[1:])] for id, _ in selection.kept]
    assert (kept.count("medium"), kept.count("hard")) == (5, 5)
    assert len(kept) == 12
    facts = card.quality(selection.table.with_columns(agent_chars=pl.lit(2**30, pl.Int32)), 0.0)
    assert facts["left_out"] == {"over_keep": 8}
    assert facts["agent_chars"] == 12 * 2**30  # more than 32 bits hold
    assert str(facts["diversity"]["plan_entropy"]) == "0.0"  # of one plan; "-0" stood on the card


def test_within_a_level_the_seed_decides_and_not_the_order_of_arrival(outcome):
    outcomes = [outcome(f"q{number}", hardness="hard") for number in range(30)]
    first = set(select(outcomes, Filter(keep=10), seed=0).kept)
    assert first == set(select(outcomes[::-1], Filter(keep=10), seed=0).kept)
    assert first != set(select(outcomes, Filter(keep=10), seed=1).kept)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("SELECT name FROM singer WHERE age > 3", "select NAME from singer where age>30;", True),
        ("SELECT T1.a FROM t AS T1", "SELECT a FROM t", True),
        ("SELECT a FROM t WHERE b = 'x'", 'SELECT a FROM t WHERE b = "it\'s"', True),
        ("SELECT a FROM t INNER JOIN u ON t.i = u.i", "SELECT a FROM t JOIN u ON t.i = u.i", True),
        ("SELECT a FROM t -- why\n", "SELECT a FROM t", True),
        ("SELECT a FROM t", "SELECT b FROM u", False),
        ('SELECT "Name" FROM "Album"', 'SELECT "Title" FROM "Album"', False),
        ('SELECT "Name" FROM "Album"', 'SELECT "Name" FROM "Artist"', False),
        (
            'SELECT "t"."Id" FROM t JOIN u ON "t"."Id" = "u"."A"',
            'SELECT "t"."Id" FROM t JOIN u ON "t"."Id" = "u"."B"',
            False,
        ),
        (
            'SELECT "Unit Price" FROM t WHERE b IN ("x", "y")',
            "SELECT \"Unit Price\" FROM t WHERE b IN ('z', 'w')",
            True,
        ),
        ('SELECT a FROM t WHERE b BETWEEN "x" AND "y"', "SELECT a FROM t WHERE b BETWEEN 1 AND 2", True),
        ("SELECT max(a) FROM t", "SELECT min(a) FROM t", False),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t", False),
        ("SELECT a FROM t WHERE b = 'x--y' ORDER BY a", "SELECT a FROM t WHERE b = 'x--y'", False),  # a text's signs
        ("SELECT a FROM t WHERE b LIKE '%/*%' AND a = 1", "SELECT a FROM t WHERE b LIKE '%/*%'", False),
    ],
)
def test_a_shape_forgets_values_aliases_and_layout(one, other, alike):
    assert (sql_shape(one, names=True) == sql_shape(other, names=True)) is alike


@pytest.mark.parametrize(
    ("texts", "shape"),
    [
        (["SELECT a FROM t WHERE c = 1", "SELECT b FROM u WHERE d = 'z'"], "select x from x where x = ?"),
        (["SELECT count(*) FROM `my t`"], "select count ( * ) from x"),
        (["", "--", ".", "/*"], ""),  # a comment that nobody closed goes on to the end
        (["'", '"'], "?"),
        (["SELECT '"], "select ?"),
        (["`", "[", "a.b.c", "é"], "x"),
        (["\x00"], "\x00"),
    ],
)
def test_any_text_has_a_shape_in_which_all_names_are_alike(texts, shape):
    assert list(map(sql_shape, texts)) == [shape] * len(texts)


def said(outcome, sql, words):
    turns = (Turn("", Action(ActionKind.SQL, "SELECT 1", words)), Turn("", Action(ActionKind.SOLUTION, sql, "so")))
    return dataclasses.replace(outcome, trajectory=dataclasses.replace(outcome.trajectory, turns=turns, final_sql=sql))


def test_near_duplicates_are_cut_before_anything_else(outcome):
    a = said(outcome("a"), "SELECT x FROM t WHERE y = 1", "look here")
    b = said(outcome("b"), "SELECT x FROM t WHERE y = 22", "look there")
    c = said(outcome("c"), "SELECT z FROM t WHERE y = 1", "look here")
    chosen = select([a, b, c], Filter(per_plan=1), 0, {"a": "d", "b": "d", "c": "d"})
    assert [id for id, _ in chosen.kept] == ["a", "c"]
    assert chosen.left == [("b", "near_duplicate")]
    assert len(select([a, b, c], Filter(per_plan=1), 0, {"a": "d", "b": "e", "c": "d"}).kept) == 3


def test_diversity_in_numbers(outcome):
    made = [
        said(outcome("a"), "SELECT x FROM t WHERE y = 1", "look here now"),
        said(outcome("b"), "SELECT x FROM t WHERE y = 22", "look here now"),
        said(outcome("c"), "SELECT count(*) FROM t", "look there"),
        said(outcome("d"), "SELECT count(*) FROM t", "look up"),
    ]
    found = card.quality(select(made, Filter(keep=None, per_example=None)).table, distinct_2=0.25)["diversity"]
    assert found["near_duplicates"] == 0.5
    assert (found["plans"], found["sql_shapes"], found["plan_entropy"]) == (2.0, 2.0, 1.0)
    # pairs: look-here, here-now, look-here, here-now, look-there, look-up
    assert similarity.distinct_2(one.trajectory for one in made) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "kept when right by `strict` equality and well-formed in every turn. Seed 0."),
        (["filter.well_formed=false"], "kept when right by `strict` equality. Seed 0."),
        (
            ["filter.well_formed=false", "filter.drop=[malformed, no_answer]"],
            "kept when right by `strict` equality, unless a filter rule matches: `malformed`, `no_answer`. Seed 0.",
        ),
    ],
)
def test_the_card_says_by_what_the_recipe_selects(overrides, words):
    figures = {"acceptance": {}, "left_out": {}, "diversity": {}}
    leakage = {"train": 1, "held_out": 1, "any_database": {}, "same_database": {}}
    assert words in card.card_text(recipes.load("sql_trail", overrides), figures, leakage, {})
