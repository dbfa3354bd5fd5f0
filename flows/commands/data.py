"""Commands about questions and teachers: invent, review, judge, data."""

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, emit, open_recipe, with_store
from pipelines.core.errors import UserError


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


data_app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)


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


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [with_store(invent), review, with_store(judge)]
    for command in commands:
        app.command(rich_help_panel="Data and teachers")(command)
    app.add_typer(data_app, name="data", rich_help_panel="Data and teachers")
