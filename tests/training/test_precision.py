"""Numbers under training: weights and their small updates are kept in float32, whatever products are computed in."""

import json
import math

import pytest
import torch

from pipelines.core.errors import RecipeError
from pipelines.core.types import Example, Trajectory, write_jsonl
from pipelines.recipe.config import Hardware, Lora, Optimizer
from pipelines.rollout.model_loading import load
from pipelines.training import grpo, samples, sft, trainer
from pipelines.training.model import load_to_train
from pipelines.training.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
SMALL = Optimizer(lr=1e-6, schedule="constant", warmup_ratio=0.0)  # the papers' rate


@pytest.fixture
def plan(tmp_path, recipe, examples, trajectories, taught, monkeypatch):
    """A plan whose products are computed in bfloat16."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_jsonl(tmp_path / "grpo.jsonl", examples)
    write_jsonl(tmp_path / "sft.jsonl", trajectories)

    def make(kind, compute_dtype="bfloat16", lora=None, **changes):
        model = recipe.model.model_copy(update={"compute_dtype": compute_dtype, "lora": lora})
        section = getattr(recipe, kind).model_copy(update={"optimizer": SMALL, **changes})
        out = tmp_path / f"{kind}-{compute_dtype}"
        out.mkdir()
        return Plan(
            kind=kind,
            recipe=recipe.model_copy(update={kind: section, "model": model}),
            checkpoint_in=str(taught),
            data=tmp_path / f"{kind}.jsonl",
            out=out,
        )

    return make


def run(plan):
    module, of = (sft, Trajectory) if plan.kind == "sft" else (grpo, Example)
    return module.train(plan, samples.records(plan.data, of), lambda event: None)


def curves(plan):
    return [json.loads(line) for line in (plan.out / "curves.jsonl").read_text().splitlines()]


def changed(plan):
    """The share of single weights that training changed."""
    before, after = (
        load(where, plan.recipe.model, torch.float32)[0].state_dict()
        for where in (plan.checkpoint_in, plan.out / "model")
    )
    moved = sum(int((after[name] != value).sum()) for name, value in before.items())
    return moved / sum(value.numel() for value in before.values())


@pytest.mark.parametrize(
    ("kind", "changes"), [("sft", {"epochs": 5}), ("grpo", {"steps": 5, "questions_per_step": 6, "micro_batch": 24})]
)
def test_small_updates_are_kept_under_bfloat16_compute(plan, kind, changes):
    made = plan(kind, **changes)
    run(made)
    assert any(line["grad_norm"] > 0 for line in curves(made))
    assert changed(made) > 0.95


def test_bfloat16_computes_in_bfloat16_and_learns_what_float32_learns(plan, monkeypatch):
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
        made = plan("grpo", compute_dtype, steps=1, questions_per_step=6, micro_batch=24)
        run(made)
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


def test_a_base_under_adapters_is_held_in_what_is_computed_in(taught, recipe):
    model = recipe.model.model_copy(update={"compute_dtype": "bfloat16"})
    assert load_to_train(taught, model)[0].dtype == torch.float32
    adapted = model.model_copy(update={"lora": Lora(rank=4, alpha=8)})
    assert load_to_train(taught, adapted)[0].dtype == torch.bfloat16


def test_deepspeed_without_float32_weights_is_refused(plan, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"bf16": {"enabled": True, trainer.COARSE_MASTERS: True}}))
    made = plan("sft")
    hardware = Hardware(deepspeed=str(path))
    made = made.model_copy(update={"recipe": made.recipe.model_copy(update={"hardware": hardware})})
    with pytest.raises(RecipeError, match="rounds small updates away"):
        trainer.deepspeed_file(made)
