"""`sqltrain sweep`: the cells of a table as one plan that shares every common stage, and the table that they fill.

A cell is a recipe with one value of each axis. Cells are made one after the other; a stage of several is made once, a
cell that fails leaves its error in the table, and after a kill the same command goes on from the finished stages.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipelines.core.errors import RecipeError, SqltrainError, StoppedError, UserError
from pipelines.core.files import digest, read_json_lines, write_atomic, writing_to
from pipelines.core.store import Store
from pipelines.core.types import Say, escape_surrogates
from pipelines.evaluation.measures import FinishedEvaluation
from pipelines.evaluation.record_files import SINGLE_TURN, read_records
from pipelines.evaluation.voting import Rule
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.report import formats
from pipelines.stages import graph
from pipelines.stages.stage import Step
from pipelines.sweeps import paper_tables
from pipelines.sweeps.sweep_page import render_sweep
from pipelines.sweeps.sweep_table import ROW, SEED, FinishedCell, Sweep, cell_title, table, verdict_table

INCLUDED = {"model": "models", "benchmark": "data"}  # axis -> the folder of `conf/` whose files are its values
AS_IT_IS = "none"  # the value of the axis `variant` that stands for the recipe itself
AFTER = "after"  # the axis of one run's checkpoints
RECIPE = "recipe"  # the axis of a row that has another recipe than the table's
ASKED = "asked"  # the axis of overrides by which a cell's checkpoint is evaluated again, without training
NO_OVERRIDES = (RECIPE, AFTER, ASKED)
CHECKPOINTS = ("model", "sft", "grpo")
EVALUATION_STAGES = "[data, gold_schema, evaluate]"  # the stages that evaluate a finished checkpoint
RANGE = re.compile(r"(\d+)\.\.(\d+)")
OUT_HINT = "Name another folder with --out."
PAGE = "sweep.html"
Rows = Mapping[str, Sequence[str]]  # rows of a paper's table by name, each with its words


@dataclass(frozen=True)
class SweepCell:
    """One cell: its value on each axis, and the recipe that they make."""

    values: Mapping[str, str]  # axis -> value
    recipe: Recipe
    source: str  # the recipe's name
    overrides: tuple[str, ...]  # laid over the recipe
    after: str = ""  # the checkpoint that is evaluated: model, sft or grpo; "" for the recipe's last one
    asked: tuple[str, ...] = ()  # overrides by which that checkpoint is evaluated in another way than it was trained

    @property
    def name(self) -> str:
        """Its values in the order of the axes."""
        return cell_title(self.values) or self.recipe.name


class AxisValue(NamedTuple):
    """One value of an axis."""

    axis: str
    value: str
    words: tuple[str, ...]  # overrides that it stands for: key=value, variant=, model=, benchmark= or after=


Make = Callable[[SweepCell], object]


def plan_cells(name: str, words: Sequence[str], rows: Rows | None = None) -> list[SweepCell]:
    """Every combination of the axes' values, the last axis fastest.

    Args:
        words: overrides in their order; a value with commas, or a range such as seed=0..2, is an axis.
        rows: an axis before them whose values are names, each for several words: the rows of a paper's table.
    """
    axes: list[list[AxisValue]] = []
    if rows:
        row_axis = []
        for row, row_words in rows.items():
            value = AxisValue(ROW, row, tuple(row_words))
            row_axis.append(value)
        axes.append(row_axis)
    axes += [_axis_values(word) for word in words]
    _refuse_repeated_axes(axes)
    combinations = itertools.product(*axes)
    return [_cell(name, combination, axes) for combination in combinations]


def _refuse_repeated_axes(axes: Sequence[Sequence[AxisValue]]) -> None:
    """Raise for an axis that is given twice: the later word would win, or its cells count as further seeds."""
    for number, values in enumerate(axes):
        axis = values[0].axis
        later_axes = {later[0].axis for later in axes[number + 1 :]}
        is_axis = len(values) > 1 and axis != "include"
        if is_axis and axis in later_axes:
            raise RecipeError(f"the axis {axis} is given twice", "Write its values once, with commas between.")


def _cell(name: str, combination: Sequence[AxisValue], axes: Sequence[Sequence[AxisValue]]) -> SweepCell:
    words: list[str] = []
    for value in combination:
        words += value.words
    checkpoints = _values_of(AFTER, words)
    if not set(checkpoints) <= set(CHECKPOINTS):
        known = ", ".join(CHECKPOINTS)
        hint = f"Write {AFTER}= with {known}."
        raise RecipeError(f"there is no checkpoint {checkpoints[-1]!r}", hint)
    source = [name, *_values_of(RECIPE, words)][-1]
    overrides = _overrides(words)
    recipe = recipes.load(source, overrides)
    asked = _values_of(ASKED, words)
    if asked:
        recipes.load(source, [*overrides, *asked])  # a wrong key raises before anything is made
    values = {}
    for value, axis_values in zip(combination, axes, strict=True):
        if len(axis_values) > 1 or value.axis == ROW:
            values[value.axis] = value.value
    after = ""
    if checkpoints:
        after = checkpoints[-1]
    return SweepCell(
        values=values,
        recipe=recipe,
        source=source,
        overrides=tuple(overrides),
        after=after,
        asked=tuple(asked),
    )


def _values_of(axis: str, words: Sequence[str]) -> list[str]:
    start = f"{axis}="
    return [word.removeprefix(start) for word in words if word.startswith(start)]


def _overrides(words: Sequence[str]) -> list[str]:
    """A cell's words as overrides of its recipe."""
    overrides = []
    for word in words:
        axis, _, value = word.partition("=")
        if axis in NO_OVERRIDES or (axis, value) == ("variant", AS_IT_IS):
            continue
        if axis not in INCLUDED:
            overrides.append(word)
        elif axis == "benchmark" and (recipes.LOCAL / f"{value}.yaml").is_file():
            overrides.append(f"include=local/{value}")  # `sqltrain data add` wrote it, with the benchmark's path
        else:
            overrides.append(f"include={INCLUDED[axis]}/{value}")
    return overrides


def _axis_values(word: str) -> list[AxisValue]:
    """The values of an argument: one, or those of an axis."""
    axis, equals, text = word.partition("=")
    span = RANGE.fullmatch(text)
    if span:
        first = int(span[1])
        last = int(span[2])
        values = [str(number) for number in range(first, last + 1)]
    else:
        values = _split_outside_brackets(text)
    is_repeated = len(set(values)) < len(values)
    if not equals or not values or is_repeated:
        raise RecipeError(f"{word!r} is neither an axis nor an override", "Write key=value, key=a,b,c or seed=0..2.")
    return [AxisValue(axis, value, (f"{axis}={value}",)) for value in values]


def _split_outside_brackets(text: str) -> list[str]:
    """The texts between those commas that stand in no bracket."""
    values = [""]
    depth = 0
    for letter in text:
        if letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def forecast(planned: Sequence[SweepCell], store: Store) -> Iterator[str]:
    """The stages to make: a line a cell with those that no cell before it makes, then the sum."""
    stages_before: set[tuple[str, str]] = set()  # (stage, key) of the cells before
    to_make = 0
    cached = 0
    shared = 0
    for cell in planned:
        try:
            steps = graph.plan(cell.recipe, store)
        except SqltrainError as error:
            yield f"{cell.name}: cannot be made: {error}"
            continue
        new = []
        for step in steps:
            if (step.name, step.key) in stages_before:
                shared += 1
            elif step.cached:
                cached += 1
            else:
                new.append(step.name)
        to_make += len(new)
        stages_before |= {(step.name, step.key) for step in steps}
        if cell.asked:
            new.append("its checkpoint asked once more")
        listed = ", ".join(new) or "nothing to make"
        yield f"{cell.name}: {listed}"
    yield f"{len(planned)} cells: {to_make} stages to make, {cached} cached, {shared} shared"


def fill(planned: Sequence[SweepCell], store: Store, make: Make, say: Say) -> list[FinishedCell]:
    """Make every cell. Whatever ends one is its error in the table, and a failed stage is not tried for another."""
    maker = _CellMaker(store, make)
    filled = []
    for number, cell in enumerate(planned, 1):
        say(f"cell {number} of {len(planned)}: {cell.name}")
        finished = maker.finish(cell)
        if finished.run is None:
            say(f"cell {number} failed: {finished.error}")
        filled.append(finished)
    return filled


class _CellMaker:
    """Makes cells of one sweep: each recipe once, and no stage again that failed for an earlier cell."""

    def __init__(self, store: Store, make: Make) -> None:
        self._store = store
        self._make = make
        self._errors: dict[tuple[str, str], str] = {}  # (kind, key) of a failed stage -> its error
        self._made: set[str] = set()  # digests of finished recipes

    def finish(self, cell: SweepCell) -> FinishedCell:
        """The cell with its evaluation, or with the error that ended it.

        Raises:
            StoppedError: whoever asked the training to stop meant the sweep.
        """
        before: dict[tuple[str, str], int] = {}  # the failing stage is the unfinished one whose work folder changed
        try:
            for step in graph.plan(cell.recipe, self._store):
                before[step.kind, step.key] = self._last_write(step.kind, step.key)
            for stage in before:
                if stage in self._errors:
                    return FinishedCell(cell.values, error=self._errors[stage])
            return self._evaluate(cell)
        except StoppedError:
            raise
        except Exception as fault:  # also a fault of ours or of a library ends one cell and not the sweep
            error = str(fault)
            if not isinstance(fault, SqltrainError):
                error = f"{type(fault).__name__}: {fault}"
            for stage, written in before.items():
                is_unfinished = not self._store.has(*stage)
                if is_unfinished and self._last_write(*stage) != written:
                    self._errors[stage] = error
            return FinishedCell(cell.values, error=error)

    def _last_write(self, stage: str, key: str) -> int:
        """When a stage's work folder was last written to, in nanoseconds; 0 without one."""
        work = self._store.work(stage, key)
        if not work.is_dir():
            return 0
        return work.stat().st_mtime_ns

    def _make_once(self, cell: SweepCell) -> None:
        """Make a cell's recipe; cells that show checkpoints of one run have the same."""
        settings_digest = digest(cell.recipe.model_dump(mode="json"))
        if settings_digest not in self._made:
            self._make(cell)
        self._made.add(settings_digest)

    def _evaluate(self, cell: SweepCell) -> FinishedCell:
        """Make a cell, and read the evaluation on its first benchmark and the curves of the training before it."""
        self._make_once(cell)
        evaluated_cell = cell
        if cell.asked:
            evaluated_cell = asked_again(cell, self._store)
        self._make_once(evaluated_cell)
        _, checkpoint = _evaluated(cell, self._store)
        evaluation, trained = _evaluated(evaluated_cell, self._store)
        recipe = evaluated_cell.recipe
        settings = recipe.evaluation
        possible_ks = [k for k in settings.ks if k <= settings.samples]
        curves = tuple(read_json_lines(trained.folder / "curves.jsonl"))
        run = FinishedEvaluation(
            records=tuple(read_records(evaluation.folder, "greedy", "sampled")),
            single_turn=tuple(read_records(evaluation.folder, SINGLE_TURN)),
            equality=recipe.headline,
            k=max(possible_ks, default=1),
            rule=Rule.of(settings),
            seed=recipe.seed,
            curves=curves,
        )
        condition = condition_of(cell.recipe, checkpoint.name, recipe)
        return FinishedCell(cell.values, run, curves, condition=condition)


def asked_again(cell: SweepCell, store: Store) -> SweepCell:
    """The cell that evaluates a finished cell's checkpoint as its `asked` says."""
    _, trained = _evaluated(cell, store)
    overrides = [*cell.overrides, *cell.asked]
    in_store = trained.name != "model" or cell.recipe.model.source == "tiny"  # other base models keep their source
    if in_store:
        overrides.append(f"model.source={trained.folder / 'model'}")
    overrides.append(f"stages={EVALUATION_STAGES}")
    recipe = recipes.load(cell.source, overrides)
    return SweepCell(cell.values, recipe, cell.source, tuple(overrides))


def condition_of(recipe: Recipe, checkpoint: str, asked: Recipe) -> str:
    """The teacher and the judge of a row's checkpoint, and the schema in its prompts."""
    teacher = "none"
    if "synthesize" in recipe.stages and checkpoint != "model":
        teachers = [teacher.endpoint or teacher.kind for teacher in recipe.synthesis.teachers]
        teacher = " and ".join(teachers)
    judges = []
    for term in recipe.rewards:
        if term.term == "judge" and term.weight:
            judge_of_term = term.options.get("by", "static")
            judges.append(str(judge_of_term))
    judge = "none"
    if checkpoint == "grpo" and judges:
        listed = " and ".join(judges)
        judge = listed.replace("static", "program")
    schema: str = asked.protocol.schema_view
    if schema == "filtered":
        schema += f" by {asked.data.linker}"
    return f"teacher {teacher}; judge {judge}; schema {schema}"


def _evaluated(cell: SweepCell, store: Store) -> tuple[Step, Step]:
    """The evaluation that a cell shows, and the stage that made the checkpoint."""
    steps = {step.name: step for step in graph.plan(cell.recipe, store)}
    evaluated = []
    for checkpoint in CHECKPOINTS:
        if cell.after in ("", checkpoint) and f"evaluate_{checkpoint}" in steps:
            evaluated.append(checkpoint)
    if not evaluated:
        wanted = "the stage evaluate"
        if cell.after:
            wanted += f", and {cell.after} before it"
        raise RecipeError(f"recipe {cell.recipe.name} evaluates nothing here", f"A table wants {wanted}.")
    checkpoint = evaluated[-1]
    return steps[f"evaluate_{checkpoint}"], steps[checkpoint]


def baseline_of(planned: Sequence[SweepCell], name: str | None) -> Mapping[str, str]:
    """The axis and value that every other row is held against: "variant=none"; the first value of the first axis."""
    axes = [axis for axis in planned[0].values if axis != SEED]  # rows average over seeds
    if not name:
        if not axes:
            return {}
        first_axis = axes[0]
        return {first_axis: planned[0].values[first_axis]}
    axis, _, value = name.partition("=")
    is_row = axis in axes and any(cell.values[axis] == value for cell in planned)
    if not is_row:
        listed = ", ".join(axes) or "none"
        raise UserError(f"no row has {name!r}", f"The axes of rows: {listed}.")
    return {axis: value}


def write_sweep(sweep: Sweep, folder: Path) -> str:
    """Write the table as Markdown, LaTeX and CSV, and the page; the Markdown is returned."""
    source = table(sweep)
    markdown = formats.markdown(source)
    if sweep.claim is not None:
        verdicts = verdict_table(sweep)
        markdown += "\n" + formats.markdown(verdicts)
    texts = {
        "sweep.md": markdown,
        "sweep.tex": formats.latex(source),
        "sweep.csv": formats.to_csv(source),
        PAGE: render_sweep(sweep),
    }
    with writing_to(folder, OUT_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            escaped = escape_surrogates(text)  # an error's text may hold half a character
            write_atomic(folder / name, escaped)
    return markdown


def cells_of_recipe(name: str, words: Sequence[str], baseline: str | None) -> tuple[list[SweepCell], Sweep]:
    """The cells of a recipe's axes, and the sweep for their results."""
    planned = plan_cells(name, words)
    axes: dict[str, None] = {}
    for cell in planned:
        axes |= dict.fromkeys(cell.values)
    facts = {"recipe": name, "axes": ", ".join(axes) or "none"}
    title = f"{name}: {len(planned)} cells"
    reference = baseline_of(planned, baseline)
    return planned, Sweep(title, (), reference, facts=facts)


def _refuse_axes_of_claim(name: str, planned: Sequence[SweepCell]) -> None:
    """Raise for an axis beside rows and seeds: a claim's verdict holds one row against another, seed by seed."""
    for axis in planned[0].values:
        if axis not in (ROW, SEED):
            raise RecipeError(
                f"{name} tests a claim, whose verdict has no place for several values of {axis}",
                f"Write one value of {axis}; the seed alone may have several.",
            )


def cells_of_paper_table(
    name: str, words: Sequence[str], baseline: str | None, miniature: bool
) -> tuple[list[SweepCell], Sweep]:
    """The cells of a paper's table, and the sweep for their results."""
    source = paper_tables.load_table(name)
    form = source.form(miniature)
    given = {word.partition("=")[0] for word in words}
    axes = []
    for axis in form.axes:
        name_of_axis, _, _ = axis.partition("=")
        is_replaced = name_of_axis in given  # `seed=7..9` replaces the file's own seeds
        if not is_replaced or len(_axis_values(axis)) == 1:
            axes.append(axis)
    planned = plan_cells(form.recipe, [*axes, *words], form.rows)
    if source.claim is not None:
        _refuse_axes_of_claim(name, planned)
    title = f"{source.paper}: {source.title}"
    if miniature:
        title += ", in miniature"
    facts = {"paper": source.paper, "recipe": form.recipe}
    if source.note:
        facts["note"] = source.note
    sweep = Sweep(
        title=title,
        cells=(),
        baseline=baseline_of(planned, baseline or f"{ROW}={source.baseline}"),
        measures=tuple(source.measures),
        curves=tuple(source.curves),
        reported=source.reported,
        absent=source.absent,
        facts=facts,
        claim=source.claim,
        against=source.against,
    )
    return planned, sweep
