"""Names are found by the engines' own parsers, however they are written; the page names tests that there are."""

import re
from pathlib import Path

import duckdb
import pytest

from pipelines.sql.dialects.trees import refused_by_duckdb, refused_by_postgres

HERE = Path(__file__).parent
POSTGRES = r"""
SELECT * FROM U&"pg\005fstat\005factivity"
SELECT * FROM pg_catalog.pg_stat_activity
SELECT * FROM public.pg_stat_activity
SELECT TREAT(1 AS pg_sleep)
SELECT DISTINCT ON (1) pg_sleep(5)
SELECT DISTINCT ON (1) lo_import('/etc/passwd')
SELECT * FROM pg_sleep(5) AS (values int)
SELECT * FROM pg_ls_dir('/') AS (a int)
SELECT * FROM ROWS FROM (pg_sleep(5), generate_series(1, 2))
SELECT 1 FROM (VALUES (1)) v(x) ORDER BY pg_sleep(5)
SELECT 1 WHERE EXISTS (SELECT 1 UNION SELECT 1 FROM pg_sleep(5))
SELECT 1 UNION SELECT 1 FROM pg_stat_activity
WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x
SELECT 1 INTO t
SELECT 1 UNION SELECT 2 FOR UPDATE
SELECT * FROM t FOR SHARE
SELECT CURRENT_USER
SELECT SESSION_USER
SELECT CURRENT_CATALOG
SELECT CURRENT_SCHEMA
SELECT * FROM information_schema.role_table_grants
SELECT * FROM json_table('1', '$' COLUMNS (a int))
SELECT (SELECT (SELECT pg_catalog.set_config('a', 'b', false)))
SELECT sum(pg_sleep(1)) OVER ()
SELECT CASE WHEN true THEN dblink('x', 'y') END
INSERT INTO t VALUES (1)
COPY t TO '/tmp/x'
EXPLAIN ANALYZE SELECT 1
SELECT 1; SELECT 2
"""
DUCKDB = """
SELECT read_text\ufeff('/etc/passwd')
SELECT * FROM main.duckdb_databases
SELECT * FROM system.main.duckdb_databases
SELECT * FROM "duckdb_settings"
SELECT DISTINCT ON (1) getenv('HOME')
SELECT '/etc/passwd'.read_text()
SELECT list_transform([1], lambda x: getenv('HOME'))
SELECT [getenv('HOME') for x in [1]]
SELECT * FROM read_csv('/etc/passwd')
SELECT * FROM (DESCRIBE (SELECT getenv('HOME')))
SELECT sum(getenv('HOME')::INT) OVER ()
SELECT * FROM t PIVOT (sum(getenv('x')::INT) FOR y IN (1))
SELECT * FROM pg_catalog.pg_settings
SELECT * FROM information_schema.role_table_grants
WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x
WITH x AS (INSERT INTO t VALUES (1) RETURNING *) SELECT * FROM x
WITH x AS (UPDATE t SET a = 1 RETURNING *) SELECT * FROM x
SHOW DATABASES
SHOW VARIABLES
SHOW ALL TABLES
CREATE TABLE t (a INT)
EXPLAIN ANALYZE CREATE TEMP TABLE t AS SELECT 1
SET x = 1
SELECT 1; SELECT 2
"""


@pytest.mark.parametrize("sql", POSTGRES.strip().splitlines())
def test_a_forbidden_name_is_found_by_the_engines_own_parser(sql: str) -> None:
    refused = refused_by_postgres(sql, None, {})
    assert refused is not None
    assert refused.status in ("refused", "error"), refused


def test_a_forbidden_name_is_found_by_duckdbs_own_parser() -> None:
    connection = duckdb.connect()

    def serialize(sql: str) -> str:
        found = connection.execute("SELECT json_serialize_sql($1::VARCHAR)", [sql]).fetchone()
        return str(found[0]) if found else ""

    passed = [sql for sql in DUCKDB.strip().splitlines() if refused_by_duckdb(sql, serialize) is None]
    assert passed == []
    connection.close()


def test_the_page_names_tests_that_there_are() -> None:
    page = (HERE.parents[1] / "docs" / "scoring.md").read_text()
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 10
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (HERE / file).read_text()]
    assert missing == []
