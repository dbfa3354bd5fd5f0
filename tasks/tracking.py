"""MLflow tracking: one run a walk of the graph, a child run a stage that was made; the store stays the truth.

Nothing here may stop a run: the first failure is said in one plain line and tracking is off for the rest. Numbers go
in batches, checkpoints and datasets by reference (a file URI and a digest), never as copies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from pipelines.config import Recipe
from pipelines.recipes import digest
from pipelines.stages import graph
from pipelines.stages.graph import StageResult, Step
from pipelines.store import MANIFEST, Store, read_json
from tasks.curves import Follower, Row, read_rows, to_metrics

if TYPE_CHECKING:
    from mlflow import MlflowClient

P = ParamSpec("P")

# MLflow's own limits: of one batch, of one value, of one name.
BATCH_METRICS, BATCH_PARAMS, MAX_PARAM, MAX_KEY = 1000, 100, 6000, 250
TRAINING = ("sft", "grpo")
EVALUATION = "evaluate_"
SMALL_FILES = ("contract.json", "contract.html")


def tracking_uri(store: Path) -> str:
    """Where runs are recorded: `MLFLOW_TRACKING_URI` when the user set it, else a SQLite file in the store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store / 'mlflow.db'}"


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings and lists as dotted keys: `{"sft": {"betas": [0, 1]}}` gives `sft.betas.0` and `sft.betas.1`."""
    if isinstance(value, Mapping) and value:
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)) and value:
        items = list(enumerate(value))
    else:
        return {prefix[:MAX_KEY]: str(value)[:MAX_PARAM]} if prefix else {}
    whole: dict[str, str] = {}
    for key, item in items:
        whole |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return whole


def _never_fatal(
    method: Callable[Concatenate[Tracker, P], None],
) -> Callable[Concatenate[Tracker, P], None]:
    """Turn a failure into one plain line and switch the tracker off."""

    def guarded(self: Tracker, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.off:
            return
        try:
            method(self, *args, **kwargs)
        except ImportError:
            self.off = True
            self.say("not tracked: mlflow is not installed (pip install 'sqltrain[ops]')")
        except Exception as error:
            told, self.off = self.off, True  # a guarded method within a guarded one has said it
            if not told:
                reason = " ".join(str(error).split())[:300] or repr(error)
                self.say(f"tracking in {self.uri} failed, the run goes on without it: {reason}")

    functools.update_wrapper(guarded, method)
    return guarded


class Tracker:
    """One MLflow parent run around a walk of the graph, opened when the first stage is made: no work, no run.

    Args:
        say: takes the one line that tells of a failure.
        tags: what else the parent run should be found by.
    """

    def __init__(
        self, recipe: Recipe, store: Store, say: Callable[[str], None], tags: Mapping[str, str] | None = None
    ) -> None:
        self.recipe = recipe
        self.store = store
        self.say = say
        self.tags = dict(tags or {})
        self.uri = tracking_uri(store.root)
        self.experiment_id = ""
        self.run_id = ""
        self.off = False

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(self.run_id, _status(error))

    @property
    def client(self) -> MlflowClient:
        """The connection, made at first use."""
        return connect(self.uri, self.store.root)

    @contextlib.contextmanager
    def stage(self, step: Step, steps: Sequence[Step]) -> Iterator[Child]:
        """A child run around the making of one stage; a stage that is there already has none."""
        child = Child(self, step, [other for other in steps if other.name in step.needs])
        if not step.cached:
            self._begin()
            self._begin_child(child)
        try:
            yield child
        except BaseException as error:
            child.status = _status(error)
            raise
        finally:
            if child.follower is not None:
                child.follower.stop()
            self._end(child.run_id, child.status)

    @_never_fatal
    def _begin(self) -> None:
        """Open the parent run, unless it is open, with the resolved recipe as its parameters and as a file."""
        if self.run_id:
            return
        resolved = self.recipe.model_dump(mode="json")
        name = self.recipe.name
        about = {"recipe": name, "recipe_digest": digest(resolved), "store": str(self.store.root), **self.tags}
        about |= {"host": platform.node(), "pid": str(os.getpid())}
        self.experiment_id = _experiment(self.client, name, self.store.root)
        _close_dead(self.client, self.experiment_id)
        run = self.client.create_run(self.experiment_id, tags=_own(about), run_name=f"{name} seed {self.recipe.seed}")
        self.run_id = run.info.run_id
        self._params(self.run_id, resolved)
        self.client.log_dict(self.run_id, resolved, "recipe.yaml")

    def _end(self, run_id: str, status: str) -> None:
        """Close a run, also after tracking was given up: it may be that it can be reached again."""
        if run_id:
            with contextlib.suppress(Exception):
                self.client.set_terminated(run_id, status)

    @_never_fatal
    def _begin_child(self, child: Child) -> None:
        step = child.step
        tags = _own({"stage": step.name, "key": step.key, "why": step.why, "folder": step.folder.as_uri()})
        tags["mlflow.parentRunId"] = self.run_id
        child.run_id = self.client.create_run(self.experiment_id, tags=tags, run_name=step.name).info.run_id
        reads = next(stage.reads for stage in graph.GRAPH if stage.name == step.name)
        self._params(child.run_id, self.recipe.slice(*reads))
        self._inputs(child)
        paths = (self.store.work(step.name, step.key) / "curves.jsonl", step.folder / "curves.jsonl")
        child.follower = Follower(paths, functools.partial(self._send, child.run_id, step.name))
        child.follower.start()

    @_never_fatal
    def _record(self, child: Child, result: StageResult) -> None:
        from tasks import registry, traces

        numbers = {**result.metrics, "seconds": time.perf_counter() - child.begun}
        self._send(self.run_id, result.name, [(0, numbers)])
        if child.follower is not None:
            child.follower.flush()
            numbers = {name: value for name, value in numbers.items() if name not in child.follower.names}
        self._send(child.run_id, result.name, [(0, numbers)])
        timing, _ = read_rows([result.folder / "timing.jsonl"], 0)
        self._send(child.run_id, "timing", timing)
        for path in (result.folder / name for name in SMALL_FILES):
            if path.is_file():
                self.client.log_artifact(child.run_id, str(path))
        if result.name == "report":
            self.client.log_artifact(self.run_id, str(result.folder / "report.html"))
        if result.name in TRAINING:
            registry.register(self.client, self.recipe.name, result, child.run_id)
        if result.name.startswith(EVALUATION):
            registry.tag_accuracy(self.client, self.recipe.name, child.needs, result.metrics)
            traces.log(self.client, self.uri, self.experiment_id, child.run_id, result.folder)

    @_never_fatal
    def _send(self, run_id: str, stage: str, rows: Sequence[Row]) -> None:
        """Log rows of (step, numbers) in as few batches as MLflow allows."""
        metrics = to_metrics(rows, stage)
        for start in range(0, len(metrics), BATCH_METRICS):
            self.client.log_batch(run_id, metrics=metrics[start : start + BATCH_METRICS])

    def _params(self, run_id: str, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flatten(values).items()]
        for start in range(0, len(params), BATCH_PARAMS):
            self.client.log_batch(run_id, params=params[start : start + BATCH_PARAMS])

    def _inputs(self, child: Child) -> None:
        """The datasets that a stage reads, by reference."""
        from mlflow.entities import DatasetInput, InputTag

        context = [InputTag("mlflow.data.context", child.step.name)]
        found = [_dataset(other) for other in child.needs]
        inputs = [DatasetInput(dataset, context) for dataset in found if dataset is not None]
        if inputs:
            self.client.log_inputs(child.run_id, inputs)


class Child:
    """One stage's run under its parent; a child without a run id records nothing."""

    def __init__(self, tracker: Tracker, step: Step, needs: Sequence[Step]) -> None:
        self.tracker = tracker
        self.step = step
        self.needs = needs
        self.run_id = ""
        self.status = _status(None)
        self.follower: Follower | None = None
        self.begun = time.perf_counter()

    def record(self, result: StageResult) -> None:
        """Note what the finished stage made: numbers, files, and what its kind has besides."""
        if self.run_id:
            self.tracker._record(self, result)


def _dataset(step: Step) -> Any:
    """A stage's dataset by reference, with the digest of its bytes; None when it has none."""
    from mlflow.entities import Dataset

    facts = read_json(step.folder / MANIFEST).get("files", {}).get("data.parquet")
    if facts is None:
        return None
    source = (step.folder / "data.parquet").as_uri()
    return Dataset(name=step.name, digest=facts["sha256"][:16], source_type="local", source=source)


def _own(tags: Mapping[str, str]) -> dict[str, str]:
    return {f"sqltrain.{key}": value for key, value in tags.items()}


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def _experiment(client: MlflowClient, name: str, store: Path) -> str:
    """The experiment of that name; its artifacts lie in the store unless the user named a tracking server."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        own = not os.environ.get("MLFLOW_TRACKING_URI")
        try:
            return str(client.create_experiment(name, (store / "mlflow" / name).as_uri() if own else None))
        except MlflowException:  # another run was first
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _close_dead(client: MlflowClient, experiment_id: str) -> None:
    """Mark as killed the runs of this machine that still say RUNNING although their process is gone (kill -9)."""
    here = f"attributes.status = 'RUNNING' and tags.`sqltrain.host` = '{platform.node()}'"
    for parent in client.search_runs([experiment_id], here):
        if Path(f"/proc/{parent.data.tags['sqltrain.pid']}").exists():
            continue
        children = f"attributes.status = 'RUNNING' and tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
        for run in (*client.search_runs([experiment_id], children), parent):
            client.set_terminated(run.info.run_id, "KILLED")


@functools.cache
def connect(uri: str, store: Path) -> MlflowClient:
    """A client of the tracking store; its tables are made once, behind a lock, by whoever comes first."""
    import fcntl
    import logging
    import warnings

    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
    store.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), (store / ".mlflow.lock").open("w") as lock:
        warnings.simplefilter("ignore")  # deprecations inside MLflow and SQLAlchemy
        fcntl.flock(lock, fcntl.LOCK_EX)
        import mlflow

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        client = mlflow.MlflowClient(uri)
        client.search_experiments(max_results=1)  # the connection is lazy: this makes the tables
        return client
