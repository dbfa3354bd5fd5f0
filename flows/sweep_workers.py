"""The cells of a sweep as flow runs that the workers of a Prefect server share; the store holds what they made."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from flows.sweep_plan import Cell
from pipelines.core.errors import BoundaryError, RecipeError
from pipelines.core.store import Store
from pipelines.recipe.recipes import recipe_names

DEPLOYMENT = "retrain/miniature"  # the whole chain; it takes any recipe, and overrides as a form does
POLL_S = 2.0


def ask(cells: Sequence[Cell], store: Store, say: Callable[[str], None]) -> Callable[[Cell], object]:
    """Ask for a flow run of every cell at once. What two cells share is made by one, for which the other waits.

    Returns what waits for one cell's run, and raises BoundaryError when that did not complete.
    """
    from prefect.exceptions import ObjectNotFound

    from tasks.prefect_server import patiently

    runs: dict[str, Any] = {}

    for cell in cells:
        if cell.source not in recipe_names():
            raise RecipeError(
                f"workers run the recipes of conf/recipes, and {cell.source} is not one of them",
                "Put the file there on every worker's machine, or leave --engine workers out.",
            )

    def submit(cell: Cell) -> None:
        if cell.key in runs:
            return
        try:
            runs[cell.key] = patiently(functools.partial(_submit, cell, store), f"the start of {cell.name}", say)
        except ObjectNotFound:
            hint = "Deploy it, and start a worker: infra/README.md."
            raise BoundaryError(f"the Prefect server has no deployment {DEPLOYMENT}", hint) from None
        say(f"{cell.name}: flow run {runs[cell.key]}")

    def wait(cell: Cell) -> None:
        submit(cell)  # unless it was: a checkpoint that is asked once more must be there first
        _wait(cell.name, runs[cell.key], say)

    for cell in cells:
        submit(cell)
    return wait


def _submit(cell: Cell, store: Store) -> Any:
    """Ask for a cell's flow run; its id."""
    from prefect.deployments import run_deployment

    form = {"recipe": cell.source, "overrides": list(cell.overrides), "store": str(store.root.resolve())}
    tags = ["sweep", cell.name]  # its name is made of the recipe's when it begins
    run: Any = run_deployment(DEPLOYMENT, parameters=form, timeout=0, as_subflow=False, tags=tags)
    return run.id


def _wait(name: str, run_id: Any, say: Callable[[str], None]) -> None:
    """Wait for the end of a cell's flow run."""
    from prefect.client.orchestration import get_client

    from tasks.prefect_server import patiently

    with get_client(sync_client=True) as client:
        while True:
            state = patiently(lambda: client.read_flow_run(run_id).state, name, say)
            if state is not None and state.is_final():
                break
            time.sleep(POLL_S)
    if not state.is_completed():
        raise BoundaryError(f"its flow run ended as {state.name}: {state.message}", f"See flow run {run_id}.")
