"""Answers are kept by question: by what it says and what its database holds, wherever that lies."""

import dataclasses
import shutil
from pathlib import Path

from pipelines.core.types import Action, ActionKind, Database, Example, StopReason, Trajectory, Turn
from pipelines.recipe.config import Source
from pipelines.rollout.engine import Timing
from pipelines.stages.evaluate import Answers, latencies, note_time
from pipelines.stages.report import left_out


def episode(sample: int, stop: StopReason = StopReason.SOLUTION) -> Trajectory:
    return Trajectory("q0", sample, "mine", "react", (), (Turn("", Action(ActionKind.SOLUTION, "1")),), "1", stop)


def question_of(database: Database) -> Example:
    return Example("q0", "?", database, "SELECT 1")


def test_answers_are_kept_by_sample(harbour: Database, tmp_path: Path) -> None:
    question, kept = question_of(harbour), Answers(tmp_path / "answers")
    assert kept.of(question) == {}
    kept.keep(question, {1: episode(1), 0: episode(0)})
    assert kept.of(question) == {0: episode(0), 1: episode(1)}
    assert kept.of(dataclasses.replace(question, id="q1")) == {}


def test_a_damaged_file_holds_no_answers_and_is_written_anew(harbour: Database, tmp_path: Path) -> None:
    question, kept = question_of(harbour), Answers(tmp_path / "answers")
    kept.keep(question, {0: episode(0)})
    (path,) = (tmp_path / "answers").iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:40], b"", b"\0" * len(whole), b"null", b'[{"sample": 0}]', b"[" * 100_000):
        path.write_bytes(damaged)
        assert kept.of(question) == {}
    kept.keep(question, {0: episode(0)})
    assert kept.of(question) == {0: episode(0)}


def test_a_broken_episode_is_not_kept_as_an_answer(harbour: Database, tmp_path: Path) -> None:
    question, kept = question_of(harbour), Answers(tmp_path / "answers")
    kept.keep(question, {0: episode(0, StopReason.BROKEN)})
    assert not (tmp_path / "answers").exists()
    kept.keep(question, {0: episode(0, StopReason.BROKEN), 1: episode(1)})
    assert kept.of(question) == {1: episode(1)}


def test_a_moved_database_is_the_same_and_a_changed_one_or_question_is_not(harbour: Database, tmp_path: Path) -> None:
    question, kept = question_of(harbour), Answers(tmp_path / "answers")
    kept.keep(question, {0: episode(0)})
    place = tmp_path / "elsewhere.sqlite"
    shutil.copyfile(harbour.location, place)
    moved = dataclasses.replace(question, database=dataclasses.replace(harbour, location=str(place)))
    assert list(kept.of(moved)) == [0]
    place.write_bytes(place.read_bytes() + b"more")
    assert kept.of(moved) == {}
    assert kept.of(dataclasses.replace(question, evidence="NO is Norway")) == {}


def test_nothing_is_kept_without_a_folder(harbour: Database) -> None:
    question, kept = question_of(harbour), Answers(None)
    kept.keep(question, {0: episode(0)})
    assert kept.of(question) == {}


def test_latency_is_the_mean_over_episodes_by_pass(tmp_path: Path) -> None:
    assert latencies(tmp_path) == {}
    note_time(tmp_path / "timing.jsonl", "greedy", 10, Timing(5.0, 20.0, 1.0, 12))
    note_time(tmp_path / "timing.jsonl", "greedy", 30, Timing(9.0, 40.0, 3.0, 30))
    note_time(tmp_path / "timing.jsonl", "sampled", 0, Timing())
    (found,) = latencies(tmp_path).values()
    assert (found.episodes, found.generate_s, found.sql_s, found.total_s) == (40, 1.5, 0.1, 1.6)


def test_an_incomplete_benchmark_is_marked(tmp_path: Path) -> None:
    source = Source(kind="spider", split="dev")
    assert left_out(tmp_path, 972, source) == {}
    row = '{"pool": "test", "row": "dev.json[1]", "reason": "missing_database", "detail": ""}\n'
    (tmp_path / "quarantine.jsonl").write_text(row * 62 + row.replace("test", "sft"))
    assert left_out(tmp_path, 972, source) == {"questions": "972 of 1,034 (62 missing database)"}
    drawn = source.model_copy(update={"count": 100})
    assert left_out(tmp_path, 100, drawn) == {"questions": "100 drawn; left out: 62 missing database"}
