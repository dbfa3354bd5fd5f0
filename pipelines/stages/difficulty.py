"""Stage 6: how often the policy solves each RL question, and which of them GRPO should train on."""

import dataclasses
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import write_lines
from pipelines.curation import difficulty
from pipelines.environment.core import Environment, RolloutMode
from pipelines.recipe.config import Recipe
from pipelines.rollout.episode import EpisodeRequest, episode_seed
from pipelines.rollout.policies.factories import policy
from pipelines.stages.context import Context, examples_at, rows_of, single_thread
from pipelines.stages.served_policy import serve_policy
from pipelines.stages.shards import Run, Shards


def score_difficulty(ctx: Context) -> None:
    """Write every question's pass rate to `data.parquet`, and those chosen for RL, in order, to `selected.parquet`."""
    settings = ctx.recipe.difficulty
    seed = ctx.recipe.seed
    pools = _candidates(ctx)
    all_questions = pl.concat(pools)
    questions = all_questions.unique("id", keep="first", maintain_order=True)
    rows = array("q", questions["row"])
    scored = _score_rows(ctx, rows)
    unscored = len(rows) - len(scored)
    if unscored:
        ctx.progress.warn(f"{unscored} of {len(rows)} questions have no score: all their episodes broke")
    scored_pools = []
    for pool in pools:
        ids = pool.select("id")
        scored_pool = scored.join(ids, left_on="example_id", right_on="id", maintain_order="right")
        scored_pools.append(scored_pool)
    if settings.explore_parts:
        sft_pool, *rl_pools = scored_pools
        chosen = difficulty.select_rl_set_by_parts(sft_pool, rl_pools, settings, seed)
    else:
        all_pools = pl.concat(scored_pools)
        chosen = difficulty.select_rl_set(all_pools, settings, seed)
    if unscored and not len(scored):
        raise DataError(f"all episodes of {unscored} questions broke: none has a score", "The log says more.")
    ids_and_sets = [(id, "balanced") for id in chosen.balanced]
    ids_and_sets += [(id, "explore") for id in chosen.explore]
    if not ids_and_sets:
        raise DataError(
            f"none of {len(scored)} questions is worth training on: each is always or never solved",
            "Set difficulty.max_pass, or raise difficulty.explore or difficulty.candidates.",
        )
    frames.write(ctx.folder / frames.DATA, scored)
    selected = pl.DataFrame(ids_and_sets, ["example_id", "set"], orient="row")
    frames.write(ctx.folder / "selected.parquet", selected)
    figures = difficulty.difficulty_figures(scored, settings.group)
    figures["balanced"] = len(chosen.balanced)
    figures["explore"] = len(chosen.explore)
    figures["unscored"] = unscored
    ctx.metrics(figures)


def _score_rows(ctx: Context, rows: Sequence[int]) -> pl.DataFrame:
    """A `ScoredQuestion` for each row of the data stage; a question whose episodes all broke has none."""
    shards = Shards(rows, ctx.recipe.rollout.shard, ctx.folder)
    ctx.progress.begin(ctx.stage, len(rows), "questions")
    is_unfinished = not shards.is_complete()
    with serve_policy(ctx, ctx.checkpoint, is_unfinished) as recipe:
        rollout = recipe.rollout
        args = (recipe, ctx.checkpoint, ctx.inputs["data"])
        shards.run(make_scoring_run, args, rollout.processes, ctx.progress, rollout.dask)
    tables = [pl.DataFrame(schema=difficulty.COLUMNS)]
    for index in range(len(shards)):
        scored_questions = shards.read(index)
        table = pl.DataFrame(scored_questions, schema=difficulty.COLUMNS)
        tables.append(table)
    return pl.concat(tables)


def _candidates(ctx: Context) -> list[pl.DataFrame]:
    """The scored questions, by `id` and `row`: SFT's own if the exploration set draws on them, then each RL pool.

    `difficulty.candidates` bounds each pool, by the seed.
    """
    settings = ctx.recipe.difficulty
    data = ctx.inputs["data"]
    n_sources = len(ctx.recipe.data.rl)
    pools = [rows_of(data, "rl", part=part) for part in range(n_sources)]
    if settings.explore_parts:
        sft_pool = pools[0].clear()
        explores_sft = bool(settings.explore_parts[0])
        if explores_sft:
            sft_pool = _trained_questions(ctx)
        pools.insert(0, sft_pool)
    if settings.candidates is None:
        return pools
    return [_draw_candidates(pool, settings.candidates, ctx.recipe.seed) for pool in pools]


def _trained_questions(ctx: Context) -> pl.DataFrame:
    """The questions that SFT was trained on; all of its pool if it was not trained."""
    questions = rows_of(ctx.inputs["data"], "sft")
    if "filter" not in ctx.inputs:
        return questions
    trained_ids = frames.read(ctx.inputs["filter"] / frames.DATA, "example_id")
    return questions.join(trained_ids, left_on="id", right_on="example_id", how="semi", maintain_order="left")


def _draw_candidates(pool: pl.DataFrame, count: int, seed: int) -> pl.DataFrame:
    """At most `count` rows in their order, drawn by the seed."""
    if count >= len(pool):
        return pool
    rng = random.Random(f"{seed}/candidates")
    drawn = rng.sample(range(len(pool)), count)
    return pool[sorted(drawn)]


def make_scoring_run(recipe: Recipe, checkpoint: str, data: Path) -> Run:
    """A process's own policy; its run writes a `ScoredQuestion` a line. The items are rows of the folder `data`."""
    single_thread()
    environment = Environment(recipe)
    scored_policy = policy(checkpoint, recipe)

    def run(rows: Sequence[Any], path: Path) -> str:
        questions = examples_at(data, rows)
        requests = []
        for question in questions:
            for sample in range(recipe.difficulty.group):
                seed = episode_seed(recipe.seed, question.id, sample)
                requests.append(EpisodeRequest(question, sample, seed))
        mode = RolloutMode.difficulty(recipe)
        trajectories = environment.run(scored_policy, requests, mode)
        outcomes = environment.judge(trajectories, questions)
        scored = difficulty.score_questions(outcomes)
        write_lines(path, map(dataclasses.asdict, scored))
        right = sum(question.right for question in scored)
        samples = sum(question.samples for question in scored)
        return f"{right}/{samples} right"

    return run
