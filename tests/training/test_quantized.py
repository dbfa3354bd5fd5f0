"""QLoRA: adapters over a base of 4 bits, by bitsandbytes on the CPU. What comes out is the policy that was trained."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model

from pipelines.core.types import Example, Trajectory, write_jsonl
from pipelines.recipe.config import Lora, Optimizer
from pipelines.rollout.model_loading import load
from pipelines.training import grpo, model, samples, sft
from pipelines.training import model as weights
from pipelines.training.plan import Plan

pytestmark = [
    pytest.mark.services,  # of the package bitsandbytes, which README's test command does not install
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT reads the old name
]
IDS = torch.arange(5, 25).unsqueeze(0)
FOUR = Lora(rank=4, alpha=8, bits=4)


@pytest.fixture
def quantized(recipe):
    return recipe.model.model_copy(update={"lora": FOUR})


def adapted(checkpoint, quantized):
    torch.manual_seed(0)
    network = get_peft_model(model.load_to_train(checkpoint, quantized)[0], model.adapters(FOUR))
    for name, value in network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    return network


def test_the_matrices_of_the_base_take_half_a_byte_a_weight(checkpoint, quantized) -> None:
    network, _ = model.load_to_train(checkpoint, quantized)
    whole, _ = load(checkpoint, quantized)
    for name, layer in whole.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            assert network.get_submodule(name).weight.nbytes == layer.weight.numel() / 2
    assert network.model.embed_tokens.weight.equal(whole.model.embed_tokens.weight)


def test_the_weights_in_full_speak_as_the_policy_over_four_bits_does(checkpoint, quantized, tmp_path) -> None:
    network = adapted(checkpoint, quantized)
    trainer = SimpleNamespace(model=network, model_wrapped=network, accelerator=Accelerator(cpu=True))
    with torch.no_grad():
        expected = network(input_ids=IDS).logits
        empty, full = weights.whole_weights(trainer)
        empty.save_pretrained(tmp_path, state_dict=full)
        assert network(input_ids=IDS).logits.equal(expected)
        base = load(checkpoint, quantized)[0](input_ids=IDS).logits
    load(checkpoint, quantized)[1].save_pretrained(tmp_path)
    written, _ = load(tmp_path, quantized)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        assert torch.allclose(written(input_ids=IDS).logits, expected, atol=1e-4)
    assert not torch.allclose(base, expected, atol=1e-2)


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_training_moves_the_adapters_alone_and_writes_a_plain_model(
    kind, tmp_path, recipe, quantized, examples, trajectories, taught, monkeypatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    changes = {"epochs": 3.0, "optimizer": Optimizer(lr=1e-2)} if kind == "sft" else {"questions_per_step": 6}
    section = getattr(recipe, kind).model_copy(update=changes)
    write_jsonl(tmp_path / "data.jsonl", trajectories if kind == "sft" else examples)
    plan = Plan(
        kind=kind,
        recipe=recipe.model_copy(update={"model": quantized, kind: section}),
        checkpoint_in=str(taught),
        data=tmp_path / "data.jsonl",
        out=tmp_path / "out",
    )
    plan.out.mkdir()
    module, of = (sft, Trajectory) if kind == "sft" else (grpo, Example)
    module.train(plan, samples.records(plan.data, of), lambda event: None)
    lines = [json.loads(line) for line in (plan.out / "curves.jsonl").read_text().splitlines()]
    assert any(line["grad_norm"] > 0 for line in lines)
    if kind == "grpo":
        assert max(line["drift_max"] for line in lines) < 1e-3  # it samples from what it trains
    before, after = (load(where, recipe.model)[0].state_dict() for where in (taught, plan.out / "model"))
    moved = {name for name, value in after.items() if not value.equal(before[name])}
    assert "model.layers.0.mlp.up_proj.weight" in moved
    assert "model.embed_tokens.weight" not in moved
