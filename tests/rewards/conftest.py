"""Outcomes by hand: only what a test is about is said."""

import dataclasses

import pytest

from pipelines.core.types import Action, ActionKind, ExecutionStatus, Outcome, SchemaItems, StopReason, Trajectory, Turn

FINE = Turn("<sql>S</sql>", Action(ActionKind.SQL, "S", "r"), "rows", ExecutionStatus.OK)
BAD = Turn("?", Action(ActionKind.INVALID, format_error="no_action"), "invalid")
FINAL = Turn("<solution>S</solution>", Action(ActionKind.SOLUTION, "S", "r"))


@pytest.fixture
def items():
    """`items("t", "t.c")` is the table t and its column c."""

    def make(*names):
        pairs = frozenset((table, column) for table, dot, column in (n.partition(".") for n in names) if dot)
        return SchemaItems(frozenset(n for n in names if "." not in n), pairs)

    return make


@pytest.fixture
def outcome():
    """A right answer in the second turn of ten, unless told otherwise.

    `turns=n` gives n turns, the last of them final; `malformed=True` puts a bad turn first; `final=None`: no answer.
    """

    def make(turns=2, malformed=False, final="S", trace=None, **changes):
        last = FINAL if final is not None else FINE
        told = (*([BAD] if malformed else []), *[FINE] * (turns - 1 - malformed), last)
        stop = StopReason.SOLUTION if final is not None else StopReason.TURN_LIMIT
        trajectory = Trajectory("e1", 0, "policy", "react", (), trace or told, final, stop)
        right = Outcome(
            example_id="e1",
            trajectory=trajectory,
            equality="strict",
            correct=True,
            status=ExecutionStatus.OK,
            n_rows=1,
            broken=False,
            hardness="easy",
            max_turns=10,
            predicted_schema=None,
            gold_items=None,
            gold_schema=None,
            predicted_bigrams=frozenset(),
            gold_bigrams=frozenset(),
        )
        if final is None:
            right = dataclasses.replace(right, correct=False, status=None)
        return dataclasses.replace(right, **changes)

    return make
