"""Stages 3 and 4: which demonstrations are kept, and what tables and columns each question's gold SQL needs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.config import Recipe
from pipelines.curation import card, filtering, leakage
from pipelines.curation import gold_schema as consensus
from pipelines.errors import DataError
from pipelines.rewards.outcome import judge_trajectories
from pipelines.stages.context import Context
from pipelines.stages.experts import llm_extractors
from pipelines.stages.inputs import DATA, examples, schemas, sql_engine, trajectories, write_lines
from pipelines.stages.shards import Run, Shards
from pipelines.stages.synthesize import COSTS
from pipelines.store import read_json, write_atomic, write_json
from pipelines.types import Example, Outcome, SchemaItems, Trajectory, from_dict, to_dict

BATCH = 1024  # trajectories or examples between two moves of the bar


def filter_trajectories(ctx: Context) -> None:
    """Write the kept trajectories to `data.parquet` and every other one, with its reason, to `quarantine.jsonl`.

    Raises:
        DataError: nothing is kept.
    """
    made = trajectories(ctx.inputs["synthesize"])
    outcomes = _judge(ctx, made)
    pools = {pool: examples(ctx.inputs["data"], pool) for pool in ("sft", "dev", "test")}
    databases = {example.id: example.database.id for example in pools["sft"]}
    chosen = filtering.select(outcomes, ctx.recipe.filter, ctx.recipe.seed, databases)
    frames.write(ctx.folder / DATA, frames.to_frame(chosen.kept))
    write_lines(ctx.folder / "quarantine.jsonl", (dataclasses.asdict(one) for one in chosen.discarded))
    _describe(ctx, pools, outcomes, chosen, databases)
    reasons = {f"left_out_{reason}": float(count) for reason, count in chosen.reasons.items()}
    ctx.metrics({"kept": len(chosen.kept), "acceptance": len(chosen.kept) / max(1, len(made)), **reasons})
    if not chosen.kept:
        reason = next(iter(chosen.reasons), "there were none")
        raise DataError(
            f"none of {len(made)} trajectories is kept; most often: {reason}", f"See {ctx.folder / 'quarantine.jsonl'}."
        )


def _describe(
    ctx: Context,
    pools: dict[str, list[Example]],
    outcomes: list[Outcome],
    chosen: filtering.Selection,
    databases: dict[str, str],
) -> None:
    """Write the dataset's card (`card.md`) and the figures that it shows (`quality.json`, `leakage.json`)."""
    facts = card.quality(outcomes, chosen, databases)
    leaked = leakage.report(pools["sft"], [*pools["dev"], *pools["test"]])
    write_json(ctx.folder / "quality.json", facts)
    write_json(ctx.folder / "leakage.json", leaked)
    text = card.write(ctx.recipe, facts, leaked, read_json(ctx.inputs["synthesize"] / COSTS))
    write_atomic(ctx.folder / "card.md", text)


def _judge(ctx: Context, made: list[Trajectory]) -> list[Outcome]:
    by_id = {example.id: example for example in examples(ctx.inputs["data"], "sft")}
    pairs = [(trajectory, by_id[trajectory.example_id]) for trajectory in made]
    shards = Shards(pairs, BATCH, ctx.folder)
    ctx.progress.begin(ctx.stage, len(made), "trajectories")
    rollout = ctx.recipe.rollout
    shards.run(judging, (ctx.recipe,), rollout.processes, ctx.progress, rollout.dask)
    rows = zip(made, shards.rows(), strict=True)
    return [from_dict(Outcome, {**row, "trajectory": trajectory}) for trajectory, row in rows]


def judging(recipe: Recipe) -> Run:
    """A process's own sandbox; its run writes one outcome a line, without the trajectory that it is of."""
    sql, schema = sql_engine(recipe, workers=1), schemas(recipe)

    def run(pairs: Sequence[Any], path: Path) -> str:
        made = [trajectory for trajectory, _ in pairs]
        asked = {example.id: example for _, example in pairs}
        outcomes = judge_trajectories(made, asked, sql, schema, recipe.execution.equality, recipe.protocol.max_turns)
        bare = ({name: value for name, value in to_dict(one).items() if name != "trajectory"} for one in outcomes)
        write_lines(path, bare)
        return f"{sum(one.correct for one in outcomes)}/{len(outcomes)} right"

    return run


@dataclasses.dataclass(frozen=True)
class Views:
    """What the static extractors say of one gold SQL."""

    views: dict[str, SchemaItems | None]


def extracting(recipe: Recipe) -> Run:
    """A process's own schemas; its run writes the static extractors' views of one example a line."""
    extractors = consensus.static_extractors(schemas(recipe))

    def run(pool: Sequence[Any], path: Path) -> str:
        write_lines(path, (to_dict(Views({name: ask(one) for name, ask in extractors.items()})) for one in pool))
        return ""

    return run


def gold_schema(ctx: Context) -> None:
    """Write each example's accepted gold schema to `data.parquet`, disagreements to `disagreements.jsonl`."""
    pool: dict[str, Example] = {
        example.id: example for example in examples(ctx.inputs["data"], "sft", "rl", "dev", "test")
    }
    asked = llm_extractors(ctx, list(pool.values()))
    shards = Shards(list(pool.values()), BATCH, ctx.folder)
    ctx.progress.begin(ctx.stage, len(pool), "gold SQL")
    rollout = ctx.recipe.rollout
    shards.run(extracting, (ctx.recipe,), rollout.processes, ctx.progress, rollout.dask)
    views = (from_dict(Views, row).views for row in shards.rows())
    found = [
        consensus.consensus(
            example.id,
            {**{name: kept[name] for name in consensus.STATIC}, **{name: ask(example) for name, ask in asked.items()}},
        )
        for example, kept in zip(pool.values(), views, strict=True)
    ]
    records = [schema.record() for schema in found]
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in record.items()} for record in records]
    frames.write(ctx.folder / DATA, pl.DataFrame(texts))
    apart = consensus.disagreements(found)
    write_lines(ctx.folder / "disagreements.jsonl", (schema.record() for schema in apart))
    ctx.metrics({"examples": len(found), "agreement": consensus.agreement_rate(found), "disagreements": len(apart)})
