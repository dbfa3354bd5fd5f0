"""The page of a sweep: its table, a chart of its rows, the errors of cells that failed, and curves of several runs."""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence

from pipelines.evaluation import measures
from pipelines.evaluation.measures import Measure
from pipelines.evaluation.stats import Estimate
from pipelines.report import charts, formats
from pipelines.report.charts import (
    Child,
    Frame,
    Html,
    Scale,
    around,
    axis_x,
    band,
    canvas,
    grid_y,
    join,
    polyline,
    tag,
    ticks,
)
from pipelines.report.page import KEYS, bar, section, shell, table
from pipelines.sweeps import sweep_table
from pipelines.sweeps.sweep_table import Line, Sweep

STYLES = ("page.css", "sweep.css")
SCRIPTS = ("dom.js", "page.js")
ERROR_CHARS = 60  # of an error in the table; the section below has it whole
COLOURS = 6  # of page.css; a seventh line is the first colour again, with dashes


def page(result: Sweep) -> str:
    """The sweep as one HTML document that asks nothing of the network."""
    parts = list(_sections(result))
    return shell(
        f"{result.title} – sweep",
        bar(result.title, [(identifier, name) for identifier, name, _ in parts]),
        tag("main", _hero(result), [markup for _, _, markup in parts], _method(result), id="main"),
        KEYS,
        styles=STYLES,
        scripts=SCRIPTS,
    )


def _hero(result: Sweep) -> Html:
    failed = sum(bool(cell.error) for cell in result.cells)
    what = f"{len(result.cells)} cells in {len(result.rows())} rows" + (f", {failed} of them failed" if failed else "")
    facts = [tag("div", tag("dt", label), tag("dd", value)) for label, value in result.facts.items()]
    return tag(
        "div",
        tag("p", "Sweep", class_="eyebrow"),
        tag("h1", result.title),
        tag("p", f"{what}.", class_="summary"),
        tag("dl", facts, class_="facts") if facts else None,
        class_="hero",
    )


def _sections(result: Sweep) -> Iterator[tuple[str, str, Html]]:
    """(id, short name, markup) of every section that has something to show."""
    if result.claim is not None:
        source = sweep_table.verdicts(result)
        heading = tag("p", f"{result.claim.text} ({result.claim.source})", class_="about")
        markup = join(heading, table(source, caption=False), tag("p", source.note, class_="about"))
        yield "verdict", "Verdict", section("verdict", "The verdict", markup)
    yield "table", "Table", section("table", "The table", _table(result), _rows(result))
    if any(cell.error for cell in result.cells):
        yield "failed", "Failed", section("failed", "Cells that failed", _pairs(_errors(result)))
    if result.absent:
        yield (
            "absent",
            "Absent",
            section("absent", "Rows of the paper that no cell fills", _pairs(result.absent.items())),
        )
    curves = sweep_table.curves(result)
    if curves:
        yield "curves", "Curves", _curves(result, curves)


def _table(result: Sweep) -> Html:
    """The table under its note: a wide one scrolls, and would take its caption along."""
    source = sweep_table.table(result)
    rows = tuple((*row[:-1], _cut(row[-1])) for row in source.rows)
    markup = table(dataclasses.replace(source, rows=rows), caption=False)
    return join(tag("p", source.note, class_="about"), markup)


def _cut(error: object) -> str | None:
    return str(error)[:ERROR_CHARS] + ("…" if len(str(error)) > ERROR_CHARS else "") if error else None


def _rows(result: Sweep) -> Html | None:
    """The first share of the table as dots with their intervals, a row each."""
    chosen = first_share(result)
    if chosen is None:
        return None
    return tag("figure", tag("figcaption", f"{measures.title(chosen.name)}, in percent"), rows_chart(result, chosen))


def first_share(result: Sweep) -> Measure | None:
    """The first measure of a sweep that is a share."""
    return next((of for of in map(measures.measure, result.measures) if of.kind == "percent"), None)


def rows_chart(result: Sweep, of: Measure) -> Html:
    """A share of each row as a dot with its interval."""
    groups = []
    for row in result.rows():
        estimate = sweep_table.figure(row, of)
        row_shown = charts.ChartRow(1, row.name, estimate if isinstance(estimate, Estimate) else None)
        groups.append(charts.Group(row.name, "", (row_shown,)))
    return charts.forest(groups, f"{measures.title(of.name)} of each row")


def _errors(result: Sweep) -> Iterator[tuple[str, str]]:
    yield from ((cell.name, cell.error) for cell in result.cells if cell.error)


def _pairs(items: Iterable[tuple[str, str]]) -> Html:
    return tag("dl", [(tag("dt", name), tag("dd", words)) for name, words in items], class_="pairs")


def _curves(result: Sweep, curves: dict[str, list[Line]]) -> Html:
    names = [row.name for row in result.rows()]
    first = [name for name in result.curves if name in curves]
    rest = [name for name in curves if name not in first]
    words = "Moving averages by step." + (
        " Bands: from the lowest seed to the highest." if len(result.seeds) > 1 else ""
    )
    if sweep_table.HELD_OUT in curves:
        words += " The band of held-out accuracy holds its 95 % interval over the questions."
    more = tag("details", tag("summary", f"{len(rest)} more"), _multiples(rest, curves, names)) if rest else None
    return section(
        "curves",
        "Training curves",
        tag("p", words, class_="about"),
        _legend(names, {line.row for lines in curves.values() for line in lines}),
        _multiples(first, curves, names),
        more,
    )


def _multiples(chosen: Sequence[str], curves: dict[str, list[Line]], names: Sequence[str]) -> Html:
    figures: list[Child] = [
        tag("figure", tag("figcaption", name.replace("_", " ")), chart(curves[name], name, names)) for name in chosen
    ]
    return tag("div", figures, class_="multiples wide")


def _legend(names: Sequence[str], curves: Container[str]) -> Html:
    """Which line is which row's; rows that trained nothing have none."""
    items = []
    for place, name in enumerate(names):
        if name not in curves:
            continue
        sample = canvas(22, 14, "", polyline([(1, 7), (21, 7)], line_class(place)), class_="key")
        items.append(tag("li", sample, name))
    return tag("ul", items, class_="legend")


def line_class(place: int) -> str:
    """The colour of a row by its place among the rows."""
    return f"line s{place % COLOURS}" + (" dashed" if place // COLOURS % 2 else "")


def chart(lines: Sequence[Line], name: str, names: Sequence[str]) -> Html:
    """One number of training of several runs against the step; each line and its band says whose it is.

    Args:
        names: all rows, whose places are their colours.
    """
    width, height = 500.0, 250.0
    frame = Frame(44, 10, width - 12, height - 38)
    low, high = around([bound for line in lines for _, _, *bounds in line.points for bound in bounds])
    steps = [step for line in lines for step, *_ in line.points]
    across, up = Scale(min(steps), max(steps), frame.left, frame.right), Scale(low, high, frame.bottom, frame.top)
    marks = [mark for mark in ticks(min(steps), max(steps)) if mark == int(mark)]
    parts: list[Child] = [grid_y(up, frame, ticks(low, high), formats.compact)]
    for line in lines:
        parts.append(_drawn(line, names.index(line.row), across, up))
    parts.append(axis_x(across, frame, marks, lambda step: f"{step:g}", "step"))
    ends = "; ".join(f"{line.row} {formats.compact(line.points[-1][1])}" for line in lines)
    return canvas(width, height, f"{name} by step, at the end: {ends}", parts)


def _drawn(line: Line, place: int, across: Scale, up: Scale) -> Html:
    at = [(across(step), up(mean)) for step, mean, _, _ in line.points]
    spread = any(highest > lowest for _, _, lowest, highest in line.points)
    upper = [(across(step), up(highest)) for step, _, _, highest in line.points]
    lower = [(across(step), up(lowest)) for step, _, lowest, _ in line.points]
    return tag(
        "g",
        band(upper, lower, f"band s{place % COLOURS}") if spread else None,
        polyline(at, line_class(place)),
        data_tip=f"{line.row}: {formats.compact(line.points[-1][1])} at step {line.points[-1][0]:g}",
    )


def _method(result: Sweep) -> Html:
    notes = [
        "A row is one value of each axis; cells that differ in their seed alone are averaged.",
        "Intervals of one run are those of its report. Of several, databases and seeds are resampled, each for itself; "
        "with two or three seeds, the deviation beside says as much.",
        "The difference is of the same questions, seed by seed, from the baseline's row.",
    ]
    if result.reported:
        notes.append("The paper's figures are as it prints them: its models, its benchmarks and its data.")
    return section("method", "How the figures are made", tag("ul", [tag("li", note) for note in notes], class_="notes"))
