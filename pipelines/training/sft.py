"""Supervised fine-tuning: TRL's SFTTrainer on token-exact samples, with everything but the agent's tokens masked."""

from collections.abc import Sequence
from typing import Any

import datasets
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from pipelines.core.errors import DataError
from pipelines.core.types import Trajectory
from pipelines.rollout.codec import ChatCodec
from pipelines.training import model, trainer
from pipelines.training.plan import Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.samples import Sample, order, padding_share, sample, split_batch, step_count

NAMES = {
    "loss": "loss",
    "mean_token_accuracy": "accuracy",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


class SftTrainer(trainer.TrainerMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with batches of like length."""

    def __init__(self, *, plan: Plan, indices: Sequence[int], **kwargs: Any) -> None:
        self.plan, self.indices = plan, indices
        super().__init__(**kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sequence[int]:
        return self.indices  # of the whole run: resuming needs only the number of steps done


def train(plan: Plan, trajectories: Sequence[Trajectory], emit: Emit) -> SftTrainer:
    """Fine-tune on trajectories, from the last checkpoint if there is one."""
    recipe = plan.recipe
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    samples = encode(plan, trajectories, tokenizer, emit)
    micro, accumulate = split_batch(recipe.sft.batch, recipe.sft.micro_batch, trainer.world_size())
    steps = step_count(len(samples), recipe.sft.epochs, recipe.sft.batch)
    lengths = [len(item.input_ids) for item in samples]
    alike, _ = split_batch(recipe.sft.batch, recipe.sft.micro_batch, 1)  # the same for any number of processes
    indices = order(lengths, alike, steps * recipe.sft.batch, recipe.seed)
    padding = padding_share(lengths, indices, micro)
    emit({"event": "note", "text": f"{padding:.1%} of the tokens of its batches are padding"})
    columns = {name: [list(getattr(item, name)) for item in samples] for name in ("input_ids", "labels")}
    made = SftTrainer(
        plan=plan,
        indices=indices,
        model=network,
        processing_class=tokenizer,
        peft_config=model.adapters(recipe.model.lora),
        train_dataset=datasets.Dataset.from_dict(columns),
        callbacks=[CurveRecorder(plan.out, plan.kind, emit, NAMES)],
        args=SFTConfig(
            **trainer.common(plan, steps, recipe.sft.save_steps),
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulate,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
    )
    trainer.run(made, plan)
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
