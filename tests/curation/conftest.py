"""Outcomes made by hand: what a trajectory came to, without running one; and selection from them."""

import dataclasses
from typing import NamedTuple

import polars as pl
import pytest

from pipelines.core.types import Action, ActionKind, ExecutionStatus, Outcome, StopReason, Trajectory, Turn
from pipelines.curation import filtering


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
    judged = {"equality": "strict", "correct": correct, "status": status, "broken": broken, "hardness": hardness}
    unread = dict.fromkeys(("predicted_schema", "gold_items", "gold_schema"))
    unread |= dict.fromkeys(("predicted_bigrams", "gold_bigrams"), frozenset())
    return Outcome(id, trajectory, n_rows=1, max_turns=10, **judged, **unread)


@pytest.fixture
def outcome():
    return make_outcome


class Selection(NamedTuple):
    """What was selected: (example, sample) of the kept, (example, reason) of the others, and the whole table."""

    kept: list[tuple[str, int]]
    left: list[tuple[str, str]]
    table: pl.DataFrame


def select(outcomes, settings, seed=0, databases=None):
    by_question = databases or {}
    judged = [filtering.CheckedTrajectory.of(one, by_question.get(one.example_id, "d"), settings) for one in outcomes]
    table = pl.DataFrame(list(map(dataclasses.asdict, judged)), schema=filtering.COLUMNS)
    found = filtering.select_demonstrations(table, settings, seed)
    rows = list(found.select("example_id", "sample", pl.col("reason").cast(pl.String)).iter_rows())
    kept = [(id, sample) for id, sample, reason in rows if reason is None]
    return Selection(kept, [(id, reason) for id, _, reason in rows if reason], found)
