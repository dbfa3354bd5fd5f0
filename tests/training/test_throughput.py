"""Rates of a step from its seconds and tokens, by hand."""

import json

import pytest
import torch

from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.model_loading import load
from pipelines.training.record import Meter
from pipelines.training.samples import sample

SPENT = {"seconds": 10.0, "generate_seconds": 4.0, "train_seconds": 5.0, "trained_tokens": 6e5, "sampled_tokens": 2e4}


def test_rates_of_a_grpo_step() -> None:
    """A million parameters, 6 operations each: 120,000 tokens a second are 7.2e11 of an H100's 9.89e14."""
    meter = Meter(torch.nn.Linear(1000, 1000, bias=False), "NVIDIA H100 80GB HBM3")
    rates = meter.rates(SPENT)
    assert meter.rates(SPENT | {"computed_tokens": 3e5})["mfu"] == pytest.approx(3.6e11 / 9.89e14)
    assert rates == pytest.approx({"trained_per_s": 1.2e5, "sampled_per_s": 5e3, "mfu": 7.2e11 / 9.89e14, "idle": 0.1})


def test_what_was_sampled_meanwhile_is_no_work_of_the_trainer_and_its_wait_is_idle() -> None:
    """20,000 tokens in the sampler's 8 s; of 10 s the trainer worked 5 and waited 4."""
    rates = Meter(torch.nn.Linear(10, 10), "a CPU").rates(SPENT | {"sampler_seconds": 8.0})
    assert rates == pytest.approx({"trained_per_s": 1.2e5, "sampled_per_s": 2500.0, "idle": 0.5})


@pytest.mark.parametrize(("device", "peak"), [("NVIDIA L40", None), ("NVIDIA RTX A4000", None), ("NVIDIA L4", 121e12)])
def test_a_device_is_known_by_its_whole_name(device: str, peak: float | None) -> None:
    assert Meter(torch.nn.Linear(10, 10), device).peak == peak


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    network = torch.nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    assert Meter(network, "NVIDIA A10G").rates(SPENT)["mfu"] == pytest.approx(4.8e11 / 1.25e14)


def test_a_step_that_only_trains_and_a_device_that_nobody_knows() -> None:
    meter = Meter(torch.nn.Linear(10, 10), "a CPU")
    assert meter.rates({"seconds": 2.0, "trained_tokens": 100.0}) == {"trained_per_s": 50.0}
    assert meter.rates({"seconds": 2.0, "generate_seconds": 0.0, "train_seconds": 0.0}) == {"idle": 1.0}
    assert Meter(torch.nn.Linear(10, 10), "NVIDIA H100 PCIe").peak == 756e12


def test_each_step_of_sft_counts_the_tokens_of_its_batch(taught, trajectories, recipe) -> None:
    """Each of its batches holds all six demonstrations."""
    codec = ChatCodec(load(taught, recipe.model)[1])
    tokens = sum(len(sample(trajectory, codec).input_ids) for trajectory in trajectories)
    timing = [json.loads(line) for line in (taught.parent / "timing.jsonl").read_text().splitlines()]
    assert {line["trained_tokens"] for line in timing} == {tokens}
