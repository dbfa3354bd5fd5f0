"""A miniature recipe with an endpoint as its teacher, and running it up to a stage."""

from pathlib import Path

from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.context import Silent

KEY = "sk-very-secret-0123456789"


def world(databases: int) -> list[str]:
    """Overrides of the miniature: an endpoint as its teacher, and so many databases of 12 questions."""
    small = "{kind: miniature, split: SPLIT, options: {databases: 2, questions: 4}}"
    return [
        f"data.sft={{kind: miniature, split: train, options: {{databases: {databases}, questions: 12}}}}",
        f"data.rl=[{small.replace('SPLIT', 'train')}]",
        f"data.dev={small.replace('SPLIT', 'dev')}",
        f"data.test=[{small.replace('SPLIT', 'test')}]",
        "synthesis.teacher.kind=endpoint",
        "synthesis.teacher.endpoint=teacher",
    ]


def recipe_of(databases: int, *more: str) -> Recipe:
    """The miniature in that world."""
    return recipes.load("miniature", [*world(databases), *more])


def make(recipe: Recipe, store: Store, until: str) -> Path:
    """Run a recipe up to a stage and return its folder."""
    steps = graph.plan(recipe, store, until)
    for step in steps:
        graph.execute(step, recipe, store, Silent(), steps)
    return steps[-1].folder
