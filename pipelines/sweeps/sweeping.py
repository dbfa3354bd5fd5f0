"""A sweep from its options to its table: the cells and what they take, then their results in a folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.files import digest, writing_to
from pipelines.core.store import Store
from pipelines.core.types import Say
from pipelines.sweeps import sweep_plan
from pipelines.sweeps.sweep_plan import Make, SweepCell
from pipelines.sweeps.sweep_table import FinishedCell, Sweep


@dataclass(frozen=True)
class SweepRequest:
    """The options of `sqltrain sweep`; None for an option that was not passed."""

    name: str  # a recipe, or a table of a paper such as sql_trail/table6
    axes: Sequence[str]  # overrides in their order; those of several values are axes
    baseline: str | None
    miniature: bool
    out: Path | None


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep whose cells are known, before any is made."""

    cells: Sequence[SweepCell]
    empty: Sweep  # the sweep without results
    forecast: Sequence[str]  # the stages to make: a line a cell, then the sum
    folder: Path  # folder of table and page

    def lines(self) -> list[str]:
        """What is ahead, for a person."""
        lines = list(self.forecast)
        if self.empty.claim is not None and self.empty.claim.seconds:
            lines.append(f"about {self.empty.claim.seconds} s of processor time where nothing of it is there yet")
        return lines

    def stages_to_make(self) -> dict[str, str]:
        """The line of each cell's forecast, by the cell's name."""
        lines_by_cell = {}
        for cell, line in zip(self.cells, self.forecast, strict=False):  # the last line is the sum
            lines_by_cell[cell.name] = line.removeprefix(f"{cell.name}: ")
        return lines_by_cell

    def make_folder(self) -> None:
        """Make the folder before the first cell: a folder that cannot be written is told at once."""
        with writing_to(self.folder, sweep_plan.OUT_HINT):
            self.folder.mkdir(parents=True, exist_ok=True)

    def fill(self, store: Store, make: Make, say: Say) -> "FilledSweep":
        """Make the cells, and write their table and page."""
        cells = sweep_plan.fill(self.cells, store, make, say)
        filled = replace(self.empty, cells=tuple(cells))
        markdown = sweep_plan.write_sweep(filled, self.folder)
        return FilledSweep(filled, self.folder, markdown)


@dataclass(frozen=True)
class FilledSweep:
    """A sweep whose table and page are written."""

    sweep: Sweep
    folder: Path
    markdown: str  # the table, and a claim's verdicts

    @property
    def cells(self) -> Sequence[FinishedCell]:
        return self.sweep.cells

    @property
    def errors(self) -> dict[str, str]:
        """The errors of the cells that failed, by the cells' names."""
        return {cell.name: cell.error for cell in self.cells if cell.error}

    def lines(self) -> list[str]:
        """The table and a claim's verdicts as Markdown, and the places of the files."""
        return [
            *self.markdown.splitlines(),
            f"table  {self.folder / 'sweep.md'}",
            f"page   {self.folder / sweep_plan.PAGE}",
        ]


def plan_sweep(request: SweepRequest, store: Store) -> PlannedSweep:
    """The cells of a sweep, and what they take."""
    name = request.name
    is_table = "/" in name and not name.endswith((".yaml", ".yml"))  # a table's name, such as sql_trail/table6
    if is_table:
        cells, empty = sweep_plan.cells_of_paper_table(name, request.axes, request.baseline, request.miniature)
    elif request.miniature:
        raise UserError("--miniature is for a paper's table", "A recipe has its own miniature: mini_sql_trail, ...")
    else:
        cells, empty = sweep_plan.cells_of_recipe(name, request.axes, request.baseline)
    forecast = list(sweep_plan.forecast(cells, store))
    key = digest([name, request.miniature, list(request.axes), dict(empty.baseline)])
    folder = request.out or store.root / "sweeps" / key
    return PlannedSweep(cells, empty, forecast, folder)
