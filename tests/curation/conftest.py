"""Outcomes made by hand: what a trajectory came to, without running one."""

import pytest

from pipelines.types import (
    Action,
    ActionKind,
    ExecutionStatus,
    Outcome,
    StopReason,
    Trajectory,
    Turn,
)


def make_outcome(
    id="a",
    sample=0,
    correct=True,
    hardness="easy",
    format_error=None,
    final_sql="SELECT 1",
    stop=StopReason.SOLUTION,
    status=ExecutionStatus.OK,
    broken=False,
    failure=None,
):
    """An episode of one probe and one answer; `format_error` is the probe's."""
    turns = (
        Turn("<sql>", Action(ActionKind.SQL, "SELECT 1", "look", format_error), "<observation>"),
        Turn("<solution>", Action(ActionKind.SOLUTION, "SELECT 1", "answer")),
    )
    trajectory = Trajectory(id, sample, "oracle", "react", (), turns, final_sql, stop, failure)
    return Outcome(
        example_id=id,
        trajectory=trajectory,
        equality="strict",
        correct=correct,
        status=status,
        n_rows=1,
        broken=broken,
        hardness=hardness,
        max_turns=10,
        predicted_schema=None,
        gold_schema=None,
        predicted_bigrams=frozenset(),
        gold_bigrams=frozenset(),
    )


@pytest.fixture
def outcome():
    return make_outcome
