"""What a sweep came to: its cells as rows that average over seeds, one table, and curves of several runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pipelines.evaluation import measures, stats
from pipelines.evaluation.measures import SMOOTH, FinishedEvaluation, Measure, Points, curve_points, moving_average
from pipelines.evaluation.stats import Estimate, Paired, wilson
from pipelines.report import formats
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.sweeps import claims
from pipelines.sweeps.claims import Claim, Contrast, ContrastResult

SEED = "seed"  # the axis that a row averages over
BENCHMARK, ROW = "benchmark", "row"
MEASURES = ("greedy", "majority", "turns")  # of a sweep that names none
CURVES = ("reward", "ex", "turns")  # that the page shows first
HELD_OUT, ASKED = "ex_held_out", "questions_held_out"  # curves: accuracy on held-out questions, and of how many
Reported = Mapping[str, Mapping[str, Mapping[str, float]]]  # row -> benchmark -> measure -> the paper's own figure


@dataclasses.dataclass(frozen=True)
class FinishedCell:
    """A cell that was made, or the error that it ended with."""

    values: Mapping[str, str]  # on each axis
    run: FinishedEvaluation | None = None  # its evaluation; None if it failed
    curves: tuple[Mapping[str, float], ...] = ()  # its training's numbers, a step a row
    error: str = ""
    condition: str = ""  # who taught and judged it, and which schema it is asked with

    @property
    def name(self) -> str:
        """Its values in the order of the axes."""
        return cell_title(self.values)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All cells of a sweep."""

    title: str
    cells: tuple[FinishedCell, ...]
    baseline: Mapping[str, str] = dataclasses.field(default_factory=dict)  # axis and value of the row of reference
    measures: tuple[str, ...] = MEASURES  # the table's columns; the difference is of the first
    curves: tuple[str, ...] = CURVES  # that the page's charts show first
    reported: Reported = dataclasses.field(default_factory=dict)  # a paper's own figures, percent for shares
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)  # rows that no cell fills, and why
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)  # such as the command
    claim: Claim | None = None  # the claim that the rows test
    against: Mapping[str, str] = dataclasses.field(default_factory=dict)  # row -> its own row of reference

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that rows differ by."""
        return tuple(axis for axis in self.cells[0].values if axis != SEED)

    @property
    def seeds(self) -> tuple[str, ...]:
        """The values of the axis that rows average over; () without such an axis."""
        return tuple(dict.fromkeys(cell.values[SEED] for cell in self.cells if SEED in cell.values))

    def rows(self) -> list[SweepRow]:
        """The rows in the order of their first cells."""
        groups: dict[tuple[str, ...], list[FinishedCell]] = {}
        for cell in self.cells:
            groups.setdefault(tuple(cell.values[axis] for axis in self.axes), []).append(cell)
        rows = []
        for values, cells in groups.items():
            runs = tuple(cell.run for cell in cells if cell.run is not None)
            name, seed = ", ".join(values) or "the recipe", runs[0].seed if runs else 0
            rows.append(SweepRow(name, dict(zip(self.axes, values, strict=True)), tuple(cells), runs, seed))
        return rows


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """Cells that differ in their seed alone."""

    name: str  # its values without the axes' names, for legends and charts
    values: Mapping[str, str]
    cells: tuple[FinishedCell, ...]
    runs: tuple[FinishedEvaluation, ...]  # of those cells that were made
    seed: int  # of the bootstraps of its figures


@dataclasses.dataclass(frozen=True)
class Line:
    """One number of a row's training: (step, mean over seeds, lowest, highest) at each step."""

    row: str
    points: tuple[tuple[float, float, float, float], ...]


def cell_title(values: Mapping[str, str]) -> str:
    """A cell's values as one text: "variant=no_turns seed=1"."""
    return " ".join(f"{axis}={value}" for axis, value in values.items())


def table(sweep: Sweep) -> ReportTable:
    """A row for each combination of the axes' values, averaged over seeds, and the paper's figures if it has any."""
    chosen = [measures.measure(name) for name in sweep.measures]
    has_seeds, rows = len(sweep.seeds) > 1, sweep.rows()
    reported = {name for benchmarks in sweep.reported.values() for figures in benchmarks.values() for name in figures}
    columns = [TableColumn(axis) for axis in sweep.axes]
    for place, measure in enumerate(chosen):
        heading = measures.title(measure.name)
        share = measure.kind == "percent"
        columns.append(TableColumn(heading, "estimate" if share else "mean"))
        if measure.name in reported:
            columns.append(TableColumn(f"{heading}, paper", "percent" if share else "mean", "the paper's own figure"))
        if not place:
            about = "from the baseline's row, question by question, in points"
            columns.append(TableColumn("difference", "difference", about))
        if not place and has_seeds:
            kind: formats.Kind = "percent" if share else "mean"
            about = f"sample deviation of the seeds' {heading}{', in points' if share else ''}"
            columns.append(TableColumn("deviation", kind, about))
    columns += [TableColumn("seeds", "count", "that were made")] if has_seeds else []
    columns += [TableColumn("equality"), TableColumn("questions", "count")]
    columns += [TableColumn("condition"), TableColumn("error")]

    notes = ["Intervals are 95 %."]
    if sweep.baseline and any(sweep.baseline.items() <= cell.values.items() for cell in sweep.cells):
        baseline = sweep.baseline.get(ROW) or cell_title(sweep.baseline)
        others = [f"of {name} from {other}" for name, other in sweep.against.items()]
        notes.append(f"The difference is {', '.join([f'from {baseline}', *others])}, question by question.")
    if has_seeds:
        notes.append(f"Means over the seeds {', '.join(sweep.seeds)}; intervals hold the chance of both.")
    if sweep.reported and BENCHMARK not in sweep.axes:
        named_first = dict.fromkeys(next(iter(benchmarks), "") for benchmarks in sweep.reported.values())
        notes.append(f"The paper's figures are of {', '.join(named_first)}.")
    cells = []
    for row in rows:
        line: list[Cell] = [*row.values.values()]
        for place, measure in enumerate(chosen):
            line.append(figure(row, measure))
            if measure.name in reported:  # of the first benchmark that it names, if the sweep has no axis of them
                by_benchmark = sweep.reported.get(row.values.get(ROW, ""), {})
                benchmark = row.values.get(BENCHMARK) or next(iter(by_benchmark), "")
                value = by_benchmark.get(benchmark, {}).get(measure.name)
                line.append(value / 100 if value is not None and measure.kind == "percent" else value)
            if place:
                continue
            # From the row that differs in the baseline's axis alone, seed by seed; None for that one itself.
            values = {**row.values, **sweep.baseline}
            if ROW in sweep.baseline and row.values.get(ROW, "") in sweep.against:
                values[ROW] = sweep.against[row.values[ROW]]
            first = next((other for other in rows if sweep.baseline and dict(other.values) == values), None)
            difference: Paired | None = None
            if first is not None and first is not row and measure.kind == "percent":
                before = {cell.values.get(SEED): cell.run for cell in first.cells}
                pairs = [(before.get(cell.values.get(SEED)), cell.run) for cell in row.cells]
                both = [(old, new) for old, new in pairs if old and new and old.equality == new.equality]
                olds, news = [measure.scores(old) for old, _ in both], [measure.scores(new) for _, new in both]
                difference = stats.difference(olds, news, row.seed)
            line += [difference, *([stats.deviation(_folded(row, measure))] if has_seeds else [])]
        line += [float(len(row.runs))] if has_seeds else []
        asked = (len({record.example_id for record in run.records}) for run in row.runs)
        numbers = ", ".join(dict.fromkeys(str(run.seed) for run in row.runs))
        conditions = dict.fromkeys(cell.condition for cell in row.cells if cell.condition)
        # Each error once, with the seeds that it ended.
        errors: dict[str, list[str]] = {}
        for cell in row.cells:
            if cell.error:
                errors.setdefault(cell.error, []).append(cell.values.get(SEED, ""))
        faults = [f"seed {', '.join(at)}: {message}" if at[0] else message for message, at in errors.items()]
        line += [
            ", ".join(dict.fromkeys(run.equality for run in row.runs)) or None,
            float(max(asked, default=0)) or None,
            "; ".join([*conditions, *([f"seed {numbers}"] if numbers else [])]) or None,
            "; ".join(faults) or None,
        ]
        cells.append(tuple(line))
    return ReportTable("sweep", sweep.title, tuple(columns), tuple(cells), " ".join(notes))


def contrast_results(sweep: Sweep) -> list[ContrastResult]:
    """The result of each contrast of the sweep's claim; none of a sweep without a claim."""
    if sweep.claim is None:
        return []
    runs: dict[str, dict[str, FinishedEvaluation]] = {}
    for cell in sweep.cells:
        if cell.run is not None:
            runs.setdefault(cell.values[ROW], {})[cell.values.get(SEED, "")] = cell.run
    return claims.decide_contrasts(sweep.claim, runs, sweep.seeds or ("",))


def verdicts(sweep: Sweep) -> ReportTable:
    """The contrasts of the sweep's claim, each with its interval and its verdict."""
    parts = contrast_results(sweep)
    columns = (
        TableColumn("contrast"),
        TableColumn("measure"),
        TableColumn("difference"),
        TableColumn("each seed"),
        TableColumn("could be shown", about="the smallest difference that so many questions show with 80 % power"),
        TableColumn("questions", "count"),
        TableColumn("verdict"),
    )
    rows: list[tuple[Cell, ...]] = []
    for part in parts:
        contrast, unit = part.contrast, part.contrast.unit
        rows.append(
            (
                contrast.says,
                contrast_measure(contrast),
                formats.signed(part.difference, unit) if part.difference is not None else None,
                ", ".join(formats.signed_number(value, unit) for value in part.by_seed) or None,
                formats.signed_number(part.detectable, unit).lstrip("+") if part.detectable is not None else None,
                float(part.questions) or None,
                part.verdict,
            )
        )
    if sweep.claim is None:
        return ReportTable("verdict", "", columns, ())
    note = f"{claims.overall_verdict([part.verdict for part in parts])}. {sweep.claim.reading}"
    return ReportTable("verdict", sweep.claim.text, columns, tuple(rows), note)


def contrast_measure(contrast: Contrast) -> str:
    """The measure of a contrast, in words: "EX", "EX at once against EX"."""
    names = [contrast.measure, *([contrast.over_measure] if contrast.over_measure is not None else [])]
    words = " against ".join(map(measures.title, names))
    return words if contrast.beyond is None else f"{words}, less that of {measures.title(contrast.beyond)}"


def figure(row: SweepRow, of: Measure) -> Estimate | float | None:
    """A row's figure: a share with its interval, or the mean over seeds of a count; None if no run has it."""
    if of.kind == "percent":
        return stats.mean([of.scores(run) for run in row.runs], row.seed)
    values = _folded(row, of)
    return math.fsum(values) / len(values) if values else None


def _folded(row: SweepRow, of: Measure) -> list[float]:
    """The figure of each run that has values."""
    by_run = ([value for _, value in of.scores(run).values()] for run in row.runs)
    return [of.fold(values) for values in by_run if values]


def curves(sweep: Sweep) -> dict[str, list[Line]]:
    """Each number of training that a row logged at two steps or more, with a line a row; those named come first.

    A line is the mean over seeds with the lowest and the highest seed, each smoothed; held-out accuracy's 95 % interval
    over the questions widens its band.
    """
    charts: dict[str, list[Line]] = {}
    rows = sweep.rows()
    names = dict.fromkeys(name for row in rows for cell in row.cells for step in cell.curves for name in step)
    ordered = [name for name in sweep.curves if name in names] + [name for name in names if name not in sweep.curves]
    for name in ordered:
        for row in rows if name not in ("step", ASKED) else ():
            at: dict[float, list[float]] = {}
            asked: dict[float, int] = {}
            for cell in row.cells:
                for step, value in smoothed(curve_points(cell.curves, name)):
                    at.setdefault(step, []).append(value)
                if name == HELD_OUT:
                    asked |= {step: int(n) for step, n in curve_points(cell.curves, ASKED)}
            points = []
            for step, values in sorted(at.items()):
                mean = math.fsum(values) / len(values)
                band = wilson(mean * asked[step], asked[step]) if asked.get(step) else ()
                points.append((step, mean, min(*values, mean, *band), max(*values, mean, *band)))
            if len(points) > 1:
                charts.setdefault(name, []).append(Line(row.name, tuple(points)))
    return charts


def smoothed(values: Points) -> Points:
    """The moving average of a number, over a fifth of a short run."""
    steps = values[-1][0] - values[0][0] + 1 if values else 0
    return moving_average(values, min(SMOOTH, max(1, int(steps) // 5)))
