"""The texts of a finished evaluation, found from its folder: its trajectories and the questions that they answer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from pipelines import frames
from pipelines.frames import DATA
from pipelines.report.data import System
from pipelines.stages.answers import Latency
from pipelines.stages.inputs import examples
from pipelines.store import MANIFEST, Store
from pipelines.types import Example, Trajectory, read_jsonl, read_lines, write_jsonl

QUESTIONS = "questions.jsonl"  # beside the records of a prediction file, whose questions lie in no store


@dataclasses.dataclass(frozen=True)
class Texts:
    """What records alone don't hold; both are () where nothing leads to it."""

    trajectories: tuple[Trajectory, ...] = ()
    examples: tuple[Example, ...] = ()


def texts(folder: Path, passes: Sequence[str]) -> Texts:
    """The trajectories of some passes, in the order of the passes and of their records, and the test questions.

    Raises:
        DataError: a file is damaged.
    """
    if not (folder / DATA).is_file():
        return Texts()
    frame = frames.read(folder / DATA)
    trajectories = [
        trajectory
        for name in passes
        for trajectory in frames.from_frame(frame.filter(pl.col("pass") == name), Trajectory)
    ]
    return Texts(tuple(trajectories), tuple(_examples(folder)))


def left_out(test: Path) -> dict[str, int]:
    """Questions that a finished `test` stage had to leave out, by the reason, the commonest first."""
    path = test / "quarantine.jsonl"
    rows = [row for _, row in read_lines(path)] if path.is_file() else []
    return dict(Counter(str(row["reason"]).replace("_", " ") for row in rows if row["pool"] == "test").most_common())


def taken(timing: Mapping[str, Latency], r_ves: float | None) -> dict[str, float]:
    """What an answer took, by name: seconds by pass, tokens that an endpoint counted, R-VES."""
    figures = {f"seconds ({name})": latency.total_s for name, latency in timing.items()}
    for name, latency in timing.items():
        if latency.bought_in or latency.bought_out:
            figures |= {f"tokens in ({name})": latency.bought_in, f"tokens out ({name})": latency.bought_out}
    return figures if r_ves is None else {**figures, "R-VES": r_ves}


def keep(folder: Path, questions: Sequence[Example], system: System) -> None:
    """Write what `texts` reads of a system of greedy answers that lies in no store."""
    frame = frames.to_frame(system.trajectories, extra=[{"pass": "greedy"}] * len(system.trajectories))
    frames.write(folder / DATA, frame)
    absolute = (
        dataclasses.replace(
            question,
            database=dataclasses.replace(question.database, location=str(Path(question.database.location).resolve())),
        )
        for question in questions
    )
    write_jsonl(folder / QUESTIONS, absolute)


def _examples(folder: Path) -> list[Example]:
    """Questions beside the records, or those of the `test` stage that the manifest names, in the same store."""
    if (folder / QUESTIONS).is_file():
        return list(read_jsonl(folder / QUESTIONS, Example))
    place = folder.resolve()
    store = Store(place.parent.parent)
    manifest = store.manifest(place.parent.name, place.name) if (place / MANIFEST).is_file() else {}
    key = manifest.get("test") or manifest.get("inputs", {}).get("test")
    test = store.folder("test", str(key))
    return examples(test, "test") if key and (test / DATA).is_file() else []
