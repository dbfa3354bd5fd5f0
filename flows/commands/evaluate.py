"""Commands that evaluate: evaluate, compare, report, score."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from flows import terminal
from flows.terminal import (
    FIRST_RUN,
    Bars,
    JsonOutput,
    Overrides,
    QuestionsOption,
    RecipeName,
    StoreOption,
    console,
    emit,
    say,
)
from pipelines.core.errors import DataError, UserError
from pipelines.core.files import writing_to
from pipelines.core.store import Store
from pipelines.core.types import to_dict
from pipelines.evaluation.paired_comparison import Comparison
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import open_recipe
from pipelines.report import console_text, writer
from pipelines.report.data import ReportData, System
from pipelines.stages import evaluation_gate, find_evaluations, graph, policy_evaluation
from pipelines.stages.answerer import Answerer
from pipelines.stages.evaluation_gate import GateVerdict
from pipelines.stages.evaluation_request import EvaluationRequest, OpenedEvaluation, open_evaluation
from pipelines.stages.find_evaluations import EvaluationRun
from pipelines.stages.prediction_scoring import PredictionScore, ScoreRequest, prediction_scorer
from pipelines.stages.stage import benchmark_of

app = typer.Typer()

NOTHING_SCORED = 1  # exit code of `evaluate` and `score` without a figure
BELOW_BOUND = 3  # exit code of a figure below --at-least, and of a comparison that --fail-if names
MAX_LISTED = 12  # item numbers of a disagreement, and left-out items, on one line


@app.command()
def evaluate(
    recipe: RecipeName,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(help="Evaluate a checkpoint folder, a GGUF file, endpoint:NAME or oracle, not the recipe's own."),
    ] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(help="Benchmarks to evaluate on, with commas between; omnisql names those added of its nine."),
    ] = None,
    questions: QuestionsOption = None,
    database: Annotated[
        str | None, typer.Option(help="The database of all --questions: a file, an address, or a name of databases/.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="At most N questions per benchmark, sampled with the recipe's seed; conversations whole.",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print calls, tokens and price at most, and stop; needs --model.")
    ] = False,
    at_least: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="Exit with 3 if a figure is lower, such as ex=0.80; repeatable."),
    ] = None,
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Evaluate a recipe's checkpoints, any checkpoint folder, an endpoint or the oracle, on the held-out questions.

    A checkpoint that the store lacks is trained first; --questions trains nothing and asks the finished ones.
    Exits with 1 when no answer to a benchmark's questions could be scored: its database, worker or endpoint broke.

    Examples:

      sqltrain evaluate miniature

      sqltrain evaluate miniature --model ~/checkpoint protocol.max_turns_eval=3 protocol.schema_view=hidden

      sqltrain evaluate sql_trail --model endpoint:big include=local/bird_dev

      sqltrain evaluate sql_trail --model endpoint:big --questions q.csv --database shop --limit 5 --plan

      sqltrain evaluate arctic_sql --model ~/OmniSQL-7B --benchmarks omnisql

      sqltrain evaluate sql_trail --model endpoint:agent --questions q.csv --database shop --at-least ex=0.80
    """
    if plan and model is None:
        raise UserError("--plan needs --model", "Pass a model; a recipe's stages: sqltrain stages.")
    bounds = evaluation_gate.parse_bounds(at_least or [])
    request = EvaluationRequest(
        recipe=recipe,
        overrides=overrides or [],
        store_folder=store_folder,
        model=model,
        benchmarks=benchmarks,
        questions=questions,
        database=database,
        limit=limit,
    )
    opened = open_evaluation(request, say)
    if opened.answerer is not None:
        evaluate_policy(opened.recipe, opened.store, opened.answerer, json_output, plan, bounds)
    else:
        evaluate_checkpoints(opened, json_output, bounds)


def evaluate_checkpoints(opened: OpenedEvaluation, json_output: bool, bounds: Mapping[str, float]) -> None:
    """Run a recipe up to its evaluations, and print them; bounds are for the newest checkpoint."""
    recipe = opened.recipe
    store = opened.store
    results = terminal.run_steps(recipe, store, opened.steps)
    evaluations = [result for result in results if result.kind.startswith("evaluate")]
    newest = {benchmark_of(result.name): result for result in evaluations}
    unscored = evaluation_gate.unscored_lines(evaluations)
    verdict = evaluation_gate.check_gate(unscored, newest.values(), bounds)
    terminal.print_results(recipe, store, results, json_output, extra_lines=verdict.lines)
    exit_by_gate(verdict)


def evaluate_policy(
    recipe: Recipe,
    store: Store,
    answerer: Answerer,
    json_output: bool,
    plan_only: bool = False,
    bounds: Mapping[str, float] | None = None,
) -> None:
    """Evaluate a policy on every benchmark of the recipe, and print the figures.

    Args:
        plan_only: print what it would ask, and what that costs at most, and stop.
        bounds: the least values of figures; a lower one ends the command with `BELOW_BOUND`.
    """
    if plan_only:
        with Bars(console) as bars:
            estimates = policy_evaluation.estimate_benchmarks(recipe, store, answerer, bars)
        if json_output:
            emit({benchmark: estimate.figures() for benchmark, estimate in estimates.items()})
        return
    with Bars(console) as bars:
        evaluated = policy_evaluation.evaluate_benchmarks(recipe, store, answerer, bars)
    results = [evaluation.result for evaluation in evaluated]
    summaries = {evaluation.benchmark: {answerer.name: evaluation.summary} for evaluation in evaluated}
    lines: list[str] = []
    for evaluation in evaluated:
        if len(evaluated) > 1:
            lines.append(evaluation.benchmark)
        lines += evaluation.lines
    unscored = [evaluation.unscored for evaluation in evaluated if evaluation.unscored]
    verdict = evaluation_gate.check_gate(unscored, results, bounds or {})
    lines += verdict.lines
    terminal.print_summaries(recipe.name, store, results, summaries, json_output, lines)
    exit_by_gate(verdict)


def exit_by_gate(verdict: GateVerdict) -> None:
    """End with the exit code of evaluations of which some have no figure, or one that is too low."""
    if verdict.unscored:
        raise typer.Exit(NOTHING_SCORED)
    if verdict.low:
        raise typer.Exit(BELOW_BOUND)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more: stage folders, records files, or NAME=PATH.")],
    equality: Annotated[
        str | None, typer.Option(help="Equality for the verdicts (default: that of the first run).")
    ] = None,
    flips: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Questions that flipped to print for each pair.")
    ] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the page and every table into this folder.")] = None,
    fail_if: Annotated[
        Literal["worse", "not_better"] | None,
        typer.Option(help="Exit with 3 if the paired difference of a later run is below 0 (worse), or not above it."),
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Compare evaluations question by question: which flipped, and whether the difference is more than chance.

    Examples:

      sqltrain compare store/evaluate_sft/KEY store/evaluate_grpo/KEY

      sqltrain compare mine=scores/mine theirs=scores/theirs --equality bird --json

      sqltrain compare main=scores/main change=scores/change --fail-if worse
    """
    data, loaded, names = find_evaluations.compare_runs(runs, equality)
    if not json_output:
        print_comparison(data, loaded, flips)
    if out is not None:
        page = find_evaluations.add_texts(data, loaded, names)
        with writing_to(out, "Name a folder with --out."):
            out.mkdir(parents=True, exist_ok=True)
            writer.write_tables(page, out)
            writer.write(page, out / writer.PAGE)
    if json_output:
        emit(comparison_values(data, loaded))
    if fail_if is not None:
        exit_by_comparison(gated_comparisons(data, loaded), fail_if)


def print_comparison(data: ReportData, runs: Sequence[EvaluationRun], flips: int) -> None:
    """Print the figures of each run, each pair's comparison, and the latency of answers."""
    summaries = {system.name: summary for system, summary in data.by_system}
    figures = console_text.figures_table(summaries)
    console.print(console_text.render(figures, console.width))
    for comparison in data.comparisons:
        console.print()
        console_text.show_comparison(console, comparison, flips)
        old = summaries[comparison.before].n_questions
        new = summaries[comparison.after].n_questions
        if comparison.mode == "greedy" and comparison.paired.n < max(old, new):
            line = f"compared on {comparison.paired.n:,} questions, of {old:,} and {new:,}"
            say(f"{line}: the others are not in both")
    for run in runs:
        for name, latency in run.timing.items():
            say(f"{run.name}: {latency.total_s:.2f} s a question ({name})")


def comparison_values(data: ReportData, runs: Sequence[EvaluationRun]) -> dict[str, Any]:
    """A comparison as JSON values."""
    by_run: dict[str, Any] = {}
    for run, summary in zip(runs, data.summaries, strict=True):
        by_run[run.name] = {
            "folder": str(run.folder),
            "figures": summary.flat(),
            "latency_s": {name: latency.total_s for name, latency in run.timing.items()},
            "left_out": dict(run.left_out),
        }
    comparisons = [to_dict(comparison) for comparison in data.comparisons]
    return {"equality": data.equality, "runs": by_run, "comparisons": comparisons}


def gated_comparisons(data: ReportData, runs: Sequence[EvaluationRun]) -> list[Comparison]:
    """The comparisons that `--fail-if` decides by; an error if there is none.

    A change is no worse because its own answers lose to those that a selector chose: own answers are compared with own
    ones, and selected with selected.
    """
    systems_by_passes: dict[tuple[str, ...], list[System]] = {}
    for run, system in zip(runs, data.systems, strict=True):
        alike = systems_by_passes.setdefault(run.passes, [])
        alike.append(system)
    comparisons: list[Comparison] = []
    for alike in systems_by_passes.values():
        data_of_alike = dataclasses.replace(data, systems=tuple(alike))
        comparisons += data_of_alike.comparisons
    if not comparisons:
        raise DataError("--fail-if: the runs share no question", "Compare evaluations of the same benchmark.")
    return comparisons


def exit_by_comparison(comparisons: Sequence[Comparison], fail_if: Literal["worse", "not_better"]) -> None:
    """End with `BELOW_BOUND` if a later run is worse, or not better.

    The interval of the paired difference decides: worse is all below 0, and not better is what reaches down to 0.
    """
    failed = False
    for comparison in comparisons:
        is_worse = comparison.paired.high < 0
        is_better = comparison.paired.low > 0
        if is_worse or (fail_if == "not_better" and not is_better):
            failed = True
            verdict = fail_if.replace("_", " ")
            typer.echo(f"{comparison.after} is {verdict} than {comparison.before} ({comparison.mode})", err=True)
    if failed:
        raise typer.Exit(BELOW_BOUND)


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
        names = ", ".join(missing)
        raise DataError(f"recipe {loaded.name} is not finished: {names} to do", FIRST_RUN)
    results = terminal.run(loaded, store, None)
    first, *others = (result for result in results if result.kind == "report")
    page = first.folder / "report.html"
    if out is not None:
        copy_page(page, out)
    say(str(out or page))
    for result in others:  # reports of further benchmarks
        benchmark = benchmark_of(result.name)
        other_page = result.folder / "report.html"
        say(f"{benchmark}  {other_page}")


def copy_page(page: Path, out: Path) -> None:
    """Copy a page to a file that the user named."""
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
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on the last line, for scripts.")] = False,
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
    request = ScoreRequest(
        gold, pred, databases, equality, tables, difficulty, out, report, engine, timeout, workers, audit
    )
    with prediction_scorer(request) as scorer:
        with Bars(console) as bars:
            scored = scorer.score(bars)
        print_score(scored)
        page = scorer.write_report(scored)  # after the figures: they are printed even if the report fails
        if page is not None:
            say(f"report  {page}")
    if json_output:
        emit(scored.figures())
    if scored.is_incomplete:
        raise typer.Exit(NOTHING_SCORED)


def print_score(scored: PredictionScore) -> None:
    """Print the figures by level, and what a person should know about them."""
    summary = scored.summary
    table = Table(box=None, pad_edge=False)
    longest_name = max(map(len, scored.equalities))
    table.add_column("equality", no_wrap=True, min_width=longest_name)
    for level, count in summary.counts.items():
        table.add_column(f"{level} ({count})", justify="right")
    for name in scored.equalities:
        figures = summary.figures[name]
        cells = [f"{figures[level]:.1f}" if level in figures else "-" for level in summary.counts]
        table.add_row(name, *cells)
    console.print(table)
    lines = disagreement_lines(scored) + left_out_lines(scored) + prediction_remarks(scored)
    for line in lines:
        say(line)


def disagreement_lines(scored: PredictionScore) -> list[str]:
    """Items on which the first equality differs from another, and EHRSQL's figures; --json has all pairs."""
    lines = []
    for (yes, no), numbers in scored.summary.disagreements.items():
        if scored.equalities[0] in (yes, no):
            lines.append(f"{yes} yes, {no} no: {len(numbers)} items ({listed(numbers)})")
    for name, figures in scored.summary.reliability.items():
        texts = []
        for figure, value in figures.items():
            title = figure.replace("_", " ")
            texts.append(f"{title} {value:.1f}")
        figures_in_words = ", ".join(texts)
        lines.append(f"{name}, with the questions that have no answer: {figures_in_words}")
    return lines


def left_out_lines(scored: PredictionScore) -> list[str]:
    """Items that are in no level, predictions that did not run, and items that do not count."""
    summary = scored.summary
    lines = []
    if summary.without_level:
        count = f"{len(summary.without_level)} gold queries have none of BIRD's difficulties"
        effect = "levels are Spider's"
        if summary.is_by_difficulty:
            effect = "they are in the column all alone"
        lines.append(f"{count}: {effect} ({listed(summary.without_level)})")
    if summary.failed_golds:
        count = f"{len(summary.failed_golds)} questions are scored without those of their gold queries that did not run"
        lines.append(f"{count} ({listed(summary.failed_golds)})")
    if summary.errors:
        counts = ", ".join(f"{name} {number}" for name, number in summary.errors.items())
        lines.append(f"predictions that did not run: {counts}")
    uncounted = {"gold errors": summary.gold_errors, "not available": summary.unavailable}
    for title, items in uncounted.items():
        if items:
            reasons = [f"item {number}: {error}" for number, error in items]
            lines.append(f"{title}, not counted: {len(items)} ({listed(reasons)})")
    if summary.with_unavailable:
        figures = ", ".join(f"{name} {value:.1f}" for name, value in summary.with_unavailable.items())
        share = f"{100 * summary.unavailable_share:.1f} % of the items are not available"
        lines.append(f"{share}; counted as wrong, they would make {figures}")
    return lines


def prediction_remarks(scored: PredictionScore) -> list[str]:
    """Remarks on the lines of the prediction file, and on databases that are no test suite."""
    lines = []
    if scored.rewritten:
        numbers = listed(scored.rewritten)
        rest = f"{len(scored.rewritten)} that are right here may be wrong there ({numbers})"
        lines.append(f"the official test suite replaces the letters value by 1 in predictions: {rest}")
    if scored.without_suite:
        count = f"{len(scored.without_suite)} databases are no test suite, for no other database is beside them"
        lines.append(f"{count}: there a test suite is one comparison ({listed(scored.without_suite)})")
    predictions = scored.predictions
    remarks = (
        (predictions.missing, "gold queries have no prediction and count as wrong"),
        (predictions.empty, "predictions are empty and count as wrong"),
        (predictions.other_database, "predictions name another database than their gold query, on whose they ran"),
        (predictions.tabs, "predictions have a tab before what is no known database, and were read whole"),
        (predictions.ambiguous, "predictions are of ids that are numbers of other gold queries, too"),
    )
    for items, remark in remarks:
        if items:
            lines.append(f"{len(items)} {remark} ({listed(items)})")
    return lines


def listed(items: Sequence[object]) -> str:
    """The first of some items, with commas between."""
    text = ", ".join(map(str, items[:MAX_LISTED]))
    if len(items) > MAX_LISTED:
        text += ", ..."
    return text
