"""GRPO as a whole: a real child process, real SQL, a model that has learned nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from pipelines.core.errors import RecipeError
from pipelines.core.types import write_jsonl
from pipelines.recipe import recipes
from pipelines.recipe.config import Grpo, Recipe, Rollout, Sampling
from pipelines.rollout.policies import making
from pipelines.training import grpo, launch, model
from pipelines.training.plan import Plan
from pipelines.training.rollouts import served_policy


@pytest.fixture
def plan(tmp_path, recipe, examples, checkpoint) -> Plan:
    write_jsonl(tmp_path / "examples.jsonl", examples)
    return Plan(
        kind="grpo",
        recipe=recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"held_out_steps": 2})}),
        checkpoint_in=str(checkpoint),
        data=tmp_path / "examples.jsonl",
        held_out=tmp_path / "examples.jsonl",
        out=tmp_path / "run",
    )


def test_a_run_says_what_one_watches(plan):
    events = []
    launch.train(plan, plan.out, events.append)
    curves = [json.loads(line) for line in (plan.out / "curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curves] == [1, 2, 3]
    assert [line.get("ex_held_out") for line in curves] == [0.0, None, 0.0]  # it has learned nothing
    assert all(line.get("drift_max", 0.0) < 1e-3 for line in curves)
    timing = [json.loads(line) for line in (plan.out / "timing.jsonl").read_text().splitlines()]
    tokens = [round(line["tokens"] * 8) for line in curves]  # 2 questions of 4 episodes
    assert [line["sampled_tokens"] for line in timing] == tokens
    assert all(line["computed_tokens"] <= line["trained_tokens"] for line in timing if line["trained_tokens"])
    assert all(line["sampled_per_s"] > 0 and 0 <= line["idle"] < 1 for line in timing)
    assert [line.get("turns_held_out") is None for line in curves] == [False, True, False]
    assert [line.get("questions_held_out", 0) > 0 for line in curves] == [True, False, True]
    assert all(line["pass_at_group"] >= line["ex"] and line["reasoning_chars"] >= 0 for line in curves)


def bytes_kept(network, tokens: int) -> int:
    """What the forward of one row keeps for its backward, as TRL computes it: logits are never whole."""
    add_fused_lm_head(network, outputs=("log_probs", "entropy"))
    weights = {value.untyped_storage().data_ptr() for value in network.parameters()}
    kept = {}

    def keep(value):
        kept[value.untyped_storage().data_ptr()] = value  # held, so that no address is used twice
        return value

    ids = torch.arange(tokens)[None] % network.config.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        out = network(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
    assert out.log_probs.requires_grad
    return sum(value.untyped_storage().nbytes() for address, value in kept.items() if address not in weights)


def test_a_micro_batch_of_the_tiny_scale_fits_a_small_machine(tmp_path):
    """A micro-batch keeps its activations until its backward: with prompts of real schemas every row may be full."""
    tiny = recipes.load("sql_trail", ["include=scales/tiny"])
    model.make_tiny(tiny.model, ["SELECT name FROM singer"], (), tmp_path / "model", seed=0)
    network, _ = model.load_to_train(tmp_path / "model", tiny.model)
    plan = Plan(kind="grpo", recipe=tiny, checkpoint_in="model", data=tmp_path, out=tmp_path)
    rows = grpo.arguments(plan, 1000).per_device_train_batch_size
    assert rows * bytes_kept(network, tiny.grpo.sampling.episode_tokens) < 1.2e9


@pytest.mark.parametrize("reshaped", [Sampling(temperature=0.6), Sampling(top_p=0.8)])
def test_a_server_that_does_not_tell_what_it_draws_is_refused(monkeypatch, tmp_path, reshaped):
    """vLLM tells log-probabilities before temperature and top-p, unless it is started to do otherwise."""
    server = SimpleNamespace(follow=lambda: None, tells_what_it_draws=lambda: False)
    monkeypatch.setattr(making, "policy", lambda *_: server)

    def plan(**changes):
        section = Grpo(sampling=reshaped, **changes)
        recipe = Recipe(name="served", grpo=section, rollout=Rollout(policy="vllm"))
        return Plan(kind="grpo", recipe=recipe, checkpoint_in="model", data=tmp_path, out=tmp_path)

    with pytest.raises(RecipeError, match="processed_logprobs"):
        served_policy(plan())
    assert served_policy(plan(importance_cap=None)) is server


@pytest.mark.parametrize("section", [{"grpo": {"loss": "bnpo"}}, {"hardware": {"deepspeed": "zero2"}}])
def test_micro_batches_that_cannot_be_cut_are_refused(recipe, section):
    (name, update), *_ = section.items()
    changes = {"hardware": recipe.hardware.model_copy(update={"micro_tokens": 100})}
    changes[name] = changes.get(name, getattr(recipe, name)).model_copy(update=update)
    with pytest.raises(RecipeError, match=r"micro_tokens cuts .* that grpo\.loss=bnpo averages over"):
        grpo._check(recipe.model_copy(update=changes))
