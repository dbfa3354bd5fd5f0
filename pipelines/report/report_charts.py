"""The charts of an evaluation's report, drawn from its data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.evaluation.measures import Points, curve_points, moving_average
from pipelines.evaluation.metrics import Spread
from pipelines.evaluation.slices import Level
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.summary import Summary
from pipelines.report import charts, formats
from pipelines.report.charts import Html
from pipelines.report.data import ReportData
from pipelines.sql.diagnoses import ERROR_CLASSES

LETTERS = {"easy": "E", "medium": "M", "hard": "H", "extra": "X"}  # hardness level -> its letter in a cloud
LEADING_CURVES = ("reward", "ex", "ex_held_out", "turns", "loss", "accuracy")  # the first curves of each training
ABOUT_ERRORS = {
    "hallucination": "names what does not exist",
    "schema_linking": "wrong or missing tables, columns",
    "semantic": "right schema, wrong logic",
    "syntax": "refused by the engine",
    "generation": "no final SQL",
}
NamedChart = tuple[str, Html]
CostOf = Callable[[Level], Spread | None]  # gives the cost of a slice's answers


@dataclass(frozen=True)
class TrainingCharts:
    """The curves of one training."""

    first: list[NamedChart]
    rest: list[NamedChart]
    still: list[str]  # numbers that never moved, in words: "learning rate (1e−4)"


@dataclass(frozen=True)
class ReportCharts:
    """All charts of a report."""

    accuracy: Html
    hardness: Html
    samples: list[NamedChart]  # pass@k, majority@k and average@k against k; [] without samples
    turns: Html
    clouds: list[NamedChart]  # unit of cost -> accuracy against it; a unit that nothing was counted in is left out
    errors: Html
    difficulty: Html | None  # questions by pass rate; None without pass rates
    training: dict[str, TrainingCharts]  # stage -> its curves


class _System(NamedTuple):
    """A system with the number of its colour."""

    style: int
    name: str
    summary: Summary


def draw_charts(report: ReportData) -> ReportCharts:
    """All charts of a report."""
    systems = []
    for style, (system, summary) in enumerate(report.by_system):
        systems.append(_System(style, system.name, summary))
    levels = _levels_by_name(systems)
    difficulty = None
    if report.pass_rates:
        difficulty = charts.histogram(report.pass_rates, "Questions by pass rate")
    return ReportCharts(
        accuracy=_accuracy_chart(report.equality, systems),
        hardness=_hardness_chart(systems, levels),
        samples=_sample_charts(systems),
        turns=_turns_chart(systems, levels),
        clouds=_clouds(systems),
        errors=_errors_chart(systems),
        difficulty=difficulty,
        training=_training_charts(report.curves),
    )


def _chart_rows(systems: Sequence[_System], estimates: Sequence[Estimate | None]) -> tuple[charts.ChartRow, ...]:
    """A row for each system with its estimate."""
    rows = []
    for system, estimate in zip(systems, estimates, strict=True):
        rows.append(charts.ChartRow(system.style, system.name, estimate))
    return tuple(rows)


def _accuracy_chart(equality: str, systems: Sequence[_System]) -> Html:
    greedy = [system.summary.ex.get(equality) for system in systems]
    sampled = [system.summary.sampled for system in systems]
    greedy_rows = _chart_rows(systems, greedy)
    groups = [charts.Group("greedy", "one answer a question", greedy_rows)]
    if any(sampled):
        sampled_rows = _chart_rows(systems, sampled)
        groups.append(charts.Group("sampled", "mean of the samples", sampled_rows))
    return charts.forest(groups, "EX of each system with its 95 % interval")


# Each hardness level with its figures of every system, None for a system without a question of it.
LevelsByName = Mapping[str, Sequence[Level | None]]


def _levels_by_name(systems: Sequence[_System]) -> LevelsByName:
    levels_by_name: dict[str, list[Level | None]] = {}
    for number, system in enumerate(systems):
        for level in system.summary.by_hardness:
            levels = levels_by_name.setdefault(level.name, [None] * len(systems))
            levels[number] = level
    return levels_by_name


def _accuracy_of(level: Level | None) -> Estimate | None:
    if level is None:
        return None
    return level.ex or level.sampled


def _hardness_chart(systems: Sequence[_System], levels_by_name: LevelsByName) -> Html:
    groups = []
    for name, levels in levels_by_name.items():
        n_questions = max(level.n for level in levels if level is not None)
        note = f"{n_questions} questions"
        if n_questions == 1:
            note = "1 question"
        rows = _chart_rows(systems, list(map(_accuracy_of, levels)))
        groups.append(charts.Group(name, note, rows))
    return charts.forest(groups, "EX by hardness level with 95 % intervals")


def _turns_chart(systems: Sequence[_System], levels_by_name: LevelsByName) -> Html:
    groups = []
    for name, levels in levels_by_name.items():
        rows = []
        for system, level in zip(systems, levels, strict=True):
            if level is not None and level.turns is not None:
                row = charts.TurnsRow(system.style, system.name, level.turns.mean, level.turns.p95)
                rows.append(row)
        groups.append(charts.TurnsGroup(name, rows))
    return charts.turns(groups, "Mean turns by hardness level")


def _clouds(systems: Sequence[_System]) -> list[NamedChart]:
    cost_of_unit: dict[str, CostOf] = {
        "generated tokens": lambda level: level.tokens_out,
        "characters of reasoning": lambda level: level.reasoning_chars,
    }
    clouds = []
    for unit, cost_of in cost_of_unit.items():
        dots: list[charts.Dot] = []
        for system in systems:
            dots += _dots_of(system, cost_of)
        if any(dot.x for dot in dots):
            cloud = charts.cloud(dots, unit)
            clouds.append((unit, cloud))
    return clouds


def _dots_of(system: _System, cost_of: CostOf) -> Iterator[charts.Dot]:
    """A system's points of a cloud: one for each hardness level that has a cost and an accuracy."""
    for level in system.summary.by_hardness:
        cost = cost_of(level)
        accuracy = _accuracy_of(level)
        if cost is None or accuracy is None:
            continue
        yield charts.Dot(
            style=system.style,
            name=system.name,
            label=level.name,
            mark=LETTERS[level.name],
            x=cost.mean,
            y=accuracy.value,
        )


def _sample_charts(systems: Sequence[_System]) -> list[NamedChart]:
    """The lines of all systems over k, with one range of shares for the three charts."""
    lines_by_title = {}
    for kind in ("pass", "majority", "average"):
        lines_by_title[f"{kind}@k"] = _lines_over_k(systems, kind)
    all_points: list[charts.Point] = []
    for lines in lines_by_title.values():
        for line in lines:
            all_points += line.points
    if not all_points:
        return []
    lowest = min(point.low or 0 for point in all_points)
    highest = max(point.high or 0 for point in all_points)
    low = max(0.0, lowest // 0.1 * 0.1)
    high = min(1.0, highest // 0.1 * 0.1 + 0.1)
    drawn = []
    for title, lines in lines_by_title.items():
        chart = charts.curve_over_k(lines, title, low, high)
        drawn.append((title, chart))
    return drawn


def _lines_over_k(systems: Sequence[_System], kind: str) -> list[charts.Series]:
    """A line for each system with samples: its pass@k, majority@k or average@k."""
    lines = []
    for system in systems:
        points = []
        for point in system.summary.points:
            estimate = getattr(point, f"{kind}_at")
            chart_point = charts.Point(point.k, estimate.value, estimate.low, estimate.high)
            points.append(chart_point)
        if points:
            line = charts.Series(system.style, system.name, tuple(points))
            lines.append(line)
    return lines


def _errors_chart(systems: Sequence[_System]) -> Html:
    groups = []
    for error in ERROR_CLASSES:
        bars = []
        for system in systems:
            counts = system.summary.errors
            n_wrong = sum(counts.values())
            share = counts[error] / max(n_wrong, 1)
            bars.append(charts.Bar(system.style, system.name, counts[error], share))
        label = error.replace("_", " ")
        groups.append(charts.BarGroup(label, ABOUT_ERRORS[error], bars))
    return charts.bars(groups, "Wrong answers by error class")


def _training_charts(curves_by_stage: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, TrainingCharts]:
    """For each training the curves that matter, the others, and in words those that never move."""
    by_stage: dict[str, TrainingCharts] = {}
    for stage, steps in curves_by_stage.items():
        if steps:
            style = len(by_stage) + 1
            by_stage[stage] = _charts_of_training(_logged_curves(steps), style)
    return by_stage


def _charts_of_training(curves: Mapping[str, Points], style: int) -> TrainingCharts:
    first: dict[str, NamedChart] = {}
    rest = []
    still = []
    for name, points in curves.items():
        title = name.replace("_", " ")
        distinct_values = {value for _, value in points}
        if len(distinct_values) == 1:
            (value,) = distinct_values
            still.append(f"{title} ({formats.compact(value)})")
            continue
        smooth = moving_average(points)
        chart = charts.training_curve(points, smooth, name, style)
        if name in LEADING_CURVES:
            first[name] = (title, chart)
        else:
            rest.append((title, chart))
    leading = [first[name] for name in LEADING_CURVES if name in first]
    return TrainingCharts(leading, rest, still)


def _logged_curves(steps: Sequence[Mapping[str, float]]) -> dict[str, Points]:
    """The numbers that were logged at two steps or more, by name."""
    names: dict[str, None] = {}
    for step in steps:
        names |= dict.fromkeys(step)
    curves: dict[str, Points] = {}
    for name in names:
        points = curve_points(steps, name)
        if name != "step" and len(points) > 1:
            curves[name] = points
    return curves
