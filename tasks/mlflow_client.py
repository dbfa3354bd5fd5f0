"""The connection to MLflow: the tracking store of a run, paths that follow a moved store, and notes that may wait."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import importlib.util
import itertools
import math
import os
import re
import shlex
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.files import lock

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Metric

PROBE_S = 3.0  # a server that lives answers its health check at once
# MLflow's own client tries a server that does not answer for more than four minutes, with 120 seconds a request; where
# spans go to a collector (`tasks/run.py`), it would send its traces of episodes there, and not to its own pages.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_OTLP_EXPORTER": "false",
}
QUIET = {"MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
# A password may hold anything: all up to the last @ is left out, rather a little too much than a part of it shown.
_USER = re.compile(r"(?<=://)(?:[^:/?#\s@]*:\S*|[^/?#\s]*)@")
# Columns of MLflow's own tables that hold the address of artifacts as an absolute URI.
ADDRESSES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)


def tracking_uri(store: Path) -> str:
    """Where runs are recorded: `MLFLOW_TRACKING_URI` when the user set it, else a SQLite file in the store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or own_uri(store)


def without_password(text: str) -> str:
    """An address, or a text with addresses, as one may print it: without the user and the password before the host."""
    return _USER.sub("", text)


def own_uri(store: Path) -> str:
    """The tracking database that lies in a store."""
    return f"sqlite:///{store / 'mlflow.db'}"


def unreachable_reason(uri: str) -> str:
    """The reason why a tracking store does not answer; "" if it does. Takes `PROBE_S` seconds at most."""
    try:
        parsed = urllib.parse.urlsplit(uri)
        if parsed.scheme in ("http", "https"):
            # A user and a password in the address are sent as basic authentication.
            user, _, host = parsed.netloc.rpartition("@")
            address = parsed._replace(netloc=host).geturl().rstrip("/")
            request = urllib.request.Request(f"{address}/health")
            if user:
                plain_user = urllib.parse.unquote(user)
                key = base64.b64encode(plain_user.encode()).decode()
                request.add_header("Authorization", f"Basic {key}")
            try:
                urllib.request.urlopen(request, timeout=PROBE_S).close()
            except urllib.error.HTTPError as error:
                if error.code >= 500:  # anything else comes from a server that is up
                    return f"it answers with status {error.code}"
        elif parsed.scheme == "sqlite" and importlib.util.find_spec("mlflow"):  # else the file would stay empty
            # Begin to write and take it back; a file that does not exist yet can be made.
            path, _, _ = uri.removeprefix("sqlite:///").partition("?")
            with closing(sqlite3.connect(path, timeout=PROBE_S, isolation_level=None)) as database:
                (version,) = database.execute("PRAGMA user_version").fetchone()
                database.execute("BEGIN IMMEDIATE")
                database.execute(f"PRAGMA user_version = {version + 1}")  # its journal wants room on the disk
                database.execute("ROLLBACK")
        elif parsed.hostname:
            dialect, _, _ = parsed.scheme.partition("+")
            port = parsed.port or PORTS.get(dialect, 80)
            socket.create_connection((parsed.hostname, port), PROBE_S).close()
    except (ValueError, http.client.InvalidURL):  # their messages quote what may be a part of a password
        return "it is not a valid address"
    except (OSError, http.client.HTTPException, sqlite3.Error) as error:
        reason = without_password(str(getattr(error, "reason", error)))
        line = " ".join(reason.split())
        return line[:200] or type(error).__name__
    return ""


@functools.cache
def connect(uri: str, store: Path) -> MlflowClient:
    """A client of the tracking store; its tables are made once, behind a lock, by whoever comes first."""
    import logging
    import warnings

    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(QUIET)
    store.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), lock(store / ".mlflow.lock"):
        warnings.simplefilter("ignore")  # deprecations inside MLflow and SQLAlchemy
        if uri == own_uri(store):
            follow(store)
        import mlflow

        for noisy in ("mlflow", "alembic"):  # what fails is raised, too, and said in one line in place of a traceback
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        client = mlflow.MlflowClient(uri)
        client.search_experiments(max_results=1)  # the connection is lazy: this makes the tables
        return client


def follow(store: Path) -> None:
    """Let the places in a store's own tracking database follow the store, which was moved or copied.

    MLflow keeps absolute URIs and has no call that changes them, so its tables are written here; the database is ours.
    """
    path = store / "mlflow.db"
    if not path.is_file():
        return
    home = (store / "mlflow").as_uri()
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        named_tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = {name for (name,) in named_tables}
        if "experiments" not in tables:
            return
        former_homes = set()
        experiments = database.execute("SELECT name, artifact_location FROM experiments").fetchall()
        for name, address in experiments:
            end = f"/mlflow/{urllib.parse.quote(name)}"
            if address and address.endswith(end):
                former_homes.add(address.removesuffix(end) + "/mlflow")
        for former in former_homes - {home}:
            for table, column in ADDRESSES:
                if table in tables:
                    change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                    start = len(former) + 1
                    database.execute(change, (home, start, start, f"{former}/"))


@contextlib.contextmanager
def tracking_at(uri: str) -> Iterator[None]:
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


def experiment(client: MlflowClient, name: str, store: Path, say: Callable[[str], None]) -> str:
    """The id of the experiment of that name; its artifacts lie in the store unless the user named a tracking server.

    MLflow keeps the name of an experiment that was deleted, so the next one is NAME-2 and so on; `say` takes how the
    deleted one comes back.
    """
    from mlflow.entities import LifecycleStage, ViewType
    from mlflow.exceptions import MlflowException

    deleted: list[str] = []  # ids of deleted experiments of that name
    for number in itertools.count(1):
        title = name
        if number > 1:
            title = f"{name}-{number}"
        try:
            named = client.get_experiment_by_name(title) or _create_experiment(client, title, store)
        except MlflowException:
            # Servers show a deleted experiment in different ways, and another run may have made it meanwhile.
            same_name = client.search_experiments(ViewType.ALL, filter_string=f"name = '{title}'")
            if not same_name:
                raise
            named = same_name[0]
        if named.lifecycle_stage == LifecycleStage.ACTIVE:
            break
        deleted.append(named.experiment_id)
    if deleted:
        restore = f"mlflow experiments restore --experiment-id {deleted[0]}"
        address = without_password(client.tracking_uri)
        say(
            f"the MLflow experiment {name!r} was deleted: runs are recorded in {title!r}. It comes back with: "
            f"MLFLOW_TRACKING_URI={shlex.quote(address)} {restore}"
        )
    return str(named.experiment_id)


def _create_experiment(client: MlflowClient, name: str, store: Path) -> Experiment:
    artifacts = None  # the tracking server's own place
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        artifacts = (store / "mlflow" / name).as_uri()
    experiment_id = client.create_experiment(name, artifacts)
    return client.get_experiment(experiment_id)


# A run, and the numbers and settings that are logged to it.

# MLflow's own limits: characters of one value and of one name, and entries of one batch.
MAX_PARAM = 6000
MAX_KEY = 250
BATCH_METRICS = 1000
BATCH_PARAMS = 100
Row = tuple[int, Mapping[str, Any]]  # a step and its numbers
_NOT_ALLOWED = re.compile(r"[^\w\-. :]")


@dataclass
class MlflowRun:
    """A run of a tracking store; its ids are "" until it is open."""

    uri: str
    store: Path
    experiment_id: str = ""
    run_id: str = ""

    @property
    def client(self) -> MlflowClient:
        """The connection, made at first use."""
        return connect(self.uri, self.store)

    def log_rows(self, stage: str, rows: Sequence[Row], model: Mapping[str, str] | None = None) -> None:
        """Log rows of numbers in as few batches as MLflow allows.

        Args:
            model: the checkpoint and the dataset that they belong to, by MLflow's names of the fields.
        """
        run_id = self.run_id if model else None
        metrics = to_metrics(rows, stage, run_id, model)
        for start in range(0, len(metrics), BATCH_METRICS):
            batch = metrics[start : start + BATCH_METRICS]
            self.client.log_batch(self.run_id, metrics=batch)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log nested settings as flat parameters."""
        from mlflow.entities import Param

        params = [Param(key, value) for key, value in flatten(values).items()]
        for start in range(0, len(params), BATCH_PARAMS):
            batch = params[start : start + BATCH_PARAMS]
            self.client.log_batch(self.run_id, params=batch)


def metric_name(name: str, stage: str) -> str:
    """A metric's name with exactly one slash, group before name; the group is `stage` if the name has none.

    A tree of names must not use one as leaf and as branch (`loss` and `loss/sql`): a store that keeps one file a metric
    cannot hold both. `loss` becomes `sft/loss`, `loss/sql` stays, `reward/exec/std` becomes `reward/exec.std`.
    """
    group, _, rest = name.strip("/").partition("/")
    if not rest:
        rest = group
        group = stage
    group = _NOT_ALLOWED.sub("_", group)
    rest = _NOT_ALLOWED.sub("_", rest.replace("/", "."))
    return f"{group}/{rest}"[:MAX_KEY]


def to_metrics(
    rows: Sequence[Row], stage: str, run_id: str | None = None, model: Mapping[str, str] | None = None
) -> list[Metric]:
    """The finite numbers of some rows as MLflow's metrics, all at this moment.

    Args:
        run_id: the run of a checkpoint's numbers; else None.
        model: their checkpoint and dataset (MLflow's `model_id`, `dataset_name`, `dataset_digest`).
    """
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    model_fields = model or {}
    metrics = []
    for step, numbers in rows:
        for name, value in numbers.items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                full_name = metric_name(name, stage)
                metric = Metric(full_name, float(value), now, step, run_id=run_id, **model_fields)
                metrics.append(metric)
    return metrics


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings and lists as dotted keys: `{"sft": {"betas": [0, 1]}}` gives `sft.betas.0` and `sft.betas.1`."""
    if isinstance(value, Mapping) and value:
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)) and value:
        items = list(enumerate(value))
    elif prefix:
        return {prefix[:MAX_KEY]: str(value)[:MAX_PARAM]}
    else:
        return {}
    flat: dict[str, str] = {}
    for key, item in items:
        path = f"{prefix}.{key}" if prefix else str(key)
        flat |= flatten(item, path)
    return flat


# Notes to MLflow: written in order, kept while the server is away, counted if one is refused.

RETRY_S = 15.0  # seconds between two looks at a server that does not answer
TRIES = 3  # times that one note is sent to a server that answers
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # MLflow's codes worth another try


class MlflowNotes:
    """Writes notes to a tracking store and never raises.

    A note that the store refuses is left out, and those after it are written. While the store does not answer, notes
    wait in their order. The first trouble of each kind is one plain line, to `say`; `close` counts the notes that were
    never recorded.
    """

    def __init__(self, uri: str, say: Callable[[str], None]) -> None:
        self.uri = uri
        self.say = say
        self.off = False  # nothing more is recorded: MLflow is not installed, or the run was stopped before it answered
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._missed: list[str] = []
        self._lock = threading.RLock()  # a thread that follows curves writes notes, too
        self.written = 0  # notes that the store has taken
        self._tries = 0
        self._reached = False
        self._away = False
        self._refused = False
        self._closing = False
        self._next_look = 0.0

    def note(self, name: str, write: Callable[[], object]) -> None:
        """Write a note, after all that wait before it; its name is "stage: content", for `close` counts by stage."""
        with self._lock:
            if not self.off:
                self._waiting.append((name, write))
                self._write_waiting()

    def close(self) -> None:
        """Try the waiting notes once more, and report those that were not recorded."""
        with self._lock:
            self._closing = True
            self._next_look = 0.0
            self._write_waiting()
            self._missed += [name for name, _ in self._waiting]
            self._waiting.clear()
            if self._missed and not self.off:
                total = self.written + len(self._missed)
                stages = [name.partition(":")[0] for name in self._missed]
                counts = [f"{stage} {count}" for stage, count in Counter(stages).items()]
                listed = ", ".join(counts)
                server = without_password(self.uri)
                self.say(
                    f"not recorded in MLflow at {server}: {len(self._missed)} of {total} notes "
                    f"({listed}); their numbers and files are in the store"
                )
            self._missed.clear()
            self._closing = False

    def _write_waiting(self) -> None:
        """Write the waiting notes, in order, until one has to wait for the store."""
        server = f"MLflow at {without_password(self.uri)}"
        while self._waiting and not self.off and time.monotonic() >= self._next_look:
            name, write = self._waiting[0]
            trouble = ""
            if not self._reached:
                reason = unreachable_reason(self.uri)
                if reason:
                    trouble = f"does not answer ({reason})"
            try:
                if not trouble:
                    write()
                    self._reached = True
                    self._away = False
                    self.written += 1
            except ImportError:
                self.off = True
                self.say("not tracked: mlflow is not installed (pip install 'sqltrain[ops]')")
            except Exception as error:
                trouble = self._note_failure(name, error, server)
            if trouble:
                self._next_look = time.monotonic() + RETRY_S
                if not self._away:
                    self.say(f"{server} {trouble}; the run goes on, its notes wait")
                self._away = True
                return
            self._waiting.popleft()
            self._tries = 0

    def _note_failure(self, name: str, error: Exception, server: str) -> str:
        """Give up on a note that the store refused; the trouble in words if it may be taken later."""
        self._reached = False
        connect.cache_clear()  # a new connection may be able to write
        self._tries += 1
        is_passing = isinstance(error, OSError) or getattr(error, "error_code", None) in PASSING
        reason = error_line(error)
        if is_passing and self._tries < TRIES and not self._closing:
            return f"could not write {name} ({reason})"
        is_counted_next = self._closing and self._away  # `close` counts it in a moment
        if not self._refused and not is_counted_next:
            self.say(f"{server} refused {name} ({reason}); the run goes on")
        self._refused = True
        self._missed.append(name)
        return ""


def error_line(error: BaseException) -> str:
    """An error's message on one line, without passwords; a database's without the statement and its values."""
    text, statement, _ = str(error).partition("\n[SQL:")
    if not text:
        text = repr(error)
    elif statement:
        text = text.splitlines()[-1]
    line = " ".join(text.split())
    return without_password(line)[:300]
