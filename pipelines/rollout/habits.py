"""Answers whose SQL is wrapped in something else, counted while episodes end: told once, and not only as EX 0."""

import logging
import weakref
from collections import Counter

from pipelines.core.types import ActionKind, Trajectory
from pipelines.protocols.base import Protocol
from pipelines.protocols.wrapping import HABITS, Wrapping, advice, wrapping
from pipelines.rollout.policies.base import Policy

FIRST_ANSWERS = 40  # a habit is logged after so many answers, or at the end of a shorter run
FEWEST = 2  # answers; a single one has its own error
LEAST_SHARE = 0.1  # share of the answers that makes a habit
HAS_SQL = (ActionKind.SOLUTION, ActionKind.SQL)
log = logging.getLogger(__name__)
_told: weakref.WeakSet[Policy] = weakref.WeakSet()  # policies whose habit was told in this process


def last_query(trajectory: Trajectory) -> str | None:
    """The answer of an episode, or the last query of one without an answer; None if it has no SQL."""
    queries = [turn.action.content for turn in trajectory.turns if turn.action.kind in HAS_SQL]
    if not queries:
        return None
    return queries[-1]


def advice_on(trajectory: Trajectory, protocol: Protocol) -> str | None:
    """What the answer of a single episode is wrapped in, and what to do; None for SQL alone."""
    kind = wrapping(last_query(trajectory) or "")
    if kind is None:
        return None
    return f"The model's answers {HABITS[kind]}: {advice(protocol.can_strip)}"


class AnswerHabits:
    """Counts what the answers of a run are wrapped in."""

    def __init__(self, policy: Policy, protocol: Protocol) -> None:
        self._policy = policy
        self._protocol = protocol
        self._counts: Counter[Wrapping] = Counter()
        self._answers = 0

    def note(self, trajectory: Trajectory) -> None:
        """Count an ended episode by its last SQL."""
        query = last_query(trajectory)
        if query is None:
            return
        self._answers += 1
        kind = wrapping(query)
        if kind is not None:
            self._counts[kind] += 1
        if self._answers == FIRST_ANSWERS:
            self.tell()

    def tell(self) -> None:
        """Log the commonest habit, once for a policy."""
        if self._answers < FEWEST or not self._counts or self._policy in _told:
            return
        kind, count = self._counts.most_common(1)[0]
        if count < LEAST_SHARE * self._answers:
            return
        _told.add(self._policy)
        remedy = advice(self._protocol.can_strip)
        log.warning("%d of %d answers %s: %s", count, self._answers, HABITS[kind], remedy)
