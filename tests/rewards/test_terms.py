"""Every reward of the five papers against numbers worked out by hand, most of them the papers' own examples."""

import pytest

from pipelines.core.types import Action, ActionKind, ExecutionStatus, SchemaItems, Turn
from pipelines.protocols.knowledge import proposal
from pipelines.rewards import terms
from pipelines.sql.analysis.name_resolution import schema_items
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import Column, Schema, Table

WRONG = {"correct": False}
FAILS = {"correct": False, "status": ExecutionStatus.ERROR}


# --- SQL-Trail, appendix A.4 -----------------------------------------------------------------------------------------


def test_execution_and_syntax_equations_6_and_8(outcome):
    assert (terms.execution(outcome()), terms.execution(outcome(**WRONG))) == (1.0, 0.0)
    assert terms.syntax(outcome(**WRONG)) == 1.0
    assert terms.syntax(outcome(**FAILS)) == 0.0
    assert terms.syntax(outcome(final=None)) == 0.0


@pytest.mark.parametrize(
    ("hardness", "turns", "correct", "reward"),
    [  # T is 10
        ("easy", 1, False, 1),
        ("easy", 2, False, 1),
        ("easy", 2, True, 1),
        ("easy", 3, True, 0),
        ("medium", 3, False, 1),
        ("medium", 4, True, 0),
        ("hard", 1, False, 0),
        ("hard", 9, True, 1),
        ("hard", 10, True, 0),
        ("extra", 9, True, 1),
        ("extra", 9, False, 0),
        ("extra", 11, True, 0),  # the forced turn comes after the last
    ],
)
def test_the_turn_table_equation_7(outcome, hardness, turns, correct, reward):
    assert terms.turns(outcome(turns=turns, correct=correct, hardness=hardness)) == reward


def test_the_turn_budget_is_a_recipes_and_no_answer_has_no_finishing_turn(outcome):
    assert terms.turns(outcome(turns=1, final=None)) == 0.0
    assert terms.turns(outcome(turns=2, final=None), unanswered=True) == 1.0  # equation 7 as it is written: t <= 2
    assert terms.turns(outcome(turns=3, final=None), unanswered=True) == 0.0
    assert terms.turns(outcome(turns=3), easy=3) == 1.0
    assert terms.turns(outcome(turns=3, hardness="medium"), medium=2) == 0.0


def test_the_papers_examples_of_bigrams_and_schema_equations_9_and_10(outcome, items):
    gold, predicted = bigrams("SELECT name FROM student"), bigrams("SELECT name FROM teacher")
    assert gold == {("select", "name"), ("name", "from"), ("from", "student")}
    assert terms.bigram(outcome(predicted_bigrams=predicted, gold_bigrams=gold)) == 2 / 4
    employees = Schema((Table("Employees", (Column("Salary", "REAL"),)),))
    gold = schema_items("SELECT Salary FROM Employees", employees)
    predicted = schema_items("SELECT Wages FROM Employees", employees)
    assert gold == SchemaItems(frozenset({"employees"}), frozenset({("employees", "salary")}))
    assert terms.schema(outcome(predicted_schema=predicted, gold_items=gold)) == 1 / 3
    assert terms.schema(outcome(gold_items=items("t"))) == 0.0
    assert terms.schema(outcome(predicted_schema=items("t"))) == 0.0
    assert terms.schema(outcome(predicted_schema=items(), gold_items=items())) == 0.0
    assert terms.jaccard(set(), set()) == 0.0
    assert terms.jaccard({1}, {1}) == 1.0


def test_format_and_skyrls_three_cases_of_section_4_1(outcome):
    assert terms.format_(outcome(**WRONG)) == 1.0
    assert terms.format_(outcome(turns=3, malformed=True)) == 0.0
    assert terms.format_(outcome(final=None)) == 0.0
    assert terms.skyrl(outcome()) == 1.0
    assert terms.skyrl(outcome(**WRONG)) == 0.0
    assert terms.skyrl(outcome(**FAILS)) == 0.0
    assert terms.skyrl(outcome(turns=3, malformed=True)) == -1.0  # though the answer is right
    assert terms.skyrl(outcome(final=None)) == -1.0


# --- Reasoning-SQL, section 3.2 and A.7 ------------------------------------------------------------------------------


def test_the_judge_grades_what_is_wrong_and_a_missing_grade_is_an_error(outcome):
    assert terms.judge(outcome(judge=0.3)) == 1.0
    assert terms.judge(outcome(judge=0.3, **WRONG)) == 0.3
    assert terms.judge(outcome(judge=0.0, **WRONG), by="critic") == 0.0
    assert terms.judge(outcome(final=None)) == 0.0
    with pytest.raises(ValueError, match="'critic' was not asked"):
        terms.judge(outcome(**WRONG), by="critic")


# --- TRUST-SQL, section 3.3 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reward"),
    [
        ({}, 1.0),
        (WRONG, 0.2),
        ({**WRONG, "n_rows": 0}, 0.2),  # it ran: an empty result is a result
        (FAILS, 0.0),
        ({"correct": False, "status": ExecutionStatus.TIMEOUT}, 0.0),
        ({"final": None}, 0.0),
    ],
)
def test_r_exec_equation_1(outcome, changes, reward):
    assert terms.trust_exec(outcome(**changes)) == reward


EXPLORE = Turn("", Action(ActionKind.EXPLORE, "SELECT sql FROM sqlite_master", "r"), "t c", ExecutionStatus.OK)
PROPOSE = Turn("", Action(ActionKind.PROPOSE, proposal(["t"], {"t": ["c"]}), "r"), "noted")
GENERATE = Turn("", Action(ActionKind.GENERATE, "SELECT c FROM t", "r"), "1", ExecutionStatus.OK)
CONFIRM = Turn("", Action(ActionKind.SOLUTION, "SELECT c FROM t", "r"))
FAILED = Turn("", Action(ActionKind.GENERATE, "SELECT d FROM t", "r"), "error", ExecutionStatus.ERROR, "no_such_column")
LOOSE = Turn("", Action(ActionKind.EXPLORE, "SELECT 1", "r", "text_outside_tags"), "1", ExecutionStatus.OK)
GUESS = Turn("", Action(ActionKind.PROPOSE, proposal(["t"], {"t": ["c", "wages"]}), "r"), "noted")


@pytest.mark.parametrize(
    ("trace", "reward"),
    [
        ((EXPLORE, PROPOSE, GENERATE, CONFIRM), 0.1),
        ((EXPLORE, EXPLORE, PROPOSE, GENERATE, EXPLORE, PROPOSE, GENERATE, CONFIRM), 0.1),  # going back is allowed
        ((EXPLORE, GENERATE, CONFIRM), 0.0),  # never proposed
        ((PROPOSE, GENERATE, CONFIRM), 0.0),  # never explored
        ((EXPLORE, PROPOSE, CONFIRM), 0.0),  # never generated
        ((EXPLORE, PROPOSE, FAILED, GENERATE, CONFIRM), 0.0),  # an observation showed an error
        ((EXPLORE, LOOSE, PROPOSE, GENERATE, CONFIRM), 0.0),  # a turn failed the format check (C.2)
    ],
)
def test_r_fmt_equation_2(outcome, trace, reward):
    assert terms.trust_format(outcome(trace=trace)) == reward


def test_r_fmt_needs_an_answer_fewer_phases_and_on_demand_verified_knowledge(outcome):
    assert terms.trust_format(outcome(trace=(EXPLORE, PROPOSE, GENERATE), final=None)) == 0.0
    assert terms.trust_format(outcome(trace=(EXPLORE, CONFIRM)), phases=["explore", "confirm"]) == 0.1
    guessed = outcome(trace=(EXPLORE, GUESS, GENERATE, CONFIRM))
    assert (terms.trust_format(guessed), terms.trust_format(guessed, verified=True)) == (0.1, 0.0)
    assert terms.trust_format(outcome(trace=(EXPLORE, PROPOSE, GENERATE, CONFIRM)), verified=True) == 0.1


@pytest.mark.parametrize(
    ("gold", "match", "reward"),
    [  # the proposal is t and its columns c, wages
        (("t", "t.c", "t.wages"), "exact", 1.0),
        (("t", "t.c"), "exact", 0.0),
        (("t", "t.c"), "recall", 1.0),
        (("t", "t.c", "t.d"), "recall", 0.0),
        (("t", "t.c", "t.wages"), "dense", 1.0),
        (("t", "t.c"), "dense", 2 / 3),  # full recall, then precision
        (("t", "t.d"), "dense", 0.0),  # something is missing: nothing
    ],
)
def test_r_schema_equation_3_and_5_2(outcome, items, gold, match, reward):
    found = outcome(trace=(EXPLORE, GUESS, GENERATE, CONFIRM), gold_schema=items(*gold))
    assert terms.trust_schema(found, match=match) == pytest.approx(reward)


def test_r_schema_is_coupled_to_the_right_answer_and_needs_both_sides(outcome, items):
    wrong = outcome(trace=(EXPLORE, PROPOSE, GENERATE, CONFIRM), gold_schema=items("t", "t.c"), **WRONG)
    assert (terms.trust_schema(wrong), terms.trust_schema(wrong, coupled=False)) == (0.0, 1.0)
    assert terms.trust_schema(outcome(gold_schema=items("t"))) == 0.0
    assert terms.trust_schema(outcome(trace=(EXPLORE, PROPOSE, GENERATE, CONFIRM))) == 0.0


# --- MTIR-SQL, section 3.3 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "paid"),
    [  # equations 5, 6 and 7
        ({}, (0.1, 0.1, 1.0)),
        (WRONG, (0.1, 0.1, -1.0)),
        (FAILS, (0.1, -0.1, 0.0)),
        ({"turns": 3, "malformed": True}, (-0.1, 0.0, 0.0)),
        ({"final": None}, (-0.1, 0.0, 0.0)),
    ],
)
def test_mtirs_three_gated_rewards(outcome, changes, paid):
    one = outcome(**changes)
    assert (terms.mtir_format(one), terms.mtir_exec(one), terms.mtir_result(one)) == paid
