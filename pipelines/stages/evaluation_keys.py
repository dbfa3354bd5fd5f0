"""The keys of a given policy's evaluation: what decides its answers, and what decides their verdicts and report."""

import contextlib
from dataclasses import dataclass
from typing import Any

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.protocols.base import single_turn
from pipelines.recipe.config import Recipe
from pipelines.recipe.plugins import plugin_code
from pipelines.stages.answerer import Answerer
from pipelines.stages.fingerprints import cards, endpoint_fingerprints, prompt_digest
from pipelines.stages.graph import GRAPH, VERDICTS

VERSIONS = {stage.name: stage.version for stage in GRAPH}
LIMITS = ("timeout_s", "max_rows", "max_bytes", "memory_mb")
ASKING = ("protocol", "seed", *(f"execution.{name}" for name in LIMITS))  # sections of a recipe that decide an answer
JUDGING = (*VERDICTS, "benchmark.name", "execution", "gold_schema", "stages")


@dataclass(frozen=True)
class EvaluationFacts:
    """All that decides a policy's evaluation, but for the questions: JSON values, whose digests are keys."""

    answers: dict[str, Any]  # facts that decide an answer
    verdicts: dict[str, Any]  # facts that decide verdicts and the report; another report asks no endpoint again


def evaluation_facts(recipe: Recipe, store: Store, answerer: Answerer) -> EvaluationFacts:
    """What decides a policy's evaluation on the recipe's first benchmark."""
    asking_recipe = without_selector(recipe)
    asking = recipe.slice(*ASKING)
    judging = recipe.slice(*JUDGING)
    policy = recipe.slice("rollout.policy")
    code = plugin_code(asking | policy)
    judging_code = plugin_code(judging)
    has_plugin_policy = f"policy {recipe.rollout.policy}" in code
    protocols = [recipe.protocol]
    with contextlib.suppress(RecipeError):  # a protocol without a form that asks for an answer in one turn
        at_once, _ = single_turn(recipe.protocol)
        protocols.append(at_once)
    options: dict[str, Any] = {}
    if has_plugin_policy:
        options = recipe.rollout.options
    answers = {
        "policy": answerer.identity,
        "recipe": asking,
        "prompts": [prompt_digest(protocol) for protocol in protocols],
        "version": VERSIONS["evaluate_model"],
        "plugins": code,
        "options": options,
        "user": endpoint_fingerprints(asking_recipe, "evaluate_model"),
        "cards": cards(recipe.data.test[:1], store.root),
    }
    verdicts = {
        "name": answerer.name,
        "evaluation": judging,
        "code": judging_code,
        "report": VERSIONS["report"],
        "endpoints": endpoint_fingerprints(recipe, "evaluate_model"),
    }
    return EvaluationFacts(answers, verdicts)


def without_selector(recipe: Recipe) -> Recipe:
    """The recipe whose samples no endpoint chooses among: a selector decides no answer."""
    evaluation = recipe.evaluation.model_copy(update={"selector": None})
    return recipe.model_copy(update={"evaluation": evaluation})
