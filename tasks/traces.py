"""A few trajectories of an evaluation as MLflow traces, and our verdicts on them as MLflow's evaluation.

A trace's input is the question and its output the SQL; one span a turn, one an execution. The verdict and the class of
the error are feedback on the trace, put there by `mlflow.genai.evaluate` with our verdicts as its scorers.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipelines import frames
from pipelines.evaluation.record import EpisodeRecord
from pipelines.stages.evaluate import RECORDS, records
from pipelines.stages.graph import StageResult
from pipelines.stages.inputs import examples
from pipelines.types import Example, Trajectory, Turn
from tasks.connection import destination

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.tracking import Child

SAMPLE = 5  # a trace costs some 100 ms, and its evaluation as much again: never every rollout
# MLflow asks its server about each trace; the defaults start ten threads for five rows.
QUIET = {"MLFLOW_GENAI_EVAL_MAX_WORKERS": "1", "MLFLOW_GENAI_EVAL_MAX_SCORER_WORKERS": "1"}


def log(child: Child, result: StageResult) -> None:
    """Send an evenly spaced sample of an evaluation's greedy trajectories, and what was found right and wrong."""
    from tasks import registry

    tracker = child.tracker
    questions = _questions(child)
    verdicts = _verdicts(result.folder)
    with warnings.catch_warnings(), destination(tracker.uri):
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        logged = {
            _episode(
                tracker.client, tracker.experiment_id, child.run_id, record, questions.get(record.example_id)
            ): record
            for record in _sample(result.folder)
        }
        judged = {
            trace: verdicts[record.example_id] for trace, record in logged.items() if record.example_id in verdicts
        }
        gold = {
            trace: questions[record.example_id].gold_sql
            for trace, record in logged.items()
            if record.example_id in questions
        }
        if judged:
            models = (registry.logged(tracker.client, tracker.experiment_id, step.key) for step in child.needs)
            model = next((logged_model.model_id for logged_model in models if logged_model is not None), None)
            _evaluate(tracker.client, child.run_id, model, judged, gold, child.recipe.headline)


def _sample(folder: Path) -> list[Trajectory]:
    frame = frames.read(folder / "data.parquet")
    if "pass" in frame.columns:
        frame = frame.filter(pl.col("pass") == "greedy")
    return frames.from_frame(frame.gather_every(max(1, frame.height // SAMPLE)).head(SAMPLE), Trajectory)


def _questions(child: Child) -> dict[str, Example]:
    """The held-out questions by id; {} where the stage needs no `test` stage."""
    folders = [step.folder for step in child.needs if step.kind == "test"]
    return {example.id: example for folder in folders for example in examples(folder, "test")}


def _verdicts(folder: Path) -> dict[str, EpisodeRecord]:
    """The greedy answers' verdicts by question."""
    return {record.example_id: record for record in records(folder, "greedy")} if (folder / RECORDS).is_file() else {}


def _evaluate(
    client: MlflowClient,
    run_id: str,
    model: str | None,
    judged: Mapping[str, EpisodeRecord],
    gold: Mapping[str, str],
    equality: str,
) -> None:
    """Put the verdicts on the traces, through MLflow's own evaluation, so that its pages show them."""
    import mlflow
    from mlflow.entities import AssessmentSource, Feedback
    from mlflow.genai.scorers import scorer

    source = AssessmentSource("CODE", f"sqltrain {equality}")

    def execution_accuracy(trace: Any) -> Any:
        record = judged[trace.info.trace_id]
        return Feedback(value=record.right(equality), rationale=_why(record), source=source)

    def error_class(trace: Any) -> Any:
        return Feedback(value=_error(judged[trace.info.trace_id]), source=source)

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    expected = [{"expected_response": gold[trace]} if gold.get(trace) else {} for trace in judged]
    rows = [
        {"trace": client.get_trace(trace), "expectations": expectation}
        for trace, expectation in zip(judged, expected, strict=True)
    ]
    # It prints a summary and a bar; a command's output is for its user.
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], mlflow.start_run(run_id=run_id):
        scorers = [scorer(execution_accuracy), scorer(error_class)]
        mlflow.genai.evaluate(data=rows, scorers=scorers, model_id=model)


def _error(record: EpisodeRecord) -> str:
    if record.broken:
        return f"broken: {record.failure}"
    return "none" if record.diagnosis is None else str(record.diagnosis.error)


def _why(record: EpisodeRecord) -> str:
    if record.diagnosis is None:
        return f"{record.n_rows} rows, gold has {record.gold_rows}"
    return record.diagnosis.evidence


def _episode(
    client: MlflowClient, experiment_id: str, run_id: str, trajectory: Trajectory, question: Example | None
) -> str:
    """Send one trajectory and return its trace's id."""
    text = question.question if question is not None else _last(trajectory.prompt)
    root = client.start_trace(
        trajectory.example_id,
        span_type="AGENT",
        inputs={"question": text, **({"database": question.database.id} if question is not None else {})},
        experiment_id=experiment_id,
        run_id=run_id,
    )
    prompt = [{"role": role, "content": text} for role, text in trajectory.prompt]
    for number, turn in enumerate(trajectory.turns, 1):
        _turn(client, root.trace_id, root.span_id, number, turn, prompt if number == 1 else None)
    client.end_trace(
        root.trace_id,
        outputs={"sql": trajectory.final_sql},
        attributes={"stop": trajectory.stop.value, "forced": trajectory.forced, "policy": trajectory.policy},
        status="ERROR" if trajectory.failure else "OK",
    )
    return str(root.trace_id)


def _last(prompt: Sequence[tuple[str, str]]) -> str:
    return prompt[-1][1] if prompt else ""


def _turn(client: MlflowClient, trace_id: str, parent_id: str, number: int, turn: Turn, prompt: Any) -> None:
    inputs = None if prompt is None else {"messages": prompt}
    span = client.start_span(f"turn {number}", trace_id, parent_id, span_type="LLM", inputs=inputs)
    client.end_span(
        trace_id,
        span.span_id,
        outputs={"text": turn.text},
        attributes={"action": turn.action.kind.value, "format_error": turn.action.format_error},
    )
    if turn.status is None:
        return
    tool = client.start_span("execute", trace_id, parent_id, span_type="TOOL", inputs={"sql": turn.action.content})
    client.end_span(
        trace_id,
        tool.span_id,
        outputs={"observation": turn.observation},
        attributes={"status": turn.status.value, "error_class": turn.error_class, "rows": turn.n_rows},
        status="OK" if turn.error_class is None else "ERROR",
    )
