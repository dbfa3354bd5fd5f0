"""Inventing questions: what does not run, is empty, comes twice or is answered otherwise is not kept; and coverage."""

import collections
import json
import re
import textwrap
from types import SimpleNamespace

import pytest

from flows.cli import app
from flows.commands import data
from pipelines.benchmarks import base
from pipelines.core.errors import DataError, ResourceError
from pipelines.core.types import HARDNESS_LEVELS, Database, Example
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.client import Endpoint
from pipelines.recipe.config import Source
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, introspect
from pipelines.teachers.invent import STYLES, Coverage, Inventor, coverage_lines, read_log, read_sql, schema_coverage

ESCAPED = "\\x3c"  # what a prompt has in place of a tag's first character
PROPOSALS = [
    "SELECT name FROM singer WHERE city = 'paris'",
    "SELECT nam FROM singer",  # does not run
    "SELECT name FROM singer WHERE city = 'oslo'",  # like the first but for its value
    "SELECT age FROM singer WHERE city = 'nowhere'",  # empty
    "SELECT city, count(*) FROM singer GROUP BY city",
    "DROP TABLE singer",
    "SELECT max(age) FROM singer",  # answered otherwise
]


def reply(messages):
    """Proposes by number, asks "what is N", and answers that, the last one wrongly."""
    rules, case = messages[0]["content"], messages[1]["content"]
    if "people who work with" in rules:
        number = int(re.search(r"number (\d+)", case)[1])
        return f"Here:\n```sql\n{PROPOSALS[number % len(PROPOSALS)]};\n```"
    if "into words" in rules:
        query = textwrap.dedent(case.partition("SQL:\n")[2])
        return f'"What is {PROPOSALS.index(query)}?"\n'
    number = int(re.search(r"What is (\d+)", case)[1])
    return "SELECT min(age) FROM singer" if number == 6 else PROPOSALS[number]


def test_only_what_is_answered_alike_is_kept(tmp_path, servers, music):
    asker = Asker(Endpoint(base_url=servers(reply).url, model="m"), "teacher", tmp_path / "responses")
    with SqlEngine(Limits(timeout_s=5)) as sql:
        made = Inventor(music, introspect(music, 3), sql, asker, asker).make(4)
    assert [one.gold_sql for one in made.examples] == [PROPOSALS[0], PROPOSALS[4]]
    assert [one.question for one in made.examples] == ["What is 0?", "What is 4?"]
    assert [one.hardness for one in made.examples] == ["easy", "medium"]
    counts = made.counts
    assert (counts["kept"], counts["answers_differ"] > 0, counts["no_sql"] > 0) == (2, True, True)
    assert {"near_duplicate", "empty_result", "sql_no_such_column"} <= set(counts)
    assert made.examples[0].meta["votes"] == [{"by": "teacher", "sql": PROPOSALS[0], "agrees": True}]
    (doubted,) = {example.gold_sql for example in made.doubted}
    assert doubted == PROPOSALS[6]
    assert made.doubted[0].meta["votes"] == [{"by": "teacher", "sql": "SELECT min(age) FROM singer", "agrees": False}]


def test_a_question_that_is_too_long_is_counted_and_never_cut(tmp_path, servers, music):
    def talk(messages):
        words = reply(messages)
        return words + 1_000 * "x" if "into words" in messages[0]["content"] else words

    asker = Asker(Endpoint(base_url=servers(talk).url, model="m"), "teacher", tmp_path / "responses")
    with SqlEngine(Limits(timeout_s=5)) as sql:
        made = Inventor(music, introspect(music, 3), sql, asker, asker).make(1)
    assert (made.examples, made.doubted) == ([], [])
    assert {reason for _, reason in made.lost} >= {"long_question"}
    assert made.counts["long_question"] > 0


def test_a_teams_own_queries_become_questions_each_tried_once(tmp_path, servers, music, name_endpoint, capsys):
    """No query is bought: the teacher only words them, and what does not run, is empty or doubted is told."""
    name_endpoint(servers(reply))
    log, out = tmp_path / "queries.sql", tmp_path / "mine.jsonl"
    log.write_text("-- Monday; a comment\n" + ";\n".join([*PROPOSALS, PROPOSALS[0]]) + "\n")
    words = ["--from", str(log), "--out", str(out), f"--store={tmp_path / 'store'}", "--json"]
    app(["invent", "--database", music.location, "--model", "endpoint:teacher", *words], standalone_mode=False)
    assert [json.loads(line)["sql"] for line in out.read_text().splitlines()] == [PROPOSALS[0], PROPOSALS[4]]
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])["counts"]
    lost = {"answers_differ": 1, "near_duplicate": 1, "empty_result": 1, "no_sql": 1, "sql_no_such_column": 1}
    assert {name: count for name, count in counts.items() if count} == {"kept": 2, **lost}


@pytest.mark.parametrize("place", [0, 1])
def test_a_query_log_loses_no_query_to_a_broken_one(tmp_path, servers, music, name_endpoint, capsys, place):
    """The command names the line of a quote that never closes, wherever it stands."""
    name_endpoint(servers(reply))
    log, out = tmp_path / "queries.sql", tmp_path / "mine.jsonl"
    queries = [PROPOSALS[0], PROPOSALS[4]]
    queries.insert(place, r"SELECT name FROM singer WHERE name = 'it\'s'")
    log.write_text("".join(f"{query};\n" for query in queries))
    words = ["--from", str(log), "--out", str(out), f"--store={tmp_path / 'store'}"]
    app(["invent", "--database", music.location, "--model", "endpoint:teacher", *words], standalone_mode=False)
    assert [json.loads(line)["sql"] for line in out.read_text().splitlines()] == [PROPOSALS[0], PROPOSALS[4]]
    assert f"line {place + 1} is left out" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("text", "said"), [(None, "cannot be read"), ("\n\n", "has no statement")])
def test_a_log_without_queries_is_refused_before_anything_is_bought(tmp_path, music, text, said):
    log = tmp_path / "queries.sql"
    if text is not None:
        log.write_text(text)
    with pytest.raises(DataError, match=said):
        data.invent(database=music.location, model="teacher", log=log, overrides=[f"store={tmp_path / 's'}"])


LEVELS = [  # six easy ones, three of each other level
    *(f"SELECT {what} FROM singer" for what in ("name", "city", "age", "DISTINCT city", "count(*)", "max(age)")),
    "SELECT city, count(*) FROM singer GROUP BY city",
    "SELECT name FROM singer ORDER BY age LIMIT 1",
    "SELECT name FROM singer WHERE age > 20 AND city = 'paris'",
    "SELECT name FROM singer WHERE age > (SELECT avg(age) FROM singer)",
    "SELECT city FROM singer WHERE age = (SELECT max(age) FROM singer)",
    "SELECT name FROM singer WHERE age > 20 EXCEPT SELECT name FROM singer WHERE city = 'oslo'",
    "SELECT city FROM singer WHERE age > (SELECT min(age) FROM singer) GROUP BY city ORDER BY count(*) DESC LIMIT 1",
    "SELECT city, max(age) FROM singer WHERE age < (SELECT max(age) FROM singer) GROUP BY city ORDER BY max(age)",
    "SELECT name FROM singer WHERE age >= 30 AND city = 'paris' OR age > 45 ORDER BY age LIMIT 1",
]


def test_the_command_balances_levels_and_varies_styles(tmp_path, servers, music, name_endpoint, capsys):
    """A teacher that likes easy queries, asked on the command line for eight: two of each level come."""

    def propose(messages):
        rules, case = messages[0]["content"], messages[1]["content"]
        if "people who work with" in rules:
            return LEVELS[int(re.search(r"number (\d+)", case)[1]) % len(LEVELS)]
        style = next(name for name, text in STYLES.items() if text in rules)
        return f"{style} {LEVELS.index(textwrap.dedent(case.partition('SQL:' + chr(10))[2]).replace(ESCAPED, '<'))}"

    def answer(messages):
        return LEVELS[int(re.search(r"Question:\n +\w+ (\d+)", messages[1]["content"])[1])]

    name_endpoint(servers(propose), servers(answer))
    out = tmp_path / "mine.jsonl"
    who = ["--model", "endpoint:teacher", "--checker", "endpoint:other"]
    where = ["--out", str(out), f"--store={tmp_path / 'store'}", "--json"]
    app(["invent", "--database", music.location, "--count", "8", *who, *where], standalone_mode=False)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert collections.Counter(row["hardness"] for row in rows) == dict.fromkeys(HARDNESS_LEVELS, 2)
    assert len({row["style"] for row in rows}) >= 3
    assert {(row["teacher"], row["checker"]) for row in rows} == {("teacher", "other")}
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["counts"]["kept"], said["out"]) == (8.0, str(out))
    assert said["counts"]["over_level"] > 0  # easy ones that were right and not needed
    assert said["coverage"]["tables"] == {"singer": 8}


def test_the_command_writes_what_the_reader_reads(tmp_path, servers, music, name_endpoint):
    name_endpoint(servers(reply))
    out = tmp_path / "mine.jsonl"
    data.invent(database=music.location, model="teacher", count=2, out=out, overrides=[f"store={tmp_path / 's'}"])
    loaded = base.read(Source(kind="jsonl", path=str(out)), 0, tmp_path / "stage")
    assert [one.gold_sql for one in loaded.examples] == [PROPOSALS[0], PROPOSALS[4]]
    assert loaded.quarantine == []
    (row, *_) = map(json.loads, (tmp_path / "mine.doubted.jsonl").read_text().splitlines())
    assert (row["sql"], row["votes"][0]["agrees"]) == (PROPOSALS[6], False)


@pytest.mark.parametrize("where", ["folder", "file/mine.jsonl"])
def test_a_place_that_cannot_be_written_is_said_before_anything_is_bought(
    tmp_path, servers, music, name_endpoint, where
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    server = servers(reply)
    name_endpoint(server)
    with pytest.raises(DataError, match="cannot be written"):
        data.invent(database=music.location, model="teacher", out=tmp_path / where, overrides=[])
    assert not server.delivered


def test_an_endpoint_that_is_down_is_reported_at_once(tmp_path, servers, music, name_endpoint):
    name_endpoint(servers(reply), SimpleNamespace(url="http://127.0.0.1:9/v1"))
    with pytest.raises(ResourceError, match=r"endpoint 'other' at \S+ does not answer"):
        data.invent(database=music.location, model="teacher", checker="other", overrides=[f"store={tmp_path / 's'}"])


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        (
            "a ```\nSELECT 1\n``` then ```SQL\nwith t as (select 1) select * from t```",
            "with t as (select 1) select * from t",
        ),
        ("select 1", "select 1"),
        ("I cannot.", None),
        ("```sql\nDROP TABLE t\n```", None),
        ("", None),
        (None, None),
    ],
)
def test_a_query_is_found_in_an_answer(text, sql):
    assert read_sql(text) == sql


@pytest.mark.timeout(30)
def test_a_long_white_space_in_a_fence_that_never_ends_is_read_at_once():
    assert read_sql("```" + " \n" * 200_000) is None
    assert read_sql("```sql" + " \n" * 200_000 + "SELECT 1```") == "SELECT 1"


SHOP = Database("shop", "sqlite", "shop.sqlite")
SCHEMA = Schema(
    (
        Table("Customer", (Column("id", "INTEGER", True), Column("name", "TEXT"))),
        Table(
            "purchase",
            (Column("id", "INTEGER", True), Column("customer_id", "INTEGER"), Column("amount", "INTEGER")),
            (ForeignKey("customer_id", "Customer", "id"),),
        ),
        Table("refund", (Column("purchase_id", "INTEGER"),), (ForeignKey("purchase_id", "purchase", "id"),)),
    )
)
QUERIES = {
    "SELECT count(*) FROM customer": "easy",
    "SELECT upper(name) FROM Customer WHERE name LIKE 'a%' AND id > 1": "easy",
    "SELECT c.name, sum(p.amount) FROM customer c JOIN purchase p ON c.id = p.customer_id GROUP BY c.name": "hard",
    "SELECT my_own(amount), count(*) FROM purchase": "medium",
    "no SQL at all": "extra",
}


def test_tables_joins_functions_and_levels_are_counted():
    examples = [
        Example(str(number), "?", SHOP, sql, hardness=level) for number, (sql, level) in enumerate(QUERIES.items())
    ]
    found = schema_coverage(examples, SCHEMA)
    assert found == Coverage(
        {"Customer": 3, "purchase": 2, "refund": 0},
        {"purchase.customer_id = Customer.id": 1, "refund.purchase_id = purchase.id": 0},
        {"count": 2, "my_own": 1, "sum": 1, "upper": 1},
        {"easy": 2, "medium": 1, "hard": 1, "extra": 1},
    )
    assert list(coverage_lines(found)) == [
        "tables: 2 of 3; no question about refund",
        "joins over a foreign key: 1 of 2; no question about refund.purchase_id = purchase.id",
        "functions: count 2, my_own 1, sum 1, upper 1",
        "hardness: easy 2, medium 1, hard 1, extra 1",
    ]
    many = Coverage({f"t{number}": 0 for number in range(12)}, {}, {}, {})
    assert next(coverage_lines(many)) == (
        "tables: 0 of 12; no question about t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 2 more"
    )


BROKEN = r"SELECT name FROM item WHERE name = 'it\'s'"


@pytest.mark.parametrize(
    ("engine", "kept", "unreadable"),
    [
        ("sqlite", ["SELECT count(*) FROM item", "SELECT 'a;\nb'", "SELECT max(x) FROM item"], [(BROKEN, 3)]),
        ("mysql", ["SELECT count(*) FROM item", BROKEN, "SELECT 'a;\nb'", "SELECT max(x) FROM item"], []),
    ],
)
def test_a_quote_that_is_never_closed_costs_its_own_query_alone(engine, kept, unreadable):
    """Its text would hold the rest of the log; a backslash closes nothing in MySQL alone."""
    text = f"SELECT count(*) FROM item;\n-- Monday;\n{BROKEN};\nSELECT 'a;\nb' /* of ; b */; SELECT max(x) FROM item;\n"
    log = read_log(text, engine)
    assert [query.sql for query in log.queries] == kept
    assert [(query.sql, query.line) for query in log.unreadable] == unreadable
    assert log.repeats == 0


@pytest.mark.parametrize("places", [(0,), (1,), (3,), (0, 2), (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("broken", ["SELECT 'it\\'s' FROM item", "SELECT 'open FROM item", "SELECT 1 /* open"])
def test_each_broken_query_of_a_log_is_named_with_its_line_and_no_other_is_lost(broken, places):
    good = [f"SELECT count(*) FROM item WHERE name = 'pen {number}'" for number in range(4)]
    written = []
    for number, query in enumerate(good):
        written += [broken, query] if number in places else [query]
    log = read_log(";\n".join(written) + ";\n", "sqlite")
    assert [query.sql for query in log.queries] == good
    lines = [number for number, query in enumerate(written, 1) if query == broken]
    assert [(query.sql, query.line) for query in log.unreadable] == [(broken, line) for line in lines]
