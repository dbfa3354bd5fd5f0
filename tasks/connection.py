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
    """Ask a server for a page; a user and a password in the address are sent as basic authentication.

    Raises:
        OSError, ValueError, http.client.HTTPException: it does not answer, or it answers that it is out of order.
    """
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
    import fcntl
    import logging
    import warnings

    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.update(QUIET)
    store.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), (store / ".mlflow.lock").open("w") as lock:
        warnings.simplefilter("ignore")  # deprecations inside MLflow and SQLAlchemy
        fcntl.flock(lock, fcntl.LOCK_EX)
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
