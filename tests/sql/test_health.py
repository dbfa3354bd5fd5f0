"""The health report of gold SQL, on queries with one known flaw each."""

import pytest

from pipelines.core.types import Example
from pipelines.sql import health
from pipelines.sql.engine import Limits, SqlEngine

FLAWS = {
    "SELECT name FROM customer": set(),
    "SELECT nope FROM customer": {"failing"},
    "DELETE FROM customer": {"failing"},
    "SELECT name FROM customer WHERE id > 99": {"empty"},
    # pen 3 and pen 3 lead the amounts behind cap 7
    "SELECT item FROM purchase ORDER BY amount DESC LIMIT 1": set(),
    "SELECT id FROM purchase ORDER BY amount DESC LIMIT 2": {"order_ambiguous"},
    "SELECT id FROM purchase ORDER BY amount DESC LIMIT 3": set(),
    "SELECT id FROM purchase ORDER BY amount DESC LIMIT 1 OFFSET 1": {"order_ambiguous"},
    "SELECT item FROM purchase ORDER BY amount DESC LIMIT 2": set(),  # the tied rows look the same
    "SELECT * FROM purchase ORDER BY amount DESC LIMIT 2": {"order_ambiguous"},
    "SELECT id, amount AS a FROM purchase ORDER BY a DESC LIMIT 2": {"order_ambiguous"},
    "SELECT id, amount FROM purchase ORDER BY 2 DESC LIMIT 2": {"order_ambiguous"},
    "SELECT item FROM purchase GROUP BY item ORDER BY count(*) DESC LIMIT 2": {"order_ambiguous"},
    "SELECT name FROM customer WHERE id = (SELECT customer_id FROM purchase WHERE id < 5 ORDER BY item DESC LIMIT 1)": {
        "order_ambiguous"
    },
    "SELECT city FROM customer ORDER BY city LIMIT 2": set(),
    "SELECT name FROM customer ORDER BY random()": {"nondeterministic"},
    "SELECT date('now')": {"nondeterministic"},
    "SELECT random  () > 0 FROM customer": {"nondeterministic"},
    "SELECT current_date": {"nondeterministic"},
    "SELECT count(*) FROM customer WHERE name = 'random'": set(),
    "SELECT count(*) AS now FROM customer AS rand": set(),
}


@pytest.fixture(scope="module")
def findings(engine, shop):
    return health.examine_gold([Example(sql, sql, shop, sql) for sql in FLAWS], engine)


@pytest.mark.parametrize("sql", FLAWS)
def test_each_flaw_is_found_and_no_other(findings, sql):
    assert {finding.reason for finding in findings if finding.example_id == sql} == FLAWS[sql]


def test_the_report(findings):
    found = health.count_reasons(findings)
    assert [found[reason] for reason in ("failing", "empty", "nondeterministic")] == [2, 1, 4]
    text = list(health.report_lines(findings))
    assert text[0] == "failing: 2 gold queries"
    assert any("no_such_column" in line and "SELECT nope" in line for line in text)
    assert any("tie on 3" in line for line in text)


def test_a_result_that_no_verdict_may_read_is_told(shop):
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT i FROM n"
    asked = [Example(str(count), f"{count}?", shop, numbers.format(count)) for count in (5, 50)]
    with SqlEngine(Limits(timeout_s=5, max_rows=10)) as engine:
        found = health.examine_gold(asked, engine)
    assert [(finding.example_id, finding.reason) for finding in found] == [("50", "too_large")]


def test_two_gold_queries_of_one_question_that_differ_are_told(engine, shop):
    asked = [
        Example("a", "Which cities?", shop, "SELECT city FROM customer"),
        Example("b", "which  cities?", shop, "SELECT DISTINCT city FROM customer"),
        Example("c", "Which cities?", shop, "SELECT name FROM customer"),
        Example("d", "Which items?", shop, "SELECT item FROM purchase"),
        Example("e", "Which items?", shop, "SELECT item FROM purchase WHERE 1"),
    ]
    found = [(one.example_id, one.reason, one.detail) for one in health.examine_gold(asked, engine)]
    assert found == [
        ("b", "contradictory", "another result than a has, under strict"),
        ("c", "contradictory", "another result than a has, under strict, bird, test_suite"),
    ]


def test_a_slow_query_is_told(engine, shop, monkeypatch):
    asked = [Example("a", "?", shop, "SELECT name FROM customer")]
    for limit, reasons in ((0.0, ["slow"]), (1e9, [])):
        monkeypatch.setattr(health, "SLOW_MS", limit)
        assert [finding.reason for finding in health.examine_gold(asked, engine)] == reasons
