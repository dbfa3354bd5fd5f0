"""Stages 3 and 4: which demonstrations are kept, and what tables and columns each question's gold SQL needs."""

from __future__ import annotations

import dataclasses
import json

import polars as pl

from pipelines import frames
from pipelines.curation import card, filtering, leakage
from pipelines.curation import gold_schema as consensus
from pipelines.errors import DataError
from pipelines.rewards.outcome import judge_trajectories
from pipelines.stages.context import Context
from pipelines.stages.experts import llm_extractors
from pipelines.stages.inputs import DATA, examples, schemas, sql_engine, trajectories, write_lines
from pipelines.stages.synthesize import COSTS
from pipelines.store import read_json, write_atomic, write_json
from pipelines.types import Example, Outcome, Trajectory

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
    schema = schemas(ctx.recipe)
    outcomes: list[Outcome] = []
    ctx.progress.begin(ctx.stage, len(made), "trajectories")
    with sql_engine(ctx.recipe) as sql:
        for start in range(0, len(made), BATCH):
            part = made[start : start + BATCH]
            outcomes += judge_trajectories(
                part, by_id, sql, schema, ctx.recipe.execution.equality, ctx.recipe.protocol.max_turns
            )
            ctx.progress.advance(len(part))
    return outcomes


def gold_schema(ctx: Context) -> None:
    """Write each example's accepted gold schema to `data.parquet`, disagreements to `disagreements.jsonl`."""
    pool: dict[str, Example] = {
        example.id: example for example in examples(ctx.inputs["data"], "sft", "rl", "dev", "test")
    }
    extractors = consensus.static_extractors(schemas(ctx.recipe)) | llm_extractors(ctx, list(pool.values()))
    ctx.progress.begin(ctx.stage, len(pool), "gold SQL")
    found = []
    for number, example in enumerate(pool.values(), 1):
        found.append(consensus.extract(example, extractors))
        if number % BATCH == 0 or number == len(pool):
            ctx.progress.advance((number - 1) % BATCH + 1)
    records = [schema.record() for schema in found]
    texts = [{name: json.dumps(value, sort_keys=True) for name, value in record.items()} for record in records]
    frames.write(ctx.folder / DATA, pl.DataFrame(texts))
    apart = consensus.disagreements(found)
    write_lines(ctx.folder / "disagreements.jsonl", (schema.record() for schema in apart))
    ctx.metrics({"examples": len(found), "agreement": consensus.agreement_rate(found), "disagreements": len(apart)})
