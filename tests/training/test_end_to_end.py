"""The whole of training: SFT teaches the protocol, GRPO raises what is paid, and an export has the same turns."""

import ast
import importlib.util
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from pipelines.core.errors import RecipeError
from pipelines.core.types import write_jsonl
from pipelines.export import folder
from pipelines.export.cards import lineage_of
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import write_card
from pipelines.recipe.config import Grpo, Hardware, Lora, Optimizer, Recipe, RewardTerm, Rollout, Sampling
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.model_loading import load
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.factories import local_policy
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect
from pipelines.training import grpo, launch, model
from pipelines.training.plan import Plan
from pipelines.training.rollouts import server_policy

# DeepSpeed is a GPU worker's, and need not be where the tests are.
HERE = sys.executable if importlib.util.find_spec("deepspeed") else ""
DEEPSPEED = os.environ.get("SQLTRAIN_DEEPSPEED_PYTHON", HERE)
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_grpo_raises_the_reward(plan, train, curves):
    optimizer = Optimizer(lr=1.5e-3, schedule="constant", warmup_ratio=0.0)
    made = plan("grpo", steps=40, questions_per_step=6, micro_batch=24, save_steps=100, optimizer=optimizer)
    train(made)
    assert all(line.get("drift_max", 0.0) < 1e-3 for line in curves(made))
    rewards = [line["reward"] for line in curves(made)]
    # Ten steps are 240 episodes, so their mean has a standard error of some 0.03: twice that of the difference is 0.09.
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.09


def test_sft_tells_how_much_of_its_batches_is_padding(plan, train):
    events = []
    trainer = train(plan("sft", batch=6, micro_batch=6, epochs=1), events.append)
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    share = 1 - sum(lengths) / (6 * max(lengths))  # one batch holds all six
    assert share > 0.01
    [note] = [event["text"] for event in events if event["event"] == "note"]
    assert note == f"{100 * share:.1f}% of the tokens of its batches are padding"


def test_a_dual_track_runs_on_two_rewards(plan, train, curves, recipe):
    """The same episodes at first, with the schema track's loss added and without; without a scout it is refused."""
    rewards = (RewardTerm(term="exec"), RewardTerm(term="format"), RewardTerm(term="schema", track="schema"))
    scout = {"rewards": rewards, "protocol": recipe.protocol.model_copy(update={"options": {"scout": True}})}
    first = []
    for share in (0.25, 0.0):
        made = plan("grpo", f"share-{share}", sections=scout, steps=1, lambda_schema=share)
        train(made)
        first.append(curves(made)[0])
        assert {"term_exec", "term_schema"} <= first[-1].keys()
    assert first[0]["term_schema"] == first[1]["term_schema"]
    assert first[0]["grad_norm"] != first[1]["grad_norm"]
    with pytest.raises(RecipeError, match="no turn of the protocol react proposes a schema"):
        train(plan("grpo", "bare", sections={"rewards": rewards}, lambda_schema=0.25))


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_adapters_train_and_end_up_in_a_plain_model(plan, train, recipe, kind):
    adapted = recipe.model.model_copy(update={"lora": Lora(rank=4, alpha=8)})
    steps = {"epochs": 3.0, "optimizer": Optimizer(lr=1e-2)} if kind == "sft" else {"steps": 3, "save_steps": 1}
    made = plan(kind, sections={"model": adapted}, **steps)
    train(made)
    before, _ = load(made.checkpoint_in, recipe.model)
    after, _ = load(made.out / "model", recipe.model)
    changed = {name for name, value in after.state_dict().items() if not value.equal(before.state_dict()[name])}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first run compiles an operation of DeepSpeed's
@pytest.mark.parametrize("deepspeed", [None, "zero2", "zero3"])
@pytest.mark.parametrize(("kind", "micro_tokens"), [("sft", None), ("grpo", None), ("grpo", 100)])
def test_two_processes_have_the_losses_of_one(plan, curves, kind, micro_tokens, deepspeed):
    """Over gloo; ZeRO shares out the optimiser's state and the gradients (2) and the weights too (3), also of
    micro-batches that are cut into parts.
    """
    if deepspeed and not DEEPSPEED:
        pytest.skip("neither this Python nor SQLTRAIN_DEEPSPEED_PYTHON has DeepSpeed")
    torchrun = (DEEPSPEED if deepspeed else sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    command = (*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
    hardware = {"hardware": Hardware(threads=1, launch=command, deepspeed=deepspeed, micro_tokens=micro_tokens)}
    settings = {"epochs": 6} if kind == "sft" else {"steps": 4, "questions_per_step": 4, "micro_batch": 4}
    settings["optimizer"] = Optimizer(lr=1e-3, schedule="constant", warmup_ratio=0.0)  # DeepSpeed has no use for Muon
    alone, shared = plan(kind, "one", **settings), plan(kind, "two", sections=hardware, **settings)
    for made in (alone, shared):
        launch.train_in_child(made, made.out, lambda event: None)
    one, two = (
        {name: [line[name] for line in curves(made)] for name in ("loss", "grad_norm")} for made in (alone, shared)
    )
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3, abs=1e-5)
    assert max(one["grad_norm"]) > 0  # else the losses would be equal without any learning


@pytest.fixture
def measured(tmp_path, recipe, examples, checkpoint):
    write_jsonl(tmp_path / "examples.jsonl", examples)
    return Plan(
        kind="grpo",
        recipe=recipe.model_copy(update={"grpo": recipe.grpo.model_copy(update={"held_out_steps": 2})}),
        checkpoint_in=str(checkpoint),
        data=tmp_path / "examples.jsonl",
        held_out=tmp_path / "examples.jsonl",
        out=tmp_path / "run",
    )


def test_a_run_says_what_one_watches(measured, curves):
    launch.train_in_child(measured, measured.out, lambda event: None)
    curves, plan = curves(measured), measured
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


def bytes_kept(network, tokens):
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
    server = SimpleNamespace(follow_weights=lambda: None, has_sampling_logprobs=lambda: False)
    monkeypatch.setattr(factories, "policy", lambda *_: server)

    def plan(**changes):
        recipe = Recipe(name="served", grpo=Grpo(sampling=reshaped, **changes), rollout=Rollout(policy="vllm"))
        return Plan(kind="grpo", recipe=recipe, checkpoint_in="model", data=tmp_path, out=tmp_path)

    with pytest.raises(RecipeError, match="processed_logprobs"):
        server_policy(plan())
    assert server_policy(plan(importance_cap=None)) is server


def test_plain_transformers_gets_the_same_greedy_turns(tmp_path, taught, recipe, examples):
    asked = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"sampling": recipe.grpo.sampling})}
    )
    model, out = tmp_path / "model", tmp_path / "agent"
    shutil.copytree(taught, model)
    write_card(model, asked, "sft", {})
    folder.write(lineage_of(model), "hub-folder", out)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)
    (code,) = re.findall(r"````python\n(.*?)\n````", (out / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    tree = ast.parse(code)
    assert {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names} == {"torch"}
    assert {node.module for node in tree.body if isinstance(node, ast.ImportFrom)} == {"transformers"}
    room = {}
    exec(code.replace('FOLDER = "agent"', f"FOLDER = {str(out)!r}"), room)
    sampling = recipe.grpo.sampling.model_copy(update={"temperature": 0.0})
    with SqlEngine(Limits(timeout_s=20)) as sql:
        policy, protocol = local_policy(str(model), recipe), build_protocol(recipe.protocol)
        engine = RolloutEngine(policy, protocol, sql, sampling, 3, introspect)
        episodes = engine.run([EpisodeRequest(example, 0, 0) for example in examples])
    assert sum(len(episode.turns) for episode in episodes) > len(episodes)  # they look before they answer
    for episode in episodes:
        messages = [{"role": role, "content": said} for role, said in episode.prompt]
        for turn in episode.turns:
            assert room["turn"](messages) == turn.text
            messages += [
                {"role": "assistant", "content": turn.text},
                {"role": "user", "content": str(turn.observation)},
            ]
