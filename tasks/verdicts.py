"""What people said of served answers, as feedback on MLflow's traces: `python -m tasks.verdicts FOLDER STORE`.

A question gets a trace when the first verdict on it comes, with a span for each query; a verdict is feedback of a human
on it, and the right SQL the expectation. The trace of a question that was deleted is deleted.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import BoundaryError, SqltrainError
from pipelines.serving.feedback import Feedback
from tasks.connection import connect, destination, experiment, shown, tracking_uri, trouble
from tasks.recording import said

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "served questions"
VERDICT = "user_verdict"


def tell(feedback: Feedback, store: Path) -> None:
    """Tell MLflow what it was not told; what fails is told the next time.

    Raises:
        BoundaryError: MLflow does not answer, or refuses.
    """
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
