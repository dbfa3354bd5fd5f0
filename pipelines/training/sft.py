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
from pipelines.training.plan import Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.samples import (
    Sample,
    grouped_order,
    order,
    padding_share,
    prefix_groups,
    sample,
    split_batch,
    step_count,
)

NAMES = {
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
        self.packs = plan.recipe.sft.group_by == "prefix" and packing.suits(network)
        if self.packs:
            packing.prepare(network)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sequence[int]:
        return self.indices  # of the whole run: resuming needs only the number of steps done

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's loss; where samples are grouped by prefix, each prefix is computed once."""
        compute = super().compute_loss
        if not self.packs:
            loss: Tensor = compute(model, inputs, *args, **kwargs)
            return loss
        rows = packing.RowsModel(model)
        loss = self.in_parts(model, self._parts(inputs), lambda part: compute(rows, part, *args, **kwargs))
        self.computed += rows.computed
        return loss

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """A micro-batch in parts of at most `hardware.micro_tokens`, as many on every process."""
        most = self.plan.recipe.hardware.micro_tokens
        if most is None:
            return [inputs]
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        every_row = torch.arange(len(ids), device=ids.device)
        parts = []
        for rows in packing.by_tokens(ids, mask, every_row, most, shares=True):
            parts.append({name: values[rows] for name, values in inputs.items()})
        for _ in range(self.most(len(parts)) - len(parts)):  # a process with fewer parts computes a row without labels
            row = {name: values[:1] for name, values in parts[0].items()}
            parts.append(row | {"labels": torch.full_like(row["labels"], packing.UNSCORED)})
        return parts

    def take_spent(self) -> dict[str, float]:
        """The tokens that this step computed, where fewer than its samples have."""
        computed = self.computed
        self.computed = 0
        return {record.COMPUTED: float(computed)} if computed else {}


def train(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """Fine-tune on trajectories, from the last checkpoint if there is one."""
    made = prepare(plan, trajectories, emit)
    trainer.run(made, plan)
    return made


def prepare(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """The trainer of a plan, before its first step."""
    recipe = plan.recipe
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    samples = encode(plan, trajectories, tokenizer, emit)
    micro, accumulate = split_batch(recipe.sft.batch, recipe.sft.micro_batch, trainer.world_size())
    steps = step_count(len(samples), recipe.sft.epochs, recipe.sft.batch)
    lengths = [len(item.input_ids) for item in samples]
    alike, _ = split_batch(recipe.sft.batch, recipe.sft.micro_batch, 1)  # the same for any number of processes
    total = steps * recipe.sft.batch
    if recipe.sft.group_by == "prefix":
        groups = prefix_groups(samples)
        indices = grouped_order(groups, alike, total, recipe.seed)
        emit(
            {"event": "note", "text": f"{len(samples)} samples in {len(set(groups))} groups whose prompts begin alike"}
        )
    else:
        indices = order(lengths, alike, total, recipe.seed)
        padding = padding_share(lengths, indices, micro)
        emit({"event": "note", "text": f"{padding:.1%} of the tokens of its batches are padding"})
    columns = {name: [list(getattr(item, name)) for item in samples] for name in ("input_ids", "labels")}
    recorder = CurveRecorder(plan.out, plan.kind, emit, NAMES)
    made = SftTrainer(
        plan=plan,
        indices=indices,
        model=network,
        processing_class=tokenizer,
        peft_config=model.adapters(recipe.model.lora),
        train_dataset=datasets.Dataset.from_dict(columns),
        callbacks=[recorder],
        args=SFTConfig(
            **trainer.common(plan, steps, recipe.sft.save_steps),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulate,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
    )
    recorder.take_spent = made.take_spent
    return made


def encode(plan: Plan, trajectories: Sequence[Trajectory], tokenizer: Any, emit: Emit) -> list[Sample]:
    """Samples in the trajectories' order; those longer than `sft.max_tokens` are left out, and a note counts them."""
    codec = ChatCodec(tokenizer)
    with PartialState().split_between_processes(list(trajectories)) as mine:  # the others encode the rest
        whole: list[Sample] = gather_object([sample(trajectory, codec) for trajectory in mine])
    limit = min(plan.recipe.sft.max_tokens, getattr(tokenizer, "model_max_length", None) or plan.recipe.sft.max_tokens)
    fitting = [item for item in whole if len(item.input_ids) <= limit]
    if left_out := len(whole) - len(fitting):
        emit({"event": "note", "text": f"{left_out} trajectories are longer than {limit} tokens: left out"})
    if not fitting:
        hint = "Raise sft.max_tokens, or loosen the filter."
        raise DataError(f"none of {len(whole)} trajectories can be trained on", hint)
    return fitting
