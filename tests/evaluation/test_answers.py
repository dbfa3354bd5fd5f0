"""Answers are kept by question: by what it says and what its database holds, wherever that lies."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from pipelines.config import Source
from pipelines.rollout.engine import Timing
from pipelines.stages.answers import Answers, latencies, note_time
from pipelines.stages.report import left_out
from pipelines.types import Database, Example


def lines(id: str, *passes: str) -> list[dict[str, Any]]:
    return [{"pass": name, "trajectory": {"example_id": id}, "record": {}} for name in passes]


def questions(database: Database) -> list[Example]:
    return [Example(f"q{number}", "?", database, "SELECT 1") for number in range(3)]


def test_what_was_answered_is_not_missing_any_more(harbour: Database, tmp_path: Path) -> None:
    first, second, third = questions(harbour)
    kept = Answers(tmp_path / "answers")
    kept.merge([first], lines("q0", "greedy", "sampled"), ["greedy", "sampled"])
    assert kept.missing([first, second, third]) == [second, third]
    made = [*lines("q1", "greedy", "sampled"), *lines("q2", "greedy", "sampled")]
    whole = kept.merge([third, first, second], made, ["greedy", "sampled"])
    assert [(line["pass"], line["trajectory"]["example_id"]) for line in whole] == [
        (name, id) for name in ("greedy", "sampled") for id in ("q2", "q0", "q1")
    ]
    assert kept.missing([first, second, third]) == []


def test_a_moved_database_is_the_same_and_a_changed_one_or_question_is_not(harbour: Database, tmp_path: Path) -> None:
    question = questions(harbour)[0]
    kept = Answers(tmp_path / "answers")
    kept.merge([question], lines("q0", "greedy"), ["greedy"])
    place = tmp_path / "elsewhere.sqlite"
    shutil.copyfile(harbour.location, place)
    moved = dataclasses.replace(question, database=dataclasses.replace(harbour, location=str(place)))
    assert kept.missing([moved]) == []
    place.write_bytes(place.read_bytes() + b"more")
    assert kept.missing([moved]) == [moved]
    asked = dataclasses.replace(question, evidence="NO is Norway")
    assert kept.missing([asked]) == [asked]


def test_nothing_is_kept_without_a_folder(harbour: Database) -> None:
    question = questions(harbour)[0]
    made = lines("q0", "greedy")
    assert Answers(None).merge([question], made, ["greedy"]) is made
    assert Answers(None).missing([question]) == [question]


def test_latency_is_the_mean_over_episodes_by_pass(tmp_path: Path) -> None:
    assert latencies(tmp_path) == {}
    note_time(tmp_path / "timing.jsonl", "greedy", 10, Timing(5.0, 20.0, 1.0, 12))
    note_time(tmp_path / "timing.jsonl", "greedy", 30, Timing(9.0, 40.0, 3.0, 30))
    note_time(tmp_path / "timing.jsonl", "sampled", 0, Timing())
    (found,) = latencies(tmp_path).values()
    assert (found.episodes, found.generate_s, found.sql_s, found.total_s) == (40, 1.5, 0.1, 1.6)


def test_an_incomplete_benchmark_is_said_to_be_one(tmp_path: Path) -> None:
    source = Source(kind="spider", split="dev")
    assert left_out(tmp_path, 972, source) == {}
    row = '{"pool": "test", "row": "dev.json[1]", "reason": "missing_database", "detail": ""}\n'
    (tmp_path / "quarantine.jsonl").write_text(row * 62 + row.replace("test", "sft"))
    assert left_out(tmp_path, 972, source) == {"questions": "972 of 1,034 (62 missing database)"}
    drawn = source.model_copy(update={"count": 100})
    assert left_out(tmp_path, 100, drawn) == {"questions": "100 drawn; left out: 62 missing database"}
