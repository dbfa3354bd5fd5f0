"""Supervised fine-tuning: TRL's SFTTrainer on token-exact samples, with everything but the agent's tokens masked."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import datasets
import numpy as np
from torch.utils.data import Sampler
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.types import Trajectory
from pipelines.recipe.config_training import Grpo
from pipelines.training import model, settings
from pipelines.training.plan import Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.samples import Sample, sample

# Which samples train together: batches of like length, in an order that a seed fixes for the whole run.

LIKE_ROWS = 24  # rows of one of GRPO's forwards with padding: the fewer, the more alike in length
WINDOW = 8  # micro-batches that are sorted together: padding stays low, and a batch still mixes the dataset


def split_batch(batch: int, micro_batch: int, processes: int) -> tuple[int, int]:
    """The (samples of one forward, accumulated forwards) that make up one process's share of a batch."""
    if batch % processes:
        raise RecipeError(f"a batch of {batch} cannot be shared by {processes} processes", "Make it a multiple.")
    share = batch // processes
    micro = micro_rows(share, micro_batch)
    return micro, share // micro


def micro_rows(share: int, micro_batch: int) -> int:
    """Samples of a micro-batch: at most `micro_batch`, and as many in each of a process's share of a batch."""
    return max(size for size in range(1, min(micro_batch, share) + 1) if share % size == 0)


def step_count(samples: int, epochs: float, batch: int) -> int:
    """Optimiser steps of a run: at least one."""
    return max(1, math.floor(samples * _as_written(epochs) / batch))


def grpo_steps(grpo: Grpo, questions: int) -> int:
    """Optimiser steps of GRPO over so many questions: those of its epochs, or as many as it says."""
    if grpo.epochs is None:
        return grpo.steps
    return math.ceil(_as_written(grpo.epochs) * questions / grpo.questions_per_step) * grpo.updates_per_rollout


def _as_written(epochs: float) -> Fraction:
    """The decimal number that a recipe says: 1.1 as a float is a little more, and its ceiling one step too many."""
    return Fraction(str(epochs))


def order(lengths: Sequence[int], micro_batch: int, total: int, seed: int) -> list[int]:
    """Indices of `total` samples, so that each run of `micro_batch` holds samples of like length.

    Every sample is used once before any is used again.
    """
    chosen: list[int] = []
    waiting: list[int] = []
    for epoch in range(math.ceil(total / max(1, len(lengths))) + 1):
        rng = np.random.default_rng((seed, epoch))
        indices = waiting + rng.permutation(len(lengths)).tolist()
        whole = len(indices) - len(indices) % micro_batch
        waiting = indices[whole:]
        batches = _like_batches(indices[:whole], lengths, micro_batch)
        chosen += [index for place in rng.permutation(len(batches)) for index in batches[place]]
    return chosen[:total]


def schedule(pool: int, questions: int, generations: int, seed: int, order: str = "shuffled") -> list[int]:
    """Indices of the questions of each generation, one after the other: (generations * questions,).

    A question comes again only when all have come; none comes twice in one generation unless the pool is too small.

    Args:
        order: "shuffled"; by any other the pool comes in it already.
    """
    if order != "shuffled":
        return [place % pool for place in range(generations * questions)]
    chosen: list[int] = []
    waiting: list[int] = []
    epoch = 0
    while len(chosen) < generations * questions:
        while len(waiting) < questions:
            fresh = np.random.default_rng((seed, epoch)).permutation(pool).tolist()
            waiting_set = set(waiting)
            waiting += [index for index in fresh if index not in waiting_set] + [
                index for index in fresh if index in waiting_set
            ]
            epoch += 1
        chosen += waiting[:questions]
        waiting = waiting[questions:]
    return chosen


def padding_share(lengths: Sequence[int], indices: Sequence[int], micro_batch: int) -> float:
    """The share of tokens that are padding when each run of `micro_batch` is padded to its longest."""
    runs = [[lengths[index] for index in indices[at : at + micro_batch]] for at in range(0, len(indices), micro_batch)]
    padded = sum(max(run) * len(run) for run in runs)
    return 1.0 - sum(map(sum, runs)) / padded if padded else 0.0


def _like_batches(indices: Sequence[int], lengths: Sequence[int], micro_batch: int) -> list[list[int]]:
    window = micro_batch * WINDOW
    batches = []
    for at in range(0, len(indices), window):
        near = sorted(indices[at : at + window], key=lambda index: lengths[index])
        batches += [near[start : start + micro_batch] for start in range(0, len(near), micro_batch)]
    return batches


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


class SftTrainer(settings.TrainerMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with batches of like length."""

    def __init__(self, *, plan: Plan, indices: Sequence[int], **kwargs: Any) -> None:
        self.plan, self.indices = plan, indices
        super().__init__(**kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Fixed:
        return Fixed(self.indices)


def train(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """Fine-tune on trajectories, from the last checkpoint when there is one."""
    recipe = plan.recipe
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    samples = encode(plan, trajectories, tokenizer, emit)
    micro, accumulate = split_batch(recipe.sft.batch, recipe.sft.micro_batch, settings.world_size())
    steps = step_count(len(samples), recipe.sft.epochs, recipe.sft.batch)
    lengths = [len(item.input_ids) for item in samples]
    alike, _ = split_batch(recipe.sft.batch, recipe.sft.micro_batch, 1)  # the same for any number of processes
    indices = order(lengths, alike, steps * recipe.sft.batch, recipe.seed)
    padding = padding_share(lengths, indices, micro)
    emit({"event": "note", "text": f"{padding:.1%} of the tokens of its batches are padding"})
    trainer = SftTrainer(
        plan=plan,
        indices=indices,
        model=network,
        processing_class=tokenizer,
        peft_config=model.adapters(recipe.model.lora),
        train_dataset=_dataset(samples),
        callbacks=[CurveRecorder(plan.out, plan.kind, emit, NAMES)],
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
