"""What a run writes, curves, checkpoints and rates; and what a terminal shows of it, alarms included."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from pipelines.core.errors import RecipeError, ResourceError, TrainingError
from pipelines.recipe.config import Grpo, Hardware
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.stages import train
from pipelines.stages.context import Context, Silent
from pipelines.training import trainer
from pipelines.training.plan import Plan
from pipelines.training.record import WHOLE, CurveRecorder, Meter, last_whole_checkpoint, state_bytes
from pipelines.training.samples import make_sample
from pipelines.training.trainer import resume_point
from pipelines.training.watch import ALARMS, WINDOW, Curves, Watch, nothing_learned, read_curves, spark, view


def write(folder, steps):
    lines = [{"step": n + 1, "reward": float(n), "term_exec": 0.5, "custom": 1.0} for n in range(steps)]
    (folder / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "re')
    spent = {"seconds": 2.0, "generate_seconds": 1.0, "train_seconds": 0.9, "gpu_gb": 3.25, "trained_per_s": 1234.4}
    spent |= {"sampled_per_s": 56.0, "mfu": 0.217, "idle": 0.05}
    (folder / "timing.jsonl").write_text("".join(json.dumps({"step": n + 1} | spent) + "\n" for n in range(steps)))
    alarm = {"step": 21, "alarm": "entropy", "words": "entropy fell from 1 to 0", "example": "..."}
    (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")


def test_it_says_how_far_the_run_is_and_where_its_time_goes(tmp_path):
    write(tmp_path, steps=30)
    shown = view(read_curves(tmp_path), steps=60)
    assert shown[0] == "step 30 of 60, 2.00 s a step, some 60 s left"
    assert "time: generate 50%  train 45%  other 5%" in shown
    speeds = "1,234 tokens/s trained on each device, 56 sampled, 21.7% of its peak in training"
    assert f"{speeds}, neither for 5% of the time" in shown
    assert "device memory: 3.2 GiB at its most" in shown
    assert shown[-1] == "ALARM at step 21: entropy fell from 1 to 0"
    rows = [line.split() for line in view(read_curves(tmp_path))]
    assert ["reward", "4.5", "24.5"] in [row[:3] for row in rows]  # means of 0..9 and of 20..29
    named = [row[0] for row in rows if row and row[0] in ("reward", "term_exec", "custom")]
    assert named == ["reward", "term_exec", "custom"]  # the best known first, a name that nobody knows last


def test_a_line_ends_where_its_record_ends(tmp_path):
    alarm = {"step": 21, "alarm": "entropy", "words": "it says \u2028 and \x85"}
    line = json.dumps(alarm, ensure_ascii=False) + "\n"
    (tmp_path / "alarms.jsonl").write_bytes(2 * line.encode() + '{"step": 99, "words": "é'.encode()[:-1])
    assert read_curves(tmp_path).alarms == [alarm, alarm]


def test_a_fault_that_a_step_does_not_name_was_not_made_in_it(tmp_path):
    lines = [{"step": 1, "fault_no_action": 0.5}, {"step": 2}]
    (row,) = [line for line in view(Curves(lines, [], [])) if line.startswith("fault")]
    assert row.split() == ["fault_no_action", "0.25", "0.25", "█▁"]
    assert view(read_curves(tmp_path)) == ["no step is done yet"]
    assert view(Curves([{"step": 1, "loss": 2.0}], [{"seconds": 1.0}], []))[-1] == "no alarm"


@pytest.mark.parametrize(
    ("values", "expected"), [([0.0, 7.0], "▁█"), ([1.0, 1.0, 1.0], "▁▁▁"), ([0.0, 1.0, 6.0, 7.0, 14.0, 14.0], "▁▄█")]
)
def test_a_curve_in_one_line(values, expected):
    """The last one: three columns, means 0.5, 6.5 and 14; (6.5 - 0.5) / 13.5 * 7 = 3.1, the fourth bar."""
    assert spark(values, width=3) == expected


def test_a_stages_figure_is_the_mean_over_the_steps_that_have_it(tmp_path):
    """The last tenth of 20 steps: drift is on one of the two; a fault that a step does not name was not made."""
    lines = [{"step": step, "reward": step / 10} for step in range(1, 21)]
    lines[18] |= {"drift_mean": 0.5, "fault_no_action": 0.2, "ex_held_out": 0.25}
    (tmp_path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train.summarise_curves(SimpleNamespace(folder=tmp_path)) == {
        "steps": 20, "reward": pytest.approx(1.95), "drift_mean": 0.5, "fault_no_action": 0.1, "ex_held_out": 0.25,
    }  # fmt: skip


HEALTHY = {
    "entropy": 0.5, "tokens": 40.0, "format_errors": 0.02, "ex": 0.6, "reward": 5.0, "zero_variance": 0.3,
    "drift_mean": 1e-6, "broken": 0.1,
}  # fmt: skip


def curve(**ends):
    """Two windows of healthy steps, then one with these values."""
    return [HEALTHY] * (2 * WINDOW) + [HEALTHY | ends] * WINDOW


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("entropy", {"entropy": 0.05}),
        ("length", {"tokens": 90.0}),
        ("format", {"format_errors": 0.3}),
        ("hacking", {"ex": 0.45, "reward": 5.5}),
        ("no_signal", {"zero_variance": 0.95}),
        ("drift", {"drift_mean": 0.2}),
        ("broken", {"broken": 0.25}),
    ],
)
def test_each_alarm_rings_for_its_own_fault_alone(name, ends):
    assert [other for other, check in ALARMS.items() if check(curve(**ends))] == [name]


def test_a_healthy_run_raises_no_alarm():
    better = curve(ex=0.8, reward=7.0, entropy=0.3, tokens=30.0)
    watch = Watch()
    assert [alarm for line in better for alarm in watch.see(line)] == []
    assert ALARMS["hacking"](curve(ex=0.3, reward=2.0)) is None


def measured(*accuracies, reward=5.0):
    """Held-out accuracy at every tenth step, the reward as it is at first and then as given."""
    lines = [dict(HEALTHY) for _ in range(10 * len(accuracies))]
    for number, value in enumerate(accuracies):
        lines[10 * number]["ex_held_out"] = value
    return lines[:10] + [line | {"reward": reward} for line in lines[10:]]


def test_held_out_answers_decide_on_hacking_where_they_are_measured():
    """Best two in a row 0.65, last two 0.525: a fall of 12.5 points; training accuracy never moved."""
    falling = measured(0.6, 0.7, 0.6, 0.55, 0.5, reward=5.5)
    assert ALARMS["hacking"](falling).startswith("held-out execution accuracy fell from 65.0% to 52.5%")
    assert ALARMS["hacking"](measured(0.6, 0.7, 0.6, 0.55, 0.5, reward=4.0)) is None  # at 0.65 it was 5.0 in part
    assert ALARMS["hacking"](measured(0.6, 0.7, 0.6, 0.55, 0.6, reward=5.5)) is None
    assert ALARMS["hacking"](measured(0.6, reward=5.5)) is None


def test_an_alarm_is_said_once_and_again_after_it_was_over():
    watch, rung = Watch(), []
    for values in ([0.1] * 30, [1.0] * 10, [0.1] * 10, [1.0] * 10):
        for value in values:
            rung += [name for name, _ in watch.see(HEALTHY | {"zero_variance": value})]
    assert rung == ["no_signal", "no_signal"]


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
    made.on_log(None, state(9), None, {"train_runtime": 3.0, "train_loss": 1.0})
    assert not (tmp_path / "curves.jsonl").exists()  # the summary at the end of a run is no step
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


def test_a_resumed_run_drops_what_came_after_its_checkpoint_and_a_torn_line(tmp_path):
    """In its first process alone: two that write the same file at once tear it."""
    curves = tmp_path / "curves.jsonl"
    curves.write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n{"step": 3, "loss": 1}\n{"step": 4, "lo')
    recorder(tmp_path).on_train_begin(None, state(2, rank=1), None)
    assert curves.read_text().count("\n") == 3
    recorder(tmp_path).on_train_begin(None, state(2), None)
    assert lines(curves) == [{"step": 1, "loss": 3}, {"step": 2, "loss": 2}]


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


SPENT = {"seconds": 10.0, "generate_seconds": 4.0, "train_seconds": 5.0, "trained_tokens": 6e5, "sampled_tokens": 2e4}


def test_rates_of_a_step():
    """A million parameters, 6 operations each: 120,000 tokens a second are 7.2e11 of an H100's 9.89e14."""
    meter = Meter(torch.nn.Linear(1000, 1000, bias=False), "NVIDIA H100 80GB HBM3")
    rates = meter.rates(SPENT)
    assert meter.rates(SPENT | {"computed_tokens": 3e5})["mfu"] == pytest.approx(3.6e11 / 9.89e14)
    assert rates == pytest.approx({"trained_per_s": 1.2e5, "sampled_per_s": 5e3, "mfu": 7.2e11 / 9.89e14, "idle": 0.1})
    network = torch.nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    assert Meter(network, "NVIDIA A10G").rates(SPENT)["mfu"] == pytest.approx(4.8e11 / 1.25e14)
    meter = Meter(torch.nn.Linear(10, 10), "a CPU")
    assert meter.rates({"seconds": 2.0, "trained_tokens": 100.0}) == {"trained_per_s": 50.0}
    assert meter.rates({"seconds": 2.0, "generate_seconds": 0.0, "train_seconds": 0.0}) == {"idle": 1.0}
    assert Meter(torch.nn.Linear(10, 10), "NVIDIA H100 PCIe").peak == 756e12


def test_what_was_sampled_meanwhile_is_no_work_of_the_trainer_and_its_wait_is_idle():
    """20,000 tokens in the sampler's 8 s; of 10 s the trainer worked 5 and waited 4."""
    rates = Meter(torch.nn.Linear(10, 10), "a CPU").rates(SPENT | {"sampler_seconds": 8.0})
    assert rates == pytest.approx({"trained_per_s": 1.2e5, "sampled_per_s": 2500.0, "idle": 0.5})


@pytest.mark.parametrize(("device", "peak"), [("NVIDIA L40", None), ("NVIDIA RTX A4000", None), ("NVIDIA L4", 121e12)])
def test_a_device_is_known_by_its_whole_name(device, peak):
    assert Meter(torch.nn.Linear(10, 10), device).peak == peak


def test_each_step_of_sft_counts_the_tokens_of_its_batch(taught, trajectories, recipe):
    codec = ChatCodec(load(taught, recipe.model)[1])
    tokens = sum(len(make_sample(trajectory, codec).input_ids) for trajectory in trajectories)
    timing = [json.loads(line) for line in (taught.parent / "timing.jsonl").read_text().splitlines()]
    assert {line["trained_tokens"] for line in timing} == {tokens}


def steps(count, **figures):
    return [
        {"step": n + 1, "zero_variance": 1.0, "ex": 0.0, "broken": 0.0, "grad_norm": 0.0} | figures
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (steps(3), "no answer was right; train SFT longer, take easier questions"),
        (steps(3, ex=1.0), "every answer was right; take harder questions"),
        (steps(3, ex=0.5), "all rewards were equal; add a reward term that tells the answers apart"),
        (steps(3, broken=1.0), "every episode broke"),
        (steps(3, zero_variance=0.2), "every gradient is 0"),
        (steps(3, grad_norm=1e-7), "in every group all rewards were equal"),  # of a KL term, not of a reward
    ],
)
def test_a_run_in_which_no_group_taught_anything_says_so_and_what_to_change(lines, words):
    """Three steps, too few for an alarm."""
    told = nothing_learned(lines, Grpo())
    assert told.startswith("nothing was learned in 3 steps: ")
    assert words in told


@pytest.mark.parametrize(
    ("lines", "settings"),
    [
        ([], {}),
        (steps(2) + steps(1, zero_variance=0.9, grad_norm=0.1), {}),
        (steps(3, replaced=0.5, grad_norm=0.1), {"resample": 1}),
        (steps(3, grad_norm=0.1), {"baseline": "batch"}),
        (steps(3, grad_norm=0.1), {"credit": "turn"}),
        (steps(3, grad_norm=0.1), {"lambda_schema": 0.25}),
    ],
)
def test_a_run_in_which_a_step_taught_something_says_nothing(lines, settings):
    assert nothing_learned(lines, Grpo(**settings)) is None


class Heard(Silent):
    """Progress that keeps its warnings."""

    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


@pytest.mark.parametrize(("zero_variance", "told"), [(1.0, True), (0.5, False)])
def test_the_stage_tells_that_its_run_taught_nothing(tmp_path, recipe, examples, monkeypatch, zero_variance, told):
    """Training is a stand-in, which leaves the curves of three steps and a model."""

    def stand_in(plan, folder, *_):
        (folder / "model").mkdir()
        curves = [line | {"grad_norm": 1 - zero_variance} for line in steps(3, zero_variance=zero_variance)]
        (folder / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in curves))

    monkeypatch.setattr(train, "train_in_child", stand_in)
    monkeypatch.setattr(train, "examples", lambda *_: examples)
    folder = tmp_path / "grpo"
    folder.mkdir()
    heard = Heard()
    train.grpo(Context("grpo", recipe, folder, {"data": tmp_path, "model": tmp_path / "model"}, heard))
    assert any("nothing was learned in 3 steps" in line for line in heard.warnings) is told
