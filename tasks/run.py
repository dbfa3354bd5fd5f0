"""MLflow tracking: one parent run a pipeline run or night, a child a stage that was made; the store stays the truth.

Nothing here may stop a run: notes that cannot be written wait or are counted as missing (`recording.py`). Numbers go in
batches, checkpoints and datasets by reference (a digest and a place within the store), never as copies.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pipelines.core import provenance
from pipelines.core.store import Store
from pipelines.core.types import Example
from pipelines.nightly.store_gc import claimed
from pipelines.protocols.base import PROMPTS
from pipelines.recipe.config import ProtocolSection, Recipe
from pipelines.recipe.recipes import digest
from pipelines.stages import graph
from pipelines.stages.context import examples
from pipelines.stages.graph import StageResult, Step
from tasks import mlflow_client
from tasks.mlflow_client import MAX_KEY, MAX_PARAM, MlflowNotes, dataset_facts, destination, flatten

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

# Training curves on their way to the tracking store: read from a growing JSONL file, sent in batches.

Row = tuple[int, Mapping[str, Any]]
EVERY_S = 15.0
_NOT_ALLOWED = re.compile(r"[^\w\-. :]")


def metric_name(name: str, stage: str) -> str:
    """A metric's name with exactly one slash, group before name: the group is `stage` where the name has none.

    A tree of names must not use one as leaf and as branch (`loss` beside `loss/sql`): a store that keeps one file a
    metric cannot hold both. `loss` becomes `sft/loss`, `loss/sql` stays, `reward/exec/std` becomes `reward/exec.std`.
    """
    group, _, rest = name.strip("/").partition("/")
    if not rest:
        group, rest = stage, group
    return f"{_NOT_ALLOWED.sub('_', group)}/{_NOT_ALLOWED.sub('_', rest.replace('/', '.'))}"[:250]


def to_metrics(
    rows: Sequence[Row], stage: str, run_id: str | None = None, model: Mapping[str, str] | None = None
) -> list[Metric]:
    """The finite numbers of some rows as MLflow's metrics, all at this moment.

    Args:
        run_id, model: the run, and the checkpoint and dataset (MLflow's `model_id`, `dataset_name`, `dataset_digest`),
            of numbers that belong to a checkpoint.
    """
    from mlflow.entities import Metric

    now, about = int(time.time() * 1000), {"run_id": run_id, **(model or {})}
    return [
        Metric(metric_name(name, stage), float(value), now, step, **about)
        for step, numbers in rows
        for name, value in numbers.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    ]


class Follower:
    """Sends the rows of a growing curves file every so often while a stage runs, and the rest when it stops.

    Args:
        paths: where the file may be, in order: the work folder, then the finished one.
        send: takes rows of (step, numbers); must not raise.
        every_s: time between two looks, in seconds.

    Attributes:
        names: of the numbers that were seen.
    """

    def __init__(self, paths: Sequence[Path], send: Callable[[Sequence[Row]], None], every_s: float = EVERY_S) -> None:
        self._paths = paths
        self._send = send
        self._every_s = every_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._offset = 0
        self.names: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="curves", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following and send what is left."""
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
        whole = data[: data.rfind(b"\n") + 1]
        rows = [row for line in whole.splitlines() if (row := _row(line)) is not None]
        return rows, offset + len(whole)
    return [], offset


def _row(line: bytes) -> Row | None:
    try:
        value = json.loads(line)
        return int(value.pop("step")), value
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# The prompts that runs used, in MLflow's prompt registry: a version a text, found again by the digest of the text.

_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def register(tracker: Tracker, protocol: ProtocolSection) -> None:
    """Link the run to the version of its prompt, which is made unless that text has one already."""
    from mlflow.exceptions import MlflowException

    path = PROMPTS / f"{protocol.name}_{protocol.prompt}.txt"
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    name, alias = f"sqltrain-{protocol.name}-{protocol.prompt}", f"text-{digest(text)[:12]}"
    client = tracker.client
    try:
        version = client.get_prompt_version_by_alias(name, alias)
    except MlflowException:
        version = client.register_prompt(name, _VARIABLE.sub(r"{{\1}}", text), tags={"digest": digest(text)})
        client.set_prompt_alias(name, alias, version.version)
    with destination(tracker.uri):  # the link goes to MLflow's global store, whatever the client's own is
        client.link_prompt_version_to_run(tracker.run_id, version)


# The held-out questions of a benchmark as an evaluation dataset of MLflow, on which anyone may evaluate an agent.

MOST = 2000  # MLflow looks each row up before it writes it: some 2 ms a row


def log(child: Child) -> None:
    """Make the dataset of the questions that an evaluation asked, unless an earlier run did or they are too many."""
    tracker = child.tracker
    for step in (step for step in child.needs if step.kind == "test"):
        name = f"{child.recipe.benchmark.name} {step.key}"
        if tracker.client.search_datasets([tracker.experiment_id], f"name = '{name}'"):
            continue
        asked = examples(step.folder, "test")
        if len(asked) > MOST:
            continue
        with warnings.catch_warnings(), destination(tracker.uri):
            warnings.simplefilter("ignore")  # deprecations inside MLflow
            tags = {"sqltrain.stage": step.name, "sqltrain.key": step.key}
            dataset = tracker.client.create_dataset(name, [tracker.experiment_id], tags)
            dataset.merge_records([_question_row(example) for example in asked])


def _question_row(example: Example) -> dict[str, Any]:
    inputs = {"question": example.question, "database": example.database.id}
    if example.evidence:
        inputs["evidence"] = example.evidence
    return {"inputs": inputs, "expectations": {"expected_response": example.gold_sql}}


# MLflow's own limits of one batch.
BATCH_METRICS, BATCH_PARAMS = 1000, 100
TRAINING = ("sft", "grpo")
EVALUATION = "evaluate_"
SMALL_FILES = ("contract.json", "contract.html")


class Tracker:
    """The parent run of one pipeline run or of one night, opened when there is something to make: no work, no run.

    Args:
        say: takes the plain lines that tell of trouble.
        name: of the run, for people; the moment is put behind it. The recipe and its seed when left out.
        tags: what else the parent run should be found by.
        group: what all processes of one run share (Prefect's root flow run); "" where one process does all of it.
            A process whose group has a parent run already adds to that one.
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
        self.name = f"{name or f'{recipe.name} seed {recipe.seed}'}, {time.strftime('%d %b %H:%M:%S')}"
        self.tags = dict(tags or {})
        self.group = group
        self.uri = mlflow_client.tracking_uri(store.root)
        self.recorder = MlflowNotes(self.uri, say)
        self.experiment_id = ""
        self.run_id = ""
        self._begun = self._joined = False
        self._claim = contextlib.ExitStack()  # what `sqltrain status` sees until the last note is written
        self._cached: list[tuple[str, StageResult]] = []  # found before there was a run to note them in

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._claim:
            if isinstance(error, KeyboardInterrupt) and not self.recorder.reached:
                self.recorder.off = True  # who stops a run does not wait until a new store has its tables
            if self._begun and not self._joined:
                self.recorder.note("the end of the run", lambda: self._end(self.run_id, _status(error)))
            self.recorder.close()

    @property
    def client(self) -> MlflowClient:
        """The connection, made at first use."""
        return mlflow_client.connect(self.uri, self.store.root)

    @property
    def page(self) -> str:
        """The address of the run's page on an MLflow server; "" where it has none that a browser reaches."""
        if not (self.run_id and self.uri.startswith("http")):
            return ""
        return f"{mlflow_client.shown(self.uri).rstrip('/')}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def begin(self) -> None:
        """Open the parent run, unless it is open, and note what was found finished before."""
        if self._begun:
            return
        self._begun = True
        self._claim.enter_context(claimed(self.store, (), {"recipe": self.recipe.name, **self.tags}))

        self.recorder.note("the run and its parameters", self._open)
        self.recorder.note("the prompt", lambda: register(self, self.recipe.protocol))
        for role, result in self._cached:
            self._note_cached(role, result)
        self._cached.clear()

    @contextlib.contextmanager
    def stage(self, step: Step, steps: Sequence[Step], recipe: Recipe, role: str = "") -> Iterator[Child]:
        """A child run around the making of one stage; a cached one only gives the parent its numbers.

        Args:
            role: what the stage is made for, where one run makes several of a name: a night's "champion", say.
        """
        child = Child(self, step, [other for other in steps if other.name in step.needs], recipe, role)
        if not step.cached:
            self.begin()
            child.begin()
        try:
            yield child
        except BaseException as error:
            child.status = _status(error)
            raise
        finally:
            child.end()

    def found(self, role: str, result: StageResult) -> None:
        """Note a stage that was there, in the parent once there is one: a comparison of runs has no holes."""
        if self._begun:
            self._note_cached(role, result)
        else:
            self._cached.append((role, result))

    def decided(self, line: Mapping[str, Any]) -> None:
        """Note what a night decided."""
        if not self._begun:
            return

        def write() -> None:
            for tag, value in (("decision", line["decision"]), ("reason", line["reason"])):
                self.client.set_tag(self.run_id, f"sqltrain.{tag}", str(value)[:MAX_PARAM])
            self.send(self.run_id, "night", [(0, line.get("numbers", {}))])

        self.recorder.note("the night's decision", write)

    def send(self, run_id: str, stage: str, rows: Sequence[Row], model: Mapping[str, str] | None = None) -> None:
        """Log rows of (step, numbers) in as few batches as MLflow allows.

        Args:
            model: the checkpoint and the dataset that the numbers belong to, by MLflow's names of the fields.
        """
        metrics = to_metrics(rows, stage, run_id if model else None, model or {})
        for start in range(0, len(metrics), BATCH_METRICS):
            self.client.log_batch(run_id, metrics=metrics[start : start + BATCH_METRICS])

    def params(self, run_id: str, values: Mapping[str, Any]) -> None:
        """Log nested settings as flat parameters."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flatten(values).items()]
        for start in range(0, len(params), BATCH_PARAMS):
            self.client.log_batch(run_id, params=params[start : start + BATCH_PARAMS])

    def _open(self) -> None:
        """The run of this group where there is one; else a new one, with the resolved recipe in it."""
        self.experiment_id = mlflow_client.experiment(self.client, self.recipe.name, self.store.root)
        _close_dead(self.client, self.experiment_id)
        if self.group:
            runs = self.client.search_runs([self.experiment_id], f"tags.`sqltrain.group` = '{self.group}'")
            if runs:
                self.run_id, self._joined = runs[0].info.run_id, True
                return
        resolved = self.recipe.model_dump(mode="json")
        about = {"recipe": self.recipe.name, "recipe_digest": digest(resolved), **self.tags, "group": self.group}
        about |= {"host": platform.node(), "process": process_mark(os.getpid())}
        run = self.client.create_run(self.experiment_id, tags=_own(about) | _made_by(), run_name=self.name)
        self.run_id = run.info.run_id
        self.params(self.run_id, resolved)
        self.client.log_dict(self.run_id, resolved, "recipe.yaml")

    def _end(self, run_id: str, status: str) -> None:
        if run_id:
            self.client.set_terminated(run_id, status)

    def _note_cached(self, role: str, result: StageResult) -> None:
        def write() -> None:
            from tasks import models

            self.summarise(role, result, result.metrics)
            if result.name in TRAINING:
                models.register(self, result, "")

        self.recorder.note(f"the numbers of {_label(result.name, role)}", write)

    def summarise(self, role: str, result: StageResult, numbers: Mapping[str, float]) -> None:
        """A stage's summary and key in the parent run: what one compares across runs."""
        group = f"{role}.{result.name}" if role else result.name
        self.send(self.run_id, group, [(0, {name.replace("/", "."): value for name, value in numbers.items()})])
        self.client.set_tag(self.run_id, f"sqltrain.key.{group}"[:MAX_KEY], result.key)


class Child:
    """One stage's run under its parent; of a cached stage, only the metrics are noted."""

    def __init__(self, tracker: Tracker, step: Step, needs: Sequence[Step], recipe: Recipe, role: str) -> None:
        self.tracker = tracker
        self.step = step
        self.needs = needs
        self.recipe = graph.seen_by(step.name, recipe)
        self.role = role
        self.label = _label(step.name, role)
        self.run_id = ""
        self.status = _status(None)
        self.begun = time.perf_counter()
        self._follower: Follower | None = None

    def begin(self) -> None:
        """Open the run, and follow the stage's curves."""
        self._note("its run", self._open)
        store, step = self.tracker.store, self.step
        paths = (store.work(step.kind, step.key) / "curves.jsonl", step.folder / "curves.jsonl")
        self._follower = Follower(paths, lambda rows: self._note("its curves", lambda: self._send(rows)))
        self._follower.start()

    def record(self, result: StageResult) -> None:
        """Note what the finished stage made: numbers, files, and what its kind has besides."""
        if self._follower is None:
            self.tracker.found(self.role, result)
            return
        numbers = {**result.metrics, "seconds": time.perf_counter() - self.begun}
        self._follower.flush()
        own = {name: value for name, value in numbers.items() if name not in self._follower.names}
        timing, _ = read_rows([result.folder / "timing.jsonl"], 0)
        self._note("its numbers", lambda: self._send([(0, own)]))
        self._note("its numbers in the parent", lambda: self.tracker.summarise(self.role, result, numbers))
        self._note("its timing", lambda: self.tracker.send(self.run_id, "timing", timing))
        for path in (result.folder / name for name in SMALL_FILES):
            if path.is_file():
                self._note(path.name, functools.partial(self._file, path))
        if result.kind == "report":
            self._note("the report", lambda: self._report(result))
        self._note_checkpoint(result)

    def end(self) -> None:
        """Stop following, and close the run."""
        if self._follower is not None:
            self._follower.stop()
            self._note("its end", lambda: self.tracker._end(self.run_id, self.status))

    def _note_checkpoint(self, result: StageResult) -> None:
        """The checkpoint that a stage trained; the evaluation of one."""
        from tasks import episodes, models

        if result.name in TRAINING:
            self._note("its checkpoint", lambda: models.register(self.tracker, result, self.run_id))
        if result.name.startswith(EVALUATION):
            self._note("its checkpoint's accuracy", lambda: models.note_accuracy(self, result))
            self._note("its traces", lambda: episodes.log(self, result))
            self._note("its questions", lambda: log(self))

    def _note(self, what: str, write: Callable[[], None]) -> None:
        self.tracker.recorder.note(f"{self.label}: {what}", write)

    def _send(self, rows: Sequence[Row]) -> None:
        self.tracker.send(self.run_id, self.step.name, rows)

    def _file(self, path: Path) -> None:
        self.tracker.client.log_artifact(self.run_id, str(path))

    def _report(self, result: StageResult) -> None:
        """That of the first benchmark lies on top, that of another in a folder of its name."""
        folder = graph.benchmark_of(result.name) or None
        self.tracker.client.log_artifact(self.tracker.run_id, str(result.folder / "report.html"), folder)

    def _open(self) -> None:
        tracker, step = self.tracker, self.step
        benchmark = self.recipe.benchmark.name if graph.is_by_benchmark(step.name) else ""
        about = {"stage": step.kind, "key": step.key, "why": step.why, "role": self.role, "benchmark": benchmark}
        tags = _own(about)
        tags |= _made_by() | {"mlflow.parentRunId": tracker.run_id}
        run = tracker.client.create_run(tracker.experiment_id, tags=tags, run_name=self.label)
        self.run_id = run.info.run_id
        reads = next(stage.reads for stage in graph.GRAPH if stage.name == step.kind)
        tracker.params(self.run_id, self.recipe.slice(*reads))
        self._inputs()

    def _inputs(self) -> None:
        """The datasets that the stage reads, by reference."""
        from mlflow.entities import DatasetInput, InputTag

        context = [InputTag("mlflow.data.context", self.step.name)]
        datasets = [_dataset(other) for other in self.needs]
        inputs = [DatasetInput(dataset, context) for dataset in datasets if dataset is not None]
        if inputs:
            self.tracker.client.log_inputs(self.run_id, inputs)


def _dataset(step: Step) -> Any:
    """A stage's dataset by its place within the store: the store may move."""
    from mlflow.entities import Dataset

    facts = dataset_facts(step)
    if facts is None:
        return None
    return Dataset(*facts, source_type="sqltrain-store", source=f"{step.kind}/{step.key}/data.parquet")


def _own(tags: Mapping[str, str]) -> dict[str, str]:
    return {f"sqltrain.{key}": value for key, value in tags.items() if value}


def _made_by() -> dict[str, str]:
    """Commit, libraries and machine of this process as tags; the commit also where MLflow's own pages look for it."""
    made_by = provenance.facts()
    commit = {"mlflow.source.git.commit": str(made_by["commit"])} if made_by["commit"] else {}
    return _own(provenance.as_tags(made_by)) | commit


def _label(stage: str, role: str) -> str:
    return f"{stage} ({role})" if role else stage


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def process_mark(pid: int) -> str:
    """A process's number and the moment it began, which tell it from a later one of that number; "" when it is gone."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"{pid}/{facts.rpartition(')')[2].split()[19]}"


def _close_dead(client: MlflowClient, experiment_id: str) -> None:
    """Mark as killed the runs of this machine that still say RUNNING although their process is gone (kill -9)."""
    here = f"attributes.status = 'RUNNING' and tags.`sqltrain.host` = '{platform.node()}'"
    for parent in client.search_runs([experiment_id], here):
        mark = parent.data.tags.get("sqltrain.process", "0/")
        if process_mark(int(mark.partition("/")[0])) == mark:
            continue
        children = f"attributes.status = 'RUNNING' and tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
        for run in (*client.search_runs([experiment_id], children), parent):
            client.set_terminated(run.info.run_id, "KILLED")
