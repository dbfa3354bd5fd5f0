"""The stage graph: what a change touches, and what it leaves alone."""

from pathlib import Path

import pytest

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph


def keys(folder: Path, *overrides: str, name: str = "miniature") -> dict[str, str]:
    return {step.name: step.key for step in graph.plan(recipes.load(name, overrides), Store(folder))}


def changed(folder: Path, *overrides: str) -> set[str]:
    before, after = keys(folder), keys(folder, *overrides)
    return {name for name in before if before[name] != after[name]}


def test_a_reward_weight_touches_grpo_and_what_follows(tmp_path: Path) -> None:
    assert changed(tmp_path, "rewards.turns.weight=0") == {"grpo", "evaluate_grpo", "report"}


def test_a_training_rate_touches_the_models_and_what_follows(tmp_path: Path) -> None:
    after = {"sft", "difficulty", "grpo", "evaluate_sft", "evaluate_grpo", "report"}
    assert changed(tmp_path, "sft.optimizer.lr=0.5") == after


def test_evaluation_settings_touch_evaluation_only(tmp_path: Path) -> None:
    after = {"evaluate_model", "evaluate_sft", "evaluate_grpo", "report"}
    assert changed(tmp_path, "evaluation.samples=2") == after


def test_the_seed_touches_everything_that_draws(tmp_path: Path) -> None:
    assert changed(tmp_path, "seed=7") == set(keys(tmp_path))


def test_how_a_machine_runs_it_touches_nothing(tmp_path: Path) -> None:
    assert changed(tmp_path, "hardware.threads=1", "rollout.processes=1") == set()


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


def test_every_stage_says_why_it_runs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    recipe = recipes.load("miniature")
    data = graph.plan(recipe, store)[0]
    assert (data.cached, data.why) == (False, "not made yet")
    store.make("data", data.key, lambda folder: None, {"recipe": recipe.slice("data", "execution", "seed")}, print)
    assert graph.plan(recipe, store)[0].why == "cached"
    other = graph.plan(recipes.load("miniature", ["data.dev.count=3"]), store)[0]
    assert other.why.startswith("changed: data")
