"""Verified schema knowledge: the rule, worked through on TRUST-SQL's case study (appendix E)."""

import dataclasses
import time

import pytest

from pipelines.core.types import Action, ActionKind, ExecutionStatus, SchemaItems, StopReason, Trajectory, Turn
from pipelines.protocols import knowledge
from pipelines.protocols.knowledge import is_probe, lists_everything

OK, ERROR = ExecutionStatus.OK, ExecutionStatus.ERROR
FRPM = knowledge.proposal(
    ["frpm", "schools"],
    {"frpm": ["Charter School (Y/N)", "Charter_Funding_Type", "CDSCode"], "schools": ["Phone", "OpenDate"]},
)


def explore(sql, observation, status=OK):
    return Turn("", Action(ActionKind.EXPLORE, sql, "r"), observation, status, n_rows=1)


def propose(content):
    return Turn("", Action(ActionKind.PROPOSE, content, "r"), "noted")


def trajectory(*turns):
    return Trajectory("e1", 0, "policy", "phases", (("user", "Phone?"),), turns, "S", StopReason.SOLUTION)


CASE = (
    explore("SELECT name FROM sqlite_master", "frpm satscores schools"),
    explore(
        "SELECT sql FROM sqlite_master WHERE name IN ('frpm', 'schools')",
        "CREATE TABLE frpm (CDSCode TEXT, `Charter School (Y/N)` INTEGER) "
        "CREATE TABLE schools (Phone TEXT, OpenDate DATE)",
    ),
    explore("SELECT DISTINCT Charter_Funding_Type FROM frpm", "Directly funded"),
)


def test_what_is_verified_in_the_papers_case():
    found = knowledge.proposed(trajectory(*CASE, propose(FRPM)))
    assert found == SchemaItems(
        frozenset({"frpm", "schools"}),
        frozenset(
            {("frpm", "charter school (y/n)"), ("frpm", "charter_funding_type"), ("frpm", "cdscode")}
            | {("schools", "phone"), ("schools", "opendate")}
        ),
    )
    assert knowledge.unverified(trajectory(*CASE, propose(FRPM))) == frozenset()
    assert knowledge.unverified(trajectory(*CASE[:2], propose(FRPM), CASE[2])) == {"charter_funding_type"}
    failed = dataclasses.replace(CASE[2], status=ERROR, observation="no such column: Charter_Funding_Type")
    assert knowledge.unverified(trajectory(*CASE[:2], failed, propose(FRPM))) == {"charter_funding_type"}
    seen = explore("SELECT name FROM sqlite_master", "telephones")
    assert knowledge.unverified(trajectory(seen, propose(knowledge.proposal(["phone"], {})))) == {"phone"}
    given = (("user", "Phone?"), ("assistant", "look"), ("user", "CREATE TABLE schools (Phone TEXT)"))
    prefilled = dataclasses.replace(trajectory(propose(knowledge.proposal([], {"schools": ["Phone"]}))), prompt=given)
    assert knowledge.unverified(prefilled) == frozenset()


def test_the_last_proposal_counts_and_none_is_none():
    twice = trajectory(propose(knowledge.proposal(["a"], {})), propose(knowledge.proposal(["b"], {})))
    assert knowledge.proposed_turn(twice) == 1
    assert knowledge.proposed(twice) == SchemaItems(frozenset({"b"}), frozenset())
    assert knowledge.proposed(trajectory()) is None
    assert knowledge.unverified(trajectory()) == frozenset()


@pytest.mark.parametrize(
    ("sql", "observation"),
    [
        ("SELECT 1 -- singer name", "1\n1"),
        ("SELECT 1 /* singer name */ FROM sqlite_master", "1\n1"),
        ("SELECT 1 AS singer, 2 AS name FROM sqlite_master", "singer | name\n1 | 2"),
        ("SELECT 1 singer, 2 name FROM sqlite_master", "singer | name\n1 | 2"),
        ("SELECT 'singer', 'name' FROM sqlite_master", "'singer' | 'name'\nsinger | name"),
        ("SELECT 'sin' || 'ger', 'na' || 'me'", "a | b\nsinger | name"),
        ("SELECT char(115, 105), printf('%s%s', 'na', 'me')", "a | b\nsinger | name"),
        ("VALUES ('singer name')", "column1\nsinger name"),
        ("SELECT type FROM sqlite_master singer, sqlite_master name", "type\ntable"),
        ("SELECT type FROM sqlite_master WHERE 'singer name' > ''", "type\ntable"),
        ("WITH singer AS (SELECT 1 AS name) SELECT name FROM singer", "name\n1"),
        ("WITH singer(name) AS MATERIALIZED (SELECT 1) SELECT singer.name FROM singer", "name\n1"),
        ("SELECT singer.name FROM (SELECT 1 AS name) AS singer ORDER BY name", "name\n1"),
        ("SELECT singer.name FROM (VALUES (1)) AS singer(name)", "name\n1"),
        ("SELECT name, singer FROM sqlite_master AS s(name, singer)", "name | singer\ntable | a"),
        ("SELECT s.name, singer FROM sqlite_master s(name, singer)", "name | singer\ntable | a"),
        ("SELECT rank() OVER singer FROM sqlite_master AS name WINDOW singer AS (ORDER BY type)", "rank\n1"),
        ('SELECT "singer", "name" FROM sqlite_master WHERE "singer" > ""', '"singer" | "name"\nsinger | name'),
        ("SELECT {singer: 1, name: 2}", "{'singer': 1, 'name': 2}"),
        ("SELECT singer: 1, name: 2", "singer | name\n1 | 2"),
        ("SELECT @singer, @name", "@a | @b\nnull | null"),
        ("SELECT singer(1), name()", "a | b\n1 | 2"),
        ("SELECT TRUE singer, 1. name", "singer | name\n1 | 1.0"),
        ("SELECT singer.name FROM (SELECT 1 AS 'name') AS 'singer'", "name\n1"),
        ("WITH 'singer' AS (SELECT 1 'name') SELECT name FROM singer", "name\n1"),
        ('SELECT 1 IS NOT DISTINCT FROM "singer", 1 IS NOT "name"', "a | b\n0 | 1"),
        ('SELECT value FROM json_each(\'["singer", "name"]\')', "value\nsinger\nname"),
        ("SELECT substr('xsinger', 2), trim(' name')", "a | b\nsinger | name"),
        ("SELECT CAST(x'73696e676572' AS TEXT), CAST(x'6e616d65' AS TEXT)", "a | b\nsinger | name"),
        ("SELECT group_concat(v, '') FROM (SELECT 'sin' AS v UNION ALL SELECT 'ger')", "a\nsinger name"),
        ("SELECT (SELECT name) FROM (SELECT 1 AS name) AS singer", "a\n1"),
        ("EXPLAIN SELECT 1 AS singer, 2 AS name", "singer name"),
        ("not SQL at all: singer name", "singer name"),
    ],
)
def test_words_that_the_agent_wrote_itself_verify_nothing(sql, observation):
    proposal = propose(knowledge.proposal(["singer"], {"singer": ["name"]}))
    assert knowledge.unverified(trajectory(explore(sql, observation), proposal)) == {"singer", "name"}


@pytest.mark.parametrize(
    ("sql", "observation"),
    [
        ("SELECT name FROM singer", "name\nAnn"),
        ("SELECT DISTINCT s.name AS n FROM singer AS s WHERE s.name <> 'x'", "n\nAnn"),
        ('SELECT singer."name" FROM [singer] LIMIT 1', "name\nAnn"),
        ('SELECT `name` FROM "singer" LIMIT 1', "name\nAnn"),
        ("SELECT name AS name FROM singer AS s ORDER BY name", "name\nAnn"),
        ("SELECT name::text FROM singer singer", "name\nAnn"),
        ("WITH s AS (SELECT name FROM singer) SELECT name AS n FROM s WHERE n > ''", "n\nAnn"),
        ("SELECT count(*) FILTER (WHERE name > '') FROM singer", "count\n1"),
        ("SELECT sql FROM sqlite_master WHERE tbl_name = 'singer'", "sql\nCREATE TABLE singer (name TEXT)"),
        ("PRAGMA table_info('singer')", "cid | tbl\n0 | singer.name"),
        ("SELECT max(name), count(*) FROM singer GROUP BY name", "max(name) | count(*)\nAnn | 1"),
        ("SELECT max(name) AS name FROM singer", "name\nAnn"),
        ("SELECT CAST(lower(name) AS TEXT) AS name, count(*) AS singer FROM singer", "name | singer\nann | 1"),
        ('SELECT s.name FROM stadium, "singer" AS s', "name\nAnn"),
        ("SELECT 1 FROM stadium WHERE EXISTS (SELECT 1 FROM singer WHERE name = stadium.owner)", "1\n1"),
        ("SELECT group_concat(name, ', ') FROM pragma_table_info('singer')", "a\nsinger, name"),
        ("PRAGMA table_info(singer)", "cid | name\n0 | name"),
        ("DESCRIBE singer", "singer | name\nvarchar | yes"),
    ],
)
def test_what_a_query_reads_or_the_database_shows_is_verified(sql, observation):
    proposal = propose(knowledge.proposal(["singer"], {"singer": ["name"]}))
    assert knowledge.unverified(trajectory(explore(sql, observation), proposal)) == frozenset()


@pytest.mark.parametrize(
    ("sql", "observation", "proposed", "unverified"),
    [
        # A pragma that takes no table gives its rows whatever its argument is.
        ("PRAGMA collation_list(made_up)", "seq | name\n0 | RTRIM", "made_up", {"made_up"}),
        ("PRAGMA data_version(made_up)", "data_version\n2", "made_up", {"made_up"}),
        ("PRAGMA index_info(made_up)", "seqno | cid | name\n0 | 1 | name", "made_up", {"made_up"}),
        ("PRAGMA main.table_list(singer)", "schema | name\nmain | singer", "singer", set()),
        # The header is the engine's, not the table's.
        ("PRAGMA table_info(singer)", "cid | name | type | pk\n0 | age | INTEGER | 0", "singer.type", {"type"}),
        ("PRAGMA table_info(singer)", "cid | name | type | pk\n0 | pk | INTEGER | 0", "singer.pk", set()),
        ("PRAGMA table_info(singer)", "0 | type | INTEGER | 0", "singer.type", set()),  # shown without its header
        (
            "PRAGMA table_info(singer)",
            "<observation>\ncid | name\n0 | age\n(1 row)\nYou have 3 turns left to complete the task.\n</observation>",
            "singer.cid singer.row singer.turns singer.observation singer.age",
            {"cid", "row", "turns", "observation"},
        ),
        ("PRAGMA table_info(singer)", "<observation> cid | name\n 0 | age\n 3 left</observation>", "left cid", None),
        (
            "PRAGMA table_info(singer)",
            '<tool_response>\n{"columns": ["cid", "name"], "data": [[0, "age"]], "more": true}\n</tool_response>',
            "singer.age singer.cid singer.columns singer.data singer.more",
            {"cid", "columns", "data", "more"},
        ),
        ("SHOW COLUMNS FROM singer", "Field | Type | Null\nage | int | YES", "age field", {"field"}),
        # The rows of a query that is described are the names that it gave itself.
        ("DESCRIBE SELECT 1 AS made_up", "column_name | column_type\nmade_up | INTEGER", "made_up", {"made_up"}),
        ("SUMMARIZE (FROM range(2) AS t(made_up))", "column_name | min\nmade_up | 0", "made_up", {"made_up"}),
    ],
)
def test_a_look_by_command_verifies_what_its_rows_say(sql, observation, proposed, unverified):
    names = [name.split(".") for name in proposed.split()]
    columns = {table: [n[1] for n in names if n[0] == table and len(n) == 2] for table in {n[0] for n in names}}
    proposal = propose(knowledge.proposal([], columns))
    expected = {name[0] for name in names} if unverified is None else unverified
    assert knowledge.unverified(trajectory(explore(sql, observation), proposal)) == expected


def test_a_pragma_for_a_table_that_is_not_there_verifies_nothing():
    looked = dataclasses.replace(explore("PRAGMA table_info(singer)", "cid | name\nno rows"), n_rows=0)
    proposal = propose(knowledge.proposal(["singer"], {"singer": ["name"]}))
    assert knowledge.unverified(trajectory(looked, proposal)) == {"singer", "name"}


CASE_STUDY = [  # appendix E, turns 1 to 3
    "SELECT name AS table_name FROM sqlite_master WHERE type IN ('table');",
    "SELECT sql FROM sqlite_master WHERE type IN ('table') AND name IN ('frpm','schools');",
    'SELECT DISTINCT "Charter_Funding_Type" FROM frpm;',
]


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
def test_looks_into_the_catalogue_are_probes(sql):
    assert is_probe(sql)


@pytest.mark.parametrize(
    "sql",
    [
        *CASE_STUDY,
        "SELECT * FROM singer LIMIT 3",
        "select kind from singer where name like '%count(%' order by kind limit 5",
        "SELECT MIN(age), MAX(age) FROM singer",
        "SELECT kind -- JOIN\nFROM singer /* GROUP BY */",
        "SELECT `group` FROM singer",  # a column whose name is a keyword
    ],
)
def test_looks_at_one_table_are_probes_and_list_not_everything(sql):
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
def test_what_answers_the_question_is_not_a_probe(sql):
    assert not is_probe(sql)


@pytest.mark.parametrize(
    ("sql", "everything"),
    [
        ("SELECT sql FROM sqlite_master", True),
        ("SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'", True),
        ("SELECT * FROM sqlite_schema", True),
        ("SELECT m.name, p.name FROM sqlite_master m, pragma_table_info(m.name) p WHERE m.type = 'table'", True),
        ("SELECT table_name, column_name FROM information_schema.columns", True),
        ("SELECT name FROM sqlite_master", False),
        ("SELECT sql FROM sqlite_master WHERE name = 'singer'", False),
        ("SELECT name FROM pragma_table_info('singer')", False),
        ("SELECT sql FROM singer", False),
        ("PRAGMA table_info(singer)", False),
    ],
)
def test_all_columns_of_all_tables_at_once_is_the_hack(sql, everything):
    assert lists_everything(sql) is everything


@pytest.mark.parametrize("piece", ["/*", "'", '"', "[", "`", "--", "--\n", "''", "a ", "(", "*/", "/**"])
def test_a_megabyte_of_anything_takes_no_time(piece):
    start = time.process_time()
    is_probe(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 4.0
