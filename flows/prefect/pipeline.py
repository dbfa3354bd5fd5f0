"""The stage graph as Prefect flows: one task a stage, a form in the UI, and the same store as the plain run.

What a flow finds in the store is not made again: `train` goes on where `curate` ended.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from prefect import Flow, flow, runtime
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from pydantic import Field

from flows.prefect.forms import UNCHANGED, CommonOverrides, check_changes, check_form
from flows.prefect.remote import refused, run_elsewhere
from pipelines.core.claims import claimed
from pipelines.core.errors import DataError, RecipeError, ResourceError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import open_recipe, split_store
from pipelines.stages import graph, preflight
from pipelines.stages.stage import StageResult, Step
from tasks import events
from tasks.prefect_server import prefect_server, retry_until_reachable
from tasks.prefect_stage import Walk, publish, run_in_task, uses_device
from tasks.reaper import mark_dead_runs, run_lock
from tasks.run import Tracker, span_tracer

RecipeName = Annotated[str, Field(json_schema_extra={"enum": [*recipes.recipe_names()]})]
# The server holds a form to this before it makes a run.
Overrides = tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*=")], ...]

CURATION = ("filter", "gold_schema")

span_tracer()  # Prefect begins the span of a flow run when it has imported the flow


@contextlib.contextmanager
def tracked(recipe: Recipe, store: Store, name: str = "") -> Iterator[Tracker]:
    """The tracker, with a name for people, of this flow run and of all that it starts elsewhere: they share one parent
    run in MLflow. As long as it is open, this flow run has a lock in the store; those without are marked as crashed.
    """
    run_id = str(runtime.flow_run.id)
    warn = get_run_logger().warning
    tags = {"flow_run": run_id, "flow_run_name": str(runtime.flow_run.name)}
    mark_dead_runs(store, warn)

    def read_root_id() -> Any:
        """The flow run that this one was started by, directly or not; itself if it is the first."""
        return runtime.flow_run.root_flow_run_id

    try:
        root_id = retry_until_reachable(read_root_id, "the run", warn)
        root = str(root_id or run_id)
        with run_lock(store, run_id), Tracker(recipe, store, warn, name, tags, root) as tracker:
            yield tracker
    except Exception as error:
        reason = {"reason": str(error), "kind": type(error).__name__}
        events.emit(events.FAILED, recipe.name, reason)
        raise


def walk(recipe: Recipe, store: Store, steps: Sequence[Step], tracker: Tracker, role: str = "") -> list[StageResult]:
    """Walk steps of the stage graph inside a flow run, one task a stage, and publish what people want to see. `role` is
    what the stages are made for, where one run makes several of a name.
    """
    done: dict[str, StageResult] = {}
    preflight.check_run(recipe, steps)
    names = [(step.kind, step.key) for step in steps]
    shared = Walk(steps, recipe, store, tracker, role)
    claim_note = {"recipe": recipe.name, **tracker.tags}
    try:
        with claimed(store, names, claim_note):
            for step in steps:
                needed = [done[name] for name in step.needs]
                done[step.name] = run_in_task(step, shared, needed)
    finally:
        publish(shared, done)
    return list(done.values())


def _upto(recipe: Recipe, last: tuple[str, ...]) -> str | None:
    """The latest of the stages `last` that the recipe has; None, the whole graph, when `last` is ()."""
    if not last:
        return None
    names = [stage.name for stage in graph.active(recipe) if stage.name in last]
    if not names:
        listed = ", ".join(last)
        raise RecipeError(f"recipe {recipe.name} has none of the stages {listed}")
    return names[-1]


def open_form(recipe: str, overrides: Sequence[str], store: str) -> tuple[Recipe, Store]:
    """The recipe and the store that a form names."""
    recipe_overrides, _ = split_store(overrides)
    check_form(recipe, recipe_overrides)
    if store:
        overrides = [*overrides, f"store={store}"]
    return open_recipe(recipe, overrides)


def _deployable(name: str, about: str, last: tuple[str, ...]) -> Flow[..., list[StageResult]]:
    """A flow with a form, that goes up to the latest of the stages `last`."""

    @flow(name=name, description=about, flow_run_name=f"{name} {{recipe}}", persist_result=False)
    def deployed(
        recipe: RecipeName = "miniature",
        common: CommonOverrides = UNCHANGED,
        overrides: Overrides = (),
        store: str = "",
    ) -> list[StageResult]:
        """Run a recipe.

        Args:
            recipe: A file of conf/recipes.
            common: What most runs change; what is left empty stays as the recipe says.
            overrides: Any other change, one an item, such as grpo.clip_high=0.3; they win over the fields above.
            store: Folder of datasets and checkpoints; left empty, the worker's SQLTRAIN_STORE, else its ./store.
        """
        changes = common.overrides(overrides)
        loaded, opened = open_form(recipe, changes, store)
        common.check(loaded)
        with tracked(loaded, opened) as tracker:
            until = _upto(loaded, last)
            steps = graph.plan(loaded, opened, until)
            return walk(loaded, opened, steps, tracker)

    return deployed


synthesize = _deployable("synthesize", "The teacher writes trajectories for checked questions.", ("synthesize",))
curate = _deployable("curate", "Right trajectories are kept, gold schemas agreed on.", CURATION)
train = _deployable("train", "SFT, difficulty scoring and GRPO.", ("model", "sft", "difficulty", "grpo"))
evaluate = _deployable("evaluate", "Held-out accuracy of every checkpoint.", graph.EVALUATIONS)


@flow(name="retrain", flow_run_name="retrain {recipe}", persist_result=False)
def retrain(
    recipe: RecipeName = "miniature",
    common: CommonOverrides = UNCHANGED,
    overrides: Overrides = (),
    store: str = "",
    gpu_pool: bool = False,
) -> list[StageResult]:
    """The whole chain, from questions to the report.

    Args:
        recipe: A file of conf/recipes.
        common: What most runs change; what is left empty stays as the recipe says.
        overrides: Any other change, one an item, such as grpo.clip_high=0.3; they win over the fields above.
        store: Folder of datasets and checkpoints; left empty, the worker's SQLTRAIN_STORE, else its ./store.
        gpu_pool: Training and evaluation run as train/gpu and evaluate/gpu; all workers must see the same store.
    """
    changes = common.overrides(overrides)
    loaded, opened = open_form(recipe, changes, store)
    common.check(loaded)
    with tracked(loaded, opened) as tracker:
        if gpu_pool:
            until = _upto(loaded, CURATION)
            curation_steps = graph.plan(loaded, opened, until)
            walk(loaded, opened, curation_steps, tracker)
            tracker.begin()  # what runs elsewhere adds to this run
            parameters = {"recipe": recipe, "overrides": list(changes), "store": store}
            say = get_run_logger().info
            for deployment in ("train/gpu", "evaluate/gpu"):
                run_elsewhere(deployment, parameters, say)
        steps = graph.plan(loaded, opened)
        return walk(loaded, opened, steps, tracker)


@flow(name="make", flow_run_name="make {name}", persist_result=False)
def make(
    name: str, recipe: dict[str, Any], store: str, given: dict[str, str], stages: list[str], role: str = ""
) -> list[StageResult] | State[Any]:
    """Stages of a recipe that another flow has put together; deployed where the device is.

    Rows that break a contract end it as `Refused`: the flow that started it takes their batch back.

    Args:
        name: The recipe's name, for people.
        recipe: The resolved recipe.
        store: Folder of datasets and checkpoints, which all workers see under this path.
        given: Keys of finished stages to go on from, by name.
        stages: Names of the stages to walk, in order, those given among them; no other is planned.
        role: What they are made for: "champion", say.
    """
    shipped = Recipe(name=name)
    if name in recipes.recipe_names():
        shipped = recipes.load(name)
    check_changes(shipped.model_dump(mode="json"), recipe)
    opened = Store(Path(store))
    loaded = Recipe.model_validate(recipe)
    steps = graph.plan(loaded, opened, given=given, among=stages)
    try:
        with tracked(loaded, opened) as tracker:
            return walk(loaded, opened, steps, tracker, role)
    except DataError as error:
        return refused(error)


def walk_on_gpu(
    recipe: Recipe, store: Store, steps: Sequence[Step], tracker: Tracker, role: str = ""
) -> list[StageResult]:
    """As `walk`, but steps that use a device are made by a run of make/gpu, which is waited for.

    Raises:
        DataError: that run refused its data.
        ResourceError: that run has ended, and a stage of the walk is not in this store.
    """
    if not any(uses_device(step, recipe) for step in steps):
        return walk(recipe, store, steps, tracker, role)
    tracker.begin()  # what runs elsewhere adds to this run
    parameters = {
        "name": recipe.name,
        "recipe": recipe.model_dump(mode="json"),
        "store": str(store.root),
        "given": {step.name: step.key for step in steps if step.cached},
        "stages": [step.name for step in steps],
        "role": role,
    }
    run_elsewhere("make/gpu", parameters, get_run_logger().info)
    results = []
    for step in steps:
        if not store.has(step.kind, step.key):
            hint = "All workers must see the same store under this path, and run the same code."
            raise ResourceError(f"make/gpu ended without {step.kind}/{step.key} in {store.root}", hint)
        metrics = read_json(step.folder / "metrics.json")
        result = StageResult(step.name, step.key, step.folder, metrics, step.cached)
        results.append(result)
    return results


@flow(name="run", flow_run_name="{name}", persist_result=False)
def resolved(name: str, recipe: Recipe, store: Path, until: str | None = None) -> list[StageResult]:
    """A recipe that the command line has resolved already: `sqltrain run NAME --engine prefect`."""
    opened = Store(store)
    with tracked(recipe, opened) as tracker:
        steps = graph.plan(recipe, opened, until)
        return walk(recipe, opened, steps, tracker)


def run_with_prefect(recipe: Recipe, store: Store, until: str | None = None, name: str = "") -> list[StageResult]:
    """Run a recipe as a flow on the server that the user named, else on one that lives as long as the run. The flow run
    has this name, by default the recipe and its seed.
    """
    steps = graph.plan(recipe, store, until)
    preflight.check_run(recipe, steps)  # a mistake is told before a server is started
    flow_run_name = name or f"{recipe.name} seed {recipe.seed}"
    with prefect_server():
        return resolved(flow_run_name, recipe, store.root, until)
