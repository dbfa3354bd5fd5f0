"""Commands about training (run, stages, adapt, watch, plan, sweep) and about recipes (show, recipes, check)."""

import contextlib
import functools
import os
import shlex
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flows import terminal
from flows.terminal import FIRST_RUN, NO_PATH, AsJson, Bars, Overrides, RecipeName, StoreOption, emit, say
from pipelines.adaptation import estimate, outcome, recipe_file
from pipelines.adaptation.questions import counts_of, gather
from pipelines.core.errors import DataError, RecipeError, UserError
from pipelines.core.files import read_json, writing_to
from pipelines.core.registry import DIALECTS, REWARDS
from pipelines.core.types import Action, ActionKind, Example, StopReason, Trajectory, Turn, is_abstention
from pipelines.databases import card, named
from pipelines.databases.of_recipe import sql_engine
from pipelines.environment.core import Environment
from pipelines.nightly import night
from pipelines.nightly.ledger import PROD, Champion, Ledger
from pipelines.protocols.base import build
from pipelines.recipe import deviations, recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import explicit_store_folder, open_recipe, split_store
from pipelines.recipe.yaml_files import read_yaml, yaml_text
from pipelines.report import formats, writer
from pipelines.report import terminal as report_terminal
from pipelines.rewards.panel import Rubric
from pipelines.sql import health as gold_health
from pipelines.sql.schema import render
from pipelines.stages import graph, prompt_fit
from pipelines.stages.context import examples
from pipelines.sweeps import sweep_plan, sweep_table
from tasks import contracts
from tasks.models import announce_champion
from tasks.run import Tracker

if TYPE_CHECKING:
    from pipelines.training.memory import Way

Engine = Literal["plain", "prefect"]
app = typer.Typer()

GPUS = (1, 2, 4, 8)
SIZES = (24, 48, 80)  # GB of usual GPUs
ROWS = (64, 32, 16, 8, 4, 2, 1)
USES = ("weights", "copies", "gradients", "optimizer", "activations", "logits", "cache", "peak")  # of GPU memory
TRAINED = ("sft", "grpo")


@app.command()
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    until: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    engine: Annotated[Engine, typer.Option(help="plain: this process. prefect: a flow in a Prefect server.")] = "plain",
    as_json: AsJson = False,
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
    terminal.print_results(loaded, store, results, as_json)


@app.command()
def stages(
    recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False, store_folder: StoreOption = None
) -> None:
    """List a recipe's stages: key, whether the store has it, and its figures, or why not.

    Example: sqltrain stages miniature rewards.exec.weight=3
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    steps = graph.plan(loaded, store)
    table = Table("stage", "key", "state", "figures, or why", box=None, pad_edge=False)
    left = max(len(step.name) for step in steps) + 28  # before the figures, which rich would break at any space
    for step in steps:
        state = "[green]cached[/]" if step.cached else "[yellow]to do[/]"
        metrics = read_json(step.folder / "metrics.json") if step.cached else {}
        told = report_terminal.stage_figures(step.name, metrics) if step.cached else report_terminal.plain(step.why)
        told = textwrap.fill(told, max(20, terminal.console.width - left), break_on_hyphens=False)
        table.add_row(step.name, step.key, state, Text(told))
    terminal.console.print(table)
    if as_json:
        emit({"stages": [{"name": s.name, "key": s.key, "cached": s.cached, "why": s.why} for s in steps]})


@app.command()
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
        str | None,
        typer.Option(help="A name of conf/models, a folder, a GGUF file or a hub name; else the tiny model."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A shipped recipe; a checkpoint's own, else sql_trail, when left out.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Write the recipe, say what it takes, and stop.")] = False,
    as_json: AsJson = False,
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
    card_file = card.path_of(database)
    if "/" in database or not card_file.is_file():
        hint = "Run: sqltrain connect FILE_OR_ADDRESS --name NAME, then its name."
        raise DataError(f"{database} is not connected", hint)
    database_card = card.read(card_file)
    dialect = DIALECTS[database_card.engine]
    if dialect.is_server:  # the drivers of the stages find the password in the environment
        password = named.password_of(database_card.engine, database_card.password_env)
        if password is not None:
            os.environ[dialect.password_variable] = password
    if database in recipes.recipe_names():  # they would share their nights and their champion
        hint = f"Connect it as another: sqltrain connect {database} --name NAME"
        raise RecipeError(f"{database} is the name of a shipped recipe", hint)
    place = recipe_file.place(database)
    page = place.with_suffix(".html")
    if any((questions, invented, model, recipe)) or not place.is_file():
        gathered = gather(questions, invented, database_card.location)
        start = recipe_file.training_start(model, recipe, len(render(database_card.shown(), "compact")))
        old = recipe_file.write(database, recipe_file.recipe_values(database, start, gathered), start, gathered)
        counts = gathered.counts
        say(
            f"{database}: {counts['train']:,} questions to train on, {counts['dev']:,} to watch training by, "
            f"{counts['test']:,} to measure by: no two parts ask the same"
        )
        if gathered.bad:
            say(f"{gathered.bad:,} row{'s' * (gathered.bad != 1)} cannot be used; the run says why")
        if gathered.repeats:
            say(f"{gathered.repeats:,} invented questions are left out: a question of your own asks the same")
        if old is not None:
            say(f"the recipe that was there is kept as {old}")
        say(f"recipe  {place}: {start.about}")
    rest, store = split_store(overrides, store_folder)
    named_folder = explicit_store_folder(overrides, store_folder)
    stores = [] if named_folder is None else [f"--store={named_folder}"]
    command = shlex.join(["sqltrain", "adapt", database, *rest, *stores])
    loaded = recipes.load(str(place), rest)
    recipe_file.last_training_stage(loaded)  # fails if it cannot be adapted
    night.guards(str(place), rest, loaded)  # they are asked last: a word that is wrong should not cost a training
    steps = graph.plan(loaded, store)
    # Work and cost, before the run begins.
    question_counts = counts_of(loaded)
    works = estimate.estimate(loaded, question_counts, steps)
    for name, work in works.items():
        say(f"  {name:<15} {f'{work.number:,}' if work.number else '':>7} {work.what}")
    if not works:
        say("  all stages are cached")
    say(f"cost    {estimate.price(loaded, question_counts)}")
    if plan:
        say(f"nothing is trained yet; go on with: {command}")
        if as_json:
            emit({"recipe": str(place), "to_make": [step.name for step in steps if not step.cached]})
        return
    results = {result.name: result for result in terminal.run(loaded, store, None)}
    # The model is compared with the champion, or else with the model that it was made from.
    trained = recipe_file.last_training_stage(loaded)
    challenger = night.Challenger(trained, results[trained].key, results["model"].key, ())
    ledger, base = Ledger(store, loaded.name), night.UntrainedModel("model", challenger.base)
    before: night.UntrainedModel | Champion = base
    title = f"{loaded.name} adapted"
    with Bars(terminal.console) as bars, Tracker(loaded, store, bars.say, title) as tracker:
        walk = functools.partial(terminal.walk, progress=bars, tracker=tracker)
        context = night.NightContext(str(place), rest, loaded, store, walk, contracts.check)
        with ledger.locked():
            champion = ledger.incumbent(loaded.nightly.tier)
            if champion is not None and champion.key == challenger.key:
                line: dict[str, Any] = {"decision": "nothing", "reason": "it is the champion already", "numbers": {}}
            else:
                curated = {name: results[name].key for name in night.CURATION if name in results}
                line, before = night.conclude(context, ledger, challenger, [curated]), champion or base
        tracker.note_decision(line)
        sides = [(who, night.evaluated(context, loaded, who, "")) for who in (before, challenger)]
        announce_champion(loaded.name, store, bars.say)
    old_side, new_side = ((result.folder, f"{who.stage} {who.key}") for who, result in sides)
    verdict = f"{line['decision']}: {line['reason']}"
    data = outcome.page(loaded, results["test"].folder, old_side, new_side, verdict)
    with writing_to(page):
        writer.write(data, page)
    terminal.print_results(loaded, store, list(results.values()), as_json=False)
    for table in data.tables:
        if table.slug != outcome.FAILED:
            terminal.console.print(report_terminal.render(table, terminal.console.width))
    say(verdict)
    say(f"before and after, and what is still failed: {page}")
    if line["decision"] in ("promoted", "nothing"):
        champion_name = f"champion:{database}" + ("" if loaded.nightly.tier == PROD else f"@{loaded.nightly.tier}")
        serve = shlex.join(["sqltrain", "serve", database, *stores, "--model", champion_name])
        say(f"serve it: {serve} --feedback feedback")
    else:
        say(f"it does not serve; look at the page, add questions to the file, and run: {command}")
    if as_json:
        emit({**line, "page": str(page), "recipe": str(place)})


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
    steps = [step for step in graph.plan(loaded, store) if step.name in TRAINED]
    if not steps:
        raise DataError(f"recipe {loaded.name} trains nothing", f"Its stages: {', '.join(loaded.stages)}.")
    from pipelines.training import watch as curves
    from pipelines.training.plan import CURVES

    def page() -> Text | None:
        """The newest training stage that has made a step; None if none has."""
        for step in reversed(steps):
            for folder in (step.folder, store.work(step.name, step.key)):
                if (folder / CURVES).is_file():
                    state = "finished" if store.has(step.name, step.key) else "running, or stopped"
                    total = loaded.grpo.steps if step.name == "grpo" and loaded.grpo.epochs is None else None
                    lines = curves.view(curves.read_curves(folder), total)
                    return Text("\n".join([f"{loaded.name}: {step.name} {step.key}, {state}", *lines]))
        return None

    first = page()
    if once or not terminal.console.is_terminal:
        if first is None:
            raise DataError(f"no training of recipe {loaded.name} has begun", FIRST_RUN)
        terminal.console.print(first, soft_wrap=True)
        return
    nothing = Text(f"{loaded.name}: no training step is done yet")
    with Live(first or nothing, console=terminal.console, auto_refresh=False) as live:
        while not store.has(steps[-1].name, steps[-1].key):
            time.sleep(every)
            live.update(page() or nothing, refresh=True)


@app.command()
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="What fits which GPU, for models of 0.5B to 14B.")] = False,
    as_json: AsJson = False,
    store_folder: StoreOption = None,
) -> None:
    """Say what training takes of each GPU: GiB by use, for 1 to 8 of them.

    Weights, gradients and optimiser are exact, activations estimated. Nothing is loaded.

    Examples:

      sqltrain plan sql_trail

      sqltrain plan sql_trail 'model.lora={rank: 32, alpha: 64}'

      sqltrain plan sql_trail grpo.sampling.episode_tokens=8192 rollout.slots=16 --sizes
    """
    from pipelines.training import memory

    loaded, _ = open_recipe(recipe, overrides, store_folder)
    if sizes:
        lines = fitting(loaded)
        for line in lines:
            say(line)
        if as_json:
            emit({"sizes": lines})
        return
    shape = memory.shape_of(loaded.model)
    kinds: list[Literal["sft", "grpo"]] = [kind for kind in ("sft", "grpo") if kind in loaded.stages]
    rows: list[dict[str, Any]] = []
    say(f"{'stage':6}{'GPUs':>5}  {'way':6}" + "".join(f"{name:>12}" for name in USES) + "  fits")
    for kind in kinds:
        for gpus in GPUS:
            how = memory.setup(loaded, kind, gpus)
            used = memory.estimate(shape, how)
            gib = {name: round(getattr(used, name) / 2**30, 2) for name in USES}
            rows.append({"stage": kind, "gpus": gpus, "way": how.way, **gib})
            fits = " ".join(str(size) for size in SIZES if gib["peak"] <= size * 1e9 / 2**30) or "none"
            say(f"{kind:6}{gpus:5}  {how.way:6}" + "".join(f"{gib[name]:12.2f}" for name in USES) + f"  {fits}")
    say(f"GiB on each GPU; fits: of {', '.join(map(str, SIZES))} GB")
    if as_json:
        emit({"memory": rows})


def fitting(recipe: Recipe) -> list[str]:
    """For models of 0.5B to 14B: the ways that fit one GPU of each size, and eight of 80 GB, with the most rows."""
    from pipelines.training import memory

    heads = [*(f"{size} GB" for size in SIZES), f"8 x {SIZES[-1]} GB"]
    lines = ["| model | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    rank = recipe.model.lora.rank if recipe.model.lora is not None else 32
    for name, shape in memory.SHAPES.items():
        cells = []
        for gpus, size in [*((1, size) for size in SIZES), (8, SIZES[-1])]:
            base = memory.setup(recipe, "grpo", gpus)
            ways: tuple[Way, ...] = ("full", "lora", "qlora") if gpus == 1 else ("full", "zero2", "zero3", "lora")
            fits = []
            for way in ways:
                how = replace(base, way=way, half=True, rank=rank)
                small = (rows for rows in ROWS if memory.estimate(shape, replace(how, rows=rows)).peak <= size * 1e9)
                most = next(small, 0)
                fits += [f"{way} {most}"] if most else []
            cells.append(", ".join(fits) or "–")
        lines.append(f"| {name.rpartition('/')[2]} | " + " | ".join(cells) + " |")
    tokens, slots = recipe.grpo.sampling.episode_tokens, memory.setup(recipe, "grpo", 1).slots
    about = f"rows of a micro-batch, episodes of {tokens:,} tokens, {slots} decoded together, adapters of rank {rank}"
    return [*lines, "", about]


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
    typer.echo(yaml_text(loaded.model_dump(mode="json"), width=80), nl=False)


@app.command("recipes")
def list_recipes() -> None:
    """List the recipes and their variants."""
    for name in recipes.recipe_names():
        typer.echo(f"{name:<16} {recipes.load(name).title}")
        for variant, changes in recipes.variants(name).items():
            typer.echo(f"  variant={variant:<20} {' '.join(changes)}")


@app.command()
def check(
    recipe: Annotated[str | None, typer.Argument(help="One recipe; all of them when left out.")] = None,
    overrides: Overrides = None,
    data: Annotated[
        bool, typer.Option("--data", help="Also report on the health of the gold SQL, and on what empty answers earn.")
    ] = False,
    as_json: AsJson = False,
    store_folder: StoreOption = None,
) -> None:
    """Check that every recipe loads, and that the gold SQL of one (the miniature by default) earns the full reward.

    Examples:

      sqltrain check

      sqltrain check miniature --data
    """
    rest, store = split_store(overrides, store_folder)
    if recipe is not None and "=" in recipe:
        hint = f"Name one before overrides: sqltrain check miniature {recipe}"
        raise RecipeError(f"there is no recipe {recipe!r}", hint)
    with Bars(terminal.console) as bars:
        problems: list[str] = []
        names = recipes.recipe_names() if recipe is None else [recipe]
        n_variants = 0
        for name in names:
            known: Mapping[str, Any] = recipes.variants(name)
            if name not in recipes.recipe_names():  # of a user's own file: its own, and not those that it includes
                known = read_yaml(Path(name)).get("variants") or {}
            n_variants += len(known)
            for words in ([], *([f"variant={variant}"] for variant in known)):
                try:
                    loaded = recipes.load(name, [*words, *rest])
                    build(loaded.protocol)
                    if loaded.rewards:
                        Rubric(loaded.rewards)
                except UserError as error:
                    problems.append(f"{name} {' '.join([*words, *rest])}: {error}")
        number = "1 recipe" if len(names) == 1 else f"{len(names)} recipes"
        bars.say(f"{number} with {n_variants} variants: {'all load' if not problems else 'problems'}")
        loaded = recipes.load(recipe or "miniature", rest)
        margin = Rubric(loaded.rewards).margin() if loaded.rewards else None
        if margin is not None and margin < 0:  # as an ablation it may be meant
            bars.say(f"note: a wrong answer can be paid {-margin:g} more than a right one")
        steps = graph.plan(loaded, store, among=stages_with_questions(loaded, bars.say))
        folders = [graph.execute(step, loaded, store, bars, steps).folder for step in steps]
        # Pool by pool, for an id is of one question within a pool alone; a question of several pools is kept once.
        seen: set[tuple[str, ...]] = set()
        pools: list[tuple[str, list[Example]]] = []
        for folder in folders:
            for pool in ("sft", "rl", "dev", "test"):
                pools.append((pool, []))
                for example in examples(folder, pool):
                    # Each stage links a database in its own folder; the target of the link is the same.
                    target = os.path.realpath(example.database.location)
                    text = (example.id, example.question, example.gold_sql, target)
                    if text not in seen:
                        seen.add(text)
                        pools[-1][1].append(example)
        gold_problems, facts = check_gold(loaded, [questions for _, questions in pools], bars)
        bars.say(f"{facts['gold_checked']} gold SQL of {loaded.name}: {facts['gold_full']} earn the full reward")
        if data:
            training = [*chain(*(questions for pool, questions in pools if pool in ("sft", "rl")))]
            rest_of = chain(*(questions for pool, questions in pools if pool not in ("sft", "rl")))
            with sql_engine(loaded) as sql:
                report = gold_health.examine_gold([*training, *rest_of], sql)
            for line in gold_health.report_lines(report):
                bars.say(line)
            pools_counted = prompt_fit.count_prompts(
                loaded, dict(zip((step.name for step in steps), folders, strict=True))
            )
            for counted in pools_counted:
                bars.say(counted.line)
            problems += [f"{counted.line}. {counted.hint}" for counted in pools_counted if counted.hint]
            n_trained = 0 if loaded.data.drop_empty else len(training)
            trained_on = [finding for finding in report if finding.place < n_trained]
            empty = gold_health.count_reasons(trained_on)["empty"]
            if empty:
                equal = "have an empty gold result, which any query without rows equals:"
                bars.say(f"note: {empty} training questions {equal}")
                bars.say(
                    "  data.drop_empty=true leaves them out, execution.equality=strict_nonempty pays nothing for them"
                )
            idle = pay_empty_answers(loaded, [questions for pool, questions in pools if pool in ("sft", "rl")], bars)
            if idle["questions"]:
                share = f"{idle['right']:,} of {idle['questions']:,} training questions"
                earns = f", and earns {idle['reward']:.3g} where gold SQL earns {idle['gold_reward']:.3g}"
                bars.say(f"a query that never has rows is right for {share}{earns if loaded.rewards else ''}")
            facts |= {"health": gold_health.count_reasons(report), "empty_trained": empty, "empty_answers": idle}
            facts |= {"unfit": {counted.pool: counted.unfit for counted in pools_counted}}
    problems += gold_problems
    if as_json:
        emit({"recipes": len(names), "variants": n_variants, **facts, "problems": problems})
    if problems:
        raise UserError(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}, the first: {problems[0]}")


def stages_with_questions(recipe: Recipe, say: Callable[[str], None]) -> set[str]:
    """The stages whose questions `check` looks at: all of them, or those with a path while others have none."""
    keys = {"data": [*recipe.data.pools]}
    for place, benchmark in enumerate(recipe.data.test):
        name = f"test.{benchmark.name}" if place else "test"
        keys[name] = [f"data.test.{place}"]
    stages = {stage.name for stage in graph.active(recipe)} & keys.keys()
    without = set(recipe.data.without_path)
    left_out = {name for name in stages if without.issuperset(keys[name])}
    if left_out == stages:
        return stages  # its first reader says which path to set
    for name in sorted(left_out):
        say(f"note: {NO_PATH.format(', '.join(keys[name]))}")
    return stages - left_out


def check_gold(recipe: Recipe, pools: Sequence[Sequence[Example]], bars: Bars) -> tuple[list[str], dict[str, Any]]:
    """Answer every question with its own gold SQL in one turn: each must be right, and paid in full."""
    parts = [pool[start : start + 512] for pool in pools for start in range(0, len(pool), 512)]
    count = sum(map(len, parts))
    rubric = Rubric(recipe.rewards) if recipe.rewards else None
    problems: list[str] = []
    full = 0
    bars.begin("gold SQL", count, "queries")
    with Environment(recipe, workers=None) as environment:
        for part in parts:
            by_id = {example.id: example for example in part}
            answers = [one_turn(example, example.gold_sql) for example in part]
            for outcome in environment.judge(answers, part, rubric.reads if rubric else ()):
                example = by_id[outcome.example_id]
                why = ""
                if outcome.broken:
                    (result,) = environment.sql.execute_many([(example.database, example.gold_sql)])
                    why = "it runs now and did not before" if result.ok else f"it does not run ({result.error_class})"
                    if result.truncated:
                        limits = "raise execution.max_rows or execution.max_bytes"
                        why = f"its result is larger than a verdict may read ({limits})"
                elif not outcome.correct:
                    why = f"it does not equal itself under {outcome.equality}"
                elif rubric is not None:  # terms of phases cannot be earned in one turn: left out
                    low = [
                        name
                        for name, value in rubric.score(outcome).by_term.items()
                        if (right := REWARDS[name].right) is not None
                        and value < right[1]
                        and not (name == "schema" and is_abstention(example.gold_sql))  # there is none to name
                    ]
                    if low:
                        why = f"{', '.join(low)} below {'its' if len(low) == 1 else 'their'} highest value"
                full += not why
                if why:
                    problems.append(f"gold SQL of {example.id}: {why}: {example.gold_sql}")
            bars.advance(len(part))
    return problems, {"gold_checked": count, "gold_full": full}


def one_turn(example: Example, sql: str) -> Trajectory:
    """An episode that answers a question at once."""
    turn = Turn("", Action(ActionKind.SOLUTION, sql, "gold"))
    return Trajectory(example.id, 0, "gold", "check", (), (turn,), sql, StopReason.SOLUTION)


def pay_empty_answers(recipe: Recipe, pools: Sequence[Sequence[Example]], bars: Bars) -> dict[str, Any]:
    """What a policy earns whose answers have no rows, and as many columns as gold: the share of questions for which it
    is right, and its mean reward on the full track beside that of gold SQL, None without a panel.
    """
    parts = [pool[start : start + 512] for pool in pools for start in range(0, len(pool), 512)]
    rubric = Rubric(recipe.rewards) if recipe.rewards else None
    judged = right = 0
    paid = paid_gold = 0.0
    bars.begin("empty answers", sum(map(len, parts)), "queries")
    with Environment(recipe, workers=None) as environment:
        for part in parts:
            golds = environment.sql.execute_many([(example.database, example.gold_sql) for example in part], max_rows=1)
            empty = [empty_query(len(gold.columns)) for gold in golds]
            answers = [one_turn(example, text) for example, text in zip(part, empty, strict=True)]
            answers += [one_turn(example, example.gold_sql) for example in part]
            outcomes = environment.judge(answers, part, rubric.reads if rubric else ())
            for outcome, of_gold in zip(outcomes[: len(part)], outcomes[len(part) :], strict=True):
                if outcome.broken or of_gold.broken:
                    continue
                judged += 1
                right += outcome.correct
                if rubric is not None:
                    paid += rubric.score(outcome).total
                    paid_gold += rubric.score(of_gold).total
            bars.advance(len(part))
    has_pay = rubric is not None and judged > 0
    return {
        "questions": judged,
        "right": right,
        "reward": paid / judged if has_pay else None,
        "gold_reward": paid_gold / judged if has_pay else None,
    }


def empty_query(width: int) -> str:
    """A query of so many columns without rows, for any engine."""
    cells = ", ".join(f"NULL AS c{number}" for number in range(max(1, width)))
    return f"SELECT {cells} FROM (SELECT 1 AS unit) AS units WHERE 1 = 0"


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
    as_json: AsJson = False,
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
    if "/" in what and not what.endswith((".yaml", ".yml")):  # a table's name, such as sql_trail/table6
        cells, empty = sweep_plan.cells_of_paper_table(what, words, baseline, miniature)
    elif miniature:
        raise UserError("--miniature is for a paper's table", "A recipe has its own miniature: mini_sql_trail, ...")
    else:
        cells, empty = sweep_plan.cells_of_recipe(what, words, baseline)
    forecast = list(sweep_plan.forecast(cells, store))
    for line in forecast:
        say(line)
    if empty.claim is not None and empty.claim.seconds:
        say(f"about {empty.claim.seconds} s of processor time where nothing of it is there yet")
    if plan and as_json:
        to_make = {cell.name: line.removeprefix(f"{cell.name}: ") for cell, line in zip(cells, forecast, strict=False)}
        emit({"cells": to_make, "sum": forecast[-1]})
    if plan:
        return
    folder = out or store.root / "sweeps" / recipes.digest([what, miniature, words, dict(empty.baseline)])
    with writing_to(folder, sweep_plan.OUT_HINT):  # said before the first cell is made
        folder.mkdir(parents=True, exist_ok=True)

    with contextlib.ExitStack() as stack:
        if engine == "prefect":  # one server for all cells: each would start its own
            from tasks.prefect_server import prefect_server

            stack.enter_context(prefect_server())

        def make(cell: sweep_plan.SweepCell) -> object:
            if engine == "prefect":
                from flows.prefect.pipeline import run_with_prefect

                return run_with_prefect(cell.recipe, store, name=cell.name)
            return terminal.run(cell.recipe, store, None)

        made = replace(empty, cells=tuple(sweep_plan.fill(cells, store, make, say)))
    sweep_plan.write_sweep(made, folder)

    tables = [sweep_table.table(made), *([sweep_table.verdicts(made)] if made.claim is not None else [])]
    for line in "\n".join(map(formats.markdown, tables)).splitlines():
        say(line)
    say(f"table  {folder / 'sweep.md'}")
    say(f"page   {folder / sweep_plan.PAGE}")
    errors = {cell.name: cell.error for cell in made.cells if cell.error}
    if as_json:
        emit({"folder": str(folder), "failed": errors})
    if errors:
        raise UserError(
            f"{len(errors)} of {len(made.cells)} cells failed", "Their errors stand in the table; run it again."
        )
