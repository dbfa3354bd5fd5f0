"""The stage graph: what a change touches, and what it leaves alone."""

from pathlib import Path

import pytest

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph


def keys(folder: Path, *overrides: str, name: str = "miniature") -> dict[str, str]:
    return {step.name: step.key for step in graph.plan(recipes.load(name, overrides), Store(folder))}


def test_the_users_files_are_part_of_the_key(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    mine = ("include=data/own", f"data.test.0.path={questions}")
    with pytest.raises(DataError, match="no such file or folder"):
        keys(tmp_path, *mine)
    questions.write_text("one\n")
    first = keys(tmp_path, *mine)
    assert keys(tmp_path, *mine) == first
    questions.write_text("two\n")
    assert keys(tmp_path, *mine)["test"] != first["test"]
    assert keys(tmp_path, *mine)["data"] == first["data"]


def test_a_recipe_without_sft_trains_the_base_model(tmp_path: Path) -> None:
    steps = {
        step.name: step for step in graph.plan(recipes.load("miniature", ["stages=[data, grpo]"]), Store(tmp_path))
    }
    assert set(steps) == {"data", "model", "grpo"}
    assert steps["grpo"].needs == ("data", "model")


def test_until_names_a_stage_or_says_which_there_are(tmp_path: Path) -> None:
    recipe = recipes.load("miniature")
    assert [step.name for step in graph.plan(recipe, Store(tmp_path), until="filter")] == [
        "data",
        "synthesize",
        "filter",
    ]
    with pytest.raises(RecipeError, match=r"no stage .filtre.. Its stages: data, test, leakage, synthesize"):
        graph.plan(recipe, Store(tmp_path), until="filtre")
