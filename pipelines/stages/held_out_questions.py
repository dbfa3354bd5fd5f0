"""The held-out questions that a policy is asked, from stages that are made unless the store has them."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipelines.core.claims import claimed
from pipelines.core.store import Store
from pipelines.core.types import Example
from pipelines.recipe.config import Recipe
from pipelines.stages import graph, stage_making
from pipelines.stages.answerer import Answerer
from pipelines.stages.call_estimate import CallEstimate, estimate_calls
from pipelines.stages.context import Progress, examples
from pipelines.stages.fingerprints import stage_at
from pipelines.stages.stage import StageResult


@dataclass(frozen=True)
class HeldOutQuestions:
    """The questions of a benchmark, from finished stages."""

    test: StageResult
    test_schema: StageResult | None
    questions: Sequence[Example]
    estimate: CallEstimate  # the most that the policy is asked

    @property
    def keys(self) -> dict[str, str | None]:
        """The keys of the stages."""
        keys: dict[str, str | None] = {"test": self.test.key, "test_schema": None}
        if self.test_schema is not None:
            keys["test_schema"] = self.test_schema.key
        return keys


@contextlib.contextmanager
def held_out_questions(
    recipe: Recipe, store: Store, answerer: Answerer, progress: Progress
) -> Iterator[HeldOutQuestions]:
    """The questions of the recipe's first benchmark.

    Their stages, and the stage of the store in which the policy's weights lie, are claimed for the time of the block.
    No training questions are needed.

    Raises:
        RecipeError: the policy cannot answer some of the questions.
    """
    with_evaluation = recipe.model_copy(update={"stages": (*recipe.stages, "evaluate")})
    steps = graph.plan(with_evaluation, store, among=("test", "test_schema"))
    names = [(step.kind, step.key) for step in steps]
    weights = stage_at(answerer.policy, store)
    if weights is not None:
        names.append(weights)
        store.note_use(*weights)
    with claimed(store, names, {"recipe": recipe.name}):
        results = {}
        for step in steps:
            results[step.name] = stage_making.execute(step, recipe, store, progress, steps)
        test = results["test"]
        questions = examples(test.folder, "test")
        answerer.require_playable(questions)
        estimate = estimate_calls(recipe, len(questions), answerer.entry, progress.say)
        yield HeldOutQuestions(test, results.get("test_schema"), questions, estimate)
