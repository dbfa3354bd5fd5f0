"""Commands about training (run, stages, adapt, watch, plan, sweep) and about recipes (show, recipes, check)."""

import functools
import textwrap
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows import terminal
from flows.terminal import FIRST_RUN, Bars, JsonOutput, Overrides, QuestionsOption, RecipeName, StoreOption, emit, say
from pipelines.adaptation.adapting import (
    Adaptation,
    AdaptationDecision,
    AdaptationRequest,
    ComparedSides,
    Results,
    prepare_adaptation,
)
from pipelines.core.errors import DataError, RecipeError, UserError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.core.types import plain
from pipelines.recipe import deviations, recipes
from pipelines.recipe.opening import open_recipe, split_store
from pipelines.recipe.yaml_files import yaml_text
from pipelines.report import console_text
from pipelines.stages import graph, recipe_check
from pipelines.stages.training_watch import watched_training
from pipelines.sweeps.sweeping import FilledSweep, PlannedSweep, SweepRequest, plan_sweep
from tasks import contracts
from tasks.models import announce_champion
from tasks.run import Tracker

Engine = Literal["plain", "prefect"]
app = typer.Typer()


@app.command()
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    engine: Annotated[Engine, typer.Option(help="plain: this process. prefect: a flow in a Prefect server.")] = "plain",
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Run a recipe: every stage that the store lacks, then a table of the figures.

    Examples:

      sqltrain run miniature

      sqltrain run miniature rewards.turns.weight=0

      sqltrain run sql_trail data.sft.path=~/spider data.rl.0.path=~/synsql data.rl.1.path=~/spider \
data.dev.path=~/spider data.test.0.path=~/spider --until filter
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    if engine == "prefect":
        from flows.prefect.pipeline import run_with_prefect

        results = run_with_prefect(loaded, store, until)
    else:
        results = terminal.run(loaded, store, until)
    terminal.print_results(loaded, store, results, json_output)


@app.command()
def stages(
    recipe: RecipeName, overrides: Overrides = None, json_output: JsonOutput = False, store_folder: StoreOption = None
) -> None:
    """List a recipe's stages: key, whether the store has it, and its figures, or why not.

    Example: sqltrain stages miniature rewards.exec.weight=3
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    steps = graph.plan(loaded, store)
    table = Table("stage", "key", "state", "figures, or why", box=None, pad_edge=False)
    left = max(len(step.name) for step in steps) + 28  # columns before the figures, which rich would break at any space
    width = max(20, terminal.console.width - left)
    for step in steps:
        if step.cached:
            state = "[green]cached[/]"
            metrics = read_json(step.folder / "metrics.json")
            text = console_text.stage_figures(step.name, metrics)
        else:
            state = "[yellow]to do[/]"
            text = plain(step.why)
        folded = textwrap.fill(text, width, break_on_hyphens=False)
        table.add_row(step.name, step.key, state, Text(folded))
    terminal.console.print(table)
    if json_output:
        values = []
        for step in steps:
            values.append({"name": step.name, "key": step.key, "cached": step.cached, "why": step.why})
        emit({"stages": values})


@app.command()
def adapt(
    database: Annotated[str, typer.Argument(help="A name of databases/, as `sqltrain connect` wrote it.")],
    overrides: Overrides = None,
    questions: QuestionsOption = None,
    invented: Annotated[
        Path | None, typer.Option(help="Questions of `sqltrain invent`, which only train where you have your own.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A name of conf/models, a folder, a GGUF file or a hub name; else the tiny model."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A shipped recipe; else a checkpoint's own, smollm2 for a small language model, or sql_trail."
        ),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Write the recipe, say what it takes, and stop.")] = False,
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Teach a model one database: write recipes/NAME.yaml, run it, and say whether its model may serve.

    The questions are split so that no two parts ask the same. The work and the cost are printed before the first stage.
    The end is a page, before and after on held-out questions, and a promotion where a paired test shows that the model
    is better. Without options the recipe that is there is run.

    Examples:

      sqltrain adapt shop --questions questions.csv

      sqltrain adapt shop --questions questions.csv --invented shop.jsonl --model Qwen/Qwen2.5-Coder-3B-Instruct

      sqltrain adapt shop grpo.steps=40
    """
    request = AdaptationRequest(database, overrides or [], store_folder, questions, invented, model, recipe)
    adaptation = prepare_adaptation(request, say)
    for line in adaptation.work_lines():
        say(line)
    if plan:
        say(f"nothing is trained yet; go on with: {adaptation.command}")
        if json_output:
            emit({"recipe": str(adaptation.recipe_path), "to_make": adaptation.stages_to_make})
        return
    finished = terminal.run(adaptation.recipe, adaptation.store, None)
    results = {result.name: result for result in finished}
    decision, sides = decide_adaptation(adaptation, results)
    tables = adaptation.write_page(results, decision, sides)
    terminal.print_results(adaptation.recipe, adaptation.store, finished, json_output=False)
    for table in tables:
        terminal.console.print(console_text.render(table, terminal.console.width))
    for line in adaptation.outcome_lines(decision):
        say(line)
    if json_output:
        emit({**decision.line, "page": str(adaptation.page), "recipe": str(adaptation.recipe_path)})


def decide_adaptation(adaptation: Adaptation, results: Results) -> tuple[AdaptationDecision, ComparedSides]:
    """Compare the adapted model with the champion, in a tracked run of its own."""
    recipe = adaptation.recipe
    title = f"{recipe.name} adapted"
    with Bars(terminal.console) as bars, Tracker(recipe, adaptation.store, bars.say, title) as tracker:
        walk = functools.partial(terminal.walk, progress=bars, tracker=tracker)
        context = adaptation.night_context(walk, contracts.check)
        decision = adaptation.decide(context, results)
        tracker.note_decision(decision.line)
        sides = adaptation.compare(context, decision)
        announce_champion(recipe.name, adaptation.store, bars.say)
    return decision, sides


@app.command()
def watch(
    recipe: RecipeName,
    overrides: Overrides = None,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once and leave.")] = False,
    store_folder: StoreOption = None,
) -> None:
    """Watch a run train: rewards by term, accuracy, entropy, turns, format errors, where the time goes, alarms.

    It reads what the training stages write, so it may come and go while they run, and looks back on finished ones.

    Examples:

      sqltrain watch miniature

      sqltrain watch miniature grpo.steps=40 --store /tmp/s --once
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    training = watched_training(loaded, store)
    page = training.newest_curves()
    if once or not terminal.console.is_terminal:
        if page is None:
            raise DataError(f"no training of recipe {loaded.name} has begun", FIRST_RUN)
        terminal.console.print(Text(page), soft_wrap=True)
        return
    nothing = f"{loaded.name}: no training step is done yet"
    with Live(Text(page or nothing), console=terminal.console, auto_refresh=False) as live:
        while not training.is_finished:
            time.sleep(every)
            page = training.newest_curves()
            live.update(Text(page or nothing), refresh=True)


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="What fits which GPU, for models of 0.5B to 14B.")] = False,
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Say what training takes of each GPU: GiB by use, for 1 to 8 of them.

    Weights, gradients and optimiser are exact, activations estimated. Nothing is loaded.

    Examples:

      sqltrain plan sql_trail

      sqltrain plan sql_trail 'model.lora={rank: 32, alpha: 64}'

      sqltrain plan sql_trail grpo.sampling.episode_tokens=8192 rollout.slots=16 --sizes
    """
    from pipelines.training import memory_plan

    loaded, _ = open_recipe(recipe, overrides, store_folder)
    if sizes:
        lines = memory_plan.fitting_lines(loaded)
        for line in lines:
            say(line)
        if json_output:
            emit({"sizes": lines})
        return
    needs = memory_plan.memory_needs(loaded)
    for line in memory_plan.need_lines(needs):
        say(line)
    if json_output:
        emit({"memory": [need.values() for need in needs]})


@app.command()
def show(
    recipe: RecipeName,
    overrides: Overrides = None,
    deviating: Annotated[
        bool, typer.Option("--deviations", help="Print the deviations from the paper that act in this run.")
    ] = False,
    store_folder: StoreOption = None,
) -> None:
    """Print the resolved recipe as YAML: includes, variant and overrides applied.

    Examples:

      sqltrain show sql_trail variant=no_turns

      sqltrain show trust_sql --deviations
    """
    loaded, _ = open_recipe(recipe, overrides, store_folder)
    if deviating:
        for line in deviations.deviation_lines(loaded):
            typer.echo(line)
        return
    values = loaded.model_dump(mode="json")
    typer.echo(yaml_text(values, width=80), nl=False)


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes and their variants."""
    for name in recipes.recipe_names():
        recipe = recipes.load(name)
        typer.echo(f"{name:<16} {recipe.title}")
        for variant, changes in recipes.variants(name).items():
            listed = " ".join(changes)
            typer.echo(f"  variant={variant:<20} {listed}")


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(help="One recipe; all of them when left out.")] = None,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also report on the health of the gold SQL, and on what empty answers earn.")
    ] = False,
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Check that every recipe loads, and that the gold SQL of one (the miniature by default) earns the full reward.

    Examples:

      sqltrain check

      sqltrain check miniature --data
    """
    words, store = split_store(overrides, store_folder)
    if recipe is not None and "=" in recipe:
        hint = f"Name one before overrides: sqltrain check miniature {recipe}"
        raise RecipeError(f"there is no recipe {recipe!r}", hint)
    with Bars(terminal.console) as bars:
        checked = recipe_check.check_recipes(recipe, words, store, data, bars)
    if json_output:
        emit(checked.values())
    problems = checked.problems
    if problems:
        count = "1 problem"
        if len(problems) > 1:
            count = f"{len(problems)} problems"
        raise UserError(f"{count}, the first: {problems[0]}")


SweepName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|PAPER/TABLE",
        help="A recipe as in `sqltrain run`, or a table of a paper or a claim: a file of conf/tables, such as "
        "sql_trail/table6 or claims/turn_reward.",
    ),
]
SweepAxes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[AXIS=A,B]...",
        help="Overrides in their order; one with several values is an axis: variant=none,no_turns model=NAME,NAME "
        "benchmark=NAME,NAME after=model,sft,grpo, or any key. seed=0..2 is averaged. asked=KEY=VALUE asks a "
        "checkpoint in another way than it was trained.",
    ),
]


@app.command()
def sweep(
    what: SweepName,
    axes: SweepAxes = None,
    baseline: Annotated[str | None, typer.Option(help="AXIS=VALUE: the row that others are held against.")] = None,
    miniature: Annotated[bool, typer.Option("--miniature", help="A paper's table on the generated world.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what will be made.")] = False,
    engine: Annotated[Engine, typer.Option(help="plain: this process. prefect: a flow a cell.")] = "plain",
    out: Annotated[Path | None, typer.Option(help="Folder of table and page; one in the store by default.")] = None,
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Make the cells of a table, each common stage once, and the table that they fill, with a page of their curves.

    A cell that fails leaves its error in the table; the same command goes on where a killed one ended.

    Examples:

      sqltrain sweep miniature variant=none,no_turns,exec_only seed=0..2 --baseline variant=none

      sqltrain sweep sql_trail/table6 --miniature

      sqltrain sweep sql_trail/table7 data.sft.path=SPIDER data.rl.0.path=SYNSQL data.rl.1.path=SPIDER --plan
    """
    words, store = split_store(axes, store_folder)
    request = SweepRequest(what, words, baseline, miniature, out)
    planned = plan_sweep(request, store)
    for line in planned.lines():
        say(line)
    if plan:
        if json_output:
            emit({"cells": planned.stages_to_make(), "sum": planned.forecast[-1]})
        return
    planned.make_folder()
    filled = make_cells(planned, store, engine)
    for line in filled.lines():
        say(line)
    errors = filled.errors
    if json_output:
        emit({"folder": str(filled.folder), "failed": errors})
    if errors:
        message = f"{len(errors)} of {len(filled.cells)} cells failed"
        raise UserError(message, "Their errors stand in the table; run it again.")


def make_cells(planned: PlannedSweep, store: Store, engine: Engine) -> FilledSweep:
    """Make the cells of a sweep; with Prefect one server serves all of them."""
    if engine == "plain":
        return planned.fill(store, lambda cell: terminal.run(cell.recipe, store, None), say)
    from flows.prefect.pipeline import run_with_prefect
    from tasks.prefect_server import prefect_server

    with prefect_server():
        return planned.fill(store, lambda cell: run_with_prefect(cell.recipe, store, name=cell.name), say)
