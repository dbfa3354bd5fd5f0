"""The grammar of the charts: scales, ticks, axes, markers. Colours are classes, so that the page's theme rules them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from pipelines.report.page.html import Child, Html, tag

STYLES = 6  # s0 to s5: each a colour and a marker shape, so that colour alone carries nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
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
    """A chart; `label` is what a screen reader says of it."""
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


def grid_y(scale: Scale, frame: Frame, marks: Iterable[float], show: Callable[[float], str]) -> Html:
    """Horizontal grid lines with their values at the left."""
    return tag(
        "g",
        [
            (
                tag("line", x1=frame.left, x2=frame.right, y1=scale(mark), y2=scale(mark), class_="grid"),
                text(frame.left - 6, scale(mark) + 3.5, show(mark), "tick", "end"),
            )
            for mark in marks
        ],
    )


def axis_x(scale: Scale, frame: Frame, marks: Iterable[float], show: Callable[[float], str], label: str) -> Html:
    """Values under the plot, and what they are."""
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
