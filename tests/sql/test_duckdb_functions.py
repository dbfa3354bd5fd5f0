"""What DuckDB's own catalogue of functions holds is allowed, or refused for a reason; what is honest runs."""

import fnmatch
import re
from pathlib import Path

import duckdb
import pytest

from pipelines.core.types import ExecutionStatus
from pipelines.sql.dialects.base import plain_value
from pipelines.sql.dialects.guard import FUNCTIONS
from pipelines.sql.engine import Limits

HERE = Path(__file__).parent
LIMITS = Limits(timeout_s=20, max_rows=1000, max_bytes=1_000_000, memory_mb=512)
HONEST = [line for line in (HERE / "duckdb_honest.txt").read_text("utf-8").split("\n") if line and line[0] != "#"]


def test_each_function_of_duckdb_is_allowed_or_refused_for_a_reason():
    refused = [
        name
        for line in (HERE / "duckdb_refused.txt").read_text("utf-8").split("\n")
        if not line.startswith("#")
        for name in line.split()
    ]
    pattern = re.compile("|".join(map(fnmatch.translate, refused)))
    rows = duckdb.sql("SELECT DISTINCT lower(function_name) FROM duckdb_functions()").fetchall()
    known = {name for (name,) in rows if re.fullmatch(r"\w+", name)}  # an operator has no name
    allowed = known & FUNCTIONS["duckdb"]
    turned_away = {name for name in known if pattern.fullmatch(name)}
    assert sorted(allowed & turned_away) == []
    assert sorted(known - allowed - turned_away) == []
    assert [name for name in refused if not fnmatch.filter(known, name)] == []
    print(f"of {len(known)} functions {len(allowed)} are allowed and {len(turned_away)} refused")
    assert (len(known), len(allowed), len(turned_away)) == (1125, 570, 555)


def test_honest_statements_run_as_in_the_raw_engine(engine, duckdb_shop):
    assert len(set(HONEST)) == len(HONEST) >= 101
    results = engine.execute_many([(duckdb_shop, sql) for sql in HONEST])
    with duckdb.connect(duckdb_shop.location, read_only=True) as raw:
        for sql, result in zip(HONEST, results, strict=True):
            rows = [tuple(map(plain_value, row)) for row in raw.cursor().execute(sql).fetchall()]
            assert (result.error, list(result.rows)) == (None, rows), sql


MISTAKES = [
    "unhex('é')", "unhex('a€')", "unbin('é')", "from_binary('é')", "bitstring('é', 4)", "'é'::BIT",
    "strftime(DATE '2024-01-01', '%é%')",
]  # fmt: skip


@pytest.mark.parametrize("text", MISTAKES)
def test_a_message_that_ends_within_a_character_is_the_statements_mistake(engine, duckdb_shop, text):
    (result,) = engine.execute_many([(duckdb_shop, f"SELECT {text}")])
    assert (result.status, result.error_class) == (ExecutionStatus.ERROR, "runtime")
    assert result.error.endswith("\ufffd") or "\ufffd" in result.error


# A name that the lexer takes for a part of a text, or the other way round, would be a call that it does not see.
TEXTS = [
    ("SELECT $a$ $A$, getenv(1) $a$", ExecutionStatus.OK),
    ("SELECT $a$ $A$ $a$, getenv(1)", ExecutionStatus.REFUSED),
    ("SELECT E'\\', getenv(1), '", ExecutionStatus.OK),
    ("SELECT E'\\\\', getenv(1), ''", ExecutionStatus.REFUSED),
    ("SELECT '\\', getenv(1), '\\'", ExecutionStatus.REFUSED),
    ("SELECT $$ ' $$, getenv(1), ' '", ExecutionStatus.REFUSED),
    ("SELECT 1 AS a$$, getenv(1), 2 AS b$$", ExecutionStatus.REFUSED),
    ("SELECT 1e'\\', getenv(1), '", ExecutionStatus.REFUSED),
]


@pytest.mark.parametrize(("sql", "status"), TEXTS)
def test_a_text_ends_where_duckdb_ends_it(engine, duckdb_shop, sql, status):
    (result,) = engine.execute_many([(duckdb_shop, sql)])
    assert result.status is status, result
