"""Commands that evaluate: evaluate, compare, report, score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, open_for, open_recipe, with_store
from flows.score import score
from pipelines.errors import UserError


def evaluate(
    recipe: RecipeName,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Any checkpoint folder, instead of the recipe's own.")] = None,
    policy: Annotated[str | None, typer.Option(help="oracle, or endpoint:NAME of conf/local/endpoints.yaml.")] = None,
    benchmarks: Annotated[
        str | None,
        typer.Option(help="To evaluate on, with commas between; omnisql: those added of its nine."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a recipe's checkpoints, any checkpoint folder, an endpoint or the oracle, on the held-out questions.

    Examples:

      sqltrain evaluate miniature

      sqltrain evaluate miniature --model ~/checkpoint protocol.max_turns_eval=3 protocol.schema_view=hidden

      sqltrain evaluate sql_trail --policy endpoint:big include=local/bird_dev

      sqltrain evaluate arctic_sql --model ~/OmniSQL-7B --benchmarks omnisql
    """
    from flows import screen
    from pipelines.checkpoint import folder_of

    if model is not None and policy is not None:
        raise UserError("--model and --policy name two different policies", "Pass one of them.")
    words = list(overrides or [])
    if benchmarks is not None:
        from flows import datasets

        words.append(datasets.chosen(benchmarks, screen.say))
    model = None if model is None else folder_of(model)
    loaded, store = open_recipe(recipe, words) if model is None else open_for(recipe, words, model)
    if model is not None or policy is not None:
        from flows import evaluating

        if model is not None:
            evaluating.evaluate_model(loaded, store, model, as_json)
        elif policy is not None:
            evaluating.evaluate_named(loaded, store, policy, as_json)
        return
    results = screen.run(loaded, store, "evaluate")
    screen.conclude(loaded, store, results, as_json)


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
    from flows import screen

    loaded, store = open_recipe(recipe, overrides or [])
    screen.show_report(loaded, store, out)


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [with_store(evaluate), compare, with_store(report), score]
    for command in commands:
        app.command(rich_help_panel="Evaluate")(command)
