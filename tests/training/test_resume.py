"""Exact resume: a run that died and went on ends with the bits of a run that never did."""

import dataclasses
import json
import os
import random
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from pipelines.core.errors import TrainingError
from pipelines.core.types import Example, Trajectory, write_jsonl
from pipelines.training import grpo, launch, samples, sft
from pipelines.training.plan import Plan


class Died(Exception):
    """Stands for kill -9 where a whole process is too slow to start."""


@pytest.fixture
def data(tmp_path, examples, trajectories):
    write_jsonl(tmp_path / "examples.jsonl", examples)
    doubled = [dataclasses.replace(one, sample=sample) for sample in range(3) for one in trajectories]
    write_jsonl(tmp_path / "trajectories.jsonl", doubled)
    return tmp_path


@pytest.fixture
def plan(data, recipe, checkpoint, taught, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(kind, name, **changes):
        section = getattr(recipe, kind).model_copy(update=changes)
        return Plan(
            kind=kind,
            recipe=recipe.model_copy(update={kind: section}),
            checkpoint_in=str(checkpoint if kind == "sft" else taught),
            data=data / ("trajectories.jsonl" if kind == "sft" else "examples.jsonl"),
            held_out=None if kind == "sft" else data / "examples.jsonl",
            out=data / name,
        )

    return make


def run(plan, die_at=None):
    """Train in this process; with `die_at`, die as that step is told."""
    torch.set_num_threads(1)

    def emit(event):
        if event["event"] == "step" and event["step"] == die_at:
            raise Died

    if plan.kind == "sft":
        sft.train(plan, samples.records(plan.data, Trajectory), emit)
    else:
        grpo.train(plan, samples.records(plan.data, Example), emit)


def same(one, other):
    """Whether two finished runs hold the same weights, bit for bit, and the same curves, byte for byte."""
    left, right = (load_file(plan.out / "model" / "model.safetensors") for plan in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert (one.out / "curves.jsonl").read_bytes() == (other.out / "curves.jsonl").read_bytes()


@pytest.mark.parametrize("die_at", [1, 5])
def test_killed_sft_resumes_from_its_checkpoint(plan, die_at):
    whole, torn = plan("sft", "whole"), plan("sft", "torn")
    for one in (whole, torn):
        one.out.mkdir()
    run(whole)
    with pytest.raises(Died):
        run(torn, die_at)
    run(torn)
    same(whole, torn)


@pytest.mark.parametrize("updates", [1, 2])
def test_killed_grpo_resumes_from_its_checkpoint(plan, updates):
    settings = {"updates_per_rollout": updates, "steps": 6, "micro_batch": 4}
    whole, torn = plan("grpo", "whole", **settings), plan("grpo", "torn", **settings)
    for one in (whole, torn):
        one.out.mkdir()
    run(whole)
    with pytest.raises(Died):
        run(torn, 5)
    run(torn)
    same(whole, torn)
    curves = [json.loads(line) for line in (torn.out / "curves.jsonl").read_text().splitlines()]
    assert sum(line["grad_norm"] > 0 for line in curves) >= 3  # rewards differ in most groups: the weights moved


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_kill_9_at_ten_moments_changes_nothing(plan, kind):
    steps = {"steps": 80} if kind == "grpo" else {"epochs": 60}
    whole, torn = plan(kind, "whole", **steps), plan(kind, "torn", **steps)
    launch.train(whole, whole.out, lambda event: None)
    rng = random.Random(0)
    for _ in range(10):
        with pytest.raises(TrainingError, match="was killed"):
            launch.train(torn, torn.out, killer(rng))
    launch.train(torn, torn.out, lambda event: None)
    same(whole, torn)


def killer(rng):
    """Kills the training child somewhere in one of its first steps, at whatever it is doing then."""
    left = rng.randint(0, 4)

    def on_event(event):
        nonlocal left
        if event["event"] in ("begin", "step"):
            if left == 0:
                threading.Timer(rng.uniform(0.0, 0.2), kill_child).start()
            left -= 1

    return on_event


def kill_child():
    """kill -9 every training child of this process."""
    for pid in os.listdir("/proc"):
        mine = pid.isdigit() and f"PPid:\t{os.getpid()}\n" in read(f"/proc/{pid}/status")
        if mine and "pipelines.training" in read(f"/proc/{pid}/cmdline"):
            os.kill(int(pid), signal.SIGKILL)


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
