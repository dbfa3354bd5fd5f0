"""`sqltrain sweep`: the cells of a table as one plan that shares every common stage, and the table that they fill.

A cell is a recipe with one value of each axis. Cells are made one after the other; what two share is made once, a cell
that fails leaves its error in the table, and the same command goes on after a kill: the store has what is finished.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines import recipes
from pipelines.config import Recipe
from pipelines.errors import RecipeError, SqltrainError, UserError
from pipelines.evaluation import tables
from pipelines.evaluation.metrics import execution_accuracy, scored
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.stats import paired
from pipelines.stages import graph
from pipelines.stages.evaluate import records
from pipelines.store import Store, write_atomic

INCLUDED = {"model": "models", "benchmark": "data"}  # axes whose values are files of a folder of `conf/`
AS_IT_IS = "none"  # of the axis `variant`: the recipe itself
RANGE = re.compile(r"(\d+)\.\.(\d+)")
Say = Callable[[str], None]
Make = Callable[[Recipe], object]


@dataclass(frozen=True)
class Cell:
    """One cell: its value on each axis, and the recipe that they make."""

    values: Mapping[str, str]
    recipe: Recipe

    @property
    def name(self) -> str:
        """Its values in the order of the axes."""
        return " ".join(f"{axis}={value}" for axis, value in self.values.items()) or self.recipe.name


@dataclass(frozen=True)
class Filled:
    """What a cell came to: the greedy answers of its last checkpoint, or the error that it ended with."""

    cell: Cell
    answers: tuple[EpisodeRecord, ...] = ()
    error: str = ""


def cells(name: str, words: Sequence[str]) -> list[Cell]:
    """Every combination of the axes' values, the last axis fastest.

    Args:
        words: overrides in their order; a value with commas, or a range such as seed=0..2, is an axis.

    Raises:
        RecipeError: an unknown variant, file or key, or an axis that names a value twice.
    """
    options = [_options(word) for word in words]
    found = []
    for chosen in itertools.product(*(range(len(each)) for each in options)):
        picked = [each[index] for each, index in zip(options, chosen, strict=True)]
        values = {axis: value for each, (axis, value, _) in zip(options, picked, strict=True) if len(each) > 1}
        overrides = [override for _, _, override in picked if override]
        found.append(Cell(values, recipes.load(name, overrides)))
    return found


def _options(word: str) -> list[tuple[str, str, str]]:
    """The (axis, value, override) that an argument stands for: one, or those of an axis."""
    axis, equals, text = word.partition("=")
    span = RANGE.fullmatch(text)
    values = [str(each) for each in range(int(span[1]), int(span[2]) + 1)] if span else _split(text)
    if not equals or not values or len(set(values)) < len(values):
        raise RecipeError(f"{word!r} is no axis and no override", "Write key=value, key=a,b,c or seed=0..2.")
    return [(axis, value, _override(axis, value)) for value in values]


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _override(axis: str, value: str) -> str:
    if axis == "variant" and value == AS_IT_IS:
        return ""
    return f"include={INCLUDED[axis]}/{value}" if axis in INCLUDED else f"{axis}={value}"


def outlook(found: Sequence[Cell], store: Store) -> Iterator[str]:
    """What will be made: a line a cell with the stages that no cell before it makes, then the sum."""
    seen: set[tuple[str, str]] = set()
    made = cached = shared = 0
    for cell in found:
        steps = graph.plan(cell.recipe, store)
        names = {(step.name, step.key) for step in steps}
        new = [step.name for step in steps if not step.cached and (step.name, step.key) not in seen]
        cached += len({(step.name, step.key) for step in steps if step.cached} - seen)
        shared += len(names & seen)
        made += len(new)
        seen |= names
        yield f"{cell.name}: {', '.join(new) or 'nothing to make'}"
    yield f"{len(found)} cells: {made} stages to make, {cached} there already, {shared} shared"


def fill(found: Sequence[Cell], store: Store, make: Make, say: Say) -> list[Filled]:
    """Make every cell. One that fails is named in the table, and its failed stage is not tried again for another."""
    failed: dict[tuple[str, str], str] = {}
    filled = []
    for number, cell in enumerate(found, 1):
        say(f"cell {number} of {len(found)}: {cell.name}")
        error = ""
        try:
            steps = graph.plan(cell.recipe, store)
            error = next((failed[step.name, step.key] for step in steps if (step.name, step.key) in failed), "")
            if not error:
                make(cell.recipe)
        except SqltrainError as caught:
            error = str(caught)
            steps = graph.plan(cell.recipe, store)
            stopped = next((step for step in steps if not step.cached), None)
            if stopped is not None:
                failed[stopped.name, stopped.key] = error
        filled.append(Filled(cell, error=error) if error else Filled(cell, _answers(cell, store)))
        if error:
            say(f"cell {number} failed: {error}")
    return filled


def _answers(cell: Cell, store: Store) -> tuple[EpisodeRecord, ...]:
    """The greedy answers of a cell's last evaluation.

    Raises:
        RecipeError: the recipe evaluates nothing.
    """
    done = [step for step in graph.plan(cell.recipe, store) if step.name.startswith("evaluate_")]
    if not done:
        raise RecipeError(f"recipe {cell.recipe.name} evaluates nothing", "A table wants its stage evaluate.")
    return tuple(records(done[-1].folder, "greedy"))


def baseline_of(found: Sequence[Cell], name: str | None) -> Mapping[str, str]:
    """The axis and value that every other row is held against: "variant=none"; the first value of the first axis.

    Raises:
        UserError: no cell has it.
    """
    axes = list(found[0].values)
    if not axes:
        return {}
    axis, _, value = (name or f"{axes[0]}={found[0].values[axes[0]]}").partition("=")
    if not any(cell.values.get(axis) == value for cell in found):
        raise UserError(f"no cell has {name!r}", f"The axes: {', '.join(axes)}.")
    return {axis: value}


def table(name: str, filled: Sequence[Filled], baseline: Mapping[str, str]) -> tables.Table:
    """EX with its interval and, on the questions that both answered, the difference from the baseline's row."""
    axes = tuple(filled[0].cell.values)
    rows = [
        (
            *(one.cell.values[axis] for axis in axes),
            execution_accuracy(scored(one.answers), one.cell.recipe.headline, one.cell.recipe.seed),
            _difference(one, filled, baseline),
            one.cell.recipe.headline,
            float(len(one.answers)),
            one.error or None,
        )
        for one in filled
    ]
    columns = (
        *(tables.Column(axis) for axis in axes),
        tables.Column("EX", "estimate"),
        tables.Column("difference", "difference"),
        tables.Column("equality"),
        tables.Column("questions", "count"),
        tables.Column("error"),
    )
    said = " ".join(f"{axis}={value}" for axis, value in baseline.items())
    note = f"Greedy answers, 95 % intervals. The difference is from {said}, question by question." if said else ""
    return tables.Table("sweep", f"{name}: {len(filled)} cells", columns, tuple(rows), note)


def _difference(one: Filled, filled: Sequence[Filled], baseline: Mapping[str, str]) -> tables.Cell:
    """From the cell that differs in the baseline's axis alone; None for that one itself, or where one failed."""
    values = {**one.cell.values, **baseline}
    first = next((other for other in filled if dict(other.cell.values) == values), None)
    if first is None or first is one or first.cell.recipe.headline != one.cell.recipe.headline:
        return None
    equality = one.cell.recipe.headline
    before = {record.example_id: record for record in scored(first.answers)}
    pairs = [(before[record.example_id], record) for record in scored(one.answers) if record.example_id in before]
    return paired(
        [old.score(equality) for old, _ in pairs],
        [new.score(equality) for _, new in pairs],
        [new.database for _, new in pairs],
        one.cell.recipe.seed,
    )


def write(found: tables.Table, folder: Path) -> None:
    """The table as Markdown, LaTeX and CSV.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("sweep.md", tables.markdown(found)),
            ("sweep.tex", tables.latex(found)),
            ("sweep.csv", tables.to_csv(found)),
        ):
            write_atomic(folder / name, text)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}", "Name another folder with --out.") from None
