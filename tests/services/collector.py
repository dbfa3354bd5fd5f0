"""A collector of OpenTelemetry spans: an HTTP server that keeps what exporters send to it."""

from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fakes import http_server


class Collector:
    def __init__(self):
        self.spans = []
        self.services = set()
        self.url = ""

    def take(self, asked):
        for sent in ExportTraceServiceRequest.FromString(asked.data).resource_spans:
            self.services.add(attributes(sent.resource)["service.name"])
            self.spans += [span for scope in sent.scope_spans for span in scope.spans]
        return 200

    def named(self, name):
        (span,) = (each for each in self.spans if each.name == name)
        return span


def attributes(owner):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in owner.attributes}


@contextmanager
def collecting():
    collector = Collector()
    with http_server(collector.take) as server:
        collector.url = f"{server.url}/v1/traces"
        yield collector
