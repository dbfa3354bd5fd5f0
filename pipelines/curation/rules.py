"""Filter rules: named facts for which an episode is left out, as a demonstration or of GRPO's loss."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.registry import FILTER_RULES, filter_rule
from pipelines.types import Outcome, Trajectory


@filter_rule("malformed")
def malformed(outcome: Outcome) -> bool:
    """Some turn is not well-formed."""
    return is_malformed(outcome.trajectory)


@filter_rule("no_answer")
def no_answer(outcome: Outcome) -> bool:
    """The episode ended without a final SQL."""
    return outcome.trajectory.final_sql is None


def is_malformed(trajectory: Trajectory) -> bool:
    """Whether some turn is not well-formed."""
    return any(turn.action.format_error is not None for turn in trajectory.turns)


def broken_rule(outcome: Outcome, rules: Iterable[str]) -> str | None:
    """The first of these rules that leaves an episode out; None where it stays.

    In GRPO this is GRPO-Filter (MTIR-SQL, equation 3). The paper gives neither its filter F nor its threshold: here a
    rule is a named fact, and one is enough.
    """
    return next((rule for rule in rules if FILTER_RULES[rule](outcome)), None)
