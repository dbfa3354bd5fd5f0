"""The equality `proved`: equivalence on every database of the schema, and `strict` where nothing is proved."""

import asyncio
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import proved
from pipelines.sql import analyst
from pipelines.sql.engine import Limits, Pair, SqlEngine

GOLD = "SELECT name FROM customer WHERE id > 2"
OTHER = "SELECT 'Cy' UNION SELECT 'Di'"  # the rows of gold here


def test_pairs_of_known_answer_have_no_wrong_verdict(shop, tmp_path):
    found, _ = proved.measure([proved.without_rows(Path(shop.location), tmp_path)], 100)
    counts = [sum((n for (same, _), n in found.items() if same == wanted), Counter()) for wanted in (True, False)]
    assert counts == [{"right": 14, "unknown": 16}, {"right": 38}]


# Each pair is equal but for NULLs: in a column that is compared, counted, averaged, joined, sorted or grouped.
NULLS = """
SELECT count(*) FROM customer | SELECT count(city) FROM customer
SELECT count(*) FROM purchase | SELECT count(customer_id) FROM purchase
SELECT name FROM customer WHERE city <> 'Paris' | SELECT name FROM customer WHERE city <> 'Paris' OR city IS NULL
SELECT name FROM customer WHERE NOT city = 'Paris' | SELECT name FROM customer WHERE city IS NOT 'Paris'
SELECT count(*) FROM customer WHERE credit >= 0 OR credit < 0 | SELECT count(*) FROM customer
SELECT item FROM purchase WHERE amount = amount | SELECT item FROM purchase
SELECT name FROM customer WHERE city LIKE '%' | SELECT name FROM customer
SELECT avg(credit) FROM customer | SELECT sum(credit) / count(*) FROM customer
SELECT avg(credit) FROM customer | SELECT avg(coalesce(credit, 0)) FROM customer
SELECT item || amount FROM purchase | SELECT coalesce(item, '') || amount FROM purchase
SELECT p.item FROM purchase p JOIN customer c ON p.customer_id = c.id | SELECT item FROM purchase
SELECT DISTINCT city FROM customer | SELECT DISTINCT city FROM customer WHERE city IS NOT NULL
SELECT count(DISTINCT city) FROM customer | SELECT count(*) FROM (SELECT DISTINCT city FROM customer)
SELECT city FROM customer GROUP BY city | SELECT city FROM customer WHERE city IS NOT NULL GROUP BY city
SELECT min(credit) FROM customer | SELECT credit FROM customer ORDER BY credit LIMIT 1
SELECT CASE WHEN credit > 5 THEN 1 ELSE 0 END FROM customer | SELECT CASE WHEN credit <= 5 THEN 0 ELSE 1 END FROM customer
SELECT city FROM customer EXCEPT SELECT item FROM purchase | SELECT city FROM customer WHERE city NOT IN (SELECT item FROM purchase)
""".strip().splitlines()  # noqa: E501


@pytest.mark.parametrize("turned", [False, True])
def test_pairs_that_differ_in_nulls_alone_are_told_apart(turned, engine, shop, tmp_path):
    empty = proved.without_rows(Path(shop.location), tmp_path)
    texts = [line.split(" | ")[:: -1 if turned else 1] for line in NULLS]
    assert [text for text in texts if analyst.prove(Pair(empty, *text), engine)[0] != 0.0] == []


def test_a_column_that_holds_no_null_has_none_in_a_generated_database(engine, shop):
    pairs = [
        Pair(shop, "SELECT count(*) FROM customer", "SELECT count(name) FROM customer"),  # NOT NULL
        Pair(shop, "SELECT count(*) FROM purchase", "SELECT count(id) FROM purchase"),  # the primary key
    ]
    assert [analyst.prove(pair, engine)[0] for pair in pairs] == [1.0, 1.0]


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
