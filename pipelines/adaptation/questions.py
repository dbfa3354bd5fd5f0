"""The questions that a model is adapted with: a file of one's own, invented ones, or both, and how they are parted."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.benchmarks import own_questions
from pipelines.benchmarks.base import Questions as Read
from pipelines.benchmarks.splitting import Part, Shares, cut_questions
from pipelines.core.errors import DataError
from pipelines.core.registry import READERS
from pipelines.core.rows import kind_of
from pipelines.recipe.config import Recipe, Source
from pipelines.sql.dialects.base import identity

SHARES = Shares(dev=0.1, test=0.3)
HELD_OUT = Shares(dev=0.25, test=0.75)  # of one's own questions, if there are as many invented ones to train on
PARTS: tuple[Part, ...] = ("train", "dev", "test")


@dataclass(frozen=True)
class AdaptationQuestions:
    """The questions of an adaptation, by part."""

    source: Mapping[str, Any]  # a source of a recipe without its `split`: kind, path and options
    counts: Mapping[Part, int]
    bad: int  # rows that cannot be used; the run gives the reason of each
    repeats: int  # invented questions that are left out, for one of one's own asks the same


def gather(own: Path | None, invented: Path | None, address: str) -> AdaptationQuestions:
    """Read one's own questions (JSON lines or CSV), invented ones (JSON lines), or both, and part them."""
    files = [file for file in (own, invented) if file is not None]
    if not files:
        raise DataError("no questions are named", "Pass --questions FILE, or make some: sqltrain invent.")
    mine, invented_file = (None if file is None else _whole(file, address) for file in (own, invented))
    own_examples, more = ([] if loaded is None else loaded.examples for loaded in (mine, invented_file))
    shares = HELD_OUT if own_examples and len(more) >= len(own_examples) else SHARES
    parts, repeats = cut_questions(own_examples, more, shares)
    options: dict[str, Any] = {"database": address, **shares._asdict()}
    if own is not None and invented is not None:
        options["invented"] = _place(invented)["path"]
    return AdaptationQuestions(
        {**_place(files[0]), "options": options},
        {part: len(parts[part]) for part in PARTS},
        bad=sum(len(loaded.quarantine) for loaded in (mine, invented_file) if loaded is not None),
        repeats=len(repeats),
    )


def counts_of(recipe: Recipe) -> dict[Part, int]:
    """The questions of a recipe's parts, whatever it reads; of several pools or benchmarks, of the first."""
    sources: dict[Part, Source] = {"train": recipe.data.sft, "dev": recipe.data.dev, "test": recipe.benchmark}
    with tempfile.TemporaryDirectory() as folder:
        return {
            part: sum(1 for _ in READERS[source.kind].read(source, recipe.seed, Path(folder)).examples)
            for part, source in sources.items()
        }


def _place(file: Path) -> dict[str, str]:
    return {"kind": kind_of(file), "path": str(file.expanduser().resolve())}


def _whole(file: Path, address: str) -> Read:
    """The questions of a file, their gold SQL not yet looked at."""
    source = Source.model_validate({**_place(file), "options": {"database": address}})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lazy = own_questions.read_own_questions(source, 0, root)
        loaded = Read(list(lazy.examples), lazy.quarantine)
        places = {example.database.location for example in loaded.examples}
        addresses = {identity(place if "://" in place else str(root / place)) for place in places}
    if others := len(addresses - {identity(address)}):
        raise DataError(f"{file} asks {others} other databases, too", "Take their rows out.")
    if not loaded.examples:
        first = "".join(f"; {row.row}: {row.detail}" for row in loaded.quarantine[:1])
        raise DataError(f"no question of {file} can be used{first}", "Each has a question and its SQL.")
    return loaded
