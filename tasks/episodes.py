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

from pipelines.core import frames
from pipelines.core.types import Example, Trajectory, Turn
from pipelines.evaluation.record import EpisodeRecord
from pipelines.stages.context import examples
from pipelines.stages.evaluate import RECORDS, records
from pipelines.stages.graph import StageResult
from tasks.mlflow_client import destination

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.run import Child


import sys
from typing import TYPE_CHECKING

from pipelines.core.errors import BoundaryError, SqltrainError
from pipelines.serving.feedback import Feedback
from tasks.mlflow_client import connect, experiment, said, shown, tracking_uri, trouble

if TYPE_CHECKING:
    from mlflow import MlflowClient

SAMPLE = 5  # a trace costs some 100 ms, and its evaluation as much again: never every rollout
# MLflow asks its server about each trace; the defaults start ten threads for five rows.
QUIET = {"MLFLOW_GENAI_EVAL_MAX_WORKERS": "1", "MLFLOW_GENAI_EVAL_MAX_SCORER_WORKERS": "1"}


def log(child: Child, result: StageResult) -> None:
    """Send an evenly spaced sample of an evaluation's greedy trajectories, and what was found right and wrong."""
    from tasks import models as registry

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


# What people said of served answers, as feedback on MLflow's traces: `python -m tasks.episodes FOLDER STORE`.

EXPERIMENT = "served questions"
VERDICT = "user_verdict"


def tell(feedback: Feedback, store: Path) -> None:
    """Tell MLflow what it was not told; what fails is told the next time."""
    uri = tracking_uri(store)
    reason = trouble(uri)
    if reason:
        raise BoundaryError(f"{shown(uri)} does not answer: {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        try:
            client = connect(uri, store)
            place = experiment(client, EXPERIMENT, store)
            with destination(uri):
                traces: dict[str, str] = {}  # a question may have several verdicts
                for row in feedback.untold():
                    trace = traces[row["id"]] = row["trace"] or traces.get(row["id"]) or _trace(client, place, row)
                    _log(trace, row)
                    feedback.told(row["number"], row["id"], trace)
                for trace in feedback.gone():
                    client.delete_traces(place, trace_ids=[trace])
                    feedback.forgotten(trace)
        except SqltrainError:
            raise
        except Exception as error:  # MLflow's stores have error trees of their own
            raise BoundaryError(f"{shown(uri)} refuses: {said(error)}") from error


def _log(trace: str, row: dict[str, Any]) -> None:
    """Put a verdict on its question's trace."""
    import mlflow
    from mlflow.entities import AssessmentSource

    source = AssessmentSource("HUMAN", row["user"])
    mlflow.log_feedback(trace_id=trace, name=VERDICT, value=row["good"], source=source)
    if row["sql"]:
        mlflow.log_expectation(trace_id=trace, name="expected_response", value=row["sql"], source=source)


def _trace(client: MlflowClient, place: str, row: dict[str, Any]) -> str:
    """Send a question and its events as a trace."""
    inputs = {"question": row["question"], "database": row["database"]}
    root = client.start_trace(row["id"], span_type="AGENT", inputs=inputs, experiment_id=place)
    span, last = None, row["events"][-1] if row["events"] else {}
    for event in row["events"]:
        if event["type"] == "sql":
            query = {"sql": event["sql"]}
            span = client.start_span("execute", root.trace_id, root.span_id, span_type="TOOL", inputs=query)
        elif event["type"] == "result" and span is not None:
            client.end_span(root.trace_id, span.span_id, outputs={"observation": event["text"]})
            span = None
    if span is not None:
        client.end_span(root.trace_id, span.span_id)
    outputs = {name: last[name] for name in ("sql", "message") if name in last}
    facts = {"model": row["model"], "asked_at": row["at"]}
    client.end_trace(root.trace_id, outputs, facts, "OK" if last.get("type") == "answer" else "ERROR")
    return str(root.trace_id)


def main() -> None:
    """Tell MLflow of a folder's verdicts; what is wrong is one line."""
    feedback = Feedback.of(Path(sys.argv[1]))
    try:
        tell(feedback, Path(sys.argv[2]))
    except SqltrainError as error:
        sys.exit(str(error))
    finally:
        feedback.close()


if __name__ == "__main__":
    main()
