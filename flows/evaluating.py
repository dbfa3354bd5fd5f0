"""`sqltrain evaluate` for any policy: a checkpoint folder, an endpoint, the scripted oracle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows import screen
from flows.asking import require_model
from flows.progress import Bars
from pipelines import recipes
from pipelines.config import Recipe
from pipelines.errors import RecipeError
from pipelines.evaluation import report
from pipelines.stages import evaluate, graph
from pipelines.stages.answers import latencies
from pipelines.stages.context import Context
from pipelines.stages.inputs import examples
from pipelines.stages.report import of_systems, systems_of
from pipelines.stages.sources import folder_digest, prompt_digest
from pipelines.store import Store, read_json

ANSWERS = "answers"  # a folder of the store: each question's episodes, by policy and settings
EVALUATIONS = "evaluations"
TELLING = {"base_url", "model", "omit", "extra", "system", "reasoning"}  # of an entry: what decides its answers


def evaluate_model(recipe: Recipe, store: Store, model: Path, as_json: bool) -> None:
    """Evaluate a checkpoint folder on the recipe's held-out questions.

    Raises:
        DataError: there is no model in the folder.
    """
    require_model(model)
    evaluate_policy(recipe, store, str(model.resolve()), model.name, {"digest": folder_digest(model)}, as_json)


def evaluate_named(recipe: Recipe, store: Store, policy: str, as_json: bool) -> None:
    """Evaluate "oracle" or "endpoint:NAME" on the recipe's held-out questions.

    Raises:
        RecipeError: it is neither, or there is no such endpoint.
    """
    if policy.startswith(evaluate.ENDPOINT):
        from pipelines.rollout.endpoints import endpoint

        entry = endpoint(policy.removeprefix(evaluate.ENDPOINT))
        about = {"endpoint": entry.model_dump(mode="json", include=TELLING)}
        folder = evaluate_policy(recipe, store, policy, policy, about, as_json)
        for name, each in latencies(folder).items():
            cost = (each.bought_in * entry.price_in + each.bought_out * entry.price_out) / 1e6
            tokens = f"{each.bought_in:,.0f} tokens in, {each.bought_out:,.0f} out"
            screen.console.print(f"cost ({name})  {cost:.5f} {entry.currency} a question: {tokens}", markup=False)
    elif policy == evaluate.ORACLE:
        evaluate_policy(recipe, store, policy, policy, {"policy": policy}, as_json)
    else:
        raise RecipeError(f"there is no policy {policy!r}", "Choose oracle or endpoint:NAME, or pass --model FOLDER.")


def evaluate_policy(
    recipe: Recipe, store: Store, answerer: str, name: str, about: Mapping[str, object], as_json: bool
) -> Path:
    """Evaluate a policy and write its report; what it has answered under the same settings is not asked again.

    Args:
        answerer: as `pipelines.stages.evaluate.answering` takes it.
        about: what tells this policy from any other, for the keys.

    Returns the evaluation's folder.
    """
    steps = graph.plan(recipe, store, until="data")
    answering = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"selector": None})})
    settings = {
        "policy": about,
        "recipe": answering.slice("evaluation", *graph.SAMPLING),
        "prompt": prompt_digest(recipe.protocol),
    }
    whole = {**settings, "data": steps[0].key, "selector": recipe.evaluation.selector}
    with Bars(screen.console) as bars:
        data = graph.execute(steps[0], recipe, store, bars, steps).folder

        def build(folder: Path) -> None:
            context = Context("evaluate", recipe, folder, {"data": data}, bars)
            kept = store.root / ANSWERS / recipes.digest(settings)
            evaluate.evaluate_questions(context, examples(data, "test"), answerer, None, kept)
            found = of_systems(recipe, tuple(systems_of(folder, name)), data)
            report.write_all(found, folder)

        key = recipes.digest(whole)
        folder = store.make(EVALUATIONS, key, build, whole, lambda: bars.say("another run does it; waiting"))
    result = graph.StageResult(f"evaluate {name}", key, folder, read_json(folder / "metrics.json"), False)
    screen.conclude(recipe, store, [result], as_json)
    for line in (*_chosen(recipe, result.metrics), *_costs(folder), f"report  {folder / report.PAGE}"):
        screen.console.print(line, soft_wrap=True, markup=False)
    return folder


def _chosen(recipe: Recipe, metrics: Mapping[str, float]) -> list[str]:
    """What an endpoint made of the samples, beside the vote in the table."""
    if "ex_selected" not in metrics:
        return []
    value, low, high = (100 * metrics[name] for name in ("ex_selected", "ex_selected_low", "ex_selected_high"))
    bias = f"{metrics['selector_first']:.0%} of its answers chose the query shown first"
    return [f"selected by {recipe.evaluation.selector}  {value:.1f} [{low:.1f}, {high:.1f}]; {bias}"]


def _costs(folder: Path) -> list[str]:
    """What the answers took, from the side files; nothing of it is part of the results."""
    lines = [
        f"latency ({name})  {each.total_s:.2f} s a question, {each.sql_s:.2f} s of it in SQL"
        for name, each in latencies(folder).items()
    ]
    efficiency = read_json(folder / evaluate.EFFICIENCY)
    return [*lines, *([f"R-VES  {efficiency['r_ves']:.1f}"] if efficiency else [])]
