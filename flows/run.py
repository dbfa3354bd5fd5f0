"""The plain run: the stage graph walked in this process, with tracking, and with no server."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from pipelines.config import Recipe
from pipelines.housekeeping import claimed
from pipelines.stages import graph, ready
from pipelines.stages.context import Progress
from pipelines.store import Store

Done = Callable[[graph.StageResult, float], None]


def run(recipe: Recipe, store: Store, progress: Progress, until: str | None, done: Done) -> list[graph.StageResult]:
    """Make every stage that the store lacks, in order.

    Args:
        done: called after each stage with its wall-clock seconds.

    Raises:
        UserError: something the user can mend.
        BoundaryError: a database, an endpoint or the training child failed for good; what is finished is kept.
    """
    return walk(recipe, store, graph.plan(recipe, store, until), progress, done)


def walk(
    recipe: Recipe, store: Store, steps: Sequence[graph.Step], progress: Progress, done: Done
) -> list[graph.StageResult]:
    """Make those of some steps that the store lacks, in order; raises what `run` does."""
    if all(step.cached for step in steps):  # nothing to make is nothing to track, but a breach stays one
        return [_timed(done, functools.partial(_found, step, steps, recipe, store, progress)) for step in steps]
    ready.check(recipe, steps)
    from tasks.step import run_step
    from tasks.tracking import Tracker

    names = [(step.name, step.key) for step in steps]
    with claimed(store, names, {"recipe": recipe.name}), Tracker(recipe, store, progress.say) as tracker:
        return [
            _timed(done, functools.partial(run_step, step, steps, recipe, store, progress, tracker)) for step in steps
        ]


def _found(
    step: graph.Step, steps: Sequence[graph.Step], recipe: Recipe, store: Store, progress: Progress
) -> graph.StageResult:
    from tasks import contracts

    result = graph.execute(step, recipe, store, progress, steps)
    contracts.check(result, recipe)
    return result


def _timed(done: Done, make: Callable[[], graph.StageResult]) -> graph.StageResult:
    begun = time.perf_counter()
    result = make()
    done(result, time.perf_counter() - begun)
    return result
