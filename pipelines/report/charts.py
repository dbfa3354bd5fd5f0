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
        if value is not None and value is not False:
            opening += f" {key.rstrip('_').replace('_', '-').replace('viewbox', 'viewBox')}"
            opening += "" if value is True else f'="{html.escape(text_of(value))}"'
    return Html(f"{opening}/>" if name in VOID else f"{opening}>{join(*children)}</{name}>")


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


class Scale(NamedTuple):
    """Maps values onto pixels; `log2` for sample counts."""

    low: float
    high: float
    start: float
    end: float
    log2: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = map(math.log2, (self.low, self.high, value)) if self.log2 else (self.low, self.high, value)
        share = (at - low) / (high - low) if high > low else 0.5
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
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def around(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds all values, widened to round ticks."""
    low, high = min(values), max(values)
    if low == high:
        low, high = (low - abs(low) / 2 - 1e-9, high + abs(high) / 2 + 1e-9)
    marks = ticks(low, high)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def canvas(width: float, height: float, label: str, *children: Child, class_: str = "") -> Html:
    """A chart; `label` is its text for a screen reader."""
    box, classes = f"0 0 {width:g} {height:g}", f"chart {class_}".strip()
    return tag("svg", *children, viewbox=box, width=width, height=height, role="img", aria_label=label, class_=classes)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> Html:
    """Words at a point."""
    return tag("text", words, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def grid_y(scale: Scale, frame: Frame, marks: Iterable[float], show: Callable[[float], str]) -> Html:
    """Horizontal grid lines with their values at the left."""
    lines = (
        (
            tag("line", x1=frame.left, x2=frame.right, y1=scale(mark), y2=scale(mark), class_="grid"),
            text(frame.left - 6, scale(mark) + 3.5, show(mark), "tick", "end"),
        )
        for mark in marks
    )
    return tag("g", lines)


def axis_x(scale: Scale, frame: Frame, marks: Iterable[float], show: Callable[[float], str], label: str) -> Html:
    """Values under the plot, and their label."""
    return tag(
        "g",
        tag("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis"),
        [text(scale(mark), frame.bottom + 15, show(mark), "tick", "middle") for mark in marks],
        text(frame.right, frame.bottom + 30, label, "axis-label", "end") if label else None,
    )


def marker(x: float, y: float, style: int, tip: str = "", size: float = 4.5) -> Html:
    """A system's mark: circle, square, diamond, triangle, and the first two hollow; `tip` shows on hover and focus."""
    shape, class_ = style % STYLES, f"mark s{style % STYLES}" + (" hollow" if style % STYLES > 3 else "")
    tip_or_none = tip or None
    if shape in (0, 4):
        return tag("circle", cx=x, cy=y, r=size, class_=class_, data_tip=tip_or_none)
    if shape in (1, 5):
        side = size * 1.75
        return tag("rect", x=x - side / 2, y=y - side / 2, width=side, height=side, class_=class_, data_tip=tip_or_none)
    reach = size * 1.3
    corners = (
        [(0, -reach), (reach, 0), (0, reach), (-reach, 0)]
        if shape == 2
        else [(0, -reach), (reach, size), (-reach, size)]
    )
    path = "M" + " L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners) + " Z"
    return tag("path", d=path, class_=class_, data_tip=tip_or_none)


def polyline(points: Sequence[tuple[float, float]], class_: str) -> Html:
    """A line through points."""
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def band(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], class_: str) -> Html:
    """The area between two lines."""
    corners = [*upper, *reversed(lower)]
    return tag("path", d="M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in corners) + " Z", class_=class_)


WIDE = 1072.0  # the page's column, in pixels
PERCENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


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


def _whole(share: float) -> str:
    return f"{100 * share:.0f}"


def forest(groups: Sequence[Group], label: str) -> Html:
    """Shares with their intervals, group by group: dot and whisker, and the figures beside them."""
    left = max(170.0, min(400.0, 16 + 7.6 * max((len(group.label) for group in groups), default=0)))
    right, pitch, gap = 850.0, 21.0, 14.0
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
            at, estimate = y + pitch / 2, row.estimate
            y += pitch
            if estimate is None:
                parts.append(text(WIDE - 122, at + 4, formats.NONE, "value", "end"))
                continue
            low, high, whisker = scale(estimate.low), scale(estimate.high), _styled("whisker", row.style)
            figure = f"{formats.percent(estimate.value)} % {formats.interval(estimate)}"
            tip = f"{row.name}: {figure}, n = {estimate.n}, {estimate.method}"
            drawn = (
                tag("line", x1=low, x2=high, y1=at, y2=at, class_=whisker),
                marker(scale(estimate.value), at, row.style, tip),
                text(WIDE - 122, at + 4, formats.percent(estimate.value), "value", "end"),
                text(WIDE, at + 4, formats.interval(estimate), "bounds", "end"),
            )
            parts.append(tag("g", *drawn))
        y += gap
    parts.append(axis_x(scale, frame, PERCENTS, lambda share: _whole(share) + (" %" if share == 1 else ""), ""))
    return canvas(WIDE, height, label, parts, class_="wide")


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
            bounds = f"[{formats.percent(point.low)}, {formats.percent(point.high)}]"
            tip = f"{line.name}, k = {point.x:g}: {formats.percent(point.y)} % {bounds}"
            parts.append(marker(x, y, line.style, tip, 3.6))
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
    last = formats.compact(smooth[-1][1])
    parts = [
        grid_y(up, frame, ticks(low, high, 3), formats.compact),
        polyline([(across(x), up(y)) for x, y in values], _styled("line faint", style)),
        polyline(at, _styled("line", style)),
        tag("circle", cx=at[-1][0], cy=at[-1][1], r=2.8, class_=_styled("mark", style), data_tip=f"{name}: {last}"),
        text(at[-1][0] + 6, at[-1][1] + 4, last, "end-value"),
        axis_x(across, frame, [values[0][0], values[-1][0]], lambda step: f"{step:g}", ""),
    ]
    label = f"{name} by step: from {formats.compact(values[0][1])} to {last}"
    return canvas(width, height, label, parts)


class Bar(NamedTuple):
    """One system's count in a group: `share` is of its own total."""

    style: int
    name: str
    number: int
    share: float


def bars(groups: Sequence[tuple[str, str, Sequence[Bar]]], label: str) -> Html:
    """Counts side by side, group by group: (label, note, bars)."""
    left, pitch, gap = 230.0, 17.0, 14.0
    height = sum(len(members) * pitch + gap for _, _, members in groups) + 6
    most = max((bar.number for _, _, members in groups for bar in members), default=0) or 1
    scale = Scale(0, most, left, WIDE - 120)
    parts: list[Html] = [tag("line", x1=left, x2=left, y1=2, y2=height - 4, class_="axis")]
    y = 8.0
    for name, note, members in groups:
        middle = y + len(members) * pitch / 2
        parts += [text(0, middle, name, "row-label"), text(0, middle + 15, note, "row-note")]
        for bar in members:
            tip = f"{bar.name}: {bar.number} ({formats.percent(bar.share)} % of its wrong answers)"
            box = {"x": left, "y": y + 2, "width": max(scale(bar.number) - left, 0.5), "height": pitch - 5}
            parts.append(tag("rect", **box, rx=2, class_=_styled("bar", bar.style), data_tip=tip))
            words = f"{formats.count(bar.number)}  ·  {formats.percent(bar.share)} %"
            parts.append(text(scale(bar.number) + 8, y + pitch / 2 + 3.5, words, "bounds"))
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
            tail = _styled("tail", style)
            parts.append(tag("line", x1=scale(mean), x2=scale(p95), y1=middle, y2=middle, class_=tail))
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
    distinct = sorted(set(rates))
    if len(distinct) <= 12:
        names, counts = [f"{rate:.2g}" for rate in distinct], [rates.count(rate) for rate in distinct]
    else:
        edges = [min(int(rate * 12), 11) for rate in rates]
        names, counts = [f"{index / 12:.2f}+" for index in range(12)], [edges.count(index) for index in range(12)]
    up = Scale(0, around([0, max(counts)])[1], frame.bottom, frame.top)
    slot = (frame.right - frame.left) / len(counts)
    parts = [grid_y(up, frame, ticks(0, up.high), formats.count)]
    for index, (name, number) in enumerate(zip(names, counts, strict=True)):
        x = frame.left + index * slot
        tip = f"pass rate {name}: {number} questions"
        edge = " edge" if index in (0, len(counts) - 1) else ""
        bar = {"x": x + slot * 0.12, "y": up(number), "width": slot * 0.76, "height": frame.bottom - up(number)}
        parts.append(tag("rect", rx=2, class_=f"bar s1{edge}", data_tip=tip, **bar))
        parts.append(text(x + slot / 2, up(number) - 5, formats.count(number), "end-value", "middle"))
        parts.append(text(x + slot / 2, frame.bottom + 15, name, "tick", "middle"))
    parts.append(tag("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis"))
    parts.append(text(frame.right, frame.bottom + 32, "pass rate of the policy after SFT", "axis-label", "end"))
    return canvas(width, height, label, parts)


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
    width, height = 500.0, 280.0
    frame = Frame(38, 10, width - 14, height - 40)
    high = around([0, *(dot.x for dot in dots)])[1]
    across, up = Scale(0, high, frame.left, frame.right), Scale(0, 1, frame.bottom, frame.top)
    parts = [grid_y(up, frame, PERCENTS, _whole), axis_x(across, frame, ticks(0, high), formats.count, unit)]
    for style in dict.fromkeys(dot.style for dot in dots):
        mine = [dot for dot in dots if dot.style == style]
        parts.append(polyline([(across(dot.x), up(dot.y)) for dot in mine], _styled("line faint", style)))
        for dot in mine:
            tip = f"{dot.name}, {dot.label}: {formats.percent(dot.y)} % at {formats.count(dot.x)} {unit}"
            parts.append(marker(across(dot.x), up(dot.y), style, tip))
            parts.append(text(across(dot.x), up(dot.y) - 8, dot.mark, "tick", "middle"))
    return canvas(width, height, f"EX against {unit}", parts)
