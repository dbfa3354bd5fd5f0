"""The panel: weights, tracks, the log by term, and whether a wrong answer can be paid more than a right one."""

import dataclasses

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.registry import REWARDS
from pipelines.core.types import Action, ActionKind, ExecutionStatus, Turn
from pipelines.protocols import knowledge
from pipelines.recipe import recipes
from pipelines.recipe.config import RewardTerm
from pipelines.rewards.panel import Rubric
from tests.rewards.conftest import FINAL


def panel(*terms):
    return Rubric([RewardTerm(**term) for term in terms])


SQL_TRAIL = panel(
    {"term": "exec", "weight": 5},
    {"term": "turns", "weight": 2},
    *({"term": name} for name in ("schema", "bigram", "syntax", "format")),
)


@pytest.fixture
def facts(items):
    return {
        "predicted_schema": items("employees", "employees.wages"),
        "gold_items": items("employees", "employees.salary"),  # 1/3
        "predicted_bigrams": frozenset({(1, 2), (2, 3), (3, 4)}),
        "gold_bigrams": frozenset({(1, 2), (2, 3), (3, 5)}),  # 2/4
    }


def test_sql_trails_total_equation_12(outcome, facts):
    right = SQL_TRAIL.score(outcome(**facts))
    assert right.total == pytest.approx(5 + 2 + 1 / 3 + 2 / 4 + 1 + 1)
    by_term = {"exec": 1, "turns": 1, "schema": 1 / 3, "bigram": 0.5, "syntax": 1, "format": 1}
    assert right.by_term == pytest.approx(by_term)
    failed = outcome(turns=3, malformed=True, correct=False, status=ExecutionStatus.ERROR, **facts)
    assert SQL_TRAIL.score(failed).total == pytest.approx(1 / 3 + 2 / 4)


def test_tracks_are_summed_apart_equation_4(outcome, items):
    rubric = panel({"term": "trust_exec"}, {"term": "format", "weight": 0.1}, {"term": "schema", "track": "schema"})
    paid = rubric.score(outcome(predicted_schema=items("t"), gold_items=items("t")))
    assert paid.by_track == pytest.approx({"full": 1.1, "schema": 1.0})
    assert paid.total == paid.by_track["full"]


def test_a_judge_without_an_endpoint_or_of_weight_0_is_the_program(outcome, facts):
    """A wrong answer that runs, without a grade: (1 + 1/3 + 2/4) / 3 by the program; weight 1 has to be graded."""
    wrong = outcome(correct=False, **facts)
    assert panel({"term": "judge"}).score(wrong).total == pytest.approx((1 + 1 / 3 + 2 / 4) / 3)
    judge = {"term": "judge", "options": {"by": "gone"}}
    paid = panel({"term": "exec"}, {**judge, "weight": 0}).score(wrong)
    assert (paid.total, paid.by_term["judge"]) == (0.0, pytest.approx((1 + 1 / 3 + 1 / 2) / 3))
    with pytest.raises(ValueError, match="'gone' was not asked"):
        panel({"term": "exec"}, judge).score(wrong)


ANALYSED = {
    **dict.fromkeys(("predicted_schema", "gold_items"), "schema"),
    **dict.fromkeys(("predicted_bigrams", "gold_bigrams"), "bigrams"),
    **{"gold_schema": "gold_schema", "hardness": "level"},
}


@pytest.mark.parametrize("term", list(REWARDS))
def test_a_term_declares_what_it_reads(outcome, items, term):
    proposal = Turn("", Action(ActionKind.PROPOSE, knowledge.proposal(["t"], {"t": ["c"]}), "r"))
    told = {"predicted_schema": items("t"), "gold_items": items("t"), "trace": (proposal, FINAL)}
    read = set[str]()

    class Watched:
        def __init__(self, outcome):
            self._outcome = outcome

        def __getattr__(self, name):
            read.add(name)
            return getattr(self._outcome, name)

    for correct in (True, False):
        REWARDS[term].pay(Watched(outcome(correct=correct, **told)))
    assert {ANALYSED[name] for name in read & ANALYSED.keys()} == set(REWARDS[term].reads)


def test_a_panel_reads_what_its_terms_read_and_scores_no_broken_episode(outcome):
    assert SQL_TRAIL.reads == {"level", "schema", "bigrams"}
    assert panel({"term": "skyrl"}).reads == set()
    with pytest.raises(ValueError, match="broken episode of 'e1'"):
        SQL_TRAIL.score(outcome(broken=True))


def test_each_turn_is_paid_what_it_earned(outcome):
    """A malformed turn and a good one before the answer; what is not paid by turn is paid for the last."""
    rubric = panel({"term": "exec", "weight": 2}, {"term": "turn_faults", "weight": 3, "options": {"cost": 0.5}})
    paid = rubric.score(outcome(turns=3, malformed=True))
    assert paid.by_turn == (-1.5, 0.0, 2.0)
    assert paid.by_term == {"exec": 1.0, "turn_faults": -0.5}
    assert paid.total == sum(paid.by_turn)
    failing = outcome(turns=2, correct=False, status=ExecutionStatus.ERROR)
    assert panel({"term": "turn_faults"}).score(failing).by_turn == (0.0, -0.1)  # an answer is a query that is tried


@pytest.mark.parametrize(("paid", "fault"), [([0.0], "for 1 turns of 2"), ([0.0, float("nan")], "nan, which is no")])
def test_a_term_must_pay_each_turn_a_finite_number(outcome, monkeypatch, paid, fault):
    own = REWARDS["turn_faults"]._replace(pay=lambda outcome: paid)
    monkeypatch.setitem(REWARDS._entries, "turn_faults", dataclasses.replace(REWARDS.entry("turn_faults"), value=own))
    with pytest.raises(RecipeError, match=f"ValueError: it pays {fault}"):
        panel({"term": "turn_faults"}).score(outcome())


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([{"term": "exec"}, {"term": "exec"}], r"'exec' is named twice"),
        ([{"term": "schema", "track": "schema"}], r"no reward term on the full track"),
        ([], r"no reward term on the full track"),
    ],
)
def test_mistakes_in_a_panel_are_named(terms, message):
    with pytest.raises(RecipeError, match=message):
        panel(*terms)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.0.term=exce", r"rewards.0.term: there is no reward term 'exce'. Did you mean 'exec'\?"),
        ("rewards.0.term=zzz", r"There are: exec, turns"),
        ("rewards.turns.options.esay=2", r"reward term 'turns' has no option 'esay'. It has: easy, medium"),
        ("rewards.turns.options.easy=two", r"option 'easy' of reward term 'turns': Input should be a valid integer"),
    ],
)
def test_a_wrong_name_or_option_of_a_reward_term_is_told_when_the_recipe_is_read(override, message):
    with pytest.raises(RecipeError, match=message):
        recipes.load("sql_trail", [override])


def test_no_wrong_answer_is_paid_more_than_a_right_one_where_the_papers_say_so():
    assert SQL_TRAIL.margin() == 0.0  # at least 5 + 1 for a right one, at most 2 + 4 for a wrong one
    assert Rubric(recipes.load("sqltrain").rewards).margin() == 1.0  # 5 + 1 against 2 + 3
    assert Rubric(recipes.load("reasoning_sql").rewards).margin() == 0.0  # 3 + 2 + 1 against 2 + 4
    assert Rubric(recipes.load("reasoning_sql", ["rewards.exec.weight=2"]).rewards).margin() == -1.0
    assert panel({"term": "skyrl"}).margin() is None
    assert panel({"term": "exec"}, {"term": "trust_schema", "track": "schema"}).margin() == 1.0


def test_mtir_sqls_printed_table_pays_failing_more_than_wrong_and_the_repaired_variant_less(outcome):
    wrong = outcome(correct=False)
    failing = outcome(correct=False, status=ExecutionStatus.ERROR)
    malformed = outcome(correct=False, malformed=True)
    printed, repaired = (Rubric(recipes.load("mtir_sql", steps).rewards) for steps in ([], ["variant=repaired"]))
    paid = [round(printed.score(one).total, 9) for one in (wrong, failing, malformed)]
    assert paid == [-0.8, 0.0, -0.1]  # equations 5 to 7
    paid = [round(repaired.score(one).total, 9) for one in (wrong, failing, malformed)]
    assert paid == [-0.8, -1.0, -1.1]
