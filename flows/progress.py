"""What a person sees while a run goes: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from pipelines.report.terminal import plain

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
