"""What a run writes: whole checkpoints only, curves that a resumed run continues without a seam."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from pipelines.core.errors import RecipeError, ResourceError, TrainingError
from pipelines.recipe.config import Hardware
from pipelines.training import trainer
from pipelines.training.plan import Plan
from pipelines.training.record import WHOLE, CurveRecorder, Meter, last_whole_checkpoint, state_bytes
from pipelines.training.trainer import resume_point


def recorder(out, state_bytes=1000):
    made = CurveRecorder(
        out, "grpo", [].append, {"loss": "loss", "trl/clip": "clip"}, take_spent=lambda: {"rollout_seconds": 1.5}
    )
    made.measure(torch.nn.Linear(9, 10))
    made.state_bytes = state_bytes
    return made


def state(step, steps=9, rank=0):
    return SimpleNamespace(global_step=step, max_steps=steps, is_world_process_zero=rank == 0)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_curves_hold_the_chosen_numbers_and_timing_the_clock(tmp_path):
    made = recorder(tmp_path)
    made.on_log(None, state(1), None, {"loss": 2.0, "trl/clip": 0.1, "own/ex": 0.5, "epoch": 0.3, "step_time": 9.0})
    assert lines(tmp_path / "curves.jsonl") == [{"step": 1, "loss": 2.0, "clip": 0.1, "ex": 0.5}]
    [timing] = lines(tmp_path / "timing.jsonl")
    assert set(timing) == {"step", "seconds", "cpu_seconds", "rollout_seconds"}


@pytest.mark.parametrize("name", ["loss", "own/ex"])
def test_a_training_that_has_diverged_says_what_to_lower(tmp_path, name):
    with pytest.raises(RecipeError, match=r"grpo has diverged: at step 7 \w+ is nan.*grpo\.optimizer\.lr"):
        recorder(tmp_path).on_log(None, state(7), None, {"loss": 1.0, name: float("nan")})


def test_a_checkpoint_of_adapters_takes_what_is_saved_of_them():
    """Rank 8 on a layer of 64 to 64 has 1,024 numbers: each is saved in float32, with two moments."""
    base = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    assert state_bytes(base) == 64 * 64 * 2 + 2 * 64 * 64 * 4
    network = get_peft_model(base, LoraConfig(r=8, target_modules=["0"]))
    assert state_bytes(network) == 3 * 4 * 1024
    assert Meter(network).operations == 4 * (64 * 64 + 1024) + 2 * 1024


def test_the_summary_at_the_end_of_a_run_is_no_step(tmp_path):
    recorder(tmp_path).on_log(None, state(9), None, {"train_runtime": 3.0, "train_loss": 1.0})
    assert not (tmp_path / "curves.jsonl").exists()


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_a_torn_line(tmp_path):
    curves = tmp_path / "curves.jsonl"
    curves.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 4, "lo')
    recorder(tmp_path).on_train_begin(None, state(2), None)
    assert lines(curves) == [{"step": 1, "loss": 3}, {"step": 2, "loss": 2}]


def test_only_the_first_process_cuts_the_files_back(tmp_path):
    """Two that write the same file at once tear it."""
    curves = tmp_path / "curves.jsonl"
    curves.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n')
    recorder(tmp_path).on_train_begin(None, state(1, rank=1), None)
    assert len(lines(curves)) == 2


def plan_of(folder, recipe, **hardware):
    recipe = recipe.model_copy(update={"hardware": Hardware(**hardware)})
    return Plan(kind="grpo", recipe=recipe, checkpoint_in="model", data=folder, out=folder)


def test_only_the_first_process_clears_a_torn_checkpoint_away(tmp_path, recipe, monkeypatch):
    torn = tmp_path / "checkpoints" / "checkpoint-1"
    torn.mkdir(parents=True)
    monkeypatch.setenv("RANK", "1")
    plan = plan_of(tmp_path, recipe)
    resume_point(plan)
    assert torn.is_dir()
    monkeypatch.setenv("RANK", "0")
    assert resume_point(plan) is None
    assert not torn.exists()


def test_only_a_whole_checkpoint_is_gone_on_from(tmp_path):
    for step, whole in ((9, True), (10, True), (11, False)):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        if whole:
            (folder / WHOLE).touch()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoints" / "checkpoint-10")
    assert not (tmp_path / "checkpoints" / "checkpoint-11").exists()
    assert last_whole_checkpoint(tmp_path / "nothing") is None


def test_deepspeed_goes_on_with_as_many_processes_only(tmp_path, recipe, monkeypatch):
    """It cuts the optimiser's state up by process; without it a checkpoint is whole for any number."""
    (tmp_path / "checkpoints" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "checkpoint-4" / WHOLE).write_text("2")
    assert str(resume_point(plan_of(tmp_path, recipe))).endswith("checkpoint-4")
    shared = plan_of(tmp_path, recipe, deepspeed="zero2")
    with pytest.raises(TrainingError, match="written by 2 processes"):
        resume_point(shared)
    monkeypatch.setattr(trainer, "world_size", lambda: 2)
    assert str(resume_point(shared)).endswith("checkpoint-4")


def test_a_checkpoint_that_the_disk_cannot_hold_is_not_begun(tmp_path):
    control = SimpleNamespace(should_save=True)
    recorder(tmp_path).on_step_end(None, state(1), control)
    with pytest.raises(ResourceError, match="no space for a checkpoint"):
        recorder(tmp_path, state_bytes=1 << 60).on_step_end(None, state(1), control)
