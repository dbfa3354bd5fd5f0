"""The newest trained model of a recipe, in a store."""

from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph


def newest_model(recipe: Recipe, store: Store) -> Path:
    """The model folder of the recipe's newest finished training stage."""
    steps = {step.name: step for step in graph.plan(recipe, store)}
    for name in ("grpo", "sft"):
        if name in steps and steps[name].cached:
            return steps[name].folder / "model"
    raise DataError(
        f"recipe {recipe.name} has no trained model in {store.root}",
        "Name a checkpoint folder, champion:RECIPE or (to ask) endpoint:NAME, or train it by sqltrain run or adapt.",
    )
