"""Commands that evaluate: evaluate, compare, report, score."""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows import terminal
from flows.terminal import FIRST_RUN, AsJson, Bars, Overrides, RecipeName, StoreOption, console, emit, say
from pipelines.core.errors import DataError, RecipeError, UserError
from pipelines.core.files import read_json, write_atomic, writing_to
from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.rows import kind_of
from pipelines.core.store import Store
from pipelines.core.types import Database, escape_surrogates, from_dict, to_dict
from pipelines.databases import card, named, of_recipe
from pipelines.endpoints.client import Endpoint, endpoint
from pipelines.evaluation.evaluate import of_prediction
from pipelines.evaluation.summary import Summary
from pipelines.nightly import store_gc
from pipelines.protocols.base import single_turn
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import open_recipe, split_store
from pipelines.recipe.plugins import plugin_code
from pipelines.report import terminal as report_terminal
from pipelines.report import writer
from pipelines.report.data import report_of_predictions
from pipelines.report.formats import ReportTable, TableColumn
from pipelines.rollout.gguf_model import is_gguf
from pipelines.sql import scoring
from pipelines.sql.diagnoses import Diagnosis, Hint
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.scoring import GoldQuery, ScoredItem, ScoreSummary
from pipelines.stages import evaluate as asking
from pipelines.stages import evaluations, graph
from pipelines.stages.context import Context, examples
from pipelines.stages.evaluate import latencies
from pipelines.stages.fingerprints import cards, endpoint_fingerprints, folder_digest, prompt_digest
from pipelines.stages.gguf_folders import model_folder
from pipelines.stages.report import of_systems, systems_of

app = typer.Typer()

ANSWERS = "answers"  # a folder of the store: each question's episodes, by policy and by how it is asked
EVALUATIONS = "evaluations"
VERSIONS = {stage.name: stage.version for stage in graph.GRAPH}
ASKING = ("protocol", "seed", *(f"execution.{name}" for name in ("timeout_s", "max_rows", "max_bytes", "memory_mb")))
ANSWER_FIELDS = {"base_url", "model", "omit", "extra", "system", "reasoning"}  # of an entry: they decide its answers
# Official evaluators know no limit on a result; a cross join that somebody predicted must still end.
RESULTS = {"max_rows": 5_000_000, "max_bytes": 256_000_000, "memory_mb": 4096}
MOST_UNAVAILABLE = 0.01  # of the items; a figure of fewer than the others says little
RECORDS, SUMMARY = "records.jsonl", "summary.json"
NOTHING_TO_REPORT = "a report needs predictions, and an equality that is no measure of time"
NOTHING_SCORED = 1  # exit code of `evaluate` and `score` without a figure
BELOW = 3  # exit code of a figure below --at-least, and of a comparison that --fail-if names
SHOWN = 12  # item numbers of a disagreement, and left-out items


@app.command()
def evaluate(
    recipe: RecipeName,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead of the recipe's own: a checkpoint folder, a GGUF file, endpoint:NAME or oracle."),
    ] = None,
    benchmarks: Annotated[
        str | None, typer.Option(help="To evaluate on, with commas between; omnisql: those added of its nine.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help="Your own questions with their SQL: JSON lines, or CSV with a header.")
    ] = None,
    database: Annotated[
        str | None, typer.Option(help="Of all --questions: a file, an address, or a name of databases/.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Of each benchmark so many questions, drawn by the seed.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print calls, tokens and price at most, and stop; with --model.")
    ] = False,
    at_least: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="Exit with 3 if a figure is lower, such as ex=0.80; repeatable."),
    ] = None,
    as_json: AsJson = False,
    store_folder: StoreOption = None,
) -> None:
    """Evaluate a recipe's checkpoints, any checkpoint folder, an endpoint or the oracle, on the held-out questions.

    Exits with 1 when no answer to a benchmark's questions could be scored: its database, worker or endpoint broke.

    Examples:

      sqltrain evaluate miniature

      sqltrain evaluate miniature --model ~/checkpoint protocol.max_turns_eval=3 protocol.schema_view=hidden

      sqltrain evaluate sql_trail --model endpoint:big include=local/bird_dev

      sqltrain evaluate sql_trail --model endpoint:big --questions q.csv --database shop --limit 5 --plan

      sqltrain evaluate arctic_sql --model ~/OmniSQL-7B --benchmarks omnisql

      sqltrain evaluate sql_trail --model endpoint:agent --questions q.csv --database shop --at-least ex=0.80
    """
    from flows.commands.data import chosen

    if plan and model is None:
        raise UserError("--plan is of one model", "Pass --model; a recipe's stages: sqltrain stages.")
    try:
        bounds = {name: float(value) for name, _, value in (text.partition("=") for text in at_least or ())}
    except ValueError:
        raise UserError(f"--at-least {' '.join(at_least or ())}", "Pass METRIC=VALUE, such as ex=0.80.") from None
    words = list(overrides or [])
    if questions is not None:
        if not questions.expanduser().is_file():
            raise UserError(f"there is no file {questions}", "--questions takes JSON lines, or CSV with a header.")
        kind, place = kind_of(questions), questions.expanduser().resolve()
        source: dict[str, Any] = {"name": "questions", "kind": kind, "path": str(place)}
        if database is not None:
            source["options"] = {"database": named.find(database).address}
        words.append(f"data.test={json.dumps([source])}")
    elif database is not None:
        raise UserError("--database is of --questions", "Pass both, or data.test.0.options.database=ADDRESS.")
    if benchmarks is not None:
        words.append(chosen(benchmarks, say))
    is_named = model is not None and (model == asking.ORACLE or model.startswith(asking.ENDPOINT))
    folder = None
    if model is not None and not is_named:
        folder = model_folder(model, split_store(words, store_folder)[1], say)
    loaded, store = open_recipe(recipe, words, store_folder, folder)
    more = [] if limit is None else [f"data.test.{place}.count={limit}" for place in range(len(loaded.data.test))]
    if questions is not None and loaded.data.linker is None:  # one's own database is shown as `ask` and `serve` show it
        more += ["data.linker=fit", f"data.linker_tokens={of_recipe.served_tokens(loaded)}"]
    if more:
        loaded, store = open_recipe(recipe, [*words, *more], store_folder, folder)
    if folder is not None:
        name = Path(str(model)).stem if is_gguf(str(model)) else folder.name
        about = {"digest": folder_digest(folder), "dtype": loaded.model.compute_dtype, "decoder": loaded.rollout.policy}
        answerer = Answerer(str(folder.resolve()), name, about, f"checkpoint {about['digest']}")
        evaluate_policy(loaded, store, answerer, as_json, plan, bounds)
    elif model is not None:
        evaluate_policy(loaded, store, named_answerer(model), as_json, plan, bounds)
    else:
        results = terminal.run(loaded, store, "evaluate")
        judged = [result for result in results if result.kind.startswith("evaluate")]
        unscored = nothing_scored(judged)
        newest = {graph.benchmark_of(result.name): result for result in judged}
        low = [] if unscored else below(newest.values(), bounds)
        terminal.print_results(loaded, store, results, as_json, more=[*unscored, *low])
        leave(unscored, low)


def nothing_scored(results: Iterable[graph.StageResult]) -> list[str]:
    """A line for each evaluation all of whose answers broke: it has no figure, which is not one of 0."""
    lines = []
    for result in results:
        records = asking.records(result.folder, "greedy", "sampled")
        if all(record.broken for record in records):
            reasons = Counter(record.failure or "broken" for record in records).most_common(1)
            why = "".join(f": {count} of {len(records)} answers broke by {reason}" for reason, count in reasons)
            lines.append(f"{result.name}: nothing could be scored{why}")
    return lines


def leave(unscored: Sequence[str], low: Sequence[str]) -> None:
    """End with the exit code of evaluations of which some have no figure, or one that is too low."""
    if unscored:
        raise typer.Exit(NOTHING_SCORED)
    if low:
        raise typer.Exit(BELOW)


def below(results: Iterable[graph.StageResult], bounds: Mapping[str, float]) -> list[str]:
    """A line for each figure of some evaluations that is lower than its bound."""
    lines = []
    for result in results:
        for name, bound in bounds.items():
            if name not in result.metrics:
                known = ", ".join(sorted(name for name in result.metrics if not name.endswith(("_low", "_high"))))
                raise UserError(f"--at-least {name}: the evaluation has no such figure", f"There are: {known}.")
            if not result.metrics[name] >= bound:  # NaN, too
                lines.append(f"{result.name}: {name} is {result.metrics[name]:.4g}, below {bound:g}")
    return lines


@dataclass(frozen=True)
class Answerer:
    """The policy that is evaluated."""

    policy: str  # as `pipelines.stages.evaluate.evaluated_policy` takes it
    name: str  # for people
    about: Mapping[str, object]  # distinguishes it from any other, for the keys
    note: str = ""  # the same in a few words, for the report
    entry: Endpoint | None = None  # of an endpoint, with its price

    def price(self, latency: asking.Latency) -> str:
        """Of one answer; "" if the endpoint's entry has no price."""
        assert self.entry is not None
        price_in, price_out = self.entry.price_in, self.entry.price_out
        price = (latency.bought_in * price_in + latency.bought_out * price_out) / 1e6
        return f"{price:.5f}" if price_in or price_out else ""


def named_answerer(policy: str) -> Answerer:
    """The answerer "oracle" or "endpoint:NAME"."""
    if not policy.startswith(asking.ENDPOINT):
        return Answerer(policy, policy, {"policy": policy})
    entry = endpoint(policy.removeprefix(asking.ENDPOINT))
    about = {"endpoint": entry.model_dump(mode="json", include=ANSWER_FIELDS)}
    return Answerer(policy, policy, about, entry.model, entry)


def evaluate_policy(
    recipe: Recipe,
    store: Store,
    answerer: Answerer,
    as_json: bool,
    plan_only: bool = False,
    bounds: Mapping[str, float] | None = None,
) -> None:
    """Evaluate a policy on every benchmark of the recipe, and write a report of each.

    What it has answered when asked in the same way is not asked again. An evaluation with broken episodes is no last
    word: the same command makes it anew, and asks only those again.

    Args:
        plan_only: print what it would ask, and what that costs at most, and stop.
        bounds: the least values of figures; a lower one ends the command with `BELOW`.
    """
    alone = [recipe.on(benchmark.name) for benchmark in recipe.data.test]
    with Bars(console) as bars:
        done = [evaluated(single, store, answerer, bars, plan_only) for single in alone]
    if plan_only:
        if as_json:
            emit({single.benchmark.name: most for single, (_, most) in zip(alone, done, strict=True)})
        return
    results: list[graph.StageResult] = []
    figures: dict[str, Any] = {}
    lines: list[str] = []
    for number, (single, (folder, _)) in enumerate(zip(alone, done, strict=True)):
        benchmark, metrics = single.benchmark.name, read_json(folder / "metrics.json")
        title = f"evaluate {answerer.name}{f' on {benchmark}' if number else ''}"
        results.append(graph.StageResult(title, folder.name, folder, metrics, False))
        figures[benchmark] = {answerer.name: from_dict(Summary, read_json(folder / "summary.json"))}
        if len(alone) > 1:
            lines.append(benchmark)
        records = [record for record in asking.records(folder, "greedy", "sampled") if not record.broken]
        if records and not any(record.well_formed or record.executable for record in records):
            lines.append(
                f"warning: every answer was malformed: does {answerer.name} speak the protocol {single.protocol.name} "
                f"(prompt {single.protocol.prompt}) ?"
            )
        if "ex_selected" in metrics:  # the choice of an endpoint among the samples, beside the vote in the table
            value, low, high = (100 * metrics[name] for name in ("ex_selected", "ex_selected_low", "ex_selected_high"))
            chosen_line = f"selected by {single.evaluation.selector}  {value:.1f} [{low:.1f}, {high:.1f}]"
            if "selector_first" in metrics:  # of one that merges there is none
                chosen_line += f"; {metrics['selector_first']:.0%} of its answers chose the query shown first"
            lines.append(chosen_line)
        efficiency = read_json(folder / asking.EFFICIENCY)
        lines += [f"R-VES  {efficiency['r_ves']:.1f}"] if efficiency else []
        for name, latency in latencies(folder).items():
            lines.append(f"latency ({name})  {latency.total_s:.2f} s a question, {latency.sql_s:.2f} s of it in SQL")
            if answerer.entry is not None:
                price = answerer.price(latency)
                cost = f"{price} {answerer.entry.currency} a question" if price else "its entry has no price"
                lines.append(
                    f"cost ({name})  {cost}: {latency.bought_in:,.0f} tokens in, {latency.bought_out:,.0f} out"
                )
        lines.append(f"report  {folder / writer.PAGE}")
    unscored = nothing_scored(results)
    low = [] if unscored else below(results, bounds or {})
    terminal.print_results(recipe, store, results, as_json, figures, [*lines, *unscored, *low])
    leave(unscored, low)


def evaluated(
    recipe: Recipe, store: Store, answerer: Answerer, bars: Bars, plan_only: bool = False
) -> tuple[Path, dict[str, float]]:
    """A policy's evaluation on the first benchmark, or the questions' folder if planned; and what it asks at most."""
    how = recipe.slice(*ASKING)
    code = plugin_code(how | recipe.slice("rollout.policy"))
    alone = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"selector": None})})
    protocols = [recipe.protocol]
    with contextlib.suppress(RecipeError):  # of a protocol without a form that asks for an answer in one turn
        protocols.append(single_turn(recipe.protocol)[0])
    settings: dict[str, object] = {
        "policy": answerer.about,
        "recipe": how,
        "prompts": [prompt_digest(protocol) for protocol in protocols],
        "version": VERSIONS["evaluate_model"],
        "plugins": code,
        "options": recipe.rollout.options if f"policy {recipe.rollout.policy}" in code else {},
        "user": endpoint_fingerprints(alone, "evaluate_model"),
        "cards": cards(recipe.data.test[:1], store.root),
    }
    with_evaluation = recipe.model_copy(update={"stages": (*recipe.stages, "evaluate")})
    steps = graph.plan(with_evaluation, store, among=("test", "test_schema"))  # no training questions are needed
    with store_gc.claimed(store, [(step.kind, step.key) for step in steps], {"recipe": recipe.name}):
        results = {step.name: graph.execute(step, recipe, store, bars, steps) for step in steps}
        test = results["test"]
        questions = examples(test.folder, "test")
        if answerer.policy == asking.ORACLE and (mute := sum(not question.gold_sql for question in questions)):
            raise RecipeError(
                f"the oracle plays gold SQL, and {mute} of {len(questions)} questions have none",
                "Evaluate a checkpoint (--model FOLDER) or an endpoint on them.",
            )
        links = results["test_schema"].folder if "test_schema" in results else None
        # Each turn sends the conversation again; a conversation ends at its budget of tokens.
        asked = {one.name: (len(questions) * one.samples, one.max_turns, one.sampling) for one in asking.passes(recipe)}
        n_calls = sum(episodes * turns for episodes, turns, _ in asked.values())
        episodes = ", ".join(f"{number:,} {name}" for name, (number, *_) in asked.items())
        bars.say(f"{recipe.benchmark.name}: {len(questions):,} questions ({episodes}), at most {n_calls:,} calls")
        entry = answerer.entry
        most: dict[str, float] = {"questions": len(questions), "calls": n_calls}
        if entry is not None:
            read = sum(number * turns * sampling.episode_tokens for number, turns, sampling in asked.values())
            made = sum(number * sampling.episode_tokens for number, _, sampling in asked.values())
            cost = (read * entry.price_in + made * entry.price_out) / 1e6
            price = f"{cost:,.2f} {entry.currency}" if cost else "its entry has no price"
            most |= {"tokens_in": read, "tokens_out": made, "cost": cost}
            bars.say(
                f"at most {read:,} tokens in and {made:,} out: {price}; what is answered already is not asked again"
            )
        if plan_only:
            return test.folder, most

        def build(folder: Path) -> None:
            context = Context("evaluate", recipe, folder, {"test": test.folder}, bars)
            answers = store.root / ANSWERS / recipes.digest(settings)
            if entry is not None:  # an endpoint that does not answer as it should costs one question
                (store.root / ANSWERS).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=store.root / ANSWERS, prefix=".first-") as first:
                    one = Context("first question", alone, Path(first), {"test": test.folder}, bars)
                    asking.evaluate_questions(one, questions[:1], answerer.policy, links, answers)
            asking.evaluate_questions(context, questions, answerer.policy, links, answers)
            data = of_systems(recipe, tuple(systems_of(folder, answerer.name, note=answerer.note)), test.folder)
            times = latencies(folder)
            if entry is not None and times:  # no other report depends on the time that it took
                texts = ("latency, s", "SQL, s", "tokens in", "tokens out", f"cost, {entry.currency}")
                costs = ReportTable(
                    "cost",
                    "Cost and latency",
                    (TableColumn("answers"), TableColumn("number", "count"), *(TableColumn(t, "text") for t in texts)),
                    tuple(
                        (
                            name,
                            one.episodes,
                            *(f"{value:,.2f}" for value in (one.total_s, one.sql_s)),
                            *(f"{value:,.0f}" for value in (one.bought_in, one.bought_out)),
                            answerer.price(one),
                        )
                        for name, one in times.items()
                    ),
                    "Means of an answer, of what this run asked.",
                )
                data = dataclasses.replace(data, tables=(*data.tables, costs))
            writer.write_all(data, folder)

        evaluation = recipe.slice(*graph.VERDICTS, "benchmark.name", "execution", "gold_schema", "stages")
        whole = {
            **settings,
            "name": answerer.name,
            "evaluation": evaluation,
            "code": plugin_code(evaluation),
            "report": VERSIONS["report"],  # not of the answers' key: another page asks no endpoint again
            "endpoints": endpoint_fingerprints(recipe, "evaluate_model"),
            "test": test.key,
            "test_schema": results["test_schema"].key if "test_schema" in results else None,
        }
        key = recipes.digest(whole)

        def is_broken() -> bool:
            folder = store.folder(EVALUATIONS, key)
            return store.has(EVALUATIONS, key) and any(
                record.broken for record in asking.records(folder, "greedy", "sampled", asking.SINGLE_TURN)
            )

        waiting = functools.partial(bars.say, "another run makes this evaluation; waiting")
        if is_broken():
            with store.locked(EVALUATIONS, key, waiting):
                if is_broken():  # else the run that we waited for has made it anew
                    store_gc.remove(store.folder(EVALUATIONS, key))
        return store.make(EVALUATIONS, key, build, whole, waiting), most


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more: stage folders, records files, or NAME=PATH.")],
    equality: Annotated[str | None, typer.Option(help="Of the verdicts; by default the first run's own.")] = None,
    flips: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Questions that flipped to print for each pair.")
    ] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the page and every table into this folder.")] = None,
    fail_if: Annotated[
        Literal["worse", "not_better"] | None,
        typer.Option(help="Exit with 3 if the paired difference of a later run is below 0 (worse), or not above it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations question by question: which flipped, and whether the difference is more than chance.

    Examples:

      sqltrain compare store/evaluate_sft/KEY store/evaluate_grpo/KEY

      sqltrain compare mine=scores/mine theirs=scores/theirs --equality bird --json

      sqltrain compare main=scores/main change=scores/change --fail-if worse
    """
    data, loaded, names = evaluations.comparison(runs, equality)
    if not as_json:
        summaries = {run.name: summary for run, summary in zip(loaded, data.summaries, strict=True)}
        console.print(report_terminal.render(report_terminal.figures(summaries), console.width))
        n_asked = {each.name: summary.n_questions for each, summary in zip(data.systems, data.summaries, strict=True)}
        for comparison in data.comparisons:
            console.print()
            report_terminal.show_comparison(console, comparison, flips)
            old, new = n_asked[comparison.before], n_asked[comparison.after]
            if comparison.mode == "greedy" and comparison.paired.n < max(old, new):
                line = f"compared on {comparison.paired.n:,} questions, of {old:,} and {new:,}: "
                say(f"{line}the others are not in both")
        for run in loaded:
            for name, latency in run.timing.items():
                say(f"{run.name}: {latency.total_s:.2f} s a question ({name})")
    if out is not None:
        page = evaluations.with_texts(data, loaded, names)
        with writing_to(out, "Name a folder with --out."):
            out.mkdir(parents=True, exist_ok=True)
            writer.write_tables(page, out)
            writer.write(page, out / writer.PAGE)
    if as_json:
        of_runs = {
            run.name: {
                "folder": str(run.folder),
                "figures": summary.flat(),
                "latency_s": {name: latency.total_s for name, latency in run.timing.items()},
                "left_out": dict(run.left_out),
            }
            for run, summary in zip(loaded, data.summaries, strict=True)
        }
        emit({"equality": data.equality, "runs": of_runs, "comparisons": [*map(to_dict, data.comparisons)]})
    # The interval of the paired difference decides: all below 0 is worse, and what reaches down to 0 is not better.
    failed = False
    for one in data.comparisons if fail_if else ():
        if one.paired.high < 0 if fail_if == "worse" else one.paired.low <= 0:
            failed = True
            typer.echo(f"{one.after} is {str(fail_if).replace('_', ' ')} than {one.before} ({one.mode})", err=True)
    if failed:
        raise typer.Exit(BELOW)


@app.command()
def report(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Copy the page to this file.")] = None,
    store_folder: StoreOption = None,
) -> None:
    """Write the HTML report of a finished run and say where it is.

    Example: sqltrain report miniature --out report.html
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    steps = graph.plan(loaded, store)
    if not any(step.kind == "report" for step in steps):
        raise DataError(f"the stages of recipe {loaded.name} end without a report", "Add report to `stages`.")
    missing = [step.name for step in steps if not step.cached and step.kind != "report"]
    if missing:
        raise DataError(f"recipe {loaded.name} is not finished: {', '.join(missing)} to do", FIRST_RUN)
    first, *others = (result for result in terminal.run(loaded, store, None) if result.kind == "report")
    page = first.folder / "report.html"
    if out is not None:
        copy_page(page, out)
    say(str(out or page))
    for result in others:  # of further benchmarks
        say(f"{graph.benchmark_of(result.name)}  {result.folder / 'report.html'}")


def copy_page(page: Path, out: Path) -> None:
    with writing_to(out, "Name a file with --out."):
        out.write_bytes(page.read_bytes())


@app.command()
def score(
    gold: Annotated[Path, typer.Option(help="Gold file: SQL<TAB>db_id a line, or a split's JSON.")],
    pred: Annotated[Path, typer.Option(help="Predictions: one a line, or BIRD's JSON.")],
    databases: Annotated[
        str, typer.Option("--database", help="Folder of DIR/ID/ID.sqlite; a server's address; a name of databases/.")
    ],
    tables: Annotated[Path | None, typer.Option(help="Spider's tables.json, for spider_exec's foreign keys.")] = None,
    equality: Annotated[
        str, typer.Option(help="Equalities, by commas: strict, strict_nonempty, bird, soft_f1, test_suite, ...")
    ] = "strict,bird,test_suite",
    out: Annotated[Path | None, typer.Option(help="Write one JSON line an item here.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Folder for the report: error classes, tables, records for `compare`.")
    ] = None,
    difficulty: Annotated[Path | None, typer.Option(help="BIRD's dev.json, for figures by difficulty.")] = None,
    engine: Annotated[str, typer.Option(help="sqlite, duckdb, postgres or mysql.")] = "sqlite",
    timeout: Annotated[float, typer.Option(min=0.001, max=86_400, help="Seconds that one query may take.")] = 30.0,
    workers: Annotated[int, typer.Option(min=0, max=1024, help="Processes that run queries; 0 for one a core.")] = 0,
    audit: Annotated[Path | None, typer.Option(help="Append a JSON line for every query that runs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line, for scripts.")] = False,
) -> None:
    """Score a prediction file under several equalities in one pass.

    Gold queries that do not run and databases that are missing are listed apart and never counted as wrong. Exits with
    1 when nothing was scored or more than 1 % of the items could not be for a database or worker that was not there,
    with 2 for files that cannot be read. What a card of databases/ hides no query reads.

    Examples:

      sqltrain score --gold dev_gold.sql --pred predicted.sql --database spider/database

      sqltrain score --gold dev.sql --pred mine.json --database dev_databases --difficulty dev.json --equality r_ves

      sqltrain score --gold dev.json --pred mine.sql --database spider/database --report scores/mine
    """
    names = list(dict.fromkeys(name.strip() for name in equality.split(",") if name.strip()))
    by_query = [name for name in EQUALITIES if not EQUALITIES[name].by_file]
    unknown = [name for name in names if name not in by_query]
    if unknown or not names:
        raise UserError(f"there is no equality {''.join(unknown[:1])!r}", f"There are: {', '.join(by_query)}.")
    items = scoring.read_gold(gold)
    if difficulty is not None:
        items = scoring.with_difficulty(items, difficulty)
    is_folder = Path(databases).is_dir()
    known = [path.stem for path in Path(databases).iterdir()] if is_folder else []
    predictions = scoring.read_predictions(pred, items, known)
    # The databases.
    if named.has_card(databases) and not is_folder:
        ids = {item.db_id for item in items}
        if len(ids) > 1:
            raise UserError(f"the gold file asks {len(ids)} databases, and {databases} is one", "Pass their folder.")
        located = dict.fromkeys(ids, named.find(databases).database)
    elif engine not in DIALECTS:
        raise UserError(f"there is no engine {engine!r}", f"There are: {', '.join(DIALECTS)}.")
    elif not DIALECTS[engine].is_server and not is_folder:
        hint = "Pass the folder that holds ID/ID.sqlite for each database."
        raise UserError(f"{databases} is not a folder", hint)
    else:
        located = {item.db_id: scoring.locate_database(item.db_id, databases, engine) for item in items}
    # Whether all that will be written can be, before the first query.
    if report is not None and all(EQUALITIES[name].timed for name in names):
        raise UserError(f"{report}: {NOTHING_TO_REPORT}")
    files = [] if out is None else [out]
    files += [] if report is None else [report / name for name in (RECORDS, SUMMARY, writer.PAGE)]
    for path in files:
        if path.is_dir():
            raise UserError(f"{path} cannot be written: it is a folder")
    # A pipe or a device is written through: nothing is made in its folder.
    folders = [path.parent for path in files if path.is_file() or not path.exists()]
    folders += [] if report is None else [report / writer.TABLES]
    for folder in dict.fromkeys(folders):
        with writing_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()  # a disk may be full, or read-only whoever asks
    cores = workers or len(os.sched_getaffinity(0))
    with SqlEngine(Limits(timeout, **RESULTS), cores, audit, tables, hidden=card.hidden_names()) as sql:
        scored: list[ScoredItem] = []
        with Bars(console) as bars:
            bars.begin("scoring", len(items), "items")
            for chunk in scoring.score_all(items, predictions.queries, located, names, sql):
                scored += chunk
                bars.advance(len(chunk))
        if out is not None:
            _write(out, "".join(json.dumps(item.line(), ensure_ascii=False) + "\n" for item in scored))
        summary = scoring.summarise(scored, names)
        # Right under a test suite here, and changed by the official script before it runs them (`evaluation.py:
        # evaluate`): it replaces the letters "value" by "1" wherever they stand, also in names.
        suites = [name for name in EQUALITIES if EQUALITIES[name].suite]
        with_value = [item for item in scored if item.counted and "value" in predictions.queries[item.idx]]
        rewritten = [item.idx for item in with_value if any(item.scores.get(name) for name in suites)]
        _show_score(summary, names, predictions, rewritten)
        if report is not None:  # last: what was scored is told whatever becomes of it
            _report_score(report, items, predictions.queries, located, scored, sql)
    if as_json:
        facts = {
            "scored": summary.counts["all"],
            "counts": dict(summary.counts),
            "equalities": {name: _rounded(of) for name, of in summary.figures.items()},
            "disagreements": [
                {"yes": yes, "no": no, "count": len(numbers), "items": list(numbers)}
                for (yes, no), numbers in summary.disagreements.items()
            ],
            "gold_errors": [{"idx": idx, "error": error} for idx, error in summary.gold_errors],
            "unavailable": [{"idx": idx, "error": error} for idx, error in summary.unavailable],
            "errors": dict(summary.errors),
            "unavailable_share": round(summary.unavailable_share, 6),
            "with_unavailable": _rounded(summary.with_unavailable),
            "reliability": {name: _rounded(of) for name, of in summary.reliability.items()},
            "rewritten_there": rewritten,
            "missing": list(predictions.missing),
            "empty": list(predictions.empty),
            "other_database": list(predictions.other_database),
            "tabs": list(predictions.tabs),
        }
        emit(facts)
    if not summary.counts["all"] or summary.unavailable_share > MOST_UNAVAILABLE:
        raise typer.Exit(NOTHING_SCORED)


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def _write(path: Path, text: str) -> None:
    """Beside, then into place: a reader never sees half a file."""
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def _report_score(
    folder: Path,
    items: Sequence[GoldQuery],
    queries: Sequence[str],
    databases: Mapping[str, Database],
    scored: Sequence[ScoredItem],
    sql: SqlEngine,
) -> None:
    """The files of an evaluation, of a prediction file: `sqltrain compare` takes the folder."""
    scored = [item for item in scored if item.verdict is not None]
    predictions = {item.idx: queries[item.idx] for item in scored}
    judged = [name for name in scored[0].scores if not EQUALITIES[name].timed] if scored else []
    if not judged:
        raise UserError(f"{folder}: {NOTHING_TO_REPORT}")
    verdicts = [item.verdict for item in scored if item.verdict]
    data = report_of_predictions(folder.resolve().name, items, predictions, databases, judged, sql, verdicts)
    # A lone surrogate, which no file takes, becomes its escape; a query that has one never ran.
    records = []
    for record in data.systems[0].records:
        diagnosis = record.diagnosis
        if diagnosis is not None:
            hints = tuple(Hint(hint.kind, escape_surrogates(hint.detail)) for hint in diagnosis.hints)
            diagnosis = Diagnosis(diagnosis.error, escape_surrogates(diagnosis.evidence), hints)
        final = None if record.final_sql is None else escape_surrogates(record.final_sql)
        records.append(dataclasses.replace(record, final_sql=final, diagnosis=diagnosis))
    answers = [
        of_prediction(one.example_id, None if one.final_sql is None else escape_surrogates(one.final_sql), one.policy)
        for one in data.systems[0].trajectories
    ]
    system = dataclasses.replace(data.systems[0], records=tuple(records), trajectories=tuple(answers))
    data = dataclasses.replace(data, systems=(system,))
    _write(folder / RECORDS, "".join(json.dumps(to_dict(row), ensure_ascii=False) + "\n" for row in system.records))
    _write(folder / SUMMARY, json.dumps(to_dict(data.summaries[0]), sort_keys=True, indent=1) + "\n")
    try:
        if not any(DIALECTS[database.engine].is_server for database in databases.values()):  # an address is secret
            asking.write_texts(folder, tuple(data.examples.values()), system)
        writer.write_all(data, folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written: {error.strerror}") from None
    say(f"report  {folder / writer.PAGE}")


def _show_score(
    summary: ScoreSummary, names: Sequence[str], predictions: scoring.Predictions, rewritten: Sequence[int]
) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("equality", no_wrap=True, min_width=max(map(len, names)))
    for level, count in summary.counts.items():
        table.add_column(f"{level} ({count})", justify="right")
    for name in names:
        figures = summary.figures[name]
        table.add_row(name, *(f"{figures[level]:.1f}" if level in figures else "-" for level in summary.counts))
    console.print(table)

    def numbers(shown: Sequence[object]) -> str:
        return ", ".join(map(str, shown[:SHOWN])) + (", ..." if len(shown) > SHOWN else "")

    for (yes, no), differing in summary.disagreements.items():
        if names[0] in (yes, no):  # between the others: --json
            say(f"{yes} yes, {no} no: {len(differing)} items ({numbers(differing)})")
    for name, six in summary.reliability.items():
        listed = ", ".join(f"{figure.replace('_', ' ')} {value:.1f}" for figure, value in six.items())
        say(f"{name}, with the questions that have no answer: {listed}")
    if summary.errors:
        say("predictions that did not run: " + ", ".join(f"{name} {n}" for name, n in summary.errors.items()))
    for title, left_out in (("gold errors", summary.gold_errors), ("not available", summary.unavailable)):
        if left_out:
            reasons = numbers([f"item {idx}: {error}" for idx, error in left_out])
            say(f"{title}, not counted: {len(left_out)} ({reasons})")
    if summary.with_unavailable:
        listed = ", ".join(f"{name} {value:.1f}" for name, value in summary.with_unavailable.items())
        share = f"{100 * summary.unavailable_share:.1f} % of the items are not available"
        say(f"{share}; counted as wrong, they would make {listed}")
    if rewritten:
        rest = f"{len(rewritten)} that are right here may be wrong there ({numbers(rewritten)})"
        say(f"the official test suite replaces the letters value by 1 in predictions: {rest}")
    remarks = (
        (predictions.missing, "gold queries have no prediction and count as wrong"),
        (predictions.empty, "predictions are empty and count as wrong"),
        (predictions.other_database, "predictions name another database than their gold query, on whose they ran"),
        (predictions.tabs, "predictions have a tab before what is no known database, and were read whole"),
    )
    for places, remark in remarks:
        if places:
            say(f"{len(places)} {remark} ({numbers(places)})")
