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
from pipelines.core.types import Outcome, StopReason, Trajectory
from pipelines.recipe.config import Filter
from pipelines.sql.similarity import sql_shape

# Filter rules: named reasons to leave an episode out of the demonstrations, or of GRPO's loss.


@filter_rule("malformed")
def malformed(outcome: Outcome) -> bool:
    """A turn is not well-formed."""
    actions = [turn.action for turn in outcome.trajectory.turns]
    return any(action.format_error is not None for action in actions)


@filter_rule("no_answer")
def no_answer(outcome: Outcome) -> bool:
    """The episode ended without a final SQL."""
    return outcome.trajectory.final_sql is None


def broken_rule(outcome: Outcome, rules: Iterable[str]) -> str | None:
    """The first of these rules that leaves an episode out; None if it stays.

    In GRPO this is GRPO-Filter (MTIR-SQL, equation 3). The paper gives neither its filter F nor its threshold: here one
    rule that matches is enough.
    """
    for rule in rules:
        if FILTER_RULES[rule](outcome):
            return rule
    return None


Reason = tuple[str, str]  # a short stable word, and its detail in one line for a person

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
        reason, detail = _reason_to_leave_out(outcome, settings)
        plan = _plan_of(trajectory)
        answer = trajectory.final_sql or ""
        shape = sql_shape(answer)
        # Near-duplicates have the same database, the same plan, and the same answer except for its values.
        traits = (database, *plan, sql_shape(answer, names=True))
        agent_chars = sum(len(turn.text) for turn in trajectory.turns)
        return cls(
            example_id=trajectory.example_id,
            sample=trajectory.sample,
            policy=trajectory.policy,
            database=database,
            hardness=outcome.hardness,
            right=outcome.correct and not outcome.broken,
            reason=reason,
            detail=detail,
            turns=len(trajectory.turns),
            agent_chars=agent_chars,
            plan=_digest_of_parts(plan),
            shape=_digest_of_parts([shape]),
            signature=_digest_of_parts(traits),
        )


def _plan_of(trajectory: Trajectory) -> list[str]:
    """The plan of an episode: each turn's action with the shape of its SQL, without wording and values."""
    plan = []
    for turn in trajectory.turns:
        shape = sql_shape(turn.action.content)
        plan.append(f"{turn.action.kind.value}:{shape}")
    return plan


def _reason_to_leave_out(outcome: Outcome, settings: Filter) -> tuple[str | None, str]:
    """Why an outcome cannot be a demonstration, with the detail; (None, "") if it can."""
    reason_and_detail = fault(outcome, settings.well_formed)
    if reason_and_detail is not None:
        return reason_and_detail
    rule = broken_rule(outcome, settings.drop)
    if rule is not None:
        return f"rule_{rule}", f"the filter rule {rule} leaves it out"
    return None, ""


def _digest_of_parts(parts: Iterable[str]) -> int:
    """A digest of 63 bits, which fits into a signed column."""
    text = "\0".join(parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def fault(outcome: Outcome, well_formed: bool = True) -> Reason | None:
    """The reason for which a trajectory cannot be a demonstration, with its detail; None if it can be one.

    The reason is a short stable word: "broken_<class>", "format_<error>", "no_answer_<stop>", "sql_<status>" or
    "wrong_result", by the equality that the outcome names.

    Args:
        well_formed: whether a malformed turn is a fault.
    """
    trajectory = outcome.trajectory
    n_turns = len(trajectory.turns)
    if trajectory.stop is StopReason.BROKEN or outcome.broken:
        cause = trajectory.failure or "execution"
        return f"broken_{cause}", "a boundary failed: not the teacher's fault, worth another try"
    for number, turn in enumerate(trajectory.turns, 1):
        error = turn.action.format_error
        if well_formed and error:
            return f"format_{error}", f"turn {number} of {n_turns}"
    if trajectory.final_sql is None:
        return f"no_answer_{trajectory.stop.value}", f"after {n_turns} turns"
    if not outcome.executable:
        status = "not_run"
        if outcome.status:
            status = outcome.status.value
        return f"sql_{status}", trajectory.final_sql
    if not outcome.correct:
        detail = f"{outcome.n_rows} rows, not the gold's by {outcome.equality}: {trajectory.final_sql}"
        return "wrong_result", detail
    return None


def select_demonstrations(judged: pl.DataFrame, settings: Filter, seed: int) -> pl.DataFrame:
    """The table of checked trajectories with the reason of each left-out row in `reason`; null if the row is kept.

    Right and well-formed rows pass three bounds: the first `per_plan` near-duplicates of one another
    ("near_duplicate"), then the first `per_example` samples of a question ("over_per_example"), then `keep` in all
    ("over_keep"). If `keep` binds, questions of the `priority` levels come first, as one class (SQL-Trail, A.6:
    "prioritizing examples with moderate to high difficulty"); within a class the seed decides.
    """
    is_open = pl.col("reason").is_null()
    rows = judged.with_row_index("row").filter(is_open)
    rows_within = {}  # reason -> the rows within its bound
    rows = _first_of_each_plan(rows, settings)
    rows_within["near_duplicate"] = rows["row"]
    rows = _first_of_each_question(rows, settings)
    rows_within["over_per_example"] = rows["row"]
    rows = _first_in_all(rows, settings, seed)
    rows_within["over_keep"] = rows["row"]
    reason_texts = judged["reason"].cast(pl.String)
    reasons = reason_texts.to_frame().with_row_index("row")
    for name, numbers in rows_within.items():
        is_within = pl.col("row").is_in(numbers.implode())
        where_beyond = pl.when(is_open & ~is_within)  # the reason of an earlier rule stays
        reason = where_beyond.then(pl.lit(name)).otherwise("reason")
        reasons = reasons.with_columns(reason=reason)
    categories = reasons["reason"].cast(pl.Categorical)
    return judged.with_columns(reason=categories)


def _first_of_each_plan(rows: pl.DataFrame, settings: Filter) -> pl.DataFrame:
    """The first `per_plan` near-duplicates of one another."""
    if settings.per_plan is None:
        return rows
    number_in_plan = pl.int_range(pl.len()).over("signature")
    return rows.filter(number_in_plan < settings.per_plan)


def _first_of_each_question(rows: pl.DataFrame, settings: Filter) -> pl.DataFrame:
    """The first `per_example` samples of a question."""
    if settings.per_example is None:
        return rows
    ordered = rows.sort("sample", "row")
    number_in_question = pl.int_range(pl.len()).over("example_id")
    return ordered.filter(number_in_question < settings.per_example)


def _first_in_all(rows: pl.DataFrame, settings: Filter, seed: int) -> pl.DataFrame:
    """The first `keep` rows: questions of the `priority` levels, then the others; the seed decides among equals."""
    if settings.keep is None or len(rows) <= settings.keep:
        return rows
    samples = zip(rows["example_id"], rows["sample"], strict=True)
    each_rank = (seeded_rank(id, sample, seed) for id, sample in samples)
    ranks = np.fromiter(each_rank, np.uint64, len(rows))
    hardness = rows["hardness"].cast(pl.String)
    is_late = ~hardness.is_in(list(settings.priority))
    ranked = rows.with_columns(late=is_late, rank=pl.Series(ranks))
    return ranked.sort("late", "rank").head(settings.keep)


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
    digest = hashlib.sha256(f"{seed}/{example_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
