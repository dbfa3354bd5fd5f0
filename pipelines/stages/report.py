"""The last stage: everything that a run found out, as one page and as tables."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from pipelines.core import frames
from pipelines.core.files import read_json, read_lines, write_json
from pipelines.core.frames import DATA
from pipelines.core.types import Trajectory
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation.voting import Rule
from pipelines.recipe import deviations
from pipelines.recipe.config import Recipe, Source
from pipelines.report import writer
from pipelines.report.data import ReportData, System, with_texts
from pipelines.report.formats import ReportTable, TableColumn
from pipelines.stages import evaluate
from pipelines.stages.context import Context, examples
from pipelines.stages.evaluate import EFFICIENCY, SELECTED, SINGLE_TURN, latencies, records

WHEN = {"evaluate_model": "before SFT", "evaluate_sft": "after SFT", "evaluate_grpo": "after GRPO"}


def build(ctx: Context) -> None:
    """Write `report.html`, which stands alone, and the same tables as Markdown, LaTeX and CSV."""
    ctx.progress.begin(ctx.stage, 1, "page")
    data = gather(ctx)
    writer.write(data, ctx.folder / "report.html")
    tables = ctx.folder / "tables"
    tables.mkdir(exist_ok=True)
    writer.write_tables(data, tables)
    clock = {
        when: evaluate.answer_costs(latencies(ctx.inputs[name]), read_json(ctx.inputs[name] / EFFICIENCY).get("r_ves"))
        for name, when in WHEN.items()
        if name in ctx.inputs
    }
    write_json(tables / EFFICIENCY, clock)  # wall-clock facts: beside the tables, not among the results
    ctx.progress.advance(1)
    ctx.metrics({"systems": len(data.systems)})


def gather(ctx: Context) -> ReportData:
    """The report's data, from the finished stages."""
    metrics = {name: read_json(folder / "metrics.json") for name, folder in ctx.inputs.items()}
    systems: list[System] = []
    for name, when in WHEN.items():
        if name not in ctx.inputs:
            continue
        # The base model's name, or the key of the stage that trained it.
        stage = name.removeprefix("evaluate_")
        model = f"{stage} {ctx.inputs[stage].name}" if stage in ctx.inputs else ctx.recipe.model.source
        # Training examples up to here: demonstrations that SFT saw and, after GRPO, the questions that it drew on.
        seen = 0.0
        if stage != "model" and "sft" in ctx.inputs:
            seen += metrics["filter"].get("kept", 0)
        if stage == "grpo" and "difficulty" in ctx.inputs:
            seen += metrics["difficulty"].get("balanced", 0) + metrics["difficulty"].get("explore", 0)
        elif stage == "grpo":
            seen += metrics["data"].get("rl_examples", 0)
        systems += systems_of(ctx.inputs[name], when, int(seen) or None, model)
    base = of_systems(ctx.recipe, tuple(systems), ctx.inputs["test"])
    rates: tuple[float, ...] = ()
    if "difficulty" in ctx.inputs:
        frame = frames.read(ctx.inputs["difficulty"] / DATA).filter(pl.col("samples") > 0)
        rates = tuple((frame["right"] / frame["samples"]).to_list())
    acting = deviations_table(ctx.recipe)
    return dataclasses.replace(
        base,
        tables=(*base.tables, *([acting] if acting.rows else [])),
        curves={
            name.upper(): [row for _, row in read_lines(ctx.inputs[name] / "curves.jsonl")]
            for name in ("sft", "grpo")
            if name in ctx.inputs
        },
        pass_rates=rates,
        group=ctx.recipe.difficulty.group,
    )


def deviations_table(recipe: Recipe) -> ReportTable:
    """The deviations from the recipe's paper that acted in this run; no rows for a recipe without a paper."""
    columns = tuple(map(TableColumn, ("in the paper", "kind", "the paper", "here", "setting")))
    rows = tuple(
        (each.where, each.kind, each.paper, each.ours, " ".join(each.setting) or None)
        for each in deviations.acting(recipe)
    )
    note = "The setting does it the paper's way, or in another way where the paper is silent."
    return ReportTable("deviations", f"Deviations from the paper: {recipe.paper}", columns, rows, note)


def of_systems(recipe: Recipe, systems: tuple[System, ...], test: Path) -> ReportData:
    """A report of any systems that answered the questions of a finished `test` stage."""
    ids = {record.example_id for system in systems for record in system.records}
    questions = {example.id: example for example in examples(test, "test") if example.id in ids}
    settings, samples = recipe.evaluation, "none"
    if settings.samples:
        sampling = settings.sampling
        samples = f"{settings.samples} at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
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
            "samples": samples,
            **{f"model ({system.name})": system.note for system in systems if system.note},
            **left_out(test, len(questions), recipe.benchmark),
        },
        ks=recipe.evaluation.ks,
        rule=Rule.of(recipe.evaluation),
        metrics=recipe.evaluation.metrics,
        seed=recipe.seed,
    )
    with sql_engine(recipe) as sql:
        return with_texts(data, sql, schemas(recipe))


def systems_of(folder: Path, name: str, trained: int | None = None, note: str = "") -> Iterator[System]:
    """The system of a finished evaluation and, if an endpoint chose among its samples, their answers as another.

    Args:
        trained: examples that its training used.
        note: what answered: a checkpoint's digest, an endpoint's model.
    """
    frame = frames.read(folder / DATA)
    missing = read_json(folder / "summary.json").get("left_out", {})
    single = tuple(records(folder, SINGLE_TURN))
    for title, passes in ((name, ("greedy", "sampled")), (f"{name}, selected", (SELECTED,))):
        own_records = tuple(records(folder, *passes))
        if own_records:
            trajectories = frames.from_frame(frame.filter(pl.col("pass").is_in(passes)), Trajectory)
            words, once = (note, single) if title == name else ("", ())
            yield System(title, own_records, tuple(trajectories), trained, words, once, missing)


def left_out(test: Path, usable: int, source: Source) -> dict[str, str]:
    """The fact that a benchmark is incomplete: "972 of 1,034 (62 missing database)"; {} if all of it can run."""
    reasons = evaluate.left_out(test)
    if not reasons:
        return {}
    why, total = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items()), sum(reasons.values())
    whole = source.count is None and source.hardness is None
    return {"questions": f"{usable:,} of {usable + total:,} ({why})" if whole else f"{usable:,} drawn; left out: {why}"}
