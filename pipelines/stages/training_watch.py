"""The training of a recipe while it runs: the curves of its newest training stage that has made a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.stage import Step
from pipelines.training import watch
from pipelines.training.plan import CURVES


@dataclass(frozen=True)
class WatchedTraining:
    """The training stages of a recipe, made or not."""

    recipe: Recipe
    store: Store
    steps: Sequence[Step]  # training stages, in their order

    @property
    def is_finished(self) -> bool:
        """Whether the last training stage is made."""
        last = self.steps[-1]
        return self.store.has(last.name, last.key)

    def newest_curves(self) -> str | None:
        """The curves of the newest training stage that has made a step, as text; None if none has."""
        for step in reversed(self.steps):
            work = self.store.work(step.name, step.key)
            for folder in (step.folder, work):
                if not (folder / CURVES).is_file():
                    continue
                state = "running, or stopped"
                if self.store.has(step.name, step.key):
                    state = "finished"
                grpo = self.recipe.grpo
                n_steps: int | None = None
                if step.name == "grpo" and grpo.epochs is None:
                    n_steps = grpo.steps
                head = f"{self.recipe.name}: {step.name} {step.key}, {state}"
                curves = watch.read_curves(folder)
                return "\n".join([head, *watch.view(curves, n_steps)])
        return None


def watched_training(recipe: Recipe, store: Store) -> WatchedTraining:
    """The training of a recipe; an error if it trains nothing."""
    planned = graph.plan(recipe, store)
    steps = [step for step in planned if step.name in graph.TRAINING]
    if not steps:
        stages = ", ".join(recipe.stages)
        raise DataError(f"recipe {recipe.name} trains nothing", f"Its stages: {stages}.")
    return WatchedTraining(recipe, store, steps)
