"""The records that a plan names, from Parquet or JSONL."""

from __future__ import annotations

from pathlib import Path

from pipelines import frames
from pipelines.types import Example, Record, Trajectory, read_jsonl


def trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a file.

    Raises:
        DataError: it is missing or malformed.
    """
    return _records(path, Trajectory)


def examples(path: Path) -> list[Example]:
    """The examples of a file.

    Raises:
        DataError: it is missing or malformed.
    """
    return _records(path, Example)


def _records(path: Path, kind: type[Record]) -> list[Record]:
    if path.suffix == ".parquet":
        return frames.from_frame(frames.read(path), kind)
    return list(read_jsonl(path, kind))
