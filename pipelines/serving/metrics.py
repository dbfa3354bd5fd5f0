"""The figures of a server since it started, in Prometheus' text format."""

from collections.abc import Iterator, Mapping

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # upper bounds of the histogram's buckets
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Counts of one server.

    Args:
        used: what endpoints have answered so far, by kind; it grows while the server runs.
    """

    def __init__(self, used: Mapping[str, float]) -> None:
        registry = CollectorRegistry()
        registry.register(_EndpointUse(used))
        self.registry = registry
        about_outcomes = "Ended questions by outcome: answer, error or left."
        about_refusals = "Refused requests by HTTP status."
        about_seconds = "Seconds of ended questions."
        self.running = Gauge("sqltrain_questions_running", "Questions that run now.", registry=registry)
        self._questions = Counter("sqltrain_questions", about_outcomes, ["outcome"], registry=registry)
        self._denied = Counter("sqltrain_denied", about_refusals, ["status"], registry=registry)
        self._seconds = Histogram("sqltrain_question_seconds", about_seconds, registry=registry, buckets=SECONDS)

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a question that has ended."""
        self._questions.labels(outcome).inc()
        self._seconds.observe(seconds)

    def denied(self, status: int) -> None:
        """Count a refused request."""
        self._denied.labels(str(status)).inc()

    def text(self) -> bytes:
        """All figures as they are scraped."""
        return prometheus_client.generate_latest(self.registry)


class _EndpointUse(Collector):
    """Answers, tokens and cost of endpoints, as the policies count them."""

    def __init__(self, used: Mapping[str, float]) -> None:
        self._used = used

    def collect(self) -> Iterator[CounterMetricFamily]:
        for kind, amount in sorted(self._used.items()):
            kind_in_words = kind.replace("_", " ").capitalize()
            about = f"{kind_in_words} of endpoints."
            yield CounterMetricFamily(f"sqltrain_endpoint_{kind}", about, value=amount)
