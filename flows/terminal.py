"""Shared options of commands, and their output: progress of a run, its stages, its figures, the paths of its results.

On a terminal progress is bars, elsewhere plain lines.
"""

import contextlib
import json
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from pipelines.core.claims import claimed
from pipelines.core.store import Store
from pipelines.core.types import plain
from pipelines.evaluation.summary import Summary
from pipelines.recipe.config import Recipe
from pipelines.report import console_text
from pipelines.stages import context, graph, preflight, stage_making
from pipelines.stages.checkpoint_summaries import checkpoint_summaries
from pipelines.stages.stage import StageResult, Step

if TYPE_CHECKING:
    from tasks.run import Tracker

RecipeName = Annotated[str, typer.Argument(help="A recipe of conf/recipes by name, or the path of your own YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, such as grpo.steps=50 or variant=NAME.")
]
DatabaseOption = Annotated[str, typer.Option(help="A file, an address, or a name of databases/.")]
QuestionsOption = Annotated[
    Path | None, typer.Option(help="Your own questions with their SQL: JSON lines, or CSV with a header.")
]
StoreOption = Annotated[str | None, typer.Option("--store", help="The store; SQLTRAIN_STORE or ./store by default.")]
FIRST_RUN = "Run it first: sqltrain run, with the same recipe and overrides."  # hint if a run is missing
JsonOutput = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line, for scripts.")]

QUIET_SECONDS = 10.0
console = Console(highlight=False)


def emit(value: Mapping[str, Any]) -> None:
    """One JSON object on one line, for scripts."""
    typer.echo(json.dumps(value, sort_keys=True))


class Bars:
    """Live progress on a terminal; in a log file, one line at most every ten seconds."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=28 if console.width >= 100 else 8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]:<12}"),
            TimeElapsedColumn(),
            TextColumn(
                "{task.fields[note]}",
                style="dim",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),  # the column that gives way
            ),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._label = ""
        self._unit = ""
        self._note = ""
        self._done = 0
        self._total = 0
        self._last = 0.0  # monotonic time of the last line in a log file

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A stage, or a part of it, starts: `total` units of work."""
        self._task = self._progress.add_task(stage, total=total, unit=unit, note="")
        self._label = stage
        self._unit = unit
        self._note = ""
        self._done = 0
        self._total = total
        self._last = time.monotonic()

    def advance(self, count: int, note: str = "") -> None:
        """`count` more units are done."""
        if self._task is None:
            return
        self._done += count
        self._note = plain(note) or self._note
        self._progress.update(self._task, advance=count, note=self._note)
        is_overdue = time.monotonic() - self._last > QUIET_SECONDS
        if is_overdue and self._done < self._total and not self.console.is_terminal:
            self._last = time.monotonic()
            self.say(f"  {self._label}: {self._done}/{self._total} {self._unit}  {note}")

    def say(self, text: str) -> None:
        """One line above the bars."""
        self.console.print(Text(plain(text)), soft_wrap=not self.console.is_terminal)

    def warn(self, text: str) -> None:
        """One line above the bars that stands out."""
        self.console.print(Text(plain(text), style="yellow"), soft_wrap=True)


def say(words: str) -> None:
    """One line, as it is: names and paths of users may hold markup."""
    console.print(Text(plain(words)), soft_wrap=True)


# The plain run: the stage graph walked in this process, with tracking, and with no server.

OnStage = Callable[[StageResult, float], None]  # called after each stage with its wall-clock seconds


def walk(
    recipe: Recipe,
    store: Store,
    steps: Sequence[Step],
    role: str = "",
    *,
    progress: context.Progress,
    tracker: "Tracker",
    on_stage: OnStage = lambda *_: None,
) -> list[StageResult]:
    """Make the steps that the store lacks, in order.

    Args:
        role: role of the stages in the run, if one run makes several stages of a name.
    """
    from tasks import contracts
    from tasks.run import run_step

    results = []
    is_cached = all(step.cached for step in steps)
    with contextlib.ExitStack() as claims:
        if not is_cached:
            preflight.check_run(recipe, steps)
            keys = [(step.kind, step.key) for step in steps]
            claims.enter_context(claimed(store, keys, {"recipe": recipe.name}))
        for step in steps:
            started = time.perf_counter()
            if is_cached:  # a run without work is not tracked, but a breach of a contract is still an error
                result = stage_making.execute(step, recipe, store, progress, steps)
                contracts.check(result, recipe)
            else:
                result = run_step(step, steps, recipe, store, progress, tracker, role)
            on_stage(result, time.perf_counter() - started)
            results.append(result)
    if is_cached:
        for result in results:  # a night's champion was evaluated before: its numbers belong to this night, too
            tracker.note_cached(role, result)
    return results


def run(recipe: Recipe, store: Store, until: str | None) -> list[StageResult]:
    """A plain run with its progress on the screen."""
    steps = graph.plan(recipe, store, until)
    return run_steps(recipe, store, steps)


def run_steps(recipe: Recipe, store: Store, steps: Sequence[Step]) -> list[StageResult]:
    """A plain run of these steps, with its progress on the screen."""
    from tasks.run import Tracker

    title = plain(recipe.title or "a recipe")
    root = plain(str(store.root))
    head = Text()
    head.append(plain(recipe.name), "bold")
    head.append(f": {title} ")
    head.append(f"(store: {root})", "dim")
    console.print(head, soft_wrap=True)
    with Bars(console) as bars, Tracker(recipe, store, bars.say) as tracker:
        return walk(recipe, store, steps, progress=bars, tracker=tracker, on_stage=print_stage)


def print_stage(result: StageResult, seconds: float) -> None:
    """Print a finished stage: its key, its time and its figures."""
    duration = f"{seconds:.1f} s"
    if result.cached:
        duration = "cached"
    head = f"✓ {result.name:<16} {result.key}  {duration:<10}"
    figures = console_text.stage_figures(result.name, result.metrics)
    folded = textwrap.fill(head + figures, console.width, subsequent_indent="    ", break_on_hyphens=False)
    line = Text(folded.replace("\xa0", " "))
    line.stylize("green", 0, 1)
    key_start = head.index(result.key)
    key_end = key_start + len(result.key)
    if result.cached:
        key_end += len("  cached")
    line.stylize("dim", key_start, key_end)
    console.print(line, soft_wrap=True)


def print_results(
    recipe: Recipe, store: Store, results: Sequence[StageResult], json_output: bool, extra_lines: Iterable[str] = ()
) -> None:
    """The end of a run: as `print_summaries`, of the checkpoints among the results."""
    summaries = checkpoint_summaries(recipe, results)
    print_summaries(recipe.name, store, results, summaries, json_output, extra_lines)


def print_summaries(
    recipe_name: str,
    store: Store,
    results: Sequence[StageResult],
    summaries: Mapping[str, Mapping[str, Summary]],
    json_output: bool,
    extra_lines: Iterable[str] = (),
) -> None:
    """The EX figures, the paths of the results, and further lines.

    Args:
        summaries: by benchmark and system.
        json_output: print all of it as one JSON object on the last line, too.
        extra_lines: lines for a person below the figures.
    """
    by_name = {result.name: result for result in results}
    paths = _result_paths(by_name, store)
    console.print()
    if summaries:
        console_text.show_end(console, summaries, paths)
    else:
        for label, path in paths.items():
            say(f"{label}  {path}")
    for line in extra_lines:
        say(line)
    if json_output:
        stages = {}
        for name, result in by_name.items():
            stages[name] = {"key": result.key, "cached": result.cached, "metrics": result.metrics}
        emit({"recipe": recipe_name, "stages": stages, "look": paths})


def _result_paths(by_name: Mapping[str, StageResult], store: Store) -> dict[str, str]:
    """The paths of reports, of the newest model, and the command of the tracking page, by label."""
    paths = {}
    for name, result in by_name.items():
        if result.kind == "report":
            paths[name] = str(result.folder / "report.html")
    newest = by_name.get("grpo") or by_name.get("sft")
    if newest is not None:
        paths["model"] = str(newest.folder / "model")
    tracking = store.root / "mlflow.db"
    if tracking.exists():
        paths["tracking"] = f"mlflow ui --backend-store-uri sqlite:///{tracking}"
    return paths
