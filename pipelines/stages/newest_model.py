"""The trained models of a recipe in a store: the newest one, and all that can be evaluated without training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.stage import Step

EVALUATION = ("test", "test_schema")  # stages that an evaluation needs besides a checkpoint


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


@dataclass(frozen=True)
class CheckpointEvaluation:
    """The evaluation of a recipe's finished checkpoints on questions that its training knew nothing of."""

    steps: Sequence[Step]  # finished stages and the evaluations, of which none trains
    untrained: tuple[str, ...]  # training stages of the recipe that the store lacks, which are not evaluated


def plan_without_training(trained: Recipe, evaluated: Recipe, store: Store) -> CheckpointEvaluation:
    """Plan to evaluate the checkpoints that a store has; no step of the plan trains.

    Args:
        trained: the recipe as it was trained.
        evaluated: the same recipe with other questions; settings that its training reads may differ as well.

    Raises:
        DataError: the recipe trains, and none of its training stages is finished.
    """
    if not set(graph.TRAINING) & set(trained.stages):
        steps = graph.plan(evaluated, store, "evaluate")
        return CheckpointEvaluation(steps, ())
    training = {stage.name for stage in graph.GRAPH if not stage.by_benchmark}
    finished: dict[str, str] = {}
    untrained = []
    for step in graph.plan(trained, store, among=training):
        if step.cached:
            finished[step.name] = step.key
        elif step.name in graph.TRAINING:
            untrained.append(step.name)
    if not set(graph.TRAINING) & finished.keys():
        raise DataError(
            f"recipe {trained.name} is not trained in {store.root}, and other questions start no training",
            "Train it by sqltrain run with the same overrides, or pass --model FOLDER.",
        )
    allowed = {*finished, *EVALUATION}
    allowed |= {f"evaluate_{name}" for name in finished}
    if "data" in finished:
        allowed.add("leakage")
    stages = graph.active(evaluated)
    names = {stage.name for stage in stages if stage.kind in allowed}
    steps = graph.plan(evaluated, store, "evaluate", finished, names)
    return CheckpointEvaluation(steps, tuple(untrained))
