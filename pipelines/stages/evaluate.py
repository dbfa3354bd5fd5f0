"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines import frames
from pipelines.config import Recipe, Sampling
from pipelines.evaluation import evaluate, summary
from pipelines.evaluation.metrics import execution_accuracy, scored
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.protocols.base import build as build_protocol
from pipelines.rollout.engine import EpisodeRequest, RolloutEngine
from pipelines.stages.context import Context, checkpoint_of
from pipelines.stages.inputs import (
    DATA,
    episode_seed,
    examples,
    gold_schemas,
    schemas,
    single_thread,
    sql_engine,
    write_lines,
)
from pipelines.stages.policies import policy
from pipelines.stages.shards import Run, Shards
from pipelines.store import write_json
from pipelines.types import Example, Trajectory, from_dict, to_dict

RECORDS = "records.jsonl"
ONCE = "once"  # the greedy pass in which the agent must answer without looking


def build(ctx: Context) -> None:
    """Write every trajectory (`data.parquet`), every record (`records.jsonl`), the summary and its figures."""
    questions = examples(ctx.inputs["data"], "test")
    trained = next(ctx.inputs[name] for name in ("grpo", "sft", "model") if name in ctx.inputs)
    evaluate_questions(ctx, questions, checkpoint_of(trained), ctx.inputs.get("gold_schema"))


def evaluate_questions(ctx: Context, questions: Sequence[Example], checkpoint: str, gold: Path | None) -> None:
    """Evaluate any checkpoint on any questions; finished shards survive a kill."""
    recipe = ctx.recipe
    shards = Shards(questions, recipe.rollout.shard, ctx.folder)
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    shards.run(start, (recipe, checkpoint, gold), recipe.rollout.processes, ctx.progress)
    rows = list(shards.rows())
    kept = [row for row in rows if row["pass"] != ONCE]
    whole = [from_dict(Trajectory, row["trajectory"]) for row in kept]
    frames.write(ctx.folder / DATA, frames.to_frame(whole, extra=[{"pass": row["pass"]} for row in kept]))
    write_lines(ctx.folder / RECORDS, ({"pass": row["pass"], "record": row["record"]} for row in rows))
    figures = summary.summarise(
        records(ctx.folder, "greedy", "sampled"), recipe.execution.equality, recipe.evaluation.ks, seed=recipe.seed
    )
    write_json(ctx.folder / "summary.json", to_dict(figures))
    ctx.metrics({**headline(figures), **figures.flat(), **_once(records(ctx.folder, ONCE), recipe)})


def records(folder: Path, *passes: str) -> list[EpisodeRecord]:
    """The evaluation records of a finished stage, of these passes ("greedy", "sampled", "once")."""
    with (folder / RECORDS).open(encoding="utf-8") as file:
        rows = map(json.loads, file)
        return [from_dict(EpisodeRecord, row["record"]) for row in rows if row["pass"] in passes]


def headline(figures: summary.Summary) -> dict[str, float]:
    """The few numbers of the end-of-run table, by the recipe's equality, intervals beside them."""
    found: dict[str, float] = {}
    for name, each in (("ex", figures.ex.get(figures.equality)), ("ex_sampled", figures.sampled)):
        if each is not None:
            found |= {name: each.value, f"{name}_low": each.low, f"{name}_high": each.high}
    if figures.points:
        last = figures.points[-1]
        found |= {"k": last.k, "majority": last.majority_at.value, "pass_at_k": last.pass_at.value}
    for name, spread in (("turns", figures.turns), ("tokens", figures.tokens_out)):
        if spread is not None:
            found[name] = spread.mean
    return found


def _once(forced: list[EpisodeRecord], recipe: Recipe) -> dict[str, float]:
    """EX of the same model forced to answer without looking, and on the questions that need a look."""
    equality = recipe.execution.equality
    found: dict[str, float] = {}
    for name, part in (("ex_at_once", forced), ("ex_at_once_probe", [one for one in forced if one.needs_probe])):
        good = execution_accuracy(scored(part), equality, recipe.seed)
        if good is not None:
            found |= {name: good.value, f"{name}_low": good.low, f"{name}_high": good.high}
    return found


def start(recipe: Recipe, checkpoint: str, gold: Path | None) -> Run:
    """A process's own policy; its run writes one line an episode: the pass, the trajectory and its record."""
    single_thread()
    sql, schema, links = sql_engine(recipe, workers=1), schemas(recipe), gold_schemas(gold)
    model, settings = policy(checkpoint, recipe), recipe.evaluation
    equalities = tuple(dict.fromkeys((recipe.execution.equality, *settings.equalities)))
    greedy = settings.sampling.model_copy(update={"temperature": 0.0})
    turns = recipe.protocol.max_turns_eval
    passes: list[tuple[str, Mode, Sampling, int, int]] = [
        ("greedy", "greedy", greedy, turns, 1),
        ("sampled", "sampled", settings.sampling, turns, settings.samples),
    ]
    if settings.forced_single_turn:
        passes.append((ONCE, "greedy", greedy, 0, 1))

    def run(questions: Sequence[Any], path: Path) -> str:
        by_id = {question.id: question for question in questions}
        lines: list[dict[str, Any]] = []
        for name, mode, sampling, max_turns, samples in passes:
            engine = RolloutEngine(model, build_protocol(recipe.protocol), sql, sampling, max_turns, schema)
            done = engine.run(
                [
                    EpisodeRequest(question, sample, episode_seed(recipe.seed, question.id, sample))
                    for question in questions
                    for sample in range(samples)
                ]
            )
            judged = evaluate.judge(done, by_id, sql, schema, equalities, mode, links)
            lines += [
                {"pass": name, "trajectory": to_dict(trajectory), "record": to_dict(record)}
                for trajectory, record in zip(done, judged, strict=True)
            ]
        write_lines(path, lines)
        right = [line["record"]["scores"][equalities[0]] for line in lines if line["pass"] == "greedy"]
        return f"greedy {100 * sum(right) / max(1, len(right)):.0f} %"

    return run
