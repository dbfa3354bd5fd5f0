"""One step of a run with all that surrounds it: made, held to its contract, tracked; both engines take it."""

from collections.abc import Sequence

from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.context import Progress
from tasks import contracts, spans
from tasks.run import Tracker


def run_step(
    step: graph.Step,
    steps: Sequence[graph.Step],
    recipe: Recipe,
    store: Store,
    progress: Progress,
    tracker: Tracker,
    role: str = "",
) -> graph.StageResult:
    """Make one step unless the store has it, and check and record what it made.

    Args:
        role: what it is made for, where one run makes several of a name.
    """
    with spans.stage(step, tracker, role) as note, tracker.stage(step, steps, recipe, role) as child:
        result = graph.execute(step, recipe, store, progress, steps)
        note(result)
        try:
            contracts.check(result, recipe)
        finally:
            child.record(result)
    return result
