"""Commands that train, and that say what a training takes: run, stages, adapt, watch, plan, sweep."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, emit, open_recipe, with_store
from flows.planning import plan
from flows.sweep import sweep
from pipelines.core.errors import UserError

Until = Annotated[str | None, typer.Option(help="Stop after this stage.")]


def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    until: Until = None,
    engine: Annotated[str, typer.Option(help="plain: this process. prefect: a flow in a Prefect server.")] = "plain",
    as_json: AsJson = False,
) -> None:
    """Run a recipe: every stage that the store lacks, then a table of the figures.

    Examples:

      sqltrain run miniature

      sqltrain run miniature rewards.turns.weight=0

      sqltrain run sql_trail data.sft.path=~/spider data.rl.0.path=~/synsql data.rl.1.path=~/spider \
          data.dev.path=~/spider data.test.0.path=~/spider --until filter
    """
    from flows import terminal

    loaded, store = open_recipe(recipe, overrides or [])
    if engine == "prefect":
        from flows.prefect.pipeline import run_with_prefect

        results = run_with_prefect(loaded, store, until)
    elif engine == "plain":
        results = terminal.run(loaded, store, until)
    else:
        raise UserError(f"there is no engine {engine!r}", "Choose plain or prefect.")
    terminal.conclude(loaded, store, results, as_json)


def stages(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List a recipe's stages: key, whether the store has it, and why not.

    Example: sqltrain stages miniature rewards.exec.weight=3
    """
    from flows import terminal
    from pipelines.stages import graph

    loaded, store = open_recipe(recipe, overrides or [])
    steps = graph.plan(loaded, store)
    terminal.show_steps(steps)
    if as_json:
        emit({"stages": [{"name": s.name, "key": s.key, "cached": s.cached, "why": s.why} for s in steps]})


def adapt(
    database: Annotated[str, typer.Argument(help="A name of databases/, as `sqltrain connect` wrote it.")],
    overrides: Overrides = None,
    questions: Annotated[
        Path | None, typer.Option(help="Your own questions with their SQL: JSON lines, or CSV with a header.")
    ] = None,
    invented: Annotated[
        Path | None, typer.Option(help="Questions of `sqltrain invent`, which only train where you have your own.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint folder or a hub name; the tiny model when left out.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A shipped recipe; a checkpoint's own, else sql_trail, when left out.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Write the recipe, say what it takes, and stop.")] = False,
    as_json: AsJson = False,
) -> None:
    """Teach a model one database: write recipes/NAME.yaml, run it, and say whether its model may serve.

    The questions are parted so that no two parts ask the same. Time and cost are told before the first stage. The
    end is a page, before and after on held-out questions, and a promotion where a paired test shows that the model is
    better. Without options the recipe that is there is run.

    Examples:

      sqltrain adapt shop --questions questions.csv

      sqltrain adapt shop --questions questions.csv --invented shop.jsonl --model Qwen/Qwen2.5-Coder-3B-Instruct

      sqltrain adapt shop grpo.steps=40
    """
    from flows import adapting

    wanted = adapting.Wanted(questions, invented, model, recipe)
    adapting.adapt(database, wanted, overrides or [], plan, as_json)


def watch(
    recipe: RecipeName,
    overrides: Overrides = None,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
) -> None:
    """Watch a run train: rewards by term, accuracy, entropy, turns, format errors, where the time goes, alarms.

    It reads what the training stages write, so it may come and go while they run, and looks back on finished ones.

    Examples:

      sqltrain watch miniature

      sqltrain watch miniature grpo.steps=40 --store /tmp/s --once
    """
    from flows import terminal, watching

    loaded, store = open_recipe(recipe, overrides or [])
    watching.follow(loaded, store, terminal.console, every, once)


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [run, stages, adapt, watch, plan, sweep]
    for command in commands:
        app.command(rich_help_panel="Train")(with_store(command))
