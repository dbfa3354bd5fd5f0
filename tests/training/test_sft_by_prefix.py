"""SFT on samples grouped by prefix: the loss and gradients of separate rows, with each prefix computed once."""

import copy
import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl.trainer.utils import add_fused_lm_head

from pipelines.core.errors import RecipeError
from pipelines.training import packing
from pipelines.training.samples import IGNORED, Sample, order_by_group, prefix_groups

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
INSTRUCTIONS = [3, 4, 5, 6]
SHOP = [*INSTRUCTIONS, 10, 11, 12, 13, 14, 15]
ZOO = [*INSTRUCTIONS, 20, 21, 22, 23, 24, 25]


def made(schema, question, *turns):
    """A sample of a prompt and of turns, each the agent's tokens and the observation behind them."""
    ids, mask = [*schema, *question], [0] * (len(schema) + len(question))
    for spoken, heard in turns:
        ids += [*spoken, *heard]
        mask += [1] * len(spoken) + [0] * len(heard)
    labels = [token if own else IGNORED for token, own in zip(ids, mask, strict=True)]
    return Sample(tuple(ids), tuple(labels), tuple(mask), ())


SAMPLES = [
    made(SHOP, [30], ([40, 41], [50]), ([42], [])),
    made(ZOO, [31], ([43], [])),
    made(SHOP, [32, 33], ([44, 45, 46], [])),
    made(SHOP, [30], ([40, 41], [50]), ([47], [])),  # the same question and first turn as the first sample
    made(ZOO, [34, 35], ([48, 49], [])),
]


def batch(samples):
    width = max(len(sample.input_ids) for sample in samples)

    def padded(rows, filler):
        return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])

    return {
        "input_ids": padded([sample.input_ids for sample in samples], 0),
        "labels": padded([sample.labels for sample in samples], IGNORED),
        "attention_mask": padded([[1] * len(sample.input_ids) for sample in samples], 0),
    }


@pytest.fixture
def network():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=60, **SIZES)).train()


def by_hand(network, samples):
    """The sum of the agent's tokens' losses, one sample after the other."""
    total = torch.zeros(())
    for sample in samples:
        logits = network(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return total


def test_loss_and_gradients_are_those_of_separate_rows(network):
    """Two samples share a first turn: its tokens are computed once, and count in both."""
    plain = copy.deepcopy(network)
    expected = by_hand(plain, SAMPLES)
    expected.backward()

    add_fused_lm_head(network, outputs=("log_probs", "entropy", "is_top1"))
    packing.use_packed_attention(network)
    rows = packing.PackedRowsModel(network)
    output = rows(**batch(SAMPLES))
    loss = -output.log_probs.sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(network.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5 * theirs.grad.abs().max().item() + 1e-7)
    assert output.label_mask.sum() == 12  # the agent's tokens: 3 + 1 + 3 + 3 + 2
    # A row's last token is computed nowhere, and the last token that it shares with the row before is computed again:
    # 14 of the first sample, 1 of its other second turn, 5 of the shop's other question; 8 and 4 of the zoo.
    assert rows.computed == 14 + 1 + 5 + 8 + 4


def test_prompts_of_one_schema_are_one_group():
    """The instructions alone, which all prompts share, make no group."""
    groups = prefix_groups(SAMPLES)
    assert groups[0] == groups[2] == groups[3]
    assert groups[1] == groups[4] != groups[0]
    assert prefix_groups(SAMPLES[:1]) == [0]


def test_runs_hold_samples_of_one_group_and_every_sample_once():
    """Seven and five samples in runs of three: two and one whole runs, and the rest of both, 1 + 2, together."""
    groups = [0] * 7 + [1] * 5
    order = order_by_group(groups, 3, 12, seed=0)
    assert sorted(order) == list(range(12))
    kinds = [{groups[index] for index in order[start : start + 3]} for start in range(0, 12, 3)]
    assert sorted(map(len, kinds)) == [1, 1, 1, 2]
    assert order == order_by_group(groups, 3, 12, seed=0)
    assert order != order_by_group(groups, 3, 12, seed=1)
    twice = order_by_group(groups, 3, 24, seed=0)
    assert {twice.count(index) for index in range(12)} == {2}


def cut(run, micro_tokens):
    """A plan of the same run whose micro-batches are cut into parts of so many tokens."""
    settings = run.recipe.hardware.model_copy(update={"micro_tokens": micro_tokens})
    return run.model_copy(update={"recipe": run.recipe.model_copy(update={"hardware": settings})})


@pytest.mark.parametrize("micro_tokens", [None, 150])
def test_a_run_by_prefix_learns_what_a_run_by_length_learns(plan, train, micro_tokens):
    """All six samples are one batch, and so each step's loss is the same, whatever stands in a micro-batch."""

    def losses(group_by, micro_tokens=None):
        run = plan("sft", batch=6, micro_batch=6, epochs=3, group_by=group_by)
        trainer = train(cut(run, micro_tokens))
        assert trainer.packs is (group_by == "prefix")
        history = [line for line in trainer.state.log_history if "loss" in line]
        return [(line["loss"], line["grad_norm"]) for line in history]

    expected = losses("length")
    got = losses("prefix", micro_tokens=micro_tokens)
    assert len(got) == 3
    for ours, theirs in zip(got, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_model_that_cannot_be_packed_has_its_micro_batches_cut_too(plan, train, monkeypatch):
    """As one with windows: parts of 150 tokens, or of a row, with the losses of whole micro-batches."""
    monkeypatch.setattr(packing, "supports_packing", lambda network: False)
    losses = {}
    for micro_tokens in (None, 150):
        run = plan("sft", f"of-{micro_tokens}", batch=6, micro_batch=6, epochs=2, group_by="prefix")
        trainer = train(cut(run, micro_tokens))
        losses[micro_tokens] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    micro_batch = next(iter(trainer.get_train_dataloader()))
    parts = trainer._split_micro_batch(micro_batch)
    assert len(parts) > 1
    for part in parts:
        rows, width = part["attention_mask"].shape
        assert rows == 1 or part["attention_mask"].sum() - rows <= 150  # a row's last token is computed nowhere
        assert width == micro_batch["attention_mask"].shape[1]
    assert len(losses[150]) == 2
    assert losses[150] == pytest.approx(losses[None], rel=1e-4)


@pytest.fixture
def experts(plan, checkpoint, tmp_path):
    """A plan of SFT by prefix of a small mixture of experts, whose library balances them by a loss of its own."""
    folder = tmp_path / "experts"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.save_pretrained(folder)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    shape = Qwen3MoeConfig(vocab_size=len(tokenizer), **SIZES, **experts)
    Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    run = plan("sft", batch=6, micro_batch=6, epochs=1, group_by="prefix")
    return run.model_copy(update={"checkpoint_in": str(folder)})


def test_a_mixture_of_experts_is_trained_on_whole_rows(experts, train):
    """Its balancing loss is one of the rows as they are."""
    trainer = train(experts)
    assert trainer.aux_loss_enabled
    assert not trainer.packs
    (loss,) = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert 0 < loss < 10


def test_micro_tokens_are_refused_for_a_mixture_of_experts(experts, train):
    """Each part would have a balancing loss of its own, and a micro-batch as many as it has parts."""
    run = cut(experts, 150)
    with pytest.raises(
        RecipeError, match=r"hardware\.micro_tokens cuts micro-batches, and this model balances its exp"
    ):
        train(run)


def test_computed_tokens_are_recorded(plan, train):
    """The six prompts share the schema: fewer tokens go through the network than the samples have."""
    trainer = train(plan("sft", batch=6, micro_batch=6, epochs=1, group_by="prefix"))
    (line,) = (trainer.plan.out / "timing.jsonl").read_text(encoding="utf-8").splitlines()
    spent = json.loads(line)
    assert 0 < spent["computed_tokens"] < spent["trained_tokens"]
