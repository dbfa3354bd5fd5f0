"""Commands about questions and teachers: invent, review, data add."""

import asyncio
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.terminal import NO_PATH, AsJson, Bars, Overrides, StoreOption, console, emit, say
from pipelines.benchmarks import downloads
from pipelines.core.errors import DataError, UserError
from pipelines.core.files import write_atomic, writing_to
from pipelines.core.text_files import read_text
from pipelines.core.types import Example
from pipelines.databases import card, named
from pipelines.databases.of_recipe import sql_engine
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.log import RESPONSES
from pipelines.recipe import recipes
from pipelines.recipe.config import Execution
from pipelines.recipe.opening import open_recipe
from pipelines.recipe.recipes import LOCAL
from pipelines.recipe.yaml_files import yaml_text
from pipelines.report.terminal import plain
from pipelines.serving.models import ENDPOINT
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.teachers.invent import Inventor, LoggedQuery, coverage_lines, read_log, schema_coverage

app = typer.Typer()
data_app = typer.Typer(help="Benchmarks on this machine.", no_args_is_help=True)
app.add_typer(data_app, name="data")

LINE_CHARS = 300
QUERY_CHARS = 80  # of a query that is named
MARK = "# questions_sha256: "  # of an entry of conf/local
WORKERS = 2  # processes that run the SQL of a review


def shown(sql: str) -> str:
    """The beginning of a query, in one line."""
    line = plain(" ".join(sql.split()))
    return line if len(line) <= QUERY_CHARS else f"{line[: QUERY_CHARS - 1]}…"


@app.command()
def invent(
    database: Annotated[str, typer.Option(help="A file, an address, or a name of databases/.")],
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
    as_json: AsJson = False,
    store_folder: StoreOption = None,
) -> None:
    """Make questions with gold SQL for a database that has none.

    Examples:

      sqltrain invent --database shop.sqlite --model endpoint:big --checker endpoint:other --out shop.jsonl

      sqltrain invent --database shop --model endpoint:big --from queries.sql --out shop.jsonl
    """
    recipe, store = open_recipe("miniature", overrides, store_folder)
    where = named.find(database)
    logged: Sequence[LoggedQuery] = ()
    if log is not None:
        a_log = "Pass a text file of SQL, each statement ended by ;."
        read = read_log(read_text(log, a_log), where.database.engine)
        logged = read.queries
        for query in read.unreadable:
            say(f"{log}, line {query.line} is left out, for a quote or a comment is never closed: {shown(query.sql)}")
        if read.repeats:
            say(f"{log} has {read.repeats} statements more than once; each is tried once")
        if not logged:
            raise DataError(f"{log} has no statement", a_log)
    count = count or len(logged) or 100
    # A file that cannot be written is said before anything is bought.
    hint = "Pass --out FILE.jsonl."
    with writing_to(out, hint):
        out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise DataError(f"{out} cannot be written: {'it is a folder' if out.is_dir() else 'no permission'}", hint)
    names = dict.fromkeys(name.removeprefix(ENDPOINT) for name in (model, checker or model))
    askers = [Asker.named(name, store.root / RESPONSES) for name in names]

    async def reach() -> None:  # a server that is down is reported at once, and not after `patience_s`
        for asker in askers:
            try:
                await asker.connection.reach()
            finally:
                await asker.connection.close()

    asyncio.run(reach())
    queries = [query.sql for query in logged]
    with where.sql(recipe.execution, recipe.hardware.sql_workers) as sql, Bars(console) as bars:
        bars.begin("invent", count, "questions")
        schema = where.schema(sql, values=3)
        inventor = Inventor(where.database, schema, sql, askers[0], askers[-1], recipe.seed, queries)
        invented = inventor.make(count, bars.advance)
    doubted = out.with_name(f"{out.name.removesuffix('.jsonl')}.doubted.jsonl")

    def text_of(listed: Sequence[Example]) -> str:
        """Lines that the JSONL reader takes, with what made each beside; no password is in them."""
        text = ""
        for example in listed:
            row = {"id": example.id, "question": example.question, "database": where.address, "sql": example.gold_sql}
            text += json.dumps({**row, "hardness": example.hardness, **example.meta}, ensure_ascii=False) + "\n"
        return text

    write_atomic(doubted, text_of(invented.doubted))
    reasons = ", ".join(f"{reason} {n}" for reason, n in invented.counts.most_common() if n)
    if not invented.examples:
        raise DataError(f"no question could be made of {database}: {reasons}", "Try another model, or more questions.")
    write_atomic(out, text_of(invented.examples))
    say(f"{len(invented.examples)} of {count} questions in {out} (use: data.sft.kind=jsonl data.sft.path={out})")
    say(f"queries: {reasons}")
    lines_of: dict[str, list[str]] = {}  # of the log, by the reason
    for number, reason in invented.lost if logged else ():
        lines_of.setdefault(reason, []).append(str(logged[number].line))
    for reason, numbers in lines_of.items():
        say(f"{log}: {reason} in the queries of the lines {', '.join(numbers)}")
    covered = schema_coverage(invented.examples, schema)
    for line in coverage_lines(covered):
        say(line)
    say(f"look through them with: sqltrain review {out}")
    say(f"{len(invented.doubted)} more, which the checker answers with another result, are in {doubted}")
    for asker in askers:
        say(asker.bill())
    if as_json:
        counts = {reason: float(n) for reason, n in sorted(invented.counts.items())}
        emit({"counts": counts, "coverage": dataclasses.asdict(covered), "out": str(out)})


@app.command()
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
        from pipelines.review import items, server
        from pipelines.review.decisions import Review, ReviewFiles
    except ImportError as error:
        raise UserError(f"{error.name} is not installed", "Run: pip install 'sqltrain[serve]'") from None
    if data and database is not None:
        raise UserError("--database is of a file's questions, and --data of a recipe's", "Pass one of them.")
    if overrides and not data:
        raise UserError(f"{overrides[0]} changes a recipe, and {questions} is a file", "Pass --data with a recipe.")

    def examined(listed: list[items.Item]) -> list[items.Item]:
        with Bars(console) as bars:
            bars.begin("check", len(listed), "questions")
            found = items.with_doubts(listed, sql)
            bars.advance(len(listed))
        return found

    if data:
        recipe, _ = open_recipe(questions, overrides)
        if recipe.data.without_path:
            say(f"note: {NO_PATH.format(', '.join(recipe.data.without_path))}")
        files = ReviewFiles.of(out or Path("corrections.jsonl"))
        with (
            tempfile.TemporaryDirectory() as folder,
            sql_engine(recipe, WORKERS) as sql,
            server.listening(port) as listener,
        ):
            listed = examined(items.read_sources(recipe, Path(folder)))
            corrections = items.corrected(listed)
            doubted = [item for item in listed if item.doubts]
            if not doubted:
                say(f"nothing speaks against the gold SQL of {recipe.name}: {len(listed):,} looked at")
                return
            server.serve(Review(recipe.name, doubted, files, corrections), sql, listener, say)
        return
    path = Path(questions).expanduser()
    files = ReviewFiles.of(out or path.with_name(f"{path.name.removesuffix('.jsonl')}.reviewed.jsonl"))
    if path.resolve() in [place.resolve() for place in (files.out, files.rejected, files.decisions)]:
        raise DataError(f"the review would write over its questions, {path}", "Pass another --out FILE.jsonl.")
    listed, databases = items.read_file(path, database)
    address = databases[0].address if database is not None else None
    if files.out.parent.resolve() != path.parent.resolve() and address is None:
        # A line's own way to its database would lead elsewhere from another folder: all questions must have one.
        if len(databases) > 1:
            raise DataError("the questions name several databases", "Let --out name a file in their folder.")
        address = databases[0].address
    with named.sandbox(databases, Execution(), WORKERS) as sql, server.listening(port) as listener:
        server.serve(Review(path.name, examined(listed), files, None, address), sql, listener, say)


@data_app.command("add")
def data_add(
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

      sqltrain evaluate sql_trail --model CHECKPOINT include=local/spider_dev

      sqltrain data add own ~/sales.jsonl --name sales
    """
    added = add(name, path, lambda line: typer.echo(line, err=as_json), called=called)
    if as_json:
        emit(added)


def add(
    name: str, path: Path, tell: Callable[[str], None], local: Path = LOCAL, called: str | None = None
) -> dict[str, Any]:
    """Check a download and write `conf/local/<slot>.yaml`, which `include=local/<slot>` lays over any recipe; returns
    the findings as JSON values. The slot, and the benchmark's name in reports, is `called`, else `name`: slots of one
    kind lie side by side.
    """
    slot = called or name
    if not re.fullmatch(r"[\w-]+", slot):
        raise DataError(f"{slot!r} is no name for it", "A name has letters, digits, '_' and '-'.")
    # A folder that cannot be written is said before the questions are checked, which may take long.
    nearest = next(place for place in (local, *local.resolve().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise DataError(f"{local} cannot be written", "Run this in a folder of your own.")
    source, tree = downloads.download_source(name, path)
    for benchmark in tree["data"].get("test", []) if called is not None else []:
        benchmark["name"] = slot
    with tempfile.TemporaryDirectory() as folder, SqlEngine(Limits.of(Execution()), hidden=card.hidden_names()) as sql:
        health = downloads.examine_download(name, source, Path(folder), sql)
    published = downloads.BENCHMARKS[name]
    # Counts beside the authors' own, then what is bad and where to get it.
    tell(f"{name}: {health.usable:,} of {health.checked:,} questions can run, over {health.databases:,} databases")
    part = f" ({health.checked:,} of them looked at)" if health.checked != health.rows else ""
    whole = f"; the whole benchmark has {published.questions:,}" if published.questions is not None else ""
    tell(f"{health.rows:,} questions{part}{whole}")
    if published.databases is not None and health.checked == health.rows:
        tell(f"its authors count {published.databases:,} databases")
    for reason, number in health.bad.items():
        tell(f"  {number:,} with {reason.replace('_', ' ')}")
    for line in map(plain, health.shown):
        tell(f"    {line if len(line) <= LINE_CHARS else f'{line[: LINE_CHARS - 1]}…'}")
    is_short = published.questions is not None and health.rows < published.questions
    if published.get and (is_short or "missing_database" in health.bad):
        tell(f"what is missing: {published.get}")
    tell(f"licence: {published.licence}; it stays with the data, none of which is copied")
    tell(f"questions sha256 {health.questions_sha256}")
    tell(f"databases sha256 {health.databases_sha256 or 'not computed: more than 4 GiB'}")
    if not health.usable:
        raise DataError(f"none of the questions in {path} can run", published.hint)
    place = local / f"{slot}.yaml"
    old = place.read_text(encoding="utf-8").splitlines() if place.is_file() else []
    before = [line.removeprefix(MARK) for line in old if line.startswith(MARK)]
    if before and before[0] != health.questions_sha256:
        tell("the questions differ from those added before: the stages that read them will run again")
    head = f"# {name}, checked: {health.usable:,} of {health.rows:,} questions. Licence: {published.licence}.\n"
    marks = f"{MARK}{health.questions_sha256}\n# databases_sha256: {health.databases_sha256}\n"
    with writing_to(place):
        local.mkdir(parents=True, exist_ok=True)
        write_atomic(place, head + marks + yaml_text(tree))
    tell(f"written to {place}; use it with: include=local/{slot}")
    return {"name": name, "include": f"local/{slot}", "licence": published.licence, **dataclasses.asdict(health)}


def chosen(listed: str, tell: Callable[[str], None]) -> str:
    """The override that puts these benchmarks (names with commas between, or one of `downloads.LISTS`) in a recipe;
    those that were not added are named and left out.
    """
    names = downloads.LISTS.get(listed) or tuple(listed.split(","))
    here = [name for name in names if (recipes.LOCAL / f"{name}.yaml").is_file()]
    for name in names:
        if name not in here:
            tell(f"no data of {name}, which is left out; get it, and run: sqltrain data add {name} PATH")
    if not here:
        raise DataError(f"none of {', '.join(names)} is on this machine", "Run: sqltrain data add NAME PATH")
    return f"data.test=[{', '.join(f'local/{name}' for name in here)}]"
