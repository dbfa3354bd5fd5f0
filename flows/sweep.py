"""`sqltrain sweep`: the command alone; `flows/sweeping.py` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.opening import AsJson, RecipeName, emit, split
from pipelines.errors import UserError

if TYPE_CHECKING:
    from pipelines.config import Recipe

Axes = Annotated[
    list[str],
    typer.Argument(
        metavar="AXIS=A,B...",
        help="Overrides in their order; one with several values is an axis: variant=none,no_turns model=NAME,NAME "
        "benchmark=NAME,NAME seed=0..2, or any key. store=DIR as ever.",
    ),
]


def sweep(
    recipe: RecipeName,
    axes: Axes,
    baseline: Annotated[str | None, typer.Option(help="AXIS=VALUE: the row that others are held against.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what will be made.")] = False,
    engine: Annotated[str, typer.Option(help="plain: this process. prefect: one flow a cell.")] = "plain",
    out: Annotated[Path | None, typer.Option(help="Folder of the table; one in the store by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the cells of a table, each common stage once, and the table that they fill.

    A cell that fails leaves its error in the table; the same command goes on where a killed one ended.

    Examples:

      sqltrain sweep miniature variant=none,no_turns,exec_only --baseline variant=none

      sqltrain sweep sql_trail include=scales/miniature variant=none,no_turns seed=0..2 --plan
    """
    from flows import screen, sweeping
    from pipelines.evaluation import tables
    from pipelines.recipes import digest

    if engine not in ("plain", "prefect"):
        raise UserError(f"there is no engine {engine!r}", "Choose plain or prefect.")
    words, store = split(axes)
    cells = sweeping.cells(recipe, words)
    base = sweeping.baseline_of(cells, baseline)
    for line in sweeping.outlook(cells, store):
        screen.say(line)
    if plan:
        return

    def make(loaded: Recipe) -> object:
        if engine == "prefect":
            from flows.pipeline import run_with_prefect

            return run_with_prefect(loaded, store)
        return screen.run(loaded, store, None)

    filled = sweeping.fill(cells, store, make, screen.say)
    found = sweeping.table(recipe, filled, base)
    folder = out or store.root / "sweeps" / digest([recipe, words, base])
    sweeping.write(found, folder)
    screen.say(tables.markdown(found))
    screen.say(f"table  {folder / 'sweep.md'}")
    if as_json:
        emit({"folder": str(folder), "failed": {one.cell.name: one.error for one in filled if one.error}})
    failed = sum(bool(one.error) for one in filled)
    if failed:
        raise UserError(f"{failed} of {len(filled)} cells failed", "Their errors stand in the table; run it again.")
