"""`sqltrain sweep`: the command; `pipelines/sweeps/sweep_plan.py` plans and fills the cells."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import AsJson, emit, split
from pipelines.core.errors import UserError

ENGINES = ("plain", "prefect")
What = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|PAPER/TABLE",
        help="A recipe as in `sqltrain run`, or a table of a paper or a claim: a file of conf/tables, such as "
        "sql_trail/table6 or claims/turn_reward.",
    ),
]
Axes = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[AXIS=A,B]...",
        help="Overrides in their order; one with several values is an axis: variant=none,no_turns model=NAME,NAME "
        "benchmark=NAME,NAME after=model,sft,grpo, or any key. seed=0..2 is averaged. asked=KEY=VALUE asks a "
        "checkpoint in another way than it was trained.",
    ),
]


def sweep(
    what: What,
    axes: Axes = None,
    baseline: Annotated[str | None, typer.Option(help="AXIS=VALUE: the row that others are held against.")] = None,
    miniature: Annotated[bool, typer.Option("--miniature", help="A paper's table on the generated world.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what will be made.")] = False,
    engine: Annotated[str, typer.Option(help="plain: this process. prefect: a flow a cell.")] = "plain",
    out: Annotated[Path | None, typer.Option(help="Folder of table and page; one in the store by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make the cells of a table, each common stage once, and the table that they fill, with a page of their curves.

    A cell that fails leaves its error in the table; the same command goes on where a killed one ended.

    Examples:

      sqltrain sweep miniature variant=none,no_turns,exec_only seed=0..2 --baseline variant=none

      sqltrain sweep sql_trail/table6 --miniature

      sqltrain sweep sql_trail/table7 data.sft.path=SPIDER data.rl.0.path=SYNSQL data.rl.1.path=SPIDER --plan
    """
    from flows import terminal
    from pipelines.recipe.recipes import digest
    from pipelines.report import formats
    from pipelines.sweeps import paper_tables, sweep_plan
    from pipelines.sweeps.sweep_table import table, verdicts

    if engine not in ENGINES:
        raise UserError(f"there is no engine {engine!r}", f"Choose one of {', '.join(ENGINES)}.")
    words, store = split(axes or [])
    if paper_tables.is_table(what):
        cells, empty = sweep_plan.of_paper(what, words, baseline, miniature)
    elif miniature:
        raise UserError("--miniature is for a paper's table", "A recipe has its own miniature: mini_sql_trail, ...")
    else:
        cells, empty = sweep_plan.of_recipe(what, words, baseline)
    foretold = list(sweep_plan.outlook(cells, store))
    for line in foretold:
        terminal.say(line)
    if empty.claim is not None and empty.claim.seconds:
        terminal.say(f"about {empty.claim.seconds} s of processor time where nothing of it is there yet")
    if plan and as_json:
        to_make = {cell.name: line.removeprefix(f"{cell.name}: ") for cell, line in zip(cells, foretold, strict=False)}
        emit({"cells": to_make, "sum": foretold[-1]})
    if plan:
        return
    folder = out or store.root / "sweeps" / digest([what, miniature, words, dict(empty.baseline)])
    with sweep_plan.writing_to(folder):  # said before the first cell is made
        folder.mkdir(parents=True, exist_ok=True)

    with contextlib.ExitStack() as stack:
        if engine == "prefect":  # one server for all cells: each would start its own
            from tasks.prefect_server import prefect_server

            stack.enter_context(prefect_server())

        def make(cell: sweep_plan.Cell) -> object:
            if engine == "prefect":
                from flows.prefect.pipeline import run_with_prefect

                return run_with_prefect(cell.recipe, store, name=cell.name)
            return terminal.run(cell.recipe, store, None)

        sweep = dataclasses.replace(empty, cells=tuple(sweep_plan.fill(cells, store, make, terminal.say)))
    sweep_plan.write(sweep, folder)

    tables = [table(sweep), *([verdicts(sweep)] if sweep.claim is not None else [])]
    for line in "\n".join(map(formats.markdown, tables)).splitlines():
        terminal.say(line)
    terminal.say(f"table  {folder / 'sweep.md'}")
    terminal.say(f"page   {folder / sweep_plan.PAGE}")
    errors = {cell.name: cell.error for cell in sweep.cells if cell.error}
    if as_json:
        emit({"folder": str(folder), "failed": errors})
    if errors:
        raise UserError(
            f"{len(errors)} of {len(sweep.cells)} cells failed", "Their errors stand in the table; run it again."
        )
