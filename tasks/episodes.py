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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from pipelines.core import frames
from pipelines.core.errors import BoundaryError, SqltrainError
from pipelines.core.types import Example, ExecutionStatus, Trajectory, Turn
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import RECORDS, read_records
from pipelines.recipe.config import Recipe
from pipelines.serving.feedback import Feedback
from pipelines.stages.context import examples
from pipelines.stages.stage import StageResult, Step
from tasks import mlflow_client, models
from tasks.mlflow_client import MlflowRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

SAMPLE = 5  # a trace costs some 100 ms, and its evaluation as much again: never every rollout
# MLflow asks its server about each trace; the defaults start ten threads for five rows.
QUIET = {"MLFLOW_GENAI_EVAL_MAX_WORKERS": "1", "MLFLOW_GENAI_EVAL_MAX_SCORER_WORKERS": "1"}
MAX_QUESTIONS = 2000  # questions of a dataset: MLflow looks each row up before it writes it, some 2 ms a row


def log_traces(run: MlflowRun, recipe: Recipe, needs: Sequence[Step], result: StageResult) -> None:
    """Send an evenly spaced sample of an evaluation's greedy trajectories, and their verdicts."""
    questions: dict[str, Example] = {}
    for step in needs:
        if step.kind == "test":
            held_out = examples(step.folder, "test")
            questions |= {question.id: question for question in held_out}
    verdicts = {}
    if (result.folder / RECORDS).is_file():
        records = read_records(result.folder, "greedy")
        verdicts = {record.example_id: record for record in records}
    with warnings.catch_warnings(), mlflow_client.tracking_at(run.uri):
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        judged: dict[str, EpisodeRecord] = {}  # id of a trace -> our verdict
        rows = []
        for trajectory in _greedy_sample(result.folder):
            question = questions.get(trajectory.example_id)
            trace = _trajectory_trace(run, trajectory, question)
            if trajectory.example_id not in verdicts:
                continue
            judged[trace] = verdicts[trajectory.example_id]
            expectations = {}
            if question is not None and question.gold_sql:
                expectations["expected_response"] = question.gold_sql
            rows.append({"trace": run.client.get_trace(trace), "expectations": expectations})
        if rows:
            model = _evaluated_model(run, needs)
            _judge_traces(run, recipe.headline, judged, rows, model)


def _greedy_sample(folder: Path) -> list[Trajectory]:
    """Evenly spaced greedy trajectories of an evaluation."""
    frame = frames.read(folder / "data.parquet")
    if "pass" in frame.columns:
        frame = frame.filter(pl.col("pass") == "greedy")
    every = max(1, frame.height // SAMPLE)
    sample = frame.gather_every(every).head(SAMPLE)
    return list(frames.from_frame(sample, Trajectory))


def _evaluated_model(run: MlflowRun, needs: Sequence[Step]) -> str | None:
    """The id of the checkpoint's logged model; None if no stage before the evaluation has one."""
    for step in needs:
        model = models.find_logged_model(run.client, run.experiment_id, step.key)
        if model is not None:
            return str(model.model_id)
    return None


def _judge_traces(
    run: MlflowRun,
    equality: str,
    judged: Mapping[str, EpisodeRecord],
    rows: Sequence[Mapping[str, Any]],
    model: str | None,
) -> None:
    """Put verdicts on traces through MLflow's own evaluation, so that its pages show them."""
    import mlflow
    from mlflow.entities import AssessmentSource, Feedback
    from mlflow.genai.scorers import scorer

    source = AssessmentSource("CODE", f"sqltrain {equality}")

    def execution_accuracy(trace: Any) -> Any:
        record = judged[trace.info.trace_id]
        rationale = f"{record.n_rows} rows, gold has {record.gold_rows}"
        if record.diagnosis is not None:
            rationale = record.diagnosis.evidence
        return Feedback(value=record.right(equality), rationale=rationale, source=source)

    def error_class(trace: Any) -> Any:
        record = judged[trace.info.trace_id]
        value = "none"
        if record.broken:
            value = f"broken: {record.failure}"
        elif record.diagnosis is not None:
            value = str(record.diagnosis.error)
        return Feedback(value=value, source=source)

    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # It prints a summary and a bar; a command's output is for its user.
    quiet_out = contextlib.redirect_stdout(io.StringIO())
    quiet_err = contextlib.redirect_stderr(io.StringIO())
    with quiet_out, quiet_err, mlflow.start_run(run_id=run.run_id):
        scorers = [scorer(execution_accuracy), scorer(error_class)]
        mlflow.genai.evaluate(data=list(rows), scorers=scorers, model_id=model)


def _trajectory_trace(run: MlflowRun, trajectory: Trajectory, question: Example | None) -> str:
    """Send one trajectory and return its trace's id."""
    client = run.client
    root = client.start_trace(
        trajectory.example_id,
        span_type="AGENT",
        inputs=_trace_inputs(trajectory, question),
        experiment_id=run.experiment_id,
        run_id=run.run_id,
    )
    for number, turn in enumerate(trajectory.turns, 1):
        inputs = None
        if number == 1:
            messages = [{"role": role, "content": text} for role, text in trajectory.prompt]
            inputs = {"messages": messages}
        span = client.start_span(f"turn {number}", root.trace_id, root.span_id, span_type="LLM", inputs=inputs)
        attributes: dict[str, Any] = {"action": turn.action.kind.value, "format_error": turn.action.format_error}
        client.end_span(root.trace_id, span.span_id, outputs={"text": turn.text}, attributes=attributes)
        if turn.status is not None:
            _log_execution(client, root, turn, turn.status)
    outcome = {"sql": trajectory.final_sql}
    attributes = {"stop": trajectory.stop.value, "forced": trajectory.forced, "policy": trajectory.policy}
    status = "ERROR" if trajectory.failure else "OK"
    client.end_trace(root.trace_id, outputs=outcome, attributes=attributes, status=status)
    return str(root.trace_id)


def _trace_inputs(trajectory: Trajectory, question: Example | None) -> dict[str, str]:
    """The question of a trajectory; without it the last message of its prompt."""
    if question is not None:
        return {"question": question.question, "database": question.database.id}
    if not trajectory.prompt:
        return {"question": ""}
    _, last_message = trajectory.prompt[-1]
    return {"question": last_message}


def _log_execution(client: MlflowClient, root: Any, turn: Turn, status: ExecutionStatus) -> None:
    """Send the span of what a turn had executed."""
    query = {"sql": turn.action.content}
    span = client.start_span("execute", root.trace_id, root.span_id, span_type="TOOL", inputs=query)
    outputs = {"observation": turn.observation}
    attributes = {"status": status.value, "error_class": turn.error_class, "rows": turn.n_rows}
    state = "OK" if turn.error_class is None else "ERROR"
    client.end_span(root.trace_id, span.span_id, outputs=outputs, attributes=attributes, status=state)


def log_questions(run: MlflowRun, recipe: Recipe, needs: Sequence[Step]) -> None:
    """The held-out questions of a benchmark as an evaluation dataset of MLflow, on which any agent may be evaluated.

    It is made once; a benchmark of more than `MAX_QUESTIONS` gets none.
    """
    for step in needs:
        if step.kind != "test":
            continue
        name = f"{recipe.benchmark.name} {step.key}"
        if run.client.search_datasets([run.experiment_id], f"name = '{name}'"):
            continue
        questions = examples(step.folder, "test")
        if len(questions) > MAX_QUESTIONS:
            continue
        rows = []
        for question in questions:
            inputs = {"question": question.in_context(), "database": question.database.id}
            if question.evidence:
                inputs["evidence"] = question.evidence
            expectations = {"expected_response": question.gold_sql}
            rows.append({"inputs": inputs, "expectations": expectations})
        with warnings.catch_warnings(), mlflow_client.tracking_at(run.uri):
            warnings.simplefilter("ignore")  # deprecations inside MLflow
            tags = {"sqltrain.stage": step.name, "sqltrain.key": step.key}
            dataset = run.client.create_dataset(name, [run.experiment_id], tags)
            dataset.merge_records(rows)


# Verdicts of people on served answers, as feedback on MLflow's traces: `python -m tasks.episodes FOLDER STORE`.

log = logging.getLogger(__name__)
EXPERIMENT = "served questions"
VERDICT = "user_verdict"


def send_feedback(feedback: Feedback, store: Path) -> None:
    """Send the verdicts that MLflow does not have yet; one that fails is sent the next time."""
    uri = mlflow_client.tracking_uri(store)
    server = mlflow_client.without_password(uri)
    reason = mlflow_client.unreachable_reason(uri)
    if reason:
        raise BoundaryError(f"{server} does not answer: {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        try:
            client = mlflow_client.connect(uri, store)
            experiment_id = mlflow_client.experiment(client, EXPERIMENT, store, log.warning)
            with mlflow_client.tracking_at(uri):
                _send_verdicts(feedback, client, experiment_id)
                for trace in feedback.deleted_traces():
                    client.delete_traces(experiment_id, trace_ids=[trace])
                    feedback.forget_trace(trace)
        except SqltrainError:
            raise
        except Exception as error:  # MLflow's stores have error trees of their own
            reason = mlflow_client.error_line(error)
            raise BoundaryError(f"{server} refuses: {reason}") from error


def _send_verdicts(feedback: Feedback, client: MlflowClient, experiment_id: str) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource

    traces: dict[str, str] = {}  # id of a question -> its trace: it may have several verdicts
    for row in feedback.unsynced():
        trace = row["trace"] or traces.get(row["id"])
        if not trace:
            trace = _question_trace(client, experiment_id, row)
        traces[row["id"]] = trace
        source = AssessmentSource("HUMAN", row["user"])
        mlflow.log_feedback(trace_id=trace, name=VERDICT, value=row["good"], source=source)
        if row["sql"]:
            mlflow.log_expectation(trace_id=trace, name="expected_response", value=row["sql"], source=source)
        feedback.mark_synced(row["number"], row["id"], trace)


def _question_trace(client: MlflowClient, experiment_id: str, row: dict[str, Any]) -> str:
    """Send one served question and return its trace's id."""
    inputs = {"question": row["question"], "database": row["database"]}
    root = client.start_trace(row["id"], span_type="AGENT", inputs=inputs, experiment_id=experiment_id)
    span = None
    for event in row["events"]:
        if event["type"] == "sql":
            query = {"sql": event["sql"]}
            span = client.start_span("execute", root.trace_id, root.span_id, span_type="TOOL", inputs=query)
        elif event["type"] == "result" and span is not None:
            client.end_span(root.trace_id, span.span_id, outputs={"observation": event["text"]})
            span = None
    if span is not None:
        client.end_span(root.trace_id, span.span_id)
    last: dict[str, Any] = {}
    if row["events"]:
        last = row["events"][-1]
    outputs = {name: last[name] for name in ("sql", "message") if name in last}
    attributes = {"model": row["model"], "asked_at": row["at"]}
    status = "OK" if last.get("type") == "answer" else "ERROR"
    client.end_trace(root.trace_id, outputs, attributes, status)
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
