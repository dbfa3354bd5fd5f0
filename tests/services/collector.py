"""A collector of OpenTelemetry spans: an HTTP server that keeps what exporters send to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.in_threads import serving


class Collector:
    """What was sent: spans of OpenTelemetry's own protocol, in the order in which they came."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1/traces"

    def take(self, request: Any) -> None:
        for sent in request.resource_spans:
            self.services.add(attributes(sent.resource)["service.name"])
            self.spans += [span for scope in sent.scope_spans for span in scope.spans]

    def named(self, name: str) -> Any:
        """The one span of that name."""
        (span,) = (each for each in self.spans if each.name == name)
        return span


def attributes(owner: Any) -> dict[str, Any]:
    """The attributes of a span or of a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with serving(collector.server):
        yield collector
