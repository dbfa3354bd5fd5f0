"""`sqltrain score` on files as the official evaluators take them, run as a user would."""

import dataclasses
import json
import math
import os
import threading
from collections import Counter

import pytest
import typer
from copies import to_duckdb
from psycopg.conninfo import conninfo_to_dict
from shops import build_shop
from typer.testing import CliRunner

from flows.commands.evaluate import compare, score
from pipelines.core.errors import DataError, UserError
from pipelines.core.types import Database
from pipelines.report import writer
from pipelines.sql import scoring
from pipelines.sql.dialects import sqlite
from pipelines.sql.dialects.base import Bounds
from pipelines.sql.dialects.sqlite import open_readonly
from pipelines.sql.equalities import official
from pipelines.stages.find_evaluations import load_runs
from tests.fakes import build_database
from tests.sql.test_sandbox_state import NoClock

app = typer.Typer()
app.command()(score)

GOLD = [
    "SELECT name FROM customer ORDER BY name DESC",
    "SELECT count(*) FROM purchase",
    "SELECT city FROM customer WHERE credit > 3",
    "SELECT nope FROM customer",
    "SELECT item FROM purchase WHERE amount > 100",
    "SELECT 1",
]
PREDICTED = [
    "SELECT name FROM customer",
    "SELECT count(id) FROM purchase",
    "SELECT DISTINCT city FROM customer WHERE credit > 3",
    "SELECT name FROM customer",
    "SELECT amount, item FROM purchase WHERE amount > 200",
    "SELECT 1",
]
DATABASES = ["shop"] * 5 + ["gone"]


@pytest.fixture
def folder(tmp_path):
    build_shop(tmp_path / "databases" / "shop" / "shop.sqlite")
    (tmp_path / "gold.sql").write_text(
        "".join(f"{sql}\t{db}\n" for sql, db in zip(GOLD, DATABASES, strict=True)), encoding="utf-8"
    )
    (tmp_path / "pred.sql").write_text("".join(f"{sql}\n" for sql in PREDICTED), encoding="utf-8")
    return tmp_path


def run(folder, *more, gold="gold.sql", pred="pred.sql"):
    files = ["--gold", str(folder / gold), "--pred", str(folder / pred), "--database", str(folder / "databases")]
    result = CliRunner().invoke(app, [*files, "--workers", "1", *more])
    if isinstance(result.exception, UserError):
        raise result.exception
    return result.exit_code, result.output


def test_every_item_under_every_equality_in_one_pass(folder):
    names, out = "strict,bird,test_suite,soft_f1,strict_nonempty", folder / "out" / "v.jsonl"
    code, output = run(folder, "--equality", names, "--out", str(out), "--json")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 1  # one item of five could not be scored: its database is missing
    assert lines[1] == {
        "idx": 1, "db_id": "shop", "hardness": "easy", "strict": True, "bird": True, "test_suite": True,
        "soft_f1": 1.0, "strict_nonempty": True, "error": None,
    }  # fmt: skip
    judged = [(line["strict"], line["bird"], line["test_suite"], line["strict_nonempty"]) for line in lines]
    assert judged == [
        (False, True, False, False),  # the order is lost
        (True, True, True, True),
        (False, True, True, False),  # test_suite drops DISTINCT from both
        (None, None, None, None),
        (False, True, True, False),  # both empty, of another arity
        (None, None, None, None),
    ]
    assert [line["error"] for line in lines] == [None, None, None, "gold_no_such_column", None, "database_missing"]
    facts = json.loads(output.splitlines()[-1])
    assert facts["scored"] == 4
    assert facts["equalities"]["bird"]["all"] == 100.0
    assert facts["equalities"]["strict"] == {"all": 25.0, "easy": 25.0}
    assert facts["gold_errors"] == [{"idx": 3, "error": "gold_no_such_column"}]
    assert facts["unavailable"] == [{"idx": 5, "error": "database_missing"}]
    assert facts["unavailable_share"] == 0.2
    assert facts["with_unavailable"]["strict"] == round(0.8 * facts["equalities"]["strict"]["all"], 4)
    assert "20.0 % of the items are not available; counted as wrong, they would make strict" in output
    assert {"yes": "bird", "no": "strict", "count": 3, "items": [0, 2, 4]} in facts["disagreements"]
    assert "gold errors, not counted: 1 (item 3: gold_no_such_column)" in output
    assert "bird yes, strict no: 3 items (0, 2, 4)" in output


def test_a_report_classes_the_errors_and_can_be_compared(folder):
    pairs = enumerate(zip(GOLD, DATABASES, strict=True))
    records = [{"query": sql, "db_id": db, "question": f"question {n}"} for n, (sql, db) in pairs]
    (folder / "gold.json").write_text(json.dumps(records))
    options = ["--timeout", "1", "--report", str(folder / "mine")]
    code, output = run(folder, "--equality", "bird,strict,r_ves", *options, gold="gold.json")
    assert code == 1
    assert f"report  {folder / 'mine' / 'report.html'}" in output
    (mine,) = load_runs(str(folder / "mine"))
    assert (mine.name, mine.equality) == ("mine", "bird")
    judged = [(one.broken, one.scores, one.diagnosis and one.diagnosis.error) for one in mine.records]
    right, lax = {"bird": 1.0, "strict": 1.0}, {"bird": 1.0, "strict": 0.0}
    broken = (True, {"bird": 0.0, "strict": 0.0}, None)
    assert judged == [
        (False, lax, "semantic"), (False, right, None), (False, lax, "semantic"), broken,
        (False, lax, "semantic"), broken,
    ]  # fmt: skip
    assert [one.failure for one in mine.records if one.broken] == ["no_such_column", "database_missing"]
    page = (folder / "mine" / "report.html").read_text()
    assert "question 2" in page
    assert "2 of 6 episodes (33.3 %) are broken" in page
    assert (folder / "mine" / "tables" / "errors.csv").is_file()
    with pytest.raises(UserError, match="no measure of time"):
        run(folder, "--equality", "r_ves", *options)


def test_a_report_counts_a_gold_query_without_a_prediction_as_wrong(folder, monkeypatch):
    (folder / "pred.json").write_text(json.dumps({"0": GOLD[0], "1": GOLD[1]}))
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    _, output = run(folder, "--equality", "strict", "--report", ".", pred="pred.json")
    assert "4 gold queries have no prediction and count as wrong (2, 3, 4, 5)" in output
    (mine,) = load_runs(".")
    assert (mine.name, mine.left_out) == ("here", {})
    # Of the other two, gold itself fails or is away.
    assert [one.scores["strict"] for one in mine.records if not one.broken] == [1.0, 1.0, 0.0, 0.0]
    assert "<title>here" in (folder / "here" / "report.html").read_text()


@pytest.mark.parametrize("blocked", ["tables", "report.html", "records.jsonl", "out"])
def test_what_cannot_be_written_is_one_plain_line_before_a_query_runs(folder, blocked):
    (folder / "mine").mkdir()
    if blocked == "tables":
        (folder / "mine" / blocked).write_text("in the way")
    else:
        (folder / "mine" / blocked).mkdir()
    where = ["--out", str(folder / "mine" / "out")] if blocked == "out" else ["--report", str(folder / "mine")]
    with pytest.raises(UserError, match=f"{blocked} cannot be written: "):
        run(folder, "--equality", "strict", "--audit", str(folder / "audit.jsonl"), *where)
    assert not (folder / "audit.jsonl").exists()


def test_what_was_scored_stands_where_its_report_fails(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_all", full)
    files = ["--gold", str(folder / "gold.sql"), "--pred", str(folder / "pred.sql"), "--equality", "strict"]
    places = ["--database", str(folder / "databases"), "--out", str(folder / "out.jsonl")]
    result = CliRunner().invoke(app, [*files, *places, "--workers", "1", "--report", str(folder / "mine")])
    assert "No space left on device" in str(result.exception)
    assert "all (4)" in result.output
    assert len((folder / "out.jsonl").read_text().splitlines()) == 6


def test_reports_over_other_databases_share_nothing_and_those_over_the_same_are_read_on_one_page(folder):
    build_shop(folder / "databases" / "store" / "store.sqlite")
    (folder / "other.sql").write_text("".join(f"{sql}\tstore\n" for sql in GOLD))
    (folder / "reversed.sql").write_text("".join(f"{sql}\tshop\n" for sql in reversed(GOLD[:3])))
    (folder / "right.sql").write_text("".join(f"{sql}\n" for sql in reversed(GOLD[:3])))
    for name, gold in (("a", "gold.sql"), ("b", "other.sql")):
        run(folder, "--equality", "strict", "--report", str(folder / name), gold=gold)
    with pytest.raises(DataError, match="share no question"):
        compare([str(folder / "a"), str(folder / "b")], None, 0, None, False)
    run(folder, "--equality", "strict", "--report", str(folder / "c"), gold="reversed.sql", pred="right.sql")
    compare([str(folder / "a"), str(folder / "c")], None, 0, folder / "page", False)
    index = json.loads((folder / "page" / "report.html").read_text().split('id="index">')[1].split("</script>")[0])
    assert len(index["questions"]) == 6  # of a; c asked the first three of them
    assert [(row[0], row[8]) for row in index["rows"] if row[1] == 1] == [(0, 1), (1, 0), (2, 1)]
    assert "CREATE TABLE" in index["schemas"]["shop"]
    assert index["questions"][0]["result"]["total"] > 0


def test_bird_files_give_figures_by_difficulty(folder):
    levels = ["simple", "simple", "challenging"]
    records = [{"SQL": GOLD[n], "db_id": "shop", "difficulty": levels[n]} for n in range(3)]
    (folder / "dev.json").write_text(json.dumps(records))
    (folder / "dev.sql").write_text("".join(f"{GOLD[n]}\tshop\n" for n in range(3)))
    predicted = {"2": f"{GOLD[2]}\t----- bird -----\tshop", "0": f"{GOLD[0]}\t----- bird -----\tshop", "1": 0}
    (folder / "predict.json").write_text(json.dumps(predicted))
    several = [{"gold_sqls": ["SELECT 'none'", GOLD[n]], "db_id": "shop"} for n in range(3)]
    (folder / "several.json").write_text(json.dumps(several))
    with pytest.raises(DataError, match=r"several\.json tells no difficulty"):
        run(folder, "--difficulty", str(folder / "several.json"), gold="dev.sql")
    level = ["--difficulty", str(folder / "dev.json")]
    for gold, more in (("dev.json", []), ("dev.sql", level), ("several.json", level)):
        code, output = run(folder, "--equality", "bird", "--json", *more, gold=gold, pred="predict.json")
        facts = json.loads(output.splitlines()[-1])
        assert code == 0
        assert facts["equalities"]["bird"] == {"all": 66.6667, "simple": 50.0, "challenging": 100.0}
        assert facts["errors"] == {"empty": 1}


@pytest.mark.parametrize(
    ("difficulty", "levels", "told"),
    [
        (None, "easy", "1 gold queries have none of BIRD's difficulties: levels are Spider's (1)"),
        ("Simple", "simple", "1 gold queries have none of BIRD's difficulties: they are in the column all alone (1)"),
        ("simple", "simple", ""),
    ],
)
def test_a_gold_query_without_one_of_birds_levels_is_told(folder, difficulty, levels, told):
    records = [{"SQL": GOLD[n], "db_id": "shop", "difficulty": "simple"} for n in range(3)]
    records[1]["difficulty"] = difficulty
    (folder / "dev.json").write_text(json.dumps(records))
    (folder / "predict.json").write_text(json.dumps({str(n): GOLD[n] for n in range(3)}))
    _, output = run(folder, "--equality", "bird", "--json", gold="dev.json", pred="predict.json")
    facts = json.loads(output.splitlines()[-1])
    assert levels in facts["counts"]
    assert facts["without_level"] == ([1] if told else [])
    assert told in output
    assert ("none of BIRD's difficulties" in output) == bool(told)


def test_a_gold_query_of_several_that_does_not_run_is_told(folder):
    several = {"gold_sqls": [GOLD[0], "SELECT nope FROM customer"], "db_id": "shop"}
    records = [several, {"SQL": GOLD[1], "db_id": "shop"}]
    (folder / "dev.json").write_text(json.dumps(records))
    (folder / "predict.json").write_text(json.dumps({"0": GOLD[0], "1": GOLD[1]}))
    code, output = run(folder, "--equality", "bird", "--json", gold="dev.json", pred="predict.json")
    facts = json.loads(output.splitlines()[-1])
    assert (code, facts["equalities"]["bird"]["all"], facts["failed_golds"]) == (0, 100.0, [0])
    assert "1 questions are scored without those of their gold queries that did not run (0)" in output


def test_a_database_that_is_no_test_suite_is_told(folder):
    told = "1 databases are no test suite, for no other database is beside them: there a test suite is one"
    _, output = run(folder, "--equality", "strict", "--json")
    assert json.loads(output.splitlines()[-1])["without_suite"] == []
    _, output = run(folder, "--equality", "strict,test_suite", "--json")
    assert json.loads(output.splitlines()[-1])["without_suite"] == ["shop"]  # "gone" is no database at all
    assert told in output
    build_shop(folder / "databases" / "shop" / "other.sqlite")
    _, output = run(folder, "--equality", "strict,test_suite", "--json")
    assert json.loads(output.splitlines()[-1])["without_suite"] == []
    assert "test suite is one" not in output


def test_a_missing_prediction_counts_as_wrong_and_is_told(folder):
    """One of four gold queries that run is answered, so EX is 25."""
    (folder / "predict.json").write_text(json.dumps({"1": PREDICTED[1]}))
    code, output = run(folder, "--json", pred="predict.json")
    facts = json.loads(output.splitlines()[-1])
    assert code == 1  # a database is missing
    assert (facts["scored"], facts["missing"], facts["empty"]) == (4, [0, 2, 3, 4, 5], [])
    assert facts["equalities"]["strict"]["all"] == 25.0
    assert "5 gold queries have no prediction and count as wrong (0, 2, 3, 4, 5)" in output


def test_one_prediction_of_twelve_is_no_whole_score(folder):
    """What a file of numbers may leave out is what a figure is lost by."""
    (folder / "twelve.sql").write_text("".join(f"SELECT {n} + count(*) FROM customer\tshop\n" for n in range(12)))
    bird = "SELECT 3 + count(*) FROM customer\t----- bird -----\tshop"
    (folder / "pred.json").write_text(json.dumps({"3": bird}))
    code, output = run(folder, "--equality", "bird", "--json", gold="twelve.sql", pred="pred.json")
    facts = json.loads(output.splitlines()[-1])
    assert (code, facts["equalities"]["bird"]["all"]) == (0, 8.3333)
    assert facts["missing"] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    assert "11 gold queries have no prediction and count as wrong" in output
    (folder / "pred.json").write_text(json.dumps({"3": None, "4": ""}))
    code, output = run(folder, "--equality", "bird", "--json", gold="twelve.sql", pred="pred.json")
    facts = json.loads(output.splitlines()[-1])
    assert (facts["equalities"]["bird"]["all"], facts["empty"], len(facts["missing"])) == (0.0, [3, 4], 10)
    assert "2 predictions are empty and count as wrong (3, 4)" in output


@pytest.mark.parametrize("form", ["lines", "json"])
def test_a_prediction_that_names_another_database_is_told_and_runs_on_golds(folder, form):
    build_shop(folder / "databases" / "store" / "store.sqlite")
    (folder / "two.sql").write_text(f"{GOLD[0]}\tshop\n{GOLD[1]}\tshop\n")
    mark = "\t" if form == "lines" else "\t----- bird -----\t"
    entries = [f"{GOLD[0]}{mark}shop", f"{GOLD[1]}{mark}store"]
    text = "\n".join(entries) if form == "lines" else json.dumps(dict(enumerate(entries)))
    (folder / "named.txt").write_text(text)
    code, output = run(folder, "--equality", "strict", "--json", gold="two.sql", pred="named.txt")
    facts = json.loads(output.splitlines()[-1])
    assert (code, facts["equalities"]["strict"]["all"], facts["other_database"]) == (0, 100.0, [1])
    assert "1 predictions name another database than their gold query, on whose they ran (1)" in output


def test_a_tab_parts_sql_from_a_known_database_alone(folder):
    """Gold against itself is right, whatever its layout."""
    queries = ["SELECT name\tFROM customer", "SELECT count(*)\tFROM\tcustomer", GOLD[1]]
    (folder / "tabs.sql").write_text("".join(f"{sql}\tshop\n" for sql in queries))
    (folder / "bare.sql").write_text("".join(f"{sql}\n" for sql in queries))
    for pred, tabs in (("tabs.sql", []), ("bare.sql", [0, 1])):
        code, output = run(folder, "--equality", "strict", "--json", gold="tabs.sql", pred=pred)
        facts = json.loads(output.splitlines()[-1])
        assert (code, facts["equalities"]["strict"]["all"], facts["tabs"]) == (0, 100.0, tabs)
        assert ("2 predictions have a tab before what is no known database" in output) is bool(tabs)


def test_a_report_judges_each_pair_once(folder):
    audit = folder / "audit.jsonl"
    run(folder, "--equality", "strict", "--audit", str(audit), "--report", str(folder / "mine"))
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    judged = Counter((line["role"], line["sql"]) for line in lines if line["role"] != "query")
    assert judged["prediction", PREDICTED[0]] == 1
    assert judged["gold", GOLD[0]] == 1


def test_a_duckdb_benchmark(folder):
    path = folder / "databases" / "shop" / "shop.sqlite"
    to_duckdb(Database("shop", "sqlite", str(path)), path.with_suffix(".duckdb"))
    _, output = run(folder, "--engine", "duckdb", "--json")
    facts = json.loads(output.splitlines()[-1])
    assert (facts["scored"], facts["equalities"]["strict"]["all"]) == (4, 25.0)


def test_all_databases_of_a_suite_must_agree(folder):
    other = build_shop(folder / "databases" / "shop" / "shop_v2.sqlite")
    build_database(other.location, "INSERT INTO purchase VALUES (9, NULL, 'hat', 1)")
    (folder / "one.sql").write_text("SELECT count(*) FROM purchase\tshop\n")
    (folder / "pred.sql").write_text("SELECT 5\n")
    _, output = run(folder, "--equality", "bird,test_suite", "--json", gold="one.sql")
    figures = json.loads(output.splitlines()[-1])["equalities"]
    assert figures == {"bird": {"all": 100.0, "easy": 100.0}, "test_suite": {"all": 0.0, "easy": 0.0}}


@pytest.mark.parametrize("options", ["--workers -3", "--timeout -1", "--timeout nan", "--timeout inf"])
def test_a_number_that_makes_no_sense_is_refused(folder, options):
    code, output = run(folder, *options.split())
    assert code == 2
    assert f"Invalid value for '{options.split()[0]}'" in output


def test_a_file_in_which_nothing_can_be_scored_is_exit_code_1(folder):
    (folder / "one.sql").write_text("SELECT 1\tgone\n")
    (folder / "pred.sql").write_text("SELECT 1\n")
    code, output = run(folder, gold="one.sql")
    assert code == 1
    assert "not available, not counted: 1 (item 0: database_missing)" in output


def test_what_is_no_regular_file_is_written_through(folder):
    (folder / "real.jsonl").write_text("before")
    (folder / "link.jsonl").symlink_to(folder / "real.jsonl")
    run(folder, "--equality", "strict", "--out", str(folder / "link.jsonl"))
    assert (folder / "link.jsonl").is_symlink()
    assert len((folder / "real.jsonl").read_text().splitlines()) == 6
    os.mkfifo(folder / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((folder / "pipe").read_text()))
    reader.start()
    run(folder, "--equality", "strict", "--out", str(folder / "pipe"))
    reader.join()
    assert read == [(folder / "real.jsonl").read_text()]
    assert (folder / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("gold.sql", "SELECT 1\n", "line 1: no tab"),
        ("gold.json", "[{}]", "record 0"),
        ("gold.json", "[", "line 1: not JSON"),
        ("pred.sql", "SELECT 1\n", "1 predictions for 6 gold queries"),
        ("gold.json", "[" * 100_000, "not JSON"),
        ("gold.json", '[{"query": 5, "db_id": "shop"}]', "record 0: query is a int, not text"),
        ("gold.json", '[{"query": "SELECT 1", "db_id": ["shop"]}]', "record 0: db_id is a list"),
        ("gold.json", '[{"query": "SELECT 1", "db_id": "../../../../etc/x"}]', "is not a plain name of a database"),
        ("gold.json", '{"a": {"query": "SELECT 1", "db_id": "shop"}}', "record 0: a str where an object"),
        ("gold.sql", "SELECT 1\tshop\nSELECT 1\t../../../etc/x\n", "line 2: '../../../etc/x' is not a plain name"),
        ("gold.sql", "SELECT 1\t" + "x" * 300 + "\n", "line 1: 'x{60}' is not a plain name"),
        ("gold.sql", "SELECT 1\tshop -cwork_mem=1GB\n", "is not a plain name"),
        ("pred.json", '{"9": "SELECT 1"}', "a prediction 9"),
        ("pred.json", '{"1": "", "' + "9" * 5000 + '": ""}', "a prediction 9{18},"),
        ("pred.json", '{"0": ' + "9" * 5000 + "}", "not JSON"),
        ("pred.json", "[" * 100_000, "not JSON"),
        ("pred.json", '[{"sql": "SELECT 1"}]', "prediction 0: an object where SQL text was expected"),
        ("pred.json", '{"0": ["SELECT 1"]}', "prediction 0: an object where SQL text"),
        ("pred.json", '{"²": "SELECT 1"}', "a prediction '²', which is no number and no id"),
        ("pred.json", "{}", "has no prediction"),
        ("pred.json", '{"1": "SELECT 1", "01": "SELECT 2"}', "two predictions 1"),
        ("pred.json", '{"1": "SELECT 1", "1": "SELECT 2"}', "'1' stands twice in one object"),
        ("pred.sql", b"SELECT 'Zo\xeb'\n", "line 1 is not UTF-8"),
        ("pred.sql", "SELECT 1\n".encode("utf-16"), "line 1 is not UTF-8 but UTF-16"),
        ("gold.sql", b"SELECT 1\tshop\nSELECT 'Zo\xeb'\tshop\n", "line 2 is not UTF-8"),
    ],
)
def test_a_bad_file_is_told_in_one_line(folder, file, text, message):
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message) as raised:
        run(folder, **{file.split(".")[0]: file})
    assert file in str(raised.value)
    assert "\n" not in str(raised.value)


def test_half_a_character_is_a_wrong_prediction_in_the_report_too(folder):
    predicted = {"0": "SELECT '\ud800'", "1": GOLD[1], "2": 'SELECT "\udc00" FROM "\ud800"'}
    (folder / "pred.json").write_text(json.dumps(predicted))
    code, output = run(folder, "--equality", "bird", "--report", str(folder / "mine"), "--json", pred="pred.json")
    assert code == 1  # a database is missing
    assert json.loads(output.splitlines()[-1])["errors"] == {"syntax": 2, "empty": 1}
    (mine,) = load_runs(str(folder / "mine"))
    found = [(one.final_sql, one.scores["bird"]) for one in mine.records[:3]]
    assert found == [("SELECT '\\ud800'", 0.0), (GOLD[1], 1.0), ('SELECT "\\udc00" FROM "\\ud800"', 0.0)]
    compare([str(folder / "mine"), f"again={folder / 'mine'}"], None, 1, folder / "page", False)
    assert "\\ud800" in (folder / "page" / "report.html").read_text()


def test_a_schema_of_a_postgresql_database_is_a_quoted_name():
    found = scoring.locate_database("Car 1", "host=h dbname=bird", "postgres")
    assert conninfo_to_dict(found.location)["options"] == '-csearch_path="car\\ 1"'
    with pytest.raises(UserError, match="no connection string") as raised:
        scoring.locate_database("shop", "pass-word", "postgres")
    assert "pass-word" not in str(raised.value)


def test_bad_options_are_told_in_one_line(folder):
    with pytest.raises(UserError, match="no equality 'exact'"):
        run(folder, "--equality", "strict,exact")
    with pytest.raises(UserError, match="no engine 'oracle'"):
        run(folder, "--engine", "oracle")
    with pytest.raises(UserError, match="not a folder"):
        run(folder, "--database", str(folder / "nowhere"))
    with pytest.raises(DataError, match="cannot be read"):
        run(folder, gold="nowhere.sql")


@pytest.mark.parametrize(
    ("file", "text", "read"),
    [
        ("p.sql", "SELECT 1\n\nSELECT 2\n", ["SELECT 1", "", "SELECT 2"]),
        ("p.sql", "SELECT 1\n\nSELECT 2\n", ["SELECT 1", "SELECT 2"]),  # as many as gold queries: it parts sessions
        ("p.sql", "\ufeffSELECT 'a\u2028b\x85'\r\n\r\n\r\n\r\n", ["SELECT 'a\u2028b\x85'", ""]),
        ("p.txt", ' {"0": "SELECT 1\\t----- bird -----\\tshop", "1": 0}', ["SELECT 1", ""]),
        ("g.sql", "SELECT\t1\tshop\n", ["SELECT\t1"]),
        ("g.sql", "\ufeffSELECT '\u2028b\x0cc'\tshop\r\nSELECT 2\tshop\r\n\r\n", ["SELECT '\u2028b\x0cc'", "SELECT 2"]),
    ],
)
def test_files_are_read_whatever_wrote_them(tmp_path, file, text, read):
    """A mark of byte order, CRLF, blank lines, JSON under another name; only line ends part lines, and no tab does."""
    (tmp_path / file).write_bytes(text.encode())
    if file == "g.sql":
        assert scoring.read_gold(tmp_path / file) == [scoring.GoldQuery(sql, "shop") for sql in read]
    else:
        predicted = scoring.read_predictions(tmp_path / file, [scoring.GoldQuery("", "shop")] * len(read))
        assert list(predicted.queries) == read


def test_predictions_by_id_go_to_their_questions_whatever_the_ids_are(tmp_path):
    rows = [{"id": id, "query": f"SELECT {id}", "db_id": "shop"} for id in (2, 0, 1)]
    (tmp_path / "g.json").write_text(json.dumps(rows))
    gold = scoring.read_gold(tmp_path / "g.json")
    (tmp_path / "p.json").write_text('{"0": "SELECT 0", "1": "SELECT 1", "2": "SELECT 2"}')
    read = scoring.read_predictions(tmp_path / "p.json", gold)
    assert read.queries == ["SELECT 2", "SELECT 0", "SELECT 1"]
    assert read.ambiguous == [1, 2, 0]  # in the order of the file: each key is the number of another query
    (tmp_path / "p.json").write_text('{"0": "SELECT 0", "2": "SELECT 2"}')
    assert scoring.read_predictions(tmp_path / "p.json", gold).ambiguous == [1, 0]
    (tmp_path / "p.json").write_text('{"0": "SELECT 0", "1": "SELECT 1"}')
    numbered = [dataclasses.replace(query, id="") for query in gold]
    assert scoring.read_predictions(tmp_path / "p.json", numbered).ambiguous == []
    numbered = [dataclasses.replace(query, id=str(number)) for number, query in enumerate(gold)]
    assert scoring.read_predictions(tmp_path / "p.json", numbered).ambiguous == []
    numbered = [dataclasses.replace(query, id=str(number)) for number, query in enumerate(gold, 2)]
    (tmp_path / "p.json").write_text('{"2": "SELECT 2", "3": "SELECT 3"}')
    assert scoring.read_predictions(tmp_path / "p.json", numbered).ambiguous == []  # there is no query 3
    (tmp_path / "p.json").write_text('{"0": "SELECT 0", "1": "SELECT 1", "2": "SELECT 2"}')
    (tmp_path / "g.json").write_text(json.dumps([*rows, rows[1]]))
    with pytest.raises(DataError, match="'0' is the id of several"):
        scoring.read_predictions(tmp_path / "p.json", scoring.read_gold(tmp_path / "g.json"))


def test_the_r_ves_reward_has_the_published_steps_and_is_as_by_hand():
    for paid, ratios in {1.25: (3.0, 2.0), 1.0: (1.99, 1.0), 0.75: (0.9, 0.5), 0.5: (0.3, 0.25), 0.25: (0.1,)}.items():
        assert [official.speed_reward([ratio]) for ratio in ratios] == [paid] * len(ratios)
    # 99 ones and one 100: mean 1.99, variance 0.99 * 0.99^2 + 0.01 * 98.01^2 = 97.03, so the bound is 29.55.
    assert official.speed_reward([1.0] * 99 + [100.0]) == 1.0
    assert official.speed_reward([1.0, 3.0]) == 1.25  # both lie within: their mean is 2
    assert official.speed_reward([2.0, 2.0]) == 1.25  # the published script drops all of them and divides by zero
    assert official.r_ves([1.25, 1.0, 0.0, 0.25]) == pytest.approx(25.0 * (math.sqrt(1.25) + 1.0 + 0.5))
    with pytest.raises(ValueError, match="needs questions"):
        official.r_ves([])


def test_both_queries_are_timed_a_hundred_times_in_turn_and_a_failure_earns_nothing():
    order = []

    def query(name, ms):
        return lambda: order.append(name) or ms

    assert official.timed_reward(query("ours", 2.0), query("theirs", 4.0), timeout_s=60) == 1.25
    assert order == ["ours", "theirs"] * 100
    assert official.timed_reward(query("ours", None), query("theirs", 4.0), timeout_s=60) == 0.0
    assert official.timed_reward(query("ours", 2.0), query("theirs", 4.0), timeout_s=0) == 0.0  # past all time limits


def test_each_timed_run_has_a_connection_of_its_own(folder, monkeypatch):
    """A connection that is kept has read the schema and the pages: what is left to time is too little."""
    opened = []

    def counting(location):
        opened.append(location)
        return open_readonly(location)

    monkeypatch.setattr(sqlite, "open_readonly", counting)
    shop = str(folder / "databases" / "shop" / "shop.sqlite")
    session = sqlite.SqliteSession(shop, Bounds(5.0, 1000, 10**6, 256), NoClock())

    def cold_ms(sql):
        return session.cold_ms(sql, 1000, 5.0)

    times = [cold_ms("SELECT value FROM json_each('[1]'), customer") for _ in range(3)]
    assert all(ms is not None and ms > 0 for ms in times)
    large = "WITH t(x) AS (VALUES (1) UNION ALL SELECT x + 1 FROM t WHERE x < 60000) SELECT hex(randomblob(24)) FROM t"
    assert cold_ms(f"{large} ORDER BY 1") is not None  # sorted in memory: a worker writes no file
    assert cold_ms("SELECT nope FROM customer") is None
    assert cold_ms("SELECT load_extension('x')") is None
    assert opened == [shop] * 7  # the session's own, and one for each run


def test_r_ves_pays_a_right_query_by_its_speed(folder):
    run(folder, "--equality", "r_ves", "--timeout", "2", "--out", str(folder / "v.jsonl"), "--json")
    values = [json.loads(line)["r_ves"] for line in (folder / "v.jsonl").read_text().splitlines()]
    assert all(value in (0.25, 0.5, 0.75, 1.0, 1.25) for value in (values[0], values[1], values[2]))
    count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40000) SELECT count(*) FROM n"
    (folder / "slow.sql").write_text(f"SELECT 40000\tshop\n{count}\tshop\n")
    (folder / "answers.sql").write_text(f"{count}\nSELECT 40000\n")
    run(folder, "--equality", "r_ves", "--out", str(folder / "v.jsonl"), gold="slow.sql", pred="answers.sql")
    assert [json.loads(line)["r_ves"] for line in (folder / "v.jsonl").read_text().splitlines()] == [0.25, 1.25]


def test_the_word_that_the_official_test_suite_replaces_is_told(folder):
    (folder / "one.sql").write_text("SELECT 'values'\tshop\nSELECT 2\tshop\n")
    (folder / "answers.sql").write_text("SELECT 'values'\nSELECT 'value'\n")
    _, output = run(folder, "--equality", "test_suite", "--json", gold="one.sql", pred="answers.sql")
    assert "replaces the letters value by 1 in predictions: 1 that are right here may be wrong there (0)" in output
    assert json.loads(output.splitlines()[-1])["rewritten_there"] == [0]
    _, output = run(folder, "--equality", "bird", gold="one.sql", pred="answers.sql")
    assert "replaces the letters" not in output


def score_pairs(folder, pairs, equalities, *more, script=""):
    """The lines of `--out` and the printed facts of (gold, prediction) pairs on the shop, with a script run on it."""
    build_database(folder / "databases" / "shop" / "shop.sqlite", script)
    (folder / "pairs.sql").write_text("".join(f"{gold}\tshop\n" for gold, _ in pairs), encoding="utf-8")
    (folder / "answers.sql").write_text("".join(f"{predicted}\n" for _, predicted in pairs), encoding="utf-8")
    options = ["--equality", ",".join(equalities), "--out", str(folder / "v.jsonl"), "--json", *more]
    _, output = run(folder, *options, gold="pairs.sql", pred="answers.sql")
    lines = [json.loads(line) for line in (folder / "v.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines, json.loads(output.splitlines()[-1])


ALL_EQUALITIES = ("strict", "bird", "test_suite", "spider_exec", "strict_nonempty")


def test_reserved_and_odd_names_are_scored(folder):
    script = """
        CREATE TABLE "order" ("select" TEXT, "group" INTEGER, "größe (cm)" REAL, "a;b" TEXT, "it's" TEXT);
        INSERT INTO "order" VALUES ('x', 2, 1.5, 'semi', 'quote'), ('y', 1, 2.5, 'colon', 'tick');
        CREATE TABLE "2024 sales" ("from" INTEGER); INSERT INTO "2024 sales" VALUES (7);
    """
    pairs = [
        ('SELECT "select" FROM "order" WHERE "group" = 1', "SELECT `select` FROM [order] WHERE [group] = 1"),
        ('SELECT "größe (cm)" FROM "order"', 'SELECT o."größe (cm)" FROM "order" AS o'),
        ('SELECT "a;b" FROM "order"', "SELECT [a;b] FROM `order`"),
        ("""SELECT "it's" FROM "order\"""", "SELECT [it's] FROM [order]"),
        ('SELECT "from" FROM "2024 sales"', "SELECT [from] FROM [2024 sales]"),
        ('SELECT "a;b" FROM "order"', """SELECT "it's" FROM "order\""""),
    ]
    names = ("strict", "bird", "test_suite")
    lines, facts = score_pairs(folder, pairs, names, script=script)
    assert [line["error"] for line in lines] == [None] * 6
    assert [[line[name] for name in names] for line in lines] == [[True] * 3] * 5 + [[False] * 3]
    assert facts["equalities"]["strict"]["all"] == 83.3333


def test_twenty_six_columns_in_another_order_are_right_by_the_test_suite_alone(folder):
    letters = [chr(ord("a") + number) for number in range(26)]
    rows = [", ".join(str(100 * row + number) for number in range(26)) for row in range(3)]
    script = f"CREATE TABLE wide ({', '.join(letters)}); INSERT INTO wide VALUES ({'), ('.join(rows)})"
    backwards = ", ".join(reversed(letters))
    swapped = backwards.replace("z, y", "z, z")  # the values of y are gone
    pairs = [
        ("SELECT * FROM wide", f"SELECT {backwards} FROM wide"),
        ("SELECT * FROM wide", f"SELECT {swapped} FROM wide"),
    ]
    lines, _ = score_pairs(folder, pairs, ("strict", "bird", "test_suite"), script=script)
    found = [(line["strict"], line["bird"], line["test_suite"]) for line in lines]
    assert found == [(False, False, True), (False, False, False)]


def test_a_slow_gold_query_is_listed_apart_and_counts_for_nothing(folder):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    pairs = [(endless, "SELECT 1"), ("SELECT 1", "SELECT 1"), ("SELECT 2", "SELECT 1")]
    lines, facts = score_pairs(folder, pairs, ("strict", "bird"), "--timeout", "1")
    assert [line["strict"] for line in lines] == [None, True, False]
    assert facts["gold_errors"] == [{"idx": 0, "error": "gold_timeout"}]
    assert (facts["scored"], facts["equalities"]["bird"]["all"]) == (2, 50.0)
    assert facts["unavailable"] == []


def test_semicolons_in_texts_end_no_query(folder):
    pairs = [
        ("SELECT 'a;b'", "SELECT 'a;b';"),
        ("SELECT ';' AS x -- ; so", "SELECT ';' /* ; */"),
        ("SELECT name FROM customer WHERE city <> ';;'", "SELECT name FROM customer WHERE city != ';;'"),
        ("SELECT 'a;b'", "SELECT 'a'"),
    ]
    lines, _ = score_pairs(folder, pairs, ("strict", "bird", "test_suite"))
    assert [line["error"] for line in lines] == [None] * 4
    assert [(line["strict"], line["bird"], line["test_suite"]) for line in lines] == [(True,) * 3] * 3 + [(False,) * 3]


VALUE_PAIRS = {  # a gold query: a prediction that is right, and one that is wrong
    "SELECT 9007199254740993": ("SELECT 9007199254740992 + 1", "SELECT 9007199254740992"),  # 2**53 + 1
    "SELECT 9223372036854775807": ("SELECT max(9223372036854775807, 1)", "SELECT 9223372036854775806"),
    "SELECT -9223372036854775808": ("SELECT -9223372036854775807 - 1", "SELECT -9223372036854775807"),
    "SELECT x'00ff'": ("SELECT substr(x'00ff00', 1, 2)", "SELECT x'00fe'"),
    "SELECT x''": ("SELECT zeroblob(0)", "SELECT x'00'"),
    "SELECT 9e999": ("SELECT 1e308 * 10", "SELECT -9e999"),
    "SELECT -9e999, 1": ("SELECT -1e308 * 10, 1", "SELECT 1e308, 1"),
}


def test_big_integers_blobs_and_infinities_are_scored_exactly(folder):
    right = [(gold, each[0]) for gold, each in VALUE_PAIRS.items()]
    wrong = [(gold, each[1]) for gold, each in VALUE_PAIRS.items()]
    names = ("strict", "bird", "test_suite")
    lines, facts = score_pairs(folder, [*right, *wrong], names, "--report", str(folder / "mine"))
    assert [line["error"] for line in lines] == [None] * 14
    assert [[line[name] for name in names] for line in lines] == [[True] * 3] * 7 + [[False] * 3] * 7
    assert facts["equalities"]["strict"]["all"] == 50.0
    (mine,) = load_runs(str(folder / "mine"))
    assert [one.scores["strict"] for one in mine.records] == [1.0] * 7 + [0.0] * 7
    page = (folder / "mine" / "report.html").read_text(encoding="utf-8")
    assert "9007199254740993" in page
