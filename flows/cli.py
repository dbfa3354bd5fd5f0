"""The `sqltrain` command."""

from __future__ import annotations

import errno
import io
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows import operations
from flows.options import AsJson, Overrides, RecipeName, emit, open_for, open_recipe, split
from flows.planning import plan
from flows.score import score
from flows.sweep import sweep
from pipelines.errors import SqltrainError, UserError

app = typer.Typer(
    name="sqltrain",
    help="Post-train open-weight language models into multi-turn text-to-SQL agents.",
    epilog="Start with: sqltrain run miniature",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"sqltrain {version('sqltrain')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What holds for every command."""


Until = Annotated[str | None, typer.Option(help="Stop after this stage.")]


@app.command(rich_help_panel="Train")
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
    from flows import screen

    loaded, store = open_recipe(recipe, overrides or [])
    if engine == "prefect":
        from flows.pipeline import run_with_prefect

        results = run_with_prefect(loaded, store, until)
    elif engine == "plain":
        results = screen.run(loaded, store, until)
    else:
        raise UserError(f"there is no engine {engine!r}", "Choose plain or prefect.")
    screen.conclude(loaded, store, results, as_json)


@app.command(rich_help_panel="Train")
def stages(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """List a recipe's stages: key, whether the store has it, and why not.

    Example: sqltrain stages miniature rewards.exec.weight=3
    """
    from flows import screen
    from pipelines.stages import graph

    loaded, store = open_recipe(recipe, overrides or [])
    steps = graph.plan(loaded, store)
    screen.show_steps(steps)
    if as_json:
        emit({"stages": [{"name": s.name, "key": s.key, "cached": s.cached, "why": s.why} for s in steps]})


@app.command(rich_help_panel="Recipes")
def show(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print the resolved recipe as YAML: includes, variant and overrides applied.

    Example: sqltrain show sql_trail variant=no_turns
    """
    from pipelines.yaml_files import yaml_text

    loaded, _ = open_recipe(recipe, overrides or [])
    typer.echo(yaml_text(loaded.model_dump(mode="json"), width=80), nl=False)


@app.command(rich_help_panel="Recipes")
def recipes() -> None:
    """List the recipes and their variants."""
    from pipelines import recipes as library

    for name in library.recipe_names():
        typer.echo(f"{name:<16} {library.load(name).title}")
        for variant, changes in library.variants(name).items():
            typer.echo(f"  variant={variant:<20} {' '.join(changes)}")


@app.command(rich_help_panel="Recipes")
def check(
    recipe: Annotated[str | None, typer.Argument(help="One recipe; all of them when left out.")] = None,
    overrides: Overrides = None,
    data: Annotated[bool, typer.Option("--data", help="Also report on the health of the gold SQL.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check that every recipe loads, and that the gold SQL of one (the miniature by default) earns the full reward.

    Examples:

      sqltrain check

      sqltrain check miniature --data
    """
    from flows import checks, screen
    from flows.progress import Bars

    rest, store = split(overrides or [])
    with Bars(screen.console) as bars:
        problems, facts = checks.check(recipe, rest, store, data, bars, bars.say)
    if as_json:
        emit({**facts, "problems": problems})
    if problems:
        raise UserError(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}, the first: {problems[0]}")


@app.command(rich_help_panel="Use")
def connect(
    database: Annotated[str, typer.Argument(help="A file, or an address such as postgresql://reader@host/shop.")],
    name: Annotated[str | None, typer.Option(help="What to call it; by default its own name.")] = None,
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Connect as a role that may write, too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read a database and write databases/NAME.yaml: what the agent is told of it, for you to edit.

    It lists likely problems (no keys, codes, mixed dates, cryptic names) and refuses a role that can write.

    Examples:

      sqltrain connect shop.sqlite

      sqltrain connect postgresql://reader@localhost:5432/shop --name shop
    """
    from flows import connecting

    facts = connecting.connect(database, name, allow_writes)
    if as_json:
        emit(facts)


@app.command(rich_help_panel="Train")
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


@app.command(rich_help_panel="Use")
def ask(
    question: Annotated[str, typer.Argument(help="The question, in words.")],
    database: Annotated[str, typer.Option(help="A file, an address, or a name of databases/.")],
    overrides: Overrides = None,
    recipe: Annotated[str, typer.Option(help="The recipe whose model answers.")] = "miniature",
    model: Annotated[
        str | None,
        typer.Option(help="Instead: a checkpoint folder, champion:RECIPE, endpoint:NAME or script:FILE.jsonl."),
    ] = None,
) -> None:
    """Ask a trained model about a database and watch its turns. A checkpoint is asked as its own card says.

    Examples:

      sqltrain ask "how many farms are there ?" --database FILE.sqlite store=/tmp/s

      sqltrain ask "how many farms are there ?" --database FILE.sqlite --model ~/checkpoint

      sqltrain ask "how many farms are there ?" --database farm --model endpoint:big --recipe sql_trail
    """
    from flows import asking
    from pipelines.checkpoint import folder_of
    from pipelines.serving import models

    words = overrides or []
    if model is not None and model.startswith((models.CHAMPION, models.ENDPOINT, models.SCRIPT)):
        rest, store = split(words)
        opened = models.opened(model, recipe, rest, store)
        asking.ask(opened.recipe, store, question, database, opened.policy, typer.echo)
        return
    folder = None if model is None else folder_of(Path(model))
    loaded, store = open_recipe(recipe, words) if folder is None else open_for(recipe, words, folder)
    asking.ask(loaded, store, question, database, folder, typer.echo)


@app.command(rich_help_panel="Evaluate")
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


@app.command(rich_help_panel="Train")
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

      sqltrain watch miniature grpo.steps=40 store=/tmp/s --once
    """
    from flows import screen, watching

    loaded, store = open_recipe(recipe, overrides or [])
    watching.follow(loaded, store, screen.console, every, once)


@app.command(rich_help_panel="Evaluate")
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


@app.command(rich_help_panel="Evaluate")
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


@app.command(rich_help_panel="Data and teachers")
def invent(
    database: Annotated[str, typer.Option(help="A file, an address, or a name of databases/.")],
    teacher: Annotated[str, typer.Option(help="The endpoint that writes SQL and questions (docs/teachers.md).")],
    count: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many questions.")] = 100,
    checker: Annotated[str | None, typer.Option(help="Another endpoint, which answers back.")] = None,
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")] = Path("invented.jsonl"),
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make questions with gold SQL for a database that has none.

    Example: sqltrain invent --database shop.sqlite --count 200 --teacher big --checker other --out shop.jsonl
    """
    from flows import inventing

    recipe, store = open_recipe("miniature", overrides or [])
    facts = inventing.invent(recipe, store, database, count, teacher, checker, out)
    if as_json:
        emit({**facts, "out": str(out)})


@app.command(rich_help_panel="Data and teachers")
def review(
    questions: Annotated[str, typer.Argument(help="A JSONL file of questions; with --data, a recipe.")],
    overrides: Overrides = None,
    database: Annotated[
        str | None, typer.Option(help="Of all questions: a file, an address, or a name of databases/.")
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="Mend what `check --data` finds in a recipe.")] = False,
    out: Annotated[Path | None, typer.Option(help="The JSONL file to write.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at; 0 for any that is free.")] = 0,
) -> None:
    """Look through questions in a browser, one by one: accept, mend or reject each, by keyboard.

    Each decision is kept at once, so the same command goes on where it was. When it is stopped it writes the questions
    that are right beside FILE.rejected.jsonl; with --data, a file of corrections for `data.test.0.corrections`.

    Examples:

      sqltrain review shop.jsonl --database shop

      sqltrain review sql_trail include=local/bird_dev --data --out corrections.jsonl
    """
    try:
        from flows import reviewing
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    if data and database is not None:
        raise UserError("--database is of a file's questions, and --data of a recipe's", "Pass one of them.")
    if data:
        reviewing.review_data(open_recipe(questions, overrides or [])[0], out, port)
    elif overrides:
        raise UserError(f"{overrides[0]} changes a recipe, and {questions} is a file", "Pass --data with a recipe.")
    else:
        reviewing.review_file(Path(questions).expanduser(), database, out, port)


@app.command(rich_help_panel="Data and teachers")
def judge(
    recipe: RecipeName,
    endpoint: Annotated[str, typer.Option(help="The judge, by its name in conf/local/endpoints.yaml.")],
    overrides: Overrides = None,
    count: Annotated[
        int, typer.Option(min=2, max=1_000_000, help="Answers that it is asked about, half right, half wrong.")
    ] = 200,
    as_json: AsJson = False,
) -> None:
    """Say how far a judge can be trusted: agreement with execution, and whether place or length move its grades.

    It is asked three times about each of some answers of the recipe's teachers and evaluated models; what it says is
    kept, so a second look costs nothing.

    Example: sqltrain judge reasoning_sql --endpoint big --count 100
    """
    from flows import judge_agreement

    loaded, store = open_recipe(recipe, overrides or [])
    agreement = judge_agreement.judge(loaded, store, endpoint, count)
    if as_json:
        emit(agreement)


@app.command(rich_help_panel="Use")
def serve(
    database: Annotated[str, typer.Argument(help="A name of databases/, a file, or an address.")],
    overrides: Overrides = None,
    policy: Annotated[
        str | None, typer.Option(help="A checkpoint folder, champion:RECIPE, endpoint:NAME or script:FILE.jsonl.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Whose protocol an endpoint or a script speaks.")] = "sql_trail",
    host: Annotated[str, typer.Option(help="The address to listen at; a public one needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 8080,
    keys: Annotated[Path | None, typer.Option(help="A YAML file of API keys: a line USER: KEY each.")] = None,
    feedback: Annotated[Path | None, typer.Option(help="Keep questions and verdicts in this folder.")] = None,
    keep_days: Annotated[int, typer.Option(min=1, max=36_500, help="Days to keep feedback.")] = 90,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Seconds that one question may take.")] = 120.0,
    rows: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of one answer, at most.")] = 1_000,
    per_minute: Annotated[int, typer.Option(min=1, max=100_000, help="Questions of a user in a minute.")] = 60,
    at_once: Annotated[int, typer.Option(min=1, max=10_000, help="Questions of a user at a time.")] = 8,
) -> None:
    """Serve the agent of a database: a chat page, and OpenAI's protocol for any client.

    Examples:

      sqltrain serve shop --policy ~/checkpoint

      sqltrain serve shop --policy endpoint:big --host 0.0.0.0 --keys keys.yaml --feedback feedback
    """
    try:
        from flows import serve as serving
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    from pipelines.serving.agent import Budget

    rest, store = split(overrides or [])
    budget = Budget(seconds, rows)
    options = serving.Options(policy, recipe, host, port, keys, feedback, keep_days, budget, per_minute, at_once)
    serving.serve(database, options, rest, store)


@app.command(rich_help_panel="Use")
def export(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, champion:RECIPE, STAGE/KEY, or a trained recipe.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="hub-folder, hub-adapter (LoRA alone), ollama or gguf.")] = "hub-folder",
    push: Annotated[str | None, typer.Option(help="Also upload it to the hub as OWNER/NAME, private.")] = None,
) -> None:
    """Write a trained model as others take it, with a filled card: weights, tokenizer, prompt, protocol, figures.

    Examples:

      sqltrain export miniature ~/mini-agent

      sqltrain export champion:sql_trail ~/agent --to ollama

      sqltrain export grpo/0a1b2c3d4e5f ~/agent --push me/agent
    """
    from flows import exporting

    rest, store = split(overrides or [])
    exporting.export(model, to, out.expanduser(), push, rest, store)


@app.command(rich_help_panel="Use")
def mcp(
    databases: Annotated[list[str], typer.Argument(help="Files, addresses, or names of databases/.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve HTTP, not stdin and stdout.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows that one answer shows.")] = 10,
    policy: Annotated[
        str | None, typer.Option(help="Also a tool that asks the agent: its model, as `sqltrain serve` takes it.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Whose protocol an endpoint or a script speaks.")] = "sql_trail",
) -> None:
    """Serve the sandboxed SQL tool to any MCP client, and the agent beside it.

    Examples:

      sqltrain mcp shop.sqlite

      sqltrain mcp shop --policy ~/checkpoint

      sqltrain mcp shop.sqlite farm.duckdb --port 8765
    """
    try:
        from flows.mcp import serve
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[mcp]'") from None
    from pipelines.config import Execution

    model = None
    if policy is not None:
        from pipelines.serving.models import Served

        model = Served(policy, recipe, [], split([])[1])
    serve(databases, Execution(), rows, port, model)


environment_app = typer.Typer(help="Episodes for other trainers.", no_args_is_help=True)
app.add_typer(environment_app, name="environment", rich_help_panel="Use")


@environment_app.command("serve")
def serve_environment(
    recipe: RecipeName,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="The address to listen at; a public one needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 8090,
    keys: Annotated[Path | None, typer.Option(help="A YAML file of API keys: a line USER: KEY each.")] = None,
    databases: Annotated[Path | None, typer.Option(help="Files here may be named by clients' own rows.")] = None,
    sessions: Annotated[int, typer.Option(min=1, max=100_000, help="Episodes at a time.")] = 256,
    idle: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that a silent episode lives.")] = 600.0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that run SQL.")] = 4,
) -> None:
    """Serve the episodes of a recipe over HTTP, for a trainer of your own (docs/environment.md).

    Examples:

      sqltrain environment serve skyrl_sql include=local/spider_train

      sqltrain environment serve skyrl_sql --databases ~/spider/database --host 0.0.0.0 --keys keys.yaml
    """
    try:
        from flows import sessions as serving
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    from pipelines.serving.access import Access, read_keys

    access, limits = Access(read_keys(keys) if keys else {}), serving.Limits(sessions, idle)
    serving.serve(recipe, overrides or [], host, port, access, databases, limits, workers)


data_app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)
app.add_typer(data_app, name="data", rich_help_panel="Data and teachers")


@data_app.command()
def add(
    name: Annotated[str, typer.Argument(help="A file of conf/data, such as bird_dev; own: your own questions.")],
    path: Annotated[Path, typer.Argument(help="The folder that it was unpacked into; for `own`, a JSONL or CSV file.")],
    called: Annotated[
        str | None, typer.Option("--name", help="What recipes call it, where you add several of one kind.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a downloaded benchmark (counts, databases, gold SQL, checksums) and note where it is.

    Examples:

      sqltrain data add spider_dev ~/spider

      sqltrain evaluate sql_trail include=local/spider_dev

      sqltrain data add own ~/sales.jsonl --name sales
    """
    from flows import datasets

    added = datasets.add(name, path, lambda line: typer.echo(line, err=as_json), called=called)
    if as_json:
        emit(added)


feedback_app = typer.Typer(help="What users of `sqltrain serve` asked and said.", no_args_is_help=True)
app.add_typer(feedback_app, name="feedback", rich_help_panel="Use")
FeedbackFolder = Annotated[Path, typer.Argument(help="The folder that serve --feedback was given.")]


@feedback_app.command("export")
def feedback_export(
    folder: FeedbackFolder,
    user: Annotated[str | None, typer.Option(help="Of this user alone.")] = None,
) -> None:
    """Print every question with its events and verdicts, a JSON object a line.

    Example: sqltrain feedback export feedback > feedback.jsonl
    """
    import json

    from pipelines.serving.feedback import Feedback

    for row in Feedback.of(folder).export(user):
        typer.echo(json.dumps(row))


@feedback_app.command("delete")
def feedback_delete(
    folder: FeedbackFolder,
    user: Annotated[str, typer.Option(help="Whose questions and verdicts go; `local` on a server without keys.")],
    as_json: AsJson = False,
) -> None:
    """Delete all that is kept of a user, also while a server runs.

    Example: sqltrain feedback delete feedback --user ada
    """
    from pipelines.serving.feedback import Feedback

    count = Feedback.of(folder).delete(user)
    if as_json:
        emit({"deleted": count})
    else:
        typer.echo(f"deleted {count} question{'' if count == 1 else 's'}")


app.command(rich_help_panel="Evaluate")(score)
app.command(rich_help_panel="Train")(plan)
app.command(rich_help_panel="Train")(sweep)
operations.register(app)


OF_OPS = frozenset({"fastapi", "great_expectations", "mlflow", "prefect"})
OF_FILES = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT}
    | {errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)


def main() -> None:
    """Run the command; a person sees one plain line for a mistake, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another for it
    try:
        code = app(standalone_mode=False)  # the code of a `typer.Exit`, which an interrupt becomes too
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SqltrainError as error:
        from pipelines.report.terminal import plain

        print(f"error: {plain(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        sys.exit(_usage(error))
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it would end the end with a traceback
        print("stopped; the same command goes on from here", file=sys.stderr)
    sys.exit(code or 0)


def _usage(error: Exception) -> int:
    """Exit code of a command-line mistake; anything else is our own bug and keeps its traceback."""
    show = getattr(error, "show", None)  # typer's and click's usage errors
    if show is not None:
        show()
        return 2
    line = _mistake(error)
    if line is None:
        raise error
    from pipelines.report.terminal import plain

    print(f"error: {plain(line)}", file=sys.stderr)
    return 1


def _mistake(error: Exception) -> str | None:
    """What a user can mend of an error that no command has put in words; None where it is our own bug."""
    if isinstance(error, ModuleNotFoundError) and error.name in OF_OPS:
        return f"{error.name} is not installed. Run: pip install 'sqltrain[ops]'"
    if isinstance(error, OSError) and error.errno in OF_FILES:
        return f"cannot use {error.filename or 'a file'}: {error.strerror}"
    # pathlib's, for ~nobody/x and for a link that leads to itself
    if isinstance(error, RuntimeError) and str(error).startswith(("Could not determine home", "Symlink loop")):
        return str(error)
    return None


if __name__ == "__main__":
    main()
