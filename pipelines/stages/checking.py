"""The data stage's long work: each source is read once into the work folder, and its gold SQL is run in shards.

Between two kills nothing is done twice: a source that was read lies beside the shards, and so does each finished shard.
A source goes by a window at a time. Of all its rows at once only the ids are held while they are compared, and after
that the row number and the level of what is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.config import Recipe, Source
from pipelines.data import base
from pipelines.databases.of_recipe import noted, sql_engine
from pipelines.stages.context import Context
from pipelines.stages.inputs import write_lines
from pipelines.stages.shards import Run, Shards
from pipelines.store import SHARDS, read_json, write_json
from pipelines.types import Example

BATCH = 1024  # gold queries between two moves of the bar
TRAINING = ("sft", "rl")


@dataclasses.dataclass(frozen=True)
class Part:
    """One source as it was read.

    Attributes:
        pool, part: what the source is of the recipe's data.
        path: its examples, a Parquet file; not there where it has none.
        rows: how many it has.
        rejected: what is no example, with its reason.
    """

    pool: str
    part: int
    kind: str
    path: Path
    rows: int
    rejected: tuple[base.Rejected, ...]


@dataclasses.dataclass
class Checked:
    """A source after its gold SQL was run: row numbers of its file that are kept, and all that was rejected.

    Attributes:
        levels: the hardness of each row that is kept.
    """

    kept: array[int]
    levels: list[str]
    rejected: list[base.Rejected]


def read(ctx: Context, number: int, pool: str, part: int, source: Source) -> Part:
    """Read a source, unless a killed run has; raises what `base.read` does.

    Args:
        number: of the source among the stage's.
    """
    folder = ctx.folder / SHARDS
    folder.mkdir(exist_ok=True)
    path, note = folder / f"source-{number}.parquet", folder / f"source-{number}.json"
    if not note.is_file():
        write_json(note, _read(ctx, path, pool, part, source))
    facts = read_json(note)
    rejected_rows = tuple(base.Rejected(*row) for row in facts["rejected"])
    return Part(pool, part, source.kind, path, facts["rows"], rejected_rows)


def _read(ctx: Context, path: Path, pool: str, part: int, source: Source) -> dict[str, Any]:
    """Write the examples of a source that its levels and count choose; how many they are, and what was rejected."""
    loaded = base.load(source, ctx.recipe.seed, ctx.folder)
    examples, writer, rows = iter(loaded.examples), frames.Writer(path, path.parent), 0
    while window := list(itertools.islice(examples, frames.WINDOW)):
        if source.hardness is not None:
            window = base.with_hardness(window)
        frame = frames.to_frame(noted(window, ctx.folder), extra=[{"pool": pool, "part": part}] * len(window))
        writer.add(frame.with_columns(pl.col(pl.Null).cast(pl.String)))  # all windows have the same columns
        rows += len(window)
        ctx.progress.advance(0, f"{pool}: {rows} questions")
    empty = pl.Series(dtype=pl.String)
    if rows:
        writer.close()
    names = frames.read(path, "id", "hardness") if rows else pl.DataFrame({"id": empty, "hardness": empty})
    chosen, rejected = base.choose(names["id"], names["hardness"], loaded.quarantine, source, ctx.recipe.seed)
    if len(chosen) < rows:
        frames.keep(path, chosen)
    return {"rows": len(chosen), "rejected": [dataclasses.astuple(row) for row in rejected]}


def check(ctx: Context, parts: Sequence[Part]) -> list[Checked]:
    """Run the gold SQL of all sources, in shards that are shared among processes or a cluster."""
    total = sum(part.rows for part in parts)
    shards = Shards(range(total), BATCH, ctx.folder)
    ctx.progress.begin(ctx.stage, total, "gold SQL")
    rollout = ctx.recipe.rollout
    workers = None if rollout.processes == 1 or total <= BATCH else 1
    shards.run(checking, (ctx.recipe, ctx.folder, tuple(parts), workers), rollout.processes, ctx.progress, rollout.dask)
    checked = [Checked(array("q"), [], list(part.rejected)) for part in parts]
    for row in shards.rows():
        source = checked[row["source"]]
        source.kept.extend(row["kept"])
        source.levels += map(sys.intern, row["levels"])
        source.rejected += [base.Rejected(*rejected) for rejected in row["rejected"]]
    return checked


def checking(recipe: Recipe, folder: Path, parts: Sequence[Part], workers: int | None) -> Run:
    """A process's own sandbox; its run writes a line for each source that its rows are of."""
    sql = sql_engine(recipe, workers)
    starts = [0, *itertools.accumulate(part.rows for part in parts)]

    def run(items: Sequence[Any], path: Path) -> str:
        lines: list[dict[str, Any]] = []
        for number, rows in by_source(items, starts):
            part = parts[number]
            examples_here = frames.from_frame(frames.take(part.path, rows), Example)
            drop_empty = recipe.data.drop_empty and part.pool in TRAINING
            good, rejected = base.check_gold(examples_here, sql, folder, drop_empty)
            names = {example.id for example in good}
            good_rows = [row for row, example in zip(rows, examples_here, strict=True) if example.id in names]
            levels = [example.hardness for example in base.with_hardness(good)]
            bad = [dataclasses.astuple(row) for row in rejected]
            lines.append({"source": number, "kept": good_rows, "levels": levels, "rejected": bad})
        write_lines(path, lines)
        return f"{sum(len(line['kept']) for line in lines)}/{len(items)} run"

    return run


def by_source(items: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The rows of each source that items stand for: they are numbered through all sources, in order."""
    for number, group in itertools.groupby(items, lambda item: bisect_right(starts, item) - 1):
        yield number, [item - starts[number] for item in group]


def windows(part: Part, checked: Checked) -> Iterator[pl.DataFrame]:
    """The kept rows of a source with their levels, a window at a time."""
    start = 0
    for frame in frames.windows(part.path, checked.kept) if checked.kept else ():
        levels = pl.Series(checked.levels[start : start + frame.height], dtype=pl.String)
        yield frame.with_columns(hardness=levels)
        start += frame.height


def examples(part: Part, checked: Checked) -> list[Example]:
    """The kept examples of a source, all in memory."""
    return [example for frame in windows(part, checked) for example in frames.from_frame(frame, Example)]
