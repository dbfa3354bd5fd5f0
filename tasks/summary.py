"""Small pages and tables about a run: contract verdicts as offline HTML and markdown, stages and EX as tables."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pipelines.recipe.config import Recipe
from pipelines.stages.graph import StageResult, Step, seen_by

HEADLINE = ("ex", "ex_sampled", "majority", "pass_at_k")
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\|[]!`"})
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4}
.ok{color:#1a7f37}.bad{color:#b42318;font-weight:600}code{background:#f3f4f6;padding:0 .2rem}"""


def contract_html(verdict: Mapping[str, Any]) -> str:
    """A contract's verdict as one page that needs nothing else; every value is escaped."""
    lines = [
        "<tr><td class={}>{}</td><td>{}</td><td>{}</td><td>{} of {}</td><td>{:.2%}</td><td>{:.2%}</td></tr>".format(
            "ok" if item["passed"] else "bad",
            "held" if item["passed"] else "broken",
            escape(item["pool"] or "all"),
            escape(item["says"]),
            item["bad"],
            item["rows"],
            item["share"],
            item["allowed"],
        )
        for item in verdict["checks"]
    ]
    rows_html = [
        f"<tr><td>{escape(item['says'])}</td><td><code>{escape(example['row'])}</code></td>"
        f"<td>{escape(example['value'])}</td></tr>"
        for item in verdict["checks"]
        for example in item["examples"]
    ]
    title = f"Contract of stage {escape(verdict['stage'])}: {'held' if verdict['passed'] else 'broken'}"
    rows = f"<h2>Rows</h2><table><tr><th>what</th><th>row</th><th>value</th></tr>{''.join(rows_html)}</table>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{verdict['rows']} rows.</p>"
        "<table><tr><th></th><th>pool</th><th>a row is wrong when</th><th>rows</th>"
        f"<th>share</th><th>allowed</th></tr>{''.join(lines)}</table>{rows if rows_html else ''}</html>\n"
    )


def contract_markdown(verdict: Mapping[str, Any]) -> str:
    """A contract's verdict as a markdown table."""
    how = "held" if verdict["passed"] else "**BROKEN**"
    head = f"Contract of **{_cell(verdict['stage'])}**: {how}, {verdict['rows']} rows\n"
    lines = [
        f"| {'ok' if item['passed'] else '**broken**'} | {_cell(item['pool'] or 'all')} | {_cell(item['says'])} "
        f"| {item['bad']} of {item['rows']} | {item['share']:.2%} | {item['allowed']:.2%} |"
        for item in verdict["checks"]
    ]
    rows = [
        f"| {_cell(item['says'])} | {_cell(example['row'])} | {_cell(example['value'])} |"
        for item in verdict["checks"]
        for example in item["examples"]
    ]
    detail_lines = ["", "| what | row | value |", "|---|---|---|", *rows] if rows else []
    table = ["| | pool | a row is wrong when | rows | share | allowed |", "|---|---|---|---|---|---|", *lines]
    return "\n".join([head, *table, *detail_lines])


def stage_rows(steps: Sequence[Step], done: Mapping[str, StageResult]) -> list[dict[str, Any]]:
    """One row a stage: its key, what became of it and where it is."""
    rows = []
    for step in steps:
        result = done.get(step.name)
        state = "not made" if result is None else "cached" if result.cached else "made"
        rows.append({"stage": step.name, "state": state, "key": step.key, "why": step.why, "folder": str(step.folder)})
    return rows


def accuracy_markdown(results: Iterable[StageResult], recipe: Recipe) -> str:
    """The headline figures of every evaluation as one table; "" where nothing was evaluated."""
    lines = [
        f"| {result.kind.removeprefix('evaluate_')} | {_cell(seen_by(result.name, recipe).benchmark.name)} | "
        + " | ".join(f"{result.metrics[key]:.1%}" if key in result.metrics else "" for key in HEADLINE)
        + " |"
        for result in results
        if result.kind.startswith("evaluate_")
    ]
    head = ["| checkpoint | benchmark | " + " | ".join(HEADLINE) + " |", "|---" * (len(HEADLINE) + 2) + "|"]
    return "\n".join([*head, *lines]) if lines else ""


def report_markdown(page: Path, run: str, benchmark: str) -> str:
    """Where the report is: on MLflow's page of the run, which a browser opens, and as a file of the worker's machine.

    Args:
        run: the address of the run's page; "" where there is none.
        benchmark: which one it is of, where that is not the first; MLflow keeps it in a folder of that name.
    """
    place = "/".join(filter(None, ("artifacts", benchmark, "report.html")))
    online = f"[Open it in MLflow]({run}/{place}), or the file on the worker's machine:" if run else ""
    return f"{online or 'The file on the machine of the worker:'}\n\n    {page}\n"


def night_markdown(line: Mapping[str, Any]) -> str:
    """A night's decision with its numbers, as markdown."""
    head = [f"**{line['decision'].upper()}**: {_cell(line['reason'])}", ""]
    facts = [f"{line.get('rows', 0)} new questions in {len(line['new'])} batches"]
    for name in ("challenger", "champion"):
        if line.get(name):
            facts.append(f"{name} `{line[name]['stage']}/{line[name]['key']}`")
    numbers = [f"| {_cell(name)} | {value:.4g} |" for name, value in line.get("numbers", {}).items()]
    table = ["", "| number | value |", "|---|---|", *numbers] if numbers else []
    return "\n".join([*head, *(f"- {fact}" for fact in facts), *table])


def _cell(text: str) -> str:
    """Text that cannot end its table cell or start markup: no image is loaded, and no link or tag is made."""
    return escape(" ".join(text.split())).translate(_MARKDOWN)
