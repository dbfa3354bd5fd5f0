"""The report of an evaluation: one self-contained HTML page, and its tables as Markdown, LaTeX and CSV."""

import os
from pathlib import Path

from pipelines.evaluation.record import Preview
from pipelines.report import formats, report_tables
from pipelines.report.data import ReportData, System, schemas_by_card, with_texts
from pipelines.report.page import document

__all__ = ["Preview", "ReportData", "System", "markdown", "with_results", "write", "write_all", "write_tables"]

PAGE = "report.html"
TABLES = "tables"  # the folder of the tables
PREVIEW_S = 5.0  # seconds for the first rows of one result; a slower result is left out


def write(data: ReportData, path: Path) -> None:
    """Write the HTML page. The same data gives the same bytes."""
    if not data.systems:
        raise ValueError("a report needs a system")
    page = document(data)
    # A lone surrogate of a model's text has no UTF-8; written as its escape it is what JSON wants anyway.
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def with_results(data: ReportData) -> ReportData:
    """The same with the schemas and the first rows of wrong results, of the databases that are there."""
    from pipelines.databases import card
    from pipelines.sql.engine import Limits, SqlEngine

    limits = Limits(PREVIEW_S)
    workers = len(os.sched_getaffinity(0))
    hidden = card.hidden_names()
    with SqlEngine(limits, workers, hidden=hidden) as sql:
        schemas = schemas_by_card(sql)
        return with_texts(data, sql, schemas)


def write_all(data: ReportData, folder: Path) -> None:
    """Write the page, and the tables into a folder of their own; `folder` exists."""
    write(data, folder / PAGE)
    tables = folder / TABLES
    tables.mkdir(exist_ok=True)
    write_tables(data, tables)


def markdown(data: ReportData) -> str:
    """All tables as GitHub Markdown."""
    tables = report_tables.all_tables(data)
    return "\n".join(map(formats.markdown, tables))


def write_tables(data: ReportData, folder: Path) -> None:
    """Write `tables.md`, `tables.tex` (for a paper; it needs booktabs), and each table as CSV with raw values."""
    tables = list(report_tables.all_tables(data))
    texts: dict[str, str] = {}
    texts["tables.md"] = "\n".join(map(formats.markdown, tables))
    texts["tables.tex"] = "\n".join(map(formats.latex, tables))
    for table in tables:
        texts[f"{table.slug}.csv"] = formats.to_csv(table)
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
