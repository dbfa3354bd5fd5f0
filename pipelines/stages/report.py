"""The last stage: everything that a run found out, as one page and as tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from pipelines import frames
from pipelines.evaluation import report
from pipelines.evaluation.evaluate import previews
from pipelines.evaluation.material import ReportData, System
from pipelines.sql.schema import render
from pipelines.stages.context import Context
from pipelines.stages.evaluate import records
from pipelines.stages.inputs import DATA, examples, schemas, sql_engine
from pipelines.store import read_json
from pipelines.types import Trajectory

WHEN = {"evaluate_model": "before SFT", "evaluate_sft": "after SFT", "evaluate_grpo": "after GRPO"}


def build(ctx: Context) -> None:
    """Write `report.html`, which stands alone, and the same tables as Markdown, LaTeX and CSV."""
    ctx.progress.begin(ctx.stage, 1, "page")
    data = gather(ctx)
    report.write(data, ctx.folder / "report.html")
    tables = ctx.folder / "tables"
    tables.mkdir(exist_ok=True)
    report.write_tables(data, tables)
    ctx.progress.advance(1)
    ctx.metrics({"systems": len(data.systems)})


def gather(ctx: Context) -> ReportData:
    """What the finished stages say, as the report's data."""
    recipe = ctx.recipe
    systems = tuple(_system(ctx, name, when) for name, when in WHEN.items() if name in ctx.inputs)
    asked = {record.example_id for system in systems for record in system.records}
    questions = {one.id: one for one in examples(ctx.inputs["data"], "test") if one.id in asked}
    schema = schemas(recipe)
    with sql_engine(recipe) as sql:
        results = previews([record for system in systems for record in system.records], questions, sql)
    return ReportData(
        title=recipe.name,
        equality=recipe.execution.equality,
        systems=systems,
        examples=questions,
        schemas={one.database.id: render(schema(one.database), "ddl") for one in questions.values()},
        curves={
            name.upper(): _lines(ctx.inputs[name] / "curves.jsonl") for name in ("sft", "grpo") if name in ctx.inputs
        },
        pass_rates=_pass_rates(ctx),
        group=recipe.difficulty.group,
        results=results,
        facts={"recipe": recipe.name, "seed": str(recipe.seed), "protocol": recipe.protocol.name},
        ks=recipe.evaluation.ks,
        seed=recipe.seed,
    )


def _system(ctx: Context, name: str, when: str) -> System:
    folder = ctx.inputs[name]
    frame = frames.read(folder / DATA)
    made = frames.from_frame(frame, Trajectory)
    trained = _trained_on(ctx) if name != "evaluate_model" else None
    return System(when, tuple(records(folder, "greedy", "sampled")), tuple(made), trained, note=folder.name)


def _trained_on(ctx: Context) -> int | None:
    """Demonstrations that SFT saw, and questions that GRPO drew on."""
    numbers = [read_json(ctx.inputs[name] / "metrics.json") for name in ("filter", "difficulty") if name in ctx.inputs]
    return sum(int(one.get("kept", 0) + one.get("balanced", 0) + one.get("explore", 0)) for one in numbers) or None


def _pass_rates(ctx: Context) -> tuple[float, ...]:
    if "difficulty" not in ctx.inputs:
        return ()
    frame = frames.read(ctx.inputs["difficulty"] / DATA).filter(pl.col("samples") > 0)
    return tuple((frame["right"] / frame["samples"]).to_list())


def _lines(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
