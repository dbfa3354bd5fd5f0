"""The figures of docs/results/laboratory.md, and what they are drawn from: a claim with what a store has of it."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from pipelines.evaluation import measures
from pipelines.evaluation.stats import Estimate, Paired
from pipelines.report import charts, formats, page
from pipelines.report.charts import Frame, Html, Scale, around, axis_x, canvas, marker, tag, text
from pipelines.sweeps import claims, sweep_page
from pipelines.sweeps import sweep_table as report
from pipelines.sweeps.claims import Claim, ContrastResult, Verdict

ASSETS = Path(page.__file__).parent / "assets"
RULES = re.compile(r"[^{}]+\{[^{}]*\}")
DRAWN = (
    ":root",
    *(f".s{place} " for place in range(6)),
    ".chart",
    ".grid",
    ".axis",
    ".mark",
    ".whisker",
    ".line",
    ".band",
)
STYLE_OF: dict[Verdict, int] = {"holds": 3, "does not hold": 2, "cannot be told": 0, "not measured": 0}
SHOWN_CURVES = 3


@dataclasses.dataclass(frozen=True)
class Tested:
    """A claim with what the store has of it.

    Attributes:
        name: of its file.
        seconds: of processor time that its trainings took, those that it shares with other claims included.
        settings: a digest of its contrasts and its cells' recipes.
        made_by: the commits and the processors that its figures are of.
        kept: the lines of its part of the page, where they are kept from an earlier run; else ().
        title: its file's, the heading of its part; the table of verdicts has the claim.
    """

    name: str
    claim: Claim
    sweep: report.Sweep
    decided: tuple[ContrastResult, ...]
    seconds: float
    settings: str
    made_by: str
    kept: tuple[str, ...] = ()
    title: str = ""

    @property
    def short(self) -> str:
        """Its name without its folder."""
        return self.name.rpartition("/")[2]

    @property
    def n_measured(self) -> int:
        """Contrasts that have figures."""
        return sum(part.difference is not None for part in self.decided)

    @property
    def verdict(self) -> Verdict:
        """On the whole claim."""
        return (
            "cannot be told"
            if self.claim.untestable
            else claims.overall_verdict([part.verdict for part in self.decided])
        )


def standalone(drawing: Html) -> str:
    """A chart as a file of its own: with the page's colours, light or dark as the reader's system is."""
    sheets = [(ASSETS / name).read_text(encoding="utf-8") for name in sweep_page.STYLES]
    plain = re.sub(r"/\*.*?\*/", "", "\n".join(sheets), flags=re.DOTALL)
    rules = [rule.strip() for rule in RULES.findall(plain) if rule.strip().startswith(DRAWN)]
    style = f"<style>{' '.join(' '.join(rules).split())}</style>"
    opening, closing, rest = drawing.partition(">")
    return opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + closing + style + rest + "\n"


def forest(tested: Sequence[Tested]) -> Html:
    """Every contrast that was measured, in units of what it could have shown."""
    rows = [(entry, part, part.difference) for entry in tested for part in entry.decided if part.difference is not None]
    pitch, left, right, width = 24.0, 430.0, 830.0, 1072.0
    frame = Frame(left, 8, right, 8 + pitch * len(rows))
    across = Scale(-3, 3, left, right)
    grid = {mark: "grid" if mark else "axis" for mark in range(-3, 4)}
    parts: list[Html] = [
        tag("line", x1=across(mark), x2=across(mark), y1=frame.top, y2=frame.bottom, class_=style)
        for mark, style in grid.items()
    ]
    for number, (entry, part, difference) in enumerate(rows):
        parts.append(_drawn(entry, part, difference, across, frame.top + pitch * (number + 0.5)))
    parts.append(
        axis_x(across, frame, list(range(-3, 4)), lambda mark: f"{mark:g}", "times the smallest that could be shown")
    )
    label = "; ".join(f"claim {entry.claim.number}, {part.contrast.says}: {part.verdict}" for entry, part, _ in rows)
    return canvas(width, frame.bottom + 40, label, parts)


def _drawn(entry: Tested, part: ContrastResult, difference: Paired, across: Scale, y: float) -> Html:
    contrast, scale = part.contrast, part.detectable or 1.0
    sign = -1 if contrast.less else 1
    ends = [
        max(-3.0, min(3.0, sign * value / scale)) for value in (difference.low, difference.difference, difference.high)
    ]
    style, margin = STYLE_OF[part.verdict], (contrast.margin or 0) * contrast.unit
    bar = across(max(-3.0, -margin / scale))
    return tag(
        "g",
        text(0, y + 4, f"{entry.claim.number}  {contrast.says}", "row-note"),
        tag("line", x1=bar, x2=bar, y1=y - 8, y2=y + 8, class_="axis") if margin else None,
        tag("line", x1=across(ends[0]), x2=across(ends[2]), y1=y, y2=y, class_=f"whisker s{style}"),
        marker(across(ends[1]), y, style),
        text(across.end + 14, y + 4, formats.signed(difference, contrast.unit), "bounds"),
        text(1072, y + 4, part.verdict, "row-note", "end"),
    )


def chosen(entry: Tested) -> dict[str, list[report.Line]]:
    """The curves that a claim's file names, as far as its rows have them."""
    drawn = report.curves(entry.sweep)
    return {name: drawn[name] for name in entry.sweep.curves[:SHOWN_CURVES] if name in drawn}


def figure(entry: Tested) -> Html | None:
    """A claim's figure: pass@k over k where it is about that, else its curves, else its rows; None of nothing made."""
    if entry.claim.untestable or entry.kept or entry.verdict == "not measured":
        return None
    names = [row.name for row in entry.sweep.rows()]
    drawn = chosen(entry)
    if drawn and any(name.startswith("pass@") for name in entry.sweep.measures):
        drawings = [over_k(entry)]
        shown = names
    elif drawn:
        drawings = [_titled(name, sweep_page.chart(lines, name, names)) for name, lines in drawn.items()]
        shown = [name for name in names if any(line.row == name for lines in drawn.values() for line in lines)]
    else:
        share = sweep_page.first_share(entry.sweep)
        return sweep_page.rows_chart(entry.sweep, share) if share is not None else None
    legend, width = _legend(names, shown)
    placed = [tag("g", drawing, transform=f"translate({number * 520} 28)") for number, drawing in enumerate(drawings)]
    label = f"claim {entry.claim.number}, {entry.claim.text}: {', '.join(shown)}"
    return canvas(max(520.0 * len(drawings), width), 300, label, legend, placed)


def _titled(name: str, chart: Html) -> Html:
    return tag("g", text(44, 12, name.replace("_", " "), "row-note"), tag("g", chart, transform="translate(0 14)"))


def _legend(names: Sequence[str], shown: Sequence[str]) -> tuple[Html, float]:
    """The rows with their colours, and how wide that is."""
    parts: list[Html] = []
    at = 0.0
    for place, name in enumerate(names):
        if name in shown:
            line = tag("line", x1=at, x2=at + 22, y1=10, y2=10, class_=sweep_page.line_class(place))
            parts += [line, text(at + 28, 14, name, "row-note")]
            at += 60 + 6.4 * len(name)
    return tag("g", parts), at


def over_k(entry: Tested) -> Html:
    """pass@k of each row against k, over all seeds."""
    wanted = [measures.measure(name) for name in entry.sweep.measures if name.startswith("pass@")]
    series = []
    for place, row in enumerate(entry.sweep.rows()):
        estimates = [(int(of.name.partition("@")[2]), report.figure(row, of)) for of in wanted]
        points = [
            charts.Point(k, part.value, part.low, part.high) for k, part in estimates if isinstance(part, Estimate)
        ]
        series.append(charts.Series(place, row.name, tuple(points)))
    bounds = [
        bound for line in series for point in line.points for bound in (point.low, point.high) if bound is not None
    ]
    return charts.curve_over_k([line for line in series if line.points], "pass@k by k", *around(bounds))
