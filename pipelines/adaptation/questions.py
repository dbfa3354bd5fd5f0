"""The questions that a model is adapted with: a file of one's own, invented ones, or both, in three parts."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.benchmarks import own_questions
from pipelines.benchmarks.base import Questions
from pipelines.benchmarks.splitting import Part, Shares, cut_questions
from pipelines.core.errors import DataError
from pipelines.core.registry import READERS
from pipelines.core.rows import kind_of
from pipelines.recipe.config import Recipe, Source
from pipelines.sql.dialects.base import identity

SHARES = Shares(dev=0.1, test=0.3)
HELD_OUT = Shares(dev=0.25, test=0.75)  # shares of one's own questions, if as many invented ones are there to train on
PARTS: tuple[Part, ...] = ("train", "dev", "test")
Counts = Mapping[Part, int]


@dataclass(frozen=True)
class AdaptationQuestions:
    """The questions of an adaptation, by part."""

    source: Mapping[str, Any]  # a source of a recipe without its `split`: kind, path and options
    counts: Counts
    bad: int  # rows that cannot be used; the run gives the reason of each
    repeats: int  # invented questions that are left out, because one of one's own asks the same


def gather(own: Path | None, invented: Path | None, address: str) -> AdaptationQuestions:
    """Read one's own questions (JSON lines or CSV), invented ones (JSON lines), or both, and split them into parts.

    Args:
        address: the address of the database that all questions ask.
    """
    main_file = own or invented
    if main_file is None:
        hint = "Pass --questions FILE, or make some: sqltrain invent."
        raise DataError("no questions are named", hint)
    own_read = Questions([], [])
    if own is not None:
        own_read = _read_file(own, address)
    invented_read = Questions([], [])
    if invented is not None:
        invented_read = _read_file(invented, address)
    own_examples = list(own_read.examples)
    invented_examples = list(invented_read.examples)
    shares = SHARES
    if own_examples and len(invented_examples) >= len(own_examples):
        shares = HELD_OUT
    parts, repeats = cut_questions(own_examples, invented_examples, shares)
    options: dict[str, Any] = {"database": address, **shares._asdict()}
    if own is not None and invented is not None:
        options["invented"] = str(_absolute(invented))
    n_bad = len(own_read.quarantine) + len(invented_read.quarantine)
    return AdaptationQuestions(
        source={**_source_fields(main_file), "options": options},
        counts={part: len(parts[part]) for part in PARTS},
        bad=n_bad,
        repeats=len(repeats),
    )


def count_questions(recipe: Recipe) -> dict[Part, int]:
    """The number of questions in a recipe's parts; the first of several pools or benchmarks counts."""
    sources: tuple[tuple[Part, Source], ...] = (
        ("train", recipe.data.sft),
        ("dev", recipe.data.dev),
        ("test", recipe.benchmark),
    )
    counts: dict[Part, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, source in sources:
            reader = READERS[source.kind]
            questions = reader.read(source, recipe.seed, Path(folder))
            counts[part] = sum(1 for _ in questions.examples)
    return counts


def _absolute(file: Path) -> Path:
    return file.expanduser().resolve()


def _source_fields(file: Path) -> dict[str, str]:
    return {"kind": kind_of(file), "path": str(_absolute(file))}


def _read_file(file: Path, address: str) -> Questions:
    """All questions of a file, their gold SQL not yet run; an error if they ask another database, or none is left."""
    source = Source.model_validate({**_source_fields(file), "options": {"database": address}})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lazy = own_questions.read_own_questions(source, 0, root)
        questions = Questions(list(lazy.examples), lazy.quarantine)
        identities = set()
        for example in questions.examples:
            location = example.database.location
            is_server = "://" in location
            if not is_server:
                location = str(root / location)
            identities.add(identity(location))
    others = identities - {identity(address)}
    if others:
        raise DataError(f"{file} asks {len(others)} other databases, too", "Take their rows out.")
    if not questions.examples:
        reason = ""
        if questions.quarantine:
            first = questions.quarantine[0]
            reason = f"; {first.row}: {first.detail}"
        raise DataError(f"no question of {file} can be used{reason}", "Each has a question and its SQL.")
    return questions
