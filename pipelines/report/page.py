"""The whole page: one file that asks nothing of the network and runs no script but its own."""

import base64
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pipelines.evaluation.measures import SMOOTH
from pipelines.report import charts, formats, report_tables
from pipelines.report.charts import Html
from pipelines.report.data import ReportData
from pipelines.report.reader_payload import payload
from pipelines.report.report_charts import LETTERS, draw_charts

ASSETS = Path(__file__).parent / "assets"


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
    environment.globals.update(
        show=formats.show,
        points=formats.points,
        percent=formats.percent,
        interval=formats.interval,
        count=formats.count,
        canvas=charts.canvas,
        marker=charts.marker,
    )
    environment.filters["sha256"] = _content_hash
    return environment


def _content_hash(text: str) -> str:
    """The source expression by which a Content-Security-Policy allows one inline text."""
    digest = hashlib.sha256(text.encode()).digest()
    encoded = base64.b64encode(digest).decode()
    return f"sha256-{encoded}"


def render(template: str, styles: Sequence[str], scripts: Sequence[str], blocks: str = "", **values: Any) -> str:
    """A whole document of a template, with its styles, its scripts, and blocks of data for the scripts."""
    style = _joined_assets(styles)
    script = '"use strict";\n' + _joined_assets(scripts)
    page = _environment().get_template(template)
    markup = {"style": Html(style), "script": Html(script), "blocks": Html(blocks)}
    text = page.render(**markup, **values)
    return text.lstrip()


def _joined_assets(names: Sequence[str]) -> str:
    return "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)


def document(report: ReportData) -> str:
    """The report as an HTML document; without examples it has no trajectory reader."""
    reader = None
    blocks = []
    if report.examples:
        reader = payload(report)
        blocks.append(charts.data("index", reader.index))
        blocks += [charts.data(f"chunk-{number}", chunk) for number, chunk in enumerate(reader.chunks)]
    return render(
        "report.html",
        ("page.css", "reader.css"),
        ("dom.js", "sql.js", "detail.js", "reader.js", "page.js"),
        "".join(blocks),
        title=report.title,
        report=report,
        reader=reader,
        sections=_sections(report),
        warnings=list(warnings(report)),
        tables=report_tables,
        charts=draw_charts(report),
        letters=LETTERS,
        smooth=SMOOTH,
        useful=sum(0 < rate < 1 for rate in report.pass_rates),
    )


def _sections(report: ReportData) -> dict[str, str]:
    """The page's sections that have something to show: identifier -> name in the navigation."""
    summaries = report.summaries
    sections = {"accuracy": "Accuracy"}
    if report.comparisons:
        sections["paired"] = "Paired tests"
    for table in report.tables:
        sections[table.slug] = table.title
    sections["hardness"] = "Hardness"
    if any(summary.points for summary in summaries):
        sections["samples"] = "Samples"
    sections["cost"] = "Cost"
    if any(sum(summary.errors.values()) for summary in summaries):
        sections["errors"] = "Errors"
    if report.pass_rates:
        sections["difficulty"] = "Difficulty"
    if any(report.curves.values()):
        sections["training"] = "Training"
    sections["slices"] = "Slices"
    if report.examples:
        sections["trajectories"] = "Trajectories"
    return sections


def warnings(report: ReportData) -> Iterator[str]:
    """Everything that was left out of the figures, in sentences that stand beside them."""
    yield from report_tables.left_out(report)
    for system, summary in report.by_system:
        if summary.n_broken:
            counts = []
            for name, number in summary.failures.items():
                failure = name.replace("_", " ")
                counts.append(f"{number} {failure}")
            reasons = ", ".join(counts)
            total = len(system.records)
            broken_share = formats.percent(summary.n_broken / total)
            ex_as_wrong = formats.percent(summary.ex_with_broken or 0.0)
            yield (
                f"{system.name}: {summary.n_broken} of {total} episodes ({broken_share} %) are broken and count "
                f"nowhere ({reasons}). Counted as wrong, they would make EX {ex_as_wrong} %."
            )
        if summary.n_unasked:
            unasked = formats.count(summary.n_unasked)
            yield (
                f"{system.name}: {unasked} episodes were not asked, for all answers to the "
                "first questions were malformed. They count as wrong; means of turns and tokens leave them out."
            )
