"""The long work of the data stage: each source is read once into the work folder, and its gold SQL is run in shards."""

from __future__ import annotations  # array[int] is a type for checkers alone

import dataclasses
import itertools
import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from pipelines.benchmarks import base
from pipelines.benchmarks.base import Rejected
from pipelines.core import frames
from pipelines.core.files import read_json, write_json, write_lines
from pipelines.core.store import SHARDS
from pipelines.core.types import Example
from pipelines.databases.of_recipe import sql_engine, with_card_evidence
from pipelines.recipe.config import Recipe, Source
from pipelines.stages.context import Context
from pipelines.stages.shards import Run, Shards

TRAINED = ("sft", "rl")  # pools that are learned from
BATCH = 1024  # gold queries between two moves of the bar


class PoolSource(NamedTuple):
    """One source of the recipe's data."""

    pool: str  # "sft", "rl", "dev" or "test".
    part: int  # its index among the sources of its pool.
    source: Source


@dataclasses.dataclass(frozen=True)
class SourcePart:
    """One source as it was read."""

    pool: str
    part: int
    kind: str
    path: Path  # its examples, a Parquet file; it does not exist if there are none.
    rows: int  # examples in that file.
    rejected: tuple[Rejected, ...]  # rows that are no example, with the reason.


@dataclasses.dataclass
class CheckedSource:
    """A source after its gold SQL was run."""

    kept: array[int]  # row numbers of its file.
    levels: list[str]  # the hardness of each kept row.
    rejected: list[Rejected]  # all rejected rows, the reader's among them.


def read_source(ctx: Context, number: int, pool_source: PoolSource) -> SourcePart:
    """Read the examples that a source's levels and count choose, and the rejected rows, unless a killed run has.

    Args:
        number: the source's index among all sources of the stage.
    """
    pool, part, source = pool_source
    folder = ctx.folder / SHARDS
    folder.mkdir(exist_ok=True)
    path = folder / f"source-{number}.parquet"
    note = folder / f"source-{number}.json"
    if not note.is_file():
        write_json(note, _load_source(ctx, pool_source, path))
    noted = read_json(note)
    rejected = tuple(Rejected(*row) for row in noted["rejected"])
    return SourcePart(pool, part, source.kind, path, noted["rows"], rejected)


def _load_source(ctx: Context, pool_source: PoolSource, path: Path) -> dict[str, Any]:
    """Write the chosen examples of a source, and return their number and the rejected rows."""
    source = pool_source.source
    seed = ctx.recipe.seed
    loaded = base.load(source, seed, ctx.folder)
    n_read = _write_examples(ctx, pool_source, loaded, path)
    names = pl.DataFrame(schema={"id": pl.String, "hardness": pl.String})
    if n_read:
        names = frames.read(path, "id", "hardness")
    chosen, rejected = base.choose_rows(names["id"], names["hardness"], loaded.quarantine, source, seed)
    if len(chosen) < n_read:
        frames.keep(path, chosen)
    rejected_rows = list(map(dataclasses.astuple, rejected))
    return {"rows": len(chosen), "rejected": rejected_rows}


def _write_examples(ctx: Context, pool_source: PoolSource, loaded: base.Loaded, path: Path) -> int:
    """Write a source's examples a window at a time, and return their number; without examples there is no file."""
    pool, part, source = pool_source
    examples = iter(loaded.examples)
    writer = frames.Writer(path, path.parent)
    rows = 0
    while window := list(itertools.islice(examples, frames.WINDOW)):
        if source.hardness is not None:
            window = base.with_hardness(window)
        window = with_card_evidence(window, ctx.folder)
        writer.add(pool_frame(window, pool, part))
        rows += len(window)
        ctx.progress.advance(0, f"{pool}: {rows} questions")
    if rows:
        writer.close()
    return rows


def pool_frame(examples: Sequence[Example], pool: str, part: int) -> pl.DataFrame:
    """The rows of a pool's examples; all windows have the same columns, also where a column holds no value."""
    pool_columns = {"pool": pool, "part": part}
    frame = frames.to_frame(examples, extra=[pool_columns] * len(examples))
    return frame.with_columns(pl.col(pl.Null).cast(pl.String))


def check_sources(ctx: Context, parts: Sequence[SourcePart]) -> list[CheckedSource]:
    """Run the gold SQL of all sources, in shards that are shared among processes or a cluster."""
    total = sum(part.rows for part in parts)
    rollout = ctx.recipe.rollout
    shards = Shards(range(total), BATCH, ctx.folder)
    ctx.progress.begin(ctx.stage, total, "gold SQL")
    workers = None if rollout.processes == 1 or total <= BATCH else 1
    without_rejected = tuple(dataclasses.replace(part, rejected=()) for part in parts)  # each shard's job carries them
    args = (ctx.recipe, ctx.folder, without_rejected, workers)
    shards.run(make_gold_check_run, args, rollout.processes, ctx.progress, rollout.dask)
    checked = []
    for part in parts:
        checked.append(CheckedSource(array("q"), [], list(part.rejected)))
    for row in shards.rows():
        source = checked[row["source"]]
        source.kept.extend(row["kept"])
        source.levels += map(sys.intern, row["levels"])
        for rejected in row["rejected"]:
            source.rejected.append(Rejected(*rejected))
    return checked


def make_gold_check_run(recipe: Recipe, folder: Path, parts: Sequence[SourcePart], workers: int | None) -> Run:
    """A process's own sandbox; its run writes a line for each source that its rows belong to.

    The rows are numbered through all sources, in order.
    """
    sql = sql_engine(recipe, workers)
    starts = [0, *itertools.accumulate(part.rows for part in parts)]

    def source_of(item: int) -> int:
        return bisect_right(starts, item) - 1

    def check(part: SourcePart, rows: Sequence[int]) -> dict[str, Any]:
        examples = frames.from_frame(frames.take(part.path, rows), Example)
        drop_empty = recipe.data.drop_empty and part.pool in TRAINED
        good, rejected = base.check_gold(examples, sql, folder, drop_empty)
        good_ids = {example.id for example in good}
        good_rows = []
        for row, example in zip(rows, examples, strict=True):
            if example.id in good_ids:
                good_rows.append(row)
        return {
            "kept": good_rows,
            "levels": [example.hardness for example in base.with_hardness(good)],
            "rejected": list(map(dataclasses.astuple, rejected)),
        }

    def run(items: Sequence[Any], path: Path) -> str:
        lines: list[dict[str, Any]] = []
        n_kept = 0
        for number, group in itertools.groupby(items, source_of):
            rows = [item - starts[number] for item in group]
            line = check(parts[number], rows)
            n_kept += len(line["kept"])
            lines.append({"source": number, **line})
        write_lines(path, lines)
        return f"{n_kept}/{len(items)} run"

    return run


def is_fault(pool: str, reason: str) -> bool:
    """Whether a row that was set aside counts against `data.max_bad_share`.

    A benchmark some of whose databases are missing is evaluated on the others, and the report marks it.
    """
    is_missing_benchmark = pool == "test" and reason == "missing_database"
    return reason != base.EMPTY and not is_missing_benchmark


def source_faults(
    max_bad_share: float, sources: Sequence[PoolSource], parts: Sequence[SourcePart], checked: Sequence[CheckedSource]
) -> list[str]:
    """A line for each source that cannot be used: nothing of it is good, or a larger share than allowed is bad."""
    faults = []
    for pool_source, part, rows in zip(sources, parts, checked, strict=True):
        n_bad = 0
        for row in rows.rejected:
            if row.chosen and is_fault(part.pool, row.reason):
                n_bad += 1
        total = len(rows.kept) + n_bad
        first_rejected = ""
        if rows.rejected:
            row = rows.rejected[0]
            first_rejected = f"; the first: {row.row}: {row.reason} ({row.detail})"
        pool = f"pool {part.pool}"
        if not total:
            fate = "can be used" if pool_source.source.hardness is None else "is of the levels that are asked for"
            faults.append(f"{pool}: no row of the {part.kind} source {fate}{first_rejected}")
        elif not rows.kept or n_bad / total > max_bad_share:
            faults.append(f"{pool}: {n_bad} of {total} rows of the {part.kind} source are bad{first_rejected}")
    return faults
