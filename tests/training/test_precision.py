"""Weights and small updates are kept in float32, whatever computes products; QLoRA trains adapters over four bits."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model

from pipelines.core.errors import RecipeError
from pipelines.recipe.config import Lora, Optimizer
from pipelines.rollout.model_loading import load
from pipelines.training import child, hardware, model, trainer
from pipelines.training import model as weights
from pipelines.training.model import load_to_train

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SMALL = Optimizer(lr=1e-6, schedule="constant", warmup_ratio=0.0)  # the papers' rate


@pytest.fixture
def small(plan, recipe, taught):
    def make(kind, compute_dtype="bfloat16", **changes):
        sections = {"model": recipe.model.model_copy(update={"compute_dtype": compute_dtype})}
        return plan(kind, f"{kind}-{compute_dtype}", taught, sections, **{"optimizer": SMALL, **changes})

    return make


def changed(plan):
    before, after = (
        load(where, plan.recipe.model, torch.float32)[0].state_dict()
        for where in (plan.checkpoint_in, plan.out / "model")
    )
    moved = sum(int((after[name] != value).sum()) for name, value in before.items())
    return moved / sum(value.numel() for value in before.values())


@pytest.mark.parametrize(
    ("kind", "changes"), [("sft", {"epochs": 5}), ("grpo", {"steps": 5, "questions_per_step": 6, "micro_batch": 24})]
)
def test_small_updates_are_kept_under_bfloat16_compute(small, train, curves, kind, changes):
    made = small(kind, **changes)
    train(made)
    assert any(line["grad_norm"] > 0 for line in curves(made))
    assert changed(made) > 0.95


def test_bfloat16_computes_in_bfloat16_and_learns_what_float32_learns(small, train, curves, monkeypatch):
    """One GRPO step on the same rollouts: the same direction, up to rounding; sampler and trainer stay together."""
    seen, gradients, reference = set(), {}, {}
    linear = torch.nn.functional.linear

    def noted(*args):
        result = linear(*args)
        seen.add(result.dtype)
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    for compute_dtype, kept in (("float32", reference), ("bfloat16", gradients)):
        seen.clear()
        made = small("grpo", compute_dtype, steps=1, questions_per_step=6, micro_batch=24)
        train(made)
        assert seen == {getattr(torch, compute_dtype)}
        kept.update(curves(made)[0])
    assert gradients["reward"] == pytest.approx(reference["reward"], abs=0.2)
    assert gradients["entropy"] == pytest.approx(reference["entropy"], rel=0.05)
    assert gradients["drift_mean"] < 0.01
    assert reference["drift_max"] < 1e-3
    assert math.isfinite(gradients["grad_norm"])


def test_weights_that_lose_small_updates_are_refused(taught, recipe):
    network, _ = load_to_train(taught, recipe.model)
    trainer.keeps_small_updates(network)
    with pytest.raises(RecipeError, match="in bfloat16, which rounds small updates away"):
        trainer.keeps_small_updates(network.bfloat16())
    model = recipe.model.model_copy(update={"compute_dtype": "bfloat16"})
    assert load_to_train(taught, model)[0].dtype == torch.float32
    adapted = model.model_copy(update={"lora": Lora(rank=4, alpha=8)})
    assert load_to_train(taught, adapted)[0].dtype == torch.bfloat16


def test_deepspeed_without_float32_weights_is_refused(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"bf16": {"enabled": True, hardware.COARSE_MASTERS: True}}))
    with pytest.raises(RecipeError, match="rounds small updates away"):
        hardware.deepspeed_file(str(path), "adamw")


bitsandbytes = pytest.mark.services  # a package that README's test command does not install
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


@bitsandbytes
def test_the_matrices_of_the_base_take_half_a_byte_a_weight(checkpoint, quantized):
    network, _ = model.load_to_train(checkpoint, quantized)
    whole, _ = load(checkpoint, quantized)
    for name, layer in whole.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            assert network.get_submodule(name).weight.nbytes == layer.weight.numel() / 2
    assert network.model.embed_tokens.weight.equal(whole.model.embed_tokens.weight)


@bitsandbytes
def test_the_weights_in_full_speak_as_the_policy_over_four_bits_does(checkpoint, quantized, tmp_path):
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


@bitsandbytes
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_training_moves_the_adapters_alone_and_writes_a_plain_model(
    kind, plan, train, curves, recipe, quantized, taught
):
    changes = {"epochs": 3.0, "optimizer": Optimizer(lr=1e-2)} if kind == "sft" else {"questions_per_step": 6}
    made = plan(kind, start=taught, sections={"model": quantized}, **changes)
    train(made)
    assert any(line["grad_norm"] > 0 for line in curves(made))
    if kind == "grpo":
        assert max(line["drift_max"] for line in curves(made)) < 1e-3  # it samples from what it trains
    before, after = (load(where, recipe.model)[0].state_dict() for where in (taught, made.out / "model"))
    moved = {name for name, value in after.items() if not value.equal(before[name])}
    assert "model.layers.0.mlp.up_proj.weight" in moved
    assert "model.embed_tokens.weight" not in moved


@pytest.mark.parametrize(
    ("flags", "has"),
    [("fpu avx512f avx512_bf16 amx_bf16", True), ("Features\t: fp asimd bf16", True), ("fpu avx2 avx512f", False)],
)
def test_a_processor_without_bfloat16_is_told_by_its_flags(tmp_path, flags, has):
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert child.cpu_multiplies_bfloat16(cpu_info) is has
    assert child.cpu_multiplies_bfloat16(tmp_path / "none") is True
