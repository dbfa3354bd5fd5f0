"""Two processes that train together over gloo: neither waits for ever, and a killed run goes on exactly."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.services


@pytest.fixture
def plan(plan, recipe):
    def make(name, micro_tokens=None, **changes):
        hardware = recipe.hardware.model_copy(update={"micro_tokens": micro_tokens})
        changes = {"questions_per_step": 16, "micro_batch": 32, **changes}
        return plan("grpo", name, sections={"hardware": hardware}, **changes)

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_zero_variance": True, "micro_tokens": 300},
        {"drop_zero_variance": True, "updates_per_rollout": 2, "steps": 4},
    ],
    ids=["parts", "old log-probabilities"],
)
def test_ranks_with_uneven_groups_do_not_wait_for_ever(ranks, plan, curves, changes):
    """Of 32 rows a rank keeps fewer than the other: fewer parts of 300 tokens. One process alone cuts none."""
    alone, shared = plan("alone", **changes | {"micro_tokens": None}), plan("shared", **changes)
    ended = ranks(alone, count=1)
    assert ended["codes"] == [0], ended["err"]
    ended = ranks(shared)
    assert ended["codes"] == [0, 0], ended["err"]
    for one, other in zip(curves(alone), curves(shared), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3, abs=1e-5)
        assert other.get("drift_max", 0.0) < 1e-3
    assert any(line["grad_norm"] > 0 for line in curves(shared))


def test_two_killed_ranks_go_on_exactly(ranks, plan, curves):
    whole, torn = plan("whole", drop_zero_variance=True), plan("torn", drop_zero_variance=True)
    assert ranks(whole)["codes"] == [0, 0]
    assert ranks(torn, kill_at=2)["codes"] != [0, 0]
    assert (torn.out / "checkpoints").is_dir()
    assert ranks(torn)["codes"] == [0, 0]
    assert curves(torn) == curves(whole)
    left, right = (load_file(one.out / "model" / "model.safetensors") for one in (whole, torn))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_that_was_asked_to_stop_goes_on_with_another_number_of_processes(ranks, plan, curves):
    """Whichever process is told, all stop after the same step; the data of the steps to come stay the same."""
    small = {"steps": 8, "save_steps": 8, "questions_per_step": 4, "micro_batch": 8}
    whole, torn = plan("whole", **small), plan("torn", **small)
    assert ranks(whole, count=1)["codes"] == [0]
    for count in (2, 1):
        before = len(curves(torn)) if count == 1 else 0
        ended = ranks(torn, count=count, signs={count - 1: "SIGTERM"})
        assert ended["codes"] == [3] * count, ended["err"]
        assert "asked to stop, and did so after step" in ended["out"][0]
        assert before < len(curves(torn)) < 8
    ended = ranks(torn, count=2)
    assert ended["codes"] == [0, 0], ended["err"]
    for one, other in zip(curves(whole), curves(torn), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3, abs=1e-5)
        assert (one["reward"], one["tokens"]) == pytest.approx((other["reward"], other["tokens"]))


def test_a_lost_process_is_told_by_those_that_are_left(ranks, plan):
    ended = ranks(plan("lost", steps=50), signs={1: "SIGKILL"})
    assert ended["codes"][0] == 3, ended["err"]
    event = json.loads(ended["out"][0].splitlines()[-1])
    assert event["message"].startswith("a process of the training was lost")


@pytest.mark.slow  # the stopped process is waited for to the end
def test_a_process_that_does_not_answer_ends_the_run_in_time(ranks, plan):
    made = plan("hung", steps=50)
    hardware = made.recipe.hardware.model_copy(update={"timeout_s": 3})
    made = made.model_copy(update={"recipe": made.recipe.model_copy(update={"hardware": hardware})})
    ended = ranks(made, signs={1: "SIGSTOP"}, timeout_s=30.0)
    assert ended["codes"][0] == 3, ended["err"]
    assert "the others waited 3 s for it" in ended["out"][0]


def test_the_parent_hears_why_the_second_rank_failed(ranks, plan):
    made = plan("failed")
    missing = made.model_copy(update={"data": made.data.with_name("gone.jsonl")})
    ended = ranks(missing)
    assert ended["codes"] == [3, 3]
    for out in ended["out"]:
        assert json.loads(out.splitlines()[-1])["event"] == "error"
