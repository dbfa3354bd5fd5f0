"""The gold SQL of a data stage's sources, run in shards: the rows to keep, and the rows to set aside."""

from __future__ import annotations  # array[int] is a type for checkers alone

import dataclasses
import itertools
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipelines.benchmarks import base
from pipelines.benchmarks.base import Rejected
from pipelines.core import frames
from pipelines.core.files import write_lines
from pipelines.core.types import Example
from pipelines.databases.of_recipe import sql_engine
from pipelines.recipe.config import Recipe
from pipelines.stages.context import TRAINED, Context
from pipelines.stages.data_sources import SourcePart
from pipelines.stages.shards import Run, Shards

BATCH = 1024  # gold queries between two moves of the bar


@dataclasses.dataclass
class CheckedSource:
    """A source after its gold SQL was run."""

    part: SourcePart
    kept: array[int]  # row numbers of its file.
    levels: list[str]  # the hardness of each kept row.
    rejected: list[Rejected]  # all rejected rows, the reader's among them.


def check_sources(ctx: Context, parts: Sequence[SourcePart]) -> list[CheckedSource]:
    """Run the gold SQL of all sources, in shards that are shared among processes or a cluster."""
    total = sum(part.rows for part in parts)
    rollout = ctx.recipe.rollout
    shards = Shards(range(total), BATCH, ctx.folder)
    ctx.progress.begin(ctx.stage, total, "gold SQL")
    has_one_process = rollout.processes == 1 or total <= BATCH
    workers = None if has_one_process else 1
    without_rejected = tuple(dataclasses.replace(part, rejected=()) for part in parts)  # each shard's job carries them
    args = (ctx.recipe, ctx.folder, without_rejected, workers)
    shards.run(make_gold_check_run, args, rollout.processes, ctx.progress, rollout.dask)
    checked = []
    for part in parts:
        rejected_by_reader = list(part.rejected)
        checked.append(CheckedSource(part, array("q"), [], rejected_by_reader))
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
        frame = frames.take(part.path, rows)
        examples = frames.from_frame(frame, Example)
        drop_empty = recipe.data.drop_empty and part.pool in TRAINED
        good, rejected = base.check_gold(examples, sql, folder, drop_empty)
        good_ids = {example.id for example in good}
        good_rows = []
        for row, example in zip(rows, examples, strict=True):
            if example.id in good_ids:
                good_rows.append(row)
        levels = [example.hardness for example in base.with_hardness(good)]
        rejected_values = [dataclasses.astuple(row) for row in rejected]
        return {"kept": good_rows, "levels": levels, "rejected": rejected_values}

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


def source_faults(max_bad_share: float, checked: Iterable[CheckedSource]) -> list[str]:
    """A line for each source that cannot be used: nothing of it is good, or a larger share than allowed is bad."""
    faults = []
    for rows in checked:
        part = rows.part
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
        kind = part.source.kind
        if not total:
            fate = "can be used"
            if part.source.hardness is not None:
                fate = "is of the levels that are asked for"
            faults.append(f"{pool}: no row of the {kind} source {fate}{first_rejected}")
        elif not rows.kept or n_bad / total > max_bad_share:
            faults.append(f"{pool}: {n_bad} of {total} rows of the {kind} source are bad{first_rejected}")
    return faults
