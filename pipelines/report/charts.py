"""The report's charts as inline SVG, drawn here so that they need no script and print as they look."""

import html
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
        attribute = key.rstrip("_").replace("_", "-")
        attribute = attribute.replace("viewbox", "viewBox")
        opening += f" {attribute}"
        if value is not True:
            escaped = html.escape(text_of(value))
            opening += f'="{escaped}"'
    if name in VOID:
        return Html(f"{opening}/>")
    content = join(*children)
    return Html(f"{opening}>{content}</{name}>")


def text_of(value: str | float) -> str:
    """A value as text; coordinates need no more than two decimals."""
    if isinstance(value, str):
        return value.replace("\x00", "\ufffd")
    decimals = f"{value:.2f}"
    return decimals.rstrip("0").rstrip(".")


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
    escaped_id = html.escape(identifier)
    return Html(f'<script type="application/json" id="{escaped_id}">{text}</script>')


# The grammar of the charts: scales, ticks, axes, markers. Colours are classes, so that the page's theme rules them.

NEAR = 1e-9  # share of their size by which values differ from rounding alone
STYLES = 6  # s0 to s5: each a colour and a marker shape, so that colour alone carries nothing
HOLLOW = (4, 5)  # styles that repeat the shapes of s0 and s1


Position = tuple[float, float]  # x and y of a point, in pixels
Positions = Sequence[Position]
Show = Callable[[float], str]  # a value of an axis as text


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
    exponent = math.floor(math.log10(rough))
    power = 10.0**exponent
    candidates = [factor * power for factor in (1, 2, 2.5, 5, 10)]
    step = next(candidate for candidate in candidates if candidate >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    digits = 1 - exponent  # a step has two at most
    return [round(index * step, digits) for index in range(first, last + 1)]


def around(values: Sequence[float]) -> tuple[float, float]:
    """A range that holds all values, widened to round ticks; values that differ by rounding alone count as equal."""
    low = min(values)
    high = max(values)
    margin = abs(low) / 2 + NEAR
    if high - low <= NEAR * margin:
        low -= margin
        high += margin
    marks = ticks(low, high)
    step = high - low
    if len(marks) > 1:
        step = marks[1] - marks[0]
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return first * step, last * step


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
    x1, y1 = start
    x2, y2 = end
    return tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=class_)


def horizontal(left: float, right: float, y: float, class_: str) -> Html:
    """A line from left to right."""
    return segment((left, y), (right, y), class_)


def grid_y(scale: Scale, frame: Frame, marks: Iterable[float], show: Show) -> Html:
    """Horizontal grid lines with their values at the left."""
    lines = []
    for mark in marks:
        y = scale(mark)
        line = horizontal(frame.left, frame.right, y, "grid")
        value = text(frame.left - 6, y + 3.5, show(mark), "tick", "end")
        lines += [line, value]
    return tag("g", lines)


def grid_x(scale: Scale, frame: Frame, marks: Iterable[float]) -> list[Html]:
    """Vertical grid lines."""
    lines = []
    for mark in marks:
        x = scale(mark)
        line = segment((x, frame.top), (x, frame.bottom), "grid")
        lines.append(line)
    return lines


def axis_x(scale: Scale, frame: Frame, marks: Iterable[float], show: Show, label: str) -> Html:
    """Values under the plot, and their label."""
    axis = [horizontal(frame.left, frame.right, frame.bottom, "axis")]
    for mark in marks:
        x = scale(mark)
        value = text(x, frame.bottom + 15, show(mark), "tick", "middle")
        axis.append(value)
    if label:
        title = text(frame.right, frame.bottom + 30, label, "axis-label", "end")
        axis.append(title)
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
        left = x - side / 2
        top = y - side / 2
        return tag("rect", x=left, y=top, width=side, height=side, class_=class_, data_tip=data_tip)
    reach = size * 1.3
    peak = (x, y - reach)
    left = x - reach
    right = x + reach
    if shape == 2:
        corners = [peak, (right, y), (x, y + reach), (left, y)]
    else:
        foot = y + size
        corners = [peak, (right, foot), (left, foot)]
    return tag("path", d=_closed_path(corners), class_=class_, data_tip=data_tip)


def polyline(points: Positions, class_: str) -> Html:
    """A line through points."""
    positions = [f"{x:.1f},{y:.1f}" for x, y in points]
    return tag("polyline", points=" ".join(positions), class_=class_)


def band(upper: Positions, lower: Positions, class_: str) -> Html:
    """The area between two lines."""
    outline = [*upper, *reversed(lower)]
    return tag("path", d=_closed_path(outline), class_=class_)


def _closed_path(corners: Positions) -> str:
    positions = [f"{x:.1f} {y:.1f}" for x, y in corners]
    steps = " L".join(positions)
    return f"M{steps} Z"


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
    label_lengths = [len(group.label) for group in groups]
    longest_label = max(label_lengths, default=0)
    width_of_labels = 16 + 7.6 * longest_label
    left = max(170.0, min(400.0, width_of_labels))
    sizes = [len(group.rows) for group in groups]
    height = _height_of_rows(sizes, ROW_HEIGHT) + 24
    frame = Frame(left, 4, FIGURES_LEFT, height - 24)
    scale = Scale(0, 1, frame.left, frame.right)
    drawing = grid_x(scale, frame, PERCENTS)
    y = frame.top + GROUP_GAP / 2
    for group in groups:
        middle = y + len(group.rows) * ROW_HEIGHT / 2
        label_y = middle
        if not group.note:
            label_y = middle + 4
        drawing.append(text(0, label_y, group.label, "row-label"))
        drawing.append(text(0, middle + 15, group.note, "row-note"))
        for row in group.rows:
            drawing.append(_forest_row(row, y + ROW_HEIGHT / 2, scale))
            y += ROW_HEIGHT
        y += GROUP_GAP
    drawing.append(axis_x(scale, frame, PERCENTS, _percent_on_axis, ""))
    return canvas(WIDE, height, label, drawing, class_="wide")


def _height_of_rows(sizes: Iterable[int], row_height: float) -> float:
    """The height of groups of so many rows each, with the gaps between them."""
    return sum(size * row_height + GROUP_GAP for size in sizes)


def _forest_row(row: ChartRow, y: float, scale: Scale) -> Html:
    estimate = row.estimate
    if estimate is None:
        return text(FIGURE_END, y + 4, formats.NONE, "value", "end")
    percent = formats.percent(estimate.value)
    interval = formats.interval(estimate)
    tip = f"{row.name}: {percent} % {interval}, n = {estimate.n}, {estimate.method}"
    low = scale(estimate.low)
    high = scale(estimate.high)
    whisker = horizontal(low, high, y, _styled("whisker", row.style))
    dot = marker(scale(estimate.value), y, row.style, tip)
    value = text(FIGURE_END, y + 4, percent, "value", "end")
    bounds = text(WIDE, y + 4, interval, "bounds", "end")
    return tag("g", whisker, dot, value, bounds)


def _percent_on_axis(share: float) -> str:
    percent = _whole_percent(share)
    if share == 1:
        percent += " %"
    return percent


def number_on_axis(number: float) -> str:
    """A mark of an axis without needless digits."""
    return f"{number:g}"


def curve_over_k(series: Sequence[Series], title: str, low: float, high: float) -> Html:
    """A share against the number of samples, on a doubling axis, with bands for the intervals."""
    width = 336.0
    height = 236.0
    frame = Frame(34, 12, width - 12, height - 40)
    distinct_ks: set[float] = set()
    for line in series:
        distinct_ks |= {point.x for point in line.points}
    ks = sorted(distinct_ks)
    first_k = ks[0]
    last_k = ks[-1]
    across = Scale(first_k, last_k, frame.left + 8, frame.right - 8, log2=True)
    up = Scale(low, high, frame.bottom, frame.top)
    drawing = [grid_y(up, frame, ticks(low, high), _whole_percent)]
    for line in series:
        drawing += _line_over_k(line, across, up)
    drawing.append(axis_x(across, frame, ks, number_on_axis, "samples k"))
    return canvas(width, height, title, drawing)


def _line_over_k(line: Series, across: Scale, up: Scale) -> list[Html]:
    """A system's line with its band and its marks."""
    middle = []
    lower = []
    upper = []
    markers = []
    for point in line.points:
        x = across(point.x)
        y = up(point.y)
        middle.append((x, y))
        if point.low is not None and point.high is not None:
            low = max(point.low, up.low)
            high = min(point.high, up.high)
            lower.append((x, up(low)))
            upper.append((x, up(high)))
        percent = formats.percent(point.y)
        low_percent = formats.percent(point.low)
        high_percent = formats.percent(point.high)
        tip = f"{line.name}, k = {point.x:g}: {percent} % [{low_percent}, {high_percent}]"
        markers.append(marker(x, y, line.style, tip, 3.6))
    interval = band(upper, lower, _styled("band", line.style))
    curve = polyline(middle, _styled("line", line.style))
    return [interval, curve, *markers]


def _styled(kind: str, style: int) -> str:
    """The classes of an element in a style; numbers beyond the last style begin anew."""
    return f"{kind} s{style % STYLES}"


def training_curve(
    values: Sequence[tuple[float, float]], smooth: Sequence[tuple[float, float]], name: str, style: int
) -> Html:
    """One number of training against its step: all steps faintly, their moving average firmly, its last value."""
    width = 246.0
    height = 138.0
    frame = Frame(40, 10, width - 44, height - 26)
    first_step, first_value = values[0]
    last_step, _ = values[-1]
    low, high = around([value for _, value in values])
    across = Scale(first_step, last_step, frame.left, frame.right)
    up = Scale(low, high, frame.bottom, frame.top)
    every_step = [(across(step), up(value)) for step, value in values]
    averages = [(across(step), up(value)) for step, value in smooth]
    end_x, end_y = averages[-1]
    _, last_average = smooth[-1]
    last = formats.compact(last_average)
    tip = f"{name}: {last}"
    grid = grid_y(up, frame, ticks(low, high, 3), formats.compact)
    faint_line = polyline(every_step, _styled("line faint", style))
    line = polyline(averages, _styled("line", style))
    end_mark = tag("circle", cx=end_x, cy=end_y, r=2.8, class_=_styled("mark", style), data_tip=tip)
    end_value = text(end_x + 6, end_y + 4, last, "end-value")
    axis = axis_x(across, frame, [first_step, last_step], number_on_axis, "")
    first = formats.compact(first_value)
    label = f"{name} by step: from {first} to {last}"
    return canvas(width, height, label, grid, faint_line, line, end_mark, end_value, axis)


class Bar(NamedTuple):
    """One system's count in a group."""

    style: int
    name: str
    number: int
    share: float  # share of the system's total, in [0, 1]


class BarGroup(NamedTuple):
    """Counts that belong together: one error class."""

    label: str
    note: str
    bars: Sequence[Bar]


class TurnsRow(NamedTuple):
    """One system's turns in a group."""

    style: int
    name: str
    mean: float
    p95: float  # 95th percentile


class TurnsGroup(NamedTuple):
    """Turns that belong together: one hardness level."""

    label: str
    rows: Sequence[TurnsRow]


def bars(groups: Sequence[BarGroup], label: str) -> Html:
    """Counts side by side, group by group."""
    left = 230.0
    sizes = [len(group.bars) for group in groups]
    height = _height_of_rows(sizes, BAR_HEIGHT) + 6
    counts = [0]
    for group in groups:
        counts += [bar.number for bar in group.bars]
    scale = Scale(0, max(counts) or 1, left, WIDE - 120)
    drawing = [segment((left, 2), (left, height - 4), "axis")]
    y = 8.0
    for group in groups:
        middle = y + len(group.bars) * BAR_HEIGHT / 2
        drawing.append(text(0, middle, group.label, "row-label"))
        drawing.append(text(0, middle + 15, group.note, "row-note"))
        for bar in group.bars:
            drawing += _bar_row(bar, y, scale)
            y += BAR_HEIGHT
        y += GROUP_GAP
    return canvas(WIDE, height, label, drawing, class_="wide")


def _bar_row(bar: Bar, y: float, scale: Scale) -> list[Html]:
    """A bar, and its count and share beside it."""
    end = scale(bar.number)
    share = f"{formats.percent(bar.share)} %"
    rectangle = tag(
        "rect",
        x=scale.start,
        y=y + 2,
        width=max(end - scale.start, 0.5),
        height=BAR_HEIGHT - 5,
        rx=2,
        class_=_styled("bar", bar.style),
        data_tip=f"{bar.name}: {bar.number} ({share} of its wrong answers)",
    )
    count = formats.count(bar.number)
    figures = text(end + 8, y + BAR_HEIGHT / 2 + 3.5, f"{count}  ·  {share}", "bounds")
    return [rectangle, figures]


def turns(groups: Sequence[TurnsGroup], label: str) -> Html:
    """Mean turns group by group, as dots whose tail ends at the 95th percentile."""
    sizes = [len(group.rows) for group in groups]
    height = _height_of_rows(sizes, ROW_HEIGHT) + 38
    frame = Frame(170.0, 4, FIGURES_LEFT, height - 38)
    longest = 1.0
    for group in groups:
        for row in group.rows:
            longest = max(longest, row.p95)
    scale = Scale(0, longest, frame.left, frame.right)
    marks = ticks(0, scale.high, 5)
    drawing = grid_x(scale, frame, marks)
    y = frame.top + GROUP_GAP / 2
    for group in groups:
        label_y = y + len(group.rows) * ROW_HEIGHT / 2 + 4
        drawing.append(text(0, label_y, group.label, "row-label"))
        for row in group.rows:
            drawing += _turns_row(row, y + ROW_HEIGHT / 2, scale)
            y += ROW_HEIGHT
        y += GROUP_GAP
    drawing.append(axis_x(scale, frame, marks, number_on_axis, "turns"))
    return canvas(WIDE, height, label, drawing, class_="wide")


def _turns_row(row: TurnsRow, y: float, scale: Scale) -> list[Html]:
    """A system's dot and tail, and its figures beside them."""
    mean = scale(row.mean)
    tip = f"{row.name}: {row.mean:.2f} turns on average, 95 % take at most {row.p95:g}"
    tail = horizontal(mean, scale(row.p95), y, _styled("tail", row.style))
    dot = marker(mean, y, row.style, tip)
    value = text(FIGURE_END, y + 4, f"{row.mean:.2f}", "value", "end")
    bounds = text(WIDE, y + 4, f"95 % ≤ {row.p95:g}", "bounds", "end")
    return [tail, dot, value, bounds]


def histogram(rates: Sequence[float], label: str) -> Html:
    """How many questions have each pass rate: a bar for each that occurs, or twelve bins when more do."""
    width = 500.0
    height = 200.0
    frame = Frame(44, 18, width - 8, height - 38)
    counts = _counts_by_rate(rates)
    last = len(counts) - 1
    highest = max(number for _, number in counts)
    _, top_of_axis = around([0, highest])
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
        rectangle = tag(
            "rect",
            rx=2,
            class_=classes,
            data_tip=f"pass rate {name}: {number} questions",
            x=left + slot * 0.12,
            y=top,
            width=slot * 0.76,
            height=frame.bottom - top,
        )
        value = text(middle, top - 5, formats.count(number), "end-value", "middle")
        title = text(middle, frame.bottom + 15, name, "tick", "middle")
        drawing += [rectangle, value, title]
    drawing.append(horizontal(frame.left, frame.right, frame.bottom, "axis"))
    drawing.append(text(frame.right, frame.bottom + 32, "pass rate of the policy after SFT", "axis-label", "end"))
    return canvas(width, height, label, drawing)


def _counts_by_rate(rates: Sequence[float]) -> list[tuple[str, int]]:
    """The bars of a histogram, from left to right: (name, number of questions)."""
    counts = Counter(rates)
    if len(counts) <= BINS:
        return [(f"{rate:.2g}", counts[rate]) for rate in sorted(counts)]
    sizes = [0] * BINS
    for rate in rates:
        index = min(int(rate * BINS), BINS - 1)
        sizes[index] += 1
    return [(f"{index / BINS:.2f}+", size) for index, size in enumerate(sizes)]


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
    costs = [dot.x for dot in dots]
    _, highest_cost = around([0, *costs])
    across = Scale(0, highest_cost, frame.left, frame.right)
    up = Scale(0, 1, frame.bottom, frame.top)
    grid = grid_y(up, frame, PERCENTS, _whole_percent)
    axis = axis_x(across, frame, ticks(0, highest_cost), formats.count, unit)
    drawing = [grid, axis]
    dots_by_style: dict[int, list[Dot]] = {}
    for dot in dots:
        system_dots = dots_by_style.setdefault(dot.style, [])
        system_dots.append(dot)
    for style, system_dots in dots_by_style.items():
        positions = [(across(dot.x), up(dot.y)) for dot in system_dots]
        line = polyline(positions, _styled("line faint", style))
        drawing.append(line)
        for dot, (x, y) in zip(system_dots, positions, strict=True):
            accuracy = formats.percent(dot.y)
            cost = formats.count(dot.x)
            tip = f"{dot.name}, {dot.label}: {accuracy} % at {cost} {unit}"
            drawing.append(marker(x, y, style, tip))
            drawing.append(text(x, y - 8, dot.mark, "tick", "middle"))
    return canvas(width, height, f"EX against {unit}", drawing)
