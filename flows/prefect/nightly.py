"""Nightly retraining as a Prefect flow; `sqltrain nightly` is the same without a server."""

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed

from flows.prefect.forms import UNCHANGED, CommonOverrides
from flows.prefect.pipeline import Overrides, RecipeName, open_form, tracked, walk, walk_on_gpu
from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.nightly import inbox as inboxes
from pipelines.nightly import night
from pipelines.nightly.ledger import Ledger, NightInProgress
from pipelines.nightly.night import NightContext, night_title, run_night
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import split_store
from pipelines.stages.stage import StageResult, Step
from tasks import contracts, events
from tasks.events import night_markdown
from tasks.models import announce_champion, announce_if_stale
from tasks.prefect_stage import show
from tasks.run import Tracker


@flow(name="retrain", flow_run_name="night of {recipe}", persist_result=False)
def retrain(
    recipe: RecipeName = "miniature",
    common: CommonOverrides = UNCHANGED,
    overrides: Overrides = (),
    store: str = "",
    inbox: str = "",
    gpu_pool: bool = False,
    since: date | None = None,
) -> State[Any]:
    """A night: new questions are curated, a challenger is trained, and takes the champion's place only if better.

    Args:
        recipe: A file of conf/recipes; its section `nightly` says how.
        common: The settings that most runs change; an empty field stays as the recipe says.
        overrides: Any other change, one an item, such as nightly.start=base; they win over the fields above.
        store: Folder of datasets and checkpoints; left empty, the worker's SQLTRAIN_STORE, else its ./store.
        inbox: Folder of JSONL files with new questions; left empty, the recipe's. An override nightly.inbox wins.
        gpu_pool: Training and evaluation run as make/gpu; all workers must see the same store.
        since: Replay: a night for each day from this one on of which the inbox has files with new questions.
    """
    inbox_override = [f"nightly.inbox={inbox}"] if inbox else []
    further_overrides = (*inbox_override, *overrides)
    changes = common.overrides(further_overrides)
    recipe_changes, _ = split_store(changes)
    loaded, opened = open_form(recipe, changes, store)
    common.check(loaded)
    warn = get_run_logger().warning
    announce_if_stale(loaded.name, opened, warn)
    step_by_step = walk_on_gpu if gpu_pool else walk
    ledger = Ledger(opened, loaded.name)
    n_lines_before = len(ledger.lines())
    days: Sequence[date | None] = [None]
    if since is not None:
        days = inboxes.delivery_days(loaded.nightly, since)
    for day in days:
        with tracked(loaded, opened, night_title(loaded, opened)) as tracker:
            make = _bound_walk(step_by_step, tracker)
            context = NightContext(recipe, recipe_changes, loaded, opened, make, contracts.check)
            try:
                line = run_night(context, day)
            except NightInProgress as error:  # a lock, which dies with its holder, lets one night run at a time
                return Cancelled(message=str(error))
            except DataError as error:
                new_lines = ledger.lines()[n_lines_before:]
                if any(line.get("decision") == "refused" for line in new_lines):
                    events.emit(events.REFUSED, loaded.name, {"reason": str(error)})
                raise
            tracker.note_decision(line)
        show(create_markdown_artifact, night_markdown(line), key="decision", description=line["reason"])
        announce_champion(loaded.name, opened, warn)
        if line["decision"] == "promoted":
            show(events.publish_champion, loaded.name, opened, line)
    return Completed(name=line["decision"].capitalize(), message=line["reason"])


def _bound_walk(step_by_step: Callable[..., list[StageResult]], tracker: Tracker) -> night.Walk:
    """A walk of stages in one tracked run."""

    def make(recipe: Recipe, store: Store, steps: Sequence[Step], role: str) -> list[StageResult]:
        return step_by_step(recipe, store, steps, tracker, role)

    return make


@flow(name="promote", flow_run_name="promote {recipe}", persist_result=False)
def promote(recipe: RecipeName = "miniature", store: str = "") -> State[Any]:
    """Make the champion of staging that of prod too; `sqltrain champion promote` is the same without a server.

    Args:
        recipe: A file of conf/recipes, whose nights say nightly.tier=staging.
        store: Folder of datasets and checkpoints; left empty, the worker's SQLTRAIN_STORE, else its ./store.
    """
    loaded, opened = open_form(recipe, (), store)
    line = Ledger(opened, loaded.name).promote()
    warn = get_run_logger().warning
    announce_champion(loaded.name, opened, warn)
    show(events.publish_champion, loaded.name, opened, line)
    challenger = line["challenger"]
    return Completed(name="Promoted", message=f"{challenger['stage']}/{challenger['key']}")
