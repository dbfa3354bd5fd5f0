"""Four published systems' predictions: EX equals the official evaluators' totals, and every failure has a class."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from scipy import stats as scipy_stats

from pipelines.evaluation import contents, evaluate, report, tables
from pipelines.evaluation.compare import compare
from pipelines.evaluation.material import ReportData, System
from pipelines.evaluation.record import ERROR_CLASSES, EpisodeRecord
from pipelines.evaluation.summary import summarise
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect, render
from pipelines.types import Database, Example

SHARED = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
VECTORS = SHARED / "vectors" / "spider_dev_slice_verdicts.jsonl"
pytestmark = pytest.mark.skipif(not VECTORS.is_file(), reason=f"no verdicts at {VECTORS} (SQLTRAIN_SHARED_DATA)")
OFFICIAL = {
    "test_suite": "testsuite_exec",
    "test_suite_keep_distinct": "testsuite_exec_keep_distinct",
    "bird": "bird_ex",
    "skyrl": "skyrl_reward",
    "spider_exec": "spider_exec_2018",
}
EQUALITIES = ("test_suite_keep_distinct", "test_suite", "bird", "skyrl", "spider_exec")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def data(rows: list[dict[str, object]]) -> ReportData:
    """The four systems, judged."""
    databases = {
        name: Database(name, "sqlite", str(SHARED / "spider" / "database" / name / f"{name}.sqlite"))
        for name in {str(row["db_id"]) for row in rows}
    }
    examples = {
        f"{row['idx']}": Example(
            f"{row['idx']}", "", databases[str(row["db_id"])], str(row["gold"]), hardness=row["hardness"]
        )  # type: ignore[arg-type]
        for row in rows
    }
    systems = []
    with SqlEngine(Limits(timeout_s=30)) as engine:
        for name in dict.fromkeys(str(row["system"]) for row in rows):
            answers = [
                evaluate.of_prediction(f"{row['idx']}", str(row["pred"]), name) for row in rows if row["system"] == name
            ]
            records = evaluate.judge(answers, examples, engine, functools.cache(introspect), EQUALITIES, "greedy")
            systems.append(System(name, tuple(records), tuple(answers)))
    schemas = {name: render(introspect(database), "ddl") for name, database in databases.items()}
    return ReportData("published systems", EQUALITIES[0], tuple(systems), examples, schemas)


def official(rows: list[dict[str, object]], system: str, equality: str) -> list[float]:
    return [float(row[OFFICIAL[equality]]) for row in rows if row["system"] == system]  # type: ignore[arg-type]


def by_system(data: ReportData) -> dict[str, tuple[EpisodeRecord, ...]]:
    return {system.name: system.records for system in data.systems}


@pytest.mark.parametrize("equality", EQUALITIES)
def test_ex_is_the_official_total(data: ReportData, rows: list[dict[str, object]], equality: str) -> None:
    for name, records in by_system(data).items():
        found = summarise(records, equality).ex[equality]
        wanted = official(rows, name, equality)
        assert found.n == len(wanted) == 133
        assert found.value * 133 == pytest.approx(sum(max(score, 0.0) for score in wanted))


def test_every_failure_has_a_class_with_evidence(data: ReportData) -> None:
    for name, records in by_system(data).items():
        wrong = [record for record in records if not record.right(EQUALITIES[0])]
        assert all(record.diagnosis is not None and record.diagnosis.evidence for record in wrong), name
        counts = Counter(record.diagnosis.error for record in wrong if record.diagnosis)
        assert sum(counts.values()) == len(wrong) > 5
        assert set(counts) <= set(ERROR_CLASSES)
        assert (
            counts["schema_linking"] + counts["semantic"] > len(wrong) / 2
        )  # strong systems rarely invent or misspell


def test_paired_tests_agree_with_scipy(data: ReportData) -> None:
    first, *others = data.systems
    for other in others:
        found = compare(first.records, other.records, EQUALITIES[0], (first.name, other.name))
        assert found is not None
        assert found.paired.n == 133
        if found.gained + found.lost:
            expected = scipy_stats.binomtest(found.gained, found.gained + found.lost).pvalue
            assert found.p_mcnemar == pytest.approx(expected)


def test_their_report_is_written(data: ReportData, tmp_path: Path) -> None:
    report.write(data, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "133 questions over 4 databases" in page
    assert all(system.name in page for system in data.systems)


def test_the_tables_in_the_documentation_are_these(data: ReportData) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "published_systems.md").read_text(encoding="utf-8")
    for table in (contents.equalities(data), contents.errors(data), contents.paired(data)):
        assert table is not None
        assert tables.markdown(table).strip() in page
