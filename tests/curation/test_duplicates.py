"""Near-duplicates: the same plan on the same database, whatever the words and values."""

import dataclasses
from typing import Any

import pytest

from pipelines.core.types import Action, ActionKind, Turn
from pipelines.curation import card
from pipelines.recipe.config import Filter
from pipelines.sql import similarity
from pipelines.sql.similarity import sql_shape
from tests.curation.conftest import select


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("SELECT name FROM singer WHERE age > 3", "select NAME from singer where age>30;", True),
        ("SELECT T1.a FROM t AS T1", "SELECT a FROM t", True),
        ("SELECT a FROM t WHERE b = 'x'", 'SELECT a FROM t WHERE b = "it\'s"', True),
        ("SELECT a FROM t INNER JOIN u ON t.i = u.i", "SELECT a FROM t JOIN u ON t.i = u.i", True),
        ("SELECT a FROM t -- why\n", "SELECT a FROM t", True),
        ("SELECT a FROM t", "SELECT b FROM u", False),
        ("SELECT max(a) FROM t", "SELECT min(a) FROM t", False),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t", False),
    ],
)
def test_a_shape_forgets_values_aliases_and_layout(one: str, other: str, alike: bool) -> None:
    assert (sql_shape(one, names=True) == sql_shape(other, names=True)) is alike


def test_without_names_all_tables_and_columns_are_alike() -> None:
    assert sql_shape("SELECT a FROM t WHERE c = 1") == "select x from x where x = ?"
    assert sql_shape("SELECT b FROM u WHERE d = 'z'") == "select x from x where x = ?"
    assert sql_shape("SELECT count(*) FROM `my t`") == "select count ( * ) from x"


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("", ""),
        ("--", ""),
        (".", ""),
        ("'", "?"),
        ('"', "?"),
        ("SELECT '", "select ?"),
        ("`", "x"),
        ("[", "x"),
        ("a.b.c", "x"),
        ("é", "x"),
        ("/*", ""),  # a comment that nobody closed goes on to the end
        ("\x00", "\x00"),
    ],
)
def test_any_text_has_a_shape(text: str, shape: str) -> None:
    assert sql_shape(text) == shape


def said(outcome: Any, sql: str, words: str) -> Any:
    turns = (Turn("", Action(ActionKind.SQL, "SELECT 1", words)), Turn("", Action(ActionKind.SOLUTION, sql, "so")))
    return dataclasses.replace(outcome, trajectory=dataclasses.replace(outcome.trajectory, turns=turns, final_sql=sql))


def test_near_duplicates_are_cut_before_anything_else(outcome: Any) -> None:
    a = said(outcome("a"), "SELECT x FROM t WHERE y = 1", "look here")
    b = said(outcome("b"), "SELECT x FROM t WHERE y = 22", "look there")
    c = said(outcome("c"), "SELECT z FROM t WHERE y = 1", "look here")
    chosen = select([a, b, c], Filter(per_plan=1), 0, {"a": "d", "b": "d", "c": "d"})
    assert [id for id, _ in chosen.kept] == ["a", "c"]
    assert chosen.left == [("b", "near_duplicate")]
    assert len(select([a, b, c], Filter(per_plan=1), 0, {"a": "d", "b": "e", "c": "d"}).kept) == 3


def test_diversity_in_numbers(outcome: Any) -> None:
    made = [
        said(outcome("a"), "SELECT x FROM t WHERE y = 1", "look here now"),
        said(outcome("b"), "SELECT x FROM t WHERE y = 22", "look here now"),
        said(outcome("c"), "SELECT count(*) FROM t", "look there"),
        said(outcome("d"), "SELECT count(*) FROM t", "look up"),
    ]
    table = select(made, Filter(keep=None, per_example=None)).table
    found = card.quality(table, distinct_2=0.25)["diversity"]
    assert found["near_duplicates"] == 0.5
    assert (found["plans"], found["sql_shapes"], found["plan_entropy"]) == (2.0, 2.0, 1.0)
    # pairs: look-here, here-now, look-here, here-now, look-there, look-up
    assert similarity.distinct_2(one.trajectory for one in made) == pytest.approx(4 / 6)
