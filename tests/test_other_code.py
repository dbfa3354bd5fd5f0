"""A run that is killed in mid-stage and started again with other code: whose work it goes on from."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.core.errors import BoundaryError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph, stage_making, unfinished_work
from pipelines.stages.context import Silent
from tests.services.conftest import SMALL_DATA

ROOT = Path(__file__).resolve().parent.parent


def test_a_stage_resumes_from_the_work_of_the_same_code_alone(tmp_path, monkeypatch):
    """The build finds in its work folder nothing, then what it left there, then nothing again."""
    recipe, store, said, found = recipes.load("miniature", SMALL_DATA), Store(tmp_path), list[str](), list[bool]()

    def interrupted(context):
        checkpoint = context.folder / "checkpoints" / "checkpoint-2"
        found.append(checkpoint.is_dir())
        checkpoint.mkdir(parents=True, exist_ok=True)
        raise BoundaryError("interrupted")

    progress = Silent()
    monkeypatch.setattr(progress, "say", said.append)
    monkeypatch.setattr("pipelines.stages.data.build_pools", interrupted)
    whys = []
    for digest in ("one", "one", "other"):
        monkeypatch.setattr(unfinished_work, "code_digest", lambda digest=digest: digest)
        (step,) = graph.plan(recipe, store, "data")
        whys.append(step.why)
        with pytest.raises(BoundaryError, match="interrupted"):
            stage_making.execute(step, recipe, store, progress, [step])
    assert whys[1:] == ["was interrupted: resumes", "was interrupted: the code has changed, begins anew"]
    assert found == [False, True, False]
    assert said == ["data: the code has changed since it was interrupted; begins anew"]


def test_work_whose_code_is_not_noted_is_not_trusted(tmp_path):
    assert unfinished_work.can_resume(tmp_path)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "00000.jsonl").write_text("{}\n")
    assert not unfinished_work.can_resume(tmp_path)


def command(home, *words):
    small = [*SMALL_DATA, "data.sft.options={databases: 4, questions: 60}", "rollout.processes=1"]
    return [sys.executable, "-m", "flows.cli", *words[:1], "miniature", *words[1:], *small, f"--store={home / 'store'}"]


@pytest.mark.slow
def test_a_worker_that_comes_back_with_other_code_says_so_and_begins_the_stage_anew(tmp_path):
    """The checkout is a copy of this one, whose data stage has shards of four questions."""
    for name in ("pipelines", "tasks", "flows"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    reading = tmp_path / "pipelines" / "stages" / "data.py"
    reading.write_text(reading.read_text().replace("BATCH = 1024", "BATCH = 4"))
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
        file.write("# any code of the package counts\n")
    assert "was interrupted: the code has changed, begins anew" in said(tmp_path, "stages")
    line = "data: the code has changed since it was interrupted; begins anew"
    assert line in said(tmp_path, "run", "--until", "data")
    assert not list(tmp_path.glob("store/data/.work-*/shards"))


def said(home, *words):
    done = subprocess.run(command(home, *words), cwd=home, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())
