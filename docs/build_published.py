"""Writes build/published_systems.html: `python docs/build_published.py FOLDER`, the folder with slice and verdicts.

The page is what `sqltrain score --report` and `sqltrain compare --out` make of four published prediction files. It has
no trajectory reader: neither questions nor SQL of the benchmark are copied into this project.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed copy

from pipelines.report import writer
from pipelines.report.data import report_of_predictions
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.scoring import GoldQuery, locate_database

PAGE = Path(__file__).parents[1] / "build" / "published_systems.html"
VERDICTS = Path("vectors") / "spider_dev_slice_verdicts.jsonl"
EQUALITIES = ("test_suite_keep_distinct", "test_suite", "bird", "skyrl", "spider_exec")


def rows(shared: Path) -> list[Mapping[str, Any]]:
    """One row a prediction, with the official evaluators' verdicts."""
    return [json.loads(line) for line in (shared / VERDICTS).read_text(encoding="utf-8").splitlines()]


def gather(shared: Path) -> writer.ReportData:
    """The four systems, judged."""
    by_system: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows(shared):
        by_system.setdefault(row["system"], []).append(row)
    with SqlEngine(Limits(timeout_s=30)) as sql:
        reports = [_one(name, found, shared / "spider" / "database", sql) for name, found in by_system.items()]
    systems = tuple(system for each in reports for system in each.systems)
    return dataclasses.replace(
        reports[0],
        title="Four published systems on 133 questions of Spider dev",
        systems=systems,
        facts={"predictions": "C3, DAIL-SQL, DIN-SQL, Graphix, as their authors published them"},
    )


def _one(name: str, found: Sequence[Mapping[str, Any]], folder: Path, sql: SqlEngine) -> writer.ReportData:
    gold = [GoldQuery(row["gold"], row["db_id"]) for row in found]
    databases = {one.db_id: locate_database(one.db_id, str(folder), "sqlite") for one in gold}
    return report_of_predictions(name, gold, dict(enumerate(row["pred"] for row in found)), databases, EQUALITIES, sql)


def without_texts(data: writer.ReportData) -> writer.ReportData:
    """The figures alone."""
    systems = tuple(dataclasses.replace(system, trajectories=()) for system in data.systems)
    return dataclasses.replace(data, systems=systems, examples={}, schemas={}, results={})


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    writer.write(without_texts(gather(Path(sys.argv[1]))), PAGE)
