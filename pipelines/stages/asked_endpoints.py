"""The endpoints that a recipe's stages ask, and the check that each has an entry and a key."""

from collections.abc import Iterable, Iterator

from pipelines.benchmarks.prompt_schema import NO_ENDPOINT
from pipelines.core.errors import RecipeError
from pipelines.endpoints.client import Connection, endpoint
from pipelines.protocols.one_action import SCRIPTED, Ask
from pipelines.recipe.config import MERGE, Recipe
from pipelines.rewards.panel import endpoint_of


def asked_endpoints(recipe: Recipe, stage: str) -> Iterator[str | None]:
    """The endpoints that a stage asks, by name; None for a teacher that is one and names none."""
    if stage in ("data", "test"):
        if stage == "data":
            yield from recipe.data.cleaners
        if recipe.data.linker not in NO_ENDPOINT:
            yield recipe.data.linker
    elif stage == "synthesize":
        for teacher in recipe.synthesis.teachers:
            if teacher.kind == "endpoint":
                yield teacher.endpoint
    elif stage in ("gold_schema", "test_schema"):
        yield from recipe.gold_schema.extractors
    elif stage == "grpo":
        judge = endpoint_of(recipe.rewards)
        if judge is not None:
            yield judge
    elif stage.startswith("evaluate") and recipe.evaluation.selector:
        yield recipe.evaluation.selector.removeprefix(MERGE)
    makes_episodes = stage.startswith(("synthesize", "difficulty", "grpo", "evaluate"))
    if makes_episodes and recipe.protocol.name == Ask.name:
        user = recipe.protocol.options.get("user", SCRIPTED)
        if user != SCRIPTED:
            yield user


def require_endpoints(recipe: Recipe, stages: Iterable[str]) -> None:
    """Look for the entries, and the keys, of the endpoints that some stages will ask; nothing is sent to them."""
    names: list[str | None] = []
    for stage in sorted(stages):
        names += asked_endpoints(recipe, stage)
    if None in names:
        raise RecipeError("the recipe's teacher is an endpoint without a name", "Set synthesis.teacher.endpoint=NAME.")
    for name in dict.fromkeys(filter(None, names)):
        Connection(endpoint(name), name)
