"""Shared by tests of several folders: an HTTP server whose answers a function gives, small databases, programs."""

import contextlib
import importlib.util
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.core import frames
from pipelines.core.types import Database
from pipelines.sql.engine import Limits, SqlEngine

# Overrides of a recipe that trains and evaluates in seconds, and learns nothing.
QUICK_TRAINING = (
    "stages=[data, synthesize, filter, gold_schema, sft, evaluate]",
    "model.tiny={width: 16, layers: 1, heads: 1, ffn: 16, vocabulary: 300, context: 1024}",
    "sft={epochs: 1, batch: 64, micro_batch: 64}",
    "evaluation={samples: 0, ks: [1], forced_single_turn: false, sampling: {turn_tokens: 4, episode_tokens: 960}}",
    "protocol.max_turns_eval=1",
    "rollout.processes=1",
    "hardware.processes=1",
)


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]  # by lower-case name
    data: bytes
    at: float = field(default_factory=time.monotonic)

    @property
    def json(self) -> Any:
        return json.loads(self.data or b"{}")


class HttpServer(ThreadingHTTPServer):
    """It keeps every request, and counts how many it answers at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Any) -> None:
        self.answer = answer  # may be replaced while it serves
        self.asked: list[Asked] = []
        self.most = 0  # requests answered at once
        self._now = 0
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer_to(self, asked: Asked) -> Any:
        with self._lock:
            self.asked.append(asked)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self.answer(asked) if callable(self.answer) else self.answer
        finally:
            with self._lock:
                self._now -= 1


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): text for name, text in self.headers.items()}
        answer = self.server.answer_to(Asked(self.command, self.path, headers, data))
        if answer is None:
            return
        status, headers, value = (
            answer if isinstance(answer, tuple) else (answer, {}, b"") if isinstance(answer, int) else (200, {}, answer)
        )
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_DELETE = do_POST

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def http_server(answer: Any | Callable[[Asked], Any] = 200) -> Iterator[HttpServer]:
    """Serve until the block ends.

    Args:
        answer: a status, or bytes or JSON with status 200, or (status, headers, bytes or JSON), or a function of the
            request that gives one. None closes the connection without an answer; a delay is a sleep in the function.
    """
    with HttpServer(answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def asgi_server(app: Any) -> Iterator[str]:
    """The address of an application that is served until the block ends."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def build_database(place: Path | str, *statements: str) -> Database:
    """Run statements, or scripts of them, on a file of DuckDB if it ends with .duckdb, else of SQLite."""
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".duckdb":
        import duckdb

        with duckdb.connect(str(path)) as lake:
            lake.execute(";".join(statements))
        return Database(path.stem, "duckdb", str(path))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(";".join(statements))
    return Database(path.stem, "sqlite", str(path))


def engine_fixture(scope: Any = "function", workers: int = 1, **limits: Any) -> Any:
    """A fixture that is an engine of its own for each test, file or session."""

    @pytest.fixture(scope=scope)
    def engine() -> Iterator[SqlEngine]:
        with SqlEngine(Limits(**limits), workers) as made:
            yield made

    return engine


def load_script(path: Path) -> Any:
    """A program that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as Python does for a program: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def succeeded(done: "subprocess.CompletedProcess[str]") -> "subprocess.CompletedProcess[str]":
    """What a command left, which must have ended with exit code 0."""
    assert done.returncode == 0, (done.stdout or "") + (done.stderr or "")
    return done


def kept_text(path: Path) -> str:
    """All of a file of a store as one text."""
    if path.suffix == ".parquet":
        return json.dumps(frames.read(path).to_dicts(), default=str)
    return path.read_bytes().decode("utf-8", "replace")
