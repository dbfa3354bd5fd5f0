"""Assets, events and artifacts of a run in Prefect: stages with their lineage, and events that automations wait for.

An asset is a stage of a recipe, `sqltrain://RECIPE/STAGE`, whose materializations carry key and figures; a stage that
was there materializes nothing. Lineage goes from question files (`file://...`) over the stages to
`sqltrain://RECIPE/champion`. Events are `sqltrain.champion.promoted`, `sqltrain.champion.staged`,
`sqltrain.night.refused` and `sqltrain.run.failed`, about the resource `sqltrain.recipe.RECIPE`, and
`sqltrain.run.progress`, about the flow run.
"""

import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from pipelines.nightly.ledger import PROD
from pipelines.recipe.config import Recipe, Source
from pipelines.report import formats
from pipelines.report.console_text import stage_figures
from pipelines.stages.stage import StageResult, Step, seen_by
from tasks.contracts import markdown_cell
from tasks.models import ALIASES, HEADLINE

PROMOTED = "sqltrain.champion.promoted"
REFUSED = "sqltrain.night.refused"
FAILED = "sqltrain.run.failed"
STAGED = "sqltrain.champion.staged"  # promoted in staging: a person may promote it to prod
PROGRESS = "sqltrain.run.progress"
EVERY_S = 60.0  # seconds between two events of progress
BY = "sqltrain"
LONGEST = 1000  # characters of a reason in an event
_NOT_ALLOWED = re.compile(r"[^\w./-]+", re.ASCII)


def asset_key(recipe: str, name: str, role: str = "") -> str:
    """The address of a stage, or of the champion; with a role if one run makes several stages of a name."""
    path = "/".join(filter(None, (recipe, role, name)))
    return "sqltrain://" + _NOT_ALLOWED.sub("-", path)


def upstream_assets(step: Step, recipe: Recipe, role: str) -> list[str | Asset]:
    """The addresses of a stage's inputs: other stages, or the files of its questions."""
    sources: tuple[Source, ...] = ()
    if step.kind == "data":
        sources = (recipe.data.sft, *recipe.data.rl, recipe.data.dev)
    elif step.kind == "test":
        sources = tuple(recipe.data.test)
    assets: list[str | Asset] = [asset_key(recipe.name, name, role) for name in step.needs]
    for source in sources:
        if not source.path:
            continue
        path = Path(str(source.path)).expanduser().resolve()
        address = "file://" + _NOT_ALLOWED.sub("-", str(path))
        if address not in assets:
            assets.append(address)
    return assets


def add_asset_metadata(figures: Mapping[str, Any]) -> None:
    """Put figures on the asset that the task at work materializes."""
    context = AssetContext.get()
    if context is None:
        return
    for asset in context.downstream_assets:
        asset.add_metadata(dict(figures))


@materialize(asset_key("recipe", "champion"), by=BY, cache_policy=NO_CACHE, persist_result=False)
def publish_champion_asset(line: Mapping[str, Any]) -> None:
    """The champion of a ledger's line as an asset; its figures are those that the night decided on."""
    add_asset_metadata({**line["challenger"], **line["numbers"]})


def publish_champion(recipe: str, store: Store, line: Mapping[str, Any]) -> None:
    """Publish a new champion of the line's tier: servers of the recipe may load it now."""
    tier = line.get("tier", PROD)
    stage = line["challenger"]["stage"]
    key = line["challenger"]["key"]
    alias = ALIASES[tier]
    champion = asset_key(recipe, alias)
    deps: list[str | Asset] = [asset_key(recipe, stage), asset_key(recipe, f"evaluate_{stage}")]
    publish_asset = publish_champion_asset.with_options(name=alias, assets=[champion], asset_deps=deps)
    publish_asset(line)
    model = str(store.folder(stage, key) / "model")
    event = PROMOTED if tier == PROD else STAGED
    emit(event, recipe, {"stage": stage, "key": key, "model": model, "reason": line["reason"]})


def emit(event: str, recipe: str, payload: Mapping[str, str]) -> None:
    """Emit an event about a recipe; a server that is away costs the event and nothing else."""
    about = {"prefect.resource.id": f"sqltrain.recipe.{recipe}", "prefect.resource.name": recipe}
    texts = {name: text[:LONGEST] for name, text in payload.items()}
    emit_event(event, about, payload={"recipe": recipe, **texts})


def emit_first_state() -> None:
    """Emit the event of this flow run's first state, which Prefect's scheduler does not send.

    Automations hold back each event of a run until they have seen the one before it, for a quarter of an hour. An event
    that is there already is left as it is: its id is that of the state.
    """
    run = runtime.flow_run.id
    if run is None:
        return
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(UUID(run))
        first = min(states, key=lambda state: state.timestamp)
        about = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        emit_event(f"prefect.flow-run.{first.name}", about, occurred=first.timestamp, id=first.id)
        EventsWorker.drain_all(timeout=10)  # this process may end with the pull step
    except Exception as error:
        logging.getLogger("prefect.flow_runs").debug("the event of the first state was not sent: %s", error)


@dataclass
class Pulse:
    """Progress events of the flow run at work; a run without one for long is stuck."""

    run: str | None = field(default_factory=lambda: runtime.flow_run.id)
    emitted: float = float("-inf")

    def beat(self) -> None:
        """Emit the event of progress, at most once in `EVERY_S`."""
        if self.run is not None and time.monotonic() - self.emitted >= EVERY_S:
            self.emitted = time.monotonic()
            emit_event(PROGRESS, {"prefect.resource.id": f"prefect.flow-run.{self.run}"})


# Tables and texts about a run, published as Prefect's artifacts.


def stage_rows(steps: Sequence[Step], done: Mapping[str, StageResult]) -> list[dict[str, Any]]:
    """One row a stage: its key, its state, its figures and its folder."""
    rows = []
    for step in steps:
        result = done.get(step.name)
        state = "not made"
        figures = ""
        if result is not None:
            state = "cached" if result.cached else "made"
            figures = stage_figures(step.name, result.metrics, ", ")
        row = {
            "stage": step.name,
            "state": state,
            "key": step.key,
            "figures": figures,
            "why": step.why,
            "folder": str(step.folder),
        }
        rows.append(row)
    return rows


def accuracy_markdown(results: Iterable[StageResult], recipe: Recipe) -> str:
    """The headline figures of every evaluation as one table; "" without an evaluation.

    Figures and their intervals are in percent.
    """
    heads = ("checkpoint", "benchmark", "questions", *HEADLINE)
    rows = []
    for result in results:
        if not result.kind.startswith("evaluate_"):
            continue
        checkpoint = result.kind.removeprefix("evaluate_")
        benchmark = seen_by(result.name, recipe).benchmark.name
        n_questions = result.metrics.get("n_questions", 0)
        cells = [checkpoint, markdown_cell(benchmark), f"{n_questions:,.0f}"]
        cells += [_figure_in_percent(result.metrics, name) for name in HEADLINE]
        rows.append(formats.markdown_row(cells))
    if not rows:
        return ""
    rule = "|---" * len(heads) + "|"
    return "\n".join([formats.markdown_row(heads), rule, *rows])


def _figure_in_percent(metrics: Mapping[str, float], name: str) -> str:
    """A figure with its interval, if it has one; "" for one that was not measured."""
    if name not in metrics:
        return ""
    text = f"{100 * metrics[name]:.1f}"
    bounds = []
    for bound in (f"{name}_low", f"{name}_high"):
        if bound in metrics:
            bounds.append(f"{100 * metrics[bound]:.1f}")
    if bounds:
        listed = ", ".join(bounds)
        text += f" [{listed}]"
    return text


def report_markdown(page: Path, run: str, benchmark: str) -> str:
    """The addresses of a report: on MLflow's page of the run, and as a file of the worker's machine.

    Args:
        run: the address of the run's page; "" if there is none.
        benchmark: its name, unless it is the first; MLflow keeps the report in a folder of that name.
    """
    if not run:
        return f"The file on the machine of the worker:\n\n    {page}\n"
    folder = "artifacts"
    if benchmark:
        folder += f"/{benchmark}"
    link = f"[Open it in MLflow]({run}/{folder}/report.html)"
    return f"{link}, or the file on the worker's machine:\n\n    {page}\n"


def night_markdown(line: Mapping[str, Any]) -> str:
    """A ledger's line, a night's decision with its numbers, as markdown."""
    decision = line["decision"].upper()
    reason = markdown_cell(line["reason"])
    lines = [f"**{decision}**: {reason}", ""]
    lines.append(f"- {line.get('rows', 0)} new questions in {len(line['new'])} batches")
    for role in ("challenger", "champion"):
        checkpoint = line.get(role)
        if checkpoint:
            lines.append(f"- {role} `{checkpoint['stage']}/{checkpoint['key']}`")
    numbers = line.get("numbers", {})
    if numbers:
        lines += ["", "| number | value |", "|---|---|"]
        for name, value in numbers.items():
            lines.append(f"| {markdown_cell(name)} | {value:.4g} |")
    return "\n".join(lines)
