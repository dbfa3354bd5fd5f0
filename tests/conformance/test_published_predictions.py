"""Four published systems' predictions: EX equals the official evaluators' totals, and every failure has a class."""

from collections import Counter
from pathlib import Path

import pytest
from scipy import stats as scipy_stats
from test_official_verdicts import PREDICTIONS, SHARED

from pipelines.evaluation.paired_comparison import compare
from pipelines.evaluation.summary import summarise
from pipelines.report import formats, report_tables, writer
from pipelines.sql.diagnoses import ERROR_CLASSES
from tests.fakes import load_script

build_published = load_script(Path(__file__).parents[2] / "docs" / "build_published.py")
VECTORS = SHARED / build_published.VERDICTS
pytestmark = pytest.mark.skipif(not VECTORS.is_file(), reason=f"no verdicts at {VECTORS} (SQLTRAIN_SHARED_DATA)")
EQUALITIES = build_published.EQUALITIES


@pytest.fixture(scope="module")
def rows():
    return build_published.rows(SHARED)


@pytest.fixture(scope="module")
def data():
    return build_published.gather(SHARED)


def official(rows, system, equality):
    return [float(row[PREDICTIONS[equality]]) for row in rows if row["system"] == system]


def by_system(data):
    return {system.name: system.records for system in data.systems}


@pytest.mark.parametrize("equality", EQUALITIES)
def test_ex_is_the_official_total(data, rows, equality):
    for name, records in by_system(data).items():
        found = summarise(records, equality).ex[equality]
        wanted = official(rows, name, equality)
        assert found.n == len(wanted) == 133
        assert found.value * 133 == pytest.approx(sum(max(score, 0.0) for score in wanted))


def test_every_failure_has_a_class_with_evidence(data):
    for name, records in by_system(data).items():
        wrong = [record for record in records if not record.right(EQUALITIES[0])]
        assert all(record.diagnosis is not None and record.diagnosis.evidence for record in wrong), name
        counts = Counter(record.diagnosis.error for record in wrong if record.diagnosis)
        assert sum(counts.values()) == len(wrong) > 5
        assert set(counts) <= set(ERROR_CLASSES)
        # strong systems rarely invent or misspell
        assert counts["schema_linking"] + counts["semantic"] > len(wrong) / 2


def test_paired_tests_agree_with_scipy(data):
    first, *others = data.systems
    for other in others:
        found = compare(first.records, other.records, EQUALITIES[0], (first.name, other.name))
        assert found.paired.n == 133
        if found.gained + found.lost:
            expected = scipy_stats.binomtest(found.gained, found.gained + found.lost).pvalue
            assert found.p_mcnemar == pytest.approx(expected)


def test_the_report_of_published_systems_names_each_of_them(data, tmp_path):
    writer.write(data, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "133 questions over 4 databases" in page
    assert all(system.name in page for system in data.systems)


def test_the_tables_in_the_documentation_are_these(data):
    page = Path(__file__).parents[2].joinpath("docs", "results", "comparisons.md").read_text(encoding="utf-8")
    for table in (report_tables.equalities(data), report_tables.errors(data), report_tables.paired(data)):
        assert table is not None
        assert formats.markdown(table).strip() in page


def test_the_page_holds_no_text_of_the_benchmark(data, rows, tmp_path):
    writer.write(build_published.without_texts(data), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not any(row[name] in page for row in rows for name in ("gold", "pred"))
    assert len(page) < 200_000
