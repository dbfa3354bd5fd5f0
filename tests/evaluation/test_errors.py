"""Every hand-made case of error_cases.txt, executed for real, lands in its class with its evidence."""

import dataclasses
import functools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.types import Action, ActionKind, Example, ExecutionStatus, StopReason, Trajectory, Turn
from pipelines.evaluation import evaluate
from pipelines.sql.analysis.diagnosis import diagnose, missing_names
from pipelines.sql.diagnoses import ERROR_CLASSES, KINDS, Failure
from pipelines.sql.schema import Column, Schema, Table, introspect
from tests.fakes import engine_fixture

engine = engine_fixture("module", timeout_s=1.0)
CASES = Path(__file__).with_name("error_cases.txt")
EQUALITIES = ("strict", "bird", "test_suite")


@dataclasses.dataclass(frozen=True)
class Case:
    title: str
    gold: str
    pred: str | None
    error: str
    stop: StopReason
    evidence: str
    hints: tuple[str, ...]


def read_cases():
    cases = []
    lines = [line for line in CASES.read_text().splitlines() if not line.startswith("#")]
    for paragraph in "\n".join(lines).split("\n\n"):
        if paragraph.strip():
            fields = {
                key: value.strip() for key, _, value in (line.partition(":") for line in paragraph.split("\n") if line)
            }
            cases.append(
                Case(
                    title=fields["case"],
                    gold=fields["gold"],
                    pred=fields["pred"].replace("\\t", "\t").replace("\\n", "\n") or None,
                    error=fields["class"],
                    stop=StopReason(fields.get("stop", "solution")),
                    evidence=fields.get("evidence", ""),
                    hints=tuple(fields.get("hints", "").split()),
                )
            )
    return cases


@pytest.fixture(scope="module")
def found(harbour, engine):
    """The diagnosis of every case, by title: executed and judged together."""
    cases = read_cases()
    examples = {case.title: Example(case.title, "", harbour, case.gold, hardness="easy") for case in cases}
    episodes = []
    for case in cases:
        action = Action(ActionKind.SOLUTION if case.pred else ActionKind.INVALID, case.pred or "")
        turns = (Turn(case.pred or "", action),) * 3
        episodes.append(Trajectory(case.title, 0, "hand", "react", (), turns, case.pred, case.stop))
    records = evaluate.evaluate(episodes, examples, engine, functools.cache(introspect), EQUALITIES, "greedy")
    assert not any(record.broken for record in records)
    return {record.example_id: record.diagnosis for record in records}


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: case.title)
def test_a_wrong_answer_lands_in_its_class(case, found):
    diagnosis = found[case.title]
    assert diagnosis is not None, "the answer counts as right"
    assert diagnosis.error == case.error, diagnosis
    assert case.evidence in diagnosis.evidence
    kinds = [hint.kind for hint in diagnosis.hints]
    if case.hints[:1] == ("exactly",):
        assert kinds == list(case.hints[1:])
    else:
        assert set(case.hints) <= set(kinds)


def test_the_cases_are_many_and_cover_every_class_and_clue(found, harbour, engine):
    cases = read_cases()
    assert len(cases) >= 60
    assert len({case.title for case in cases}) == len(cases)
    assert {case.error for case in cases} == set(ERROR_CLASSES)
    assert {hint.kind for diagnosis in found.values() if diagnosis for hint in diagnosis.hints} == set(KINDS)
    example = Example("q", "", harbour, "SELECT name FROM ships", hardness="easy")
    answer = evaluate.of_prediction("q", "SELECT T.name FROM ships AS T", "hand")
    (record,) = evaluate.evaluate([answer], {"q": example}, engine, functools.cache(introspect), EQUALITIES, "greedy")
    assert record.diagnosis is None
    assert record.right("strict")


SCHEMA = Schema((Table("t", (Column("a", "TEXT"), Column("b", "INTEGER"))),))
WORDS = """SELECT FROM WHERE IN JOIN ON USING WITH AS UNION LIMIT NULL BETWEEN NOT CASE count t t. a b 1 'x' "y" é
* , ( ) = . - ;"""
PIECES = st.sampled_from([*WORDS.split(), "ORDER BY", "\x00"])


@given(st.lists(PIECES, max_size=14).map(" ".join) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_class(text):
    for status in (ExecutionStatus.OK, ExecutionStatus.ERROR, ExecutionStatus.TIMEOUT):
        diagnosis, _ = diagnose(Failure(text, "SELECT a FROM t WHERE b = 1", SCHEMA, status=status))
        assert diagnosis.error in ERROR_CLASSES
        assert diagnosis.evidence
        assert {hint.kind for hint in diagnosis.hints} <= set(KINDS)


BANK = Schema(
    (
        Table("Accounts", (Column("custid", "INTEGER"), Column("name", "TEXT"))),
        Table("Savings", (Column("custid", "INTEGER"), Column("Balance", "REAL"))),
        Table("Checking", (Column("custid", "INTEGER"), Column("Balance", "REAL"))),
    )
)


@pytest.mark.parametrize(
    ("sql", "notes"),
    [
        ("SELECT name, balance FROM accounts", ["balance is a column of Savings, Checking"]),
        ("SELECT a.Balance FROM Accounts AS a", ["Balance is a column of Savings, Checking"]),
        ("SELECT nam FROM Accounts", ["columns with names like nam: name"]),
        ("SELECT 1 FROM Saving", ["tables with names like Saving: Savings"]),
        ("SELECT account_name FROM Accounts", ["columns with names like account_name: name"]),
        ("SELECT zzz FROM Accounts", []),
        ("SELECT name FROM Accounts", []),
        ("SELECT FROM", []),
    ],
)
def test_an_agent_is_told_where_the_names_are_that_it_misses(sql, notes):
    assert missing_names(sql, BANK, "sqlite") == notes


@given(st.lists(PIECES, max_size=14).map(" ".join) | st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_text_can_be_asked_for_missing_names(text):
    assert isinstance(missing_names(text, SCHEMA, "sqlite"), list)


@pytest.mark.parametrize("nesting", [30, 3000])
def test_deep_nesting_neither_hangs_nor_raises(nesting):
    text = "SELECT " + "(" * nesting + "a" + ")" * nesting + " FROM t"
    assert diagnose(Failure(text, "SELECT a FROM t", SCHEMA))[0].error == "semantic"
