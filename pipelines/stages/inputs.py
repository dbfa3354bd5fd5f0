"""What stages read of one another: examples by pool, trajectories, schemas, the SQL engine of a recipe."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipelines import frames
from pipelines.data.base import resolve
from pipelines.frames import DATA
from pipelines.types import Example, Trajectory

if TYPE_CHECKING:
    pass

COSTS = "costs.json"  # what endpoints' answers cost, by endpoint
LEAKAGE = "leakage.json"  # of the data stage: what `curation/leakage.py` reports of each training pool


def examples(folder: Path, *pools: str, part: int | None = None) -> list[Example]:
    """The examples of the data stage in these pools ("sft", "rl", "dev", "test"), their databases resolved.

    Args:
        part: only those of the source at this place of its pool.
    """
    frame = frames.read(folder / DATA).filter(pl.col("pool").is_in(pools))
    if part is not None:
        frame = frame.filter(pl.col("part") == part)
    return resolve(frames.from_frame(frame, Example), folder)


def rows_of(folder: Path, *pools: str, part: int | None = None) -> pl.DataFrame:
    """Where the data stage wrote the examples of these pools: their `id`, each once, and their `row`.

    Args:
        part: only those of the source at this place of its pool.
    """
    frame = pl.scan_parquet(folder / DATA, glob=False).with_row_index("row").filter(pl.col("pool").is_in(pools))
    if part is not None:
        frame = frame.filter(pl.col("part") == part)
    places = frame.select("id", pl.col("row").cast(pl.Int64))
    return places.unique("id", keep="first", maintain_order=True).collect()


def examples_at(folder: Path, rows: Sequence[int]) -> list[Example]:
    """The examples in these rows of the data stage's file, their databases resolved."""
    return resolve(frames.from_frame(frames.take(folder / DATA, rows), Example), folder)


def each_example(folder: Path, pool: str) -> Iterator[Example]:
    """The examples of a pool, their databases resolved, of which few are in memory at a time."""
    for frame in frames.windows(folder / DATA):
        yield from resolve(frames.from_frame(frame.filter(pl.col("pool") == pool), Example), folder)


def trajectories(folder: Path) -> list[Trajectory]:
    """The trajectories that a stage wrote."""
    return frames.from_frame(frames.read(folder / DATA), Trajectory)


def write_lines(path: Path, rows: Iterable[Any]) -> int:
    """Write JSON lines and return how many."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json_line(row))
            count += 1
    return count


def json_line(row: Any) -> str:
    """A line of a JSONL file."""
    return json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n"


@functools.cache
def single_thread() -> None:
    """One torch thread a process: several processes of many threads get in each other's way (docs/learning.md)."""
    import torch

    torch.set_num_threads(1)
