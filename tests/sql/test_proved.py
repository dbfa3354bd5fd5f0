"""The equality `proved`: equivalence on every database, its counterexamples, and pairs on which it gives no verdict."""

import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import proved
from pipelines.core.types import Example
from pipelines.evaluation import evaluate
from pipelines.evaluation.paired_comparison import compare
from pipelines.evaluation.summary import summarise
from pipelines.rewards.outcome import make_outcomes
from pipelines.sql import proofs, scoring
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.schema import introspect

GOLD = "SELECT name FROM customer WHERE id > 2"
SAME, OTHER, UNKNOWN = (
    "SELECT c.name AS n FROM customer c WHERE NOT c.id <= 2",
    "SELECT 'Cy' UNION SELECT 'Di'",  # what these rows answer
    "SELECT n FROM (SELECT name AS n, id FROM customer) WHERE id > 2",
)


def test_pairs_of_known_answer_have_no_wrong_verdict(shop, tmp_path):
    found, _ = proved.measure([proved.without_rows(Path(shop.location), tmp_path)], 100)
    counts = {True: Counter(), False: Counter()}
    for (is_same, _), answers in found.items():
        counts[is_same] += answers
    assert counts == {True: {"right": 23, "unknown": 7}, False: {"right": 38}}


def test_a_constant_with_the_right_rows_is_not_equivalent_and_its_counterexample_can_be_run(engine, shop):
    (verdict,) = engine.verdicts([Pair(shop, GOLD, OTHER)], ["strict", "proved"])
    assert verdict.scores == {"strict": 1.0, "proved": 0.0}
    made = sqlite3.connect(":memory:")
    made.executescript(verdict.counterexample)
    assert sorted(made.execute(GOLD).fetchall()) != sorted(made.execute(OTHER).fetchall())
    made.close()
    with SqlEngine(Limits(), hidden={shop.location: (("purchase",), {})}) as sql:  # a script would name it
        assert proofs.prove(Pair(shop, GOLD, OTHER), sql) == (0.0, "")


@pytest.mark.parametrize(
    ("gold", "predicted", "score"),
    [
        ("SELECT name FROM customer ORDER BY city", "SELECT name FROM customer ORDER BY city, name", None),  # a tie
        ("SELECT city, name FROM customer GROUP BY city", "SELECT city, min(name) FROM customer GROUP BY city", None),
        ("SELECT item FROM purchase WHERE amount = 3", "SELECT item FROM purchase WHERE amount = 3 ORDER BY id", 1.0),
        ("SELECT count(*) FROM customer", "SELECT count(name) FROM customer", 1.0),  # it is NOT NULL
        ("SELECT count(*) FROM customer", "SELECT count(city) FROM customer", 0.0),
        ("SELECT credit FROM customer WHERE id = 1", "SELECT credit FROM customer WHERE +id = 1", None),
    ],
)
def test_what_chance_decides_refutes_nothing_and_a_rule_of_the_schema_proves(engine, shop, gold, predicted, score):
    assert proofs.prove(Pair(shop, gold, predicted), engine)[0] == score


def test_a_pair_that_is_not_decided_counts_nowhere_under_proved_and_elsewhere_as_ever(engine, shop):
    sent = dict(enumerate([SAME, OTHER, UNKNOWN]))
    gold = [scoring.GoldQuery(GOLD, "shop")] * 3
    (items,) = scoring.score_all(gold, sent, {"shop": shop}, ["strict", "proved"], engine)
    summary = scoring.summarise(items, ["strict", "proved"])
    assert (summary.figures["strict"]["all"], summary.figures["proved"]["all"]) == (100.0, 50.0)
    assert (summary.undecided, summary.disagreements) == ({"proved": [2]}, {("strict", "proved"): [1]})
    assert (items[2].line()["proved"], "counterexample" in items[1].line()) == (None, True)

    examples = {str(number): Example(str(number), "?", shop, GOLD) for number in sent}
    answers = [evaluate.of_prediction(str(number), text, "p") for number, text in sent.items()]
    records = evaluate.evaluate(answers, examples, engine, introspect, ["strict", "proved"], "greedy")
    by = {name: summarise(records, name) for name in ("strict", "proved")}
    assert [by["strict"].ex[name].value for name in by] == [1.0, 0.5] == [by["proved"].ex[name].value for name in by]
    assert [of.n_broken for of in by.values()] == [0, 1]
    assert compare(records, records, "proved").accuracy_before == 0.5
    outcomes = make_outcomes(answers, examples, engine, introspect, "proved", 1)
    assert [(of.correct, of.broken) for of in outcomes] == [(True, False), (False, False), (False, True)]
