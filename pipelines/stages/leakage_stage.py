"""Training questions that are held out, too: the leakage stage, and the same of the pools of a data stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.core import frames
from pipelines.core.files import write_json
from pipelines.core.types import Example
from pipelines.curation import leakage
from pipelines.stages.context import LEAKAGE, TRAINED, Context, each_example, examples


def build_leakage(ctx: Context) -> None:
    """Write which training questions the benchmark repeats (`leakage.json`), and the benchmark's questions beside."""
    ctx.progress.begin(ctx.stage, 1, "benchmark")
    questions = examples(ctx.inputs["test"], "test")
    rows = []
    for example in questions:
        row = {
            "id": example.id,
            "pool": "test",
            "question": example.question,
            "database_id": example.database.id,
        }
        rows.append(row)
    frames.write(ctx.folder / frames.DATA, pl.DataFrame(rows))
    leaks = write_leakage(ctx.folder, ctx.inputs["data"], questions)
    ctx.progress.advance(1)
    figures: dict[str, float] = {"questions": len(questions)}
    for pool, counts in leaks.items():
        figures[f"{pool}_repeats"] = sum(counts["same_database"].values())
    ctx.metrics(figures)


def note_leakage(folder: Path) -> None:
    """Write which questions of a data stage's training pools its own held-out questions repeat."""
    held_out = examples(folder, "dev", "test")
    write_leakage(folder, folder, held_out)


def write_leakage(folder: Path, data: Path, held_out: Sequence[Example]) -> dict[str, dict[str, Any]]:
    """Write to `folder`, and return, the held-out questions that each training pool of a data stage repeats."""
    leaks: dict[str, dict[str, Any]] = {}
    for pool in TRAINED:
        training_questions = each_example(data, pool)
        leaks[pool] = leakage.leakage_report(training_questions, held_out)
    write_json(folder / LEAKAGE, leaks)
    return leaks
