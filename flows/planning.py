"""`sqltrain plan`: what a recipe's training takes of each GPU, for how long, and what fits which GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.options import AsJson, Overrides, RecipeName, emit, open_recipe
from pipelines.core.errors import UserError

if TYPE_CHECKING:
    from pipelines.recipe.config import Recipe
    from pipelines.recipe.config_training import Grpo
    from pipelines.training.memory import Memory, Setup

GPUS = (1, 2, 4, 8)
SIZES = (24, 48, 80)  # GB of usual GPUs
ROWS = (64, 32, 16, 8, 4, 2, 1)
PARTS = ("weights", "copies", "gradients", "optimizer", "activations", "logits", "cache")


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="What fits which GPU, for models of 0.5B to 14B.")] = False,
    measured: Annotated[
        Path | None, typer.Option(help="The last line of benchmarks/gpu.py in a file: its throughput.")
    ] = None,
    trained: Annotated[
        float | None, typer.Option(min=0.001, max=1e9, help="Tokens a second that one GPU trains on.")
    ] = None,
    decoded: Annotated[
        float | None, typer.Option(min=0.001, max=1e9, help="Tokens a second that one GPU samples.")
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(min=1, max=1e7, help="Tokens of a mean episode, its prompt included.")
    ] = None,
    sampled: Annotated[
        float | None, typer.Option(min=1, max=1e7, help="Tokens of a mean episode that the policy sampled.")
    ] = None,
    price: Annotated[float, typer.Option(min=0, max=1e6, help="Price of a GPU's hour.")] = 0.0,
    questions: Annotated[
        int | None, typer.Option(min=1, max=1_000_000_000, help="Questions of GRPO, where the recipe counts epochs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what training takes of each GPU: GiB by use, for 1 to 8 of them, and hours and price from a throughput.

    Weights, gradients and optimiser are exact, activations estimated. Nothing is loaded.

    Examples:

      sqltrain plan sql_trail

      sqltrain plan sql_trail 'model.lora={rank: 32, alpha: 64}' --trained 6230 --decoded 5000 --tokens 3000 \
          --sampled 500 --price 2.5

      sqltrain plan sql_trail grpo.sampling.episode_tokens=8192 rollout.slots=16 --sizes
    """
    from flows import terminal

    loaded, _ = open_recipe(recipe, overrides or [])
    if sizes:
        for line in fitting(loaded):
            terminal.say(line)
        return
    rows = shares(loaded)
    for line in table(rows):
        terminal.say(line)
    rates = _measured(measured, loaded) if measured is not None else (trained, decoded)
    spent: list[dict[str, float]] = []
    if rates[0] and rates[1] and tokens and sampled:
        steps = _steps(loaded.grpo, questions)
        spent = [hours(loaded.grpo, steps, gpus, (rates[0], rates[1]), (tokens, sampled), price) for gpus in GPUS]
        for row in spent:
            cost = f", {row['price']:,.0f} at {price:g} an hour" if price else ""
            terminal.say(f"GRPO on {row['gpus']:.0f} GPUs: {row['hours']:.1f} h for {steps:,} steps{cost}")
    elif any((measured, trained, decoded, tokens, sampled, price)):
        raise UserError(
            "hours need a throughput and an episode's length", "Give --trained --decoded --tokens --sampled."
        )
    if as_json:
        emit({"memory": rows, "grpo": spent})


def shares(recipe: Recipe) -> list[dict[str, Any]]:
    """GiB on each GPU by use, for each stage that trains and each number of GPUs."""
    from pipelines.training import memory

    shape = memory.shape_of(recipe.model)
    kinds: list[Literal["sft", "grpo"]] = [kind for kind in ("sft", "grpo") if kind in recipe.stages]
    rows = []
    for kind in kinds:
        for gpus in GPUS:
            how = memory.setup(recipe, kind, gpus)
            rows.append({"stage": kind, "gpus": gpus, "way": how.way, **_gib(memory.estimate(shape, how))})
    return rows


def _gib(used: Memory) -> dict[str, float]:
    return {name: round(getattr(used, name) / 2**30, 2) for name in (*PARTS, "peak")}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines of text."""
    lines = [f"{'stage':6}{'GPUs':>5}  {'way':6}" + "".join(f"{name:>12}" for name in (*PARTS, "peak")) + "  fits"]
    for row in rows:
        fits = " ".join(str(size) for size in SIZES if row["peak"] <= size * 1e9 / 2**30) or "none"
        figures = "".join(f"{row[name]:12.2f}" for name in (*PARTS, "peak"))
        lines.append(f"{row['stage']:6}{row['gpus']:5}  {row['way']:6}{figures}  {fits}")
    return [*lines, f"GiB on each GPU; fits: of {', '.join(map(str, SIZES))} GB"]


def fitting(recipe: Recipe) -> list[str]:
    """For models of 0.5B to 14B: the ways that fit one GPU of each size, and eight of 80 GB, with the most rows."""
    from pipelines.training import memory

    heads = [*(f"{size} GB" for size in SIZES), f"8 x {SIZES[-1]} GB"]
    lines = ["| model | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    rank = recipe.model.lora.rank if recipe.model.lora is not None else 32
    for name, shape in memory.SHAPES.items():
        cells = []
        for gpus, size in [*((1, size) for size in SIZES), (8, SIZES[-1])]:
            base = memory.setup(recipe, "grpo", gpus)
            ways: tuple[memory.Way, ...] = (
                ("full", "lora", "qlora") if gpus == 1 else ("full", "zero2", "zero3", "lora")
            )
            most = {way: _most(shape, replace(base, way=way, half=True, rank=rank), size) for way in ways}
            cells.append(", ".join(f"{way} {rows}" for way, rows in most.items() if rows) or "–")
        lines.append(f"| {name.rpartition('/')[2]} | " + " | ".join(cells) + " |")
    tokens, slots = recipe.grpo.sampling.episode_tokens, memory.setup(recipe, "grpo", 1).slots
    return [
        *lines,
        "",
        f"rows of a micro-batch, episodes of {tokens:,} tokens, {slots} decoded together, adapters of rank {rank}",
    ]


def _most(shape: Any, how: Setup, size: int) -> int:
    """The largest micro-batch that fits GPUs of `size` GB; 0 where none does."""
    from pipelines.training import memory

    fits = (rows for rows in ROWS if memory.estimate(shape, replace(how, rows=rows)).peak <= size * 1e9)
    return next(fits, 0)


def _steps(grpo: Grpo, questions: int | None) -> int:
    from pipelines.training.sft import grpo_steps

    if grpo.epochs is not None and questions is None:
        raise UserError("the recipe counts epochs of GRPO", "Say how many questions there are: --questions.")
    return grpo_steps(grpo, questions or 0)


def hours(
    grpo: Grpo, steps: int, gpus: int, rates: tuple[float, float], lengths: tuple[float, float], price: float
) -> dict[str, float]:
    """Hours and price of GRPO where the work is shared evenly, and nobody waits.

    Args:
        rates: tokens a second that one GPU trains on, and that it samples.
        lengths: tokens of a mean episode, and those that the policy sampled.
    """
    episodes = grpo.questions_per_step * grpo.group
    generations = steps / grpo.updates_per_rollout
    seconds = episodes * (steps * lengths[0] / rates[0] + generations * lengths[1] / rates[1]) / gpus
    return {"gpus": gpus, "hours": seconds / 3600, "price": price * gpus * seconds / 3600}


def _measured(path: Path, recipe: Recipe) -> tuple[float, float]:
    """The best throughput of the recipe's size that the benchmark measured: tokens a second trained on, and sampled."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8").strip().splitlines()[-1])
        mine = [row for row in rows if f"-{row['shape']}" in recipe.model.source.lower()]
        best = max(mine, key=lambda row: float(row["trained_per_s"]))
        return float(best["trained_per_s"]), float(best["decoded_per_s"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        hint = f"It needs the last line of benchmarks/gpu.py for {recipe.model.source}."
        raise UserError(f"no throughput in {path}: {error}", hint) from None
