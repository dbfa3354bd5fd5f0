"""R-VES: rewards by steps, outliers dropped at three deviations, square roots averaged over all questions."""

from __future__ import annotations

import math

import pytest

from pipelines.evaluation import efficiency
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.types import Database


@pytest.mark.parametrize(
    ("ratio", "paid"),
    [(3.0, 1.25), (2.0, 1.25), (1.99, 1.0), (1.0, 1.0), (0.9, 0.75), (0.5, 0.75), (0.3, 0.5), (0.25, 0.5), (0.1, 0.25)],
)
def test_the_reward_has_the_published_steps(ratio: float, paid: float) -> None:
    assert efficiency.reward(ratio) == paid


def test_a_ratio_three_deviations_away_is_dropped() -> None:
    # 99 ones and one 100: mean 1.99, variance 0.99 * 0.99^2 + 0.01 * 98.01^2 = 97.03, so the bound is 29.55.
    assert efficiency.mean_ratio([1.0] * 99 + [100.0]) == 1.0
    assert efficiency.mean_ratio([1.0, 3.0]) == 2.0
    assert efficiency.mean_ratio([2.0, 2.0]) == 2.0  # the published script drops all of them and scores 0
    with pytest.raises(ValueError, match="no time ratios"):
        efficiency.mean_ratio([])


def test_wrong_answers_earn_nothing() -> None:
    assert efficiency.r_ves([1.25, 1.0, 0.25, 0.0]) == pytest.approx(25.0 * (math.sqrt(1.25) + 1.0 + 0.5))
    with pytest.raises(ValueError, match="needs questions"):
        efficiency.r_ves([])


def test_an_answer_far_slower_than_gold_earns_the_least(harbour: Database) -> None:
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) SELECT count(*) FROM n"
    with SqlEngine(Limits(timeout_s=10)) as engine:
        slow = efficiency.measure([(harbour, count, "SELECT 200000")], 2, engine, repeats=3)
        quick = efficiency.measure([(harbour, "SELECT 200000", count)], 2, engine, repeats=3)
    assert slow == pytest.approx(50.0 * math.sqrt(0.25))
    assert quick == pytest.approx(50.0 * math.sqrt(1.25))
