"""A real HTTP server on this machine whose answers are a plain function of the request's body."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = tuple[int, dict[str, str], Any]  # status, headers, JSON


class Server(ThreadingHTTPServer):
    """Keeps every body that it was asked; counts how many requests it answers at once.

    Attributes:
        answer: gives the answer to a body; {} for a GET.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.models: Answer | None = None  # for a GET, in place of `answer`: the list that a run asks for first
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._reply(self.server.models or self.server.answer({}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.headers.append({name.lower(): text for name, text in self.headers.items()})
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        answer = self.server.answer(body)
        with self.server.lock:
            self.server.now -= 1
        self._reply(answer)

    def _reply(self, answer: Answer) -> None:
        status, headers, value = answer
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[dict[str, Any]], Answer]) -> Server:
        server = Server(answer)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
