"""Commands about questions and teachers: invent, review, data add."""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.terminal import Bars, DatabaseOption, JsonOutput, Overrides, StoreOption, console, emit, say
from pipelines.core.errors import DataError, UserError
from pipelines.databases import named
from pipelines.databases.of_recipe import sql_engine
from pipelines.recipe.config import Execution
from pipelines.recipe.opening import open_recipe
from pipelines.sql.engine import SqlEngine
from pipelines.stages.added_benchmarks import add_benchmark
from pipelines.stages.recipe_check import NO_PATH
from pipelines.teachers.invention import InventionRequest, prepare_invention

if TYPE_CHECKING:
    from pipelines.review.items import Item

app = typer.Typer()
data_app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)
app.add_typer(data_app, name="data")

WORKERS = 2  # processes that run the SQL of a review


@app.command()
def invent(
    database: DatabaseOption,
    model: Annotated[
        str, typer.Option(help="endpoint:NAME, which writes SQL and questions (docs/how-to/endpoints.md).")
    ],
    count: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="How many questions; by default 100, or all of --from.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--from", help="Your own queries, each ended by ;, in place of invented ones.")
    ] = None,
    checker: Annotated[str | None, typer.Option(help="Another endpoint:NAME, which answers back.")] = None,
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")] = Path("invented.jsonl"),
    overrides: Overrides = None,
    json_output: JsonOutput = False,
    store_folder: StoreOption = None,
) -> None:
    """Make questions with gold SQL for a database that has none.

    Examples:

      sqltrain invent --database shop.sqlite --model endpoint:big --checker endpoint:other --out shop.jsonl

      sqltrain invent --database shop --model endpoint:big --from queries.sql --out shop.jsonl
    """
    recipe, store = open_recipe("miniature", overrides, store_folder)
    request = InventionRequest(database, model, checker, count, log, out)
    invention = prepare_invention(request, recipe, store, say)
    with Bars(console) as bars:
        bars.begin("invent", invention.count, "questions")
        invented = invention.make(bars.advance)
    invented.write()
    for line in invented.lines():
        say(line)
    if json_output:
        coverage = dataclasses.asdict(invented.coverage)
        emit({"counts": dict(invented.counts), "coverage": coverage, "out": str(out)})


@app.command()
def review(
    questions: Annotated[str, typer.Argument(help="A JSONL or CSV file of questions; with --data, a recipe.")],
    overrides: Overrides = None,
    database: Annotated[
        str | None, typer.Option(help="The database of all questions: a file, an address, or a name of databases/.")
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
        import pipelines.review.server  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    if data and database is not None:
        raise UserError("--database is for a file's questions, and --data for a recipe's", "Pass one of them.")
    if overrides and not data:
        raise UserError(f"{overrides[0]} changes a recipe, and {questions} is a file", "Pass --data with a recipe.")
    if data:
        review_recipe(questions, overrides, out, port)
    else:
        review_file(Path(questions).expanduser(), database, out, port)


def review_recipe(name: str, overrides: Sequence[str] | None, out: Path | None, port: int) -> None:
    """Serve the review of a recipe's questions whose gold SQL is in doubt."""
    from pipelines.review import items, server
    from pipelines.review.decisions import Review, ReviewFiles

    recipe, _ = open_recipe(name, overrides)
    if recipe.data.without_path:
        settings = ", ".join(recipe.data.without_path)
        say("note: " + NO_PATH.format(settings))
    files = ReviewFiles.of(out or Path("corrections.jsonl"))
    with (
        tempfile.TemporaryDirectory() as folder,
        sql_engine(recipe, WORKERS) as sql,
        server.listening(port) as listener,
    ):
        unexamined = items.read_sources(recipe, Path(folder))
        questions = examine(unexamined, sql)
        corrections = items.corrected(recipe, questions)
        doubted = [question for question in questions if question.doubts]
        if not doubted:
            say(f"nothing speaks against the gold SQL of {recipe.name}: {len(questions):,} looked at")
            return
        recipe_review = Review(recipe.name, doubted, files, corrections)
        server.serve(recipe_review, sql, listener, say)


def review_file(path: Path, database: str | None, out: Path | None, port: int) -> None:
    """Serve the review of a file's questions."""
    from pipelines.review import items, server
    from pipelines.review.decisions import Review, ReviewFiles

    name = path.name.removesuffix(".jsonl")
    files = ReviewFiles.of(out or path.with_name(f"{name}.reviewed.jsonl"))
    written = [file.resolve() for file in (files.out, files.rejected, files.decisions)]
    if path.resolve() in written:
        raise DataError(f"the review would write over its questions, {path}", "Pass another --out FILE.jsonl.")
    questions, databases = items.read_file(path, database)
    address: str | None = None
    if database is not None:
        address = databases[0].address
    if address is None and files.out.parent.resolve() != path.parent.resolve():
        # A line's own path to its database would lead elsewhere from another folder: all questions must have one.
        if len(databases) > 1:
            raise DataError("the questions name several databases", "Let --out name a file in their folder.")
        address = databases[0].address
    with named.sandbox(databases, Execution(), WORKERS) as sql, server.listening(port) as listener:
        examined = examine(questions, sql)
        file_review = Review(path.name, examined, files, None, address)
        server.serve(file_review, sql, listener, say)


def examine(questions: list["Item"], sql: SqlEngine) -> list["Item"]:
    """The questions with the doubts about them, with progress on the screen."""
    from pipelines.review import items

    with Bars(console) as bars:
        bars.begin("check", len(questions), "questions")
        examined = items.with_doubts(questions, sql)
        bars.advance(len(questions))
    return examined


@data_app.command("add")
def data_add(
    name: Annotated[str, typer.Argument(help="A file of conf/data, such as bird_dev; own: your own questions.")],
    path: Annotated[Path, typer.Argument(help="The folder that it was unpacked into; for `own`, a JSONL or CSV file.")],
    called: Annotated[
        str | None, typer.Option("--name", help="A name of its own in recipes, if you add several of one kind.")
    ] = None,
    json_output: JsonOutput = False,
) -> None:
    """Check a downloaded benchmark (counts, databases, gold SQL, checksums) and note where it is.

    Examples:

      sqltrain data add spider_dev ~/spider

      sqltrain evaluate sql_trail --model CHECKPOINT include=local/spider_dev

      sqltrain data add own ~/sales.jsonl --name sales
    """

    def say_beside_json(line: str) -> None:
        typer.echo(line, err=json_output)

    added = add_benchmark(name, path, say_beside_json, called=called)
    if json_output:
        emit(added)
