"""`sqltrain sweep`: the cells of a table as one plan that shares every common stage, and the table that they fill.

A cell is a recipe with one value of each axis. Cells are made one after the other; a stage of several is made once, a
cell that fails leaves its error in the table, and after a kill the same command goes on from the finished stages.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import RecipeError, SqltrainError, StoppedError, UserError
from pipelines.core.files import read_json_lines, write_atomic, writing_to
from pipelines.core.store import Store
from pipelines.evaluation.measures import FinishedEvaluation
from pipelines.evaluation.voting import Rule
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.report import formats
from pipelines.stages import graph
from pipelines.stages.evaluate import SINGLE_TURN, records
from pipelines.sweeps import paper_tables
from pipelines.sweeps.sweep_page import page
from pipelines.sweeps.sweep_table import ROW, SEED, FinishedCell, Sweep, cell_title, table, verdicts

INCLUDED = {"model": "models", "benchmark": "data"}  # axes whose values are files of a folder of `conf/`
AS_IT_IS = "none"  # of the axis `variant`: the recipe itself
AFTER = "after"  # the axis of one run's checkpoints
RECIPE = "recipe"  # a row of another recipe than the table's
ASKED = "asked"  # overrides of the recipe by which a cell's checkpoint is asked once more, and not trained
NO_OVERRIDES = (RECIPE, AFTER, ASKED)
CHECKPOINTS = ("model", "sft", "grpo")
EVALUATION_STAGES = "[data, gold_schema, evaluate]"  # the stages that ask a checkpoint which is there
RANGE = re.compile(r"(\d+)\.\.(\d+)")
OUT_HINT = "Name another folder with --out."
PAGE = "sweep.html"
Say = Callable[[str], None]


@dataclass(frozen=True)
class SweepCell:
    """One cell: its value on each axis, and the recipe that they make."""

    values: Mapping[str, str]
    recipe: Recipe
    source: str  # the recipe's name
    overrides: tuple[str, ...]  # laid over it
    after: str = ""  # the stage whose evaluation is shown: model, sft or grpo; "" for the last that the recipe has
    asked: tuple[str, ...] = ()  # overrides by which that checkpoint is evaluated in another way than it was trained

    @property
    def name(self) -> str:
        """Its values in the order of the axes."""
        return cell_title(self.values) or self.recipe.name


Make = Callable[[SweepCell], object]
# One value of an axis: the axis, the value, and the words that it stands for (key=value, variant=, model=, benchmark=
# or after=).
AxisValue = tuple[str, str, tuple[str, ...]]


def cells(name: str, words: Sequence[str], rows: Mapping[str, Sequence[str]] | None = None) -> list[SweepCell]:
    """Every combination of the axes' values, the last axis fastest.

    Args:
        words: overrides in their order; a value with commas, or a range such as seed=0..2, is an axis.
        rows: an axis before them whose values are names, each for several words: the rows of a paper's table.
    """
    options: list[list[AxisValue]] = [[(ROW, row, tuple(own)) for row, own in rows.items()]] if rows else []
    options += [_axis_values(word) for word in words]
    for place, choices in enumerate(options):  # a later word would win, or its cells count as further seeds
        if len(choices) > 1 and choices[0][0] in {later[0][0] for later in options[place + 1 :]} - {"include"}:
            raise RecipeError(f"the axis {choices[0][0]} is given twice", "Write its values once, with commas between.")
    found = []
    for picked in itertools.product(*options):
        picked_words = [word for _, _, own in picked for word in own]
        sources, after, asked = (
            [word.partition("=")[2] for word in picked_words if word.startswith(f"{axis}=")] for axis in NO_OVERRIDES
        )
        if any(stage not in CHECKPOINTS for stage in after):
            raise RecipeError(f"there is no checkpoint {after[-1]!r}", f"Write {AFTER}= with {', '.join(CHECKPOINTS)}.")
        source = [name, *sources][-1]
        overrides = []
        for word in picked_words:
            axis, _, value = word.partition("=")
            if axis in INCLUDED:
                # Of one that `sqltrain data add` noted, the file with its path.
                here = axis == "benchmark" and (recipes.LOCAL / f"{value}.yaml").is_file()
                overrides.append(f"include={'local' if here else INCLUDED[axis]}/{value}")
            elif axis not in NO_OVERRIDES and (axis, value) != ("variant", AS_IT_IS):
                overrides.append(word)
        recipe = recipes.load(source, overrides)
        if asked:  # a wrong key is said before anything is made
            recipes.load(source, [*overrides, *asked])
        chosen = zip(picked, options, strict=True)
        values = {axis: value for (axis, value, _), choices in chosen if len(choices) > 1 or axis == ROW}
        found.append(SweepCell(values, recipe, source, tuple(overrides), after[-1] if after else "", tuple(asked)))
    return found


def _axis_values(word: str) -> list[AxisValue]:
    """The values of an argument: one, or those of an axis."""
    axis, equals, text = word.partition("=")
    span = RANGE.fullmatch(text)
    if span:
        values = [str(number) for number in range(int(span[1]), int(span[2]) + 1)]
    else:  # the parts between commas that stand in no bracket
        values, depth = [""], 0
        for letter in text:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and not depth:
                values.append("")
            else:
                values[-1] += letter
    if not equals or not values or len(set(values)) < len(values):
        raise RecipeError(f"{word!r} is neither an axis nor an override", "Write key=value, key=a,b,c or seed=0..2.")
    return [(axis, value, (f"{axis}={value}",)) for value in values]


def forecast(planned: Sequence[SweepCell], store: Store) -> Iterator[str]:
    """The stages to make: a line a cell with those that no cell before it makes, then the sum."""
    seen: set[tuple[str, str]] = set()
    to_make = cached = shared = 0
    for cell in planned:
        try:
            steps = graph.plan(cell.recipe, store)
        except SqltrainError as error:
            yield f"{cell.name}: cannot be made: {error}"
            continue
        names = {(step.name, step.key) for step in steps}
        new = [step.name for step in steps if not step.cached and (step.name, step.key) not in seen]
        cached += len({(step.name, step.key) for step in steps if step.cached} - seen)
        shared += len(names & seen)
        to_make += len(new)
        seen |= names
        new += ["its checkpoint asked once more"] if cell.asked else []
        yield f"{cell.name}: {', '.join(new) or 'nothing to make'}"
    yield f"{len(planned)} cells: {to_make} stages to make, {cached} cached, {shared} shared"


def fill(planned: Sequence[SweepCell], store: Store, make: Make, say: Say) -> list[FinishedCell]:
    """Make every cell. Whatever ends one is its error in the table, and a failed stage is not tried for another."""
    failed: dict[tuple[str, str], str] = {}
    keys: set[str] = set()
    filled: list[FinishedCell] = []

    def touched(stage: str, key: str) -> int:
        work = store.work(stage, key)
        return work.stat().st_mtime_ns if work.is_dir() else 0

    def make_once(cell: SweepCell) -> None:
        key = recipes.digest(cell.recipe.model_dump(mode="json"))  # of cells that show checkpoints of one run, the same
        if key not in keys:
            make(cell)
        keys.add(key)

    for number, cell in enumerate(planned, 1):
        say(f"cell {number} of {len(planned)}: {cell.name}")
        before: dict[tuple[str, str], int] = {}
        try:
            # When each stage's work folder was last written to: among unfinished ones, that of the failing stage moves.
            before = {(step.kind, step.key): touched(step.kind, step.key) for step in graph.plan(cell.recipe, store)}
            error = next((failed[stage] for stage in before if stage in failed), None)
            if error is None:
                make_once(cell)
                asked = asked_again(cell, store) if cell.asked else cell
                make_once(asked)
                checkpoint = _evaluated(cell, store)[1].name
                # The episodes of the evaluation on the first benchmark, and the curves of the training before it.
                evaluated, trained = _evaluated(asked, store)
                settings, curves = asked.recipe.evaluation, tuple(read_json_lines(trained.folder / "curves.jsonl"))
                run = FinishedEvaluation(
                    tuple(records(evaluated.folder, "greedy", "sampled")),
                    tuple(records(evaluated.folder, SINGLE_TURN)),
                    asked.recipe.headline,
                    max((k for k in settings.ks if k <= settings.samples), default=1),
                    Rule.of(settings),
                    asked.recipe.seed,
                    curves,
                )
                condition = condition_of(cell.recipe, checkpoint, asked.recipe)
                filled.append(FinishedCell(cell.values, run, curves, condition=condition))
        except StoppedError:
            raise  # whoever asked the training to stop meant the sweep
        except Exception as fault:  # a fault of ours or of a library, too, ends one cell and not the sweep
            error = str(fault) if isinstance(fault, SqltrainError) else f"{type(fault).__name__}: {fault}"
            moved = (stage for stage in before if not store.has(*stage) and touched(*stage) != before[stage])
            failed |= dict.fromkeys(moved, error)
        if error is not None:
            filled.append(FinishedCell(cell.values, error=error))
            say(f"cell {number} failed: {error}")
    return filled


def asked_again(cell: SweepCell, store: Store) -> SweepCell:
    """The cell that evaluates a finished cell's checkpoint as its `asked` says."""
    _, trained = _evaluated(cell, store)
    named = trained.name == "model" and cell.recipe.model.source != "tiny"  # a base model's weights lie elsewhere
    source = [] if named else [f"model.source={trained.folder / 'model'}"]
    overrides = (*cell.overrides, *cell.asked, *source, f"stages={EVALUATION_STAGES}")
    return SweepCell(cell.values, recipes.load(cell.source, overrides), cell.source, overrides)


def condition_of(recipe: Recipe, checkpoint: str, asked: Recipe) -> str:
    """The teacher and the judge of a row's checkpoint, and the schema that it is asked with."""
    taught = [teacher.endpoint or teacher.kind for teacher in recipe.synthesis.teachers]
    judges = [str(term.options.get("by", "static")) for term in recipe.rewards if term.term == "judge" and term.weight]
    teacher = " and ".join(taught) if "synthesize" in recipe.stages and checkpoint != "model" else "none"
    judge = " and ".join(judges).replace("static", "program") if checkpoint == "grpo" and judges else "none"
    view, linker = asked.protocol.schema_view, asked.data.linker
    return f"teacher {teacher}; judge {judge}; schema {view}" + (f" by {linker}" if view == "filtered" else "")


def _evaluated(cell: SweepCell, store: Store) -> tuple[graph.Step, graph.Step]:
    """The evaluation that a cell shows, and the stage that made the checkpoint."""
    steps = {step.name: step for step in graph.plan(cell.recipe, store)}
    names = [f"evaluate_{checkpoint}" for checkpoint in CHECKPOINTS if cell.after in ("", checkpoint)]
    done = [steps[name] for name in names if name in steps]
    if not done:
        wanted = f"the stage evaluate, and {cell.after} before it" if cell.after else "the stage evaluate"
        raise RecipeError(f"recipe {cell.recipe.name} evaluates nothing here", f"A table wants {wanted}.")
    return done[-1], steps[done[-1].name.removeprefix("evaluate_")]


def baseline_of(planned: Sequence[SweepCell], name: str | None) -> Mapping[str, str]:
    """The axis and value that every other row is held against: "variant=none"; the first value of the first axis."""
    axes = [axis for axis in planned[0].values if axis != SEED]  # seeds are averaged: they are no rows
    if not axes and name is None:
        return {}
    axis, _, value = (name or f"{axes[0]}={planned[0].values[axes[0]]}").partition("=")
    if axis not in axes or not any(cell.values[axis] == value for cell in planned):
        raise UserError(f"no row has {name!r}", f"The axes of rows: {', '.join(axes) or 'none'}.")
    return {axis: value}


def write(sweep: Sweep, folder: Path) -> None:
    """The table as Markdown, LaTeX and CSV, and the page."""
    source = table(sweep)
    decided = f"\n{formats.markdown(verdicts(sweep))}" if sweep.claim is not None else ""
    texts = {"sweep.md": formats.markdown(source) + decided, "sweep.tex": formats.latex(source)}
    texts |= {"sweep.csv": formats.to_csv(source), PAGE: page(sweep)}
    with writing_to(folder, OUT_HINT):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            # A lone surrogate of an error's text has no UTF-8; it is written as its escape.
            write_atomic(folder / name, text.encode("utf-8", "backslashreplace").decode("utf-8"))


def cells_of_recipe(name: str, words: Sequence[str], baseline: str | None) -> tuple[list[SweepCell], Sweep]:
    """The cells of a recipe's axes, and the sweep for their results."""
    planned = cells(name, words)
    axes = tuple(dict.fromkeys(axis for cell in planned for axis in cell.values))
    facts = {"recipe": name, "axes": ", ".join(axes) or "none"}
    return planned, Sweep(f"{name}: {len(planned)} cells", (), baseline_of(planned, baseline), facts=facts)


def cells_of_paper_table(
    name: str, words: Sequence[str], baseline: str | None, miniature: bool
) -> tuple[list[SweepCell], Sweep]:
    """The cells of a paper's table, and the sweep for their results."""
    source = paper_tables.load(name)
    form = source.form(miniature)
    given = {word.partition("=")[0] for word in words}
    # `seed=7..9` is in place of the file's own seeds.
    axes = [axis for axis in form.axes if len(_axis_values(axis)) == 1 or axis.partition("=")[0] not in given]
    planned = cells(form.recipe, [*axes, *words], form.rows)
    facts = {"paper": source.paper, "recipe": form.recipe, **({"note": source.note} if source.note else {})}
    return planned, Sweep(
        f"{source.paper}: {source.title}" + (", in miniature" if miniature else ""),
        (),
        baseline_of(planned, baseline or f"{ROW}={source.baseline}"),
        tuple(source.measures),
        tuple(source.curves),
        source.reported,
        source.absent,
        facts,
        source.claim,
        source.against,
    )
