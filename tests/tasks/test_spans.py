"""Spans of a run and its stages, from a process of its own to a collector of OpenTelemetry's protocol."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.processes import free_port
from tasks import run as tracking
from tests.services.collector import attributes, collecting
from tests.services.conftest import ROOT

RUN = """
import sys
from pathlib import Path
from pipelines.recipe import recipes
from pipelines.core.errors import DataError
from pipelines.stages import graph
from pipelines.core.store import Store
from tasks.run import Tracker

recipe, store = recipes.load("miniature"), Store(Path(sys.argv[1]))
data, synthesize = (step for step in graph.plan(recipe, store) if step.name in ("data", "synthesize"))
try:
    with Tracker(recipe, store, print, "a night") as tracker:
        tracker.recorder.off = True
        with tracker.stage(data, [], recipe, "batch") as stage_run:
            stage_run.record(graph.StageResult("data", data.key, data.folder, {"quarantined": 2.0}, False))
        with tracker.stage(synthesize, [], recipe):
            raise DataError("no teacher answers")
except DataError:
    print(data.key)
"""


def run(folder: Path, url: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}
    command = [sys.executable, "-c", RUN, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)


def test_a_run_is_a_trace_with_a_span_a_stage(tmp_path: Path) -> None:
    with collecting() as collector:
        key = run(tmp_path, collector.url).stdout.strip()
    whole, data, failed = (collector.named(name) for name in ("run miniature", "stage data", "stage synthesize"))
    assert len(collector.spans) == 3
    assert collector.services == {"sqltrain"}
    assert {span.trace_id for span in (data, failed)} == {whole.trace_id}
    assert (whole.parent_span_id, data.parent_span_id, failed.parent_span_id) == (b"", whole.span_id, whole.span_id)
    about = attributes(data)
    assert about.pop("sqltrain.run").startswith("a night, ")
    assert about == {
        "sqltrain.recipe": "miniature",
        "sqltrain.stage": "data",
        "sqltrain.key": key,
        "sqltrain.why": "not made yet",
        "sqltrain.role": "batch",
        "sqltrain.cached": False,
        "sqltrain.metrics.quarantined": 2.0,
    }
    assert (data.status.code, failed.status.code, whole.status.code) == (0, 2, 2)  # 2: an error
    assert failed.status.message == "DataError: no teacher answers"


def test_a_collector_that_is_away_costs_the_spans_alone(tmp_path: Path) -> None:
    done = run(tmp_path, f"http://127.0.0.1:{free_port()}/v1/traces")
    assert done.stdout
    assert len(done.stderr.splitlines()) == 1


def test_without_a_collector_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracking.SPAN_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    tracking.span_tracer.cache_clear()
    assert tracking.span_tracer() is None
