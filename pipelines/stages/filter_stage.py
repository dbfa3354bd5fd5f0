"""Stage 3: the demonstrations that are kept.

The trajectories are read a shard at a time, and some hundred bytes a row are kept between, so that SynSQL's two and a
half million rows need no more memory than a laptop has.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_atomic, write_json, write_lines
from pipelines.core.types import Trajectory
from pipelines.curation import card, filtering
from pipelines.environment.core import Environment
from pipelines.recipe.config import Recipe
from pipelines.sql import similarity
from pipelines.stages.context import COSTS, LEAKAGE, QUARANTINE, Context, each_trajectory, examples_at, rows_of
from pipelines.stages.shards import Run, Shards, run_over_rows

SAMPLED = 20_000  # kept trajectories, at even distances, whose words are counted


def filter_trajectories(ctx: Context) -> None:
    """Write the kept trajectories to `data.parquet` and every other one, with its reason, to `quarantine.jsonl`."""
    recipe = ctx.recipe
    source = ctx.inputs["synthesize"] / frames.DATA
    shards = _check_trajectories(ctx, source)
    checked = _read_checked(shards)
    selected = filtering.select_demonstrations(checked, recipe.filter, recipe.seed)
    kept_rows = selected["reason"].is_null().arg_true()
    writer = frames.Writer(ctx.folder / frames.DATA, shards.folder)
    for frame in frames.windows(source, kept_rows):
        writer.add(frame)
    writer.close()
    reasons = selected["reason"].cast(pl.String)
    _write_left_out(ctx, shards, reasons)
    quality = _write_dataset_card(ctx, source, selected, kept_rows)

    n_kept = len(kept_rows)
    acceptance = n_kept / max(1, len(selected))
    figures: dict[str, float] = {"kept": n_kept, "acceptance": acceptance}
    for reason, count in quality["left_out"].items():
        figures[f"left_out_{reason}"] = float(count)
    ctx.metrics(figures)
    if not n_kept:
        commonest = next(iter(quality["left_out"]), "there were none")
        message = f"none of {len(selected)} trajectories is kept; most often: {commonest}"
        raise DataError(message, f"See {ctx.folder / QUARANTINE}.")


def _read_checked(shards: Shards[int]) -> pl.DataFrame:
    """The `CheckedTrajectory` rows of all shards."""
    tables = [pl.DataFrame(schema=filtering.COLUMNS)]
    for index in range(len(shards)):
        rows = shards.read(index)
        table = pl.DataFrame(rows, schema=filtering.COLUMNS)
        tables.append(table)
    return pl.concat(tables)


def _check_trajectories(ctx: Context, source: Path) -> Shards[int]:
    """Judge all trajectories; each shard's file has one `CheckedTrajectory` a line."""
    data = ctx.inputs["data"]
    trajectories = pl.scan_parquet(source, glob=False)
    answered = trajectories.select(id="example_id").collect()
    data_rows = rows_of(data, "sft")
    questions = answered.join(data_rows, on="id", how="left", maintain_order="left")
    question_rows = questions["row"]
    return run_over_rows(ctx, question_rows, "trajectories", make_judging_run, source, data=data)


def _write_left_out(ctx: Context, shards: Shards[int], reasons: pl.Series) -> None:
    """Write a line for each trajectory with a reason to be left out; `reasons` are in the order of the shards' rows."""

    def lines() -> Iterator[dict[str, Any]]:
        for row, reason in zip(shards.rows(), reasons, strict=True):
            if reason is None:
                continue
            detail = filtering.detail(reason, row["detail"], ctx.recipe.filter)
            yield {
                "example_id": row["example_id"],
                "sample": row["sample"],
                "reason": reason,
                "detail": detail,
            }

    write_lines(ctx.folder / QUARANTINE, lines())


def _write_dataset_card(ctx: Context, source: Path, selected: pl.DataFrame, kept_rows: pl.Series) -> dict[str, Any]:
    """Write the dataset's card, and return the figures that it shows beside leakage and costs."""
    distance = max(1, -(-len(kept_rows) // SAMPLED))
    sampled_rows = kept_rows.gather_every(distance)
    trajectories = each_trajectory(source, sampled_rows)
    distinct_pairs = similarity.distinct_2(trajectories)
    quality = card.quality(selected, distinct_pairs)
    write_json(ctx.folder / "quality.json", quality)
    leakage = read_json(ctx.inputs["data"] / LEAKAGE)
    costs = read_json(ctx.inputs["synthesize"] / COSTS)
    text = card.card_text(ctx.recipe, quality, leakage["sft"], costs)
    write_atomic(ctx.folder / "card.md", text)
    return quality


def make_judging_run(recipe: Recipe, source: Path, data: Path, places: Path) -> Run:
    """A process's own sandbox; its run judges the trajectories in these rows of `source`.

    Args:
        places: a file with the row in `data` of each trajectory's question.
    """
    environment = Environment(recipe)
    question_rows = np.load(places, mmap_mode="r")

    def run(rows: Sequence[Any], path: Path) -> str:
        taken = frames.take(source, rows)
        trajectories = frames.from_frame(taken, Trajectory)
        first_row = rows[0]
        last_row = rows[-1]
        neighbours = question_rows[first_row : last_row + 1]  # few more than the rows themselves
        needed = sorted(set(neighbours.tolist()))
        by_id = {example.id: example for example in examples_at(data, needed)}
        outcomes = environment.judge(trajectories, by_id.values(), reads={"level"})
        checked = []
        n_right = 0
        for outcome in outcomes:
            n_right += outcome.correct
            database = by_id[outcome.example_id].database
            verdict = filtering.CheckedTrajectory.of(outcome, database.id, recipe.filter)
            checked.append(verdict)
        write_lines(path, map(dataclasses.asdict, checked))
        return f"{n_right}/{len(outcomes)} right"

    return run
