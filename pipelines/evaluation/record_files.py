"""The episodes of an evaluation in files: `records.jsonl` of a finished one, and the rows of a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.files import read_lines
from pipelines.core.types import Trajectory, from_dict, to_dict
from pipelines.evaluation.record import EpisodeRecord

RECORDS = "records.jsonl"
# Names of passes, beside "greedy" and "sampled".
SINGLE_TURN = "once"  # the greedy pass in which the agent must answer without looking
SELECTED = "selected"  # the pass of the answers that an endpoint selected


@dataclasses.dataclass(frozen=True)
class EvaluatedEpisode:
    """One episode of an evaluation."""

    pass_name: str
    trajectory: Trajectory
    record: EpisodeRecord

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> EvaluatedEpisode:
        """An episode from a row of a shard."""
        trajectory = from_dict(Trajectory, row["trajectory"])
        record = from_dict(EpisodeRecord, row["record"])
        return cls(row["pass"], trajectory, record)

    def shard_row(self) -> dict[str, Any]:
        """The row of a shard, in JSON-ready values."""
        row: dict[str, Any] = {"pass": self.pass_name}
        row["trajectory"] = to_dict(self.trajectory)
        row["record"] = to_dict(self.record)
        return row

    def record_row(self) -> dict[str, Any]:
        """The row of `records.jsonl`: the trajectory is in the stage's data file."""
        return {"pass": self.pass_name, "record": to_dict(self.record)}


def read_records(folder: Path, *passes: str) -> list[EpisodeRecord]:
    """The records of a finished evaluation, of these passes ("greedy", "sampled", "once", "selected")."""
    (records,) = read_record_groups(folder, passes)
    return records


def read_record_groups(folder: Path, *groups: Sequence[str]) -> list[list[EpisodeRecord]]:
    """The records of a finished evaluation, of each group of passes, in one reading of the file."""
    records: list[list[EpisodeRecord]] = [[] for _ in groups]
    for _, row in read_lines(folder / RECORDS):
        for passes, records_of_group in zip(groups, records, strict=True):
            if row["pass"] in passes:
                record = from_dict(EpisodeRecord, row["record"])
                records_of_group.append(record)
    return records
