"""Stage 2: a teacher answers the SFT questions, turn by turn, against the real databases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines import frames
from pipelines.config import Recipe
from pipelines.protocols.base import build as build_protocol
from pipelines.rollout.engine import EpisodeRequest, RolloutEngine
from pipelines.rollout.policies.base import Policy
from pipelines.stages.context import Context
from pipelines.stages.inputs import DATA, episode_seed, examples, schemas, sql_engine
from pipelines.stages.shards import Run, Shards
from pipelines.types import StopReason, Trajectory, read_jsonl, write_jsonl

SHARD = 512  # questions; scripted episodes are quick, so shards are larger than those of a model


def build(ctx: Context) -> None:
    """Write `data.parquet` (one trajectory a row) from shards that a killed run leaves behind."""
    questions = examples(ctx.inputs["data"], "sft")
    shards = Shards(questions, SHARD, ctx.folder)
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    teacher = ctx.recipe.synthesis.teacher
    processes = ctx.recipe.rollout.processes if teacher.kind == "oracle" else 1
    shards.run(start, (ctx.recipe,), processes, ctx.progress)
    made = [trajectory for index in range(len(shards)) for trajectory in read_jsonl(shards.path(index), Trajectory)]
    frames.write(ctx.folder / DATA, frames.to_frame(made))
    broken = sum(trajectory.stop is StopReason.BROKEN for trajectory in made)
    turns = sum(len(trajectory.turns) for trajectory in made) / max(1, len(made))
    ctx.metrics({"trajectories": len(made), "broken": broken, "turns_mean": turns})


def start(recipe: Recipe) -> Run:
    """A process's own engine; its run answers one shard of questions."""
    protocol = build_protocol(recipe.protocol)
    engine = RolloutEngine(
        teacher(recipe),
        protocol,
        sql_engine(recipe, workers=1),
        recipe.synthesis.teacher.sampling,
        recipe.protocol.max_turns,
        schemas(recipe),
    )

    def run(questions: Sequence[Any], path: Path) -> str:
        requests = [
            EpisodeRequest(question, sample, episode_seed(recipe.seed, question.id, sample))
            for question in questions
            for sample in range(recipe.synthesis.samples)
        ]
        done = engine.run(requests)
        write_jsonl(path, done)
        answered = sum(trajectory.final_sql is not None for trajectory in done)
        return f"{answered}/{len(done)} answered"

    return run


def teacher(recipe: Recipe) -> Policy:
    """The policy that the recipe's teacher section names."""
    settings = recipe.synthesis.teacher
    protocol = build_protocol(recipe.protocol)
    if settings.kind == "oracle":
        from pipelines.rollout.policies.oracle import OraclePolicy

        return OraclePolicy(protocol, settings.error_rate)
    from pipelines.rollout.policies.openai import OpenAIPolicy

    return OpenAIPolicy.named(settings)
