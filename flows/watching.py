"""`sqltrain watch`: the training stages of a run, live, as plain text."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.options import FIRST_RUN
from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.training import watch
from pipelines.training.plan import CURVES

TRAINED = ("sft", "grpo")


def follow(recipe: Recipe, store: Store, console: Console, every_s: float, once: bool) -> None:
    """Show the newest training stage of a run until the last one is finished; once only off a terminal."""
    steps = [step for step in graph.plan(recipe, store) if step.name in TRAINED]
    if not steps:
        raise DataError(f"recipe {recipe.name} trains nothing", f"Its stages: {', '.join(recipe.stages)}.")
    if once or not console.is_terminal:
        if newest(steps, store) is None:
            raise DataError(
                f"no training of recipe {recipe.name} has begun",
                FIRST_RUN,
            )
        console.print(_page(recipe, steps, store), soft_wrap=True)
        return
    with Live(_page(recipe, steps, store), console=console, auto_refresh=False) as live:
        while not store.has(steps[-1].name, steps[-1].key):
            time.sleep(every_s)
            live.update(_page(recipe, steps, store), refresh=True)


def newest(steps: Sequence[graph.Step], store: Store) -> tuple[graph.Step, Path] | None:
    """The last stage that has made a step, and where it writes; None when none has."""
    for step in reversed(steps):
        for folder in (step.folder, store.work(step.name, step.key)):
            if (folder / CURVES).is_file():
                return step, folder
    return None


def _page(recipe: Recipe, steps: Sequence[graph.Step], store: Store) -> Text:
    newest_folder = newest(steps, store)
    if newest_folder is None:
        return Text(f"{recipe.name}: no training step is done yet")
    step, folder = newest_folder
    state = "finished" if store.has(step.name, step.key) else "running, or stopped"
    total = recipe.grpo.steps if step.name == "grpo" and recipe.grpo.epochs is None else None
    return Text("\n".join([f"{recipe.name}: {step.name} {step.key}, {state}", *watch.view(watch.read(folder), total)]))
