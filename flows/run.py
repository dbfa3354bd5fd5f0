"""The plain run: the stage graph walked in this process, with tracking, and with no server."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipelines.core.store import Store
from pipelines.nightly.store_gc import claimed
from pipelines.recipe.config import Recipe
from pipelines.stages import graph, preflight
from pipelines.stages.context import Progress

if TYPE_CHECKING:
    from tasks.run import Tracker

Done = Callable[[graph.StageResult, float], None]


def run(recipe: Recipe, store: Store, progress: Progress, until: str | None, done: Done) -> list[graph.StageResult]:
    """Make every stage that the store lacks, in order.

    Args:
        done: called after each stage with its wall-clock seconds.
    """
    from tasks.run import Tracker

    with Tracker(recipe, store, progress.say) as tracker:
        return walk(recipe, store, graph.plan(recipe, store, until), progress, done, tracker)


def walk(
    recipe: Recipe,
    store: Store,
    steps: Sequence[graph.Step],
    progress: Progress,
    done: Done,
    tracker: Tracker,
    role: str = "",
) -> list[graph.StageResult]:
    """Make those of some steps that the store lacks, in order; raises what `run` does.

    Args:
        role: what the stages are made for, where one run makes several of a name.
    """
    if all(step.cached for step in steps):  # nothing to make is nothing to track, but a breach stays one
        results = [_timed(done, functools.partial(_found, step, steps, recipe, store, progress)) for step in steps]
        for result in results:  # a night's champion was evaluated before: its numbers belong to this night, too
            tracker.found(role, result)
        return results
    preflight.check(recipe, steps)
    from tasks.run import run_step

    names = [(step.kind, step.key) for step in steps]
    with claimed(store, names, {"recipe": recipe.name}):
        return [
            _timed(done, functools.partial(run_step, step, steps, recipe, store, progress, tracker, role))
            for step in steps
        ]


def _found(
    step: graph.Step, steps: Sequence[graph.Step], recipe: Recipe, store: Store, progress: Progress
) -> graph.StageResult:
    from tasks import contracts

    result = graph.execute(step, recipe, store, progress, steps)
    contracts.check(result, recipe)
    return result


def _timed(done: Done, make: Callable[[], graph.StageResult]) -> graph.StageResult:
    started = time.perf_counter()
    result = make()
    done(result, time.perf_counter() - started)
    return result
