"""What batches left, put together: every row once, databases within reach, old demonstrations as many as wanted."""

from pathlib import Path

import pytest

from pipelines.core import frames
from pipelines.core.files import read_json
from pipelines.core.frames import DATA
from pipelines.core.store import Store
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import sql_engine
from pipelines.nightly.union import UnionPart, unite
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.context import Silent, examples, trajectories
from tests.nightly import farms


def curated(store: Store, recipe: Recipe) -> dict[str, str]:
    steps = graph.plan(recipe, store, "gold_schema")
    return {step.name: graph.execute(step, recipe, store, Silent(), steps).key for step in steps}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Recipe, list[dict[str, str]]]:
    """The base of four databases and a batch of two, two questions of each: eight rows and four."""
    folder = tmp_path_factory.mktemp("union")
    store = Store(folder / "store")
    made = []
    for name, count, families in (("base", 4, [0, 1]), ("new", 2, [2, 3])):
        file = farms.questions(folder / name, f"{name}.jsonl", farms.named(name, count), families)
        recipe = recipes.load("miniature", farms.overrides(folder, file))
        made.append(curated(store, recipe))
    return store, recipe, made


def united(
    parts: tuple[Store, Recipe, list[dict[str, str]]], fresh: list[bool], replay: float | None
) -> dict[str, Path]:
    store, _, made = parts
    both = [UnionPart(keys, is_new) for keys, is_new in zip(made, fresh, strict=True)]
    return {stage: store.folder(stage, key) for stage, key in unite(store, both, replay, seed=0).items()}


def test_a_union_holds_every_row_once_and_its_gold_runs(parts: tuple[Store, Recipe, list[dict[str, str]]]) -> None:
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


def test_each_source_of_the_rl_pool_keeps_a_number_of_its_own(
    parts: tuple[Store, Recipe, list[dict[str, str]]],
) -> None:
    data = united(parts, [True, True], None)["data"]
    assert [len(examples(data, "rl", part=part)) for part in range(3)] == [8, 4, 0]
    assert read_json(data / "metrics.json")["rl_sources"] == 2


@pytest.mark.parametrize(("replay", "kept"), [(None, 12), (0.0, 4), (0.5, 6), (1.0, 8), (9.0, 12)])
def test_old_demonstrations_are_replayed_by_the_number_of_new_ones(
    parts: tuple[Store, Recipe, list[dict[str, str]]], replay: float | None, kept: int
) -> None:
    assert frames.read(united(parts, [False, True], replay)["filter"] / DATA).height == kept


def test_the_same_parts_are_the_same_union(parts: tuple[Store, Recipe, list[dict[str, str]]]) -> None:
    first, again = united(parts, [False, True], 0.5), united(parts, [False, True], 0.5)
    assert first == again
    assert first["filter"] != united(parts, [False, True], 1.0)["filter"]
