"""The recipe of an evaluation, and the policy that is evaluated, from the options of `sqltrain evaluate`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import UserError
from pipelines.core.rows import kind_of
from pipelines.core.store import Store
from pipelines.databases import named
from pipelines.databases.of_recipe import served_tokens
from pipelines.protocols.base import check_prompts
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import open_recipe, split_store
from pipelines.stages import graph
from pipelines.stages.added_benchmarks import benchmarks_override
from pipelines.stages.answerer import Answerer, checkpoint_answerer, named_answerer
from pipelines.stages.evaluated_policy import ENDPOINT, ORACLE
from pipelines.stages.gguf_folders import model_folder
from pipelines.stages.newest_model import plan_without_training
from pipelines.stages.stage import Step


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options that choose a policy and its questions; None for an option that was not passed."""

    recipe: str
    overrides: Sequence[str] = ()
    store_folder: str | None = None
    model: str | None = (
        None  # a checkpoint folder, a GGUF file, endpoint:NAME or oracle; None for the recipe's checkpoints
    )
    benchmarks: str | None = None
    questions: Path | None = None
    database: str | None = None
    limit: int | None = None


@dataclass(frozen=True)
class OpenedEvaluation:
    """A recipe that reads the questions of an evaluation, its store, and its policy."""

    recipe: Recipe
    store: Store
    answerer: Answerer | None  # the policy to evaluate; None for the recipe's own checkpoints
    steps: Sequence[Step] = ()  # stages that evaluate the recipe's own checkpoints; none with an answerer


def open_evaluation(request: EvaluationRequest, say: Callable[[str], None]) -> OpenedEvaluation:
    """Read the options.

    Args:
        say: takes lines about benchmarks that are left out, a GGUF file that is read, and checkpoints that are not
            trained yet.
    """
    words = [*request.overrides, *_question_overrides(request)]
    if request.benchmarks is not None:
        words.append(benchmarks_override(request.benchmarks, say))
    checkpoint = None
    if request.model is not None and not _is_named(request.model):
        _, store = split_store(words, request.store_folder)
        checkpoint = model_folder(request.model, store, say)
    recipe, store = open_recipe(request.recipe, words, request.store_folder, checkpoint)
    further_words = _overrides_by_recipe(request, recipe)
    if further_words:
        words += further_words
        recipe, store = open_recipe(request.recipe, words, request.store_folder, checkpoint)
    if request.model is None:
        steps = _checkpoint_steps(request, recipe, store, say)
        return OpenedEvaluation(recipe, store, None, steps)
    check_prompts(recipe.protocol, recipe.evaluation.forced_single_turn)
    if checkpoint is None:
        answerer = named_answerer(request.model)
    else:
        answerer = checkpoint_answerer(request.model, checkpoint, recipe)
    return OpenedEvaluation(recipe, store, answerer)


def _checkpoint_steps(
    request: EvaluationRequest, recipe: Recipe, store: Store, say: Callable[[str], None]
) -> Sequence[Step]:
    """The stages that evaluate the recipe's own checkpoints; one's own questions start no training."""
    if request.questions is None:
        steps = graph.plan(recipe, store, "evaluate")
        to_make = [step.name for step in steps if not step.cached]
        untrained = [name for name in to_make if name in graph.TRAINING]
        if untrained:
            listed = ", ".join(untrained)
            say(f"not in the store, so trained first: {listed}")
        return steps
    trained, _ = open_recipe(request.recipe, request.overrides, request.store_folder)
    planned = plan_without_training(trained, recipe, store)
    if planned.untrained:
        listed = ", ".join(planned.untrained)
        say(f"not in the store, so not evaluated: {listed}")
    return planned.steps


def _is_named(model: str) -> bool:
    return model == ORACLE or model.startswith(ENDPOINT)


def _question_overrides(request: EvaluationRequest) -> list[str]:
    """The override that makes `--questions` the recipe's only benchmark."""
    if request.questions is None:
        if request.database is not None:
            raise UserError("--database needs --questions", "Pass both, or data.test.0.options.database=ADDRESS.")
        return []
    path = request.questions.expanduser()
    if not path.is_file():
        hint = "--questions takes JSON lines, or CSV with a header."
        raise UserError(f"there is no file {request.questions}", hint)
    source: dict[str, Any] = {"name": "questions"}
    source["kind"] = kind_of(request.questions)
    source["path"] = str(path.resolve())
    if request.database is not None:
        database = named.find(request.database)
        source["options"] = {"database": database.address}
    sources = json.dumps([source])
    return [f"data.test={sources}"]


def _overrides_by_recipe(request: EvaluationRequest, recipe: Recipe) -> list[str]:
    """Overrides that depend on the recipe: the limit of each benchmark, and the schema of one's own database."""
    words = []
    if request.limit is not None:
        for index in range(len(recipe.data.test)):
            words.append(f"data.test.{index}.count={request.limit}")
    if request.questions is not None and recipe.data.linker is None:
        # `ask` and `serve` show a long schema in part, too.
        tokens = served_tokens(recipe)
        words.append("data.linker=fit")
        words.append(f"data.linker_tokens={tokens}")
    return words
