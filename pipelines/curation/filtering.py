"""Format and execution filtering of teacher trajectories, then SQL-Trail's selection of demonstrations (A.6).

A trajectory is checked once, where it is read. Selection works on a table of these checks, some hundred bytes a row, so
that millions of trajectories are selected from without being in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np
import polars as pl

from pipelines.core.registry import FILTER_RULES, filter_rule
from pipelines.core.types import Outcome, StopReason
from pipelines.recipe.config import Filter
from pipelines.sql.similarity import sql_shape

# Filter rules: named reasons to leave an episode out of the demonstrations, or of GRPO's loss.


@filter_rule("malformed")
def malformed(outcome: Outcome) -> bool:
    """A turn is not well-formed."""
    return any(turn.action.format_error is not None for turn in outcome.trajectory.turns)


@filter_rule("no_answer")
def no_answer(outcome: Outcome) -> bool:
    """The episode ended without a final SQL."""
    return outcome.trajectory.final_sql is None


def broken_rule(outcome: Outcome, rules: Iterable[str]) -> str | None:
    """The first of these rules that leaves an episode out; None if it stays.

    In GRPO this is GRPO-Filter (MTIR-SQL, equation 3). The paper gives neither its filter F nor its threshold: here one
    rule that matches is enough.
    """
    return next((rule for rule in rules if FILTER_RULES[rule](outcome)), None)


# Columns of a table of checked trajectories: their fields without the detail.
COLUMNS = {
    "example_id": pl.String,
    "sample": pl.Int32,
    "policy": pl.Categorical,
    "database": pl.Categorical,
    "hardness": pl.Categorical,
    "right": pl.Boolean,
    "reason": pl.Categorical,
    "turns": pl.Int32,
    "agent_chars": pl.Int32,
    "plan": pl.Int64,
    "shape": pl.Int64,
    "signature": pl.Int64,
}


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedTrajectory:
    """The properties of one trajectory that selection and the dataset's card read."""

    example_id: str
    sample: int
    policy: str  # the teacher.
    database: str
    hardness: str
    right: bool  # the answer's result equals the gold SQL's, and no boundary failed.
    reason: str | None  # why it cannot be a demonstration (see `fault`); None if it can.
    detail: str  # the reason for a person, in one line; "" when there is none.
    turns: int
    agent_chars: int  # characters that the teacher wrote.
    plan: int  # digest (63 bits) of its actions.
    shape: int  # digest of its answer's SQL shape (`sql/similarity.py`).
    signature: int  # digest of the traits that near-duplicates share.

    @classmethod
    def of(cls, outcome: Outcome, database: str, settings: Filter) -> CheckedTrajectory:
        """Check an outcome of a question on that database, also by the recipe's filter rules."""
        assert outcome.hardness is not None, "a selection by level reads it"
        trajectory = outcome.trajectory
        reason: str | None = None
        detail = ""
        found = fault(outcome, settings.well_formed)
        if found is not None:
            reason, detail = found
        else:
            rule = broken_rule(outcome, settings.drop)
            if rule is not None:
                reason = f"rule_{rule}"
                detail = f"the filter rule {rule} leaves it out"
        # The plan of an episode: each turn's action with the shape of its SQL, without wording and values.
        turns = tuple(f"{turn.action.kind.value}:{sql_shape(turn.action.content)}" for turn in trajectory.turns)
        answer = trajectory.final_sql or ""
        # Near-duplicates have the same database, the same plan, and the same answer except for its values.
        traits = (database, *turns, sql_shape(answer, names=True))
        return cls(
            trajectory.example_id,
            trajectory.sample,
            trajectory.policy,
            database,
            outcome.hardness,
            outcome.correct and not outcome.broken,
            reason,
            detail,
            len(trajectory.turns),
            sum(len(turn.text) for turn in trajectory.turns),
            plan=_digest_of_parts(turns),
            shape=_digest_of_parts((sql_shape(answer),)),
            signature=_digest_of_parts(traits),
        )


def _digest_of_parts(parts: Iterable[str]) -> int:
    """A digest of 63 bits, which fits into a signed column."""
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def fault(outcome: Outcome, well_formed: bool = True) -> tuple[str, str] | None:
    """The reason for which a trajectory cannot be a demonstration, with its detail; None if it can be one.

    The reason is a short stable word: "broken_<class>", "format_<error>", "no_answer_<stop>", "sql_<status>" or
    "wrong_result", by the equality that the outcome names.

    Args:
        well_formed: whether a malformed turn is a fault.
    """
    trajectory = outcome.trajectory
    if trajectory.stop is StopReason.BROKEN or outcome.broken:
        cause = trajectory.failure or "execution"
        return f"broken_{cause}", "a boundary failed: not the teacher's fault, worth another try"
    for number, turn in enumerate(trajectory.turns, 1):
        if well_formed and turn.action.format_error:
            return f"format_{turn.action.format_error}", f"turn {number} of {len(trajectory.turns)}"
    if trajectory.final_sql is None:
        return f"no_answer_{trajectory.stop.value}", f"after {len(trajectory.turns)} turns"
    if not outcome.executable:
        status = outcome.status.value if outcome.status else "not_run"
        return f"sql_{status}", trajectory.final_sql
    if not outcome.correct:
        return "wrong_result", f"{outcome.n_rows} rows, not the gold's by {outcome.equality}: {trajectory.final_sql}"
    return None


def select_demonstrations(judged: pl.DataFrame, settings: Filter, seed: int) -> pl.DataFrame:
    """The table of checked trajectories with the reason of each left-out row in `reason`; null if the row is kept.

    Right and well-formed rows pass three bounds: the first `per_plan` near-duplicates of one another
    ("near_duplicate"), then the first `per_example` samples of a question ("over_per_example"), then `keep` in all
    ("over_keep"). If `keep` binds, questions of the `priority` levels come first, as one class (SQL-Trail, A.6:
    "prioritizing examples with moderate to high difficulty"); within a class the seed decides.
    """
    rows = judged.with_row_index("row").filter(pl.col("reason").is_null())
    if settings.per_plan is not None:
        rows = rows.filter(pl.int_range(pl.len()).over("signature") < settings.per_plan)
    reasons = {"near_duplicate": rows["row"]}
    if settings.per_example is not None:
        rows = rows.sort("sample", "row").filter(pl.int_range(pl.len()).over("example_id") < settings.per_example)
    reasons["over_per_example"] = rows["row"]
    if settings.keep is not None and len(rows) > settings.keep:
        samples = zip(rows["example_id"], rows["sample"], strict=True)
        ranks = np.fromiter((seeded_rank(id, sample, seed) for id, sample in samples), np.uint64, len(rows))
        late = ~rows["hardness"].cast(pl.String).is_in(list(settings.priority))
        rows = rows.with_columns(late=late, rank=pl.Series(ranks)).sort("late", "rank").head(settings.keep)
    reasons["over_keep"] = rows["row"]
    reason = judged["reason"].cast(pl.String).to_frame().with_row_index("row")
    for name, left in reasons.items():  # the reason of an earlier rule stays
        gone = pl.col("reason").is_null() & ~pl.col("row").is_in(left.implode())
        reason = reason.with_columns(reason=pl.when(gone).then(pl.lit(name)).otherwise("reason"))
    return judged.with_columns(reason=reason["reason"].cast(pl.Categorical))


def detail(reason: str, observed: str, settings: Filter) -> str:
    """The explanation of a left-out trajectory in one line: of the bound that left it out, else that of its check."""
    limits = {
        "over_keep": f"{settings.keep} are kept",
        "over_per_example": f"{settings.per_example} a question",
        "near_duplicate": f"{settings.per_plan} of one plan",
    }
    return limits.get(reason, observed)


def seeded_rank(example_id: str, sample: int, seed: int) -> int:
    """A sort key that puts trajectories into an order that only the seed and their names decide."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{example_id}/{sample}".encode()).digest()[:8], "big")
