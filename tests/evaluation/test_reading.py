"""The texts of a finished evaluation, found from its folder alone."""

import dataclasses
import json
from pathlib import Path

import pytest
from evaluation_world import example, trajectory

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.report.data import System
from pipelines.stages.evaluate import Latency, keep, left_out, taken, texts

PASSES = [("greedy", 0), ("greedy", 1), ("sampled", 0), ("selected", 1)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished evaluation of two questions in a store, with the `test` stage that it names."""
    data = tmp_path / "test" / "d1"
    done = tmp_path / "evaluations" / "e1"
    data.mkdir(parents=True)
    done.mkdir(parents=True)
    asked = [example(0), example(1), example(2)]
    frames.write(
        data / "data.parquet",
        frames.to_frame(asked, extra=[{"pool": pool, "part": 0} for pool in ("test", "test", "sft")]),
    )
    made = [trajectory(0, number, "greedy", 0) for _, number in PASSES]
    frames.write(done / "data.parquet", frames.to_frame(made, extra=[{"pass": name} for name, _ in PASSES]))
    (done / "manifest.json").write_text(json.dumps({"stage": "evaluations", "key": "e1", "test": "d1"}))
    return done


def test_questions_come_from_the_test_stage_that_the_manifest_names(folder: Path) -> None:
    found = texts(folder, ("greedy", "sampled"))
    assert [each.example_id for each in found.trajectories] == ["q0", "q1", "q0"]
    assert [each.id for each in found.examples] == ["q0", "q1"]  # the training question is another pool's
    assert [each.example_id for each in texts(folder, ("selected",)).trajectories] == ["q1"]
    stage = {"stage": "evaluations", "key": "e1", "inputs": {"test": "d1"}}
    (folder / "manifest.json").write_text(json.dumps(stage))
    assert len(texts(folder, ("greedy",)).examples) == 2


def test_records_alone_have_no_texts_and_damage_is_reported(folder: Path, tmp_path: Path) -> None:
    assert texts(tmp_path, ("greedy",)).trajectories == ()
    (folder / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        texts(folder, ("greedy",))


def test_a_prediction_files_texts_lie_beside_its_records(tmp_path: Path) -> None:
    made = tuple(trajectory(1, number, "greedy", 0) for number in (0, 1))
    asked = tuple(
        dataclasses.replace(each, database=dataclasses.replace(each.database, location="db.sqlite"))
        for each in (example(0), example(1))
    )
    keep(tmp_path, asked, System("mine", (), made))
    found = texts(tmp_path, ("greedy",))
    assert found.trajectories == made
    assert [each.question for each in found.examples] == [each.question for each in asked]
    assert found.examples[0].database.location == str(Path("db.sqlite").resolve())


def test_questions_left_out_are_counted_by_their_reason(tmp_path: Path) -> None:
    assert left_out(tmp_path) == {}
    rows = [("test", "missing_database")] * 3 + [("test", "gold_error"), ("sft", "gold_error")]
    (tmp_path / "quarantine.jsonl").write_text(
        "".join(json.dumps({"pool": pool, "reason": reason}) + "\n" for pool, reason in rows)
    )
    assert left_out(tmp_path) == {"missing database": 3, "gold error": 1}


def test_the_cost_of_answers_by_name() -> None:
    timing = {"greedy": Latency(4, 1.0, 0.5), "sampled": Latency(8, 2.0, 0.0, 100.0, 20.0)}
    assert taken(timing, 71.5) == {
        "seconds (greedy)": 1.5,
        "seconds (sampled)": 2.0,
        "tokens in (sampled)": 100.0,
        "tokens out (sampled)": 20.0,
        "R-VES": 71.5,
    }
    assert taken({}, None) == {}


def test_questions_that_were_left_out_are_counted_whatever_their_reason_says(tmp_path: Path) -> None:
    rows = [
        {"pool": "test", "row": "1", "reason": "missing_database", "detail": "x\u2028y"},
        {"pool": "test", "row": "2", "reason": "missing_database", "detail": "x\u0085y"},
        {"pool": "sft", "row": "3", "reason": "gold_syntax", "detail": ""},
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "quarantine.jsonl").write_text(lines, encoding="utf-8")
    assert left_out(tmp_path) == {"missing database": 2}
