"""The page of a sweep: its table, a chart of its rows, the errors of cells that failed, and curves of several runs."""

import dataclasses
from collections.abc import Sequence

from pipelines.evaluation import measures
from pipelines.evaluation.measures import Measure
from pipelines.evaluation.stats import Estimate
from pipelines.report import charts, formats
from pipelines.report.page import render
from pipelines.sweeps import sweep_table
from pipelines.sweeps.sweep_table import Line, Sweep

STYLES = ("page.css", "sweep.css")
SCRIPTS = ("dom.js", "page.js")
ERROR_CHARS = 60  # of an error in the table; the section below has it whole
COLOURS = 6  # of page.css; a seventh line is the first colour again, with dashes


def page(result: Sweep) -> str:
    """The sweep as one HTML document that asks nothing of the network."""
    curves = sweep_table.curves(result)
    names = [row.name for row in result.rows()]
    with_curves = {line.row for lines in curves.values() for line in lines}
    sections = {
        "verdict": result.claim and "Verdict",
        "table": "Table",
        "failed": any(cell.error for cell in result.cells) and "Failed",
        "absent": result.absent and "Absent",
        "curves": curves and "Curves",
    }
    source = sweep_table.table(result)
    share = next((of for of in map(measures.measure, result.measures) if of.kind == "percent"), None)
    errors = [str(row[-1] or "") for row in source.rows]
    short = [error[:ERROR_CHARS] + "…" if len(error) > ERROR_CHARS else error for error in errors]
    rows = tuple((*row[:-1], error or None) for row, error in zip(source.rows, short, strict=True))
    drawn = {name: (name.replace("_", " "), chart(lines, name, names)) for name, lines in curves.items()}
    return render(
        "sweep.html",
        STYLES,
        SCRIPTS,
        title=result.title,
        sweep=result,
        names=names,
        sections={identifier: name for identifier, name in sections.items() if name},
        verdicts=sweep_table.verdicts(result),
        rows=dataclasses.replace(source, rows=rows),
        first=measures.title(share.name) if share is not None else "",
        chart_of_rows=rows_chart(result, share) if share is not None else None,
        has_held_out=sweep_table.HELD_OUT in curves,
        legend=[  # of the rows that trained something
            (charts.canvas(22, 14, "", charts.polyline([(1, 7), (21, 7)], line_class(place)), class_="key"), name)
            for place, name in enumerate(names)
            if name in with_curves
        ],
        first_curves=[drawn[name] for name in result.curves if name in curves],
        other_curves=[drawn[name] for name in curves if name not in result.curves],
    )


def rows_chart(result: Sweep, of: Measure) -> charts.Html:
    """A share of each row as a dot with its interval."""
    groups = []
    for row in result.rows():
        estimate = sweep_table.figure(row, of)
        row_shown = charts.ChartRow(1, row.name, estimate if isinstance(estimate, Estimate) else None)
        groups.append(charts.Group(row.name, "", (row_shown,)))
    return charts.forest(groups, f"{measures.title(of.name)} of each row")


def line_class(place: int) -> str:
    """The colour of a row by its place among the rows."""
    return f"line s{place % COLOURS}" + (" dashed" if place // COLOURS % 2 else "")


def chart(lines: Sequence[Line], name: str, names: Sequence[str]) -> charts.Html:
    """One number of training of several runs against the step; each line and its band has its row's name. The places of
    all rows, `names`, are their colours.
    """
    width, height = 500.0, 250.0
    frame = charts.Frame(44, 10, width - 12, height - 38)
    low, high = charts.around([bound for line in lines for _, _, *bounds in line.points for bound in bounds])
    steps = [step for line in lines for step, *_ in line.points]
    across = charts.Scale(min(steps), max(steps), frame.left, frame.right)
    up = charts.Scale(low, high, frame.bottom, frame.top)
    marks = [mark for mark in charts.ticks(min(steps), max(steps)) if mark == int(mark)]
    parts: list[charts.Child] = [charts.grid_y(up, frame, charts.ticks(low, high), formats.compact)]
    for line in lines:
        place = names.index(line.row)
        upper = [(across(step), up(highest)) for step, _, _, highest in line.points]
        lower = [(across(step), up(lowest)) for step, _, lowest, _ in line.points]
        has_spread = any(highest > lowest for _, _, lowest, highest in line.points)
        parts.append(
            charts.tag(
                "g",
                charts.band(upper, lower, f"band s{place % COLOURS}") if has_spread else None,
                charts.polyline([(across(step), up(mean)) for step, mean, _, _ in line.points], line_class(place)),
                data_tip=f"{line.row}: {formats.compact(line.points[-1][1])} at step {line.points[-1][0]:g}",
            )
        )
    parts.append(charts.axis_x(across, frame, marks, lambda step: f"{step:g}", "step"))
    ends = "; ".join(f"{line.row} {formats.compact(line.points[-1][1])}" for line in lines)
    return charts.canvas(width, height, f"{name} by step, at the end: {ends}", parts)
