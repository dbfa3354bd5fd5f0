"""The context of a stage: the recipe, its folder, its inputs' folders, and its progress."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import polars as pl

from pipelines.benchmarks.base import resolve_locations
from pipelines.core import frames
from pipelines.core.files import read_json, write_json
from pipelines.core.types import Example, Trajectory
from pipelines.endpoints.log import RESPONSES
from pipelines.recipe.config import Recipe

# The file that refers to a base model which is not ours to copy: by its path or hub name, or by the way from the
# stage's folder to a checkpoint of the store.
REFERENCE = "reference.json"


class Progress(Protocol):
    """The display of long work; the command line draws bars, a Prefect task updates an artifact."""

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage, or a part of it, starts: `total` units of work."""

    def advance(self, count: int, note: str = "") -> None:
        """`count` more units are done; `note` says how it goes, in a few words."""

    def say(self, text: str) -> None:
        """One plain line that a person should see."""

    def warn(self, text: str) -> None:
        """One plain line about something that goes wrong while the work goes on."""


class Silent:
    """Progress that is not shown."""

    def begin(self, *shown: object, **more: object) -> None: ...

    advance = say = warn = begin


@dataclass(frozen=True)
class Context:
    """One making of one stage."""

    stage: str
    recipe: Recipe
    folder: Path  # the work folder, with the leavings of a killed run.
    inputs: Mapping[str, Path]  # the finished folder of each stage that this one needs, by name.
    progress: Progress

    def metrics(self, numbers: Mapping[str, float]) -> None:
        """Write the stage's summary: a flat mapping of numbers without wall-clock times."""
        write_json(self.folder / "metrics.json", dict(numbers))

    @property
    def responses(self) -> Path:
        """The folder of the endpoints' answers: beside the stages of this store, for every recipe and run."""
        return self.folder.parent.parent / RESPONSES

    @property
    def checkpoint(self) -> str:
        """The newest model before this stage: a folder, or the name or path that the recipe gives as the base."""
        newest_first = ("grpo", "sft", "model")
        newest = next(name for name in newest_first if name in self.inputs)
        return checkpoint_of(self.inputs[newest])


def checkpoint_of(folder: Path) -> str:
    """The model of a `model`, `sft` or `grpo` stage."""
    return base_of(folder) or str(folder / "model")


def base_of(folder: Path) -> str | None:
    """The folder or hub name that a `model` stage refers to; None if it holds a model of its own."""
    reference = read_json(folder / REFERENCE)
    if not reference:
        return None
    source = str(reference["source"])
    if source.startswith(f"..{os.sep}"):
        return str((folder / source).resolve())
    return source


# The files that stages read of one another: examples by pool, trajectories.

TRAINED = ("sft", "rl")  # pools that are learned from
COSTS = "costs.json"  # the cost of endpoints' answers, by endpoint
QUARANTINE = "quarantine.jsonl"  # the rows that a stage set aside, with reasons
LEAKAGE = "leakage.json"  # the report of `curation/leakage.py` on each training pool, by the data stage


def examples(folder: Path, *pools: str) -> list[Example]:
    """The examples of the data stage in these pools ("sft", "rl", "dev", "test"), their databases resolved."""
    return list(each_example(folder, *pools))


def rows_of(folder: Path, *pools: str, part: int | None = None) -> pl.DataFrame:
    """The rows of the data stage's examples in these pools: each `id` once, and its `row`.

    Args:
        part: the index of a source in its pool, to read its rows alone.
    """
    data = pl.scan_parquet(folder / frames.DATA, glob=False)
    frame = data.with_row_index("row")
    frame = frame.filter(pl.col("pool").is_in(pools))
    if part is not None:
        frame = frame.filter(pl.col("part") == part)
    row = pl.col("row").cast(pl.Int64)
    ids_and_rows = frame.select("id", row)
    first_of_id = ids_and_rows.unique("id", keep="first", maintain_order=True)
    return first_of_id.collect()


def examples_at(folder: Path, rows: Sequence[int]) -> list[Example]:
    """The examples in these rows of the data stage's file, their databases resolved."""
    frame = frames.take(folder / frames.DATA, rows)
    as_stored = frames.from_frame(frame, Example)
    return resolve_locations(as_stored, folder)


def each_example(folder: Path, *pools: str) -> Iterator[Example]:
    """The examples of these pools, their databases resolved, of which few are in memory at a time."""
    in_pools = pl.col("pool").is_in(pools)
    for frame in frames.windows(folder / frames.DATA):
        as_stored = frames.from_frame(frame.filter(in_pools), Example)
        yield from resolve_locations(as_stored, folder)


def each_trajectory(path: Path, rows: pl.Series | None = None) -> Iterator[Trajectory]:
    """The trajectories of a file, or those in these rows, of which few are in memory at a time."""
    for frame in frames.windows(path, rows):
        yield from frames.from_frame(frame, Trajectory)


def trajectories(folder: Path) -> list[Trajectory]:
    """The trajectories that a stage wrote."""
    frame = frames.read(folder / frames.DATA)
    return frames.from_frame(frame, Trajectory)


@functools.cache
def single_thread() -> None:
    """One torch thread a process: processes of many threads slow one another down (docs/results/learning.md)."""
    import torch

    torch.set_num_threads(1)
