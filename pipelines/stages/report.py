"""The last stage: the findings of a run, as one page and as tables."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import polars as pl

from pipelines.core import frames
from pipelines.core.files import read_json, read_lines, write_json
from pipelines.core.frames import DATA
from pipelines.core.types import Trajectory
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation.record_files import SELECTED, SINGLE_TURN, read_records
from pipelines.evaluation.voting import Rule
from pipelines.recipe import deviations
from pipelines.recipe.config import Recipe, Source
from pipelines.report import writer
from pipelines.report.data import ReportData, System, with_texts
from pipelines.report.formats import ReportTable, TableColumn
from pipelines.stages.answer_latency import EFFICIENCY, answer_costs, read_latencies
from pipelines.stages.context import Context, examples
from pipelines.stages.evaluation_texts import count_left_out

WHEN = {"evaluate_model": "before SFT", "evaluate_sft": "after SFT", "evaluate_grpo": "after GRPO"}


def build_report(ctx: Context) -> None:
    """Write `report.html`, which stands alone, and the same tables as Markdown, LaTeX and CSV."""
    ctx.progress.begin(ctx.stage, 1, "page")
    data = gather_report(ctx)
    writer.write(data, ctx.folder / "report.html")
    tables = ctx.folder / "tables"
    tables.mkdir(exist_ok=True)
    writer.write_tables(data, tables)
    clock = {}
    for stage, when in WHEN.items():
        if stage in ctx.inputs:
            folder = ctx.inputs[stage]
            r_ves = read_json(folder / EFFICIENCY).get("r_ves")
            clock[when] = answer_costs(read_latencies(folder), r_ves)
    write_json(tables / EFFICIENCY, clock)  # wall-clock times: beside the tables, not among the results
    ctx.progress.advance(1)
    ctx.metrics({"systems": len(data.systems)})


def gather_report(ctx: Context) -> ReportData:
    """The report's data, from the finished stages."""
    systems: list[System] = []
    for evaluation, when in WHEN.items():
        if evaluation in ctx.inputs:
            systems += _systems_of_stage(ctx, evaluation, when)
    data = of_systems(ctx.recipe, tuple(systems), ctx.inputs["test"])
    tables = data.tables
    acting = deviations_table(ctx.recipe)
    if acting.rows:
        tables = (*tables, acting)
    curves = {}
    for stage in ("sft", "grpo"):
        if stage in ctx.inputs:
            lines = read_lines(ctx.inputs[stage] / "curves.jsonl")
            curves[stage.upper()] = [row for _, row in lines]
    return dataclasses.replace(
        data, tables=tables, curves=curves, pass_rates=_pass_rates(ctx), group=ctx.recipe.difficulty.group
    )


def _systems_of_stage(ctx: Context, evaluation: str, when: str) -> Iterator[System]:
    """The systems of an evaluation stage, with the model that answered and the number of its training examples."""
    stage = evaluation.removeprefix("evaluate_")
    # The base model's name, or the key of the stage that trained it.
    model = ctx.recipe.model.source
    if stage in ctx.inputs:
        model = f"{stage} {ctx.inputs[stage].name}"
    n_trained = _training_examples(ctx, stage)
    return systems_of(ctx.inputs[evaluation], when, n_trained or None, model)


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


def _pass_rates(ctx: Context) -> tuple[float, ...]:
    """The pass rates of the scored questions; () without difficulty scoring."""
    if "difficulty" not in ctx.inputs:
        return ()
    scored = frames.read(ctx.inputs["difficulty"] / DATA)
    frame = scored.filter(pl.col("samples") > 0)
    return tuple((frame["right"] / frame["samples"]).to_list())


def deviations_table(recipe: Recipe) -> ReportTable:
    """The deviations from the recipe's paper that acted in this run; no rows for a recipe without a paper."""
    columns = tuple(map(TableColumn, ("in the paper", "kind", "the paper", "here", "setting")))
    rows = []
    for deviation in deviations.acting(recipe):
        setting = " ".join(deviation.setting) or None
        rows.append((deviation.where, deviation.kind, deviation.paper, deviation.ours, setting))
    note = "The setting does it the paper's way, or in another way where the paper is silent."
    return ReportTable("deviations", f"Deviations from the paper: {recipe.paper}", columns, tuple(rows), note)


def of_systems(recipe: Recipe, systems: tuple[System, ...], test: Path) -> ReportData:
    """A report of any systems that answered the questions of a finished `test` stage."""
    answered: set[str] = set()
    for system in systems:
        answered.update(record.example_id for record in system.records)
    questions = {}
    for example in examples(test, "test"):
        if example.id in answered:
            questions[example.id] = example
    models = {f"model ({system.name})": system.note for system in systems if system.note}
    data = ReportData(
        title=recipe.name,
        equality=recipe.headline,
        systems=systems,
        examples=questions,
        facts={
            "recipe": recipe.name,
            "benchmark": recipe.benchmark.name,
            "seed": str(recipe.seed),
            "protocol": recipe.protocol.name,
            "schema": recipe.protocol.schema_view,
            "turns at most": str(recipe.protocol.max_turns_eval),
            "samples": _samples_in_words(recipe),
            **models,
            **incomplete_benchmark(test, len(questions), recipe.benchmark),
        },
        ks=recipe.evaluation.ks,
        rule=Rule.of(recipe.evaluation),
        metrics=recipe.evaluation.metrics,
        seed=recipe.seed,
    )
    with sql_engine(recipe) as sql:
        return with_texts(data, sql, schemas(recipe))


def _samples_in_words(recipe: Recipe) -> str:
    samples = recipe.evaluation.samples
    if not samples:
        return "none"
    sampling = recipe.evaluation.sampling
    return f"{samples} at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"


def systems_of(folder: Path, name: str, trained: int | None = None, note: str = "") -> Iterator[System]:
    """The system of a finished evaluation and, if an endpoint chose among its samples, their answers as another.

    Args:
        trained: examples that its training used.
        note: what answered: a checkpoint's digest, an endpoint's model.
    """
    frame = frames.read(folder / DATA)
    missing = read_json(folder / "summary.json").get("left_out", {})
    for title, passes in ((name, ("greedy", "sampled")), (f"{name}, selected", (SELECTED,))):
        pass_records = tuple(read_records(folder, *passes))
        if not pass_records:
            continue
        of_passes = frame.filter(pl.col("pass").is_in(passes))
        trajectories = frames.from_frame(of_passes, Trajectory)
        system = System(title, pass_records, tuple(trajectories), trained, left_out=missing)
        if title == name:
            single_turn = tuple(read_records(folder, SINGLE_TURN))
            system = dataclasses.replace(system, note=note, single_turn=single_turn)
        yield system


def incomplete_benchmark(test: Path, usable: int, source: Source) -> dict[str, str]:
    """The fact that a benchmark is incomplete: "972 of 1,034 (62 missing database)"; {} if all of it can run."""
    reasons = count_left_out(test)
    if not reasons:
        return {}
    why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
    if source.count is None and source.hardness is None:
        total = usable + sum(reasons.values())
        return {"questions": f"{usable:,} of {total:,} ({why})"}
    return {"questions": f"{usable:,} drawn; left out: {why}"}
