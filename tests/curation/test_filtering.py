"""Only right and well-formed episodes are kept; SQL-Trail's selection takes medium and hard questions first (A.6)."""

import pytest

from pipelines.core.types import ExecutionStatus, StopReason
from pipelines.curation import card, filtering
from pipelines.curation.filtering import fault
from pipelines.recipe.config import Filter
from tests.curation.conftest import select

EVERYTHING = Filter(keep=None, per_example=None)


def test_a_right_and_well_formed_episode_has_no_fault(outcome):
    assert fault(outcome()) is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"stop": StopReason.BROKEN, "failure": "worker_died"}, "broken_worker_died"),
        ({"broken": True, "status": ExecutionStatus.UNAVAILABLE}, "broken_execution"),
        ({"format_error": "missing_reasoning"}, "format_missing_reasoning"),
        ({"final_sql": None, "stop": StopReason.TURN_LIMIT, "status": None}, "no_answer_turn_limit"),
        ({"final_sql": None, "stop": StopReason.TOKEN_LIMIT, "status": None}, "no_answer_token_limit"),
        ({"status": ExecutionStatus.ERROR, "correct": False}, "sql_error"),
        ({"status": ExecutionStatus.TIMEOUT, "correct": False}, "sql_timeout"),
        ({"correct": False}, "wrong_result"),
    ],
)
def test_each_fault_has_its_own_reason(outcome, facts, reason):
    assert fault(outcome(**facts))[0] == reason


def test_a_right_answer_does_not_excuse_a_malformed_turn(outcome):
    malformed = outcome(format_error="two_actions", correct=True)
    assert select([malformed], EVERYTHING).left == [("a", "format_two_actions")]
    assert fault(malformed)[1] == "turn 1 of 2"


def test_nothing_vanishes_and_order_is_kept(outcome):
    outcomes = [outcome(id, correct=id != "b") for id in "abcd"]
    selection = select(outcomes, EVERYTHING, seed=0)
    assert selection.kept == [("a", 0), ("c", 0), ("d", 0)]
    assert selection.left == [("b", "wrong_result")]


def test_a_question_gives_at_most_per_example_trajectories_its_first_right_ones(outcome):
    outcomes = [outcome("a", sample, correct=sample != 0) for sample in range(4)]
    selection = select(outcomes, Filter(per_example=2), seed=0)
    assert selection.kept == [("a", 1), ("a", 2)]
    assert card.quality(selection.table, 0.0)["left_out"] == {"over_per_example": 1, "wrong_result": 1}
    assert select(outcomes[::-1], Filter(per_example=2), seed=0).kept == [("a", 2), ("a", 1)]  # in whatever order


def test_medium_and_hard_come_first_where_keep_binds(outcome):
    levels = ["easy", "medium", "hard", "extra"] * 5
    outcomes = [outcome(f"q{number}", hardness=level) for number, level in enumerate(levels)]
    selection = select(outcomes, Filter(keep=12), seed=0)
    kept = [levels[int(id[1:])] for id, _ in selection.kept]
    assert (kept.count("medium"), kept.count("hard")) == (5, 5)
    assert len(kept) == 12
    assert card.quality(selection.table, 0.0)["left_out"] == {"over_keep": 8}


def test_within_a_level_the_seed_decides_and_not_the_order_of_arrival(outcome):
    outcomes = [outcome(f"q{number}", hardness="hard") for number in range(30)]
    first = set(select(outcomes, Filter(keep=10), seed=0).kept)
    assert first == set(select(outcomes[::-1], Filter(keep=10), seed=0).kept)
    assert first != set(select(outcomes, Filter(keep=10), seed=1).kept)


def test_the_cap_comes_before_keep_so_that_one_question_cannot_fill_the_set(outcome):
    outcomes = [outcome("a", sample, hardness="hard") for sample in range(5)] + [outcome("b"), outcome("c")]
    assert select(outcomes, Filter(keep=3, per_example=1), seed=0).kept == [("a", 0), ("b", 0), ("c", 0)]


def test_a_reason_is_told_in_one_line():
    settings = Filter(keep=3, per_example=2, per_plan=1)
    assert filtering.detail("over_keep", "", settings) == "3 are kept"
    assert filtering.detail("over_per_example", "", settings) == "2 a question"
    assert filtering.detail("near_duplicate", "", settings) == "1 of one plan"
    assert filtering.detail("format_two_actions", "turn 1 of 2", settings) == "turn 1 of 2"
