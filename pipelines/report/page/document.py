"""The whole page: one file that asks nothing of the network and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.report import digits, report_tables
from pipelines.report.data import ReportData
from pipelines.report.page.html import Html, data, join, tag
from pipelines.report.page.payload import Payload, payload
from pipelines.report.page.sections import headline, section, sections

ASSETS = Path(__file__).parent / "assets"
STYLES = ("page.css", "reader.css")
SCRIPTS = ("dom.js", "sql.js", "detail.js", "reader.js", "page.js")
READER_KEYS = (
    ("/", "search the trajectories"),
    ("j  k", "next, previous trajectory"),
    ("[  ]", "the same question, system before or after"),
)
KEYS = (("t", "dark or light"), ("?", "this help"))


def document(report: ReportData) -> str:
    """The report as an HTML document; without examples it has no trajectory reader."""
    reader = payload(report) if report.examples else None
    parts = list(sections(report))
    if reader is not None:
        parts.append(("trajectories", "Trajectories", _reader(reader)))
    return shell(
        f"{report.title} – evaluation",
        bar(report.title, [(identifier, name) for identifier, name, _ in parts]),
        tag("main", _hero(report), [markup for _, _, markup in parts], _method(report), id="main"),
        (*READER_KEYS, *KEYS) if reader else KEYS,
        blocks=_blocks(reader) if reader else (),
    )


def shell(
    title: str,
    top: Html,
    main: Html,
    keys: Sequence[tuple[str, str]],
    blocks: Sequence[Html] = (),
    styles: Sequence[str] = STYLES,
    scripts: Sequence[str] = SCRIPTS,
) -> str:
    """A whole document around its main part: styles, scripts, the bar, help for the keys, and data for the scripts.

    A content security policy names the hashes of the page's own style and script: markup that slipped through the
    escaping could neither run nor load anything.
    """
    style = Html("\n".join((ASSETS / name).read_text(encoding="utf-8") for name in styles))
    script = Html('"use strict";\n' + "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in scripts))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content="sqltrain"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", style),
    )
    body = tag(
        "body",
        tag("a", "Skip to the figures", href="#main", class_="skip"),
        top,
        main,
        _help(keys),
        tag("div", id="tip", role="tooltip", hidden=True),
        blocks,
        tag("script", script),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en")


def _blocks(reader: Payload) -> list[Html]:
    chunks = (data(f"chunk-{number}", chunk) for number, chunk in enumerate(reader.chunks))
    return [data("index", reader.index), *chunks]


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def bar(title: str, names: Sequence[tuple[str, str]]) -> Html:
    """The bar at the top: the title, the sections by (id, short name), and the two buttons."""
    return tag(
        "header",
        tag("a", title, href="#main", class_="brand"),
        tag("nav", [tag("a", name, href=f"#{identifier}") for identifier, name in names], aria_label="Sections"),
        tag("button", "Dark", id="theme", type="button", title="Dark or light (t)"),
        tag("button", "?", id="help", type="button", title="Keys (?)", aria_label="Keyboard help"),
        class_="top",
    )


def _hero(report: ReportData) -> Html:
    summary = report.summaries[-1]
    what = (
        f"{digits.count(summary.n_questions)} questions over {digits.count(summary.n_databases)} databases, "
        f"decided by the equality “{report.equality}”. Intervals are 95 %."
    )
    facts = [tag("div", tag("dt", label), tag("dd", value)) for label, value in report.facts.items()]
    return tag(
        "div",
        tag("p", "Evaluation", class_="eyebrow"),
        tag("h1", report.title),
        tag("p", what, class_="summary"),
        headline(report),
        tag("p", report.verdict, class_="summary") if report.verdict else None,
        [tag("p", warning, class_="warning", role="note") for warning in _warnings(report)],
        tag("dl", facts, class_="facts") if facts else None,
        class_="hero",
    )


def _warnings(report: ReportData) -> Iterator[str]:
    """What was left out of the figures, said where the figures are."""
    yield from report_tables.left_out(report)
    for system, summary in zip(report.systems, report.summaries, strict=True):
        if summary.n_broken:
            why = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in summary.failures.items())
            total = len(system.records)
            share, wrong = digits.percent(summary.n_broken / total), digits.percent(summary.ex_with_broken or 0.0)
            yield (
                f"{system.name}: {summary.n_broken} of {total} episodes ({share} %) are broken and count nowhere "
                f"({why}). Counted as wrong, they would make EX {wrong} %."
            )
        if summary.n_unasked:
            yield (
                f"{system.name}: {digits.count(summary.n_unasked)} episodes were not asked, for all answers to the "
                "first questions were malformed. They count as wrong; means of turns and tokens leave them out."
            )


def _reader(reader: Payload) -> Html:
    shown = digits.count(len(reader.index["rows"]))
    note = f"{shown} trajectories" + (
        f"; {digits.count(reader.left_out)} more are not in this file" if reader.left_out else ""
    )
    selects = (
        _select("system", "System"),
        _select("mode", "Episodes"),
        _select("verdict", "Verdict"),
        _select("level", "Hardness"),
        _select("error", "Error class"),
        _select("flip", "Flipped"),
        _select("database", "Database"),
    )
    controls = tag(
        "form",
        tag("input", id="search", type="search", placeholder="Search questions, SQL, ids  ( / )", aria_label="Search"),
        selects,
        tag("button", "Clear", id="clear", type="reset"),
        id="filters",
        class_="filters",
        role="search",
    )
    panes = tag(
        "div",
        tag(
            "div",
            tag("p", id="count", class_="count", aria_live="polite"),
            tag("div", id="list", class_="list", role="listbox", tabindex="0", aria_label="Trajectories"),
            class_="pane",
        ),
        tag("article", id="detail", class_="detail", tabindex="-1", aria_label="The chosen trajectory"),
        class_="panes",
    )
    missing = tag("noscript", tag("p", "The reader needs JavaScript; the figures above do not.", class_="warning"))
    return section("trajectories", "Trajectories", tag("p", f"{note}.", class_="about"), missing, controls, panes)


def _select(identifier: str, label: str) -> Html:
    return tag("label", tag("span", label), tag("select", id=f"by-{identifier}"))


def _method(report: ReportData) -> Html:
    rule = report.rule
    empty = "vote like any other" if rule.empty == "vote" else "vote only when there is nothing else"
    failing = "abstain" if rule.failing == "abstain" else "vote together as one"
    notes = (
        "EX is the share of questions whose answer's result equals the gold result under the named equality. "
        "A question with several samples counts once, with its mean.",
        "Intervals resample whole databases (percentile bootstrap, 2,000 draws) where there are at least ten; else "
        "they are Wilson's, or resample questions.",
        f"In a vote, empty results {empty} and failing answers {failing}; a tie goes to the group of the earliest "
        "sample.",
        "Broken episodes (a database, a worker or an endpoint failed, or the gold SQL did) are counted, never scored.",
    )
    return section("method", "How the figures are made", tag("ul", [tag("li", note) for note in notes], class_="notes"))


def _help(keys: Sequence[tuple[str, str]]) -> Html:
    rows = [tag("tr", tag("th", tag("kbd", key), scope="row"), tag("td", what)) for key, what in keys]
    close = tag("button", "Close", id="close-keys", type="button")
    return tag("dialog", join(tag("h2", "Keys"), tag("table", tag("tbody", rows)), close), id="keys", aria_label="Keys")
