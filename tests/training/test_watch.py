"""What a terminal shows of a training run, from the files that one writes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.stages import train
from pipelines.training.watch import Curves, read, spark, view


def write(folder: Path, steps: int) -> None:
    lines = [{"step": n + 1, "reward": float(n), "term_exec": 0.5, "custom": 1.0} for n in range(steps)]
    (folder / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "re')
    spent = {"seconds": 2.0, "generate_seconds": 1.0, "train_seconds": 0.9, "gpu_gb": 3.25, "trained_per_s": 1234.4}
    spent |= {"sampled_per_s": 56.0, "mfu": 0.217, "idle": 0.05}
    (folder / "timing.jsonl").write_text("".join(json.dumps({"step": n + 1} | spent) + "\n" for n in range(steps)))
    alarm = {"step": 21, "alarm": "entropy", "words": "entropy fell from 1 to 0", "example": "..."}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")


def test_it_says_how_far_the_run_is_and_where_its_time_goes(tmp_path: Path) -> None:
    write(tmp_path, steps=30)
    shown = view(read(tmp_path), steps=60)
    assert shown[0] == "step 30 of 60, 2.00 s a step, some 60 s left"
    assert "time: generate 50%  train 45%  other 5%" in shown
    speeds = "1,234 tokens/s trained on each device, 56 sampled, 21.7% of its peak in training"
    assert f"{speeds}, neither for 5% of the time" in shown
    assert "device memory: 3.2 GiB at its most" in shown
    assert shown[-1] == "ALARM at step 21: entropy fell from 1 to 0"


def test_a_line_ends_where_its_record_ends(tmp_path: Path) -> None:
    alarm = {"step": 21, "alarm": "entropy", "words": "it says \u2028 and \x85"}
    line = json.dumps(alarm, ensure_ascii=False) + "\n"
    (tmp_path / "alarms.jsonl").write_bytes(2 * line.encode() + '{"step": 99, "words": "é'.encode()[:-1])
    assert read(tmp_path).alarms == [alarm, alarm]


def test_each_curve_has_its_first_and_its_last_steps(tmp_path: Path) -> None:
    write(tmp_path, steps=30)
    rows = [line.split() for line in view(read(tmp_path))]
    assert ["reward", "4.5", "24.5"] in [row[:3] for row in rows]  # means of 0..9 and of 20..29
    named = [row[0] for row in rows if row and row[0] in ("reward", "term_exec", "custom")]
    assert named == ["reward", "term_exec", "custom"]  # the best known first, a name that nobody knows last


def test_a_fault_that_a_step_does_not_name_was_not_made_in_it() -> None:
    lines = [{"step": 1, "fault_no_action": 0.5}, {"step": 2}]
    (row,) = [line for line in view(Curves(lines, [], [])) if line.startswith("fault")]
    assert row.split() == ["fault_no_action", "0.25", "0.25", "█▁"]


def test_watch_shows_no_step_before_the_first_one(tmp_path: Path) -> None:
    assert view(read(tmp_path)) == ["no step is done yet"]


def test_a_run_without_alarms_says_so() -> None:
    assert view(Curves([{"step": 1, "loss": 2.0}], [{"seconds": 1.0}], []))[-1] == "no alarm"


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.0, 7.0], "▁█"), ([1.0, 1.0, 1.0], "▁▁▁"), ([0.0, 1.0, 6.0, 7.0, 14.0, 14.0], "▁▄█")],
)
def test_a_curve_in_one_line(values: list[float], expected: str) -> None:
    """The last one: three columns, means 0.5, 6.5 and 14; (6.5 - 0.5) / 13.5 * 7 = 3.1, the fourth bar."""
    assert spark(values, width=3) == expected


def test_a_stages_figure_is_the_mean_over_the_steps_that_have_it(tmp_path: Path) -> None:
    """The last tenth of 20 steps: drift is on one of the two; a fault that a step does not name was not made."""
    lines = [{"step": step, "reward": step / 10} for step in range(1, 21)]
    lines[18] |= {"drift_mean": 0.5, "fault_no_action": 0.2, "ex_held_out": 0.25}
    (tmp_path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train.summary(SimpleNamespace(folder=tmp_path)) == {
        "steps": 20, "reward": pytest.approx(1.95), "drift_mean": 0.5, "fault_no_action": 0.1, "ex_held_out": 0.25,
    }  # fmt: skip
