"""The Prefect task around one stage: its name in the UI, its retries, its progress; `tasks/run.py` makes the stage.

And what the UI shows of a walk through the stages, finished or not.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Completed
from prefect.utilities.annotations import quote

from pipelines.core.errors import BoundaryError, ResourceError, StoppedError
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages.stage import StageResult, Step, benchmark_of
from tasks import contracts, events
from tasks.contracts import contract_markdown
from tasks.prefect_server import retry_until_reachable
from tasks.run import Tracker, run_step

EVERY_S = 5.0
RETRY_DELAYS_S = [10.0, 60.0]
ON_DEVICE = ("sft", "difficulty", "grpo", "evaluate_")  # beginnings of the names of stages that compute with a model
LEASE_S = 60.0  # the shortest lease that Prefect takes; its default is 300


@dataclass(frozen=True)
class Walk:
    """The arguments that all tasks of one flow run share."""

    steps: Sequence[Step]
    recipe: Recipe
    store: Store
    tracker: Tracker
    role: str = ""


def artifact_key(*parts: str) -> str:
    """A name that Prefect takes: lower-case letters, digits and dashes."""
    text = "-".join(parts).lower()
    return re.sub(r"[^a-z0-9]", "-", text)


class TaskProgress:
    """A stage's progress as a Prefect progress artifact, sent every few seconds by a thread of its own.

    A stage may call this from inside an event loop, where Prefect's client could not be used. A stage that shows no
    progress (it was cached) makes no artifact.
    """

    def __init__(self, stage: str, every_s: float = EVERY_S) -> None:
        self.stage = stage
        self.every_s = every_s
        self.log = get_run_logger()
        self.say: Callable[[str], None] = functools.partial(self.log.info, "%s")
        self.warn: Callable[[str], None] = functools.partial(self.log.warning, "%s")
        self.artifact: UUID | None = None
        self._label = stage
        self._unit = ""
        self._note = ""
        self._done = 0
        self._total = 0
        self._pulse = events.Pulse()
        self._stop = threading.Event()
        run = contextvars.copy_context().run  # Prefect keeps the task run and its settings in context variables
        self._thread = threading.Thread(target=run, args=(self._watch,), name="progress", daemon=True)

    @contextlib.contextmanager
    def shown(self) -> Iterator[TaskProgress]:
        """The progress, sent until the block ends."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(timeout=30)

    def begin(self, stage: str, total: int, unit: str) -> None:
        self._label = stage
        self._unit = unit
        self._note = ""
        self._done = 0
        self._total = total
        self.log.info("%s: %d %s", stage, total, unit)

    def advance(self, count: int, note: str = "") -> None:
        self._done += count
        self._note = note or self._note

    def _watch(self) -> None:
        last_text = ""
        is_over = False
        while not is_over:
            is_over = self._stop.wait(self.every_s)
            text = f"{self._label}: {self._done}/{self._total} {self._unit} {self._note}".rstrip()
            if not self._total or text == last_text:
                continue
            last_text = text
            self._pulse.beat()
            share = min(100.0, 100.0 * self._done / self._total)
            try:
                if self.artifact is None:
                    created: Any = create_progress_artifact(share, artifact_key("progress", self.stage), text)
                    self.artifact = created
                else:
                    update_progress_artifact(self.artifact, share, text)
            except Exception as error:  # a server that is gone for a while must not stop training
                self.log.debug("progress not shown: %s", error)


def show(create: Callable[..., Any], *content: Any, **names: Any) -> None:
    """Publish an artifact; a server that is gone for a while must not cost a stage that is made."""
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 1}):  # a picture of the run: not worth minutes of it
            create(*content, **names)
    except Exception as error:
        get_run_logger().warning("not shown in the UI: %s", error)


def uses_device(step: Step, recipe: Recipe) -> bool:
    """Whether a stage that is still to be made computes with a model: also a teacher that is the policy itself."""
    if step.cached:
        return False
    if step.name == "synthesize":
        return any(teacher.kind == "policy" for teacher in recipe.synthesis.teachers)
    return step.name.startswith(ON_DEVICE)


@contextlib.contextmanager
def device_slot(step: Step, recipe: Recipe) -> Iterator[None]:
    """The concurrency limit that guards the device, held while a stage that uses it is made.

    The lease is short: the slot of a run that was killed is free again soon. A run that cannot renew it goes on.
    """
    slot = recipe.hardware.slot
    if slot is None or not uses_device(step, recipe):
        yield
        return
    # A lease that cannot be renewed while the server is away must not end the run that holds it.
    limit = functools.partial(
        concurrency, slot, lease_duration=LEASE_S, strict=True, raise_on_lease_renewal_failure=False
    )
    warn = get_run_logger().warning
    with contextlib.ExitStack() as stack:
        try:
            retry_until_reachable(lambda: stack.enter_context(limit()), f"the slot of {step.name}", warn)
        except ConcurrencySlotAcquisitionError as error:
            if error.__cause__ is not None:  # the server, not the limit: worth another try
                raise BoundaryError(f"no slot of the limit {slot!r}: {error.__cause__}") from None
            hint = f"Make it: prefect gcl create {slot} --limit 1"
            raise ResourceError(f"no slot of the limit {slot!r} to be had: {error}", hint) from None
        yield


def is_worth_another_try(task: Any, run: Any, state: Any) -> bool:
    """Only an error at a boundary is worth another try: finished shards and checkpoints stand, the stage resumes.

    A training that was asked to stop is not tried again: whoever asked wants the machine.
    """
    error = state.result(raise_on_failure=False)
    return isinstance(error, BoundaryError) and not isinstance(error, StoppedError)


@materialize(
    events.asset_key("recipe", "stage"),  # its own ones are given with its name
    by=events.BY,
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=len(RETRY_DELAYS_S),
    retry_delay_seconds=RETRY_DELAYS_S,
    retry_condition_fn=is_worth_another_try,
)
def run_stage(step: Step, walk: Walk, needs: Sequence[StageResult]) -> Any:
    """Make one stage, or find it made: its `StageResult`, a small reference and never data.

    A stage that is found made ends in the state `Cached`, so that the UI shows which ones a run made.

    Args:
        needs: results of the stages that it reads: they draw the graph in the UI.
    """
    log = get_run_logger()
    log.info("%s %s: %s", step.name, step.key, step.why)
    with device_slot(step, walk.recipe), TaskProgress(step.name).shown() as progress:
        started = time.perf_counter()
        try:
            result = run_step(step, walk.steps, walk.recipe, walk.store, progress, walk.tracker, walk.role)
        finally:
            verdict = contracts.read_verdict(step.folder / "contract.json")
            if verdict:
                show(create_markdown_artifact, contract_markdown(verdict), artifact_key("contract", step.name))
    events.add_asset_metadata({"stage": result.name, "key": result.key, **result.metrics})
    if result.cached:
        log.info("%s: cached, %s", step.name, result.folder)
        return Completed(name="Cached", data=result)
    seconds = time.perf_counter() - started
    log.info("%s: made in %.1f s, %s", step.name, seconds, result.folder)
    return result


def run_in_task(step: Step, walk: Walk, needs: list[StageResult]) -> StageResult:
    """Run a stage's task, under the stage's name and with its lineage."""
    recipe = walk.recipe
    task: Any = run_stage.with_options(
        name=step.name,
        task_run_name=f"{recipe.name}: {step.name} {step.key}",
        tags=[f"recipe:{recipe.name}", f"stage:{step.name}"],
        assets=[events.asset_key(recipe.name, step.name, walk.role)],
        asset_deps=events.upstream_assets(step, recipe, walk.role),
    )
    # quote() what is not a task result: Prefect matches results by id() and would add false edges to the lineage.
    state: Any = task(quote(step), quote(walk), needs)
    result: StageResult = state.result() if isinstance(state, State) else state  # a `Cached` one is a State
    return result


def publish(walk: Walk, done: Mapping[str, StageResult]) -> None:
    """Show the stages, the accuracy and the reports of a walk as artifacts."""
    rows = events.stage_rows(walk.steps, done)
    show(create_table_artifact, rows, key="stages", description="Stages of this run")
    accuracy = events.accuracy_markdown(done.values(), walk.recipe)
    if accuracy:
        title = "Held-out execution accuracy"
        show(create_markdown_artifact, accuracy, key="execution-accuracy", description=title)
    for result in done.values():
        if result.kind != "report":
            continue
        benchmark = benchmark_of(result.name)
        page = result.folder / "report.html"
        text = events.report_markdown(page, walk.tracker.page, benchmark)
        title = "The report"
        if benchmark:
            title += f" of {benchmark}"
        key = artifact_key(*result.name.split("."))
        show(create_markdown_artifact, text, key=key, description=title)
