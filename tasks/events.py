"""What a run tells Prefect's event stream: stages as assets with their lineage, and events that automations wait for.

An asset is a stage of a recipe, `sqltrain://RECIPE/STAGE`, whose materializations carry key and figures; a stage that
was there materializes nothing. Lineage goes from question files (`file://...`) over the stages to
`sqltrain://RECIPE/champion`. Events are `sqltrain.champion.promoted`, `sqltrain.night.refused` and
`sqltrain.run.failed`, about the resource `sqltrain.recipe.RECIPE`, and `sqltrain.run.progress`, about the flow run.
"""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.assets import Asset, materialize
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import AssetContext
from prefect.events import emit_event
from prefect.events.worker import EventsWorker

from pipelines.core.store import Store
from pipelines.recipe.config import Recipe, Source
from pipelines.stages.graph import StageResult, Step

PROMOTED, REFUSED, FAILED = "sqltrain.champion.promoted", "sqltrain.night.refused", "sqltrain.run.failed"
PROGRESS = "sqltrain.run.progress"
EVERY_S = 60.0  # seconds between two events of progress
BY = "sqltrain"
LONGEST = 1000  # characters of a reason in an event
_NOT_ALLOWED = re.compile(r"[^\w./-]+", re.ASCII)


def asset_key(recipe: str, name: str, role: str = "") -> str:
    """The address of a stage, or of the champion.

    Args:
        role: what the stage is made for, where one run makes several of a name.
    """
    path = "/".join(part for part in (recipe, role, name) if part)
    return f"sqltrain://{_NOT_ALLOWED.sub('-', path)}"


def upstream(step: Step, recipe: Recipe, role: str) -> list[str | Asset]:
    """The addresses of what a stage is made of: other stages, or the files of its questions."""
    sources = {"data": (recipe.data.sft, *recipe.data.rl, recipe.data.dev), "test": tuple(recipe.data.test)}
    files = [_file(source) for source in sources.get(step.kind, ()) if source.path]
    return [*(asset_key(recipe.name, name, role) for name in step.needs), *dict.fromkeys(files)]


def _file(source: Source) -> str:
    path = Path(str(source.path)).expanduser().resolve()
    return f"file://{_NOT_ALLOWED.sub('-', str(path))}"


def describe(result: StageResult) -> None:
    """Put a stage's key and figures on the asset that the task at work materializes."""
    context = AssetContext.get()
    for asset in context.downstream_assets if context is not None else ():
        asset.add_metadata({"stage": result.name, "key": result.key, **result.metrics})


@materialize(asset_key("recipe", "champion"), by=BY, cache_policy=NO_CACHE, persist_result=False)
def crown(line: Mapping[str, Any]) -> None:
    """The champion as an asset; its figures are those that the night decided on.

    Args:
        line: of the ledger.
    """
    context = AssetContext.get()
    for asset in context.downstream_assets if context is not None else ():
        asset.add_metadata({**line["challenger"], **line["numbers"]})


def promoted(recipe: str, store: Store, line: Mapping[str, Any]) -> None:
    """Tell that a recipe has a new champion: what serves it may load it now."""
    stage, key = line["challenger"]["stage"], line["challenger"]["key"]
    deps: list[str | Asset] = [asset_key(recipe, name) for name in (stage, f"evaluate_{stage}")]
    crown.with_options(name="champion", assets=[asset_key(recipe, "champion")], asset_deps=deps)(line)
    model = str(store.folder(stage, key) / "model")
    _tell(PROMOTED, recipe, {"stage": stage, "key": key, "model": model, "reason": line["reason"]})


def refused(recipe: str, reason: str) -> None:
    """Tell that a night's questions were refused."""
    _tell(REFUSED, recipe, {"reason": reason})


def failed(recipe: str, error: Exception) -> None:
    """Tell that a run failed, in the words that its user sees."""
    _tell(FAILED, recipe, {"reason": str(error), "kind": type(error).__name__})


def _tell(event: str, recipe: str, payload: Mapping[str, str]) -> None:
    """Prefect's worker thread sends it; a server that is away costs the event and nothing else."""
    about = {"prefect.resource.id": f"sqltrain.recipe.{recipe}", "prefect.resource.name": recipe}
    emit_event(event, about, payload={"recipe": recipe, **{name: text[:LONGEST] for name, text in payload.items()}})


def scheduled() -> None:
    """Emit the event of this flow run's first state, which Prefect's scheduler does not send.

    Automations hold back each event of a run until they have seen the one before it, for a quarter of an hour. An event
    that is there already is left as it is: its id is that of the state.
    """
    run = runtime.flow_run.id
    if run is None:
        return
    try:
        with get_client(sync_client=True) as client:
            first = min(client.read_flow_run_states(UUID(run)), key=lambda state: state.timestamp)
        about = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        emit_event(f"prefect.flow-run.{first.name}", about, occurred=first.timestamp, id=first.id)
        EventsWorker.drain_all(timeout=10)  # this process may end with the pull step
    except Exception as error:
        logging.getLogger("prefect.flow_runs").debug("the event of the first state was not sent: %s", error)


class Pulse:
    """Tells the event stream, now and then, that the flow run at work gets on; who is silent for long is stuck."""

    def __init__(self) -> None:
        self._run, self._told = runtime.flow_run.id, float("-inf")

    def beat(self) -> None:
        """Something was done; told at most once in `EVERY_S`."""
        if self._run is not None and time.monotonic() - self._told >= EVERY_S:
            self._told = time.monotonic()
            emit_event(PROGRESS, {"prefect.resource.id": f"prefect.flow-run.{self._run}"})
