"""Supervised fine-tuning: TRL's SFTTrainer on token-exact samples, with everything but the agent's tokens masked."""

from collections.abc import Sequence
from typing import Any

import datasets
import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from pipelines.core.errors import DataError
from pipelines.core.types import Trajectory
from pipelines.rollout.codec import ChatCodec
from pipelines.training import model, packing, record, trainer
from pipelines.training.micro_batches import split_by_tokens
from pipelines.training.plan import Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.samples import (
    Sample,
    make_sample,
    order_by_group,
    order_by_length,
    padding_share,
    prefix_groups,
    split_batch,
    step_count,
)

CURVES = {  # the curve of each of TRL's numbers that is kept
    "loss": "loss",
    "mean_token_accuracy": "accuracy",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


class SftTrainer(trainer.TrainerMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with micro-batches of samples that have their length or their prompts' prefix in common."""

    def __init__(self, *, plan: Plan, indices: Sequence[int], **kwargs: Any) -> None:
        self.plan = plan
        self.indices = indices
        self.computed = 0  # tokens that went through the network in this step
        super().__init__(**kwargs)
        network = self.accelerator.unwrap_model(self.model)
        groups_prefixes = plan.recipe.sft.group_by == "prefix"
        self.packs = groups_prefixes and packing.supports_packing(network) and not self.aux_loss_enabled
        self.max_tokens = plan.recipe.hardware.micro_tokens if groups_prefixes else None
        self.require_no_balancing(self.max_tokens)
        if self.packs:
            packing.use_packed_attention(network)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sequence[int]:
        return self.indices  # the whole run's: resuming needs only the number of steps done

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's loss; where samples are grouped by prefix, each prefix is computed once."""
        compute = super().compute_loss
        parts = self._split_micro_batch(inputs)
        if not self.packs:
            return self.in_parts(model, parts, lambda part: compute(model, part, *args, **kwargs))
        rows = packing.PackedRowsModel(model)
        loss = self.in_parts(model, parts, lambda part: compute(rows, part, *args, **kwargs))
        self.computed += rows.computed
        return loss

    def _split_micro_batch(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """A micro-batch in parts of at most `hardware.micro_tokens`, as many on every process."""
        max_tokens = self.max_tokens
        if max_tokens is None:
            return [inputs]
        ids = inputs["input_ids"]
        mask = inputs["attention_mask"]
        every_row = torch.arange(len(ids), device=ids.device)
        parts = []
        for rows in split_by_tokens(ids, mask, every_row, max_tokens, shares_prefixes=self.packs):
            parts.append({name: values[rows] for name, values in inputs.items()})
        missing = self.max_over_ranks(len(parts)) - len(parts)
        for _ in range(missing):  # a process with fewer parts computes a row without labels
            row = {name: values[:1] for name, values in parts[0].items()}
            row["labels"] = torch.full_like(row["labels"], packing.UNSCORED)
            parts.append(row)
        return parts

    def take_spent(self) -> dict[str, float]:
        """The tokens that this step computed, where fewer than its samples have."""
        if not self.computed:
            return {}
        computed = float(self.computed)
        self.computed = 0
        return {record.COMPUTED: computed}


def train(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """Fine-tune on trajectories, from the last checkpoint if there is one."""
    sft_trainer = prepare(plan, trajectories, emit)
    trainer.run(sft_trainer, plan)
    return sft_trainer


def prepare(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """The trainer of a plan, before its first step."""
    recipe = plan.recipe
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    samples = encode(plan, trajectories, tokenizer, emit)
    micro, accumulate = split_batch(recipe.sft.batch, recipe.sft.micro_batch, trainer.world_size())
    steps = step_count(len(samples), recipe.sft.epochs, recipe.sft.batch)
    indices = _sample_order(plan, samples, steps * recipe.sft.batch, micro, emit)
    recorder = CurveRecorder(plan.out, plan.kind, emit, CURVES)
    dataset: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for item in samples:
        dataset["input_ids"].append(list(item.input_ids))
        dataset["labels"].append(list(item.labels))
    sft_trainer = SftTrainer(
        plan=plan,
        indices=indices,
        model=network,
        processing_class=tokenizer,
        peft_config=model.adapters(recipe.model.lora),
        train_dataset=datasets.Dataset.from_dict(dataset),
        callbacks=[recorder],
        args=SFTConfig(
            **trainer.common(plan, steps, recipe.sft.save_steps),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulate,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
    )
    recorder.take_spent = sft_trainer.take_spent
    return sft_trainer


def _sample_order(plan: Plan, samples: Sequence[Sample], total: int, micro_batch: int, emit: Emit) -> list[int]:
    """Indices of the samples of the whole run; a note says what they have in common.

    Args:
        total: samples of the run, each counted as often as it is used.
        micro_batch: samples of one forward of this process.
    """
    recipe = plan.recipe
    run_length, _ = split_batch(recipe.sft.batch, recipe.sft.micro_batch, 1)  # the same for any number of processes
    if recipe.sft.group_by == "prefix":
        groups = prefix_groups(samples)
        note = f"{len(samples)} samples in {len(set(groups))} groups whose prompts begin alike"
        indices = order_by_group(groups, run_length, total, recipe.seed)
    else:
        lengths = [len(item.input_ids) for item in samples]
        indices = order_by_length(lengths, run_length, total, recipe.seed)
        padding = padding_share(lengths, indices, micro_batch)
        note = f"{padding:.1%} of the tokens of its batches are padding"
    emit({"event": "note", "text": note})
    return indices


def encode(plan: Plan, trajectories: Sequence[Trajectory], tokenizer: Any, emit: Emit) -> list[Sample]:
    """Samples in the trajectories' order; longer ones than `sft.max_tokens` are left out, and a note counts them."""
    codec = ChatCodec(tokenizer)
    with PartialState().split_between_processes(list(trajectories)) as own_trajectories:
        skips = plan.recipe.sft.skip_failed_turns
        own_samples = [make_sample(trajectory, codec, skips) for trajectory in own_trajectories]
        samples: list[Sample] = gather_object(own_samples)
    limit = plan.recipe.sft.max_tokens
    context = getattr(tokenizer, "model_max_length", None)
    if context:
        limit = min(limit, context)
    fitting = [item for item in samples if len(item.input_ids) <= limit]
    left_out = len(samples) - len(fitting)
    if left_out:
        emit({"event": "note", "text": f"{left_out} trajectories are longer than {limit} tokens: left out"})
    if not fitting:
        hint = "Raise sft.max_tokens, or loosen the filter."
        raise DataError(f"none of {len(samples)} trajectories can be trained on", hint)
    return fitting
