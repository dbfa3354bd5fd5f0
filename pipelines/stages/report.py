"""The last stage: the findings of a run, as one page and as tables."""

import dataclasses
from collections.abc import Mapping

from pipelines.core import frames
from pipelines.core.files import read_json, read_lines, write_json
from pipelines.curation.difficulty import pass_rates
from pipelines.report import writer
from pipelines.report.deviations_table import deviations_table
from pipelines.stages.answer_latency import EFFICIENCY, read_answer_costs
from pipelines.stages.context import Context
from pipelines.stages.graph import EVALUATED_MODELS, TRAINING
from pipelines.stages.report_systems import ReportedEvaluation, report_of


def build_report(ctx: Context) -> None:
    """Write `report.html`, which stands alone, and the same tables as Markdown, LaTeX and CSV."""
    ctx.progress.begin(ctx.stage, 1, "page")
    evaluations = _reported_evaluations(ctx)
    curves = {}
    for stage in TRAINING:
        if stage in ctx.inputs:
            lines = read_lines(ctx.inputs[stage] / "curves.jsonl")
            curves[stage.upper()] = [row for _, row in lines]
    rates: tuple[float, ...] = ()
    if "difficulty" in ctx.inputs:
        scored = frames.read(ctx.inputs["difficulty"] / frames.DATA)
        rates = pass_rates(scored)
    data = report_of(ctx.recipe, evaluations, ctx.inputs["test"])
    tables = data.tables
    acting = deviations_table(ctx.recipe)
    if acting.rows:
        tables = (*tables, acting)
    group = ctx.recipe.difficulty.group
    data = dataclasses.replace(data, tables=tables, curves=curves, pass_rates=rates, group=group)
    writer.write_all(data, ctx.folder)
    # Wall-clock times lie beside the tables, not among the results.
    costs = {evaluation.name: read_answer_costs(evaluation.folder) for evaluation in evaluations}
    write_json(ctx.folder / writer.TABLES / EFFICIENCY, costs)
    ctx.progress.advance(1)
    ctx.metrics({"systems": len(data.systems)})


def _reported_evaluations(ctx: Context) -> list[ReportedEvaluation]:
    """The evaluations of the run, in the order of training."""
    evaluations = []
    for stage, when in EVALUATED_MODELS.items():
        folder = ctx.inputs.get(f"evaluate_{stage}")
        if folder is None:
            continue
        # The base model's name, or the key of the stage that trained it.
        model = ctx.recipe.model.source
        if stage in ctx.inputs:
            model = f"{stage} {ctx.inputs[stage].name}"
        n_trained = _training_examples(ctx, stage)
        evaluations.append(ReportedEvaluation(folder, when, n_trained or None, model))
    return evaluations


def _training_examples(ctx: Context, stage: str) -> int:
    """Examples that the model of a stage was trained on: demonstrations, and after GRPO the questions it drew on."""
    seen = 0.0
    if stage != "model" and "sft" in ctx.inputs:
        seen += _stage_metrics(ctx, "filter").get("kept", 0)
    if stage == "grpo" and "difficulty" in ctx.inputs:
        chosen = _stage_metrics(ctx, "difficulty")
        seen += chosen.get("balanced", 0)
        seen += chosen.get("explore", 0)
    elif stage == "grpo":
        seen += _stage_metrics(ctx, "data").get("rl_examples", 0)
    return int(seen)


def _stage_metrics(ctx: Context, stage: str) -> Mapping[str, float]:
    metrics: Mapping[str, float] = read_json(ctx.inputs[stage] / "metrics.json")
    return metrics
