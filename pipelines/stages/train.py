"""Stages 5 and 7: the base model, supervised fine-tuning and GRPO, each trained in a child process."""

import os
from collections.abc import Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.core import frames
from pipelines.core.errors import RecipeError
from pipelines.core.files import read_lines, write_json
from pipelines.core.store import Store
from pipelines.core.types import Example, write_jsonl
from pipelines.curation.filtering import seeded_rank
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas
from pipelines.protocols.base import Protocol, build_protocol
from pipelines.recipe.checkpoint import write_card
from pipelines.rollout.gguf_model import is_gguf
from pipelines.rollout.policies.factories import serving
from pipelines.stages.context import REFERENCE, Context, each_example, each_trajectory, examples, examples_at, rows_of
from pipelines.stages.gguf_folders import gguf_folder, link_folder
from pipelines.training.launch import SILENCE_S, train_in_child
from pipelines.training.plan import HELD_OUT, HELD_OUT_TURNS, SERVED, Plan
from pipelines.training.watch import nothing_learned, values

CORPUS = 4000  # Texts: enough for a tokenizer of some 1,300 entries.
SPARE_S = 60.0  # Time for a process that waited too long to report it itself.


def model(ctx: Context) -> None:
    """Write `model/` (a tiny model that has learned nothing, or a GGUF file's) or a reference to the base model."""
    source = ctx.recipe.model.source
    ctx.progress.begin(ctx.stage, 1, "model")
    if source == "tiny":
        _make_tiny_model(ctx)
        _write_checkpoint_card(ctx)
    elif is_gguf(source):
        store = Store(ctx.folder.parent.parent)
        plain_folder = gguf_folder(Path(source), store, ctx.progress.say)
        link_folder(plain_folder, ctx.folder / "model")
        _write_checkpoint_card(ctx)
    else:
        _refer_to(ctx, source)
    ctx.progress.advance(1)
    ctx.metrics({})


def _make_tiny_model(ctx: Context) -> None:
    """Write a model of random weights with a tokenizer of the recipe's own texts."""
    from pipelines.training.model import make_tiny

    recipe = ctx.recipe
    protocol = build_protocol(recipe.protocol)
    corpus = _corpus(ctx, protocol)
    make_tiny(recipe.model, corpus, protocol.tags, ctx.folder / "model", recipe.seed)


def _refer_to(ctx: Context, source: str) -> None:
    """Write a reference to a base model; to a checkpoint of the same store by a relative path, for a store may move."""
    folder = ctx.folder.resolve()
    path = Path(source).expanduser().resolve()
    if path.is_relative_to(folder.parent.parent):
        source = os.path.relpath(path, folder)
    reference = {"source": source, "revision": ctx.recipe.model.revision}
    write_json(ctx.folder / REFERENCE, reference)


def _corpus(ctx: Context, protocol: Protocol) -> list[str]:
    """Texts from which the tiny tokenizer learns its merges: demonstrations, or else prompts and gold SQL."""
    texts: list[str] = []
    if "filter" in ctx.inputs:
        demonstrations = each_trajectory(ctx.inputs["filter"] / frames.DATA)
        for trajectory in islice(demonstrations, CORPUS):
            texts += (text for _, text in trajectory.prompt)
            for turn in trajectory.turns:
                texts.append(turn.text)
                texts.append(turn.observation or "")
        return texts
    schema = schemas(ctx.recipe)
    questions = each_example(ctx.inputs["data"], "sft", "rl")
    for example in islice(questions, CORPUS):
        prompt = protocol.prompt(example, schema(example.database), 1)
        texts += (text for _, text in prompt)
        texts.append(example.gold_sql)
    return texts


def sft(ctx: Context) -> None:
    """Write the fine-tuned `model/` and its curves."""
    demonstrations = ctx.inputs["filter"] / frames.DATA
    plan = Plan(kind="sft", recipe=ctx.recipe, checkpoint_in=ctx.checkpoint, data=demonstrations, out=ctx.folder)
    _train(ctx, plan, ("loss",))


def grpo(ctx: Context) -> None:
    """Write the policy's `model/` after GRPO, and its curves: reward terms, EX, turns, entropy and more."""
    _refuse_unearnable_reward(ctx)
    data = ctx.folder / "input.jsonl"
    write_jsonl(data, _questions(ctx))
    plan = Plan(
        kind="grpo",
        recipe=ctx.recipe,
        checkpoint_in=ctx.checkpoint,
        data=data,
        held_out=_write_held_out(ctx),
        gold_schemas=ctx.inputs.get("gold_schema"),
        out=ctx.folder,
    )
    served_folder = ctx.folder / SERVED
    with serving(ctx.checkpoint, ctx.recipe, ctx.folder, ctx.progress.say, served_folder) as served:
        plan = plan.model_copy(update={"recipe": served.recipe})
        _train(ctx, plan, ("reward", "ex"), served.training)


def _refuse_unearnable_reward(ctx: Context) -> None:
    """Refuse a schema reward without a gold schema: no episode could earn it."""
    if "gold_schema" not in ctx.inputs:
        return
    pays_schemas = any(term.term == "trust_schema" and term.weight for term in ctx.recipe.rewards)
    if pays_schemas and not gold_schemas(ctx.inputs["gold_schema"]):
        raise RecipeError(
            "the reward trust_schema has no gold schema to hold proposals against: no two extractors agree on any",
            "DuckDB and PostgreSQL have one static extractor: name a second, gold_schema.extractors=[NAME].",
        )


def _write_held_out(ctx: Context) -> Path | None:
    """Write `grpo.held_out` questions of the dev pool, drawn by the seed; None if the recipe asks for none."""
    path = ctx.folder / "held_out.jsonl"
    count = ctx.recipe.grpo.held_out
    if not count:
        write_jsonl(path, [])
        return None

    def rank(example: Example) -> int:
        return seeded_rank(example.id, 0, ctx.recipe.seed)

    dev = examples(ctx.inputs["data"], "dev")
    drawn = sorted(dev, key=rank)[:count]
    write_jsonl(path, drawn)
    if not dev:
        return None
    return path


def _questions(ctx: Context) -> list[Example]:
    """The questions of the RL pools: those that difficulty scoring chose, or all of them.

    The chosen ones come by ascending S(q): the hardest that were ever solved first. With `grpo.order=easy_first` this
    is turned round, and questions that were never solved stay at the end.
    """
    data = ctx.inputs["data"]
    if "difficulty" not in ctx.inputs:
        return examples(data, "rl")
    selected = frames.read(ctx.inputs["difficulty"] / "selected.parquet")
    ids = selected["example_id"].to_list()
    if ctx.recipe.grpo.order == "easy_first":
        scored = frames.read(ctx.inputs["difficulty"] / frames.DATA, "example_id", "right")
        unsolved = scored.filter(pl.col("right") == 0)
        ids = _easy_first(ids, set(unsolved["example_id"]))
    row_of: dict[str, int] = {}
    for pool in ("sft", "rl"):  # A question of both pools is learned as the RL pool has it: there it was scored.
        ids_and_rows = rows_of(data, pool).select("id", "row")
        row_of.update(ids_and_rows.iter_rows())
    rows = [row_of[id] for id in ids]
    return examples_at(data, rows)


def _easy_first(ids: Sequence[str], never_solved: Set[str]) -> list[str]:
    """The ids by descending S(q), and those that were never solved at the end, as they came."""
    solved_ids = [id for id in ids if id not in never_solved]
    unsolved_ids = [id for id in ids if id in never_solved]
    return [*reversed(solved_ids), *unsolved_ids]


def _train(ctx: Context, plan: Plan, curves: tuple[str, ...], devices: tuple[str, ...] | None = None) -> None:
    """Train in a child process, with its steps on the bar, and summarise its curves.

    Args:
        curves: names of the values that the bar shows.
        devices: the GPUs to train on, as CUDA names them; None for all.
    """

    def on_event(event: dict[str, Any]) -> None:
        progress = ctx.progress
        match event["event"]:
            case "begin":
                progress.begin(ctx.stage, event["steps"], "steps")
                progress.advance(event["step"])
            case "step":
                figures = [f"{name} {event[name]:.3f}" for name in curves if name in event]
                progress.advance(1, "  ".join(figures))
            case "note":
                progress.say(f"{ctx.stage}: {event['text']}")
            case "alarm":
                progress.warn(f"{ctx.stage}: {event['text']}")

    silence = max(SILENCE_S, plan.recipe.hardware.timeout_s + SPARE_S)
    train_in_child(plan, ctx.folder, on_event, devices, silence)
    _write_checkpoint_card(ctx)
    ctx.metrics(summarise_curves(ctx))
    if plan.kind == "grpo":
        curve_lines = _read_curves(ctx)
        alarm = nothing_learned(curve_lines, ctx.recipe.grpo)
        if alarm is not None:
            ctx.progress.warn(f"{ctx.stage}: {alarm}")


def _write_checkpoint_card(ctx: Context) -> None:
    in_order = sorted(ctx.inputs.items())
    inputs = {name: folder.name for name, folder in in_order}
    write_card(ctx.folder / "model", ctx.recipe, ctx.stage, inputs)


def _read_curves(ctx: Context) -> list[dict[str, Any]]:
    return [row for _, row in read_lines(ctx.folder / "curves.jsonl")]


def summarise_curves(ctx: Context) -> dict[str, float]:
    """Steps, the mean of each curve over the last tenth of the run, and the last accuracy on held-out questions."""
    lines = _read_curves(ctx)
    last_step = lines[-1]["step"]
    figures: dict[str, float] = {"steps": last_step}
    n_last = max(1, len(lines) // 10)
    last_tenth = lines[-n_last:]
    logged: set[str] = set().union(*last_tenth)
    names = logged - {"step", HELD_OUT, HELD_OUT_TURNS}
    for name in sorted(names):
        curve = values(last_tenth, name)
        if all(isinstance(value, int | float) for value in curve):
            figures[name] = sum(curve) / len(curve)
    measured = [line for line in lines if HELD_OUT in line]
    if measured:
        last_measured = measured[-1]
        for name in (HELD_OUT, HELD_OUT_TURNS):
            if name in last_measured:
                figures[name] = last_measured[name]
    return figures
