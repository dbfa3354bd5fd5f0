"""The plain run: the stage graph walked in this process, with tracking, and with no server."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pipelines.config import Recipe
from pipelines.stages import graph
from pipelines.stages.context import Progress
from pipelines.store import Store


def run(
    recipe: Recipe,
    store: Store,
    progress: Progress,
    until: str | None = None,
    done: Callable[[graph.StageResult, float], None] = lambda result, seconds: None,
) -> list[graph.StageResult]:
    """Make every stage that the store lacks, in order.

    Args:
        done: called after each stage with its wall-clock seconds.

    Raises:
        UserError: something the user can mend.
        BoundaryError: a database, an endpoint or the training child failed for good; what is finished is kept.
    """
    steps = graph.plan(recipe, store, until)
    if all(step.cached for step in steps):  # nothing to do is nothing to track
        return [_finish(step, recipe, store, progress, steps, done) for step in steps]
    from tasks import contracts
    from tasks.tracking import Tracker

    with Tracker(recipe, store, progress.say) as tracker:
        results = []
        for step in steps:
            begun = time.perf_counter()
            result = _finish(step, recipe, store, progress, steps, done)
            contracts.check(result, recipe)
            if not result.cached:
                tracker.log_stage(result, time.perf_counter() - begun)
            results.append(result)
        return results


def _finish(
    step: graph.Step,
    recipe: Recipe,
    store: Store,
    progress: Progress,
    steps: list[graph.Step],
    done: Callable[[graph.StageResult, float], None],
) -> graph.StageResult:
    begun = time.perf_counter()
    result = graph.execute(step, recipe, store, progress, steps)
    done(result, time.perf_counter() - begun)
    return result


def folder_of(results: list[graph.StageResult], stage: str) -> Path | None:
    """The folder of one stage among a run's results."""
    return next((result.folder for result in results if result.name == stage), None)
