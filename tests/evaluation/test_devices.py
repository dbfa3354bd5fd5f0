"""Where a policy decodes: on the recipe's device, each of a stage's processes on the next GPU."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pipelines.core import processes
from pipelines.core.errors import ResourceError
from pipelines.recipe import recipes
from pipelines.rollout.policies.making import device
from pipelines.stages import shards
from pipelines.stages.context import Silent


def place(name: str, number: int = 0) -> str:
    return device(recipes.load("miniature", [f"hardware.device={name}"]), number)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (place("cpu"), place("auto", 1)) == ("cpu", "cpu")
    with pytest.raises(ResourceError, match=r"no CUDA device\. Set hardware\.device=auto"):
        place("cuda")


def test_processes_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [place("auto", number) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert (place("cuda", 1), place("cpu", 1)) == ("cuda:1", "cpu")


def numbered() -> shards.Run:
    def run(items: Sequence[int], path: Path) -> str:
        path.write_text(json.dumps(processes.number) + "\n")
        time.sleep(2)  # long enough for the other process to take a shard
        return ""

    return run


@pytest.mark.services  # two processes import everything
def test_processes_that_share_a_stage_are_numbered(tmp_path: Path) -> None:
    work = shards.Shards(range(4), 1, tmp_path)
    work.run(numbered, (), 2, Silent())
    assert set(work.rows()) == {0, 1}
    assert processes.number == 0  # this process is the only one of its stage
