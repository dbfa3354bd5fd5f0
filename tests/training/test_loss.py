"""The loss and its gradient by formulas written out by hand, and against TRL's own trainer on the same batch."""

import copy
import math
import statistics

import pytest
import torch
from peft import get_peft_model
from trl.trainer.grpo_trainer import GRPOTrainer

from pipelines.core.registry import LOSSES
from pipelines.recipe.config import Grpo, Hardware, Lora, Optimizer, Sampling
from pipelines.recipe.plugins import load_plugins
from pipelines.rollout.model_loading import load
from pipelines.training.advantages import estimate_advantages, turn_advantages
from pipelines.training.generation_log import StepLog
from pipelines.training.grpo import arguments, questions_in_order
from pipelines.training.grpo_trainer import GrpoTrainer, reward
from pipelines.training.losses import TrackBatch, clipped_objective, ratios, sampler_weights
from pipelines.training.micro_batches import prompt_and_completion, rows_with_gradient, split_by_tokens
from pipelines.training.model import adapters
from pipelines.training.muon import MuonAdamW
from pipelines.training.plan import Plan

ROWS, PROMPT, COMPLETION = 4, 6, 10
LOW, HIGH = 0.2, 0.28


@pytest.fixture
def make(tmp_path, recipe, checkpoint, examples, monkeypatch):
    """A trainer that never rolls out: only its loss is looked at. `plain` makes TRL's own."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    network, tokenizer = load(checkpoint, recipe.model)

    def trainer(plain=False, micro_tokens=None, lora=None, **changes):
        settings = {
            "group": 2,
            "questions_per_step": 2,
            "micro_batch": 4,
            "clip_low": LOW,
            "clip_high": HIGH,
            "optimizer": Optimizer(lr=1e-3),
            **changes,
        }
        section = Grpo(**settings, steps=1, sampling=Sampling(episode_tokens=50))
        plan = Plan(
            kind="grpo",
            recipe=recipe.model_copy(update={"grpo": section, "hardware": Hardware(micro_tokens=micro_tokens)}),
            checkpoint_in=str(checkpoint),
            data=tmp_path / "unused",
            out=tmp_path,
        )
        common = {
            "model": copy.deepcopy(network),
            "processing_class": tokenizer,
            "train_dataset": questions_in_order(plan, examples),
            "args": arguments(plan, 6),
        }
        if plain:
            made = GRPOTrainer(reward_funcs=[reward], **common)
        else:
            made = GrpoTrainer(plan=plan, rollouts=None, step_log=StepLog(), peft_config=adapters(lora), **common)
        made.current_gradient_accumulation_steps = 1
        made.model.train()
        return made

    return trainer


@pytest.fixture
def batch():
    """Prompts of 6, 4, 4, 6 tokens and completions of 10, 7, 9, 4, some of them observations.

    Two rows share each prompt, and of those in the middle also the first three tokens after it.
    """
    generator = torch.Generator().manual_seed(0)
    prompt_mask = torch.tensor([[0] * (PROMPT - n) + [1] * n for n in (6, 4, 4, 6)])
    completion_mask = torch.tensor([[1] * n + [0] * (COMPLETION - n) for n in (10, 7, 9, 4)])
    tool_mask = torch.tensor([[1, 1, 1, 0, 0, 0, 1, 1, 1, 1]] * ROWS)
    schema_mask = tool_mask * torch.tensor([[1, 1, 1] + [0] * 7] * ROWS) * completion_mask
    prompts, completions = (torch.randint(5, 300, (ROWS, n), generator=generator) for n in (PROMPT, COMPLETION))
    completions[2, :3] = completions[1, :3]
    return {
        "prompt_ids": prompts[[0, 1, 1, 0]] * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": completions * completion_mask,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.1]),
        "num_items_in_batch": (completion_mask * tool_mask).sum(),
        "schema_advantages": torch.tensor([-0.9, 0.9, 0.5, -0.5]),
        "schema_mask": schema_mask,
        "schema_items": schema_mask.sum(),
    }


def log_probabilities(network, batch):
    """(B, C) by the book: logits, log-softmax, gather, on rows without padding between prompt and completion."""
    rows = []
    for row in range(ROWS):
        prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        ids = torch.cat([prompt, batch["completion_ids"][row][batch["completion_mask"][row].bool()]])
        logits = network(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, len(prompt) - 1 : -1]
        values = logits.log_softmax(-1).gather(1, ids[len(prompt) :].unsqueeze(1)).squeeze(1)
        rows.append(torch.cat([values, values.new_zeros(COMPLETION - len(values))]))
    return torch.stack(rows)


def drifted(network, batch):
    """Old log-probabilities far enough from today's that many ratios are clipped, on both sides."""
    noise = torch.randn(ROWS, COMPLETION, generator=torch.Generator().manual_seed(1)) * 0.4
    return (log_probabilities(network, batch).detach() + noise) * batch["completion_mask"]


def without_schema(batch):
    return {key: value for key, value in batch.items() if not key.startswith("schema")}


def gradients(network):
    return torch.cat([value.grad.flatten() for value in network.parameters() if value.requires_grad])


def agree(network, other):
    expected = gradients(other)
    return (gradients(network) - expected).norm() / expected.norm() < 1e-5


def test_the_schema_track_counts_its_tokens_over_all_processes(make, batch, monkeypatch):
    """Gradients are averaged over processes, so with two of them each has twice its part of the mean."""
    trainer = make(lambda_schema=0.25)
    batch["schema_advantages"] = batch["schema_advantages"].abs()
    logps = log_probabilities(trainer.model, batch).detach()
    alone = trainer._schema_loss(logps, batch).item()
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda _: 2))
    assert trainer._schema_loss(logps, batch).item() == pytest.approx(2 * alone)
    assert alone != 0.0


def test_muon_is_grpos_optimiser_too_where_the_recipe_says_so(make):
    optimizer = make(optimizer=Optimizer(kind="muon", lr=0.02, options={"lr_rest": 3e-3})).create_optimizer()
    assert isinstance(optimizer, MuonAdamW)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-3]


def test_lambda_0_is_plain_grpo_bit_for_bit(make, batch):
    none, plain = make(lambda_schema=0.0), make()
    none._compute_loss(none.model, dict(batch)).backward()
    plain._compute_loss(plain.model, without_schema(batch)).backward()
    assert torch.equal(gradients(none.model), gradients(plain.model))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.filterwarnings("ignore")
def test_every_loss_is_trls_own(make, batch, loss, level):
    """Rows without padding, rows without weight left out: the numbers of TRL's trainer all the same."""
    ours, plain = make(loss=loss, level=level), make(plain=True, loss=loss, level=level)
    batch = without_schema(batch)
    batch["old_per_token_logps"] = drifted(plain.model, batch)
    batch["advantages"][2] = 0.0
    batch["tool_mask"][3] = 0
    losses = [trainer._compute_loss(trainer.model, dict(batch)) for trainer in (ours, plain)]
    for value in losses:
        value.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert agree(ours.model, plain.model)


OWN_LOSSES = """
from pipelines.core.registry import loss
from pipelines.training.losses import clipped_objective, mean_over_generation

@loss("own_dapo")
def own_dapo(track):
    return mean_over_generation(clipped_objective(track), track)

@loss("squared")
def squared(track):
    return mean_over_generation(track.advantages * track.logps**2, track)
"""


@pytest.fixture(scope="module")
def own_losses(tmp_path_factory):
    file = tmp_path_factory.mktemp("package") / "own_losses.py"
    file.write_text(OWN_LOSSES)
    load_plugins([str(file)])


@pytest.mark.parametrize(("level", "micro_tokens"), [("token", None), ("sequence", 20)])
@pytest.mark.filterwarnings("ignore")
def test_a_packages_loss_has_the_gradient_of_trls_that_says_the_same(make, batch, own_losses, level, micro_tokens):
    """With both tracks and with the penalty on leaving the reference, which stays TRL's."""
    settings = {"level": level, "micro_tokens": micro_tokens, "lambda_schema": 0.25, "beta": 0.5}
    own, trls = make(loss="own_dapo", **settings), make(loss="dapo", **settings)
    old = drifted(trls.model, batch)
    batch["old_per_token_logps"] = old
    batch["ref_per_token_logps"] = old - 0.1 * batch["completion_mask"]
    losses = [trainer.compute_loss(trainer.model, dict(batch)) for trainer in (own, trls)]
    for value in losses:
        value.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert agree(own.model, trls.model)


def test_a_packages_loss_is_what_its_function_says(make, batch, own_losses):
    trainer = make(loss="squared")
    logps = log_probabilities(trainer.model, batch).detach()
    mask = batch["completion_mask"] * batch["tool_mask"]
    expected = (batch["advantages"].unsqueeze(1) * logps**2 * mask).sum() / mask.sum()
    loss = trainer._compute_loss(trainer.model, without_schema(batch))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def own_advantages(rewards, baseline, scale):
    """Of each row, from the definitions."""
    groups = [rewards[:2], rewards[2:]]
    of = [groups[row // 2] for row in range(ROWS)]
    taken = {
        "group": lambda row: statistics.fmean(of[row]),
        "others": lambda row: sum(of[row]) - rewards[row],
        "batch": lambda row: statistics.fmean(rewards),
    }[baseline]
    centred = [rewards[row] - taken(row) for row in range(ROWS)]
    deviation = {"group": lambda row: statistics.stdev(of[row]), "batch": lambda row: statistics.stdev(centred)}
    return [value if scale == "none" else value / (deviation[scale](row) + 1e-4) for row, value in enumerate(centred)]


def own_loss(network, batch, old, advantages, mask, loss, level, longest, weights):
    """One track's loss, written from the papers: each episode by itself, without padding, in 64 bits."""
    logps, rows, counts = log_probabilities(network, batch), [], []
    for row in range(ROWS):
        there = mask[row].nonzero().flatten()
        advantage = torch.as_tensor(advantages[row]).double().expand(COMPLETION)[there] * weights[row, there]
        ours, log_ratio = logps[row, there], logps[row, there] - old[row, there].double()
        ratio = (log_ratio if level == "token" else log_ratio.mean()).exp()
        by_token = -torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        if loss == "cispo":
            by_token = -ratio.clamp(max=1 + HIGH).detach() * advantage * ours
        rows.append(by_token.sum())
        counts.append(len(there))
    if loss == "grpo":
        return sum(row / count for row, count in zip(rows, counts, strict=True)) / ROWS
    return sum(rows) / (ROWS * longest if loss == "dr_grpo" else sum(counts))


@pytest.mark.parametrize(
    ("loss", "level", "baseline", "scale", "more"),
    [
        ("grpo", "token", "group", "group", {}),
        ("dapo", "token", "group", "none", {}),
        ("dr_grpo", "token", "others", "none", {}),
        ("bnpo", "sequence", "group", "group", {}),
        ("cispo", "token", "batch", "batch", {}),
        ("grpo", "sequence", "group", "group", {"micro_tokens": 20}),  # in parts
        ("dapo", "sequence", "others", "none", {"micro_tokens": 20}),
        ("cispo", "sequence", "group", "none", {"staleness": 1}),  # a sampler that is behind
        ("dr_grpo", "sequence", "batch", "batch", {"staleness": 1, "micro_tokens": 20}),
        ("bnpo", "token", "group", "none", {"staleness": 1}),
        ("dapo", "token", "group", "group", {"lora": Lora(rank=4, alpha=8)}),
        ("dr_grpo", "token", "others", "none", {"credit": "turn", "micro_tokens": 20}),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_step_has_the_gradient_of_an_independent_computation(
    make, batch, checkpoint, recipe, loss, level, baseline, scale, more
):
    trainer = make(loss=loss, level=level, baseline=baseline, scale=scale, lambda_schema=0.25, **more)
    batch["schema_mask"][1, 1:] = 0  # its rows are not of one length either
    batch["schema_items"] = batch["schema_mask"].sum()
    rewards, schema_rewards = [1.0, 0.2, -0.3, 0.7], [0.0, 1.0, 0.5, 0.1]
    old = batch["old_per_token_logps"] = drifted(trainer.model, batch)
    batch["advantages"] = estimate_advantages(torch.tensor(rewards), 2, baseline, scale)
    batch["schema_advantages"] = estimate_advantages(torch.tensor(schema_rewards), 2, baseline, scale)
    advantages, own = own_advantages(rewards, baseline, scale), load(checkpoint, recipe.model)[0]
    weights = torch.ones(ROWS, COMPLETION).double()
    if "lora" in more:
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
        own = get_peft_model(own, adapters(more["lora"]))
        own.load_state_dict(trainer.model.state_dict())
    if "staleness" in more:
        gap = torch.tensor([0.3, -0.2, 1.0, 0, 0, 0, -0.5, 0.1, 0.2, 0.4])  # e^1 is over the cap
        batch["sampling_per_token_logps"] = (old - gap) * batch["completion_mask"]
        weights = (gap * batch["completion_mask"]).double().exp().clamp(max=2.0)
    if "credit" in more:  # the first turn has 3 tokens; what an episode earns from a turn on, less the other's
        paid = [[0.1, 1.0], [0.0, 0.2], [-0.1, 0.0], [0.3, 0.5]]
        turns = torch.tensor([0] * 3 + [1] * 7)
        batch["advantages"] = turn_advantages(torch.tensor(paid), 2)[:, turns]
        first, last = [1.1 - 0.2, 0.2 - 1.1, -0.1 - 0.8, 0.8 + 0.1], [1.0 - 0.2, 0.2 - 1.0, 0.0 - 0.5, 0.5 - 0.0]
        advantages = torch.tensor([first, last]).double().T[:, turns]
    trainer.compute_loss(trainer.model, dict(batch)).backward()

    own = own.double()
    common = {"loss": loss, "level": level, "longest": trainer.max_completion_length, "weights": weights}
    total = own_loss(own, batch, old, advantages, batch["completion_mask"] * batch["tool_mask"], **common)
    own_schema = own_advantages(schema_rewards, baseline, scale)
    (total + 0.25 * own_loss(own, batch, old, own_schema, batch["schema_mask"], **common)).backward()
    assert agree(trainer.model, own)


@pytest.mark.parametrize(("loss", "micro_tokens"), [("dapo", None), ("grpo", 20)])
@pytest.mark.filterwarnings("ignore")
def test_the_penalty_on_leaving_the_reference_is_trls_own(make, batch, loss, micro_tokens):
    """The reference is not the policy, and has the packed forward too; a row with an advantage of 0 is penalised."""
    ours, plain = make(loss=loss, beta=0.5, micro_tokens=micro_tokens), make(plain=True, loss=loss, beta=0.5)
    batch = without_schema(batch)
    batch["old_per_token_logps"] = drifted(plain.model, batch)
    batch["advantages"][2] = 0.0
    batch["tool_mask"][3] = 0
    row = [torch.cat([batch[f"{part}_{name}"] for part in ("prompt", "completion")], 1) for name in ("ids", "mask")]
    shapes, references, losses = [], [], []
    for trainer in (ours, plain):
        reference, generator = trainer.ref_model, torch.Generator().manual_seed(2)
        with torch.no_grad():
            for weight in reference.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator)
            reference.model.register_forward_pre_hook(
                lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
            )
            references.append(trainer._get_per_token_logps_and_entropies(reference, *row, COMPLETION)[0])
        losses.append(trainer.compute_loss(trainer.model, batch | {"ref_per_token_logps": references[-1]}))
        losses[-1].backward()
    # Rows 0 and 3 have 15 + 9 tokens, of which 5 are shared; rows 1 and 2 have 10 + 12, of which 6 are.
    *packed, padded = shapes
    assert sorted(packed) == ([(1, 35)] if micro_tokens is None else [(1, 16), (1, 19)])
    assert padded == (ROWS, PROMPT + COMPLETION)
    assert torch.allclose(references[0], references[1] * batch["completion_mask"], atol=1e-5)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert agree(ours.model, plain.model)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_parts_of_a_micro_batch_add_up_to_it(make, batch, loss):
    """Row 0 has 15 tokens to compute; rows 1 and 2 have 16 together, for they share 7; row 3 moves nothing."""
    whole, parted = (make(loss=loss, lambda_schema=0.25, micro_tokens=most) for most in (None, 20))
    batch["old_per_token_logps"] = drifted(whole.model, batch)
    batch["advantages"][3] = batch["schema_advantages"][3] = 0.0
    losses = [trainer.compute_loss(trainer.model, dict(batch)) for trainer in (whole, parted)]
    assert len(parted._metrics["train"]["entropy"]) == 2
    for value in losses:
        value.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    assert agree(parted.model, whole.model)


def test_a_process_with_fewer_parts_computes_empty_ones_beside_the_others(make, batch, monkeypatch):
    """Each backward waits for all processes; an empty part moves nothing."""
    trainer = make(micro_tokens=1000)
    monkeypatch.setattr(trainer, "max_over_ranks", lambda count: 3)
    parts = trainer._split_micro_batch(trainer.model, batch)
    assert [rows_with_gradient(part).tolist() for part in parts] == [[True] * ROWS, [False] * ROWS, [False] * ROWS]


def test_experts_balance_is_computed_by_trls_own_forward(make, batch, monkeypatch):
    """A packed forward would drop the balancing loss without a word."""
    asked = []

    def forward(self, model, input_ids, attention_mask, logits_to_keep, **more):
        asked.append(more["compute_aux_loss"])
        values = torch.zeros(len(input_ids), logits_to_keep)
        return values, values, torch.tensor(0.5)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", forward)
    trainer = make()
    ids, mask = prompt_and_completion(batch)
    *_, balance = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, COMPLETION, compute_aux_loss=True
    )
    assert balance == 0.5
    assert set(asked) == {True}


def test_rows_are_cut_into_parts_by_the_tokens_that_are_computed(batch):
    moves = torch.tensor([True, True, True, False])
    batch["prompt_ids"][1:3], batch["prompt_ids"][0] = 1, 2  # rows 1 and 2 come first
    most = 12 + 4  # row 2 without its last token, and of row 1, which is 11 tokens, what follows the 7 that they share

    def parts(*args):
        return [
            sorted(part.tolist())
            for part in split_by_tokens(*prompt_and_completion(batch), moves.nonzero().flatten(), *args)
        ]

    assert parts(most, True) == [[1, 2], [0]]
    assert parts(most - 1, True) == [[2], [1], [0]]
    assert parts(most, False) == [[2], [1], [0]]
    assert parts(1, True) == [[2], [1], [0]]  # a row that is too long is a part of its own
    assert parts(1000, True) == [[0, 1, 2]]
    moves[:] = False
    assert parts(1, True) == [[]]


def test_rows_that_cannot_move_the_policy_get_no_forward(make, batch):
    batch["advantages"][0] = 0.0
    del batch["schema_mask"]
    batch["tool_mask"][1] = 0
    assert rows_with_gradient(batch).tolist() == [False, False, True, True]
    assert rows_with_gradient(batch, beta=0.1).tolist() == [True, False, True, True]
    trainer, seen = make(), []
    forward = trainer.model.model.forward
    trainer.model.model.forward = lambda *args, **kwargs: (
        seen.append(kwargs["input_ids"].shape) or forward(*args, **kwargs)
    )
    trainer._compute_loss(trainer.model, dict(batch))
    assert seen == [(1, 21)]  # rows 2 and 3 without their last tokens, 4 + 8 and 6 + 3 of them


def test_rows_that_only_the_schema_track_moves_get_a_forward(make, batch):
    batch["advantages"] = torch.tensor([0.0, 0.0, 0.4, 0.0])
    batch["schema_advantages"] = torch.tensor([-0.9, 0.0, 0.0, 0.0])
    assert rows_with_gradient(batch).tolist() == [True, False, True, False]
    weighed = batch | {
        "advantages": batch["advantages"].unsqueeze(1) * torch.ones(ROWS, COMPLETION),
        "schema_advantages": batch["schema_advantages"].unsqueeze(1) * torch.ones(ROWS, COMPLETION),
    }
    assert rows_with_gradient(weighed).tolist() == [True, False, True, False]
    batch["schema_mask"][0] = 0
    assert rows_with_gradient(batch).tolist() == [False, False, True, False]


def test_a_row_that_gets_no_forward_cannot_overflow_against_its_old_log_probabilities(make, batch):
    """Its new log-probabilities are 0, and exp(0 + 120) is no number: such a token has weight 0, not NaN."""
    trainer = make(lambda_schema=0.25)
    batch["old_per_token_logps"] = log_probabilities(trainer.model, batch).detach()
    batch["advantages"][0] = batch["schema_advantages"][0] = 0.0
    batch["old_per_token_logps"][0] = -120.0
    loss = trainer._compute_loss(trainer.model, dict(batch))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(gradients(trainer.model)).all()


def test_a_row_that_teaches_the_schema_track_alone_is_corrected_for_its_sampler_too(make, batch):
    """The full track has left row 0 out; its schema tokens are weighed by min(pi / pi_sampler, cap) all the same."""
    trainer = make(lambda_schema=0.25, importance_cap=2.0, staleness=1)
    logps = log_probabilities(trainer.model, batch).detach()
    batch["tool_mask"][0] = 0
    batch["sampling_per_token_logps"] = logps - 3.0
    weights = trainer._sampler_weights(logps, batch)
    trained = torch.maximum(batch["completion_mask"] * batch["tool_mask"], batch["schema_mask"]).bool()
    assert trained[0].any()
    assert weights[trained].tolist() == pytest.approx([2.0] * int(trained.sum()))


def test_a_batch_without_weight_still_has_a_gradient_of_zero(make, batch):
    """Every process must run its backward, or the others wait for ever."""
    trainer = make()
    del batch["schema_mask"]
    batch["advantages"] = torch.zeros(ROWS)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.item() == 0.0
    assert gradients(trainer.model).abs().max() == 0.0


@pytest.mark.parametrize(("gap", "beside"), [(0.01, 0), (0.2, 3)])
def test_the_loss_logs_drift_and_entropy(make, batch, gap, beside):
    """Micro-batches beside it whose rows all have advantage 0 hide no drift: 0.2, not a quarter of it."""
    trainer = make()
    logps = log_probabilities(trainer.model, batch).detach()
    inputs = without_schema(batch) | {"sampling_per_token_logps": logps + gap * batch["completion_mask"]}
    for advantages in (inputs["advantages"], *[torch.zeros(ROWS)] * beside):
        trainer._compute_loss(trainer.model, inputs | {"advantages": advantages})
    entropies = trainer._metrics["train"]["entropy"]
    logs = {"loss": 0.0}
    trainer.log(logs)
    assert (logs["own/drift_mean"], logs["own/drift_max"]) == pytest.approx((gap, gap), rel=1e-3)
    assert beside or logs["own/entropy"] == pytest.approx(*entropies, rel=1e-4)


@pytest.mark.parametrize(("staleness", "moved"), [(0, 0.0), (1, 0.0), (1, 0.1)])
def test_a_sampler_that_is_not_the_trainer_is_corrected_up_to_a_cap(make, batch, staleness, moved):
    """Truncated importance sampling: each token's loss is weighed by min(pi_old / pi_sampler, cap), in both tracks.

    Where an update has moved each log-probability by 0.1, the ratio is e^0.1, which is not clipped, and the weight is
    that of the policy before it.
    """
    trainer = make(lambda_schema=0.25, importance_cap=2.0, staleness=staleness)
    trainer.sync = None if staleness else object()  # the sampler is behind, or elsewhere
    old = log_probabilities(trainer.model, batch).detach() - moved * batch["completion_mask"]
    if moved:
        batch["old_per_token_logps"] = old
    gap = torch.tensor([0.0, 0.5, -0.5, 3.0, 0, 0, 0, 0.5, 0, 0]) * batch["completion_mask"]
    batch["sampling_per_token_logps"] = old - gap
    loss = trainer._compute_loss(trainer.model, dict(batch))
    weights = torch.tensor([1.0, math.exp(0.5), math.exp(-0.5), 2.0, 1, 1, 1, math.exp(0.5), 1, 1]) * math.exp(moved)
    full = batch["completion_mask"] * batch["tool_mask"]
    expected = -(batch["advantages"].unsqueeze(1) * weights * full).sum() / full.sum()
    schema = batch["schema_advantages"].unsqueeze(1) * weights * batch["schema_mask"]
    expected -= 0.25 * schema.sum() / batch["schema_mask"].sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


def test_an_episode_that_the_sampler_drew_from_another_policy_is_left_out():
    """Its tokens' ratios are e^0.5 and e^-0.1: their geometric mean is e^0.2 = 1.22."""
    old = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, -1.0, -9.0]])
    sampled = torch.tensor([[-1.5, -1.9, 0.0], [-1.0, math.nan, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    all_kept = sampler_weights(old, sampled, mask, cap=2.0)
    expected = torch.tensor([[math.exp(0.5), math.exp(-0.1), 1.0], [1.0, 1.0, 1.0]])
    assert torch.allclose(all_kept, expected)
    assert torch.allclose(sampler_weights(old, sampled, mask, 2.0, (0.8, 1.25)), expected)
    assert sampler_weights(old, sampled, mask, 2.0, (0.8, 1.2)).tolist() == [[0.0] * 3, [1.0] * 3]
    # Or its tokens share their product, e^0.5 * e^-0.1 = e^0.4 = 1.49; the cap is one on the product.
    sampled[1] = torch.tensor([-2.0, -2.0, 0.0])
    weights = sampler_weights(old, sampled, mask, cap=3.0, level="sequence")
    assert torch.allclose(weights, torch.tensor([[math.exp(0.4)] * 3, [3.0] * 3]))
    assert sampler_weights(old, sampled, mask, 3.0, (0.5, 2.0), "sequence")[1].tolist() == [0.0] * 3  # e^1 each


# Two questions of two episodes, two tokens each; every ratio is 2, 1 or 1/2, so that all numbers below are fractions.
REWARDS = [3.0, 1.0, 2.0, 2.0]
RATIOS = [[2.0, 1.0], [1.0, 0.5], [1.0, 2.0], [0.5, 1.0]]
D = 1.41421356 + 1e-4  # deviation of the first group, sqrt(2), with TRL's epsilon
B = 0.81649658 + 1e-4  # of the whole generation, whose mean is 2: sqrt((1 + 1 + 0 + 0) / 3)
METHODS = {
    # -A * ratio / (2 tokens * 4 episodes), and 0 where it is clipped: 2 > 1.28 with A > 0, 0.5 < 0.8 with A < 0
    "grpo": ({}, {"loss": "grpo"}, [[0, -1 / D / 8], [1 / D / 8, 0], [0, 0], [0, 0]]),
    # -A * ratio / (8 tokens * 4 episodes), A = r - mean
    "dr_grpo": ({"scale": "none"}, {"loss": "dr_grpo"}, [[0, -1 / 32], [1 / 32, 0], [0, 0], [0, 0]]),
    # -A * ratio / 8 tokens in all
    "dapo": ({}, {"loss": "dapo"}, [[0, -1 / D / 8], [1 / D / 8, 0], [0, 0], [0, 0]]),
    # The same, over one part's tokens
    "bnpo": ({}, {"loss": "bnpo"}, [[0, -1 / D / 8], [1 / D / 8, 0], [0, 0], [0, 0]]),
    # The geometric means of the ratios are sqrt(2) and sqrt(1/2): both are out of their bounds.
    "gspo": ({}, {"loss": "grpo", "level": "sequence"}, [[0, 0], [0, 0], [0, 0], [0, 0]]),
    # The same within bounds of 1/2 and 3/2: -A * mean ratio / (2 tokens * 4 episodes)
    "gspo, wide": (
        {},
        {"loss": "grpo", "level": "sequence", "low": 0.5, "high": 0.5},
        [[-1.41421356 / D / 8] * 2, [0.70710678 / D / 8] * 2, [0, 0], [0, 0]],
    ),
    # -A * min(ratio, 1.28) / 8: no token is without a gradient
    "cispo": ({}, {"loss": "cispo"}, [[-1.28 / D / 8, -1 / D / 8], [1 / D / 8, 0.5 / D / 8], [0, 0], [0, 0]]),
    # A = r - the other's: 2 and -2
    "rloo": ({"baseline": "others", "scale": "none"}, {"loss": "dapo"}, [[0, -2 / 8], [2 / 8, 0], [0, 0], [0, 0]]),
    # A = (r - 2) / deviation of all
    "reinforce++": (
        {"baseline": "batch", "scale": "batch"},
        {"loss": "dapo"},
        [[0, -1 / B / 8], [1 / B / 8, 0], [0, 0], [0, 0]],
    ),
}


def test_the_two_bounds_of_the_clip_are_their_own():
    """1.25 lies within the upper one, and 2 above it; with an advantage below 0 the lower one binds."""
    ratio, advantages = torch.tensor([[1.25, 2.0, 0.5]]), torch.tensor([[1.0, 1.0, -1.0]])
    losses = clipped_objective(TrackBatch(ratio.log(), ratio, advantages, torch.ones(1, 3), LOW, HIGH, None, 3))
    assert losses.tolist() == [pytest.approx([-1.25, -1.28, 0.8])]


@pytest.mark.parametrize("name", METHODS)
def test_each_method_from_its_rewards_to_its_gradient(name):
    estimator, options, wanted = METHODS[name]
    settings = Grpo(**estimator, loss=options["loss"], level=options.get("level", "token"))
    advantages = estimate_advantages(torch.tensor(REWARDS), 2, settings.baseline, settings.scale).unsqueeze(1)
    old, mask = torch.tensor([[-1.0, -2.0]] * 4), torch.ones(4, 2)
    low, high = options.get("low", LOW), options.get("high", HIGH)
    for parts, share in ((1, 1.0), (2, 4.0)):  # a mean over tokens counts all processes' tokens, the others one part's
        logps = (old + torch.tensor(RATIOS).log()).requires_grad_()
        ratio, means = ratios(logps, old, mask, settings.level), (mask.sum(), 8, parts, share)
        LOSSES[settings.loss].compute(TrackBatch(logps, ratio, advantages, mask, low, high, *means)).backward()
        times = share if settings.loss in ("dapo", "cispo") else 1 / parts
        assert (logps.grad / times).tolist() == [pytest.approx(row, rel=1e-5, abs=1e-8) for row in wanted]
