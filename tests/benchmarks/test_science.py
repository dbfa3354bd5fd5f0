"""EHRSQL and ScienceBenchmark in the layouts that their authors ship, written here at the size of a few rows."""

import json

import pytest
from test_benchmarks import make_database, read, reasons, write
from typer.testing import CliRunner

from pipelines.benchmarks import base
from pipelines.core.errors import DataError
from pipelines.core.registry import EQUALITIES
from pipelines.core.types import ExecutionResult, ExecutionStatus
from pipelines.recipe.config import Source
from pipelines.sql.equalities import official


def patient(number, query, **changes):
    row = {"id": f"q{number}", "db_id": "harbour", "question": f"Question {number}?", "query": query}
    return row | {"is_impossible": False, "q_tag": "how many"} | changes


@pytest.fixture
def records(tmp_path):
    home = tmp_path / "EHRSQL" / "dataset" / "ehrsql" / "harbour"
    make_database(home / "harbour.sqlite")
    rows = [
        patient(1, "SELECT COUNT(*) FROM ship WHERE name < current_time"),
        patient(2, "null", is_impossible=True),
        patient(3, "SELECT name FROM ship WHERE flag = 'NO'"),
        patient(4, "SELECT flag FROM ship", db_id="../x"),
        patient(5, "null", is_impossible=True),
        patient(6, "select id from ship where id between temperature_lower and temperature_upper"),
    ]
    write(home / "valid.json", json.dumps(rows))
    return tmp_path / "EHRSQL"


def test_ehrsql_reads_what_can_be_answered_as_the_official_script_repairs_it(records, tmp_path):
    loaded = read("ehrsql", records, tmp_path / "stage")
    assert [one.id for one in loaded.examples] == ["ehrsql_q1", "ehrsql_q3", "ehrsql_q6"]
    assert loaded.examples[0].gold_sql == "select count(*) from ship where name < '2105-12-31 23:59:00'"
    assert loaded.examples[2].gold_sql == "select id from ship where id between 35.5 and 38.1"
    assert reasons(loaded) == [("harbour/valid.json[3]", "bad_database_id")]
    home = records / "dataset" / "ehrsql" / "harbour"
    assert set(base.files(Source(kind="ehrsql", path=str(records), split="dev"))) == {
        home / "valid.json",
        home / "harbour.sqlite",
    }
    with pytest.raises(DataError, match=r"no test\.json under"):
        read("ehrsql", records, tmp_path / "stage", "test")


def test_the_six_official_figures_by_hand():
    # 3 answerable questions: one right, one wrong, one not answered; 2 without an answer: one abstained.
    cases = [(True, True, True), (True, True, False), (True, False, False), (False, False, False), (False, True, False)]
    figures = official.reliability(cases)
    assert figures == pytest.approx(
        {
            "precision_ans": 100 * 2 / 3,  # of 3 answers 2 were to questions that have one
            "recall_ans": 100 * 2 / 3,
            "f1_ans": 100 * 2 / 3,
            "precision_exec": 100 / 3,
            "recall_exec": 100 / 3,
            "f1_exec": 100 / 3,
        }
    )
    assert set(official.reliability([(True, False, False)]).values()) == {0.0}


def test_answers_are_the_same_when_their_first_columns_are():
    for gold, predicted, same in (
        ([(1, "a"), (2, "b")], [(2,), (1,)], True),
        ([("1",)], [(1,)], True),
        ([(1,)], [(1,), (1,)], False),
        ([(1.0,)], [(1,)], False),
        ([], [], True),
    ):
        results = (ExecutionResult(ExecutionStatus.OK, rows=tuple(rows)) for rows in (gold, predicted))
        assert EQUALITIES["ehrsql"].compare(*results) == same


def test_score_counts_abstentions(records, tmp_path):
    from flows.cli import app

    predicted = {"q1": "SELECT count(id) FROM ship WHERE name < current_time", "q2": "null", "q3": "null"}
    predicted |= {"q5": "SELECT 1", "q6": "SELECT id, name FROM ship WHERE id > 35"}
    (tmp_path / "pred.json").write_text(json.dumps(predicted))
    home = records / "dataset" / "ehrsql"
    rows = json.loads((home / "harbour" / "valid.json").read_text())
    (tmp_path / "gold.json").write_text(json.dumps([row for row in rows if row["id"] != "q4"]))
    files = ["--gold", str(tmp_path / "gold.json"), "--pred", str(tmp_path / "pred.json"), "--database", str(home)]
    options = ["--equality", "ehrsql", "--out", str(tmp_path / "out.jsonl"), "--report", str(tmp_path / "report")]
    result = CliRunner().invoke(app, ["score", *files, *options, "--workers", "1", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output.splitlines()[-1])
    assert facts["scored"] == 3
    assert facts["equalities"]["ehrsql"]["all"] == pytest.approx(66.6667)
    # answered: q1 right, q5 (no answer), q6 right (both empty); answerable: q1, q3, q6
    assert facts["reliability"]["ehrsql"] == {
        "precision_ans": 66.6667, "recall_ans": 66.6667, "f1_ans": 66.6667,
        "precision_exec": 66.6667, "recall_exec": 66.6667, "f1_exec": 66.6667,
    }  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["ehrsql"], line.get("abstained")) for line in lines] == [
        (True, None), (None, True), (False, None), (None, False), (True, None),
    ]  # fmt: skip
    assert "with the questions that have no answer: precision ans 66.7" in result.output


@pytest.mark.parametrize("together", [False, True])
def test_sciencebenchmark_has_a_file_for_each_database_or_one_for_all(tmp_path, together):
    folder = tmp_path / "science"
    make_database(folder / "databases" / "harbour" / "harbour.sqlite")
    row = {"db_id": "harbour", "question": "How many ships?", "query": "SELECT count(*) FROM ship", "values": []}
    write(folder / ("dev.json" if together else "harbour/dev.json"), json.dumps([row, row | {"db_id": "cordis"}]))
    loaded = read("sciencebenchmark", folder, tmp_path / "stage")
    assert [one.id for one in loaded.examples] == [f"sciencebenchmark_{'dev' if together else 'harbour_dev'}_0"]
    assert [reason for _, reason in reasons(loaded)] == ["missing_database"]
    server = read("sciencebenchmark", folder, tmp_path / "stage", options={"address": "postgresql://reader@db/"})
    assert [one.database.location for one in server.examples] == [
        "postgresql://reader@db/harbour",
        "postgresql://reader@db/cordis",
    ]
    with pytest.raises(DataError, match=r"no seed\.json under"):
        read("sciencebenchmark", folder, tmp_path / "stage", "train")
