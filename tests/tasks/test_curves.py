import threading
from pathlib import Path

import pytest

from tasks.mlflow_client import Row, metric_name, to_metrics
from tasks.run import CurveFollower, read_rows


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", "grpo/loss"),
        ("loss/sql", "loss/sql"),
        ("reward/exec/std", "reward/exec.std"),
        ("pass@8 (%)", "grpo/pass_8 ___"),
        ("/odd/", "grpo/odd"),
    ],
)
def test_a_metric_has_one_group_and_one_name(name: str, expected: str) -> None:
    assert metric_name(name, "grpo") == expected


def test_no_metric_is_both_leaf_and_branch() -> None:
    names = [metric_name(name, "sft") for name in ("loss", "loss/sql", "loss/sql/easy", "lr")]
    assert len(set(names)) == 4
    assert not any(other.startswith(f"{name}/") for name in names for other in names)


def test_only_finite_numbers_become_metrics() -> None:
    rows: list[Row] = [(1, {"loss": float("nan"), "ex": 0.5, "note": "text", "done": True, "max": float("inf")})]
    assert [(metric.key, metric.value, metric.step) for metric in to_metrics(rows, "grpo")] == [
        ("grpo/ex", 0.5, 1),
        ("grpo/done", 1.0, 1),
    ]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    rows, offset = read_rows([path], 0)
    assert rows == [(1, {"loss": 2.0})]
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    assert read_rows([path], offset) == ([(2, {"loss": 1.5})], path.stat().st_size)


def test_a_line_that_is_no_row_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "curves.jsonl"
    path.write_text('nonsense\n[1]\n{"loss": 1.0}\n{"step": 3, "loss": 1.0}\n')
    assert read_rows([path], 0)[0] == [(3, {"loss": 1.0})]


def test_the_file_is_followed_from_the_work_folder_to_the_finished_one(tmp_path: Path) -> None:
    work, final = tmp_path / "work.jsonl", tmp_path / "final.jsonl"
    work.write_text('{"step": 1, "loss": 2.0}\n')
    seen: list[Row] = []
    first = threading.Event()

    def send(rows: object) -> None:
        seen.extend(rows)  # type: ignore[arg-type]
        first.set()

    follower = CurveFollower((work, final), send, every_s=0.01)
    follower.start()
    assert first.wait(10)
    with work.open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n')
    work.rename(final)
    follower.stop()
    assert [step for step, _ in seen] == [1, 2]
