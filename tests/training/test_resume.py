"""Exact resume: a run that died and went on ends with the bits of a run that never did, also one that samples ahead."""

import dataclasses
import random
import threading

import psutil
import pytest
import torch
from safetensors.torch import load_file

from pipelines.core.errors import TrainingError
from pipelines.core.types import write_jsonl
from pipelines.recipe.config import Optimizer
from pipelines.training import launch


@pytest.fixture
def plan(plan, tmp_path, trajectories):
    tripled = [dataclasses.replace(one, sample=sample) for sample in range(3) for one in trajectories]

    def make(kind, name, **changes):
        made = plan(kind, name, **changes)
        write_jsonl(tmp_path / "sft.jsonl", tripled)
        return made if kind == "sft" else made.model_copy(update={"held_out": made.data})

    return make


@pytest.fixture
def dies_and_goes_on(train):
    """A function that trains by one plan to its end, and by another that dies at a step and goes on: they end alike."""

    def both(whole, torn, die_at):
        train(whole)
        with pytest.raises(RuntimeError, match="killed"):
            train(torn, die_at=die_at)
        train(torn)
        same(whole, torn)

    return both


def same(one, other):
    """Whether two finished runs hold the same weights, bit for bit, and the same curves, byte for byte."""
    left, right = (load_file(plan.out / "model" / "model.safetensors") for plan in (one, other))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert (one.out / "curves.jsonl").read_bytes() == (other.out / "curves.jsonl").read_bytes()


@pytest.mark.parametrize("die_at", [1, 5])
def test_killed_sft_resumes_from_its_checkpoint(plan, dies_and_goes_on, die_at):
    dies_and_goes_on(plan("sft", "whole"), plan("sft", "torn"), die_at)


@pytest.mark.parametrize("updates", [1, 2])
def test_killed_grpo_resumes_from_its_checkpoint(plan, curves, dies_and_goes_on, updates):
    settings = {"updates_per_rollout": updates, "steps": 6, "micro_batch": 4}
    whole, torn = plan("grpo", "whole", **settings), plan("grpo", "torn", **settings)
    dies_and_goes_on(whole, torn, 5)
    assert sum(line["grad_norm"] > 0 for line in curves(torn)) >= 3  # rewards differ in most groups: the weights moved


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_kill_9_at_ten_moments_changes_nothing(plan, kind):
    steps = {"steps": 80} if kind == "grpo" else {"epochs": 60}
    whole, torn = plan(kind, "whole", **steps), plan(kind, "torn", **steps)
    launch.train_in_child(whole, whole.out, lambda event: None)
    rng = random.Random(0)
    for _ in range(10):
        with pytest.raises(TrainingError, match="was killed"):
            launch.train_in_child(torn, torn.out, killer(rng))
    launch.train_in_child(torn, torn.out, lambda event: None)
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
    for child in psutil.Process().children():
        if any("pipelines.training" in word for word in child.cmdline()):
            child.kill()


@pytest.fixture
def run(plan, train, curves):
    def go(name, die_at=None, lr=1e-3, **changes):
        optimizer = Optimizer(lr=lr, schedule="constant", warmup_ratio=0.0)
        made = plan("grpo", name, **{"steps": 5, "save_steps": 3, "optimizer": optimizer, "held_out": 0, **changes})
        train(made, die_at=die_at)
        return curves(made), load_file(made.out / "model" / "model.safetensors")

    return go


@pytest.mark.services
@pytest.mark.parametrize(
    ("staleness", "ages"), [(1, [0, 1, 1, 0, 1]), pytest.param(2, [0, 1, 2, 0, 1], marks=pytest.mark.slow)]
)
def test_a_run_that_samples_ahead_is_the_same_each_time(run, staleness, ages):
    """Steps 1 and 4 have nothing to be ahead of: the first, and the one after the checkpoint of step 3."""
    lines, weights = run("whole", staleness=staleness)
    assert [line["staleness"] for line in lines] == ages
    assert [line["staleness_max"] for line in lines] == ages
    assert any(line["grad_norm"] > 0 for line in lines[:3])
    with pytest.raises(RuntimeError, match="killed"):
        run("torn", die_at=5, staleness=staleness)
    again, resumed = run("torn", staleness=staleness)
    assert again == lines
    assert all(weights[name].equal(value) for name, value in resumed.items())


@pytest.mark.slow
def test_where_weights_do_not_move_being_ahead_changes_nothing(run):
    ahead, _ = run("ahead", lr=0.0, steps=3, staleness=1)
    at_once, _ = run("at_once", lr=0.0, steps=3)
    found = [(line.pop("staleness"), line.pop("staleness_max")) for line in ahead]
    assert found == [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0)]
    for one, other in zip(ahead, at_once, strict=True):
        assert one.keys() == other.keys()
        assert all(value == pytest.approx(other[name], abs=1e-5) for name, value in one.items())
        assert one.get("drift_max", 0.0) < 1e-3
