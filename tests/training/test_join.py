"""Two machines that train together: here two launchers on one, each with a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.core.errors import UserError
from pipelines.core.processes import free_port
from pipelines.core.types import write_jsonl
from pipelines.recipe.config import Hardware
from pipelines.training import join, launch
from pipelines.training.plan import Plan


def test_the_plan_that_was_written_last_is_joined(tmp_path: Path) -> None:
    assert join.newest(tmp_path) is None
    for number, name in enumerate(("sft", "grpo")):
        folder = tmp_path / name / ".work-key"
        folder.mkdir(parents=True)
        (folder / "plan.json").touch()
        os.utime(folder / "plan.json", ns=(number, number))
    assert join.newest(tmp_path) == (tmp_path / "grpo" / ".work-key" / "plan.json", 1)


def test_a_launcher_and_a_store_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--rdzv-backend"):
        join.main([str(tmp_path)])


@pytest.mark.slow
def test_a_second_machine_trains_with_the_first(tmp_path, recipe, examples, taught, monkeypatch) -> None:
    """The same curve as one machine's with two processes, over gloo."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_jsonl(tmp_path / "examples.jsonl", examples)
    torchrun = (sys.executable, "-m", "torch.distributed.run")

    def trained(name: str, launcher: tuple[str, ...]) -> list[dict[str, float]]:
        out = tmp_path / name / "grpo" / ".work-key"
        changes = {"hardware": Hardware(device="cpu", threads=1, launch=launcher)}
        made = recipe.model_copy(update=changes)
        plan = Plan(kind="grpo", recipe=made, checkpoint_in=str(taught), data=tmp_path / "examples.jsonl", out=out)
        launch.train(plan, out, lambda event: None)
        return [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]

    port = free_port()
    meeting = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    launcher = (*torchrun, "--nnodes=2", "--nproc-per-node=1", *meeting)
    (tmp_path / "two").mkdir()
    command = [sys.executable, "-m", "pipelines.training.join", str(tmp_path / "two"), *launcher]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(launch.ROOT)}, start_new_session=True) as other:
        try:
            two = trained("two", launcher)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)
    one = trained("one", (*torchrun, "--nproc-per-node=2", "--standalone"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-5)
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
