"""Every published vector: our equalities and hardness against the verdicts of the unmodified official evaluators."""

import json
import os
from pathlib import Path

import pytest

from pipelines.core.types import Database
from pipelines.sql import analyst
from pipelines.sql.analysis.hardness import hardness
from pipelines.sql.engine import Pair
from tests.fakes import engine_fixture

engine = engine_fixture("module", timeout_s=30)
SHARED = Path(os.environ.get("SQLTRAIN_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
VECTORS = SHARED / "vectors"
pytestmark = pytest.mark.skipif(not VECTORS.is_dir(), reason=f"no benchmark material at {SHARED}")

PREDICTIONS = {
    "bird": "bird_ex",
    "soft_f1": "bird_soft_f1",
    "test_suite": "testsuite_exec",
    "test_suite_keep_distinct": "testsuite_exec_keep_distinct",
    "skyrl": "skyrl_reward",
    "spider_exec": "spider_exec_2018",
}
PROBES = {
    "bird": "ex",
    "soft_f1": "soft_f1",
    "test_suite": "exec_ts",
    "test_suite_keep_distinct": "exec_ts_keep_distinct",
    "skyrl": "skyrl_reward",
    "spider_exec": "exec_2018",
}
# Where we differ on purpose, and the defect of the official code that is the reason.
DEFECTS = {
    # evaluation.py replaces the word "value" in a prediction by "1" before it runs it.
    ("value_word_in_pred", "test_suite"): 1.0,
    ("value_word_in_pred", "test_suite_keep_distinct"): 1.0,
    # parse.py: remove_distinct keeps the first of two statements only; we refuse two statements.
    ("two_statements", "test_suite"): 0.0,
}


def judge(engine, rows, databases):
    pairs = [Pair(database, row["gold"], row["pred"]) for database, row in zip(databases, rows, strict=True)]
    return engine.verdicts(pairs, list(PREDICTIONS))


def test_the_verdicts_on_532_published_predictions(engine):
    rows = [json.loads(line) for line in (VECTORS / "spider_dev_slice_verdicts.jsonl").read_text().splitlines()]
    folder = SHARED / "spider" / "database"
    databases = [
        Database(row["db_id"], "sqlite", str(folder / row["db_id"] / f"{row['db_id']}.sqlite")) for row in rows
    ]
    different = [
        (row["db_id"], name, row["pred"], verdict.scores[name], row[field])
        for row, verdict in zip(rows, judge(engine, rows, databases), strict=True)
        for name, field in PREDICTIONS.items()
        if verdict.scores[name] != pytest.approx(row[field], abs=1e-6)
    ]
    assert len(rows) == 532
    assert different == []
    pairs = [Pair(of, row["gold"], row["pred"]) for of, row in zip(databases, rows, strict=True) if not row["bird_ex"]]
    assert 1.0 not in {analyst.prove(pair, engine)[0] for pair in pairs}


def test_the_verdicts_on_37_probes(engine):
    rows = json.loads((VECTORS / "probe" / "semantics.json").read_text())
    probe = Database("probe", "sqlite", str(VECTORS / "probe" / "db" / "probe" / "probe.sqlite"))
    different = {
        (row["case"], name): verdict.scores[name]
        for row, verdict in zip(rows, judge(engine, rows, [probe] * len(rows)), strict=True)
        for name, field in PROBES.items()
        if field in row and verdict.scores[name] != pytest.approx(row[field], abs=1e-6)
    }
    assert len(rows) == 37
    assert different == DEFECTS


def test_the_hardness_labels_of_predictions_and_probes():
    """Those of the questions themselves are held in test_spider.py."""
    rows = [json.loads(line) for line in (VECTORS / "spider_dev_slice_verdicts.jsonl").read_text().splitlines()]
    rows += [row for row in json.loads((VECTORS / "probe" / "semantics.json").read_text()) if "hardness" in row]
    assert [row for row in rows if hardness(row["gold"]) != row["hardness"]] == []
