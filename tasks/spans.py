"""OpenTelemetry spans of runs and of their stages, sent to the collector that the environment names; none without one.

`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` is the switch. Prefect makes spans of flow runs
and task runs itself as soon as its process sends spans; ours lie inside of them. Traces of episodes stay in MLflow.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from pipelines.stages.graph import StageResult, Step

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from tasks.run import Tracker

SWITCHES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NAME = "sqltrain"
Facts = Mapping[str, str | bool | float]


@functools.cache
def switch_on() -> Tracer | None:
    """What makes spans; None where the environment names no collector, or where the exporter is not installed.

    A process that sends spans already (`opentelemetry-instrument`) goes on to send them where it was told to.
    """
    if not any(os.environ.get(name) for name in SWITCHES):
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logging.getLogger(NAME).warning("no spans are sent: pip install 'sqltrain[traces]'")
        return None
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # one line a batch that is lost, not one a try
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        about = {"service.name": os.environ.get("OTEL_SERVICE_NAME", NAME)}
        provider = TracerProvider(resource=Resource.create(about))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer(NAME)


@contextlib.contextmanager
def run(tracker: Tracker) -> Iterator[None]:
    """A span around the stages of a run or of a night."""
    with _span(f"run {tracker.recipe.name}", {"run": tracker.name, "recipe": tracker.recipe.name, **tracker.tags}):
        yield


@contextlib.contextmanager
def stage(step: Step, tracker: Tracker, role: str) -> Iterator[Callable[[StageResult], None]]:
    """A span around the making of a stage; takes its result, for the figures.

    Args:
        role: what the stage is made for, where one run makes several of a name.
    """
    about = {"run": tracker.name, "recipe": tracker.recipe.name, "stage": step.name, "key": step.key, "why": step.why}
    with _span(f"stage {step.name}", {**about, **({"role": role} if role else {})}) as note:
        yield lambda result: note(
            {"cached": result.cached, **{f"metrics.{name}": x for name, x in result.metrics.items()}}
        )


@contextlib.contextmanager
def _span(name: str, about: Facts) -> Iterator[Callable[[Facts], None]]:
    """A span that holds what is made within it; an error ends it as failed."""
    tracer = switch_on()
    if tracer is None:
        yield lambda facts: None
        return
    with tracer.start_as_current_span(name, attributes=_own(about)) as span:
        yield lambda facts: span.set_attributes(_own(facts))


def _own(facts: Facts) -> dict[str, str | bool | float]:
    return {f"{NAME}.{key}": value for key, value in facts.items()}
