"""The files of the pools of questions: the kept rows of every source, and the rejected rows with their reasons."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.benchmarks import corrections
from pipelines.benchmarks.base import Rejected
from pipelines.core import frames
from pipelines.core.files import write_lines
from pipelines.core.store import SHARDS
from pipelines.core.types import Example
from pipelines.stages.context import QUARANTINE, Context
from pipelines.stages.data_experts import ask_experts
from pipelines.stages.data_sources import pool_frame
from pipelines.stages.gold_check import CheckedSource


def write_examples(ctx: Context, checked: Sequence[CheckedSource]) -> dict[str, float]:
    """Write the kept rows of all sources, and return their figures; rows that experts reject join the rejected ones."""
    data = ctx.recipe.data
    asks_experts = bool(data.cleaners or data.linker or data.values)
    figures: dict[str, float] = {}
    writer = frames.Writer(ctx.folder / frames.DATA, ctx.folder / SHARDS)
    for rows in checked:
        part = rows.part
        name = f"{part.pool}{part.part or ''}"
        windows = _kept_frames(rows)
        # Experts are asked about all examples of a source at once, which are then all in memory; so are values.
        if asks_experts:
            examples: list[Example] = []
            for frame in windows:
                examples += frames.from_frame(frame, Example)
            expert_result = ask_experts(ctx.recipe, ctx.folder, ctx.responses, part.pool, examples)
            rows.rejected += expert_result.rejected
            for figure, value in expert_result.figures.items():
                figures[f"{name}_{figure}"] = value
            windows = iter(())
            if expert_result.examples:
                frame = pool_frame(expert_result.examples, part.pool, part.part)
                windows = iter([frame])
        for frame in windows:
            if part.source.corrections is not None:
                questions = frames.from_frame(frame, Example)
                figure = f"{name}_corrected"
                before = figures.get(figure, 0.0)
                figures[figure] = before + corrections.count_corrected(questions)
            writer.add(frame)
    writer.close()
    return figures


def _kept_frames(checked: CheckedSource) -> Iterator[pl.DataFrame]:
    """The kept rows of a source with their levels, a window at a time."""
    if not checked.kept:
        return
    levels = iter(checked.levels)
    for frame in frames.windows(checked.part.path, checked.kept):
        hardness = list(itertools.islice(levels, frame.height))
        yield frame.with_columns(hardness=pl.Series(hardness, dtype=pl.String))


def write_rejected(folder: Path, checked: Sequence[CheckedSource]) -> int:
    """Write all rejected rows, and return their number."""

    def lines() -> Iterator[dict[str, Any]]:
        for rows in checked:
            for row in rows.rejected:
                yield _rejected_line(rows.part.pool, row)

    write_lines(folder / QUARANTINE, lines())
    return sum(len(rows.rejected) for rows in checked)


def add_rejected(folder: Path, rejected: Sequence[tuple[str, Rejected]]) -> int:
    """Write further rejected rows, each behind its pool, and return their number."""
    with (folder / QUARANTINE).open("a", encoding="utf-8") as file:
        for pool, row in rejected:
            line = json.dumps(_rejected_line(pool, row), ensure_ascii=False, sort_keys=True)
            file.write(f"{line}\n")
    return len(rejected)


def _rejected_line(pool: str, row: Rejected) -> dict[str, Any]:
    return {"pool": pool, **dataclasses.asdict(row)}
