"""The questions of a review: those of a file, or those of a recipe's sources, with doubts about their SQL."""

import dataclasses
import hashlib
import json
import os.path
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.core.errors import DataError
from pipelines.core.rows import good_rows
from pipelines.core.types import DATABASE, SQL, BadRow, Example, text_field
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.recipe.config import Recipe
from pipelines.sql import health
from pipelines.sql.engine import SqlEngine

SHOWN_FIELDS = ("style", "teacher", "checker", "hardness")  # of a row, shown beside its question
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

    # a digest of its texts and its database: a decision holds for them, whatever else the file says. A second line with
    # the same ones has a number behind it.
    key: str
    example: Example
    # its line of the file; {} if it is of a benchmark.
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    votes: tuple[BlindAnswer, ...] = ()  # as the file has them.
    # votes that cannot be read, and the findings of `sqltrain check --data`, a line each.
    doubts: tuple[str, ...] = ()

    @property
    def is_doubted(self) -> bool:
        """Whether it has a doubt, a vote against it, or no SQL."""
        return bool(self.doubts) or not self.example.gold_sql or not all(vote.agrees for vote in self.votes)

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
    texts = [address, example.question, example.gold_sql, example.evidence]
    key = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    seen[key] += 1
    return Item(key if seen[key] == 1 else f"{key}-{seen[key]}", example, row or {}, votes)


def read_file(path: Path, database: str | None) -> tuple[list[Item], list[OpenableDatabase]]:
    """The questions of a JSONL or CSV file, in order, and their databases; `database` is that of all of them (a file,
    an address, or a name of databases/), or None to take each line's own.
    """
    databases: dict[str, OpenableDatabase] = {}
    items: list[Item] = []
    seen: Counter[str] = Counter()
    needed = [("question",), SQL, *([DATABASE] if database is None else [])]
    for line, number, row in good_rows(path, needed, HINT):
        try:
            name = database or text_field(row, *DATABASE)
            if name not in databases:
                # A line's file is relative to the file of the questions.
                file = path.parent / Path(name).expanduser()
                is_file = database is None and "://" not in name and file.is_file()
                databases[name] = named.find(str(file) if is_file else name)
            sql, evidence = text_field(row, *SQL, required=False), text_field(row, "evidence", required=False)
            question, id = text_field(row, "question"), row.get("id")
        except BadRow as bad:
            raise DataError(f"{path}, line {line}: {bad.detail}", HINT) from None
        except DataError as error:
            raise DataError(f"{path}, line {line}: {error.message}", error.hint) from None
        id = str(id or f"{path.stem}_{number}")
        example = Example(id, question, databases[name].database, sql, evidence, source="review")
        answers = []
        doubts = []
        # A number or a text under that name is no vote but another column of the user's own.
        votes = row.get("votes")
        if isinstance(votes, dict):
            votes = [votes]
        for place, vote in enumerate(votes if isinstance(votes, list) else (), 1):
            if isinstance(vote, dict) and isinstance(vote.get("sql"), str):
                answers.append(BlindAnswer(str(vote.get("by")), vote["sql"], vote.get("agrees") is True))
            else:
                doubts.append(f"vote {place} of its line cannot be read: it is no object with sql")
        item = item_of(example, databases[name].address, seen, row, tuple(answers))
        items.append(dataclasses.replace(item, doubts=tuple(doubts)))
    if not items:
        raise DataError(f"{path} holds no questions", HINT)
    return items, list(databases.values())


def read_sources(recipe: Recipe, folder: Path) -> list[Item]:
    """All questions of a recipe's sources that have a path, those whose gold SQL fails among them; a repeated one once.
    Readers put or make databases in `folder`.
    """
    everything = [*recipe.data.sources.values()]
    sources = [source for source in everything if not source.lacks_path]
    if not sources:
        sources = everything  # the first reader says which path to set
    distinct: dict[tuple[str, ...], Example] = {}
    for place, source in enumerate(sources):
        if source in sources[:place]:
            continue
        for example in base.resolve(base.read(source, recipe.seed, folder).examples, folder):
            # By more than the id, which two sources may give to two questions; by the texts before any correction.
            published = example.annotations.corrected or {}
            texts = {"question": example.question, "sql": example.gold_sql, **published}
            path = os.path.realpath(example.database.location)
            distinct[example.id, texts["question"], texts["sql"], path] = example
    seen: Counter[str] = Counter()
    return [item_of(example, example.database.id, seen) for example in distinct.values()]


def with_doubts(items: Sequence[Item], sql: SqlEngine) -> list[Item]:
    """The items with the doubts about their SQL beside those that they have."""
    with_sql = [item for item in items if item.example.gold_sql]
    doubts: dict[str, list[str]] = {}
    for finding in health.examine([item.example for item in with_sql], sql):
        key = with_sql[finding.place].key
        doubts.setdefault(key, []).append(f"{finding.reason.replace('_', ' ')}: {finding.detail}")
    return [dataclasses.replace(item, doubts=(*item.doubts, *doubts.get(item.key, ()))) for item in items]


def corrected(items: Iterable[Item]) -> dict[str, dict[str, str]]:
    """The sources' corrections so far, by the id of the question.

    A file of corrections names questions by id, so each question that needs a correction must have an id of its own.
    """
    entries = {}
    ids: Counter[str] = Counter()
    for item in items:
        example = item.example
        published = example.annotations.corrected
        ids[example.id] += bool(item.doubts or published is not None)
        if published:
            texts = {name: text for name, text in item.texts.items() if name == "sql" or name in published}
            entries[example.id] = {"id": example.id, **texts, "reason": published["reason"]}
    shared = [id for id, count in ids.items() if count > 1]
    if shared:
        raise DataError(
            f"{len(shared)} ids are of several questions that need corrections; the first: {shared[0]!r}",
            "Give each question of the recipe's sources an id of its own: a file of corrections names them by it.",
        )
    return entries
