"""What a served question brings into its prompt."""

import pytest

from pipelines.core.types import Database, Example
from pipelines.databases.of_recipe import with_prompt_facts
from pipelines.recipe import recipes
from pipelines.sql.schema import Column, Schema, Table

SCHEMA = Schema((Table("customer", (Column("name", "TEXT"),)),))
HISTORY = [["Who lives in Rome?", "SELECT name FROM customer WHERE city = 'Rome'"]]


@pytest.mark.parametrize(
    ("recipe", "history"),
    [("smollm2", []), ("sql_trail", HISTORY)],  # a model of 135 million weights repeats the question before
)
def test_a_small_model_that_never_trained_on_follow_ups_is_asked_each_question_alone(recipe, history, tmp_path):
    loaded = recipes.load(recipe, [f"data.path={tmp_path}", "data.values=0"])
    database = Database("shop", "sqlite", str(tmp_path / "shop.sqlite"))
    example = Example("q", "And how many?", database, "").with_meta(history=HISTORY)
    (asked,) = with_prompt_facts([example], loaded, lambda _: SCHEMA, None, is_served=True)
    assert asked.meta["history"] == history
