"""The texts of a finished evaluation, found from its folder: its trajectories, and the questions that they answer."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from pipelines.core import frames
from pipelines.core.files import read_json_lines
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import Example, Trajectory, read_jsonl, write_jsonl
from pipelines.recipe.config import Source
from pipelines.report.data import System
from pipelines.stages.context import QUARANTINE, examples

QUESTIONS = "questions.jsonl"  # file of the questions of a prediction file, whose questions lie in no store


@dataclasses.dataclass(frozen=True)
class EvaluationTexts:
    """The texts that records lack; both are () if they are not found."""

    trajectories: tuple[Trajectory, ...] = ()
    examples: tuple[Example, ...] = ()


def read_texts(folder: Path, passes: Sequence[str]) -> EvaluationTexts:
    """The trajectories of some passes, in the order of the passes and of their records, and the test questions."""
    data = folder / frames.DATA
    if not data.is_file():
        return EvaluationTexts()
    frame = frames.read(data)
    trajectories: list[Trajectory] = []
    for pass_name in passes:
        of_pass = frame.filter(pl.col("pass") == pass_name)
        trajectories += frames.from_frame(of_pass, Trajectory)
    questions = _read_questions(folder)
    return EvaluationTexts(tuple(trajectories), tuple(questions))


def _read_questions(folder: Path) -> list[Example]:
    """The questions in the folder, or in the `test` stage that its manifest names, in the same store; [] if absent."""
    own_questions = folder / QUESTIONS
    if own_questions.is_file():
        return list(read_jsonl(own_questions, Example))
    stage_folder = folder.resolve()
    if not (stage_folder / MANIFEST).is_file():
        return []
    stage = stage_folder.parent.name
    store = Store(stage_folder.parent.parent)
    manifest = store.manifest(stage, stage_folder.name)
    inputs = manifest.get("inputs", {})
    key = manifest.get("test") or inputs.get("test")
    if not key:
        return []
    test = store.folder("test", str(key))
    if not (test / frames.DATA).is_file():
        return []
    return examples(test, "test")


def write_texts(folder: Path, questions: Sequence[Example], system: System) -> None:
    """Write the files of `read_texts` for a system of greedy answers that lies in no store."""
    passes = [{"pass": "greedy"}] * len(system.trajectories)
    frame = frames.to_frame(system.trajectories, extra=passes)
    frames.write(folder / frames.DATA, frame)
    with_absolute_paths = []
    for question in questions:
        location = Path(question.database.location).resolve()
        database = dataclasses.replace(question.database, location=str(location))
        with_absolute_path = dataclasses.replace(question, database=database)
        with_absolute_paths.append(with_absolute_path)
    write_jsonl(folder / QUESTIONS, with_absolute_paths)


def count_left_out(test: Path) -> dict[str, int]:
    """Questions that a finished `test` stage had to leave out, by the reason, the commonest first."""
    reasons: Counter[str] = Counter()
    for row in read_json_lines(test / QUARANTINE):
        if row["pool"] == "test" and row.get("chosen", True):
            reason = str(row["reason"]).replace("_", " ")
            reasons[reason] += 1
    return dict(reasons.most_common())


def incomplete_benchmark(test: Path, usable: int, source: Source) -> dict[str, str]:
    """The fact that a benchmark is incomplete: "972 of 1,034 (62 missing database)"; {} if all of it can run."""
    reasons = count_left_out(test)
    if not reasons:
        return {}
    why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
    if source.count is None and source.hardness is None:
        total = usable + sum(reasons.values())
        return {"questions": f"{usable:,} of {total:,} ({why})"}
    return {"questions": f"{usable:,} drawn; left out: {why}"}
