"""A collector of OpenTelemetry spans: an HTTP server that keeps what exporters send to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes import Asked, http_server


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.url = ""

    def take(self, asked: Asked) -> int:
        for sent in ExportTraceServiceRequest.FromString(asked.data).resource_spans:
            self.services.add(attributes(sent.resource)["service.name"])
            self.spans += [span for scope in sent.scope_spans for span in scope.spans]
        return 200

    def named(self, name: str) -> Any:
        (span,) = (each for each in self.spans if each.name == name)
        return span


def attributes(owner: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with http_server(collector.take) as server:
        collector.url = f"{server.url}/v1/traces"
        yield collector
