"""The report's charts as inline SVG, drawn here so that they need no script and print as they look."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipelines.evaluation.curves import moving_average
from pipelines.evaluation.stats import Estimate
from pipelines.report import digits
from pipelines.report.page.html import Html, tag
from pipelines.report.page.svg import (
    STYLES,
    Frame,
    Scale,
    around,
    axis_x,
    band,
    canvas,
    grid_y,
    marker,
    polyline,
    text,
    ticks,
)

WIDE = 1072.0  # the page's column, in pixels
PERCENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One system's figure in a group of a chart."""

    style: int
    name: str
    estimate: Estimate | None


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Figures that belong together: one hardness level, one metric."""

    label: str
    note: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A point of a line, with its interval when it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One system's line."""

    style: int
    name: str
    points: tuple[Point, ...]


def _whole(share: float) -> str:
    return f"{100 * share:.0f}"


def _with_unit(share: float) -> str:
    return _whole(share) + (" %" if share == 1 else "")


def forest(groups: Sequence[Group], label: str) -> Html:
    """Shares with their intervals, group by group: dot and whisker, and the figures beside them."""
    left, right, pitch, gap = 170.0, 850.0, 21.0, 14.0
    height = sum(len(group.rows) * pitch + gap for group in groups) + 24
    frame = Frame(left, 4, right, height - 24)
    scale = Scale(0, 1, left, right)
    parts: list[Html] = [
        tag("line", x1=scale(mark), x2=scale(mark), y1=frame.top, y2=frame.bottom, class_="grid") for mark in PERCENTS
    ]
    y = frame.top + gap / 2
    for group in groups:
        middle = y + len(group.rows) * pitch / 2
        parts.append(text(0, middle + (0 if group.note else 4), group.label, "row-label"))
        parts.append(text(0, middle + 15, group.note, "row-note"))
        for row in group.rows:
            parts.append(_whisker(scale, y + pitch / 2, row))
            y += pitch
        y += gap
    parts.append(axis_x(scale, frame, PERCENTS, _with_unit, ""))
    return canvas(WIDE, height, label, parts, class_="wide")


def _whisker(scale: Scale, y: float, row: Row) -> Html:
    estimate = row.estimate
    if estimate is None:
        return text(WIDE - 122, y + 4, digits.NONE, "value", "end")
    figure = f"{digits.percent(estimate.value)} % {digits.interval(estimate)}"
    tip = f"{row.name}: {figure}, n = {estimate.n}, {estimate.method}"
    return tag(
        "g",
        tag("line", x1=scale(estimate.low), x2=scale(estimate.high), y1=y, y2=y, class_=_styled("whisker", row.style)),
        marker(scale(estimate.value), y, row.style, tip),
        text(WIDE - 122, y + 4, digits.percent(estimate.value), "value", "end"),
        text(WIDE, y + 4, digits.interval(estimate), "bounds", "end"),
    )


def curve_over_k(series: Sequence[Series], title: str, low: float, high: float) -> Html:
    """A share against the number of samples, on a doubling axis, with bands for the intervals."""
    width, height = 336.0, 236.0
    frame = Frame(34, 12, width - 12, height - 40)
    ks = sorted({point.x for line in series for point in line.points})
    across = Scale(ks[0], ks[-1], frame.left + 8, frame.right - 8, log2=True)
    up = Scale(low, high, frame.bottom, frame.top)
    parts = [grid_y(up, frame, ticks(low, high), _whole)]
    for line in series:
        at = [(across(point.x), up(point.y)) for point in line.points]
        bounded = [point for point in line.points if point.low is not None and point.high is not None]
        upper = [(across(point.x), up(min(point.high or 0, high))) for point in bounded]
        lower = [(across(point.x), up(max(point.low or 0, low))) for point in bounded]
        parts.append(band(upper, lower, _styled("band", line.style)))
        parts.append(polyline(at, _styled("line", line.style)))
        for point, (x, y) in zip(line.points, at, strict=True):
            bounds = f" [{digits.percent(point.low)}, {digits.percent(point.high)}]"
            parts.append(
                marker(x, y, line.style, f"{line.name}, k = {point.x:g}: {digits.percent(point.y)} %{bounds}", 3.6)
            )
    parts.append(axis_x(across, frame, ks, lambda k: f"{k:g}", "samples k"))
    return canvas(width, height, title, parts)


def _styled(kind: str, style: int) -> str:
    """The classes of a part that is drawn in a style; there are so many of them, and then they begin anew."""
    return f"{kind} s{style % STYLES}"


def training_curve(values: Sequence[tuple[float, float]], name: str, style: int) -> Html:
    """One number of training against its step: all steps faintly, their moving average firmly, its last value."""
    width, height = 246.0, 138.0
    frame = Frame(40, 10, width - 44, height - 26)
    low, high = around([y for _, y in values])
    across = Scale(values[0][0], values[-1][0], frame.left, frame.right)
    up = Scale(low, high, frame.bottom, frame.top)
    smooth = moving_average(values)
    at = [(across(x), up(y)) for x, y in smooth]
    last = digits.compact(smooth[-1][1])
    parts = [
        grid_y(up, frame, ticks(low, high, 3), digits.compact),
        polyline([(across(x), up(y)) for x, y in values], _styled("line faint", style)),
        polyline(at, _styled("line", style)),
        tag("circle", cx=at[-1][0], cy=at[-1][1], r=2.8, class_=_styled("mark", style), data_tip=f"{name}: {last}"),
        text(at[-1][0] + 6, at[-1][1] + 4, last, "end-value"),
        axis_x(across, frame, [values[0][0], values[-1][0]], lambda step: f"{step:g}", ""),
    ]
    label = f"{name} by step: from {digits.compact(values[0][1])} to {last}"
    return canvas(width, height, label, parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One system's count in a group: `share` is of its own total."""

    style: int
    name: str
    count: int
    share: float


def bars(groups: Sequence[tuple[str, str, Sequence[Bar]]], label: str) -> Html:
    """Counts side by side, group by group: (label, note, bars)."""
    left, pitch, gap = 230.0, 17.0, 14.0
    height = sum(len(members) * pitch + gap for _, _, members in groups) + 6
    most = max((bar.count for _, _, members in groups for bar in members), default=0) or 1
    scale = Scale(0, most, left, WIDE - 120)
    parts: list[Html] = [tag("line", x1=left, x2=left, y1=2, y2=height - 4, class_="axis")]
    y = 8.0
    for name, note, members in groups:
        middle = y + len(members) * pitch / 2
        parts += [text(0, middle, name, "row-label"), text(0, middle + 15, note, "row-note")]
        for bar in members:
            tip = f"{bar.name}: {bar.count} ({digits.percent(bar.share)} % of its wrong answers)"
            parts.append(
                tag(
                    "rect",
                    x=left,
                    y=y + 2,
                    width=max(scale(bar.count) - left, 0.5),
                    height=pitch - 5,
                    rx=2,
                    class_=_styled("bar", bar.style),
                    data_tip=tip,
                )
            )
            words = f"{digits.count(bar.count)}  ·  {digits.percent(bar.share)} %"
            parts.append(text(scale(bar.count) + 8, y + pitch / 2 + 3.5, words, "bounds"))
            y += pitch
        y += gap
    return canvas(WIDE, height, label, parts, class_="wide")


def turns(groups: Sequence[tuple[str, Sequence[tuple[int, str, float, float]]]], label: str) -> Html:
    """Mean turns group by group, as dots whose tail ends at the 95th percentile: (style, system, mean, 95th)."""
    left, right, pitch, gap = 170.0, 850.0, 21.0, 14.0
    height = sum(len(members) * pitch + gap for _, members in groups) + 38
    most = max((p95 for _, members in groups for _, _, _, p95 in members), default=1.0)
    scale = Scale(0, max(most, 1.0), left, right)
    frame = Frame(left, 4, right, height - 38)
    marks = ticks(0, scale.high, 5)
    parts: list[Html] = [
        tag("line", x1=scale(mark), x2=scale(mark), y1=frame.top, y2=frame.bottom, class_="grid") for mark in marks
    ]
    y = frame.top + gap / 2
    for name, members in groups:
        parts.append(text(0, y + len(members) * pitch / 2 + 4, name, "row-label"))
        for style, system, mean, p95 in members:
            middle = y + pitch / 2
            tip = f"{system}: {mean:.2f} turns on average, 95 % take at most {p95:g}"
            parts.append(
                tag("line", x1=scale(mean), x2=scale(p95), y1=middle, y2=middle, class_=_styled("tail", style))
            )
            parts.append(marker(scale(mean), middle, style, tip))
            parts.append(text(WIDE - 122, middle + 4, f"{mean:.2f}", "value", "end"))
            parts.append(text(WIDE, middle + 4, f"95 % ≤ {p95:g}", "bounds", "end"))
            y += pitch
        y += gap
    parts.append(axis_x(scale, frame, marks, lambda mark: f"{mark:g}", "turns"))
    return canvas(WIDE, height, label, parts, class_="wide")


def histogram(rates: Sequence[float], label: str) -> Html:
    """How many questions have each pass rate: a bar for each that occurs, or twelve bins when more do."""
    width, height = 500.0, 200.0
    frame = Frame(44, 18, width - 8, height - 38)
    names, counts = _bins(rates)
    up = Scale(0, around([0, max(counts)])[1], frame.bottom, frame.top)
    slot = (frame.right - frame.left) / len(counts)
    parts = [grid_y(up, frame, ticks(0, up.high), digits.count)]
    for index, (name, number) in enumerate(zip(names, counts, strict=True)):
        x = frame.left + index * slot
        tip = f"pass rate {name}: {number} questions"
        edge = " edge" if index in (0, len(counts) - 1) else ""
        bar = {"x": x + slot * 0.12, "y": up(number), "width": slot * 0.76, "height": frame.bottom - up(number)}
        parts.append(tag("rect", rx=2, class_=f"bar s1{edge}", data_tip=tip, **bar))
        parts.append(text(x + slot / 2, up(number) - 5, digits.count(number), "end-value", "middle"))
        parts.append(text(x + slot / 2, frame.bottom + 15, name, "tick", "middle"))
    parts.append(tag("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis"))
    parts.append(text(frame.right, frame.bottom + 32, "pass rate of the policy after SFT", "axis-label", "end"))
    return canvas(width, height, label, parts)


def _bins(rates: Sequence[float]) -> tuple[list[str], list[int]]:
    distinct = sorted(set(rates))
    if len(distinct) <= 12:
        return [f"{rate:.2g}" for rate in distinct], [sum(rate == height for rate in rates) for height in distinct]
    edges = [min(int(rate * 12), 11) for rate in rates]
    return [f"{index / 12:.2f}+" for index in range(12)], [edges.count(index) for index in range(12)]


@dataclasses.dataclass(frozen=True, slots=True)
class Dot:
    """A point of a cloud: a system's cost and accuracy on one slice of the questions, and a letter for the slice."""

    style: int
    name: str
    label: str
    mark: str
    x: float
    y: float


def cloud(dots: Sequence[Dot], unit: str) -> Html:
    """Accuracy against cost; each system's slices are joined in their order."""
    width, height = 500.0, 280.0
    frame = Frame(38, 10, width - 14, height - 40)
    high = around([0, *(dot.x for dot in dots)])[1]
    across, up = Scale(0, high, frame.left, frame.right), Scale(0, 1, frame.bottom, frame.top)
    parts = [grid_y(up, frame, PERCENTS, _whole), axis_x(across, frame, ticks(0, high), digits.count, unit)]
    for style in dict.fromkeys(dot.style for dot in dots):
        mine = [dot for dot in dots if dot.style == style]
        parts.append(polyline([(across(dot.x), up(dot.y)) for dot in mine], _styled("line faint", style)))
        for dot in mine:
            tip = f"{dot.name}, {dot.label}: {digits.percent(dot.y)} % at {digits.count(dot.x)} {unit}"
            parts.append(marker(across(dot.x), up(dot.y), style, tip))
            parts.append(text(across(dot.x), up(dot.y) - 8, dot.mark, "tick", "middle"))
    return canvas(width, height, f"EX against {unit}", parts)
