"""The report's charts as inline SVG, drawn here so that they need no script and print as they look."""

import html
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pipelines.evaluation.measures import moving_average
from pipelines.evaluation.stats import Estimate
from pipelines.report import formats

# HTML that cannot be broken out of: every text is escaped unless it was built here.

VOID = frozenset({"meta", "link", "input", "circle", "rect", "line", "path", "polyline"})
# JSON inside <script> ends at "</script" whatever the quotes say, and a stray "<!--" changes how the rest is read.
_IN_SCRIPT = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class Html(str):
    """Markup that is already safe."""

    __slots__ = ()

    def __html__(self) -> str:
        """The same, for templates that escape everything else."""
        return self


Child = str | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """An element. Plain strings are escaped; None children and None or False attributes are left out.

    An attribute's trailing underscore is dropped and others become hyphens: `class_="a"`, `data_tip="b"`.
    """
    opening = f"<{name}"
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")
        opening += f" {attribute}"
        if value is not True:
            opening += f'="{html.escape(text_of(value))}"'
    if name in VOID:
        return Html(f"{opening}/>")
    return Html(f"{opening}>{join(*children)}</{name}>")


def text_of(value: str | float) -> str:
    """A value as text; coordinates need no more than two decimals."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    return f"{value:.2f}".rstrip("0").rstrip(".")


def join(*children: Child) -> Html:
    """Children side by side."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(html.escape(text_of(child), quote=False))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def data(identifier: str, value: Any) -> Html:
    """JSON for scripts of the page, as an inert block that no text inside can end."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in _IN_SCRIPT.items():
        text = text.replace(character, escape)
    return Html(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


# The grammar of the charts: scales, ticks, axes, markers. Colours are classes, so that the page's theme rules them.

STYLES = 6  # s0 to s5: each a colour and a marker shape, so that colour alone carries nothing
HOLLOW = (4, 5)  # styles that repeat the shapes of s0 and s1


Position = tuple[float, float]  # x and y of a point, in pixels


class Scale(NamedTuple):
    """Maps values onto pixels; `log2` for sample counts."""

    low: float
    high: float
    start: float
    end: float
    log2: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; the middle if the range is a single value."""
        low = self.low
        high = self.high
        if self.log2:
            low = math.log2(low)
            high = math.log2(high)
            value = math.log2(value)
        share = 0.5
        if high > low:
            share = (value - low) / (high - low)
        return self.start + share * (self.end - self.start)


class Frame(NamedTuple):
    """The plotting area of a chart, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span a range, at steps of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def around(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds all values, widened to round ticks."""
    low = min(values)
    high = max(values)
    if low == high:
        margin = abs(low) / 2
        low = low - margin - 1e-9
        high = high + margin + 1e-9
    marks = ticks(low, high)
    step = high - low
    if len(marks) > 1:
        step = marks[1] - marks[0]
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def canvas(width: float, height: float, label: str, *children: Child, class_: str = "") -> Html:
    """A chart; `label` is its text for a screen reader."""
    return tag(
        "svg",
        *children,
        viewbox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=label,
        class_=f"chart {class_}".strip(),
    )


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Html:
    """Words at a point."""
    return tag("text", words, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def segment(start: Position, end: Position, class_: str) -> Html:
    """A straight line between two points."""
    return tag("line", x1=start[0], x2=end[0], y1=start[1], y2=end[1], class_=class_)


def grid_y(scale: Scale, frame: Frame, marks: Iterable[float], show: Callable[[float], str]) -> Html:
    """Horizontal grid lines with their values at the left."""
    lines = []
    for mark in marks:
        y = scale(mark)
        lines.append(segment((frame.left, y), (frame.right, y), "grid"))
        lines.append(text(frame.left - 6, y + 3.5, show(mark), "tick", "end"))
    return tag("g", lines)


def grid_x(scale: Scale, frame: Frame, marks: Iterable[float]) -> list[Html]:
    """Vertical grid lines."""
    lines = []
    for mark in marks:
        x = scale(mark)
        lines.append(segment((x, frame.top), (x, frame.bottom), "grid"))
    return lines


def axis_x(scale: Scale, frame: Frame, marks: Iterable[float], show: Callable[[float], str], label: str) -> Html:
    """Values under the plot, and their label."""
    axis = [segment((frame.left, frame.bottom), (frame.right, frame.bottom), "axis")]
    for mark in marks:
        axis.append(text(scale(mark), frame.bottom + 15, show(mark), "tick", "middle"))
    if label:
        axis.append(text(frame.right, frame.bottom + 30, label, "axis-label", "end"))
    return tag("g", axis)


def marker(x: float, y: float, style: int, tip: str = "", size: float = 4.5) -> Html:
    """A system's mark: circle, square, diamond, triangle, and the first two hollow; `tip` shows on hover and focus."""
    shape = style % STYLES
    class_ = f"mark s{shape}"
    if shape in HOLLOW:
        class_ += " hollow"
    data_tip = tip or None
    if shape in (0, 4):
        return tag("circle", cx=x, cy=y, r=size, class_=class_, data_tip=data_tip)
    if shape in (1, 5):
        side = size * 1.75
        return tag("rect", x=x - side / 2, y=y - side / 2, width=side, height=side, class_=class_, data_tip=data_tip)
    reach = size * 1.3
    if shape == 2:
        corners = [(0, -reach), (reach, 0), (0, reach), (-reach, 0)]
    else:
        corners = [(0, -reach), (reach, size), (-reach, size)]
    outline = _closed_path([(x + dx, y + dy) for dx, dy in corners])
    return tag("path", d=outline, class_=class_, data_tip=data_tip)


def polyline(points: Sequence[Position], class_: str) -> Html:
    """A line through points."""
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def band(upper: Sequence[Position], lower: Sequence[Position], class_: str) -> Html:
    """The area between two lines."""
    return tag("path", d=_closed_path([*upper, *reversed(lower)]), class_=class_)


def _closed_path(corners: Sequence[Position]) -> str:
    return "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in corners) + " Z"


# Sizes are in pixels.
WIDE = 1072.0  # the page's column
FIGURES_LEFT = 850.0  # the right end of the plots that have figures beside them
FIGURE_END = WIDE - 122
ROW_HEIGHT = 21.0
BAR_HEIGHT = 17.0
GROUP_GAP = 14.0
PERCENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
BINS = 12  # bars of a histogram of many different rates


class ChartRow(NamedTuple):
    """One system's figure in a group of a chart."""

    style: int
    name: str
    estimate: Estimate | None


class Group(NamedTuple):
    """Figures that belong together: one hardness level, one metric."""

    label: str
    note: str
    rows: tuple[ChartRow, ...]


class Point(NamedTuple):
    """A point of a line, with its interval when it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


class Series(NamedTuple):
    """One system's line."""

    style: int
    name: str
    points: tuple[Point, ...]


def _whole_percent(share: float) -> str:
    return f"{100 * share:.0f}"


def forest(groups: Sequence[Group], label: str) -> Html:
    """Shares with their intervals, group by group: dot and whisker, and the figures beside them."""
    longest_label = max((len(group.label) for group in groups), default=0)
    left = max(170.0, min(400.0, 16 + 7.6 * longest_label))
    height = sum(len(group.rows) * ROW_HEIGHT + GROUP_GAP for group in groups) + 24
    frame = Frame(left, 4, FIGURES_LEFT, height - 24)
    scale = Scale(0, 1, frame.left, frame.right)
    drawing = grid_x(scale, frame, PERCENTS)
    y = frame.top + GROUP_GAP / 2
    for group in groups:
        middle = y + len(group.rows) * ROW_HEIGHT / 2
        label_y = middle if group.note else middle + 4
        drawing.append(text(0, label_y, group.label, "row-label"))
        drawing.append(text(0, middle + 15, group.note, "row-note"))
        for row in group.rows:
            drawing.append(_forest_row(row, y + ROW_HEIGHT / 2, scale))
            y += ROW_HEIGHT
        y += GROUP_GAP
    drawing.append(axis_x(scale, frame, PERCENTS, _percent_on_axis, ""))
    return canvas(WIDE, height, label, drawing, class_="wide")


def _forest_row(row: ChartRow, y: float, scale: Scale) -> Html:
    estimate = row.estimate
    if estimate is None:
        return text(FIGURE_END, y + 4, formats.NONE, "value", "end")
    percent = formats.percent(estimate.value)
    interval = formats.interval(estimate)
    tip = f"{row.name}: {percent} % {interval}, n = {estimate.n}, {estimate.method}"
    whisker = _styled("whisker", row.style)
    return tag(
        "g",
        segment((scale(estimate.low), y), (scale(estimate.high), y), whisker),
        marker(scale(estimate.value), y, row.style, tip),
        text(FIGURE_END, y + 4, percent, "value", "end"),
        text(WIDE, y + 4, interval, "bounds", "end"),
    )


def _percent_on_axis(share: float) -> str:
    return f"{_whole_percent(share)} %" if share == 1 else _whole_percent(share)


def curve_over_k(series: Sequence[Series], title: str, low: float, high: float) -> Html:
    """A share against the number of samples, on a doubling axis, with bands for the intervals."""
    width = 336.0
    height = 236.0
    frame = Frame(34, 12, width - 12, height - 40)
    ks = sorted({point.x for line in series for point in line.points})
    across = Scale(ks[0], ks[-1], frame.left + 8, frame.right - 8, log2=True)
    up = Scale(low, high, frame.bottom, frame.top)
    drawing = [grid_y(up, frame, ticks(low, high), _whole_percent)]
    for line in series:
        middle = []
        lower = []
        upper = []
        markers = []
        for point in line.points:
            x = across(point.x)
            y = up(point.y)
            middle.append((x, y))
            if point.low is not None and point.high is not None:
                lower.append((x, up(max(point.low, low))))
                upper.append((x, up(min(point.high, high))))
            bounds = f"[{formats.percent(point.low)}, {formats.percent(point.high)}]"
            tip = f"{line.name}, k = {point.x:g}: {formats.percent(point.y)} % {bounds}"
            markers.append(marker(x, y, line.style, tip, 3.6))
        drawing.append(band(upper, lower, _styled("band", line.style)))
        drawing.append(polyline(middle, _styled("line", line.style)))
        drawing += markers
    drawing.append(axis_x(across, frame, ks, lambda k: f"{k:g}", "samples k"))
    return canvas(width, height, title, drawing)


def _styled(kind: str, style: int) -> str:
    """The classes of an element in a style; numbers beyond the last style begin anew."""
    return f"{kind} s{style % STYLES}"


def training_curve(values: Sequence[tuple[float, float]], name: str, style: int) -> Html:
    """One number of training against its step: all steps faintly, their moving average firmly, its last value."""
    width = 246.0
    height = 138.0
    frame = Frame(40, 10, width - 44, height - 26)
    first_step = values[0][0]
    last_step = values[-1][0]
    low, high = around([value for _, value in values])
    across = Scale(first_step, last_step, frame.left, frame.right)
    up = Scale(low, high, frame.bottom, frame.top)
    smooth = moving_average(values)
    every_step = [(across(step), up(value)) for step, value in values]
    averages = [(across(step), up(value)) for step, value in smooth]
    end_x, end_y = averages[-1]
    last = formats.compact(smooth[-1][1])
    drawing = [
        grid_y(up, frame, ticks(low, high, 3), formats.compact),
        polyline(every_step, _styled("line faint", style)),
        polyline(averages, _styled("line", style)),
        tag("circle", cx=end_x, cy=end_y, r=2.8, class_=_styled("mark", style), data_tip=f"{name}: {last}"),
        text(end_x + 6, end_y + 4, last, "end-value"),
        axis_x(across, frame, [first_step, last_step], lambda step: f"{step:g}", ""),
    ]
    label = f"{name} by step: from {formats.compact(values[0][1])} to {last}"
    return canvas(width, height, label, drawing)


class Bar(NamedTuple):
    """One system's count in a group."""

    style: int
    name: str
    number: int
    share: float  # share of the system's total, in [0, 1]


def bars(groups: Sequence[tuple[str, str, Sequence[Bar]]], label: str) -> Html:
    """Counts side by side, group by group: (label, note, bars)."""
    left = 230.0
    height = sum(len(members) * BAR_HEIGHT + GROUP_GAP for _, _, members in groups) + 6
    highest = max((bar.number for _, _, members in groups for bar in members), default=0)
    scale = Scale(0, highest or 1, left, WIDE - 120)
    drawing = [segment((left, 2), (left, height - 4), "axis")]
    y = 8.0
    for name, note, members in groups:
        middle = y + len(members) * BAR_HEIGHT / 2
        drawing.append(text(0, middle, name, "row-label"))
        drawing.append(text(0, middle + 15, note, "row-note"))
        for bar in members:
            end = scale(bar.number)
            share = f"{formats.percent(bar.share)} %"
            drawing.append(
                tag(
                    "rect",
                    x=left,
                    y=y + 2,
                    width=max(end - left, 0.5),
                    height=BAR_HEIGHT - 5,
                    rx=2,
                    class_=_styled("bar", bar.style),
                    data_tip=f"{bar.name}: {bar.number} ({share} of its wrong answers)",
                )
            )
            words = f"{formats.count(bar.number)}  ·  {share}"
            drawing.append(text(end + 8, y + BAR_HEIGHT / 2 + 3.5, words, "bounds"))
            y += BAR_HEIGHT
        y += GROUP_GAP
    return canvas(WIDE, height, label, drawing, class_="wide")


def turns(groups: Sequence[tuple[str, Sequence[tuple[int, str, float, float]]]], label: str) -> Html:
    """Mean turns group by group, as dots whose tail ends at the 95th percentile: (style, system, mean, 95th)."""
    height = sum(len(members) * ROW_HEIGHT + GROUP_GAP for _, members in groups) + 38
    frame = Frame(170.0, 4, FIGURES_LEFT, height - 38)
    longest = max((p95 for _, members in groups for _, _, _, p95 in members), default=1.0)
    scale = Scale(0, max(longest, 1.0), frame.left, frame.right)
    marks = ticks(0, scale.high, 5)
    drawing = grid_x(scale, frame, marks)
    y = frame.top + GROUP_GAP / 2
    for name, members in groups:
        drawing.append(text(0, y + len(members) * ROW_HEIGHT / 2 + 4, name, "row-label"))
        for style, system, mean, p95 in members:
            middle = y + ROW_HEIGHT / 2
            tip = f"{system}: {mean:.2f} turns on average, 95 % take at most {p95:g}"
            drawing.append(segment((scale(mean), middle), (scale(p95), middle), _styled("tail", style)))
            drawing.append(marker(scale(mean), middle, style, tip))
            drawing.append(text(FIGURE_END, middle + 4, f"{mean:.2f}", "value", "end"))
            drawing.append(text(WIDE, middle + 4, f"95 % ≤ {p95:g}", "bounds", "end"))
            y += ROW_HEIGHT
        y += GROUP_GAP
    drawing.append(axis_x(scale, frame, marks, lambda mark: f"{mark:g}", "turns"))
    return canvas(WIDE, height, label, drawing, class_="wide")


def histogram(rates: Sequence[float], label: str) -> Html:
    """How many questions have each pass rate: a bar for each that occurs, or twelve bins when more do."""
    width = 500.0
    height = 200.0
    frame = Frame(44, 18, width - 8, height - 38)
    counts = _counts_by_rate(rates)
    last = len(counts) - 1
    _, top_of_axis = around([0, max(number for _, number in counts)])
    up = Scale(0, top_of_axis, frame.bottom, frame.top)
    slot = (frame.right - frame.left) / len(counts)
    drawing = [grid_y(up, frame, ticks(0, up.high), formats.count)]
    for index, (name, number) in enumerate(counts):
        left = frame.left + index * slot
        middle = left + slot / 2
        top = up(number)
        classes = "bar s1"
        if index in (0, last):
            classes += " edge"
        drawing.append(
            tag(
                "rect",
                rx=2,
                class_=classes,
                data_tip=f"pass rate {name}: {number} questions",
                x=left + slot * 0.12,
                y=top,
                width=slot * 0.76,
                height=frame.bottom - top,
            )
        )
        drawing.append(text(middle, top - 5, formats.count(number), "end-value", "middle"))
        drawing.append(text(middle, frame.bottom + 15, name, "tick", "middle"))
    drawing.append(segment((frame.left, frame.bottom), (frame.right, frame.bottom), "axis"))
    drawing.append(text(frame.right, frame.bottom + 32, "pass rate of the policy after SFT", "axis-label", "end"))
    return canvas(width, height, label, drawing)


def _counts_by_rate(rates: Sequence[float]) -> list[tuple[str, int]]:
    """The bars of a histogram, from left to right: (name, number of questions)."""
    distinct = sorted(set(rates))
    if len(distinct) <= BINS:
        return [(f"{rate:.2g}", rates.count(rate)) for rate in distinct]
    bins = [min(int(rate * BINS), BINS - 1) for rate in rates]
    return [(f"{index / BINS:.2f}+", bins.count(index)) for index in range(BINS)]


class Dot(NamedTuple):
    """A point of a cloud: a system's cost and accuracy on one slice of the questions, and a letter for the slice."""

    style: int
    name: str
    label: str
    mark: str
    x: float
    y: float


def cloud(dots: Sequence[Dot], unit: str) -> Html:
    """Accuracy against cost; each system's slices are joined in their order."""
    width = 500.0
    height = 280.0
    frame = Frame(38, 10, width - 14, height - 40)
    _, highest_cost = around([0, *(dot.x for dot in dots)])
    across = Scale(0, highest_cost, frame.left, frame.right)
    up = Scale(0, 1, frame.bottom, frame.top)
    drawing = [
        grid_y(up, frame, PERCENTS, _whole_percent),
        axis_x(across, frame, ticks(0, highest_cost), formats.count, unit),
    ]
    for style in dict.fromkeys(dot.style for dot in dots):
        system_dots = [dot for dot in dots if dot.style == style]
        line = [(across(dot.x), up(dot.y)) for dot in system_dots]
        drawing.append(polyline(line, _styled("line faint", style)))
        for dot, (x, y) in zip(system_dots, line, strict=True):
            tip = f"{dot.name}, {dot.label}: {formats.percent(dot.y)} % at {formats.count(dot.x)} {unit}"
            drawing.append(marker(x, y, style, tip))
            drawing.append(text(x, y - 8, dot.mark, "tick", "middle"))
    return canvas(width, height, f"EX against {unit}", drawing)
