"""Questions to be looked through: those of a file, or those of a recipe's sources with what speaks against them."""

import dataclasses
import hashlib
import json
import os.path
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base, corrections
from pipelines.core.errors import DataError
from pipelines.core.files import read_lines
from pipelines.core.types import DATABASE, SQL, BadRow, Example, text_field
from pipelines.databases import named
from pipelines.databases.named import OpenableDatabase
from pipelines.recipe.config import Recipe, Source
from pipelines.sql import health
from pipelines.sql.engine import SqlEngine

TOLD = ("style", "teacher", "checker", "hardness")  # of a row, shown beside its question
HINT = 'Each line is {"question": "...", "database": "...", "sql": "SELECT ..."}.'


@dataclasses.dataclass(frozen=True)
class BlindAnswer:
    """An answer to the question by somebody who had not seen its SQL, and whether it gives the same result."""

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
    # its line of the file; {} where it is of a benchmark.
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    votes: tuple[BlindAnswer, ...] = ()  # as the file has them.
    doubts: tuple[str, ...] = ()  # what `sqltrain check --data` finds, a line each.

    @property
    def is_doubted(self) -> bool:
        """Whether something speaks against it."""
        return bool(self.doubts) or not self.example.gold_sql or not all(vote.agrees for vote in self.votes)


def of_file(path: Path, database: str | None) -> tuple[list[Item], list[OpenableDatabase]]:
    """The questions of a JSONL file, in order, and their databases.

    Args:
        database: of all of them: a file, an address, or a name of databases/; None for what each line names.
    """
    databases: dict[str, OpenableDatabase] = {}
    items = []
    for number, row in read_lines(path, HINT):
        try:
            name = database or text_field(row, *DATABASE)
            where = databases.get(name) or named.find(name if database else _place(name, path.parent))
            items.append(_item(row, where, f"{path.stem}_{number}"))
        except BadRow as bad:
            raise DataError(f"{path}, line {number}: {bad.detail}", HINT) from None
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error.message}", error.hint) from None
        databases[name] = where
    if not items:
        raise DataError(f"{path} holds no questions", HINT)
    return list(_apart(items)), list(databases.values())


def _apart(items: Iterable[Item]) -> Iterator[Item]:
    """The items, each with a key of its own."""
    seen: Counter[str] = Counter()
    for item in items:
        seen[item.key] += 1
        number = seen[item.key]
        yield item if number == 1 else dataclasses.replace(item, key=f"{item.key}-{number}")


def _place(name: str, folder: Path) -> str:
    """A file's name relative to the file that names it; an address, or a name of databases/, as it is."""
    file = folder / Path(name).expanduser()
    return str(file) if "://" not in name and file.is_file() else name


def _item(row: Any, where: OpenableDatabase, name: str) -> Item:
    id = row.get("id") if isinstance(row, dict) else None
    sql, evidence = text_field(row, *SQL, required=False), text_field(row, "evidence", required=False)
    question = text_field(row, "question")
    example = Example(str(id) if id else name, question, where.database, sql, evidence, source="review")
    return Item(_key(example, where.address), example, row, tuple(_votes(row.get("votes"))))


def _votes(value: Any) -> Iterable[BlindAnswer]:
    for row in value if isinstance(value, list) else ():
        if isinstance(row, dict) and isinstance(row.get("sql"), str):
            yield BlindAnswer(str(row.get("by")), row["sql"], row.get("agrees") is True)


def _key(example: Example, address: str) -> str:
    texts = [address, example.question, example.gold_sql, example.evidence]
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def sources(recipe: Recipe) -> list[Source]:
    """All sources of a recipe's questions, each once."""
    data = recipe.data
    sources = [source for source in (data.sft, *data.rl, data.dev, *data.test) if source is not None]
    return [source for place, source in enumerate(sources) if source not in sources[:place]]


def of_recipe(recipe: Recipe, folder: Path) -> list[Item]:
    """All questions of a recipe's sources, those whose gold SQL fails among them; one that stands twice once.

    Args:
        folder: where readers put or make databases.
    """
    pools = [base.read(source, recipe.seed, folder).examples for source in sources(recipe)]
    # By more than the id, which two sources may give to two questions.
    distinct = {_published(example): example for examples in pools for example in base.resolve(examples, folder)}
    return list(_apart(Item(_key(example, example.database.id), example) for example in distinct.values()))


def _published(example: Example) -> tuple[str, ...]:
    """What tells a question from others, whatever a source's corrections have made of it."""
    texts = {"question": example.question, "sql": example.gold_sql, **example.meta.get(corrections.META, {})}
    return example.id, texts["question"], texts["sql"], os.path.realpath(example.database.location)


def examined(items: Sequence[Item], sql: SqlEngine) -> list[Item]:
    """The items with what speaks against their SQL."""
    with_sql = [item for item in items if item.example.gold_sql]
    doubts: dict[str, list[str]] = {}
    for finding in health.examine([item.example for item in with_sql], sql):
        key = with_sql[finding.place].key
        doubts.setdefault(key, []).append(f"{finding.reason.replace('_', ' ')}: {finding.detail}")
    return [dataclasses.replace(item, doubts=tuple(doubts.get(item.key, ()))) for item in items]


def hold_ids_apart(items: Iterable[Item]) -> None:
    """A file of corrections names questions by id: what may get an entry needs an id of its own."""
    ids = Counter(item.example.id for item in items if item.doubts or corrections.META in item.example.meta)
    shared = [id for id, count in ids.items() if count > 1]
    if shared:
        raise DataError(
            f"{len(shared)} ids are of several questions that need corrections; the first: {shared[0]!r}",
            "Give each question of the recipe's sources an id of its own: a file of corrections names them by it.",
        )


def corrected(items: Iterable[Item]) -> dict[str, dict[str, str]]:
    """Entries of the corrections that the sources have already, by the id of their question."""
    entries = {}
    for example in (item.example for item in items):
        published = example.meta.get(corrections.META)
        if published:
            now = {"sql": example.gold_sql, "question": example.question, "evidence": example.evidence}
            texts = {name: text for name, text in now.items() if name == "sql" or name in published}
            entries[example.id] = {"id": example.id, **texts, "reason": published["reason"]}
    return entries
