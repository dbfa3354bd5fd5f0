"""What may be asked while exploring (the rule for TRUST-SQL's prompt and case study), and what lists everything."""

import time

import pytest

from pipelines.protocols.knowledge import is_probe, lists_everything

CASE_STUDY = [  # appendix E, turns 1 to 3
    "SELECT name AS table_name FROM sqlite_master WHERE type IN ('table');",
    "SELECT sql FROM sqlite_master WHERE type IN ('table') AND name IN ('frpm','schools');",
    'SELECT DISTINCT "Charter_Funding_Type" FROM frpm;',
]


@pytest.mark.parametrize("sql", CASE_STUDY)
def test_the_papers_own_probes_are_probes_and_list_not_everything(sql: str) -> None:
    assert is_probe(sql)
    assert not lists_everything(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "PRAGMA table_info(singer)",
        "SELECT * FROM pragma_table_info('singer')",
        "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p",
        "SELECT m.name, p.name FROM sqlite_master m JOIN pragma_table_info(m.name) p",
        "SELECT COUNT(*) FROM sqlite_master",  # a look into the catalogue may count
        "SELECT column_name FROM information_schema.columns WHERE table_name = 'singer'",
        "DESCRIBE singer",
        'SELECT name FROM "sqlite_master"',
    ],
)
def test_looks_into_the_catalogue_are_probes(sql: str) -> None:
    assert is_probe(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM singer LIMIT 3",
        "select kind from singer where name like '%count(%' order by kind limit 5",
        "SELECT MIN(age), MAX(age) FROM singer",
        "SELECT kind -- JOIN\nFROM singer /* GROUP BY */",
        "SELECT `group` FROM singer",  # a column whose name is a keyword
    ],
)
def test_looks_at_one_table_are_probes(sql: str) -> None:
    assert is_probe(sql)
    assert not lists_everything(sql)  # also with a star: it is no look into the catalogue


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT COUNT(*) FROM singer",
        "SELECT AVG (age) FROM singer",
        "SELECT kind, MAX(age) FROM singer GROUP BY kind",
        "SELECT s.name FROM singer s JOIN concert c ON s.id = c.singer_id",
        "SELECT s.name FROM singer s, concert c",
        "SELECT name FROM singer WHERE id IN (SELECT singer_id FROM concert)",
        "SELECT name FROM singer UNION SELECT name FROM stadium",
        "WITH a AS (SELECT 1) SELECT * FROM a",
        "SELECT ROW_NUMBER() OVER () FROM singer",
        "SELECT name FROM sqlite_master UNION SELECT name FROM singer",
        "DELETE FROM singer",
        "SELECT 1",
        "",
        "'",
        '"',
    ],
)
def test_what_answers_the_question_is_not_a_probe(sql: str) -> None:
    assert not is_probe(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT sql FROM sqlite_master",
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'",
        "SELECT * FROM sqlite_schema",
        "SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p WHERE m.type = 'table'",
        "SELECT table_name, column_name FROM information_schema.columns",
    ],
)
def test_all_columns_of_all_tables_at_once_is_the_hack(sql: str) -> None:
    assert lists_everything(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT name FROM sqlite_master",
        "SELECT sql FROM sqlite_master WHERE name = 'singer'",
        "SELECT name FROM pragma_table_info('singer')",
        "SELECT sql FROM singer",
        "PRAGMA table_info(singer)",
    ],
)
def test_listing_names_or_one_table_is_not_listing_everything(sql: str) -> None:
    assert not lists_everything(sql)


@pytest.mark.parametrize("piece", ["/*", "'", '"', "[", "`", "--", "--\n", "''", "a ", "(", "*/", "/**"])
def test_a_megabyte_of_anything_takes_no_time(piece: str) -> None:
    start = time.process_time()
    is_probe(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 4.0
