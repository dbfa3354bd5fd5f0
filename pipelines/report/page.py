"""The whole page: one file that asks nothing of the network and runs no script but its own."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipelines.evaluation.measures import SMOOTH, series
from pipelines.evaluation.stats import Estimate, Paired
from pipelines.evaluation.summary import Level, Summary
from pipelines.report import charts, formats, report_tables
from pipelines.report.charts import Child, Html, canvas, data, join, marker, tag
from pipelines.report.data import ReportData
from pipelines.report.formats import Cell, ReportTable, TableColumn, show
from pipelines.report.reader_payload import Payload, payload
from pipelines.sql.diagnoses import ERROR_CLASSES

# The report's sections as HTML: a plain sentence first, then the chart, then the table that it was drawn from.

LETTERS = {"easy": "E", "medium": "M", "hard": "H", "extra": "X"}
LEADING = ("reward", "ex", "ex_held_out", "turns", "loss", "accuracy")  # the curves of training that stand first
ABOUT_ERRORS = {
    "hallucination": "names what does not exist",
    "schema_linking": "wrong or missing tables, columns",
    "semantic": "right schema, wrong logic",
    "syntax": "refused by the engine",
    "generation": "no final SQL",
}


def section(identifier: str, title: str, *children: Child) -> Html:
    """A section with its heading, reachable from the navigation."""
    heading = tag("h2", title, id=f"{identifier}-title")
    return tag("section", heading, *children, id=identifier, aria_labelledby=f"{identifier}-title")


def sections(data: ReportData) -> Iterator[tuple[str, str, Html]]:
    """(id, short name, markup) of every section that has something to show, the trajectory reader left out."""
    yield "accuracy", "Accuracy", _accuracy(data)
    if data.comparisons:
        yield "paired", "Paired tests", _paired(data)
    for entry in data.tables:
        yield entry.slug, entry.title, section(entry.slug, entry.title, _note(entry), table(entry, caption=False))
    yield "hardness", "Hardness", _hardness(data)
    if any(summary.points for summary in data.summaries):
        yield "samples", "Samples", _samples(data)
    yield "cost", "Cost", _cost(data)
    if any(sum(summary.errors.values()) for summary in data.summaries):
        yield "errors", "Errors", _errors(data)
    if data.pass_rates:
        yield "difficulty", "Difficulty", _difficulty(data)
    if any(data.curves.values()):
        yield "training", "Training", _training(data)
    yield "slices", "Slices", _slices(data)


def _note(source: ReportTable) -> Html | None:
    return tag("p", source.note, class_="about") if source.note else None


def headline(data: ReportData) -> Html:
    """The first thing to see: each system's EX, large, with its interval."""
    return tag(
        "div",
        [_figure(style, data.systems[style].name, summary) for style, summary in enumerate(data.summaries)],
        class_="figures",
    )


def _figure(style: int, name: str, summary: Summary) -> Html:
    estimate = summary.headline
    kind = "greedy EX" if summary.ex else "mean sampled EX"
    sampled = f"sampled {formats.percent(summary.sampled.value)} %" if summary.ex and summary.sampled else None
    return tag(
        "div",
        tag("div", legend_mark(style), name, class_="figure-name"),
        tag(
            "div",
            formats.percent(estimate.value if estimate else None),
            tag("span", "%", class_="unit"),
            class_="figure-value",
        ),
        tag("div", f"{kind} {formats.interval(estimate)}", class_="figure-note"),
        tag("div", sampled, class_="figure-note") if sampled else None,
        class_="figure",
    )


def legend_mark(style: int) -> Html:
    """A system's marker, for legends and table rows."""
    return canvas(14, 14, "", marker(7, 7, style, size=4.2), class_="key")


def legend(data: ReportData) -> Html:
    """Which marker is which system."""
    items = (tag("li", legend_mark(style), system.name) for style, system in enumerate(data.systems))
    return tag("ul", items, class_="legend")


def table(source: ReportTable, caption: bool = True) -> Html:
    """A table with aligned figures; the first column is the row's heading."""
    head = tag("tr", [_heading(column) for column in source.columns])
    body = [_row(source, index, row) for index, row in enumerate(source.rows)]
    narrow = "narrow" if len(source.columns) < 4 else None
    title = tag("caption", source.title, tag("span", source.note, class_="note") if source.note else None)
    return tag(
        "div",
        tag("table", title if caption else None, tag("thead", head), tag("tbody", body), class_=narrow),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=source.title,
    )


def _heading(column: TableColumn) -> Html:
    return tag(
        "th", column.name, scope="col", class_=None if column.kind == "text" else "num", title=column.about or None
    )


def _row(source: ReportTable, index: int, row: Sequence[Cell]) -> Html:
    style = source.styles[index] if source.styles else None
    cells = []
    for position, (cell, column) in enumerate(zip(row, source.columns, strict=True)):
        name = column.name in ("system",) and style is not None
        content = join(legend_mark(style) if name and style is not None else None, _cell(cell, column))
        class_ = None if column.kind == "text" else "num"
        cells.append(tag("th", content, scope="row") if position == 0 else tag("td", content, class_=class_))
    return tag("tr", cells)


def _cell(cell: Cell, column: TableColumn) -> Html:
    if isinstance(cell, Estimate):
        tip = f"n = {cell.n}, {cell.n_clusters} databases, {cell.method}"
        bounds = tag("span", formats.interval(cell), class_="bounds", title=tip)
        return join(tag("span", formats.percent(cell.value), class_="figure-cell"), " ", bounds)
    if isinstance(cell, Paired):
        bounds = tag(
            "span", f"[{formats.points(cell.low)}, {formats.points(cell.high)}]", class_="bounds", title=cell.method
        )
        return join(tag("span", formats.points(cell.difference), class_="figure-cell"), " ", bounds)
    return join(show(cell, column.kind))


def _accuracy(data: ReportData) -> Html:
    groups = [
        charts.Group("greedy", "one answer a question", _rows(data, [s.ex.get(data.equality) for s in data.summaries]))
    ]
    if any(summary.sampled for summary in data.summaries):
        groups.append(charts.Group("sampled", "mean of the samples", _rows(data, [s.sampled for s in data.summaries])))
    other = report_tables.equalities(data)
    return section(
        "accuracy",
        "Execution accuracy",
        [tag("p", sentence, class_="lead") for sentence in report_tables.verdicts(data)],
        tag("figure", legend(data), charts.forest(groups, "EX of each system with its 95 % interval")),
        table(report_tables.leader(data)),
        table(other) if other is not None else None,
    )


def _rows(data: ReportData, estimates: Sequence[Estimate | None]) -> tuple[charts.ChartRow, ...]:
    pairs = enumerate(zip(data.systems, estimates, strict=True))
    return tuple(charts.ChartRow(style, system.name, estimate) for style, (system, estimate) in pairs)


def _paired(data: ReportData) -> Html:
    words = (
        "Both systems answered the same questions, so differences are taken question by question. McNemar's exact test "
        "looks at the questions that flipped; the other one flips the signs of whole databases, because questions over "
        "one database stand and fall together. Where there are fewer than ten databases it flips single questions."
    )
    return section("paired", "Paired tests", tag("p", words, class_="about"), table(report_tables.paired(data)))


def _levels(data: ReportData) -> list[tuple[str, list[Level | None]]]:
    by_system = [{level.name: level for level in summary.by_hardness} for summary in data.summaries]
    names = list(dict.fromkeys(name for levels in by_system for name in levels))
    return [(name, [levels.get(name) for levels in by_system]) for name in names]


def _hardness(data: ReportData) -> Html:
    groups = []
    for name, levels in _levels(data):
        n = max(level.n for level in levels if level)
        estimates = [(level.ex or level.sampled) if level else None for level in levels]
        groups.append(charts.Group(name, f"{n} questions", _rows(data, estimates)))
    return section(
        "hardness",
        "By hardness",
        tag("figure", legend(data), charts.forest(groups, "EX by hardness level with 95 % intervals")),
        _more("As a table", table(report_tables.hardness(data), caption=False)),
    )


def _more(title: str, *children: Child) -> Html:
    return tag("details", tag("summary", title), *children)


def _samples(data: ReportData) -> Html:
    words = (
        "pass@k: some of k samples is right. majority@k: the result that most of k samples agree on is right. "
        "average@k: what one sample is worth."
    )
    kinds = ("pass_at", "majority_at", "average_at")
    series_of = {kind: _over_k(data, kind) for kind in kinds}
    bounds = [point for series in series_of.values() for line in series for point in line.points]
    low = max(0.0, min(point.low or 0 for point in bounds) // 0.1 * 0.1)
    high = min(1.0, max(point.high or 0 for point in bounds) // 0.1 * 0.1 + 0.1)
    figures = [
        tag("figure", tag("figcaption", f"{kind[:-3]}@k"), charts.curve_over_k(series, f"{kind[:-3]}@k", low, high))
        for kind, series in series_of.items()
    ]
    return section(
        "samples",
        "Several samples",
        tag("p", words, class_="about"),
        legend(data),
        tag("div", figures, class_="multiples three"),
        _more("As a table", table(report_tables.samples(data), caption=False)),
    )


def _over_k(data: ReportData, kind: str) -> list[charts.Series]:
    series = []
    for style, (system, summary) in enumerate(zip(data.systems, data.summaries, strict=True)):
        estimates: list[tuple[int, Estimate]] = [(point.k, getattr(point, kind)) for point in summary.points]
        points = tuple(charts.Point(k, estimate.value, estimate.low, estimate.high) for k, estimate in estimates)
        if points:
            series.append(charts.Series(style, system.name, points))
    return series


def _cost(data: ReportData) -> Html:
    clouds = [
        tag("figure", tag("figcaption", f"EX against {unit} a question"), charts.cloud(dots, unit))
        for unit, dots in (
            ("generated tokens", _dots(data, "tokens_out")),
            ("characters of reasoning", _dots(data, "reasoning_chars")),
        )
        if any(dot.x for dot in dots)
    ]
    about = "Each mark is one hardness level: " + ", ".join(f"{mark} {name}" for name, mark in LETTERS.items()) + "."
    return section(
        "cost",
        "Turns and cost",
        table(report_tables.behaviour(data)),
        table(taken) if (taken := report_tables.costs(data)) is not None else None,
        table(report_tables.likeness(data)),
        tag("h3", "Turns by hardness"),
        legend(data),
        tag("figure", charts.turns(_turn_rows(data), "Mean turns by hardness level")),
        (tag("h3", "Accuracy against cost"), tag("p", about, class_="about")) if clouds else None,
        tag("div", clouds, class_="multiples wide"),
    )


def _turn_rows(data: ReportData) -> list[tuple[str, list[tuple[int, str, float, float]]]]:
    return [
        (
            name,
            [
                (style, data.systems[style].name, level.turns.mean, level.turns.p95)
                for style, level in enumerate(levels)
                if level and level.turns
            ],
        )
        for name, levels in _levels(data)
    ]


def _dots(data: ReportData, attribute: str) -> list[charts.Dot]:
    dots = []
    for style, (system, summary) in enumerate(zip(data.systems, data.summaries, strict=True)):
        for level in summary.by_hardness:
            spread, ex = getattr(level, attribute), level.ex or level.sampled
            if spread is not None and ex is not None:
                mark = LETTERS[level.name]
                dots.append(charts.Dot(style, system.name, level.name, mark, spread.mean, ex.value))
    return dots


def _errors(data: ReportData) -> Html:
    groups = []
    for name in ERROR_CLASSES:
        totals = [max(sum(summary.errors.values()), 1) for summary in data.summaries]
        members = [
            charts.Bar(style, data.systems[style].name, summary.errors[name], summary.errors[name] / totals[style])
            for style, summary in enumerate(data.summaries)
        ]
        groups.append((name.replace("_", " "), ABOUT_ERRORS[name], members))
    return section(
        "errors",
        "Error classes",
        tag(
            "p",
            "Every wrong greedy answer is in exactly one class, put there by program with its evidence.",
            class_="about",
        ),
        tag("figure", legend(data), charts.bars(groups, "Wrong answers by error class")),
        _more("Finer clues", table(report_tables.clues(data), caption=False)),
    )


def _difficulty(data: ReportData) -> Html:
    useful = sum(0 < rate < 1 for rate in data.pass_rates)
    words = (
        f"{formats.count(len(data.pass_rates))} questions were tried"
        + (f" {data.group} times each" if data.group else "")
        + f" by the policy after SFT; {formats.count(useful)} are solved sometimes and not always, "
        "and only those give GRPO a signal."
    )
    chart = charts.histogram(data.pass_rates, "Questions by pass rate")
    return section(
        "difficulty", "Difficulty of the training questions", tag("p", words, class_="about"), tag("figure", chart)
    )


def _training(data: ReportData) -> Html:
    trained = [(stage, rows) for stage, rows in data.curves.items() if rows]
    stages = [_stage_curves(stage, rows, style) for style, (stage, rows) in enumerate(trained, 1)]
    words = f"Faint: every step. Firm: the mean of the last {SMOOTH} steps."
    reached = report_tables.thresholds(data)
    steps = _more(reached.title, table(reached, caption=False)) if reached.rows else None
    return section("training", "Training curves", tag("p", words, class_="about"), stages, steps)


def _stage_curves(stage: str, rows: Sequence[Mapping[str, float]], style: int) -> list[Child]:
    """The curves that matter, the others behind a click, and in words those that never move."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    curves = {name: values for name in names if len(values := series(rows, name)) > 1}
    moving = [name for name, values in curves.items() if len({y for _, y in values}) > 1]
    first = [name for name in LEADING if name in moving]
    rest = [name for name in moving if name not in first]
    still = [f"{_plain(name)} ({formats.compact(curves[name][0][1])})" for name in curves if name not in moving]
    return [
        tag("h3", stage),
        _multiples(first, curves, style),
        _more(f"{len(rest)} more", _multiples(rest, curves, style)) if rest else None,
        tag("p", f"The same at every step: {', '.join(still)}.", class_="about") if still else None,
    ]


def _multiples(names: Sequence[str], curves: Mapping[str, Sequence[tuple[float, float]]], style: int) -> Html:
    figures = [
        tag("figure", tag("figcaption", _plain(name)), charts.training_curve(curves[name], name, style))
        for name in names
    ]
    return tag("div", figures, class_="multiples")


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _slices(data: ReportData) -> Html:
    tables = (report_tables.difficulty(data), report_tables.links(data), report_tables.databases(data))
    return section(
        "slices", "Slices", [_more(entry.title, table(entry, caption=False)) for entry in tables if entry.rows]
    )


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
        f"{formats.count(summary.n_questions)} questions over {formats.count(summary.n_databases)} databases, "
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


def _reader(reader: Payload) -> Html:
    shown = formats.count(len(reader.index["rows"]))
    note = f"{shown} trajectories" + (
        f"; {formats.count(reader.left_out)} more are not in this file" if reader.left_out else ""
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
