"""Tracking of a run: one parent run in MLflow a pipeline run or night, a child a stage that was made, and spans.

Nothing here may stop a run: notes that cannot be written wait or are counted as missing (`MlflowNotes`). Numbers go in
batches, checkpoints and datasets by reference (a digest and a place within the store), never as copies.

`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` names a collector of OpenTelemetry spans of runs
and stages; without one none are made. Prefect makes spans of flow runs and task runs itself as soon as its process
sends spans; ours lie inside of them. Traces of episodes stay in MLflow.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipelines.core import provenance
from pipelines.core.claims import claimed
from pipelines.core.files import digest
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Progress
from pipelines.stages.stage import StageResult, Step, benchmark_of, seen_by
from tasks import contracts, episodes, mlflow_client, models
from tasks.mlflow_client import MAX_KEY, MAX_PARAM, MlflowNotes, MlflowRun, Row

if TYPE_CHECKING:
    import opentelemetry.trace
    from mlflow import MlflowClient

EVERY_S = 15.0  # seconds between two looks at a file of curves
SMALL_FILES = ("contract.json", "contract.html")
SPAN_SWITCHES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
SPAN_NAME = "sqltrain"


def run_step(
    step: Step,
    steps: Sequence[Step],
    recipe: Recipe,
    store: Store,
    progress: Progress,
    tracker: Tracker,
    role: str = "",
) -> StageResult:
    """Make one step unless the store has it, check its contract, and record it; `Tracker.stage` explains `role`."""
    with tracker.stage(step, steps, recipe, role) as stage_run:
        result = stage_making.execute(step, recipe, store, progress, steps)
        try:
            contracts.check(result, recipe)
        finally:
            stage_run.record(result)
    return result


class Tracker:
    """The parent run of one pipeline run or of one night, opened with the first stage to make: no work, no run.

    Args:
        say: takes the plain lines about trouble.
        name: the run's name for people, to which the moment is added; "" for the recipe and its seed.
        tags: further tags of the parent run.
        group: shared by all processes of one run (Prefect's root flow run); "" if one process does all of it. A process
            whose group has a parent run already adds to that one.
    """

    def __init__(
        self,
        recipe: Recipe,
        store: Store,
        say: Callable[[str], None],
        name: str = "",
        tags: Mapping[str, str] | None = None,
        group: str = "",
    ) -> None:
        self.recipe = recipe
        self.store = store
        name = name or f"{recipe.name} seed {recipe.seed}"
        self.name = f"{name}, {time.strftime('%d %b %H:%M:%S')}"
        self.tags = dict(tags or {})
        self.group = group
        self.run = MlflowRun(mlflow_client.tracking_uri(store.root), store.root)
        self.recorder = MlflowNotes(self.run.uri, say)
        self._begun = False
        self._joined = False  # the parent run is another process's
        self._claim = contextlib.ExitStack()  # `sqltrain status` shows the run until the last note is written
        attributes = {"run": self.name, "recipe": recipe.name, **self.tags}
        self._span = span(f"run {recipe.name}", attributes)
        self._cached: list[tuple[str, StageResult]] = []  # (role, stage) found before there was a run for the notes

    def __enter__(self) -> Tracker:
        self._span.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._claim:
            self._span.__exit__(kind, error, trace)
            is_stopped = isinstance(error, KeyboardInterrupt)
            if is_stopped and not self.recorder.written:
                self.recorder.off = True  # a stopped run does not wait until a new store has its tables
            if self._begun and not self._joined:
                self.recorder.note("the end of the run", lambda: _terminate(self.run, error))
            self.recorder.close()

    @property
    def page(self) -> str:
        """The address of the run's page on an MLflow server; "" if it has none that a browser reaches."""
        run = self.run
        if not (run.run_id and run.uri.startswith("http")):
            return ""
        server = mlflow_client.without_password(run.uri).rstrip("/")
        return f"{server}/#/experiments/{run.experiment_id}/runs/{run.run_id}"

    def begin(self) -> None:
        """Open the parent run, unless it is open, and note the stages that were found finished before."""
        if self._begun:
            return
        self._begun = True
        claim_note = {"recipe": self.recipe.name, **self.tags}
        self._claim.enter_context(claimed(self.store, (), claim_note))
        self.recorder.note("the run and its parameters", self._open)
        self.recorder.note("the prompt", lambda: models.link_prompt(self.run, self.recipe.protocol))
        for role, result in self._cached:
            self.note_cached(role, result)
        self._cached.clear()

    def _open(self) -> None:
        """The run of this group if there is one; else a new one, with the resolved recipe in it."""
        run = self.run
        client = run.client
        name = self.recipe.name
        run.experiment_id = mlflow_client.experiment(client, name, self.store.root, self.recorder.say)
        _mark_killed_runs(client, run.experiment_id)
        if self.group:
            runs = client.search_runs([run.experiment_id], f"tags.`sqltrain.group` = '{self.group}'")
            if runs:
                run.run_id = runs[0].info.run_id
                self._joined = True
                return
        resolved = self.recipe.model_dump(mode="json")
        tags = {
            "recipe": self.recipe.name,
            "recipe_digest": digest(resolved),
            **self.tags,
            "group": self.group,
            "host": platform.node(),
            "process": process_mark(os.getpid()),
        }
        opened = client.create_run(run.experiment_id, tags=_with_provenance(tags), run_name=self.name)
        run.run_id = opened.info.run_id
        run.log_params(resolved)
        client.log_dict(run.run_id, resolved, "recipe.yaml")

    @contextlib.contextmanager
    def stage(self, step: Step, steps: Sequence[Step], recipe: Recipe, role: str = "") -> Iterator[StageRun]:
        """A child run and a span around the making of one stage; a cached one only gives the parent its numbers.

        Args:
            role: the purpose of the stage, if one run makes several of a name: a night's "champion", say.
        """
        attributes = {
            "run": self.name,
            "recipe": self.recipe.name,
            "stage": step.name,
            "key": step.key,
            "why": step.why,
        }
        if role:
            attributes["role"] = role
        needs = [other for other in steps if other.name in step.needs]
        with span(f"stage {step.name}", attributes) as note:
            run = MlflowRun(self.run.uri, self.run.store)
            label = _label(step.name, role)
            recipe_of_stage = seen_by(step.name, recipe)
            stage_run = StageRun(self, step, needs, recipe_of_stage, role, label, note, run)
            if not step.cached:
                self.begin()
                stage_run.begin()
            error: BaseException | None = None
            try:
                yield stage_run
            except BaseException as raised:
                error = raised
                raise
            finally:
                if stage_run.follower is not None:
                    stage_run.follower.stop()
                    stage_run.note("its end", lambda: _terminate(run, error))

    def note_cached(self, role: str, result: StageResult) -> None:
        """Note a cached stage in the parent once that is open: a comparison of runs has no holes."""
        if not self._begun:
            self._cached.append((role, result))
            return

        def write() -> None:
            self.summarise(role, result, result.metrics)
            if result.name in graph.TRAINING:
                parent = self.run
                no_run = MlflowRun(parent.uri, parent.store, parent.experiment_id)
                models.register(no_run, self.recipe, result)

        label = _label(result.name, role)
        self.recorder.note(f"the numbers of {label}", write)

    def note_decision(self, line: Mapping[str, Any]) -> None:
        if not self._begun:
            return

        def write() -> None:
            for tag in ("decision", "reason"):
                value = str(line[tag])[:MAX_PARAM]
                self.run.client.set_tag(self.run.run_id, f"sqltrain.{tag}", value)
            self.run.log_rows("night", [(0, line.get("numbers", {}))])

        self.recorder.note("the night's decision", write)

    def summarise(self, role: str, result: StageResult, numbers: Mapping[str, float]) -> None:
        """A stage's summary and key in the parent run, for comparisons of runs."""
        group = f"{role}.{result.name}" if role else result.name
        row = {name.replace("/", "."): value for name, value in numbers.items()}
        self.run.log_rows(group, [(0, row)])
        tag = f"sqltrain.key.{group}"[:MAX_KEY]
        self.run.client.set_tag(self.run.run_id, tag, result.key)


def _label(stage: str, role: str) -> str:
    """A stage's name, with its role if it has one."""
    if not role:
        return stage
    return f"{stage} ({role})"


@dataclass
class StageRun:
    """One stage's run under its parent; a cached stage has only its metrics noted."""

    tracker: Tracker
    step: Step
    needs: Sequence[Step]
    recipe: Recipe  # the recipe as the stage sees it.
    role: str
    label: str  # its stage, with its role.
    note_span: Callable[[Mapping[str, Any]], None]
    run: MlflowRun
    began: float = field(default_factory=time.perf_counter)
    follower: CurveFollower | None = None  # reader of the curves; a cached stage has none.

    def begin(self) -> None:
        """Open the run, and follow the stage's curves."""
        self.note("its run", self._open)
        step = self.step
        work = self.tracker.store.work(step.kind, step.key)

        def send(rows: Sequence[Row]) -> None:
            self.note("its curves", lambda: self.run.log_rows(step.name, rows))

        unfinished = work / "curves.jsonl"
        finished = step.folder / "curves.jsonl"
        self.follower = CurveFollower((unfinished, finished), send)
        self.follower.start()

    def _open(self) -> None:
        step = self.step
        run = self.run
        parent = self.tracker.run
        stage = next(stage for stage in graph.GRAPH if stage.name == step.kind)
        fields = {"stage": step.kind, "key": step.key, "why": step.why, "role": self.role}
        if stage.by_benchmark:
            fields["benchmark"] = self.recipe.benchmark.name
        tags = _with_provenance(fields) | {"mlflow.parentRunId": parent.run_id}
        run.experiment_id = parent.experiment_id
        opened = run.client.create_run(run.experiment_id, tags=tags, run_name=self.label)
        run.run_id = opened.info.run_id
        run.log_params(self.recipe.slice(*stage.reads))
        self._log_inputs()

    def _log_inputs(self) -> None:
        """Log the datasets that the stage reads, by their paths within the store: the store may move."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for need in self.needs:
            reference = models.dataset_reference(need)
            if reference is not None:
                source = f"{need.kind}/{need.key}/data.parquet"
                dataset = Dataset(*reference, source_type="sqltrain-store", source=source)
                tag = InputTag("mlflow.data.context", self.step.name)
                inputs.append(DatasetInput(dataset, [tag]))
        if inputs:
            self.run.client.log_inputs(self.run.run_id, inputs)

    def record(self, result: StageResult) -> None:
        """Note a finished stage: its numbers, its files, and its checkpoint, report or evaluation."""
        metrics = {f"metrics.{name}": value for name, value in result.metrics.items()}
        self.note_span({"cached": result.cached, **metrics})
        if self.follower is None:
            self.tracker.note_cached(self.role, result)
            return
        numbers = {**result.metrics, "seconds": time.perf_counter() - self.began}
        self.follower.flush()
        self._note_numbers(result, numbers, self.follower.names)
        self._note_files(result)
        if result.name in graph.TRAINING:
            self.note("its checkpoint", lambda: models.register(self.run, self.tracker.recipe, result))
        if result.name.startswith("evaluate_"):
            run = self.run
            recipe = self.recipe
            needs = self.needs
            self.note("its checkpoint's accuracy", lambda: models.note_accuracy(run, recipe, needs, result))
            self.note("its traces", lambda: episodes.log_traces(run, recipe, needs, result))
            self.note("its questions", lambda: episodes.log_questions(run, recipe, needs))

    def _note_numbers(self, result: StageResult, numbers: Mapping[str, float], curves: Collection[str]) -> None:
        """Note a stage's numbers, those of its curves in the parent alone, and its timing."""
        run = self.run
        without_curves = {name: value for name, value in numbers.items() if name not in curves}
        timing, _ = read_rows([result.folder / "timing.jsonl"], 0)
        self.note("its numbers", lambda: run.log_rows(self.step.name, [(0, without_curves)]))
        self.note("its numbers in the parent", lambda: self.tracker.summarise(self.role, result, numbers))
        self.note("its timing", lambda: run.log_rows("timing", timing))

    def _note_files(self, result: StageResult) -> None:
        """Note a stage's contract, and a report in the parent."""
        for name in SMALL_FILES:
            path = result.folder / name
            if path.is_file():
                self.note(name, functools.partial(_log_file, self.run, path))
        if result.kind == "report":
            parent = self.tracker.run
            page = result.folder / "report.html"
            folder = benchmark_of(result.name) or None  # the first benchmark's page lies on top
            self.note("the report", lambda: _log_file(parent, page, folder))

    def note(self, content: str, write: Callable[[], object]) -> None:
        self.tracker.recorder.note(f"{self.label}: {content}", write)


def _log_file(run: MlflowRun, path: Path, folder: str | None = None) -> None:
    run.client.log_artifact(run.run_id, str(path), folder)


def _terminate(run: MlflowRun, error: BaseException | None) -> None:
    if not run.run_id:
        return
    status = "KILLED"
    if error is None:
        status = "FINISHED"
    elif isinstance(error, Exception):
        status = "FAILED"
    run.client.set_terminated(run.run_id, status)


def _mark_killed_runs(client: MlflowClient, experiment_id: str) -> None:
    """End the runs of this machine that are RUNNING although their process is gone (kill -9), and their children."""
    running = "attributes.status = 'RUNNING' and tags."
    on_this_machine = f"{running}`sqltrain.host` = '{platform.node()}'"
    for parent in client.search_runs([experiment_id], on_this_machine):
        mark = parent.data.tags.get("sqltrain.process", "0/")
        pid, _, _ = mark.partition("/")
        if process_mark(int(pid)) == mark:
            continue
        of_parent = f"{running}`mlflow.parentRunId` = '{parent.info.run_id}'"
        children = client.search_runs([experiment_id], of_parent)
        for dead in (*children, parent):
            client.set_terminated(dead.info.run_id, "KILLED")


def _with_provenance(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags with commit, libraries and machine of this process; the commit also under the name that MLflow shows."""
    made_by = provenance.facts()
    all_tags = {**tags, **provenance.as_tags(made_by)}
    named = {f"sqltrain.{key}": value for key, value in all_tags.items() if value}
    if made_by["commit"]:
        named["mlflow.source.git.commit"] = str(made_by["commit"])
    return named


def process_mark(pid: int) -> str:
    """A process's number and the moment it began, which differs for a later one of that number; "" if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    _, _, after_name = stat.rpartition(")")
    start_time = after_name.split()[19]
    return f"{pid}/{start_time}"


# Training curves: read from a growing JSONL file, sent in batches.


class CurveFollower:
    """Sends the rows of a growing curves file every `every_s` seconds while a stage runs, and the rest when it stops.

    The file is the first of `paths` that is there: in the work folder, then in the finished one. `send` must not raise.
    """

    def __init__(self, paths: Sequence[Path], send: Callable[[Sequence[Row]], None], every_s: float = EVERY_S) -> None:
        self._paths = paths
        self._send = send
        self._every_s = every_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._offset = 0
        self.names: set[str] = set()  # names of the numbers so far
        self._thread = threading.Thread(target=self._watch, name="curves", daemon=True)
        self.start = self._thread.start

    def stop(self) -> None:
        """Stop following and send the rest."""
        self._done.set()
        self._thread.join()
        self.flush()

    def flush(self) -> None:
        """Send the whole lines that are new."""
        with self._lock:
            rows, self._offset = read_rows(self._paths, self._offset)
            if rows:
                self.names.update(*(numbers for _, numbers in rows))
                self._send(rows)

    def _watch(self) -> None:
        while not self._done.wait(self._every_s):
            self.flush()


def read_rows(paths: Sequence[Path], offset: int) -> tuple[list[Row], int]:
    """Whole rows past a byte offset of the first file that exists, and the offset after them.

    A file shorter than the offset was begun anew (a resume dropped rows after its checkpoint): nothing is new until
    it has grown past it again.
    """
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError:
            continue
        end = data.rfind(b"\n") + 1
        complete = data[:end]
        rows: list[Row] = []
        for line in complete.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # a line that is not a row
                numbers = json.loads(line)
                step = int(numbers.pop("step"))
                rows.append((step, numbers))
        return rows, offset + len(complete)
    return [], offset


# Spans of OpenTelemetry.


@functools.cache
def span_tracer() -> opentelemetry.trace.Tracer | None:
    """The maker of spans; None if the environment names no collector, or if the exporter is not installed.

    A process that sends spans already (`opentelemetry-instrument`) goes on to send them to its own collector.
    """
    if not any(os.environ.get(name) for name in SPAN_SWITCHES):
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logging.getLogger(SPAN_NAME).warning("no spans are sent: pip install 'sqltrain[traces]'")
        return None
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # a line for each lost batch, not for each try
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", SPAN_NAME)}
        provider = TracerProvider(resource=Resource.create(service))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer(SPAN_NAME)


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A span around everything made within it, which takes more attributes; an error ends it as failed."""
    tracer = span_tracer()
    if tracer is None:
        yield lambda attributes: None
        return
    with tracer.start_as_current_span(name, attributes=_span_attributes(attributes)) as current:
        yield lambda further: current.set_attributes(_span_attributes(further))


def _span_attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a span under our own prefix."""
    return {f"{SPAN_NAME}.{key}": value for key, value in values.items()}
