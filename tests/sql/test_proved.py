"""The equality `proved`: equivalence on every database of the schema, and `strict` where nothing is proved."""

import asyncio
import sqlite3
from collections import Counter
from pathlib import Path

from benchmarks import proved
from pipelines.sql import analyst
from pipelines.sql.engine import Limits, Pair, SqlEngine

GOLD = "SELECT name FROM customer WHERE id > 2"
OTHER = "SELECT 'Cy' UNION SELECT 'Di'"  # the rows of gold here


def test_pairs_of_known_answer_have_no_wrong_verdict(shop, tmp_path):
    found, _ = proved.measure([proved.without_rows(Path(shop.location), tmp_path)], 100)
    counts = [sum((n for (same, _), n in found.items() if same == wanted), Counter()) for wanted in (True, False)]
    assert counts == [{"right": 14, "unknown": 16}, {"right": 38}]


def test_a_constant_with_the_right_rows_is_not_equivalent_and_its_counterexample_can_be_run(engine, shop):
    pairs = {
        Pair(shop, GOLD, OTHER): 0.0,
        Pair(shop, GOLD, "SELECT c.name AS n FROM customer c WHERE NOT c.id <= 2"): 1.0,
        # What chance decides refutes nothing: a tie, a column that its groups do not settle
        Pair(shop, "SELECT name FROM customer ORDER BY city", "SELECT name FROM customer ORDER BY city, name"): 1.0,
        Pair(shop, "SELECT name FROM customer GROUP BY city", "SELECT min(name) FROM customer GROUP BY city"): 1.0,
        Pair(shop, "SELECT id FROM customer WHERE +id = 1", "SELECT id FROM customer WHERE id = 1"): 1.0,  # not decided
        # To sqlglot both types are texts
        Pair(shop, "SELECT CAST(name AS TEXT) FROM customer", "SELECT CAST(name AS STRING) FROM customer"): 0.0,
        Pair(shop, "SELECT name FROM customer WHERE id > 1 + 1", GOLD, (GOLD,)): 1.0,  # different from the first alone
        Pair(shop, OTHER, GOLD, (GOLD,)): 1.0,
    }
    verdicts = engine.verdicts([*pairs], ["strict", "proved"])
    assert [verdict.scores["proved"] for verdict in verdicts] == [*pairs.values()]
    assert [bool(verdict.counterexample) for verdict in verdicts] == [not score for score in pairs.values()]
    assert asyncio.run(engine.decide(next(iter(pairs)), ["strict", "proved"])) == verdicts[0]
    with SqlEngine(Limits(), hidden={shop.location: (("purchase",), {})}) as sql:  # a script would name it
        assert analyst.prove(next(iter(pairs)), sql) == (None, "")
    made = sqlite3.connect(":memory:")
    made.executescript(verdicts[0].counterexample)
    assert sorted(made.execute(GOLD).fetchall()) != sorted(made.execute(OTHER).fetchall())
