"""Format and execution filtering of teacher trajectories, then SQL-Trail's selection of demonstrations (A.6)."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

from pipelines.config import Filter
from pipelines.curation import duplicates
from pipelines.types import Outcome, StopReason, Trajectory


@dataclasses.dataclass(frozen=True)
class Discarded:
    """A trajectory that is not kept.

    Attributes:
        reason: a short stable word: "broken_<class>", "format_<error>", "no_answer_<stop>", "sql_<status>",
            "wrong_result", "near_duplicate", "over_per_example", "over_keep".
        detail: one line for a person.
    """

    example_id: str
    sample: int
    reason: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """Demonstrations in the order of the outcomes, and every trajectory that was left out, in that order too."""

    kept: list[Trajectory]
    discarded: list[Discarded]

    @property
    def reasons(self) -> dict[str, int]:
        """How many were left out for each reason, most frequent first."""
        counts = collections.Counter(one.reason for one in self.discarded)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def fault(outcome: Outcome) -> tuple[str, str] | None:
    """Why a trajectory cannot be a demonstration, as (reason, detail); None when it can.

    It can when no boundary failed, every turn is well-formed, there is an answer, and the answer's result equals the
    gold SQL's by the equality that the outcome names.
    """
    trajectory = outcome.trajectory
    if trajectory.stop is StopReason.BROKEN or outcome.broken:
        cause = trajectory.failure or "execution"
        return f"broken_{cause}", "a boundary failed: not the teacher's fault, worth another try"
    for number, turn in enumerate(trajectory.turns, 1):
        if turn.action.format_error:
            return f"format_{turn.action.format_error}", f"turn {number} of {len(trajectory.turns)}"
    if trajectory.final_sql is None:
        return f"no_answer_{trajectory.stop.value}", f"after {len(trajectory.turns)} turns"
    if not outcome.executable:
        return f"sql_{outcome.status.value if outcome.status else 'not_run'}", trajectory.final_sql
    if not outcome.correct:
        return "wrong_result", f"{outcome.n_rows} rows, not the gold's by {outcome.equality}: {trajectory.final_sql}"
    return None


def select(
    outcomes: Sequence[Outcome], settings: Filter, seed: int, databases: Mapping[str, str] | None = None
) -> Selection:
    """Keep the right and well-formed ones: at most `per_example` a question, then `keep` in all.

    Before that, `per_plan` cuts near-duplicates (`curation/duplicates.py`).

    Where `keep` binds, questions of the `priority` levels come first, as one class (SQL-Trail, A.6: "prioritizing
    examples with moderate to high difficulty"); within a class the seed decides. A question's own trajectories are
    taken in the order of their samples.

    Args:
        databases: a question's database, by example id; without it all are taken for one.
    """
    faults = [fault(outcome) for outcome in outcomes]
    good = [index for index, found in enumerate(faults) if found is None]
    apart = _unlike(good, outcomes, settings.per_plan, databases or {})
    capped = _cap(apart, outcomes, settings.per_example)
    taken = set(_prioritise(capped, outcomes, settings, seed)[: settings.keep])
    over = {index: ("over_keep", f"{settings.keep} are kept") for index in capped if index not in taken}
    spare = dict.fromkeys(set(apart) - set(capped), ("over_per_example", f"{settings.per_example} a question"))
    alike = dict.fromkeys(set(good) - set(apart), ("near_duplicate", f"{settings.per_plan} of one plan"))
    left = over | spare | alike | {index: found for index, found in enumerate(faults) if found is not None}
    discarded = [
        Discarded(outcomes[index].example_id, outcomes[index].trajectory.sample, *left[index]) for index in sorted(left)
    ]
    return Selection([outcomes[index].trajectory for index in sorted(taken)], discarded)


def _unlike(
    indices: list[int], outcomes: Sequence[Outcome], per_plan: int | None, databases: Mapping[str, str]
) -> list[int]:
    """The first `per_plan` of those that are near-duplicates of one another."""
    if per_plan is None:
        return indices
    made = [outcomes[index].trajectory for index in indices]
    kept = duplicates.cut(made, lambda id: databases.get(id, ""), per_plan).kept
    return [indices[place] for place in kept]


def _cap(indices: Iterable[int], outcomes: Sequence[Outcome], per_example: int | None) -> list[int]:
    """The first `per_example` samples of each question."""
    used: collections.Counter[str] = collections.Counter()
    kept: list[int] = []
    for index in sorted(indices, key=lambda index: (outcomes[index].trajectory.sample, index)):
        id = outcomes[index].example_id
        if per_example is None or used[id] < per_example:
            kept.append(index)
            used[id] += 1
    return kept


def _prioritise(indices: list[int], outcomes: Sequence[Outcome], settings: Filter, seed: int) -> list[int]:
    def rank(index: int) -> tuple[bool, bytes]:
        outcome = outcomes[index]
        return outcome.hardness not in settings.priority, shuffled(outcome.example_id, outcome.trajectory.sample, seed)

    return sorted(indices, key=rank)


def shuffled(example_id: str, sample: int, seed: int) -> bytes:
    """A sort key that puts trajectories into an order that only the seed and their names decide."""
    return hashlib.sha256(f"{seed}/{example_id}/{sample}".encode()).digest()
