"""Commands that evaluate: evaluate, compare, report, score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, open_for, open_recipe, with_store
from flows.score import score
from pipelines.core.errors import UserError

if TYPE_CHECKING:
    from pipelines.core.store import Store
    from pipelines.recipe.config import Recipe


def evaluate(
    recipe: RecipeName,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Any checkpoint folder, instead of the recipe's own.")] = None,
    policy: Annotated[str | None, typer.Option(help="oracle, or endpoint:NAME of conf/local/endpoints.yaml.")] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(help="To evaluate on, with commas between; omnisql: those added of its nine."),
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
        bool, typer.Option("--plan", help="Print calls, tokens and price at most, and stop; with --model or --policy.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a recipe's checkpoints, any checkpoint folder, an endpoint or the oracle, on the held-out questions.

    Examples:

      sqltrain evaluate miniature

      sqltrain evaluate miniature --model ~/checkpoint protocol.max_turns_eval=3 protocol.schema_view=hidden

      sqltrain evaluate sql_trail --policy endpoint:big include=local/bird_dev

      sqltrain evaluate sql_trail --policy endpoint:big --questions q.csv --database shop --limit 5 --plan

      sqltrain evaluate arctic_sql --model ~/OmniSQL-7B --benchmarks omnisql
    """
    from flows import terminal
    from pipelines.recipe.checkpoint import folder_of

    if model is not None and policy is not None:
        raise UserError("--model and --policy name two different policies", "Pass one of them.")
    if plan and model is None and policy is None:
        raise UserError("--plan is of one policy", "Pass --model or --policy; a recipe's stages: sqltrain stages.")
    words = list(overrides or [])
    if questions is not None:
        if not questions.expanduser().is_file():
            raise UserError(f"there is no file {questions}", "--questions takes JSON lines, or CSV with a header.")
        kind, place = ("csv" if questions.suffix.lower() == ".csv" else "jsonl"), questions.expanduser().resolve()
        source = {"name": "questions", "kind": kind, "path": str(place)}
        if database is not None:
            from pipelines.databases import named

            source["options"] = {"database": named.find(database).address}  # type: ignore[assignment]
        words.append(f"data.test={json.dumps([source])}")
    elif database is not None:
        raise UserError("--database is of --questions", "Pass both, or data.test.0.options.database=ADDRESS.")
    if benchmarks is not None:
        from flows import datasets

        words.append(datasets.chosen(benchmarks, terminal.say))
    model = None if model is None else folder_of(model)

    def opened() -> tuple[Recipe, Store]:
        return open_recipe(recipe, words) if model is None else open_for(recipe, words, model)

    loaded, store = opened()
    if limit is not None:
        words += [f"data.test.{place}.count={limit}" for place in range(len(loaded.data.test))]
        loaded, store = opened()
    if model is not None or policy is not None:
        from flows import evaluating

        if model is not None:
            evaluating.evaluate_model(loaded, store, model, as_json, plan)
        elif policy is not None:
            evaluating.evaluate_named(loaded, store, policy, as_json, plan)
        return
    results = terminal.run(loaded, store, "evaluate")
    terminal.conclude(loaded, store, results, as_json)


def compare(
    runs: Annotated[list[str], typer.Argument(help="Two or more: stage folders, records files, or NAME=PATH.")],
    equality: Annotated[str | None, typer.Option(help="Of the verdicts; by default the first run's own.")] = None,
    flips: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Questions that flipped to print for each pair.")
    ] = 10,
    out: Annotated[Path | None, typer.Option(help="Write the page and every table into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations question by question: which flipped, and whether the difference is more than chance.

    Examples:

      sqltrain compare store/evaluate_sft/KEY store/evaluate_grpo/KEY

      sqltrain compare mine=scores/mine theirs=scores/theirs --equality bird --json
    """
    from flows import compare as comparing

    comparing.compare(runs, equality, flips, out, as_json)


def report(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Copy the page to this file.")] = None,
) -> None:
    """Write the HTML report of a finished run and say where it is.

    Example: sqltrain report miniature --out report.html
    """
    from flows import terminal

    loaded, store = open_recipe(recipe, overrides or [])
    terminal.show_report(loaded, store, out)


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [with_store(evaluate), compare, with_store(report), score]
    for command in commands:
        app.command(rich_help_panel="Evaluate")(command)
