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
    made = [each for name in passes for each in frames.from_frame(frame.filter(pl.col("pass") == name), Trajectory)]
    return Texts(tuple(made), tuple(_examples(folder)))


def left_out(test: Path) -> dict[str, int]:
    """Questions that a finished `test` stage had to leave out, by the reason, the commonest first."""
    path = test / "quarantine.jsonl"
    rows = [row for _, row in read_lines(path)] if path.is_file() else []
    return dict(Counter(str(row["reason"]).replace("_", " ") for row in rows if row["pool"] == "test").most_common())


def taken(timing: Mapping[str, Latency], r_ves: float | None) -> dict[str, float]:
    """What an answer took, by name: seconds by pass, tokens that an endpoint counted, R-VES."""
    found = {f"seconds ({name})": each.total_s for name, each in timing.items()}
    for name, each in timing.items():
        if each.bought_in or each.bought_out:
            found |= {f"tokens in ({name})": each.bought_in, f"tokens out ({name})": each.bought_out}
    return found if r_ves is None else {**found, "R-VES": r_ves}


def keep(folder: Path, questions: Sequence[Example], system: System) -> None:
    """Write what `texts` reads of a system of greedy answers that lies in no store."""
    frame = frames.to_frame(system.trajectories, extra=[{"pass": "greedy"}] * len(system.trajectories))
    frames.write(folder / DATA, frame)
    absolute = (
        dataclasses.replace(
            one, database=dataclasses.replace(one.database, location=str(Path(one.database.location).resolve()))
        )
        for one in questions
    )
    write_jsonl(folder / QUESTIONS, absolute)


def _examples(folder: Path) -> list[Example]:
    """Questions beside the records, or those of the `test` stage that the manifest names, in the same store."""
    if (folder / QUESTIONS).is_file():
        return list(read_jsonl(folder / QUESTIONS, Example))
    place = folder.resolve()
    store = Store(place.parent.parent)
    said = store.manifest(place.parent.name, place.name) if (place / MANIFEST).is_file() else {}
    key = said.get("test") or said.get("inputs", {}).get("test")
    test = store.folder("test", str(key))
    return examples(test, "test") if key and (test / DATA).is_file() else []
