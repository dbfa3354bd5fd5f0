"""Commands that use a model or a database: connect, ask, serve, export, mcp, environment, feedback."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, Where, emit, open_for, open_recipe, split, with_store
from pipelines.core.errors import UserError


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


def ask(
    question: Annotated[str, typer.Argument(help="The question, in words.")],
    database: Annotated[str, typer.Option(help="A file, an address, or a name of databases/.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Whose model answers, or whose protocol an endpoint or a script speaks."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead: a checkpoint folder, champion:RECIPE, endpoint:NAME or script:FILE.jsonl."),
    ] = None,
) -> None:
    """Ask a trained model about a database and watch its turns.

    A checkpoint is asked as its own card says, an endpoint or a script in sql_trail's protocol; --recipe names another.

    Examples:

      sqltrain ask "how many farms are there ?" --database FILE.sqlite --store /tmp/s

      sqltrain ask "how many farms are there ?" --database FILE.sqlite --model ~/checkpoint

      sqltrain ask "how many farms are there ?" --database farm --model endpoint:big
    """
    from flows import asking
    from pipelines.recipe.checkpoint import folder_of
    from pipelines.serving import models

    words = overrides or []
    if model is not None and model.startswith((models.CHAMPION, models.ENDPOINT, models.SCRIPT)):
        rest, store = split(words)
        opened = models.opened(model, recipe or models.SPOKEN, rest, store)
        asking.ask(opened.recipe, store, question, database, opened.policy, typer.echo)
        return
    folder = None if model is None else folder_of(Path(model))
    if folder is None:
        loaded, store = open_recipe(recipe or "miniature", words)
    else:
        loaded, store = open_for(recipe or "miniature", words, folder)
    asking.ask(loaded, store, question, database, folder, typer.echo)


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
    from pipelines.serving.agent import QuestionBudget

    rest, store = split(overrides or [])
    budget = QuestionBudget(seconds, rows)
    options = serving.Options(policy, recipe, host, port, keys, feedback, keep_days, budget, per_minute, at_once)
    serving.serve(database, options, rest, store)


def export(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, champion:RECIPE, STAGE/KEY, or a trained recipe.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="hub-folder, hub-adapter (LoRA alone) or ollama.")] = "hub-folder",
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


def mcp(
    databases: Annotated[list[str], typer.Argument(help="Files, addresses, or names of databases/.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve HTTP, not stdin and stdout.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows that one answer shows.")] = 10,
    policy: Annotated[
        str | None, typer.Option(help="Also a tool that asks the agent: its model, as `sqltrain serve` takes it.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Whose protocol an endpoint or a script speaks.")] = "sql_trail",
    store: Where = None,
) -> None:
    """Serve the sandboxed SQL tool to any MCP client, and the agent beside it.

    Examples:

      sqltrain mcp shop.sqlite

      sqltrain mcp shop --policy ~/checkpoint

      sqltrain mcp shop.sqlite farm.duckdb --port 8765
    """
    try:
        from pipelines.serving.mcp_server import serve
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[mcp]'") from None
    from pipelines.recipe.config import Execution

    model = None
    if policy is not None:
        from pipelines.serving.models import Served

        model = Served(policy, recipe, [], split([] if store is None else [f"store={store}"])[1])
    serve(databases, Execution(), rows, port, model, None if model is None else model.follow)


environment_app = typer.Typer(help="Episodes for other trainers.", no_args_is_help=True)


@environment_app.command("serve")
def serve_environment(
    recipe: RecipeName,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of 127.0.0.1 to listen at.")] = 8090,
    databases: Annotated[Path | None, typer.Option(help="Files here may be named by clients' own rows.")] = None,
    sessions: Annotated[int, typer.Option(min=1, max=100_000, help="Episodes at a time.")] = 256,
    idle: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that a silent episode lives.")] = 600.0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that run SQL.")] = 4,
) -> None:
    """Serve the episodes of a recipe to OpenEnv clients, for a trainer of your own (docs/environment.md).

    Examples:

      sqltrain environment serve skyrl_sql include=local/spider_train

      sqltrain environment serve skyrl_sql --databases ~/spider/database
    """
    try:
        import uvicorn

        from pipelines.environment.openenv import app
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[openenv]'") from None
    from flows import terminal
    from flows.serve import check_place
    from pipelines.report.terminal import plain

    check_place("127.0.0.1", port)
    served = app(recipe, overrides or [], databases, sessions, idle, workers)
    terminal.say(f"episodes of {plain(recipe)}: http://127.0.0.1:{port} (stop with Ctrl-C)")
    uvicorn.run(served, port=port, log_level="warning", timeout_graceful_shutdown=5)


feedback_app = typer.Typer(help="What users of `sqltrain serve` asked and said.", no_args_is_help=True)
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


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [connect, with_store(ask), with_store(serve), with_store(export), mcp]
    for command in commands:
        app.command(rich_help_panel="Use")(command)
    app.add_typer(environment_app, name="environment", rich_help_panel="Use")
    app.add_typer(feedback_app, name="feedback", rich_help_panel="Use")
