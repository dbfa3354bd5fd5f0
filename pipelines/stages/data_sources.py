"""The sources of a recipe's data, each read once into the work folder of the data stage."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from pipelines.benchmarks import base
from pipelines.benchmarks.base import Rejected
from pipelines.core import frames
from pipelines.core.files import read_json, write_json
from pipelines.core.store import SHARDS
from pipelines.core.types import Example
from pipelines.databases.of_recipe import with_card_evidence
from pipelines.recipe.config import Source
from pipelines.stages.context import Context


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
    source: Source
    path: Path  # its examples, a Parquet file; it does not exist if there are none.
    rows: int  # examples in that file.
    rejected: tuple[Rejected, ...]  # rows that are no example, with the reason.


def read_sources(ctx: Context, sources: Sequence[PoolSource]) -> list[SourcePart]:
    """Read all sources before the gold SQL of the first is run, so that a missing file is reported in seconds."""
    folder = ctx.folder / SHARDS
    folder.mkdir(exist_ok=True)
    ctx.progress.begin(ctx.stage, len(sources), "pools")
    parts = []
    for number, source in enumerate(sources):
        part = _read_source(ctx, source, folder / f"source-{number}.parquet")
        parts.append(part)
        ctx.progress.advance(1, f"{source.pool}: {part.rows} questions")
    return parts


def _read_source(ctx: Context, pool_source: PoolSource, path: Path) -> SourcePart:
    """Write the examples that a source's levels and count choose to `path`, unless a killed run has."""
    pool, part, source = pool_source
    seed = ctx.recipe.seed
    note = path.with_suffix(".json")
    noted = read_json(note)
    if not noted:
        loaded = base.load(source, seed, ctx.folder)
        written = _write_examples(ctx, pool_source, loaded.examples, path)
        chosen, rejected = base.choose_rows(written, loaded.quarantine, source, seed)
        if len(chosen) < len(written):
            frames.keep(path, chosen)
        rejected_values = [dataclasses.astuple(row) for row in rejected]
        noted = {"rows": len(chosen), "rejected": rejected_values}
        write_json(note, noted)
    rejected_rows = tuple(Rejected(*row) for row in noted["rejected"])
    return SourcePart(pool, part, source, path, noted["rows"], rejected_rows)


def _write_examples(ctx: Context, pool_source: PoolSource, examples: Iterable[Example], path: Path) -> pl.DataFrame:
    """Write a source's examples a window at a time, and return their `selection_frame`; without examples there is no
    file.
    """
    pool, part, source = pool_source
    remaining = iter(examples)
    writer = frames.Writer(path, path.parent)
    selection = [base.selection_frame([])]
    rows = 0
    while window := list(itertools.islice(remaining, frames.WINDOW)):
        if source.hardness is not None:
            window = base.with_hardness(window)
        window = with_card_evidence(window, ctx.folder)
        frame = pool_frame(window, pool, part)
        writer.add(frame)
        selection.append(base.selection_frame(window))
        rows += len(window)
        ctx.progress.advance(0, f"{pool}: {rows} questions")
    if rows:
        writer.close()
    return pl.concat(selection)


def pool_frame(examples: Sequence[Example], pool: str, part: int) -> pl.DataFrame:
    """The rows of a pool's examples; all windows have the same columns, also where a column holds no value."""
    pool_columns = {"pool": pool, "part": part}
    frame = frames.to_frame(examples, extra=[pool_columns] * len(examples))
    columns_without_value = pl.col(pl.Null)
    return frame.with_columns(columns_without_value.cast(pl.String))
