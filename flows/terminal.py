"""What a person sees while a run goes: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from flows.options import FIRST_RUN
from pipelines.core.errors import DataError, UserError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.core.types import from_dict
from pipelines.evaluation.summary import Summary
from pipelines.recipe.config import Recipe
from pipelines.report import terminal
from pipelines.report.terminal import plain
from pipelines.stages import graph

QUIET_SECONDS = 10.0


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
        self._label, self._unit, self._note, self._done, self._total, self._last = "", "", "", 0, 0, 0.0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, stage: str, total: int, unit: str) -> None:
        """A new bar."""
        self._task = self._progress.add_task(stage, total=total, unit=unit, note="")
        self._label, self._unit, self._note, self._done, self._total = stage, unit, "", 0, total
        self._last = time.monotonic()

    def advance(self, count: int, note: str = "") -> None:
        """Move the newest bar."""
        if self._task is None:
            return
        self._done += count
        self._note = plain(note) or self._note
        self._progress.update(self._task, advance=count, note=self._note)
        overdue = time.monotonic() - self._last > QUIET_SECONDS
        if not self.console.is_terminal and overdue and self._done < self._total:
            self._last = time.monotonic()
            self.say(f"  {self._label}: {self._done}/{self._total} {self._unit}  {note}")

    def say(self, text: str) -> None:
        """One line above the bars."""
        self.console.print(Text(plain(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """One line above the bars that stands out."""
        self.console.print(Text(plain(text), style="yellow"), soft_wrap=True)


# What the command line prints: a run as it goes, its stages, its figures and where to look.

console = Console(highlight=False)
SHOWN = {
    "synthesize": ("trajectories", "turns_mean", "broken"),
    "filter": ("kept", "acceptance"),
    "gold_schema": ("examples", "agreement", "disagreements"),
    "sft": ("steps", "loss", "accuracy"),
    "difficulty": ("questions", "pass_rate", "zero_variance_share", "balanced", "explore"),
    "grpo": ("steps", "reward", "ex", "turns", "zero_variance"),
    "evaluate": ("ex", "ex_sampled", "majority", "turns", "tokens"),
}
MODELS = {"evaluate_model": "before SFT", "evaluate_sft": "after SFT", "evaluate_grpo": "after GRPO"}


def say(words: str) -> None:
    """One line, as it is: names and paths of users may hold markup."""
    console.print(Text(terminal.plain(words)), soft_wrap=True)


def run(recipe: Recipe, store: Store, until: str | None) -> list[graph.StageResult]:
    """A plain run with its progress on the screen."""
    from flows import run as plain

    title, root = terminal.plain(recipe.title or "a recipe"), terminal.plain(str(store.root))
    console.print(
        Text.assemble((terminal.plain(recipe.name), "bold"), f": {title} ", (f"(store: {root})", "dim")), soft_wrap=True
    )

    def done(result: graph.StageResult, seconds: float) -> None:
        how = "cached" if result.cached else f"{seconds:.1f} s"
        head = f"✓ {result.name:<16} {result.key}  {how:<10}"
        # A figure stays beside its name: what does not fit goes to the next line.
        figures = facts(result).replace("  ", "\0").replace(" ", "\xa0").replace("\0", "  ")
        folded = textwrap.fill(head + figures, console.width, subsequent_indent="    ", break_on_hyphens=False)
        line = Text(folded.replace("\xa0", " "))
        line.stylize("green", 0, 1)
        line.stylize("dim", head.index(result.key), head.index(result.key) + len(result.key) + 8 * result.cached)
        console.print(line, soft_wrap=True)

    with Bars(console) as bars:
        return plain.run(recipe, store, bars, until, done)


def facts(result: graph.StageResult) -> str:
    """The numbers of a stage's summary that say most, for one line."""
    kind = result.name.partition("_")[0]
    names = SHOWN.get(kind) or SHOWN.get(result.kind) or tuple(result.metrics)[:4]
    return "  ".join(f"{name} {_number(result.metrics[name])}" for name in names if name in result.metrics)


def _number(value: float) -> str:
    """A whole number with all its digits, any other with four."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def show_steps(steps: list[graph.Step]) -> None:
    """The table of `sqltrain stages`."""
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "key", "state", "why"):
        table.add_column(title)
    for step in steps:
        state = "[green]cached[/]" if step.cached else "[yellow]to do[/]"
        table.add_row(step.name, step.key, state, Text(terminal.plain(step.why)))
    console.print(table)


def conclude(
    recipe: Recipe,
    store: Store,
    results: list[graph.StageResult],
    as_json: bool,
    figures: Mapping[str, Mapping[str, Summary]] | None = None,
    more: Iterable[str] = (),
) -> None:
    """The end of a run: the EX figures, where to look, and with `as_json` one JSON object on the last line.

    Args:
        figures: figures by benchmark and system; None for those of the checkpoints among the results.
        more: further lines for a person.
    """
    by_name = {result.name: result for result in results}
    where = look(store, by_name)
    console.print()
    figures = _checkpoints(recipe, results) if figures is None else figures
    if figures:
        terminal.show_end(console, figures, where)
    else:
        for label, place in where.items():
            say(f"{label}  {place}")
    for line in more:
        say(line)
    if as_json:
        stages = {name: {"key": r.key, "cached": r.cached, "metrics": r.metrics} for name, r in by_name.items()}
        print(json.dumps({"recipe": recipe.name, "stages": stages, "look": where}, sort_keys=True))


def _checkpoints(recipe: Recipe, results: list[graph.StageResult]) -> dict[str, dict[str, Summary]]:
    """The figures of a run's evaluations by benchmark and checkpoint."""
    summaries: dict[str, dict[str, Summary]] = {}
    for result in results:
        if result.kind in MODELS:
            benchmark = graph.seen_by(result.name, recipe).benchmark.name
            summaries.setdefault(benchmark, {})[MODELS[result.kind]] = summary_of(result.folder)
    return summaries


def summary_of(folder: Path) -> Summary:
    """The figures of a finished evaluation."""
    return from_dict(Summary, read_json(folder / "summary.json"))


def look(store: Store, results: dict[str, graph.StageResult]) -> dict[str, str]:
    """Where a person goes on from here."""
    places: dict[str, str] = {}
    for name, result in results.items():
        if result.kind == "report":
            places[name] = str(result.folder / "report.html")
    newest: Any = next((results[name] for name in ("grpo", "sft") if name in results), None)
    if newest is not None:
        places["model"] = str(newest.folder / "model")
    if (store.root / "mlflow.db").exists():
        places["tracking"] = f"mlflow ui --backend-store-uri sqlite:///{store.root / 'mlflow.db'}"
    return places


def show_report(recipe: Recipe, store: Store, out: Path | None) -> None:
    """Say where a finished run's report is, or copy it; those of further benchmarks are named after it."""
    steps = graph.plan(recipe, store)
    if not any(step.kind == "report" for step in steps):
        raise DataError(f"the stages of recipe {recipe.name} end without a report", "Add report to `stages`.")
    missing = [step.name for step in steps if not step.cached and step.kind != "report"]
    if missing:
        raise DataError(
            f"recipe {recipe.name} is not finished: {', '.join(missing)} to do",
            FIRST_RUN,
        )
    results = run(recipe, store, None)
    first, *others = (result for result in results if result.kind == "report")
    page = first.folder / "report.html"
    if out is not None:
        copy_page(page, out)
    say(str(out or page))
    for result in others:
        say(f"{graph.benchmark_of(result.name)}  {result.folder / 'report.html'}")


def copy_page(page: Path, out: Path) -> None:
    """Copy a report."""
    try:
        out.write_bytes(page.read_bytes())
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}", "Name a file with --out.") from None
