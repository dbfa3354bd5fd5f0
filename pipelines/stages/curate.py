"""Stages 3 and 4: the demonstrations that are kept, and the tables and columns that each question's gold SQL needs.

Both read their input a shard at a time and keep some hundred bytes a row between, so that SynSQL's two and a half
million rows need no more memory than a laptop has.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_atomic, write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.types import SchemaItems, Trajectory, from_dict, to_dict
from pipelines.curation import card, filtering
from pipelines.curation import gold_schema as consensus
from pipelines.databases.of_recipe import schemas
from pipelines.environment.core import Environment
from pipelines.recipe.config import Recipe
from pipelines.sql import similarity
from pipelines.stages.context import COSTS, LEAKAGE, QUARANTINE, Context, examples_at, rows_of
from pipelines.stages.shards import Run, Shards

BATCH = 1024  # trajectories or examples between two moves of the bar
PLACES = "places.npy"  # beside the shards: for each of their items, the row of `data` that it belongs to
SAMPLED = 20_000  # kept trajectories, at even distances, whose words are counted


def filter_trajectories(ctx: Context) -> None:
    """Write the kept trajectories to `data.parquet` and every other one, with its reason, to `quarantine.jsonl`."""
    settings, source = ctx.recipe.filter, ctx.inputs["synthesize"] / DATA
    # A shard's file has one `CheckedTrajectory` a line.
    example_ids = pl.scan_parquet(source, glob=False).select("example_id").collect()["example_id"]
    rows = rows_of(ctx.inputs["data"], "sft")
    places = example_ids.to_frame("id").join(rows, on="id", how="left", maintain_order="left")["row"]
    shards = _in_shards(ctx, places, "trajectories", make_judging_run, source, data=ctx.inputs["data"])
    tables = [pl.DataFrame(shards.read(index), schema=filtering.COLUMNS) for index in range(len(shards))]
    judged = pl.concat([pl.DataFrame(schema=filtering.COLUMNS), *tables])
    selected = filtering.select(judged, settings, ctx.recipe.seed)
    kept_rows = selected["reason"].is_null().arg_true()
    writer = frames.Writer(ctx.folder / DATA, shards.folder)
    for frame in frames.windows(source, kept_rows):
        writer.add(frame)
    writer.close()
    write_lines(
        ctx.folder / QUARANTINE,
        (
            {
                "example_id": row["example_id"],
                "sample": row["sample"],
                "reason": reason,
                "detail": filtering.detail(reason, row["detail"], settings),
            }
            for row, reason in zip(shards.rows(), selected["reason"].cast(pl.String), strict=True)
            if reason is not None
        ),
    )
    # The dataset's card, and the figures that it shows beside the leakage.
    sampled = frames.windows(source, kept_rows.gather_every(max(1, -(-len(kept_rows) // SAMPLED))))
    words = (trajectory for frame in sampled for trajectory in frames.from_frame(frame, Trajectory))
    quality = card.quality(selected, similarity.distinct_2(words))
    write_json(ctx.folder / "quality.json", quality)
    leaked, costs = read_json(ctx.inputs["data"] / LEAKAGE)["sft"], read_json(ctx.inputs["synthesize"] / COSTS)
    write_atomic(ctx.folder / "card.md", card.write(ctx.recipe, quality, leaked, costs))
    reasons = {f"left_out_{reason}": float(count) for reason, count in quality["left_out"].items()}
    ctx.metrics({"kept": len(kept_rows), "acceptance": len(kept_rows) / max(1, len(selected)), **reasons})
    if not len(kept_rows):
        reason = next(iter(quality["left_out"]), "there were none")
        raise DataError(
            f"none of {len(selected)} trajectories is kept; most often: {reason}", f"See {ctx.folder / QUARANTINE}."
        )


def _in_shards(
    ctx: Context, places: pl.Series, unit: str, make: Callable[..., Run], *more: Path, data: Path
) -> Shards[int]:
    """Run `make(recipe, *more, data, places)` over items that stand for these rows of the data stage's file."""
    shards = Shards(range(len(places)), BATCH, ctx.folder)
    np.save(shards.folder / PLACES, places.to_numpy())
    ctx.progress.begin(ctx.stage, len(places), unit)
    args = (ctx.recipe, *more, data, shards.folder / PLACES)
    shards.run(make, args, ctx.recipe.rollout.processes, ctx.progress, ctx.recipe.rollout.dask)
    return shards


def make_judging_run(recipe: Recipe, source: Path, data: Path, places: Path) -> Run:
    """A process's own sandbox; its run judges the trajectories in these rows of `source`. `places` has the
    row in `data` of each trajectory's question.
    """
    environment = Environment(recipe)
    row_of = np.load(places, mmap_mode="r")

    def run(rows: Sequence[Any], path: Path) -> str:
        trajectories = frames.from_frame(frames.take(source, rows), Trajectory)
        questions = sorted(set(row_of[rows[0] : rows[-1] + 1].tolist()))  # of a shard: neighbours, mostly
        by_id = {example.id: example for example in examples_at(data, questions)}
        outcomes = environment.judge(trajectories, by_id.values(), reads={"level"})
        judged = (
            filtering.CheckedTrajectory.of(outcome, by_id[outcome.example_id].database.id, recipe.filter)
            for outcome in outcomes
        )
        write_lines(path, map(dataclasses.asdict, judged))
        return f"{sum(outcome.correct for outcome in outcomes)}/{len(outcomes)} right"

    return run


def make_extraction_run(recipe: Recipe, data: Path, places: Path) -> Run:
    """A process's own schemas; its run writes the static extractors' views of one example a line. `places` has
    the rows of `data` that the items stand for.
    """
    extractors = consensus.static_extractors(schemas(recipe)) if recipe.gold_schema.static else {}
    row_of = np.load(places, mmap_mode="r")

    def run(items: Sequence[Any], path: Path) -> str:
        pool = examples_at(data, row_of[items[0] : items[-1] + 1].tolist())
        views = ({name: extractor(example) for name, extractor in extractors.items()} for example in pool)
        write_lines(path, ({name: items and to_dict(items) for name, items in each.items()} for each in views))
        return ""

    return run


def gold_schema(ctx: Context) -> None:
    """Write each example's accepted gold schema to `data.parquet`, disagreements to `disagreements.jsonl`.

    Evaluation holds links against those of a benchmark's questions (`test_schema`).
    """
    data, pools = ctx.inputs.get("test"), ["test"]
    if data is None:
        data, pools = ctx.inputs["data"], ["sft", "rl", "dev"]
    rows = rows_of(data, *pools)["row"]
    extractors: dict[str, consensus.Extractor] = {}
    if names := ctx.recipe.gold_schema.extractors:  # endpoints, each of which is asked about all examples
        from pipelines.endpoints.asker import Asker
        from pipelines.teachers import experts

        questions, schema = examples_at(data, rows.to_list()), schemas(ctx.recipe)
        askers = {name: Asker.named(name, ctx.responses) for name in names}
        extractors = {name: experts.extractor(asker, questions, schema) for name, asker in askers.items()}
        write_json(ctx.folder / COSTS, {name: asker.take_used() for name, asker in askers.items()})
    shards = _in_shards(ctx, rows, "gold SQL", make_extraction_run, data=data)
    accepted = apart = 0
    static = consensus.STATIC if ctx.recipe.gold_schema.static else ()
    writer = frames.Writer(ctx.folder / DATA, shards.folder)
    with (ctx.folder / "disagreements.jsonl").open("w", encoding="utf-8") as file:
        for index in range(len(shards)):
            pool = examples_at(data, [rows[item] for item in shards.part(index)])
            agreed = [
                consensus.consensus(
                    example.id,
                    {name: views[name] and from_dict(SchemaItems, views[name]) for name in static}
                    | {name: extractor(example) for name, extractor in extractors.items()},
                )
                for example, views in zip(pool, shards.read(index), strict=True)
            ]
            records = [each.record() for each in agreed]
            texts = [{name: json.dumps(value, sort_keys=True) for name, value in record.items()} for record in records]
            writer.add(pl.DataFrame(texts))
            accepted += sum(each.items is not None for each in agreed)
            for each in agreed:
                if each.reason:
                    file.write(json.dumps(each.record(), ensure_ascii=False, sort_keys=True) + "\n")
                    apart += 1
    writer.close()
    agreement = accepted / len(rows) if len(rows) else 1.0
    ctx.metrics({"examples": len(rows), "agreement": agreement, "disagreements": apart})
