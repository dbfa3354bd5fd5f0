"""The questions of a review: those of a file, or those of a recipe's sources, with doubts about their SQL."""

import dataclasses
import hashlib
import json
import logging
import os.path
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base, corrections, own_questions
from pipelines.core.errors import DataError
from pipelines.core.rows import good_rows
from pipelines.core.types import DATABASE, SQL, BadRow, Example, history_field, text_field
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.recipe.config import Recipe, Source
from pipelines.sql import health
from pipelines.sql.engine import SqlEngine

log = logging.getLogger(__name__)
SHOWN_FIELDS = ("style", "teacher", "checker", "hardness")  # fields of a row that the page has beside its question
HINT = 'Each line is {"question": "...", "database": "...", "sql": "SELECT ..."}.'


@dataclasses.dataclass(frozen=True)
class BlindAnswer:
    """An answer to the question, written without seeing its SQL, and whether it gives the same result."""

    by: str
    sql: str
    agrees: bool


@dataclasses.dataclass(frozen=True)
class Item:
    """A question with its SQL."""

    # key: a digest of its texts, of the questions before it and of its database; a decision holds for them, whatever
    # else the file says. A second line with the same texts has a number behind its digest.
    key: str
    example: Example
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its line of the file; {} for a benchmark's.
    votes: tuple[BlindAnswer, ...] = ()  # the votes of its line.
    doubts: tuple[str, ...] = ()  # a line for each unreadable vote and each finding of `sqltrain check --data`.

    @property
    def is_doubted(self) -> bool:
        """Whether it has a doubt, a vote against it, or no SQL."""
        has_dissent = not all(vote.agrees for vote in self.votes)
        lacks_sql = not self.example.gold_sql
        return bool(self.doubts) or lacks_sql or has_dissent

    @property
    def texts(self) -> dict[str, str]:
        """Its texts that a review may mend, by field."""
        example = self.example
        return {"question": example.question, "sql": example.gold_sql, "evidence": example.evidence}


def item_of(
    example: Example,
    address: str,
    seen: Counter[str],
    row: Mapping[str, Any] | None = None,
    votes: tuple[BlindAnswer, ...] = (),
) -> Item:
    """An item with a key of its own; `seen` counts the items of each digest so far."""
    earlier = example.prompt_context.history
    texts = json.dumps([address, example.question, example.gold_sql, example.evidence, *earlier])
    full_digest = hashlib.sha256(texts.encode()).hexdigest()
    digest = full_digest[:16]
    seen[digest] += 1
    key = digest
    if seen[digest] > 1:
        key = f"{digest}-{seen[digest]}"
    return Item(key, example, row or {}, votes)


def read_file(path: Path, database: str | None) -> tuple[list[Item], list[OpenableDatabase]]:
    """The questions of a JSONL or CSV file, in order, and their databases.

    Args:
        database: the database of all questions (a file, an address, or a name of databases/); None to take each line's.
    """
    databases: dict[str, OpenableDatabase] = {}
    items: list[Item] = []
    seen: Counter[str] = Counter()
    needed = [("question",), SQL]
    if database is None:
        needed.append(DATABASE)
    for line, number, row in good_rows(path, needed, HINT):
        try:
            name = database or _database_of_line(row, path)
            if name not in databases:
                databases[name] = named.find(name)
            sql = text_field(row, *SQL, required=False)
            evidence = text_field(row, "evidence", required=False)
            question = text_field(row, "question")
            history = history_field(row)
            example_id = own_questions.id_of(row) or f"{path.stem}_{number}"
        except BadRow as bad:
            raise DataError(f"{path}, line {line}: {bad.detail}", HINT) from None
        except DataError as error:
            raise DataError(f"{path}, line {line}: {error.message}", error.hint) from None
        openable = databases[name]
        example = Example(example_id, question, openable.database, sql, evidence, source="review")
        if history:
            example = example.with_meta(history=history)
        votes, doubts = _read_votes(row.get("votes"))
        without_doubts = item_of(example, openable.address, seen, row, tuple(votes))
        item = dataclasses.replace(without_doubts, doubts=tuple(doubts))
        items.append(item)
    if not items:
        raise DataError(f"{path} holds no questions", HINT)
    return items, list(databases.values())


def _database_of_line(row: Mapping[str, Any], path: Path) -> str:
    """A line's database; a file is relative to the file of the questions."""
    name = text_field(row, *DATABASE)
    if "://" in name:
        return name
    file = path.parent / Path(name).expanduser()
    if file.is_file():
        return str(file)
    return name


def _read_votes(value: Any) -> tuple[list[BlindAnswer], list[str]]:
    """The votes of a line, and a doubt for each that cannot be read.

    A number or a text in their place is not a vote but another column of the user's own.
    """
    votes: list[BlindAnswer] = []
    doubts: list[str] = []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return votes, doubts
    for number, vote in enumerate(value, 1):
        if isinstance(vote, dict) and isinstance(vote.get("sql"), str):
            author = str(vote.get("by"))
            agrees = vote.get("agrees") is True
            votes.append(BlindAnswer(author, vote["sql"], agrees))
        else:
            doubts.append(f"vote {number} of its line cannot be read: it is no object with sql")
    return votes, doubts


def read_sources(recipe: Recipe, folder: Path) -> list[Item]:
    """All questions of a recipe's sources that have a path, also those whose gold SQL fails; a repeated one once.

    A warning counts the rows that a reader set aside: they are no questions to review. Readers put or make databases in
    `folder`.
    """
    sources = _sources(recipe)
    distinct: dict[tuple[str, ...], Example] = {}
    for number, source in enumerate(sources):
        if source in sources[:number]:
            continue
        loaded = base.read(source, recipe.seed, folder)
        rejected = [row for row in loaded.quarantine if row.reason != base.UNUSED_CORRECTION]
        if rejected:
            _warn_of_rejected(source, rejected)
        for example in base.resolve_locations(loaded.examples, folder):
            distinct[_identity(example)] = example
    seen: Counter[str] = Counter()
    items = []
    for example in distinct.values():
        item = item_of(example, example.database.id, seen)
        items.append(item)
    return items


def _warn_of_rejected(source: Source, rejected: Sequence[base.Rejected]) -> None:
    first = rejected[0]
    log.warning(
        "%s: %d rows were set aside, and this review has none of them; the first: %s: %s (%s)",
        source.path or source.kind,
        len(rejected),
        first.row,
        first.reason,
        first.detail,
    )


def _sources(recipe: Recipe) -> list[Source]:
    """The sources that have a path; if none has, all: the first reader says which path to set."""
    sources = list(recipe.data.sources.values())
    with_path = [source for source in sources if not source.lacks_path]
    if with_path:
        return with_path
    return sources


def _identity(example: Example) -> tuple[str, ...]:
    """What makes a published question: two sources may give one id to two questions, so its texts count too.

    They count as they were before any correction.
    """
    published = example.annotations.corrected or {}
    question = published.get("question", example.question)
    sql = published.get("sql", example.gold_sql)
    path = os.path.realpath(example.database.location)
    return example.id, question, sql, path


def with_doubts(items: Sequence[Item], sql: SqlEngine) -> list[Item]:
    """The items with the doubts about their SQL added to those that they have."""
    with_sql = [item for item in items if item.example.gold_sql]
    examples = [item.example for item in with_sql]
    doubts: dict[str, list[str]] = {}
    for finding in health.examine_gold(examples, sql):
        key = with_sql[finding.place].key
        reason = finding.reason.replace("_", " ")
        doubts_of_item = doubts.setdefault(key, [])
        doubts_of_item.append(f"{reason}: {finding.detail}")
    items_with_doubts = []
    for item in items:
        new_doubts = doubts.get(item.key, [])
        all_doubts = (*item.doubts, *new_doubts)
        items_with_doubts.append(dataclasses.replace(item, doubts=all_doubts))
    return items_with_doubts


def corrected(recipe: Recipe, items: Iterable[Item]) -> dict[str, dict[str, Any]]:
    """The corrections of a recipe's sources so far, by the names of their questions, whether among the items or not.

    A file of corrections names questions by id, so each question that needs a correction must have an id of its own.
    """
    ids: Counter[str] = Counter()
    for item in items:
        is_corrected = item.example.annotations.corrected is not None
        if item.doubts or is_corrected:
            ids[item.example.id] += 1
    ambiguous = [id for id, count in ids.items() if count > 1]
    if ambiguous:
        raise DataError(
            f"{len(ambiguous)} ids are of several questions that need corrections; the first: {ambiguous[0]!r}",
            "Give each question of the recipe's sources an id of its own: a file of corrections names them by it.",
        )
    rows: dict[str, dict[str, Any]] = {}
    for source in _sources(recipe):
        if source.corrections is not None:
            file = Path(source.corrections).expanduser()
            rows |= corrections.rows_by_name(file)
    return rows
