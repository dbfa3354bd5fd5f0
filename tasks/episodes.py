"""A few trajectories of an evaluation as MLflow traces, with our verdicts on them as MLflow's evaluation.

A trace's input is the question and its output the SQL; one span a turn, one an execution. The verdict and the class of
the error are feedback on the trace, put there by `mlflow.genai.evaluate` with our verdicts as its scorers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipelines.core import frames
from pipelines.core.errors import BoundaryError, SqltrainError
from pipelines.core.types import Example, Trajectory
from pipelines.recipe.config import Recipe
from pipelines.serving.feedback import Feedback
from pipelines.stages.context import examples
from pipelines.stages.evaluate import RECORDS, records
from pipelines.stages.graph import StageResult, Step
from tasks import mlflow_client, models
from tasks.mlflow_client import MlflowRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

SAMPLE = 5  # a trace costs some 100 ms, and its evaluation as much again: never every rollout
# MLflow asks its server about each trace; the defaults start ten threads for five rows.
QUIET = {"MLFLOW_GENAI_EVAL_MAX_WORKERS": "1", "MLFLOW_GENAI_EVAL_MAX_SCORER_WORKERS": "1"}
MAX_QUESTIONS = 2000  # of a dataset: MLflow looks each row up before it writes it, some 2 ms a row


def log_traces(run: MlflowRun, recipe: Recipe, needs: Sequence[Step], result: StageResult) -> None:
    """Send an evenly spaced sample of an evaluation's greedy trajectories, and their verdicts."""
    folders = [step.folder for step in needs if step.kind == "test"]
    questions = {example.id: example for folder in folders for example in examples(folder, "test")}
    has_records = (result.folder / RECORDS).is_file()
    verdicts = {record.example_id: record for record in records(result.folder, "greedy")} if has_records else {}
    frame = frames.read(result.folder / "data.parquet")
    if "pass" in frame.columns:
        frame = frame.filter(pl.col("pass") == "greedy")
    sample = frames.from_frame(frame.gather_every(max(1, frame.height // SAMPLE)).head(SAMPLE), Trajectory)
    with warnings.catch_warnings(), mlflow_client.tracking_at(run.uri):
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        names = {_trajectory_trace(run, one, questions.get(one.example_id)): one.example_id for one in sample}
        judged = {trace: verdicts[name] for trace, name in names.items() if name in verdicts}
        if not judged:
            return
        logged = (models.find_logged_model(run.client, run.experiment_id, step.key) for step in needs)
        model = next((model.model_id for model in logged if model is not None), None)
        gold = {trace: questions[name].gold_sql for trace, name in names.items() if name in questions}
        expected = [{"expected_response": gold[trace]} if gold.get(trace) else {} for trace in judged]
        rows = [
            {"trace": run.client.get_trace(trace), "expectations": expectation}
            for trace, expectation in zip(judged, expected, strict=True)
        ]
        # The verdicts are put on the traces through MLflow's own evaluation, so that its pages show them.
        import mlflow
        from mlflow.entities import AssessmentSource, Feedback
        from mlflow.genai.scorers import scorer

        source = AssessmentSource("CODE", f"sqltrain {recipe.headline}")

        def execution_accuracy(trace: Any) -> Any:
            record = judged[trace.info.trace_id]
            why = f"{record.n_rows} rows, gold has {record.gold_rows}"
            why = why if record.diagnosis is None else record.diagnosis.evidence
            return Feedback(value=record.right(recipe.headline), rationale=why, source=source)

        def error_class(trace: Any) -> Any:
            record = judged[trace.info.trace_id]
            error = "none" if record.diagnosis is None else str(record.diagnosis.error)
            return Feedback(value=f"broken: {record.failure}" if record.broken else error, source=source)

        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        # It prints a summary and a bar; a command's output is for its user.
        quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
        with quiet[0], quiet[1], mlflow.start_run(run_id=run.run_id):
            scorers = [scorer(execution_accuracy), scorer(error_class)]
            mlflow.genai.evaluate(data=rows, scorers=scorers, model_id=model)


def _trajectory_trace(run: MlflowRun, trajectory: Trajectory, question: Example | None) -> str:
    """Send one trajectory and return its trace's id."""
    client, prompt = run.client, trajectory.prompt
    inputs = {"question": prompt[-1][1] if prompt else ""}
    if question is not None:
        inputs = {"question": question.question, "database": question.database.id}
    root = client.start_trace(
        trajectory.example_id, span_type="AGENT", inputs=inputs, experiment_id=run.experiment_id, run_id=run.run_id
    )
    at = (root.trace_id, root.span_id)
    for number, turn in enumerate(trajectory.turns, 1):
        messages = {"messages": [{"role": role, "content": text} for role, text in prompt]} if number == 1 else None
        span = client.start_span(f"turn {number}", *at, span_type="LLM", inputs=messages)
        attributes: dict[str, Any] = {"action": turn.action.kind.value, "format_error": turn.action.format_error}
        client.end_span(root.trace_id, span.span_id, outputs={"text": turn.text}, attributes=attributes)
        if turn.status is None:
            continue
        tool = client.start_span("execute", *at, span_type="TOOL", inputs={"sql": turn.action.content})
        attributes = {"status": turn.status.value, "error_class": turn.error_class, "rows": turn.n_rows}
        status = "OK" if turn.error_class is None else "ERROR"
        outputs = {"observation": turn.observation}
        client.end_span(root.trace_id, tool.span_id, outputs=outputs, attributes=attributes, status=status)
    client.end_trace(
        root.trace_id,
        outputs={"sql": trajectory.final_sql},
        attributes={"stop": trajectory.stop.value, "forced": trajectory.forced, "policy": trajectory.policy},
        status="ERROR" if trajectory.failure else "OK",
    )
    return str(root.trace_id)


def log_questions(run: MlflowRun, recipe: Recipe, needs: Sequence[Step]) -> None:
    """The held-out questions of a benchmark as an evaluation dataset of MLflow, on which any agent may be evaluated.

    It is made once; a benchmark of more than `MAX_QUESTIONS` gets none.
    """
    for step in (step for step in needs if step.kind == "test"):
        name = f"{recipe.benchmark.name} {step.key}"
        if run.client.search_datasets([run.experiment_id], f"name = '{name}'"):
            continue
        asked = examples(step.folder, "test")
        if len(asked) > MAX_QUESTIONS:
            continue
        rows = []
        for example in asked:
            evidence = {"evidence": example.evidence} if example.evidence else {}
            inputs = {"question": example.in_context(), "database": example.database.id, **evidence}
            rows.append({"inputs": inputs, "expectations": {"expected_response": example.gold_sql}})
        with warnings.catch_warnings(), mlflow_client.tracking_at(run.uri):
            warnings.simplefilter("ignore")  # deprecations inside MLflow
            tags = {"sqltrain.stage": step.name, "sqltrain.key": step.key}
            run.client.create_dataset(name, [run.experiment_id], tags).merge_records(rows)


# What people said of served answers, as feedback on MLflow's traces: `python -m tasks.episodes FOLDER STORE`.

log = logging.getLogger(__name__)
EXPERIMENT = "served questions"
VERDICT = "user_verdict"


def send_feedback(feedback: Feedback, store: Path) -> None:
    """Send the verdicts that MLflow does not have yet; one that fails is sent the next time."""
    uri = mlflow_client.tracking_uri(store)
    server, reason = mlflow_client.without_password(uri), mlflow_client.unreachable_reason(uri)
    if reason:
        raise BoundaryError(f"{server} does not answer: {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        try:
            client = mlflow_client.connect(uri, store)
            place = mlflow_client.experiment(client, EXPERIMENT, store, log.warning)
            import mlflow
            from mlflow.entities import AssessmentSource

            with mlflow_client.tracking_at(uri):
                traces: dict[str, str] = {}  # a question may have several verdicts
                for row in feedback.unsynced():
                    trace = traces[row["id"]] = (
                        row["trace"] or traces.get(row["id"]) or _question_trace(client, place, row)
                    )
                    source = AssessmentSource("HUMAN", row["user"])
                    mlflow.log_feedback(trace_id=trace, name=VERDICT, value=row["good"], source=source)
                    if row["sql"]:
                        mlflow.log_expectation(
                            trace_id=trace, name="expected_response", value=row["sql"], source=source
                        )
                    feedback.mark_synced(row["number"], row["id"], trace)
                for trace in feedback.deleted_traces():
                    client.delete_traces(place, trace_ids=[trace])
                    feedback.forget_trace(trace)
        except SqltrainError:
            raise
        except Exception as error:  # MLflow's stores have error trees of their own
            raise BoundaryError(f"{server} refuses: {mlflow_client.error_line(error)}") from error


def _question_trace(client: MlflowClient, place: str, row: dict[str, Any]) -> str:
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
    """Send a folder's verdicts to MLflow; a failure is one line."""
    feedback = Feedback(Path(sys.argv[1]), create=False)
    try:
        send_feedback(feedback, Path(sys.argv[2]))
    except SqltrainError as error:
        sys.exit(str(error))
    finally:
        feedback.close()


if __name__ == "__main__":
    main()
