"""SQL text is read in a worker, within bounds; no other process parses what a model or a benchmark wrote."""

import pytest

from pipelines.core.types import Action, ActionKind, Example, StopReason, Trajectory, Turn
from pipelines.rewards.outcome import make_outcomes
from pipelines.sql import analyst
from pipelines.sql.analysis.parsing import parse
from pipelines.sql.diagnoses import Failure
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.health import examine_gold
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import introspect
from pipelines.sql.similarity import sql_shape

JOINS = "SELECT 1 FROM customer" + " JOIN purchase" * 24  # its parser's work doubles with each JOIN
DATES = f"SELECT {'DATE(' * 40}1{')' * 40} FROM customer"
WIDE = f"SELECT {', '.join('name' for _ in range(3000))} FROM customer"


@pytest.fixture(scope="module")
def schema(shop):
    return introspect(shop)


@pytest.mark.parametrize("sql", [JOINS, DATES], ids=["joins", "dates"])
def test_text_that_would_hang_the_parser_is_unread_and_the_rest_goes_on(schema, sql):
    items = analyst.schema_items([(sql, schema, "sqlite"), ("SELECT name FROM customer", schema, "sqlite")])
    assert items[0] is None
    assert items[1] is not None
    assert analyst.hardness([(sql.replace("SELECT", "SELECT DISTINCT ALL"), "sqlite")]) == ["extra"]
    (diagnosis, _), *_ = analyst.diagnose([Failure(sql, "SELECT name FROM customer", schema)])
    assert (diagnosis.error, diagnosis.evidence) == ("semantic", "it runs; the answer is beyond the analysis's parser")


def test_a_worker_reads_gold_of_a_benchmark_and_an_answer_of_many_joins(shop, engine):
    example = Example("e1", "?", shop, "SELECT 1 FROM customer")
    sql = "SELECT 1 FROM customer" + " JOIN (SELECT 1)" * 24
    turn = Turn(sql, Action(ActionKind.SOLUTION, sql))
    answer = Trajectory("e1", 0, "policy", "react", (), (turn,), sql, StopReason.SOLUTION)
    (outcome,) = make_outcomes([answer], {"e1": example}, engine, introspect, "strict", 10)
    assert (outcome.correct, outcome.broken, outcome.predicted_schema) == (True, False, None)
    (ordered,) = analyst.tie_probes([("SELECT name FROM customer ORDER BY credit LIMIT 1", "sqlite")])
    assert [kept for _, kept, _ in ordered] == [1]
    assert analyst.tie_probes([("SELECT 1 FROM customer ORDER BY 1.5 LIMIT 1", "sqlite")]) == [()]
    assert (
        examine_gold([Example("e1", "?", shop, "SELECT name FROM customer ORDER BY 1.5 LIMIT 1")], engine) is not None
    )
    # The sandbox refuses them, so nothing may be paid for what the first of them reads
    assert parse("SELECT name FROM customer; DROP TABLE customer") is None
    assert parse("SELECT name FROM customer;") is not None


@pytest.mark.parametrize("engine_name", ["sqlite", "duckdb", "postgres", "mysql"])
@pytest.mark.parametrize("tail", ["; -- highest", "; /* a; b */ ;", ";\n-- a\n-- b;\n", "; -- it's"])
def test_a_comment_behind_the_last_semicolon_is_no_second_statement(shop, engine, schema, engine_name, tail):
    sql = "SELECT max(credit) FROM customer WHERE name = 'Ada' ORDER BY 1 LIMIT 1"
    text = sql + tail
    assert analyst.schema_items([(text, schema, engine_name)]) == analyst.schema_items([(sql, schema, engine_name)])
    assert analyst.schema_items([(text, schema, engine_name)])[0].tables == {"customer"}
    assert analyst.tie_probes([(text, engine_name)]) == analyst.tie_probes([(sql, engine_name)])
    assert analyst.lookups([(text, schema, engine_name)]) == analyst.lookups([(sql, schema, engine_name)])
    assert analyst.functions([(text, engine_name)]) == [("max",)]
    assert analyst.first_table([(text, engine_name)]) == ["customer"]
    assert analyst.prepared_items([(shop, text)]) == analyst.prepared_items([(shop, sql)])
    verdicts = engine.verdicts([Pair(shop, text, sql), Pair(shop, sql, text)], ["proved", "strict"])
    assert [verdict.scores for verdict in verdicts] == [{"proved": 1.0, "strict": 1.0}] * 2
    assert parse(f"{sql}; DROP TABLE customer{tail}", engine_name) is None


def test_a_request_that_outlives_the_clock_has_a_named_outcome(schema, monkeypatch):
    with SqlEngine(Limits(timeout_s=1e-4)) as impatient:
        monkeypatch.setattr(analyst, "_engine", lambda: impatient)
        assert analyst.schema_items([(WIDE, schema, "sqlite")]) == [None]
        (diagnosis, _), *_ = analyst.diagnose([Failure(WIDE, WIDE, schema)])
    assert diagnosis.evidence == analyst.UNREAD


@pytest.mark.parametrize("sign", ["/*", "[", "`", "'", '"', "('", "--"])
def test_what_needs_no_parser_is_linear_in_the_text(sign):
    """A pattern that starts anew at each unclosed sign would take hours here."""
    text = sign * 400_000
    assert bigrams(text) is not None
    assert sql_shape(text) is not None
