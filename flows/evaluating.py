"""`sqltrain evaluate` for any policy: a checkpoint folder, an endpoint, the scripted oracle."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows import terminal
from flows.terminal import Bars
from pipelines.core.errors import RecipeError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.endpoints.client import Endpoint
from pipelines.nightly import store_gc
from pipelines.protocols.base import at_once
from pipelines.recipe import recipes
from pipelines.recipe.config import ProtocolSection, Recipe
from pipelines.recipe.plugins import plugin_code
from pipelines.report import writer
from pipelines.report.data import ReportData
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.stages import evaluate, graph
from pipelines.stages.context import Context, examples
from pipelines.stages.evaluate import Latency, latencies
from pipelines.stages.keys import cards, endpoints, folder_digest, prompt_digest
from pipelines.stages.report import of_systems, systems_of

ANSWERS = "answers"  # a folder of the store: each question's episodes, by policy and by how it is asked
EVALUATIONS = "evaluations"
VERSIONS = {stage.name: stage.version for stage in graph.GRAPH}
ASKING = ("protocol", "seed", *(f"execution.{name}" for name in ("timeout_s", "max_rows", "max_bytes", "memory_mb")))
ANSWER_FIELDS = {"base_url", "model", "omit", "extra", "system", "reasoning"}  # of an entry: what decides its answers


def evaluate_model(recipe: Recipe, store: Store, model: Path, as_json: bool, plan_only: bool = False) -> None:
    """Evaluate a checkpoint folder on the recipe's held-out questions."""
    about = {"digest": folder_digest(model), "dtype": recipe.model.compute_dtype, "decoder": recipe.rollout.policy}
    answerer = Answerer(str(model.resolve()), model.name, about, f"checkpoint {about['digest']}")
    evaluate_policy(recipe, store, answerer, as_json, plan_only)


def evaluate_named(recipe: Recipe, store: Store, policy: str, as_json: bool, plan_only: bool = False) -> None:
    """Evaluate "oracle" or "endpoint:NAME" on the recipe's held-out questions."""
    if policy.startswith(evaluate.ENDPOINT):
        from pipelines.endpoints.client import endpoint

        entry = endpoint(policy.removeprefix(evaluate.ENDPOINT))
        about = {"endpoint": entry.model_dump(mode="json", include=ANSWER_FIELDS)}
        evaluate_policy(recipe, store, Answerer(policy, policy, about, entry.model, entry), as_json, plan_only)
    elif policy == evaluate.ORACLE:
        evaluate_policy(recipe, store, Answerer(policy, policy, {"policy": policy}), as_json, plan_only)
    else:
        raise RecipeError(f"there is no policy {policy!r}", "Choose oracle or endpoint:NAME, or pass --model FOLDER.")


@dataclass(frozen=True)
class Answerer:
    """The policy that is evaluated."""

    policy: str  # as `pipelines.stages.evaluate.answering` takes it
    name: str  # for people
    about: Mapping[str, object]  # what tells it from any other, for the keys
    note: str = ""  # the same in a few words, for the report
    entry: Endpoint | None = None  # of an endpoint, with its price


def evaluate_policy(
    recipe: Recipe, store: Store, answerer: Answerer, as_json: bool, plan_only: bool = False
) -> list[Path]:
    """Evaluate a policy on every benchmark of the recipe, and write a report of each.

    What it has answered when asked in the same way is not asked again. An evaluation with broken episodes is no last
    word: the same command makes it anew, and asks only those again.

    Args:
        plan_only: print what it would ask, and what that costs at most, and stop.

    Returns the evaluations' folders, in the order of the benchmarks.
    """
    alone = [recipe.on(benchmark.name) for benchmark in recipe.data.test]
    with Bars(terminal.console) as bars:
        folders = [_evaluated(single, store, answerer, bars, plan_only) for single in alone]
    if plan_only:
        return []
    results = [
        graph.StageResult(
            f"evaluate {answerer.name}{f' on {single.benchmark.name}' if number else ''}",
            folder.name,
            folder,
            read_json(folder / "metrics.json"),
            False,
        )
        for number, (single, folder) in enumerate(zip(alone, folders, strict=True))
    ]
    figures = {
        single.benchmark.name: {answerer.name: terminal.summary_of(folder)}
        for single, folder in zip(alone, folders, strict=True)
    }
    lines: list[str] = []
    for single, result in zip(alone, results, strict=True):
        if len(alone) > 1:
            lines.append(single.benchmark.name)
        if _all_malformed(result.folder):
            lines.append(
                f"warning: every answer was malformed: does {answerer.name} speak the protocol {single.protocol.name} "
                f"(prompt {single.protocol.prompt}) ?"
            )
        lines += _chosen(single, result.metrics)
        efficiency = read_json(result.folder / evaluate.EFFICIENCY)
        lines += [f"R-VES  {efficiency['r_ves']:.1f}"] if efficiency else []
        for name, latency in latencies(result.folder).items():
            lines.append(f"latency ({name})  {latency.total_s:.2f} s a question, {latency.sql_s:.2f} s of it in SQL")
            if answerer.entry is not None:
                cost = f"{_price(answerer.entry, latency):.5f} {answerer.entry.currency} a question"
                tokens = f"{latency.bought_in:,.0f} tokens in, {latency.bought_out:,.0f} out"
                lines.append(f"cost ({name})  {cost}: {tokens}")
        lines.append(f"report  {result.folder / writer.PAGE}")
    terminal.conclude(recipe, store, results, as_json, figures, lines)
    return folders


def _price(entry: Endpoint, latency: Latency) -> float:
    """Of a question."""
    return (latency.bought_in * entry.price_in + latency.bought_out * entry.price_out) / 1e6


def _evaluated(recipe: Recipe, store: Store, answerer: Answerer, bars: Bars, plan_only: bool = False) -> Path:
    """A policy's evaluation on the first benchmark of a recipe."""
    asking = recipe.slice(*ASKING)
    code = plugin_code(asking | recipe.slice("rollout.policy"))
    alone = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"selector": None})})
    settings = {
        "policy": answerer.about,
        "recipe": asking,
        "prompts": [prompt_digest(protocol) for protocol in _protocols(recipe)],
        "version": VERSIONS["evaluate_model"],
        "plugins": code,
        "options": recipe.rollout.options if f"policy {recipe.rollout.policy}" in code else {},
        "user": endpoints(alone, "evaluate_model"),
        "cards": cards(recipe.data.test[:1], store.root),
    }
    evaluated = recipe.model_copy(update={"stages": (*recipe.stages, "evaluate")})
    steps = graph.plan(evaluated, store, among=("test", "test_schema"))  # no training questions are needed
    with store_gc.claimed(store, [(step.kind, step.key) for step in steps], {"recipe": recipe.name}):
        return _asked(recipe, store, answerer, bars, steps, settings, plan_only)


def _asked(
    recipe: Recipe,
    store: Store,
    answerer: Answerer,
    bars: Bars,
    steps: Sequence[graph.Step],
    settings: Mapping[str, object],
    plan_only: bool,
) -> Path:
    """The evaluation over the benchmark's stages, which are made first; of a plan, the folder of the questions."""
    results = {step.name: graph.execute(step, recipe, store, bars, steps) for step in steps}
    test = results["test"]
    questions = examples(test.folder, "test")
    if answerer.policy == evaluate.ORACLE and (mute := sum(not question.gold_sql for question in questions)):
        raise RecipeError(
            f"the oracle plays gold SQL, and {mute} of {len(questions)} questions have none",
            "Evaluate a checkpoint (--model FOLDER) or an endpoint on them.",
        )
    links = results["test_schema"].folder if "test_schema" in results else None
    # Each turn sends the conversation again; a conversation ends at its budget of tokens.
    asked = {one.name: (len(questions) * one.samples, one.max_turns, one.sampling) for one in evaluate.passes(recipe)}
    n_calls = sum(episodes * turns for episodes, turns, _ in asked.values())
    episodes = ", ".join(f"{number:,} {name}" for name, (number, *_) in asked.items())
    bars.say(f"{len(questions):,} questions of {recipe.benchmark.name}: {episodes}; at most {n_calls:,} calls")
    if answerer.entry is not None:
        read = sum(number * turns * sampling.episode_tokens for number, turns, sampling in asked.values())
        made = sum(number * sampling.episode_tokens for number, _, sampling in asked.values())
        cost = (read * answerer.entry.price_in + made * answerer.entry.price_out) / 1e6
        price = f"{cost:,.2f} {answerer.entry.currency}" if cost else "its entry has no price"
        bars.say(f"at most {read:,} tokens in and {made:,} out: {price}; what is answered already is not asked again")
    if plan_only:
        return test.folder

    def build(folder: Path) -> None:
        context = Context("evaluate", recipe, folder, {"test": test.folder}, bars)
        answers = store.root / ANSWERS / recipes.digest(settings)
        if answerer.entry is not None:  # an endpoint that does not answer as it should costs one question
            (store.root / ANSWERS).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=store.root / ANSWERS, prefix=".first-") as first:
                alone = recipe.evaluation.model_copy(update={"selector": None})
                single = recipe.model_copy(update={"evaluation": alone})
                one = Context("first question", single, Path(first), {"test": test.folder}, bars)
                evaluate.evaluate_questions(one, questions[:1], answerer.policy, links, answers)
        evaluate.evaluate_questions(context, questions, answerer.policy, links, answers)
        data = of_systems(recipe, tuple(systems_of(folder, answerer.name, note=answerer.note)), test.folder)
        writer.write_all(_with_costs(data, answerer.entry, folder), folder)

    evaluation = recipe.slice(*graph.VERDICTS, "benchmark.name", "execution", "gold_schema", "stages")
    whole = {
        **settings,
        "name": answerer.name,
        "evaluation": evaluation,
        "code": plugin_code(evaluation),
        "report": VERSIONS["report"],  # not of the answers' key: another page asks no endpoint again
        "endpoints": endpoints(recipe, "evaluate_model"),
        "test": test.key,
        "test_schema": results["test_schema"].key if "test_schema" in results else None,
    }
    key = recipes.digest(whole)

    def broken() -> bool:
        return store.has(EVALUATIONS, key) and _broken(store.folder(EVALUATIONS, key))

    def waiting() -> None:
        bars.say("another run makes this evaluation; waiting")

    if broken():
        with store.locked(EVALUATIONS, key, waiting):
            if broken():  # else the run that we waited for has made it anew
                store_gc.remove(store.folder(EVALUATIONS, key))
    return store.make(EVALUATIONS, key, build, whole, waiting)


def _protocols(recipe: Recipe) -> list[ProtocolSection]:
    """The recipe's protocol, and the one that asks for an answer in one turn, where there is one."""
    try:
        return [recipe.protocol, at_once(recipe.protocol)[0]]
    except RecipeError:
        return [recipe.protocol]


def _broken(folder: Path) -> bool:
    """Whether some episode of a finished evaluation broke."""
    passes = ("greedy", "sampled", evaluate.ONCE)
    return any(record.broken for record in evaluate.records(folder, *passes))


def _all_malformed(folder: Path) -> bool:
    """Whether no answer of a finished evaluation is of the protocol's form, and none ran."""
    records = [record for record in evaluate.records(folder, "greedy", "sampled") if not record.broken]
    return bool(records) and not any(record.well_formed or record.executable for record in records)


def _chosen(recipe: Recipe, metrics: Mapping[str, float]) -> list[str]:
    """What an endpoint made of the samples, beside the vote in the table."""
    if "ex_selected" not in metrics:
        return []
    value, low, high = (100 * metrics[name] for name in ("ex_selected", "ex_selected_low", "ex_selected_high"))
    shares = [metrics["selector_first"]] if "selector_first" in metrics else []  # of one that merges there is none
    bias = "".join(f"; {share:.0%} of its answers chose the query shown first" for share in shares)
    return [f"selected by {recipe.evaluation.selector}  {value:.1f} [{low:.1f}, {high:.1f}]{bias}"]


def _with_costs(data: ReportData, entry: Endpoint | None, folder: Path) -> ReportData:
    """The report with cost and latency of an endpoint's answers; no other report depends on the time that it took."""
    times = latencies(folder)
    if entry is None or not times:
        return data
    texts = ("latency, s", "SQL, s", "tokens in", "tokens out", f"cost, {entry.currency}")
    columns = (TableColumn("answers"), TableColumn("number", "count"), *(TableColumn(text, "text") for text in texts))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            name,
            one.episodes,
            *(f"{value:,.2f}" for value in (one.total_s, one.sql_s)),
            *(f"{value:,.0f}" for value in (one.bought_in, one.bought_out)),
            f"{_price(entry, one):.5f}",
        )
        for name, one in times.items()
    )
    costs = ReportTable("cost", "Cost and latency", columns, rows, "Means of an answer, of what this run asked.")
    return dataclasses.replace(data, tables=(*data.tables, costs))
