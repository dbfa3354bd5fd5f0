"""`sqltrain plan`: what a recipe's training takes of each GPU, and what fits which GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flows.options import AsJson, Overrides, RecipeName, emit, open_recipe

if TYPE_CHECKING:
    from pipelines.recipe.config import Recipe
    from pipelines.training.memory import Memory, Setup

GPUS = (1, 2, 4, 8)
SIZES = (24, 48, 80)  # GB of usual GPUs
ROWS = (64, 32, 16, 8, 4, 2, 1)
PARTS = ("weights", "copies", "gradients", "optimizer", "activations", "logits", "cache")


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    sizes: Annotated[bool, typer.Option("--sizes", help="What fits which GPU, for models of 0.5B to 14B.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what training takes of each GPU: GiB by use, for 1 to 8 of them.

    Weights, gradients and optimiser are exact, activations estimated. Nothing is loaded.

    Examples:

      sqltrain plan sql_trail

      sqltrain plan sql_trail 'model.lora={rank: 32, alpha: 64}'

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
    if as_json:
        emit({"memory": rows})


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
