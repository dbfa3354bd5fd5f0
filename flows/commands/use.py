"""Commands that use a model or a database: connect, ask, serve, export, mcp, environment, feedback."""

import contextlib
import functools
import json
import logging
import re
import shlex
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import AsJson, Bars, Overrides, RecipeName, StoreOption, console, emit, say
from pipelines.core.errors import BoundaryError, DataError, ResourceError, UserError
from pipelines.core.files import replacing, write_atomic
from pipelines.core.registry import DIALECTS
from pipelines.core.store import Store
from pipelines.core.types import ExecutionStatus, StopReason, is_abstention, is_valid_unicode, text_of
from pipelines.databases import card, catalogue, dbt, named
from pipelines.databases.catalogue import DatabaseFinding
from pipelines.endpoints import client
from pipelines.environment.core import Environment, RolloutMode
from pipelines.export import folder as exports
from pipelines.export.cards import lineage_of
from pipelines.export.llama_cpp import BLOCKS
from pipelines.nightly.ledger import ledgers
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import require_sound
from pipelines.recipe.config import Execution, Recipe
from pipelines.recipe.opening import open_recipe, split_store
from pipelines.report.terminal import plain
from pipelines.rollout.episode import EpisodeEvent, EpisodeRequest, ResultEvent
from pipelines.rollout.gguf_model import is_gguf
from pipelines.rollout.habits import advice_on
from pipelines.rollout.policies.base import Policy
from pipelines.serving import models
from pipelines.serving.access import Access, read_keys
from pipelines.serving.agent import CANNOT_ANSWER, Agent, QuestionBudget, why_unanswered
from pipelines.serving.feedback import Feedback
from pipelines.serving.models import CHAMPION, KINDS, CurrentModel, champion_of
from pipelines.sql.audit import append
from pipelines.sql.dialects.dialect import engine_of_address
from pipelines.stages import graph
from pipelines.stages.gguf_folders import model_folder
from pipelines.teachers.experts import linking

app = typer.Typer()
environment_app = typer.Typer(help="Episodes for other trainers.", no_args_is_help=True)
feedback_app = typer.Typer(help="Questions and verdicts of the users of `sqltrain serve`.", no_args_is_help=True)
app.add_typer(environment_app, name="environment")
app.add_typer(feedback_app, name="feedback")

FeedbackFolder = Annotated[Path, typer.Argument(help="The folder that serve --feedback was given.")]
SHOWN = 5  # findings of one kind that are printed
WORKERS = 4  # processes that run SQL


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
    as_json: AsJson = False,
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
    if database is None:  # the example: files that are there stay
        database, shipped = "shop.sqlite", recipes.CONF / "example"
        if not Path("questions.csv").exists():
            write_atomic(Path("questions.csv"), (shipped / "questions.csv").read_text(encoding="utf-8"))
        if not Path(database).exists():
            with replacing(Path(database)) as beside, contextlib.closing(sqlite3.connect(beside)) as shop:
                shop.executescript((shipped / "shop.sql").read_text(encoding="utf-8"))
        say("the example: shop.sqlite, and questions.csv with 192 questions and their SQL")
    openable = named.find(database, "Pass a file, or an address such as postgresql://reader@host/shop.")
    dialect = DIALECTS[openable.database.engine]
    if schemas:
        openable = named.find(dialect.with_schemas(database, schemas))
    is_card = named.has_card(database)
    title = name or (database if is_card else card.described_by(openable.address) or openable.database.id)
    if not title or not all(sign.isalnum() or sign in "_-" for sign in title):
        raise DataError(f"{title!r} cannot be the name of a card", "Pass --name with letters, digits, _ and - only.")
    place = card.path_of(title)
    old = card.read(place) if place.is_file() else None
    if old is not None and old.location != openable.address:
        raise DataError(f"{place} describes another database", "Pass --name for this one.")
    role, places = catalogue.connection_role(openable)
    read = [schema for schema, place in places.items() if place is not None]
    if absent := [schema for schema in schemas or () if schema not in read]:
        hint = f"There are: {', '.join(places)}. An administrator grants a role the USAGE of another."
        raise DataError(f"this role finds no schema {', '.join(absent)}", hint)
    if dialect.is_server and (unread := [schema for schema in places if schema not in read]):
        say(f"note: these schemas are not read: {', '.join(unread)}; --schema names those to read")
    # The schemas of a server are in its address; those of a file in its card.
    in_file = () if dialect.is_server else tuple(schemas or (old.schemas if old is not None else ()))
    if role.writes:
        say(f"warning: the role of this connection may do more than read: {'; '.join(role.writes)}")
        if role.revocations:
            say("PUBLIC has rights that every role has, too; an administrator takes them away with:")
            for line in role.revocations:
                say(f"  {line}")
        if role.has_own_writes:
            say("an administrator makes a role that only reads with:")
            for line in dialect.reader_grants(openable.address, read):
                say(f"  {line}")
        if role.is_turned_away:
            raise DataError("the sandbox refuses a role with such rights", "Connect as a role that only reads.")
        if not allow_writes:
            raise DataError("this role may write", "Connect as one that only reads, or pass --allow-writes.")
    if old is None and (first := card.described_by(openable.address)) is not None:
        say(f"note: {card.path_of(first)} describes this database, too; the hidden names of both hold")
    # The password of an address is not written; the card names a variable for it.
    is_address = engine_of_address(database) is not None
    has_password = is_address and named.split_password(database)[1] is not None
    variable = f"{title.upper().replace('-', '_')}_PASSWORD" if has_password else None
    with Bars(console) as bars:
        bars.begin("read", 1, "tables")
        fresh, problems = catalogue.read_catalogue(openable, variable, in_file)
        bars.advance(1)
    # The edits of an earlier card stay.
    database_card = fresh if old is None else card.merge_cards(fresh, old)
    lost = [] if old is None else card.lost_words(fresh, old)
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        names = plain(", ".join(lost[:SHOWN]))
        say(f"note: gone from the database, so the card loses their descriptions and synonyms: {names}{more}")
    if dbt_target is not None:
        database_card, taken = dbt.with_dbt(database_card, dbt_target)
        kinds = ["descriptions", "tests", "references", "metrics", "models without a table here"]
        kinds += [kind for kind in taken if kind not in kinds]
        say(f"dbt: {', '.join(f'{taken[kind]} {kind}' for kind in kinds)}")
    card.write(place, database_card)
    tables = fresh.tables.values()
    rows = sum(table.rows or 0 for table in tables)
    is_partial = any(table.rows is None for table in tables)
    columns = sum(len(table.columns) for table in tables)
    say(
        f"{openable.database.id}: {dialect.title}, {len(tables):,} tables, {columns:,} columns, "
        f"{'at least ' if is_partial else ''}{rows:,} rows"
    )
    for remark in dialect.remarks(openable.database.location):
        say(remark)
    by_kind: dict[str, list[DatabaseFinding]] = {}
    for finding in problems:
        by_kind.setdefault(finding.kind, []).append(finding)
    for kind, findings in by_kind.items():
        say(f"{kind}: {len(findings)}")
        for finding in findings[:SHOWN]:
            say(f"  {plain(finding.where)}: {plain(finding.advice)}")
        if len(findings) > SHOWN:
            say(f"  ... and {len(findings) - SHOWN} more")
    known = client.endpoints(client.endpoints_path())
    model = f"endpoint:{next(iter(known), 'NAME')}"
    say(f'wrote {place}: edit it, then ask with: sqltrain ask "..." --database {title} --model {model}')
    if not known:
        say(f"  there is no endpoint yet: add one to {client.endpoints_path()}: {client.EXAMPLE}")
        say(f"  --model takes a checkpoint folder, too; without any, sqltrain mcp {title} serves the SQL tool")
    if database_card.password_env is not None and is_address:
        say(f"the password is not in it: set the environment variable {database_card.password_env}")
    if as_json:
        facts = {"name": title, "card": str(place), "engine": database_card.engine, "tables": len(tables)}
        emit({**facts, "columns": columns, "findings": {kind: len(found) for kind, found in by_kind.items()}})


def newest_model(recipe: Recipe, store: Store) -> Path:
    """The model folder of the recipe's newest finished training stage."""
    steps = {step.name: step for step in graph.plan(recipe, store)}
    for name in ("grpo", "sft"):
        if name in steps and steps[name].cached:
            return steps[name].folder / "model"
    raise DataError(
        f"recipe {recipe.name} has no trained model in {store.root}",
        "Name a checkpoint folder, champion:RECIPE or (to ask) endpoint:NAME, or train it by sqltrain run or adapt.",
    )


def ask_model(
    recipe: Recipe, store: Store, question: str, database: str, model: Path | Policy | None, show: Callable[[str], None]
) -> None:
    """Answer a question about a database (a file, an address, or a name of databases/) with the greedy policy, showing
    each turn. `model` is a checkpoint folder, by default the recipe's newest, or any policy.
    """
    openable = named.find(database)
    answerer = model or newest_model(recipe, store)
    if isinstance(answerer, Path):
        require_sound(answerer)

    from pipelines.rollout.policies.factories import local_policy

    def show_turn(event: EpisodeEvent) -> None:
        if isinstance(event, ResultEvent):
            observation = [] if event.turn.observation is None else [event.turn.observation]
            show(plain("\n".join([event.turn.text, *observation]), lines=True))

    alone = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"slots": 1})})
    with openable.sql(recipe.execution) as sql:
        schema = openable.schema(sql, recipe.protocol.schema_values, recipe.protocol.schema_descriptions)
        environment = Environment(recipe, sql=sql, schema=lambda _: schema)
        policy = local_policy(str(answerer), alone) if isinstance(answerer, Path) else answerer
        engine = environment.engine(policy, RolloutMode.served(recipe))
        (example,) = environment.prepare([openable.example(question)], linking(recipe.data.linker), is_served=True)
        (trajectory,) = engine.run([EpisodeRequest(example, 0, recipe.seed)], on_event=show_turn)
        if trajectory.stop is StopReason.BROKEN:
            failure = str(trajectory.failure)
            if failure.islower():  # of the sandbox
                hint = "Check that the database exists and can be read."
                raise BoundaryError(f"no answer: {failure.replace('_', ' ')}", hint)
            raise BoundaryError(f"no answer of {trajectory.policy}: {failure}", "Check the model, or its endpoint.")
        if not trajectory.turns and trajectory.stop is StopReason.TOKEN_LIMIT:
            raise DataError(
                f"the prompt is {len(trajectory.token_ids):,} tokens, as long as the model's context or longer",
                "Lower data.values or protocol.schema_values, or set protocol.schema_view=names.",
            )
        if trajectory.final_sql is None:
            hint = advice_on(trajectory, environment.protocol) or "Try other words, or a better model."
            raise DataError(why_unanswered(trajectory), hint)
        result = sql.execute_many([(openable.database, trajectory.final_sql)], max_rows=50)[0]
    show(f"\nSQL: {plain(trajectory.final_sql, lines=True)}")
    if result.ok and is_abstention(trajectory.final_sql):
        show(CANNOT_ANSWER)
    elif result.ok:
        show(" | ".join(map(plain, result.columns)))
        for row in result.rows:
            show(" | ".join("NULL" if value is None else plain(text_of(value)) for value in row))
        show("(more rows)" if result.truncated else f"({len(result.rows)} row{'s' * (len(result.rows) != 1)})")
    elif result.status is ExecutionStatus.UNAVAILABLE:
        raise BoundaryError(str(result.error), "Check that the database can be reached, and that its role only reads.")
    else:
        hint = advice_on(trajectory, environment.protocol) or "Try other words."
        raise DataError(f"the answer's SQL does not run: {plain(str(result.error))}", hint)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question, in words.")],
    database: Annotated[str, typer.Option(help="A file, an address, or a name of databases/.")],
    overrides: Overrides = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose model answers, or whose protocol an endpoint or a script speaks.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Instead: a checkpoint folder, a GGUF file, champion:RECIPE, endpoint:NAME or script:FILE.jsonl."
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
        rest, store = split_store(overrides, store_folder)
        opened = models.open_model(model, recipe or models.DEFAULT_RECIPE, rest, store)
        ask_model(opened.recipe, store, question, database, opened.policy, typer.echo)
        return
    folder = None if model is None else model_folder(model, split_store(overrides, store_folder)[1], say)
    loaded, store = open_recipe(recipe or "miniature", overrides, store_folder, folder)
    ask_model(loaded, store, question, database, folder, typer.echo)


@app.command()
def serve(
    database: Annotated[str, typer.Argument(help="A name of databases/, a file, or an address.")],
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option(help=f"Pass {KINDS}.")] = None,
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

        from pipelines.serving.http_server import Service, prune_and_sync_feedback
        from pipelines.serving.web import require_bindable, require_keys
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    rest, store = split_store(overrides, store_folder)
    openable = named.find(database)
    access = Access(read_keys(keys) if keys else {}, per_minute, at_once)
    require_keys(host, access)
    require_bindable(host, port)
    # Without a model the only champion of the store answers.
    if model is None:
        names = [name for name, ledger in ledgers(store).items() if ledger.champion() is not None]
        if len(names) != 1:
            reason = f"{len(names)} recipes have a champion" if names else "no recipe has a champion"
            raise UserError(f"{reason} in {store.root}", f"Pass --model with {KINDS}.")
        model = CHAMPION + names[0]
    served = CurrentModel(model, recipe, rest, store)
    folder = store.root / "serve" / openable.database.id
    append(folder / "questions.jsonl", [])  # refused now, and not at the first question
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with openable.sql(served.model.recipe.execution, WORKERS, folder / "statements.jsonl") as sql:
        shown = served.model.recipe.protocol
        schema = openable.schema(sql, shown.schema_values, shown.schema_descriptions)
        agent = Agent(openable, sql, schema, lambda: served.model, QuestionBudget(seconds, rows))
        kept = None if feedback is None else Feedback(feedback, keep_days)
        background: list[Callable[[], Awaitable[None]]] = [served.follow]
        if kept is not None:
            background.append(functools.partial(prune_and_sync_feedback, kept, store.root))
        service = Service(agent, access, folder / "questions.jsonl", kept, background)
        try:
            from pipelines.serving.mcp_server import add_mcp
        except ImportError as error:
            say(f"/mcp is not served: {error.name} is not installed (pip install 'sqltrain[mcp]')")
        else:
            add_mcp(service)
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        say(f"{plain(openable.database.id)} answered by {plain(served.model.name)}: {address} (stop with Ctrl-C)")
        say(f"OpenAI's protocol: {address}/v1    audit log: {folder / 'questions.jsonl'}")
        uvicorn.run(service.app(), host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="A checkpoint folder, champion:RECIPE, STAGE/KEY, or a trained recipe.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there yet.")],
    overrides: Overrides = None,
    to: Annotated[exports.Kind, typer.Option(help="hub-folder, hub-adapter (LoRA), gguf or ollama.")] = "hub-folder",
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
    rest, store = split_store(overrides, store_folder)
    out = out.expanduser()
    types = ("bf16" if quantize is None else quantize).split(",")
    if quantize is not None and to not in ("gguf", "ollama"):
        raise UserError("--quantize is of GGUF files", "Pass --to gguf or --to ollama.")
    if unknown := [each for each in types if each not in BLOCKS]:
        raise UserError(f"--quantize: there is no type {unknown[0]!r}", f"There are: {', '.join(BLOCKS)}.")
    if push is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", push):
        raise UserError(f"--push: {push!r} is not the name of a repository", "Write OWNER/NAME.")
    token = None
    if push is not None:  # before a folder is written
        from huggingface_hub import get_token

        token = get_token()
        if not token:
            raise ResourceError("there is no token for the hub", exports.HUB_HINT)
    stage, _, key = model.partition("/")
    if Path(model).expanduser().is_dir() or is_gguf(model):
        checkpoint = model_folder(model, store, say)
    elif model.startswith(CHAMPION):
        champion = champion_of(store, model.removeprefix(CHAMPION))
        checkpoint = store.folder(champion.stage, champion.key) / "model"
    elif key and store.has(stage, key):
        checkpoint = store.folder(stage, key) / "model"
    elif model in recipes.recipe_names() or model.endswith(".yaml"):
        checkpoint = newest_model(recipes.load(model, rest), store)
    else:
        raise DataError(f"there is no model {model!r}", "Pass a folder, champion:RECIPE, STAGE/KEY or a recipe.")
    notes = exports.write(lineage_of(checkpoint), to, out, types)
    say(f"wrote {out}: read its {exports.README} before you hand it on")
    for note in notes:
        say(f"note: {note}")
    for path in sorted(out.glob("*.gguf")):
        say(f"serve it: python -m llama_cpp.server --model {shlex.quote(str(path))} --n_ctx 0")
    if to == "ollama":
        say(f"import it: cd {shlex.quote(str(out))} && ollama create {shlex.quote(out.name)}")
    if push is not None and token is not None:
        say(f"pushed to {exports.push(out, push, token)}")


@app.command()
def mcp(
    databases: Annotated[list[str], typer.Argument(help="Files, addresses, or names of databases/.")],
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Serve HTTP, not stdin and stdout.")] = None,
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows that one answer shows.")] = 10,
    model: Annotated[
        str | None, typer.Option(help="Also a tool that asks the agent: its model, as `sqltrain serve` takes it.")
    ] = None,
    recipe: Annotated[str, typer.Option(help="Whose protocol an endpoint or a script speaks.")] = "sql_trail",
    store_folder: StoreOption = None,
) -> None:
    """Serve the sandboxed SQL tool to any MCP client, and the agent beside it.

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
    served = CurrentModel(model, recipe, [], split_store(None, store_folder)[1])
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
    folder: FeedbackFolder, user: Annotated[str | None, typer.Option(help="Of this user alone.")] = None
) -> None:
    """Print every question with its events and verdicts, a JSON object a line.

    Example: sqltrain feedback export feedback > feedback.jsonl
    """
    for row in Feedback(folder, create=False).export(user):
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
    count = Feedback(folder, create=False).delete(user)
    if as_json:
        emit({"deleted": count})
    else:
        typer.echo(f"deleted {count} question{'' if count == 1 else 's'}")
