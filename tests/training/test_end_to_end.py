"""The whole of training on a world of six questions: SFT teaches the protocol, GRPO raises what is paid."""

import importlib.util
import json
import os
import sys

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.types import Example, Trajectory, write_jsonl
from pipelines.recipe.config import Hardware, Lora, Optimizer, RewardTerm
from pipelines.rollout.model_loading import load
from pipelines.training import grpo, launch, samples, sft
from pipelines.training.plan import Plan

# DeepSpeed is a GPU worker's, and need not be where the tests are.
HERE = sys.executable if importlib.util.find_spec("deepspeed") else ""
DEEPSPEED = os.environ.get("SQLTRAIN_DEEPSPEED_PYTHON", HERE)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def plan(tmp_path, recipe, examples, trajectories, checkpoint, taught, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_jsonl(tmp_path / "examples.jsonl", examples)
    write_jsonl(tmp_path / "trajectories.jsonl", trajectories)

    def make(kind, name="run", hardware=None, model=None, rewards=None, protocol=None, **changes):
        section = getattr(recipe, kind).model_copy(update=changes)
        updates = {kind: section, "hardware": hardware or recipe.hardware, "model": model or recipe.model}
        updates["protocol"] = protocol or recipe.protocol
        out = tmp_path / name
        out.mkdir()
        return Plan(
            kind=kind,
            recipe=recipe.model_copy(update=updates | ({"rewards": rewards} if rewards else {})),
            checkpoint_in=str(checkpoint if kind == "sft" else taught),
            data=tmp_path / ("trajectories.jsonl" if kind == "sft" else "examples.jsonl"),
            out=out,
        )

    return make


def curves(plan):
    return [json.loads(line) for line in (plan.out / "curves.jsonl").read_text().splitlines()]


def silent(event):
    pass


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_grpo_raises_the_reward(plan):
    optimizer = Optimizer(lr=1.5e-3, schedule="constant", warmup_ratio=0.0)
    made = plan("grpo", steps=40, questions_per_step=6, micro_batch=24, save_steps=100, optimizer=optimizer)
    grpo.train(made, samples.records(made.data, Example), silent)
    assert all(line.get("drift_max", 0.0) < 1e-3 for line in curves(made))
    rewards = [line["reward"] for line in curves(made)]
    # Ten steps are 240 episodes, so their mean has a standard error of some 0.03: twice that of the difference is 0.09.
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.09


def test_sft_tells_how_much_of_its_batches_is_padding(plan, trajectories):
    made = plan("sft", batch=6, micro_batch=6, epochs=1)
    events = []
    trainer = sft.train(made, trajectories, events.append)
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    share = 1 - sum(lengths) / (6 * max(lengths))  # one batch holds all six
    assert share > 0.01
    [note] = [event["text"] for event in events if event["event"] == "note"]
    assert note == f"{100 * share:.1f}% of the tokens of its batches are padding"


def test_a_dual_track_runs_on_two_rewards(plan, recipe):
    """The same episodes at first, with the schema track's loss added and without; without a scout it is refused."""
    rewards = (RewardTerm(term="exec"), RewardTerm(term="format"), RewardTerm(term="schema", track="schema"))
    scout = recipe.protocol.model_copy(update={"options": {"scout": True}})
    first = []
    for share in (0.25, 0.0):
        made = plan("grpo", f"share-{share}", steps=1, lambda_schema=share, rewards=rewards, protocol=scout)
        grpo.train(made, samples.records(made.data, Example), silent)
        first.append(curves(made)[0])
        assert {"term_exec", "term_schema"} <= first[-1].keys()
    assert first[0]["term_schema"] == first[1]["term_schema"]
    assert first[0]["grad_norm"] != first[1]["grad_norm"]
    bare = plan("grpo", "bare", lambda_schema=0.25, rewards=rewards)
    with pytest.raises(RecipeError, match="no turn of the protocol react proposes a schema"):
        grpo.train(bare, samples.records(bare.data, Example), silent)


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_adapters_train_and_end_up_in_a_plain_model(plan, recipe, kind):
    adapted = recipe.model.model_copy(update={"lora": Lora(rank=4, alpha=8)})
    steps = {"epochs": 3.0, "optimizer": Optimizer(lr=1e-2)} if kind == "sft" else {"steps": 3, "save_steps": 1}
    made = plan(kind, model=adapted, **steps)
    module, of = (sft, Trajectory) if kind == "sft" else (grpo, Example)
    module.train(made, samples.records(made.data, of), silent)
    before, _ = load(made.checkpoint_in, recipe.model)
    after, _ = load(made.out / "model", recipe.model)
    changed = {name for name, value in after.state_dict().items() if not value.equal(before.state_dict()[name])}
    assert "model.layers.0.mlp.up_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed


def torchrun(python, **changes):
    """Two processes of this machine, over gloo."""
    launch = (python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d")
    return Hardware(threads=1, launch=(*launch, "--rdzv-endpoint=127.0.0.1:0"), **changes)


def numbers_of_one_and_two(plan, kind, two):
    """Losses and gradient norms of the same training by one process and by two."""
    adamw = Optimizer(lr=1e-3, schedule="constant", warmup_ratio=0.0)  # DeepSpeed has no use for Muon
    settings = {"epochs": 6} if kind == "sft" else {"steps": 4, "questions_per_step": 4}
    alone = plan(kind, "one", optimizer=adamw, **settings)
    shared = plan(kind, "two", hardware=two, optimizer=adamw, **settings)
    for made in (alone, shared):
        launch.train(made, made.out, silent)
    return [{name: [line[name] for line in curves(made)] for name in ("loss", "grad_norm")} for made in (alone, shared)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_two_processes_have_the_losses_of_one(plan, kind):
    one, two = numbers_of_one_and_two(plan, kind, torchrun(sys.executable))
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3, abs=1e-5)
    assert max(one["grad_norm"]) > 0  # else the losses would be equal without any learning


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first run compiles an operation of DeepSpeed's
@pytest.mark.skipif(not DEEPSPEED, reason="neither this Python nor SQLTRAIN_DEEPSPEED_PYTHON has DeepSpeed")
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_two_processes_with_deepspeed_have_the_losses_of_one(plan, kind, stage):
    """ZeRO shares out the optimiser's state and the gradients (2) and the weights too (3): no number changes."""
    one, two = numbers_of_one_and_two(plan, kind, torchrun(DEEPSPEED, deepspeed=stage))
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3, abs=1e-5)
    assert max(one["grad_norm"]) > 0
