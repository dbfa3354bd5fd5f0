"""A few trajectories of an evaluation as MLflow traces: one span an episode, one a turn, one an execution."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines import frames
from pipelines.types import Trajectory, Turn

if TYPE_CHECKING:
    from mlflow import MlflowClient

SAMPLE = 5  # a trace costs some 50 ms: never every rollout


def log(client: MlflowClient, uri: str, experiment_id: str, run_id: str, folder: Path) -> None:
    """Send an evenly spaced sample of an evaluation's trajectories.

    Args:
        uri: of the client's own tracking store; traces go to MLflow's global one.
    """
    frame = frames.read(folder / "data.parquet")
    every = max(1, frame.height // SAMPLE)
    picked = frame.gather_every(every).head(SAMPLE)
    with warnings.catch_warnings(), _destination(uri):
        warnings.simplefilter("ignore")  # MLflow warns of its own type hints when it first traces
        for trajectory in frames.from_frame(picked, Trajectory):
            _episode(client, experiment_id, run_id, trajectory)


@contextlib.contextmanager
def _destination(uri: str) -> Iterator[None]:
    """Point MLflow's global store at `uri`; it also exports a variable, which no child or later run may inherit."""
    import mlflow

    name = "MLFLOW_TRACKING_URI"
    before = os.environ.get(name)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _episode(client: MlflowClient, experiment_id: str, run_id: str, trajectory: Trajectory) -> None:
    root = client.start_trace(
        trajectory.example_id,
        span_type="AGENT",
        inputs={"prompt": [{"role": role, "content": text} for role, text in trajectory.prompt]},
        experiment_id=experiment_id,
        run_id=run_id,
    )
    for number, turn in enumerate(trajectory.turns, 1):
        _turn(client, root.trace_id, root.span_id, number, turn)
    client.end_trace(
        root.trace_id,
        outputs={"final_sql": trajectory.final_sql},
        attributes={"stop": trajectory.stop.value, "forced": trajectory.forced, "policy": trajectory.policy},
        status="ERROR" if trajectory.failure else "OK",
    )


def _turn(client: MlflowClient, trace_id: str, parent_id: str, number: int, turn: Turn) -> None:
    span = client.start_span(f"turn {number}", trace_id, parent_id, span_type="LLM")
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
