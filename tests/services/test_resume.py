"""kill -9 in every stage, and the next run ends with the same bytes; what was finished is not done again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines.stages.graph import GRAPH

SMALL = (
    "data.sft.options.databases=24",
    "data.sft.options.questions=10",
    "data.rl.0.options.databases=8",
    "data.rl.0.options.questions=6",
    "data.dev.options.databases=2",
    "data.test.options.databases=3",
    "data.test.options.questions=8",
    "sft.epochs=4",
    "sft.save_steps=5",
    "difficulty.explore=40",
    "grpo.steps=8",
    "grpo.questions_per_step=4",
    "grpo.micro_batch=24",
    "grpo.save_steps=2",
    "evaluation.samples=2",
    "evaluation.ks=[1, 2]",
    "rollout.shard=8",
    "hardware.threads=1",
)


def command(store: Path) -> list[str]:
    return [sys.executable, "-m", "flows.cli", "run", "miniature", *SMALL, f"store={store}", "--json"]


def digests(store: Path) -> dict[str, dict[str, str]]:
    """The digest of every file of every finished stage."""
    manifests = [json.loads(path.read_text()) for path in sorted(store.glob("*/*/manifest.json"))]
    return {one["stage"]: {name: file["sha256"] for name, file in one["files"].items()} for one in manifests}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_in_every_stage_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = subprocess.run(command(tmp_path / "whole"), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    done = json.loads(whole.stdout.splitlines()[-1])["stages"]
    stages = [stage.name for stage in GRAPH if stage.name in done]
    killed = kill_in_every_stage(tmp_path / "killed", stages)
    assert len(killed) >= 8
    last = subprocess.run(command(tmp_path / "killed"), capture_output=True, text=True)
    assert last.returncode == 0, last.stderr
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob("*/.work-*"))


def kill_in_every_stage(store: Path, stages: list[str]) -> list[str]:
    """Start the run again and again, and kill it, children and all, a moment after each stage has begun."""
    rng = random.Random(0)
    killed = []
    for stage in stages:
        with subprocess.Popen(command(store), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            while run.poll() is None and not list((store / stage).glob(".work-*[!k]")):
                time.sleep(0.02)
            time.sleep(rng.uniform(0.0, 1.5))
            if run.poll() is None:
                os.kill(run.pid, signal.SIGKILL)
                killed.append(stage)
            run.wait()
    return killed
