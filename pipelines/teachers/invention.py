"""Questions invented for a database, from the options of `sqltrain invent` to the files of questions."""

import asyncio
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.files import write_atomic, writing_to
from pipelines.core.store import Store
from pipelines.core.text_files import read_text
from pipelines.core.types import Example, Say, plain, shortened
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.log import RESPONSES
from pipelines.recipe.config import Recipe
from pipelines.sql.schema import Schema
from pipelines.teachers import invent
from pipelines.teachers.invent import Invented, Inventor, LoggedQuery

ENDPOINT = "endpoint:"
DEFAULT_COUNT = 100
MAX_QUERY_CHARS = 80  # characters of a query in a line for a person
SCHEMA_VALUES = 3  # example values of a column
OUT_HINT = "Pass --out FILE.jsonl."
LOG_HINT = "Pass a text file of SQL, each statement ended by ;."


@dataclass(frozen=True)
class InventionRequest:
    """The options of `sqltrain invent`; None for an option that was not passed."""

    database: str  # a file, an address, or a name of databases/
    model: str  # endpoint that writes SQL and questions
    checker: str | None  # endpoint that answers back
    count: int | None
    log: Path | None  # a team's own queries
    out: Path


@dataclass(frozen=True)
class Invention:
    """An invention whose log is read and whose endpoints answer, before anything is bought."""

    request: InventionRequest
    recipe: Recipe
    openable: OpenableDatabase
    queries: Sequence[LoggedQuery]
    count: int
    askers: Sequence[Asker]  # the teacher, and last the checker if it is another

    def make(self, advance: Callable[[int], None]) -> "InventedQuestions":
        """Invent the questions.

        Args:
            advance: called with 1 for each question that is kept.
        """
        with self.openable.sql(self.recipe.execution, self.recipe.hardware.sql_workers) as sql:
            schema = self.openable.schema(sql, values=SCHEMA_VALUES)
            inventor = Inventor(
                database=self.openable.database,
                schema=schema,
                sql=sql,
                teacher=self.askers[0],
                checker=self.askers[-1],
                seed=self.recipe.seed,
                queries=[query.sql for query in self.queries],
            )
            invented = inventor.make(self.count, advance)
        return InventedQuestions(self, invented, schema)


@dataclass(frozen=True)
class InventedQuestions:
    """The questions that were invented."""

    invention: Invention
    invented: Invented
    schema: Schema

    @property
    def doubted_file(self) -> Path:
        """The file of the questions that the checker answers otherwise."""
        out = self.invention.request.out
        return out.with_name(f"{out.name.removesuffix('.jsonl')}.doubted.jsonl")

    @property
    def counts(self) -> Mapping[str, float]:
        """Drafts by their end."""
        counts = sorted(self.invented.counts.items())
        return {reason: float(number) for reason, number in counts}

    @functools.cached_property
    def coverage(self) -> invent.Coverage:
        """The parts of the schema that the questions use."""
        return invent.schema_coverage(self.invented.examples, self.schema)

    def write(self) -> None:
        """Write the files of questions; a DataError if no question was made."""
        write_atomic(self.doubted_file, self._text(self.invented.doubted))
        if not self.invented.examples:
            message = f"no question could be made of {self.invention.request.database}: {self._reasons()}"
            raise DataError(message, "Try another model, or more questions.")
        write_atomic(self.invention.request.out, self._text(self.invented.examples))

    def lines(self) -> Iterator[str]:
        """The result for a person: counts, lost queries of the log, coverage, files and bills."""
        out = self.invention.request.out
        kept = len(self.invented.examples)
        yield f"{kept} of {self.invention.count} questions in {out} (use: data.sft.kind=jsonl data.sft.path={out})"
        yield f"queries: {self._reasons()}"
        log = self.invention.request.log
        for reason, numbers in self._lost_lines().items():
            listed = ", ".join(map(str, numbers))
            yield f"{log}: {reason} in the queries of the lines {listed}"
        yield from invent.coverage_lines(self.coverage)
        yield f"look through them with: sqltrain review {out}"
        doubted = len(self.invented.doubted)
        yield f"{doubted} more, which the checker answers with another result, are in {self.doubted_file}"
        for asker in self.invention.askers:
            yield asker.bill()

    def _reasons(self) -> str:
        counts = self.invented.counts.most_common()
        texts = [f"{reason} {number}" for reason, number in counts if number]
        return ", ".join(texts)

    def _lost_lines(self) -> dict[str, list[int]]:
        """Lines of the log whose query came to nothing, by the reason; {} without a log."""
        lines: dict[str, list[int]] = {}
        if self.invention.queries:
            for number, reason in self.invented.lost:
                query = self.invention.queries[number]
                lines.setdefault(reason, []).append(query.line)
        return lines

    def _text(self, examples: Sequence[Example]) -> str:
        """Lines that the JSONL reader takes, with the teacher's and the checker's part; no password is in them."""
        lines = []
        for example in examples:
            row = {
                "id": example.id,
                "question": example.question,
                "database": self.invention.openable.address,
                "sql": example.gold_sql,
                "hardness": example.hardness,
                **example.meta,
            }
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        return "".join(lines)


def prepare_invention(request: InventionRequest, recipe: Recipe, store: Store, say: Say) -> Invention:
    """Read the log, look whether the file can be written, and reach the endpoints.

    Args:
        say: takes lines about statements of the log that are left out.
    """
    openable = named.find(request.database)
    queries: Sequence[LoggedQuery] = ()
    if request.log is not None:
        queries = _read_log(request.log, openable, say)
    _require_writable_file(request.out)
    names = [request.model, request.checker or request.model]
    endpoints = [name.removeprefix(ENDPOINT) for name in names]
    responses = store.root / RESPONSES
    askers = [Asker.named(name, responses) for name in dict.fromkeys(endpoints)]
    asyncio.run(_require_reachable(askers))
    count = request.count or len(queries) or DEFAULT_COUNT
    return Invention(request, recipe, openable, queries, count, askers)


def _read_log(log: Path, openable: OpenableDatabase, say: Say) -> Sequence[LoggedQuery]:
    """The queries of a log, each once; a line tells of each that is left out."""
    text = read_text(log, LOG_HINT)
    read = invent.read_log(text, openable.database.engine)
    for query in read.unreadable:
        reason = "a quote or a comment is never closed"
        beginning = _beginning_of_query(query.sql)
        say(f"{log}, line {query.line} is left out, for {reason}: {beginning}")
    if read.repeats:
        say(f"{log} has {read.repeats} statements more than once; each is tried once")
    if not read.queries:
        raise DataError(f"{log} has no statement", LOG_HINT)
    return read.queries


def _beginning_of_query(sql: str) -> str:
    """The beginning of a query, in one line."""
    one_line = " ".join(sql.split())
    return shortened(plain(one_line), MAX_QUERY_CHARS)


def _require_writable_file(out: Path) -> None:
    with writing_to(out, OUT_HINT):
        out.parent.mkdir(parents=True, exist_ok=True)
    if out.is_dir():
        raise DataError(f"{out} cannot be written: it is a folder", OUT_HINT)
    if not os.access(out.parent, os.W_OK):
        raise DataError(f"{out} cannot be written: no permission", OUT_HINT)


async def _require_reachable(askers: Sequence[Asker]) -> None:
    """Connect to each endpoint: a server that is down is reported at once, and not after `patience_s`."""
    for asker in askers:
        try:
            await asker.connection.reach()
        finally:
            await asker.connection.close()
