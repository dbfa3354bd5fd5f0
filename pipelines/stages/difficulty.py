"""Stage 6: how often the policy solves each RL question, and which of them GRPO should train on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.config import Recipe
from pipelines.curation import difficulty
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.errors import DataError
from pipelines.frames import DATA
from pipelines.protocols.base import build as build_protocol
from pipelines.rewards.outcome import make_outcomes
from pipelines.rollout.engine import EpisodeRequest, RolloutEngine, episode_seed
from pipelines.rollout.policies.making import policy, prepare
from pipelines.stages.context import Context
from pipelines.stages.inputs import examples, single_thread, trajectories, write_lines
from pipelines.stages.shards import Run, Shards
from pipelines.types import Example, Outcome


def build(ctx: Context) -> None:
    """Write every question's pass rate to `data.parquet`, and those chosen for RL, in order, to `selected.parquet`.

    Raises:
        DataError: no question is left to train on.
    """
    settings = ctx.recipe.difficulty
    pools = _candidates(ctx)
    questions = list({question.id: question for pool in pools for question in pool}.values())
    shards = Shards(questions, ctx.recipe.rollout.shard, ctx.folder)
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    prepare(ctx.checkpoint, ctx.recipe)
    shards.run(start, (ctx.recipe, ctx.checkpoint), ctx.recipe.rollout.processes, ctx.progress, ctx.recipe.rollout.dask)
    by_id = {row["example_id"]: difficulty.Scored(**row) for row in shards.rows()}
    scored = list(by_id.values())
    parts = [[by_id[question.id] for question in pool if question.id in by_id] for pool in pools]
    if settings.explore_parts:
        chosen = difficulty.select_parts(parts[0], parts[1:], settings, ctx.recipe.seed)
    else:
        chosen = difficulty.select([one for part in parts for one in part], settings, ctx.recipe.seed)
    names = [(name, "balanced") for name in chosen.balanced] + [(name, "explore") for name in chosen.explore]
    if not names:
        raise DataError(
            f"none of {len(scored)} questions is worth training on: each is always or never solved",
            "Set difficulty.max_pass, or raise difficulty.explore or difficulty.candidates.",
        )
    frames.write(ctx.folder / DATA, pl.DataFrame([dataclasses.asdict(one) for one in scored]))
    frames.write(ctx.folder / "selected.parquet", pl.DataFrame(names, ["example_id", "set"], orient="row"))
    ctx.metrics(
        {"balanced": len(chosen.balanced), "explore": len(chosen.explore), **difficulty.summary(scored, settings.group)}
    )


def _candidates(ctx: Context) -> list[list[Example]]:
    """What is scored: what SFT was trained on where the exploration set draws on it, then each RL pool.

    `difficulty.candidates` bounds each pool, by the seed.
    """
    settings, data = ctx.recipe.difficulty, ctx.inputs["data"]
    pools = [examples(data, "rl", part=part) for part in range(len(ctx.recipe.data.rl))]
    if settings.explore_parts:
        pools.insert(0, _trained(ctx) if settings.explore_parts[0] else [])
    return [_draw(pool, settings.candidates, ctx.recipe.seed) for pool in pools]


def _trained(ctx: Context) -> list[Example]:
    """The questions that SFT was trained on; all of its pool where there was none."""
    pool = examples(ctx.inputs["data"], "sft")
    if "filter" not in ctx.inputs:
        return pool
    kept = {trajectory.example_id for trajectory in trajectories(ctx.inputs["filter"])}
    return [example for example in pool if example.id in kept]


def _draw(pool: list[Example], count: int | None, seed: int) -> list[Example]:
    if count is None or count >= len(pool):
        return pool
    chosen = random.Random(f"{seed}/candidates").sample(range(len(pool)), count)
    return [pool[index] for index in sorted(chosen)]


def start(recipe: Recipe, checkpoint: str) -> Run:
    """A process's own policy; its run writes one line a question: samples that count, and how many were right."""
    single_thread()
    settings, sql, schema = recipe.difficulty, sql_engine(recipe, workers=1), schemas(recipe)
    engine = RolloutEngine(
        policy(checkpoint, recipe),
        build_protocol(recipe.protocol),
        sql,
        settings.sampling,
        recipe.protocol.max_turns,
        schema,
    )

    def run(questions: Sequence[Any], path: Path) -> str:
        requests = [
            EpisodeRequest(question, sample, episode_seed(recipe.seed, question.id, sample))
            for question in questions
            for sample in range(settings.group)
        ]
        by_id = {question.id: question for question in questions}
        outcomes: list[Outcome] = make_outcomes(
            engine.run(requests), by_id, sql, schema, recipe.execution.equality, recipe.protocol.max_turns
        )
        scored = difficulty.score(outcomes)
        write_lines(path, map(dataclasses.asdict, scored))
        return f"{sum(s.right for s in scored)}/{sum(s.samples for s in scored)} right"

    return run
