"""The whole page: one file that asks nothing of the network and runs no script but its own."""

import base64
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pipelines.evaluation.measures import SMOOTH, curve_points
from pipelines.evaluation.stats import Estimate
from pipelines.report import charts, formats, report_tables
from pipelines.report.charts import Html
from pipelines.report.data import ReportData
from pipelines.report.reader_payload import payload
from pipelines.sql.diagnoses import ERROR_CLASSES

ASSETS = Path(__file__).parent / "assets"
LETTERS = {"easy": "E", "medium": "M", "hard": "H", "extra": "X"}
LEADING = ("reward", "ex", "ex_held_out", "turns", "loss", "accuracy")  # the curves of training that stand first
ABOUT_ERRORS = {
    "hallucination": "names what does not exist",
    "schema_linking": "wrong or missing tables, columns",
    "semantic": "right schema, wrong logic",
    "syntax": "refused by the engine",
    "generation": "no final SQL",
}


@functools.cache
def _environment() -> jinja2.Environment:
    """The templates of `assets/`: everything is escaped that is not markup already."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: charts.text_of(value) if type(value) is str else value,
    )
    shown = (formats.show, formats.points, formats.percent, formats.interval, formats.count)
    environment.globals.update({function.__name__: function for function in (*shown, charts.canvas, charts.marker)})
    environment.filters["sha256"] = lambda text: (
        "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    )
    return environment


def render(template: str, styles: Sequence[str], scripts: Sequence[str], blocks: str = "", **values: Any) -> str:
    """A whole document of a template, with its styles, its scripts, and blocks of data for the scripts."""
    style = Html("\n".join((ASSETS / name).read_text(encoding="utf-8") for name in styles))
    script = Html('"use strict";\n' + "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts))
    page = _environment().get_template(template)
    return page.render(style=style, script=script, blocks=Html(blocks), **values).lstrip()


def document(report: ReportData) -> str:
    """The report as an HTML document; without examples it has no trajectory reader."""
    reader = payload(report) if report.examples else None
    summaries = report.summaries
    sections = {
        "accuracy": "Accuracy",
        "paired": report.comparisons and "Paired tests",
        **{entry.slug: entry.title for entry in report.tables},
        "hardness": "Hardness",
        "samples": any(summary.points for summary in summaries) and "Samples",
        "cost": "Cost",
        "errors": any(sum(summary.errors.values()) for summary in summaries) and "Errors",
        "difficulty": report.pass_rates and "Difficulty",
        "training": any(report.curves.values()) and "Training",
        "slices": "Slices",
        "trajectories": reader and "Trajectories",
    }
    blocks = [charts.data("index", reader.index)] if reader else []
    blocks += [charts.data(f"chunk-{number}", chunk) for number, chunk in enumerate(reader.chunks if reader else ())]
    return render(
        "report.html",
        ("page.css", "reader.css"),
        ("dom.js", "sql.js", "detail.js", "reader.js", "page.js"),
        "".join(blocks),
        title=report.title,
        report=report,
        reader=reader,
        sections={identifier: name for identifier, name in sections.items() if name},
        warnings=list(warnings(report)),
        tables=report_tables,
        charts=_charts(report),
        letters=LETTERS,
        smooth=SMOOTH,
        useful=sum(0 < rate < 1 for rate in report.pass_rates),
    )


def _charts(report: ReportData) -> dict[str, Any]:
    """The charts of all sections that have something to show, by name."""
    summaries = report.summaries
    pairs = zip(report.systems, summaries, strict=True)
    systems = [(style, system.name, summary) for style, (system, summary) in enumerate(pairs)]

    def rows(estimates: Sequence[Estimate | None]) -> tuple[charts.ChartRow, ...]:
        drawn = zip(systems, estimates, strict=True)
        return tuple(charts.ChartRow(style, name, estimate) for (style, name, _), estimate in drawn)

    accuracy = [
        charts.Group("greedy", "one answer a question", rows([each.ex.get(report.equality) for each in summaries]))
    ]
    if any(summary.sampled for summary in summaries):
        accuracy.append(charts.Group("sampled", "mean of the samples", rows([each.sampled for each in summaries])))

    # Each hardness level with its figures of every system, None where a system has no question of it.
    by_system = [{level.name: level for level in summary.by_hardness} for summary in summaries]
    levels_by_name = {name: [each.get(name) for each in by_system] for levels in by_system for name in levels}
    counts = {name: max(level.n for level in levels if level) for name, levels in levels_by_name.items()}
    hardness = [
        charts.Group(
            name,
            f"{counts[name]} question{'s' * (counts[name] != 1)}",
            rows([(level.ex or level.sampled) if level else None for level in levels]),
        )
        for name, levels in levels_by_name.items()
    ]
    turns = [
        (
            name,
            [
                (style, system, level.turns.mean, level.turns.p95)
                for (style, system, _), level in zip(systems, levels, strict=True)
                if level and level.turns
            ],
        )
        for name, levels in levels_by_name.items()
    ]
    clouds = []
    for unit, attribute in (("generated tokens", "tokens_out"), ("characters of reasoning", "reasoning_chars")):
        dots = [
            charts.Dot(style, system, level.name, LETTERS[level.name], spread.mean, ex.value)
            for style, system, summary in systems
            for level in summary.by_hardness
            if (spread := getattr(level, attribute)) is not None and (ex := level.ex or level.sampled) is not None
        ]
        if any(dot.x for dot in dots):
            clouds.append((unit, charts.cloud(dots, unit)))

    over_k = {}  # the lines of all systems over k, with one range of shares for the three charts
    for kind in ("pass", "majority", "average"):
        lines = []
        for style, system, summary in systems:
            estimates = [(point.k, getattr(point, f"{kind}_at")) for point in summary.points]
            points = tuple(charts.Point(k, part.value, part.low, part.high) for k, part in estimates)
            lines += [charts.Series(style, system, points)] if points else []
        over_k[f"{kind}@k"] = lines
    bounds = [point for lines in over_k.values() for line in lines for point in line.points]
    low = max(0.0, min((point.low or 0 for point in bounds), default=0) // 0.1 * 0.1)
    high = min(1.0, max((point.high or 0 for point in bounds), default=1) // 0.1 * 0.1 + 0.1)

    errors = []
    for name in ERROR_CLASSES:
        members = [
            charts.Bar(style, system, part.errors[name], part.errors[name] / max(sum(part.errors.values()), 1))
            for style, system, part in systems
        ]
        errors.append((name.replace("_", " "), ABOUT_ERRORS[name], members))

    # Of each training the curves that matter, the others, and in words those that never move.
    training: dict[str, dict[str, list[Any]]] = {}
    for stage, steps in report.curves.items():
        if not steps:
            continue
        logged = dict.fromkeys(name for step in steps for name in step if name != "step")
        curves = {name: values for name in logged if len(values := curve_points(steps, name)) > 1}
        moving = [name for name, values in curves.items() if len({y for _, y in values}) > 1]
        first = [name for name in LEADING if name in moving]
        plain, style = {name: name.replace("_", " ") for name in curves}, len(training) + 1
        drawn = {name: (plain[name], charts.training_curve(curves[name], name, style)) for name in moving}
        still = [f"{plain[name]} ({formats.compact(curves[name][0][1])})" for name in curves if name not in moving]
        rest = [drawn[name] for name in moving if name not in first]
        training[stage] = {"first": [drawn[name] for name in first], "rest": rest, "still": still}
    return {
        "accuracy": charts.forest(accuracy, "EX of each system with its 95 % interval"),
        "hardness": charts.forest(hardness, "EX by hardness level with 95 % intervals"),
        "samples": [(name, charts.curve_over_k(lines, name, low, high)) for name, lines in over_k.items() if bounds],
        "turns": charts.turns(turns, "Mean turns by hardness level"),
        "clouds": clouds,
        "errors": charts.bars(errors, "Wrong answers by error class"),
        "difficulty": charts.histogram(report.pass_rates, "Questions by pass rate") if report.pass_rates else None,
        "training": training,
    }


def warnings(report: ReportData) -> Iterator[str]:
    """Everything that was left out of the figures, in sentences that stand beside them."""
    yield from report_tables.left_out(report)
    for system, summary in zip(report.systems, report.summaries, strict=True):
        if summary.n_broken:
            why = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in summary.failures.items())
            total = len(system.records)
            share, wrong = formats.percent(summary.n_broken / total), formats.percent(summary.ex_with_broken or 0.0)
            yield (
                f"{system.name}: {summary.n_broken} of {total} episodes ({share} %) are broken and count nowhere "
                f"({why}). Counted as wrong, they would make EX {wrong} %."
            )
        if summary.n_unasked:
            yield (
                f"{system.name}: {formats.count(summary.n_unasked)} episodes were not asked, for all answers to the "
                "first questions were malformed. They count as wrong; means of turns and tokens leave them out."
            )
