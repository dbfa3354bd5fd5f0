"""The page of a sweep: its table, a chart of its rows, the errors of cells that failed, and curves of several runs."""

import dataclasses
from collections.abc import Mapping, Sequence

from pipelines.evaluation import measures
from pipelines.evaluation.measures import Measure
from pipelines.evaluation.stats import Estimate
from pipelines.report import charts, formats
from pipelines.report.formats import ReportTable
from pipelines.report.page import render
from pipelines.sweeps import sweep_table
from pipelines.sweeps.sweep_table import Line, Sweep

STYLES = ("page.css", "sweep.css")
SCRIPTS = ("dom.js", "page.js")
ERROR_CHARS = 60  # longest error in the table; the section "failed" has it in full
COLOURS = 6  # colours in page.css; a seventh line is the first colour again, with dashes
SAMPLE_POINTS = ((1, 7), (21, 7))  # the line of a legend's entry


def render_sweep(result: Sweep) -> str:
    """The sweep as one HTML document that asks nothing of the network."""
    curves = sweep_table.curves(result)
    row_names = [row.name for row in result.rows()]
    share = first_share(result)
    share_title = ""
    chart_of_rows = None
    if share is not None:
        share_title = measures.title(share.name)
        chart_of_rows = rows_chart(result, share)
    figures = {}
    for name, lines in curves.items():
        title = name.replace("_", " ")
        drawing = chart(lines, name, row_names)
        figures[name] = (title, drawing)
    first_curves = [figures[name] for name in result.curves if name in figures]
    other_curves = [figure for name, figure in figures.items() if name not in result.curves]
    return render(
        "sweep.html",
        STYLES,
        SCRIPTS,
        title=result.title,
        sweep=result,
        names=row_names,
        sections=_section_titles(result, bool(curves)),
        verdicts=sweep_table.verdict_table(result),
        rows=_with_short_errors(sweep_table.table(result)),
        first=share_title,
        chart_of_rows=chart_of_rows,
        has_held_out=sweep_table.HELD_OUT in curves,
        legend=_legend(curves, row_names),
        first_curves=first_curves,
        other_curves=other_curves,
    )


def _section_titles(result: Sweep, has_curves: bool) -> dict[str, str]:
    """The titles of the sections that have something to show, by their anchors."""
    titles = {}
    if result.claim is not None:
        titles["verdict"] = "Verdict"
    titles["table"] = "Table"
    if any(cell.error for cell in result.cells):
        titles["failed"] = "Failed"
    if result.absent:
        titles["absent"] = "Absent"
    if has_curves:
        titles["curves"] = "Curves"
    return titles


def first_share(sweep: Sweep) -> Measure | None:
    """The first of a sweep's measures that is a share, of which its rows are a chart; None without a share."""
    for name in sweep.measures:
        measure = measures.measure(name)
        if measure.kind == "percent":
            return measure
    return None


def _with_short_errors(table: ReportTable) -> ReportTable:
    """The table with its last column, the errors, cut to a length that a cell can hold."""
    rows = []
    for *cells, last_cell in table.rows:
        error = str(last_cell or "")
        if len(error) > ERROR_CHARS:
            error = error[:ERROR_CHARS] + "…"
        rows.append((*cells, error or None))
    return dataclasses.replace(table, rows=tuple(rows))


def _legend(curves: Mapping[str, Sequence[Line]], row_names: Sequence[str]) -> list[tuple[charts.Html, str]]:
    """A sample line and a name for each row that trained something."""
    rows_with_curves: set[str] = set()
    for lines in curves.values():
        rows_with_curves.update(line.row for line in lines)
    entries = []
    for number, name in enumerate(row_names):
        if name not in rows_with_curves:
            continue
        sample = charts.polyline(SAMPLE_POINTS, line_class(number))
        canvas = charts.canvas(22, 14, "", sample, class_="key")
        entries.append((canvas, name))
    return entries


def rows_chart(result: Sweep, measure: Measure) -> charts.Html:
    """A share of each row as a dot with its interval."""
    groups = []
    for row in result.rows():
        figure = sweep_table.figure(row, measure)
        estimate = figure if isinstance(figure, Estimate) else None
        chart_row = charts.ChartRow(1, row.name, estimate)
        groups.append(charts.Group(row.name, "", (chart_row,)))
    return charts.forest(groups, f"{measures.title(measure.name)} of each row")


def line_class(number: int) -> str:
    """The colour of a row by its number among the rows."""
    classes = f"line s{number % COLOURS}"
    if number // COLOURS % 2:
        classes += " dashed"
    return classes


def chart(lines: Sequence[Line], name: str, row_names: Sequence[str]) -> charts.Html:
    """One number of training against the step, a line and its band for each row that logged it.

    Args:
        row_names: names of all rows; a row's colour is its place among them.
    """
    width = 500.0
    height = 250.0
    frame = charts.Frame(44, 10, width - 12, height - 38)
    steps = []
    bounds = []
    for line in lines:
        for step, _, lowest, highest in line.points:
            steps.append(step)
            bounds += [lowest, highest]
    low, high = charts.around(bounds)
    across = charts.Scale(min(steps), max(steps), frame.left, frame.right)
    up = charts.Scale(low, high, frame.bottom, frame.top)
    grid = charts.grid_y(up, frame, charts.ticks(low, high), formats.compact)
    drawing: list[charts.Child] = [grid]
    ends = []
    for line in lines:
        row_number = row_names.index(line.row)
        drawing.append(_line_with_band(line, row_number, across, up))
        _, last_mean, _, _ = line.points[-1]
        ends.append(f"{line.row} {formats.compact(last_mean)}")
    marks = charts.ticks(min(steps), max(steps))
    whole_steps = [mark for mark in marks if mark == int(mark)]
    axis = charts.axis_x(across, frame, whole_steps, charts.number_on_axis, "step")
    drawing.append(axis)
    ends_in_words = "; ".join(ends)
    label = f"{name} by step, at the end: {ends_in_words}"
    return charts.canvas(width, height, label, drawing)


def _line_with_band(line: Line, row_number: int, across: charts.Scale, up: charts.Scale) -> charts.Html:
    middle = []
    lower = []
    upper = []
    has_spread = False
    for step, mean, lowest, highest in line.points:
        x = across(step)
        middle.append((x, up(mean)))
        lower.append((x, up(lowest)))
        upper.append((x, up(highest)))
        if highest > lowest:
            has_spread = True
    band = None
    if has_spread:
        band = charts.band(upper, lower, f"band s{row_number % COLOURS}")
    last_step, last_mean, _, _ = line.points[-1]
    tip = f"{line.row}: {formats.compact(last_mean)} at step {last_step:g}"
    mean_line = charts.polyline(middle, line_class(row_number))
    return charts.tag("g", band, mean_line, data_tip=tip)
