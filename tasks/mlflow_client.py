"""The way to MLflow: which tracking store a run is recorded in, whether it answers, and paths that follow the store."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import os
import re
import socket
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient


import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.core.files import lock, read_json
from pipelines.core.frames import DATA
from pipelines.core.store import MANIFEST
from pipelines.stages.graph import Step

PROBE_S = 3.0  # a server that lives answers its health check at once
# MLflow's own client tries a server that does not answer for more than four minutes, with 120 seconds a request; where
# spans go to a collector (`tasks/spans.py`), it would send its traces of episodes there, and not to its own pages.
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_OTLP_EXPORTER": "false",
}
QUIET = {"MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306}
# A password may hold anything: all up to the last @ is left out, rather a little too much than a part of it shown.
_USER = re.compile(r"(?<=://)(?:[^:/?#\s@]*:\S*|[^/?#\s]*)@")
# Columns of MLflow's own tables that hold the place of artifacts as an absolute URI.
PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)


def tracking_uri(store: Path) -> str:
    """Where runs are recorded: `MLFLOW_TRACKING_URI` when the user set it, else a SQLite file in the store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or own_uri(store)


def shown(text: str) -> str:
    """An address, or a text with addresses, as one may print it: without the user and the password before the host."""
    return _USER.sub("", text)


def own_uri(store: Path) -> str:
    """The tracking database that lies in a store."""
    return f"sqlite:///{store / 'mlflow.db'}"


def trouble(uri: str) -> str:
    """Why a tracking store does not answer, in a few words; "" when it does. Takes `PROBE_S` seconds at most."""
    parsed = urllib.parse.urlparse(uri)
    try:
        if parsed.scheme in ("http", "https"):
            _ask(f"{uri.rstrip('/')}/health")
        elif parsed.scheme == "sqlite":
            _open(Path(uri.removeprefix("sqlite:///").partition("?")[0]))
        elif parsed.hostname:
            port = parsed.port or PORTS.get(parsed.scheme.partition("+")[0], 80)
            socket.create_connection((parsed.hostname, port), PROBE_S).close()
    except (ValueError, http.client.InvalidURL):  # their words quote what may be a part of a password
        return "it is no address that can be read"
    except (OSError, http.client.HTTPException, sqlite3.Error) as error:
        return " ".join(shown(str(getattr(error, "reason", error))).split())[:200] or type(error).__name__
    return ""


def _ask(url: str) -> None:
    """Ask a server for a page; a user and a password in the address are sent as basic authentication."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl())
    if user:
        key = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_header("Authorization", f"Basic {key}")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S):
            pass
    except urllib.error.HTTPError as error:
        if error.code >= 500:  # anything else comes from a server that is up
            raise OSError(f"it answers with status {error.code}") from None


def _open(path: Path) -> None:
    """Begin to write to a SQLite file and take it back; one that is not there yet can be made."""
    with closing(sqlite3.connect(path, timeout=PROBE_S, isolation_level=None)) as database:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        database.execute("BEGIN IMMEDIATE")
        database.execute(f"PRAGMA user_version = {version + 1}")  # its journal wants room on the disk
        database.execute("ROLLBACK")


def forget_connections() -> None:
    """Connect anew at the next use: what a connection could not do before may work now."""
    connect.cache_clear()


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
    path, home = store / "mlflow.db", (store / "mlflow").as_uri()
    if not path.is_file():
        return
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "experiments" not in tables:
            return
        rows = database.execute("SELECT name, artifact_location FROM experiments").fetchall()
        ends = ((place, f"/mlflow/{urllib.parse.quote(name)}") for name, place in rows if place)
        homes = {place.removesuffix(end) + "/mlflow" for place, end in ends if place.endswith(end)} - {home}
        for old in homes:
            for table, column in (pair for pair in PLACES if pair[0] in tables):
                change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                database.execute(change, (home, len(old) + 1, len(old) + 1, f"{old}/"))


@contextlib.contextmanager
def destination(uri: str) -> Iterator[None]:
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


def experiment(client: MlflowClient, name: str, store: Path) -> str:
    """The id of the experiment of that name; its artifacts lie in the store unless the user named a tracking server."""
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        own = not os.environ.get("MLFLOW_TRACKING_URI")
        try:
            return str(client.create_experiment(name, (store / "mlflow" / name).as_uri() if own else None))
        except MlflowException:  # another run was first
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return str(experiment.experiment_id)


# Notes on their way to MLflow: written in order, kept while the server is away, counted where one is refused.

RETRY_S = 15.0  # between two looks at a server that does not answer
TRIES = 3  # of one note by a server that answers
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")  # MLflow's codes worth another try
Write = Callable[[], None]


class MlflowNotes:
    """Writes notes to a tracking store and never raises.

    A note that the store refuses is left out, and those after it are written. While the store does not answer, notes
    wait in their order. The first trouble of each kind is one plain line; `close` says what was never recorded.

    Args:
        say: takes a plain line.

    Attributes:
        off: nothing more is recorded: MLflow is not installed, or the run was stopped before the store was reached.
    """

    def __init__(self, uri: str, say: Callable[[str], None]) -> None:
        self.uri = uri
        self.say = say
        self.off = False
        self._waiting: deque[tuple[str, Write]] = deque()
        self._missed: list[str] = []
        self._lock = threading.RLock()  # a thread that follows curves writes notes, too
        self._written = self._tries = 0
        self._heard = self._away = self._refused = self._closing = False
        self._next_look = 0.0

    @property
    def reached(self) -> bool:
        """Whether the store has taken a note."""
        return self._written > 0

    def note(self, what: str, write: Write) -> None:
        """Write a note, after all that wait before it.

        Args:
            what: names the note, as "stage: what of it": the last line counts by stage.
        """
        with self._lock:
            if not self.off:
                self._waiting.append((what, write))
                self._go_on()

    def close(self) -> None:
        """Try once more what still waits, and say what was not recorded."""
        with self._lock:
            self._closing, self._next_look = True, 0.0
            self._go_on()
            self._missed += [what for what, _ in self._waiting]
            self._waiting.clear()
            if self._missed and not self.off:
                total = self._written + len(self._missed)
                counts = Counter(what.partition(":")[0] for what in self._missed)
                names = ", ".join(f"{name} {count}" for name, count in counts.items())
                self.say(
                    f"not recorded in MLflow at {shown(self.uri)}: {len(self._missed)} of {total} notes ({names}); "
                    "their numbers and files are in the store"
                )
            self._missed.clear()
            self._closing = False

    def _go_on(self) -> None:
        """Write what waits, in order, as far as the store takes it."""
        while self._waiting and not self.off and time.monotonic() >= self._next_look:
            reason = "" if self._heard else trouble(self.uri)
            if reason:
                self._wait(f"does not answer ({reason})")
                return
            what, write = self._waiting[0]
            if not self._write(what, write):
                return
            self._waiting.popleft()
            self._tries = 0

    def _write(self, what: str, write: Write) -> bool:
        """Whether a note is done with, written or refused."""
        try:
            write()
        except ImportError:
            self.off = True
            self.say("not tracked: mlflow is not installed (pip install 'sqltrain[ops]')")
        except Exception as error:
            return self._failed(what, error)
        else:
            self._heard, self._away = True, False
            self._written += 1
        return True

    def _failed(self, what: str, error: Exception) -> bool:
        reason = said(error)
        self._heard = False
        forget_connections()
        self._tries += 1
        if _passing(error) and self._tries < TRIES and not self._closing:
            self._wait(f"could not write {what} ({reason})")
            return False
        if not self._refused and not (self._closing and self._away):  # that is said already, and counted in a moment
            self.say(f"MLflow at {shown(self.uri)} refused {what} ({reason}); the run goes on")
        self._refused = True
        self._missed.append(what)
        return True

    def _wait(self, trouble: str) -> None:
        self._next_look = time.monotonic() + RETRY_S
        if not self._away:
            self.say(f"MLflow at {shown(self.uri)} {trouble}; the run goes on, its notes wait")
        self._away = True


def said(error: BaseException) -> str:
    """What an error says, on one line, without passwords; of a database's, without the statement and its values."""
    text, statement, _ = str(error).partition("\n[SQL:")
    lines = text.splitlines() if statement else [text]
    return shown(" ".join(lines[-1].split()) if text else repr(error))[:300]


def _passing(error: Exception) -> bool:
    """Whether the same note may be written a little later."""
    return isinstance(error, OSError) or getattr(error, "error_code", None) in PASSING


# What MLflow is told of a recipe and of a stage's dataset, as plain texts.

MAX_PARAM, MAX_KEY = 6000, 250  # MLflow's own limits of one value and of one name


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


def dataset_facts(step: Step) -> tuple[str, str] | None:
    """The name and the digest of a stage's dataset; None when it has none."""
    facts = read_json(step.folder / MANIFEST).get("files", {}).get(DATA)
    return None if facts is None else (step.name, facts["sha256"][:16])
