"""Commands that use a model or a database: connect, ask, serve, export, mcp, environment, feedback."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import Bars, DatabaseOption, JsonOutput, Overrides, RecipeName, StoreOption, console, emit, say
from pipelines.core.errors import DataError, UserError
from pipelines.core.types import is_valid_unicode, plain
from pipelines.databases.connecting import ConnectedDatabase, open_connection, write_example
from pipelines.endpoints import client
from pipelines.export.exporting import ExportRequest, export_model
from pipelines.export.folder import Kind
from pipelines.recipe.config import Execution
from pipelines.recipe.opening import open_recipe, split_store
from pipelines.serving import models
from pipelines.serving.feedback import Feedback
from pipelines.serving.single_question import ask_model
from pipelines.stages.gguf_folders import model_folder

app = typer.Typer()
environment_app = typer.Typer(help="Episodes for other trainers.", no_args_is_help=True)
feedback_app = typer.Typer(help="Questions and verdicts of the users of `sqltrain serve`.", no_args_is_help=True)
app.add_typer(environment_app, name="environment")
app.add_typer(feedback_app, name="feedback")

ProtocolRecipe = Annotated[str, typer.Option(help="The recipe whose protocol an endpoint or a script speaks.")]
FeedbackFolder = Annotated[Path, typer.Argument(help="The folder that serve --feedback was given.")]
MAX_FINDINGS = 5  # findings of one kind that are printed


@app.command()
def connect(
    database: Annotated[
        str | None, typer.Argument(help="A file, or an address such as postgresql://reader@host/shop.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The card's name; by default the database's own.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Write shop.sqlite and its questions.csv here, and connect the shop.")
    ] = False,
    schemas: Annotated[
        list[str] | None,
        typer.Option("--schema", help="A schema to read, again for each; the first is PostgreSQL's default one."),
    ] = None,
    dbt_target: Annotated[
        Path | None, typer.Option("--dbt", help="A dbt project's target/: its descriptions, tests and metrics.")
    ] = None,
    allow_writes: Annotated[
        bool, typer.Option("--allow-writes", help="Connect as a role that may write, too.")
    ] = False,
    json_output: JsonOutput = False,
) -> None:
    """Read a database and write its card, databases/NAME.yaml: the schema and notes that the agent sees.

    Edit the card then. Likely problems (no keys, codes, mixed dates, cryptic names) are listed; a role that can write
    is refused.

    Examples:

      sqltrain connect shop.sqlite

      sqltrain connect --example                 # a shop with 192 questions

      sqltrain connect postgresql://reader@localhost:5432/shop --name shop

      sqltrain connect postgresql://reader@localhost:5432/shop --schema sales --schema hr

      sqltrain connect shop --dbt ~/project/target
    """
    if (database is None) != example:
        raise DataError("connect needs one database", "Pass a file or an address, or --example for a small shop.")
    if database is None:
        database = write_example(say)
    connection = open_connection(database, name, schemas or (), allow_writes, say)
    with Bars(console) as bars:
        bars.begin("read", 1, "tables")
        fresh, findings = connection.read()
        bars.advance(1)
    connected = connection.write_card(fresh, findings, dbt_target, say)
    print_connected(connected)
    if json_output:
        counts = {kind: len(found) for kind, found in connected.findings_by_kind.items()}
        values = {
            "name": connected.name,
            "card": str(connected.path),
            "engine": connected.card.engine,
            "tables": len(connected.fresh.tables),
            "columns": connected.n_columns,
            "findings": counts,
        }
        emit(values)


def print_connected(connected: ConnectedDatabase) -> None:
    """Print a database's size, its likely problems, and what to do with its card."""
    say(connected.size_line())
    for remark in connected.dialect.remarks(connected.openable.database.location):
        say(remark)
    for kind, findings in connected.findings_by_kind.items():
        say(f"{kind}: {len(findings)}")
        for finding in findings[:MAX_FINDINGS]:
            say(f"  {plain(finding.where)}: {plain(finding.advice)}")
        if len(findings) > MAX_FINDINGS:
            say(f"  ... and {len(findings) - MAX_FINDINGS} more")
    endpoints_path = client.endpoints_path()
    endpoints = client.endpoints(endpoints_path)
    endpoint = next(iter(endpoints), "NAME")
    ask_command = f'sqltrain ask "..." --database {connected.name} --model endpoint:{endpoint}'
    say(f"wrote {connected.path}: edit it, then ask with: {ask_command}")
    if not endpoints:
        say(f"  there is no endpoint yet: add one to {endpoints_path}: {client.EXAMPLE}")
        say(f"  --model takes a checkpoint folder, too; without any, sqltrain mcp {connected.name} serves the SQL tool")
    password_variable = connected.card.password_env
    if password_variable is not None and connected.is_address:
        say(f"the password is not in it: set the environment variable {password_variable}")


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question, in words.")],
    database: DatabaseOption,
    overrides: Overrides = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="The recipe whose model answers, or whose protocol an endpoint or a script speaks."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A checkpoint folder, a GGUF file, champion:RECIPE, endpoint:NAME or script:FILE.jsonl that answers."
        ),
    ] = None,
    store_folder: StoreOption = None,
) -> None:
    """Ask a trained model about a database and watch its turns.

    A checkpoint is asked as its own card says, an endpoint or a script in sql_trail's protocol; --recipe names another.

    Examples:

      sqltrain ask "how many farms are there ?" --database FILE.sqlite --store /tmp/s

      sqltrain ask "how many farms are there ?" --database FILE.sqlite --model ~/checkpoint

      sqltrain ask "how many farms are there ?" --database farm --model endpoint:big
    """
    if not question.strip() or not is_valid_unicode(question):
        raise UserError("there is no question", 'As in: sqltrain ask "how many farms are there ?" --database FILE')
    if model is not None and model.startswith((models.CHAMPION, models.ENDPOINT, models.SCRIPT)):
        words, store = split_store(overrides, store_folder)
        opened = models.open_model(model, recipe or models.DEFAULT_RECIPE, words, store)
        ask_model(opened.recipe, store, question, database, opened.policy, typer.echo)
        return
    folder: Path | None = None
    if model is not None:
        _, store = split_store(overrides, store_folder)
        folder = model_folder(model, store, say)
    loaded, store = open_recipe(recipe or "miniature", overrides, store_folder, folder)
    ask_model(loaded, store, question, database, folder, typer.echo)


@app.command()
def serve(
    database: Annotated[str, typer.Argument(help="A name of databases/, a file, or an address.")],
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help=f"The model that answers: {models.KINDS}.")] = None,
    recipe: ProtocolRecipe = "sql_trail",
    host: Annotated[str, typer.Option(help="The address to listen at; a public one needs --keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen at.")] = 8080,
    keys: Annotated[Path | None, typer.Option(help="A YAML file of API keys: a line USER: KEY each.")] = None,
    feedback: Annotated[Path | None, typer.Option(help="Keep questions and verdicts in this folder.")] = None,
    keep_days: Annotated[int, typer.Option(min=1, max=36_500, help="Days to keep feedback.")] = 90,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Seconds that one question may take.")] = 120.0,
    rows: Annotated[int, typer.Option(min=1, max=100_000, help="Rows of one answer, at most.")] = 1_000,
    per_minute: Annotated[int, typer.Option(min=1, max=100_000, help="Questions of a user in a minute.")] = 60,
    at_once: Annotated[int, typer.Option(min=1, max=10_000, help="Questions of a user at a time.")] = 8,
    store_folder: StoreOption = None,
) -> None:
    """Serve the agent of a database: a chat page, and OpenAI's protocol for any client.

    Examples:

      sqltrain serve shop --model ~/checkpoint

      sqltrain serve shop --model champion:shop@staging

      sqltrain serve shop --model endpoint:big --host 0.0.0.0 --keys keys.yaml --feedback feedback
    """
    try:
        import uvicorn

        from pipelines.serving.service_start import ServeRequest, open_service
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    words, store = split_store(overrides, store_folder)
    request = ServeRequest(
        database=database,
        model=model,
        recipe=recipe,
        overrides=words,
        store=store,
        host=host,
        port=port,
        keys=keys,
        feedback=feedback,
        keep_days=keep_days,
        seconds=seconds,
        rows=rows,
        per_minute=per_minute,
        at_once=at_once,
    )
    with open_service(request, say) as service:
        uvicorn.run(service.app(), host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, champion:RECIPE, STAGE/KEY, or a trained recipe.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    overrides: Overrides = None,
    to: Annotated[Kind, typer.Option(help="hub-folder, hub-adapter (LoRA), gguf or ollama.")] = "hub-folder",
    quantize: Annotated[
        str | None,
        typer.Option(help="Types of the GGUF files, with commas between: bf16 (without it), q8_0, q4_0, q4_k_m."),
    ] = None,
    push: Annotated[str | None, typer.Option(help="Also upload it to the hub as OWNER/NAME, private.")] = None,
    store_folder: StoreOption = None,
) -> None:
    """Write a trained model as others take it, with a filled card: weights, tokenizer, prompt, protocol, figures.

    Examples:

      sqltrain export miniature ~/mini-agent

      sqltrain export miniature ~/mini-agent --to gguf --quantize q8_0,q4_k_m

      sqltrain export champion:sql_trail ~/agent --to ollama --quantize q4_k_m

      sqltrain export grpo/0a1b2c3d4e5f ~/agent --push me/agent
    """
    words, store = split_store(overrides, store_folder)
    request = ExportRequest(model, words, out.expanduser(), to, quantize, push)
    export_model(request, store, say)


@app.command()
def mcp(
    databases: Annotated[list[str], typer.Argument(help="Files, addresses, or names of databases/.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve HTTP, not stdin and stdout.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows that one answer shows.")] = 10,
    model: Annotated[
        str | None,
        typer.Option(help="Also serve a tool that asks the agent; its model is named as for `sqltrain serve`."),
    ] = None,
    recipe: ProtocolRecipe = "sql_trail",
    store_folder: StoreOption = None,
) -> None:
    """Serve the sandboxed SQL tool to any MCP client, and the agent beside it.

    It needs `pip install 'sqltrain[mcp]'`.

    Examples:

      sqltrain mcp shop.sqlite

      sqltrain mcp shop --model ~/checkpoint

      sqltrain mcp shop.sqlite farm.duckdb --port 8765
    """
    try:
        from pipelines.serving.mcp_server import serve as serve_tool
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[mcp]'") from None
    if model is None:
        serve_tool(databases, Execution(), rows, port)
        return
    _, store = split_store(None, store_folder)
    served = models.CurrentModel(model, recipe, [], store)
    serve_tool(databases, Execution(), rows, port, lambda: served.model, served.follow)


@environment_app.command("serve")
def serve_environment(
    recipe: RecipeName,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port of 127.0.0.1 to listen at.")] = 8090,
    databases: Annotated[
        Path | None, typer.Option("--database", help="A folder whose files may be named by clients' own rows.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, max=100_000, help="Episodes at a time.")] = 256,
    idle: Annotated[float, typer.Option(min=1, max=86_400, help="Seconds that a silent episode lives.")] = 600.0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that run SQL.")] = 4,
) -> None:
    """Serve the episodes of a recipe to OpenEnv clients, for a trainer of your own (docs/how-to/trainers.md).

    Examples:

      sqltrain environment serve skyrl_sql include=local/spider_train

      sqltrain environment serve skyrl_sql --database ~/spider/database
    """
    try:
        import uvicorn

        from pipelines.environment.openenv import app as openenv_app
        from pipelines.serving.web import require_bindable
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[openenv]'") from None
    require_bindable("127.0.0.1", port)
    served = openenv_app(recipe, overrides or [], databases, sessions, idle, workers)
    say(f"episodes of {plain(recipe)}: http://127.0.0.1:{port} (stop with Ctrl-C)")
    uvicorn.run(served, port=port, log_level="warning", timeout_graceful_shutdown=5)


@feedback_app.command("export")
def feedback_export(
    folder: FeedbackFolder,
    user: Annotated[str | None, typer.Option(help="Print the questions of this user alone.")] = None,
) -> None:
    """Print every question with its events and verdicts, a JSON object a line.

    Example: sqltrain feedback export feedback > feedback.jsonl
    """
    for row in Feedback(folder, create=False).export(user):
        typer.echo(json.dumps(row))


@feedback_app.command("delete")
def feedback_delete(
    folder: FeedbackFolder,
    user: Annotated[
        str, typer.Option(help="The user whose questions and verdicts go; `local` on a server without keys.")
    ],
    json_output: JsonOutput = False,
) -> None:
    """Delete all that is kept of a user, also while a server runs.

    Example: sqltrain feedback delete feedback --user ada
    """
    count = Feedback(folder, create=False).delete(user)
    if json_output:
        emit({"deleted": count})
        return
    noun = "question" if count == 1 else "questions"
    typer.echo(f"deleted {count} {noun}")
