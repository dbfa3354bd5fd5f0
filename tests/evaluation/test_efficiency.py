"""R-VES of an evaluation's answers: the square root of what their speed earns, averaged over all questions."""

from __future__ import annotations

import math

import pytest

from pipelines.evaluation import efficiency
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.types import Database


def test_an_answer_far_slower_than_gold_earns_the_least(harbour: Database) -> None:
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) SELECT count(*) FROM n"
    with SqlEngine(Limits(timeout_s=10)) as engine:
        slow = efficiency.measure([(harbour, count, "SELECT 200000")], 2, engine, repeats=3)
        quick = efficiency.measure([(harbour, "SELECT 200000", count)], 2, engine, repeats=3)
    assert slow == pytest.approx(50.0 * math.sqrt(0.25))
    assert quick == pytest.approx(50.0 * math.sqrt(1.25))
