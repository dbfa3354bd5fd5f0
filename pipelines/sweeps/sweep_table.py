"""A sweep's results: its cells as rows that average over seeds, the table of their figures, and their curves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial

from pipelines.evaluation import measures, stats
from pipelines.evaluation.measures import SMOOTH, FinishedEvaluation, Measure, Points, curve_points, moving_average
from pipelines.evaluation.stats import Estimate, Paired, wilson
from pipelines.report.formats import Cell, ReportTable, TableColumn, signed, signed_number
from pipelines.sweeps.claims import Claim, Contrast, ContrastResult, decide_contrasts, overall_verdict

SEED = "seed"  # the axis that a row averages over
BENCHMARK = "benchmark"
ROW = "row"  # the axis of a paper table's rows
MEASURES = ("greedy", "majority", "turns")  # columns of a sweep that names no measures
CURVES = ("reward", "ex", "turns")  # the page's first charts
HELD_OUT = "ex_held_out"  # the curve of accuracy on held-out questions
N_HELD_OUT = "questions_held_out"  # the curve that holds the number of those questions
Reported = Mapping[str, Mapping[str, Mapping[str, float]]]  # row -> benchmark -> measure -> the paper's own figure


@dataclasses.dataclass(frozen=True)
class FinishedCell:
    """A cell that was made, or the error that it ended with."""

    values: Mapping[str, str]  # axis -> value
    run: FinishedEvaluation | None = None  # its evaluation; None if it failed
    curves: tuple[Mapping[str, float], ...] = ()  # its training's numbers, a step a row
    error: str = ""
    condition: str = ""  # its teacher, its judge and the schema in its prompts

    @property
    def name(self) -> str:
        """Its values in the order of the axes."""
        return cell_title(self.values)

    @property
    def seed(self) -> str:
        """Its value on the axis of seeds; "" without that axis."""
        return self.values.get(SEED, "")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All cells of a sweep."""

    title: str
    cells: tuple[FinishedCell, ...]
    baseline: Mapping[str, str] = dataclasses.field(default_factory=dict)  # axis and value of the row of reference
    measures: tuple[str, ...] = MEASURES  # the table's columns; differences are those of the first
    curves: tuple[str, ...] = CURVES  # the page's first charts
    reported: Reported = dataclasses.field(default_factory=dict)  # a paper's own figures, percent for shares
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)  # rows without a cell -> the reason
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # lines of the page's head: "recipe", "axes"
    claim: Claim | None = None  # the claim that the rows test
    against: Mapping[str, str] = dataclasses.field(default_factory=dict)  # row -> its own row of reference

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that rows differ by."""
        return tuple(axis for axis in self.cells[0].values if axis != SEED)

    @property
    def seeds(self) -> tuple[str, ...]:
        """The values of the axis that rows average over; () without such an axis."""
        seeds = [cell.values[SEED] for cell in self.cells if SEED in cell.values]
        return tuple(dict.fromkeys(seeds))

    @cached_property
    def contrasts(self) -> tuple[ContrastResult, ...]:
        """The result of each contrast of the claim; () without a claim."""
        if self.claim is None:
            return ()
        runs: dict[str, dict[str, FinishedEvaluation]] = {}
        for cell in self.cells:
            if cell.run is not None:
                runs_by_seed = runs.setdefault(cell.values[ROW], {})
                runs_by_seed[cell.seed] = cell.run
        seeds = self.seeds or ("",)
        return tuple(decide_contrasts(self.claim, runs, seeds))

    def rows(self) -> list[SweepRow]:
        """The rows in the order of their first cells."""
        axes = self.axes
        cells_by_values: dict[tuple[str, ...], list[FinishedCell]] = {}
        for cell in self.cells:
            values = tuple(cell.values[axis] for axis in axes)
            cells_of_row = cells_by_values.setdefault(values, [])
            cells_of_row.append(cell)
        rows = []
        for values, cells in cells_by_values.items():
            name = ", ".join(values) or "the recipe"
            by_axis = dict(zip(axes, values, strict=True))
            row = SweepRow(name, by_axis, tuple(cells))
            rows.append(row)
        return rows

    def reference_of(self, row: SweepRow, rows: Sequence[SweepRow]) -> SweepRow | None:
        """The row that this one is compared with: it differs in the baseline's axis alone. None for that row itself."""
        if not self.baseline:
            return None
        values = {**row.values, **self.baseline}
        row_name = row.values.get(ROW, "")
        own_reference = self.against.get(row_name)
        if ROW in self.baseline and own_reference is not None:
            values[ROW] = own_reference
        matching = [other for other in rows if dict(other.values) == values]
        if not matching or matching[0] is row:
            return None
        return matching[0]

    def reported_figure(self, row: SweepRow, measure: Measure) -> float | None:
        """The paper's figure, shares in [0, 1]; without an axis of benchmarks it is the first one's that it names."""
        row_name = row.values.get(ROW, "")
        by_benchmark = self.reported.get(row_name, {})
        benchmark = row.values.get(BENCHMARK) or next(iter(by_benchmark), "")
        value = by_benchmark.get(benchmark, {}).get(measure.name)
        if value is not None and measure.kind == "percent":
            return value / 100
        return value


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """Cells that differ in their seed alone."""

    name: str  # its values without the axes' names, for legends and charts
    values: Mapping[str, str]  # axis -> value
    cells: tuple[FinishedCell, ...]

    @property
    def runs(self) -> tuple[FinishedEvaluation, ...]:
        """The evaluations of those cells that were made."""
        return tuple(cell.run for cell in self.cells if cell.run is not None)

    @property
    def bootstrap_seed(self) -> int:
        """The seed of its intervals: its first run's."""
        runs = self.runs
        if not runs:
            return 0
        return runs[0].seed


LinePoint = tuple[float, float, float, float]  # step, mean over seeds, lowest seed, highest seed


@dataclasses.dataclass(frozen=True)
class Line:
    """One number of a row's training at each step."""

    row: str
    points: tuple[LinePoint, ...]


def cell_title(values: Mapping[str, str]) -> str:
    """A cell's values as one text: "variant=no_turns seed=1"."""
    return " ".join(f"{axis}={value}" for axis, value in values.items())


# A column of the table, and the function that gives a row's cell.
FilledColumn = tuple[TableColumn, Callable[["SweepRow"], Cell]]


def table(sweep: Sweep) -> ReportTable:
    """A row for each combination of the axes' values, averaged over seeds, and the paper's figures if it has any."""
    rows = sweep.rows()
    filled_columns = list(_table_columns(sweep, rows))
    columns = tuple(column for column, _ in filled_columns)
    table_rows = []
    for row in rows:
        cells = [cell_of(row) for _, cell_of in filled_columns]
        table_rows.append(tuple(cells))
    notes = " ".join(_table_notes(sweep))
    return ReportTable("sweep", sweep.title, columns, tuple(table_rows), notes)


def _table_columns(sweep: Sweep, rows: Sequence[SweepRow]) -> Iterator[FilledColumn]:
    """Columns from left to right: axes, measures with the paper's figures, then how the cells were made."""
    has_seeds = len(sweep.seeds) > 1
    reported_measures: set[str] = set()
    for by_benchmark in sweep.reported.values():
        for figures in by_benchmark.values():
            reported_measures.update(figures)
    for axis in sweep.axes:
        yield TableColumn(axis), partial(_value_on, axis=axis)
    for number, name in enumerate(sweep.measures):
        measure = measures.measure(name)
        heading = measures.title(name)
        is_share = measure.kind == "percent"
        column = TableColumn(heading, "estimate" if is_share else "mean")
        yield column, partial(figure, measure=measure)
        if name in reported_measures:
            paper_column = TableColumn(f"{heading}, paper", measure.kind, "the paper's own figure")
            yield paper_column, partial(sweep.reported_figure, measure=measure)
        if number == 0:
            about = "from the baseline's row, question by question, in points"
            difference = partial(_difference, sweep=sweep, rows=rows, measure=measure)
            yield TableColumn("difference", "difference", about), difference
        if number == 0 and has_seeds:
            about = f"sample deviation of the seeds' {heading}"
            if is_share:
                about += ", in points"
            deviation = partial(_deviation_over_seeds, measure=measure)
            yield TableColumn("deviation", measure.kind, about), deviation
    if has_seeds:
        yield TableColumn("seeds", "count", "that were made"), _n_seeds
    yield TableColumn("equality"), _row_equalities
    yield TableColumn("questions", "count"), _n_questions
    yield TableColumn("condition"), _conditions
    yield TableColumn("error"), _errors


def _value_on(row: SweepRow, axis: str) -> Cell:
    return row.values[axis]


def _n_seeds(row: SweepRow) -> float:
    return float(len(row.runs))


def figure(row: SweepRow, measure: Measure) -> Estimate | float | None:
    """A row's figure: a share with its interval, or the mean over seeds of a count; None if no run has it."""
    if measure.kind == "percent":
        scores = [measure.scores(run) for run in row.runs]
        return stats.mean(scores, row.bootstrap_seed)
    values = _figures_by_run(row, measure)
    if not values:
        return None
    return math.fsum(values) / len(values)


def _figures_by_run(row: SweepRow, measure: Measure) -> list[float]:
    """The figure of each run that has values."""
    figures = []
    for run in row.runs:
        scores = measure.scores(run).values()
        values = [value for _, value in scores]
        if values:
            figures.append(measure.fold(values))
    return figures


def _difference(row: SweepRow, sweep: Sweep, rows: Sequence[SweepRow], measure: Measure) -> Paired | None:
    """The difference from the row of reference, seed by seed; runs under different equalities are not compared."""
    reference = sweep.reference_of(row, rows)
    if reference is None or measure.kind != "percent":
        return None
    reference_runs = {cell.seed: cell.run for cell in reference.cells}
    before = []
    after = []
    for cell in row.cells:
        old = reference_runs.get(cell.seed)
        new = cell.run
        if old is None or new is None or old.equality != new.equality:
            continue
        before.append(measure.scores(old))
        after.append(measure.scores(new))
    return stats.difference(before, after, row.bootstrap_seed)


def _deviation_over_seeds(row: SweepRow, measure: Measure) -> float | None:
    return stats.deviation(_figures_by_run(row, measure))


def _row_equalities(row: SweepRow) -> str | None:
    equalities = dict.fromkeys(run.equality for run in row.runs)
    return ", ".join(equalities) or None


def _n_questions(row: SweepRow) -> float | None:
    """The questions of the seed that asked most; None if nothing was asked."""
    most = 0
    for run in row.runs:
        questions = {record.example_id for record in run.records}
        most = max(most, len(questions))
    return float(most) or None


def _conditions(row: SweepRow) -> str | None:
    """The different conditions of a row's cells, then the seeds of its runs."""
    conditions_of_cells = [cell.condition for cell in row.cells if cell.condition]
    conditions = list(dict.fromkeys(conditions_of_cells))
    seeds = dict.fromkeys(str(run.seed) for run in row.runs)
    if seeds:
        listed = ", ".join(seeds)
        conditions.append(f"seed {listed}")
    return "; ".join(conditions) or None


def _errors(row: SweepRow) -> str | None:
    """Each error once, with the seeds that it ended."""
    seeds_by_error: dict[str, list[str]] = {}
    for cell in row.cells:
        if cell.error:
            seeds = seeds_by_error.setdefault(cell.error, [])
            seeds.append(cell.seed)
    messages = []
    for error, seeds in seeds_by_error.items():
        message = error
        if seeds[0]:
            listed = ", ".join(seeds)
            message = f"seed {listed}: {error}"
        messages.append(message)
    return "; ".join(messages) or None


def _table_notes(sweep: Sweep) -> Iterator[str]:
    """The sentences under the table."""
    yield "Intervals are 95 %."
    baseline_values = sweep.baseline.items()
    has_baseline_row = any(baseline_values <= cell.values.items() for cell in sweep.cells)
    if sweep.baseline and has_baseline_row:
        baseline = sweep.baseline.get(ROW) or cell_title(sweep.baseline)
        references = [f"from {baseline}"]
        for name, other in sweep.against.items():
            references.append(f"of {name} from {other}")
        listed = ", ".join(references)
        yield f"The difference is {listed}, question by question."
    if len(sweep.seeds) > 1:
        seeds = ", ".join(sweep.seeds)
        yield f"Means over the seeds {seeds}; intervals hold the chance of both."
    if sweep.reported and BENCHMARK not in sweep.axes:
        first_benchmarks = [next(iter(by_benchmark), "") for by_benchmark in sweep.reported.values()]
        benchmarks = ", ".join(dict.fromkeys(first_benchmarks))
        yield f"The paper's figures are of {benchmarks}."


def verdict_table(sweep: Sweep) -> ReportTable:
    """The contrasts of the sweep's claim, each with its interval and its verdict."""
    columns = (
        TableColumn("contrast"),
        TableColumn("measure"),
        TableColumn("difference"),
        TableColumn("each seed"),
        TableColumn("could be shown", about="the smallest difference that so many questions show with 80 % power"),
        TableColumn("questions", "count"),
        TableColumn("verdict"),
    )
    if sweep.claim is None:
        return ReportTable("verdict", "", columns, ())
    rows = tuple(map(_verdict_row, sweep.contrasts))
    verdicts = [result.verdict for result in sweep.contrasts]
    overall = overall_verdict(verdicts)
    note = f"{overall}. {sweep.claim.reading}"
    return ReportTable("verdict", sweep.claim.text, columns, rows, note)


def _verdict_row(result: ContrastResult) -> tuple[Cell, ...]:
    unit = result.contrast.unit
    difference = None
    if result.difference is not None:
        difference = signed(result.difference, unit)
    detectable = None
    if result.detectable is not None:
        detectable = signed_number(result.detectable, unit).lstrip("+")
    differences = [signed_number(value, unit) for value in result.by_seed]
    by_seed = ", ".join(differences)
    return (
        result.contrast.says,
        contrast_measure(result.contrast),
        difference,
        by_seed or None,
        detectable,
        float(result.questions) or None,
        result.verdict,
    )


def contrast_measure(contrast: Contrast) -> str:
    """The measure of a contrast, in words: "EX", "EX at once against EX"."""
    words = measures.title(contrast.measure)
    if contrast.over_measure is not None:
        title_over = measures.title(contrast.over_measure)
        words += f" against {title_over}"
    if contrast.beyond is not None:
        title_beyond = measures.title(contrast.beyond)
        words += f", less that of {title_beyond}"
    return words


def curves(sweep: Sweep) -> dict[str, list[Line]]:
    """Each number of training that a row logged at two steps or more, with a line a row; those named come first.

    A line is the mean over seeds with the lowest and the highest seed, each smoothed; held-out accuracy's 95 % interval
    over the questions widens its band.
    """
    rows = sweep.rows()
    charts: dict[str, list[Line]] = {}
    for name in _curve_names(sweep, rows):
        lines = []
        for row in rows:
            points = _line_points(row, name)
            if len(points) > 1:
                lines.append(Line(row.name, points))
        if lines:
            charts[name] = lines
    return charts


def _curve_names(sweep: Sweep, rows: Sequence[SweepRow]) -> list[str]:
    """The numbers that were logged: those that the sweep names come first."""
    logged: dict[str, None] = {}
    for row in rows:
        for cell in row.cells:
            for step in cell.curves:
                logged |= dict.fromkeys(step)
    for name in ("step", N_HELD_OUT):
        logged.pop(name, None)
    names = [name for name in sweep.curves if name in logged]
    return list(dict.fromkeys([*names, *logged]))


def _line_points(row: SweepRow, name: str) -> tuple[LinePoint, ...]:
    """A number of a row's training at each step, as the points of a `Line`."""
    values_by_step: dict[float, list[float]] = {}
    n_questions: dict[float, int] = {}  # step -> held-out questions, for held-out accuracy
    for cell in row.cells:
        logged = curve_points(cell.curves, name)
        for step, value in smoothed(logged):
            values = values_by_step.setdefault(step, [])
            values.append(value)
        if name == HELD_OUT:
            for step, count in curve_points(cell.curves, N_HELD_OUT):
                n_questions[step] = int(count)
    points = []
    for step, values in sorted(values_by_step.items()):
        mean = math.fsum(values) / len(values)
        bounds = [*values, mean]
        n = n_questions.get(step, 0)
        if n:
            bounds += wilson(mean * n, n)
        point = (step, mean, min(bounds), max(bounds))
        points.append(point)
    return tuple(points)


def smoothed(values: Points) -> Points:
    """The moving average of a number, over a fifth of a short run."""
    if not values:
        return values
    first_step, _ = values[0]
    last_step, _ = values[-1]
    n_steps = int(last_step - first_step + 1)
    window = max(1, n_steps // 5)
    return moving_average(values, min(SMOOTH, window))
