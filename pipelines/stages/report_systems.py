"""The systems of a report, read from finished evaluations, and the report of any systems."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipelines.core import frames
from pipelines.core.files import read_json
from pipelines.core.types import Trajectory
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation.record_files import SELECTED, SINGLE_TURN, read_record_groups
from pipelines.evaluation.voting import Rule
from pipelines.recipe.config import Recipe
from pipelines.report.data import ReportData, System, with_texts
from pipelines.stages.context import each_example
from pipelines.stages.evaluation_texts import incomplete_benchmark


@dataclass(frozen=True)
class ReportedEvaluation:
    """A finished evaluation, as a report shows it."""

    folder: Path
    name: str  # name of the system in tables
    training_examples: int | None = None  # examples that its training used
    note: str = ""  # origin of the answers: a checkpoint's digest, an endpoint's model


def report_of(recipe: Recipe, evaluations: Sequence[ReportedEvaluation], test: Path) -> ReportData:
    """A report of evaluations on the questions of a finished `test` stage."""
    facts = _settings_in_words(recipe)
    systems: list[System] = []
    for evaluation in evaluations:
        systems += _read_systems(evaluation)
    for system in systems:
        if system.note:
            facts[f"model ({system.name})"] = system.note
    answered: set[str] = set()
    for system in systems:
        answered.update(record.example_id for record in system.records)
    questions = {}
    for example in each_example(test, "test"):
        if example.id in answered:
            questions[example.id] = example
    facts |= incomplete_benchmark(test, len(questions), recipe.benchmark)
    data = ReportData(
        title=recipe.name,
        equality=recipe.headline,
        systems=tuple(systems),
        examples=questions,
        facts=facts,
        ks=recipe.evaluation.ks,
        rule=Rule.of(recipe.evaluation),
        metrics=recipe.evaluation.metrics,
        seed=recipe.seed,
    )
    schema = schemas(recipe)
    with sql_engine(recipe) as sql:
        return with_texts(data, sql, schema)


def _settings_in_words(recipe: Recipe) -> dict[str, str]:
    """The settings that a report names."""
    samples = "none"
    if recipe.evaluation.samples:
        sampling = recipe.evaluation.sampling
        spread = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
        samples = f"{recipe.evaluation.samples} at {spread}"
    return {
        "recipe": recipe.name,
        "benchmark": recipe.benchmark.name,
        "seed": str(recipe.seed),
        "protocol": recipe.protocol.name,
        "schema": recipe.protocol.schema_view,
        "turns at most": str(recipe.protocol.max_turns_eval),
        "samples": samples,
    }


def _read_systems(evaluation: ReportedEvaluation) -> Iterator[System]:
    """The system of an evaluation and, if an endpoint chose among its samples, their answers as another."""
    folder = evaluation.folder
    name = evaluation.name
    trained = evaluation.training_examples
    missing = read_json(folder / "summary.json").get("left_out", {})
    answer_passes = ("greedy", "sampled")
    records, selected, single_turn = read_record_groups(folder, answer_passes, (SELECTED,), (SINGLE_TURN,))
    frame = frames.read(folder / frames.DATA)
    if records:
        answers = frame.filter(pl.col("pass").is_in(answer_passes))
        trajectories = tuple(frames.from_frame(answers, Trajectory))
        yield System(
            name,
            tuple(records),
            trajectories,
            trained,
            left_out=missing,
            note=evaluation.note,
            single_turn=tuple(single_turn),
        )
    if selected:
        answers = frame.filter(pl.col("pass") == SELECTED)
        trajectories = tuple(frames.from_frame(answers, Trajectory))
        yield System(f"{name}, selected", tuple(selected), trajectories, trained, left_out=missing)
