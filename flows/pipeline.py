"""The stage graph as Prefect flows: one task a stage, a form in the UI, and the same store as the plain run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from prefect import flow, runtime
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import Field

from pipelines import recipes
from pipelines.config import Recipe
from pipelines.errors import RecipeError
from pipelines.stages import graph
from pipelines.store import Store
from tasks.server import prefect_server
from tasks.stage import Walk, run_stage
from tasks.summary import accuracy_markdown, stage_rows
from tasks.tracking import Tracker

NAMES = recipes.recipe_names()
RecipeName = Annotated[str, Field(description="A recipe of conf/recipes.", json_schema_extra={"enum": [*NAMES]})]
Overrides = Annotated[
    tuple[str, ...], Field(description="Changes to the recipe, one an item: grpo.steps=50, variant=NAME, seed=1.")
]
StoreFolder = Annotated[
    Path, Field(description="Where datasets and checkpoints are kept; all workers of a run must see it.")
]
DEFAULT, HERE = "miniature", Path("store")


def walk(recipe: Recipe, store: Store, until: str | None) -> list[graph.StageResult]:
    """Walk the stage graph inside a flow run, one task a stage, and publish what people want to see.

    Raises:
        UserError: something the user can mend.
        BoundaryError: a database, an endpoint or the training child failed for good; what is finished is kept.
    """
    steps = graph.plan(recipe, store, until)
    done: dict[str, graph.StageResult] = {}
    tags = {"flow_run": str(runtime.flow_run.id), "flow_run_name": str(runtime.flow_run.name)}
    try:
        with Tracker(recipe, store, get_run_logger().warning, tags) as tracker:
            shared = Walk(steps, recipe, store, tracker)
            for step in steps:
                task = run_stage.with_options(name=step.name, task_run_name=step.name)
                done[step.name] = task(step, shared, [done[name] for name in step.needs])
    finally:
        _publish(steps, done)
    return list(done.values())


def _publish(steps: list[graph.Step], done: dict[str, graph.StageResult]) -> None:
    create_table_artifact(stage_rows(steps, done), key="stages", description="Stages of this run")
    accuracy = accuracy_markdown(done.values())
    if accuracy:
        create_markdown_artifact(accuracy, key="execution-accuracy", description="Held-out execution accuracy")
    if "report" in done:
        page = done["report"].folder / "report.html"
        create_link_artifact(page.as_uri(), key="report", link_text=str(page), description="The report")


def _deployed(recipe: str, overrides: tuple[str, ...], store: Path, last: tuple[str, ...]) -> list[graph.StageResult]:
    """Up to the latest of the stages `last` that the recipe has; () is the whole graph."""
    loaded = recipes.load(recipe, overrides)
    names = [stage.name for stage in graph.active(loaded) if stage.name in last]
    if last and not names:
        raise RecipeError(f"recipe {recipe} has none of the stages {', '.join(last)}")
    return walk(loaded, Store(store), names[-1] if names else None)


@flow(name="synthesize", flow_run_name="synthesize {recipe}", persist_result=False)
def synthesize(
    recipe: RecipeName = DEFAULT, overrides: Overrides = (), store: StoreFolder = HERE
) -> list[graph.StageResult]:
    """Read and check the questions and let the teacher write trajectories."""
    return _deployed(recipe, overrides, store, ("data", "synthesize"))


@flow(name="curate", flow_run_name="curate {recipe}", persist_result=False)
def curate(
    recipe: RecipeName = DEFAULT, overrides: Overrides = (), store: StoreFolder = HERE
) -> list[graph.StageResult]:
    """Keep the trajectories that are right, and agree on gold schemas."""
    return _deployed(recipe, overrides, store, ("filter", "gold_schema"))


@flow(name="train", flow_run_name="train {recipe}", persist_result=False)
def train(
    recipe: RecipeName = DEFAULT, overrides: Overrides = (), store: StoreFolder = HERE
) -> list[graph.StageResult]:
    """SFT, difficulty scoring and GRPO, with whatever must be made before them."""
    return _deployed(recipe, overrides, store, ("model", "sft", "difficulty", "grpo"))


@flow(name="evaluate", flow_run_name="evaluate {recipe}", persist_result=False)
def evaluate(
    recipe: RecipeName = DEFAULT, overrides: Overrides = (), store: StoreFolder = HERE
) -> list[graph.StageResult]:
    """Held-out execution accuracy of every checkpoint, with whatever must be made before it."""
    return _deployed(recipe, overrides, store, ("evaluate_model", "evaluate_sft", "evaluate_grpo"))


@flow(name="retrain", flow_run_name="retrain {recipe}", persist_result=False)
def retrain(
    recipe: RecipeName = DEFAULT, overrides: Overrides = (), store: StoreFolder = HERE
) -> list[graph.StageResult]:
    """The whole chain, from questions to the report; what the store has is not made again."""
    return _deployed(recipe, overrides, store, ())


@flow(name="run", flow_run_name="{name}", persist_result=False)
def resolved(name: str, recipe: Recipe, store: Path, until: str | None = None) -> list[graph.StageResult]:
    """A recipe that the command line has resolved already: `sqltrain run NAME --engine prefect`."""
    return walk(recipe, Store(store), until)


def run_with_prefect(recipe: Recipe, store: Store, until: str | None = None) -> list[graph.StageResult]:
    """Run a recipe as a flow on the server that the user named, else on one that lives as long as the run.

    Raises:
        UserError, BoundaryError: as the plain run does.
    """
    with prefect_server() as url, temporary_settings({PREFECT_API_URL: url}):
        return resolved(f"{recipe.name} seed {recipe.seed}", recipe, store.root, until)
