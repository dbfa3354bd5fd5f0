"""A run that is killed in mid-stage and started again with other code: whose work it goes on from."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.core.store import SHARDS
from pipelines.stages import resuming
from tests.services.conftest import SMALL_DATA

ROOT = Path(__file__).resolve().parent.parent


def begun(work: Path, build: str) -> list[str]:
    """Begin a stage in a work folder, as a run does; what it said."""
    said: list[str] = []
    resuming.begin(work, "grpo", build, said.append)
    return said


def test_a_stage_goes_on_from_the_work_of_the_same_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, checkpoint = tmp_path / ".work-key", tmp_path / ".work-key" / "checkpoints" / "checkpoint-2"
    work.mkdir()
    assert begun(work, "train:grpo") == []
    checkpoint.mkdir(parents=True)
    assert begun(work, "train:grpo") == []
    assert checkpoint.is_dir()
    now = resuming.contents()
    with monkeypatch.context() as patch:
        patch.setattr(
            resuming, "contents", lambda: now | {"pipelines.report.writer": "other"}
        )  # GRPO does not reach it
        assert resuming.foreign(work, "train:grpo") is None
        patch.setattr(resuming, "contents", lambda: now | {"pipelines.training.grpo": "other"})
        assert resuming.foreign(work, "data:build") is None
        assert begun(work, "train:grpo") == [
            "grpo: pipelines.training.grpo has changed since it was interrupted; begins anew"
        ]
    assert [path.name for path in work.iterdir()] == [SHARDS]


def test_work_whose_code_is_not_noted_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "00000.jsonl").write_text("{}\n")
    assert resuming.foreign(tmp_path, "data:build") is not None


def command(home: Path, *words: str) -> list[str]:
    small = [*SMALL_DATA, "data.sft.options={databases: 4, questions: 60}", "rollout.processes=1"]
    return [sys.executable, "-m", "flows.cli", *words[:1], "miniature", *words[1:], *small, f"--store={home / 'store'}"]


@pytest.mark.slow
def test_a_worker_that_comes_back_with_other_code_says_so_and_begins_the_stage_anew(tmp_path: Path) -> None:
    """The checkout is a copy of this one, whose data stage has shards of four questions."""
    for name in ("pipelines", "tasks", "flows"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    checking = tmp_path / "pipelines" / "stages" / "checking.py"
    checking.write_text(checking.read_text().replace("BATCH = 1024", "BATCH = 4"))
    run = subprocess.Popen(command(tmp_path, "run", "--until", "data"), cwd=tmp_path, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("store/data/.work-*/shards/00002.jsonl")):
        assert run.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert "was interrupted: resumes" in said(tmp_path, "stages")
    with (tmp_path / "pipelines" / "training" / "losses.py").open("a") as file:
        file.write("# no stage that reads questions reaches this\n")
    assert "was interrupted: resumes" in said(tmp_path, "stages")
    with checking.open("a") as file:
        file.write("# the data stage does\n")
    assert "was interrupted: pipelines.stages.data has changed, begins anew" in said(tmp_path, "stages")
    line = "data: pipelines.stages.data has changed since it was interrupted; begins anew"
    assert line in said(tmp_path, "run", "--until", "data")
    assert not list(tmp_path.glob("store/data/.work-*/shards"))


def said(home: Path, *words: str) -> str:
    done = subprocess.run(command(home, *words), cwd=home, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())
