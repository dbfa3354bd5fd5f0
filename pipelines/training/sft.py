"""Supervised fine-tuning: TRL's SFTTrainer on token-exact samples, with everything but the agent's tokens masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
from torch.utils.data import Sampler
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from pipelines.errors import DataError
from pipelines.training import batching, model, settings
from pipelines.training.plan import Plan
from pipelines.training.record import Emit, Recorder
from pipelines.training.samples import Sample, sample
from pipelines.types import Trajectory

NAMES = {
    "loss": "loss",
    "mean_token_accuracy": "accuracy",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


class Fixed(Sampler[int]):
    """The order that `batching.order` chose for the whole run: resuming needs only the number of steps done."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class SftTrainer(settings.Common, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with batches of like length."""

    def __init__(self, *, plan: Plan, indices: Sequence[int], **kwargs: Any) -> None:
        self.plan, self.indices = plan, indices
        super().__init__(**kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Fixed:
        return Fixed(self.indices)


def train(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """Fine-tune on trajectories, from the last checkpoint when there is one.

    Raises:
        DataError: no trajectory is left within `sft.max_tokens`.
    """
    recipe = plan.recipe
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    samples = encode(plan, trajectories, tokenizer, emit)
    micro, accumulate = batching.split_batch(recipe.sft.batch, recipe.sft.micro_batch, settings.world_size())
    steps = batching.steps(len(samples), recipe.sft.epochs, recipe.sft.batch)
    lengths = [len(item.input_ids) for item in samples]
    alike, _ = batching.split_batch(recipe.sft.batch, recipe.sft.micro_batch, 1)  # the same for any number of processes
    indices = batching.order(lengths, alike, steps * recipe.sft.batch, recipe.seed)
    padding = batching.padding_share(lengths, indices, micro)
    emit({"event": "note", "text": f"{padding:.1%} of the tokens of its batches are padding"})
    trainer = SftTrainer(
        plan=plan,
        indices=indices,
        model=network,
        processing_class=tokenizer,
        peft_config=model.adapters(recipe.model.lora),
        train_dataset=_dataset(samples),
        callbacks=[Recorder(plan.out, plan.kind, emit, NAMES)],
        args=SFTConfig(
            **settings.common(plan, steps, recipe.sft.save_steps),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulate,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
    )
    settings.run(trainer, plan)
    return trainer


def encode(plan: Plan, trajectories: Sequence[Trajectory], tokenizer: Any, emit: Emit) -> list[Sample]:
    """Samples in the trajectories' order, without those longer than `sft.max_tokens`: their number is told."""
    from pipelines.rollout.codec import ChatCodec

    codec = ChatCodec(tokenizer)
    whole = [sample(trajectory, codec) for trajectory in trajectories]
    limit = min(plan.recipe.sft.max_tokens, getattr(tokenizer, "model_max_length", None) or plan.recipe.sft.max_tokens)
    fitting = [item for item in whole if len(item.input_ids) <= limit]
    if len(fitting) < len(whole):
        emit(
            {
                "event": "note",
                "text": f"{len(whole) - len(fitting)} trajectories are longer than {limit} tokens: left out",
            }
        )
    if not fitting:
        raise DataError(
            f"none of {len(whole)} trajectories can be trained on", "Raise sft.max_tokens, or loosen the filter."
        )
    return fitting


def _dataset(samples: Sequence[Sample]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {
            "input_ids": [list(item.input_ids) for item in samples],
            "labels": [list(item.labels) for item in samples],
        }
    )
