"""Multi-turn GRPO: a recipe's `grpo` section as a run of `GrpoTrainer` over our own rollouts.

A step, from the sampled group to the gradient, is in `rollouts.py` and `grpo_trainer.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import datasets
import torch
from trl.trainer.grpo_config import GRPOConfig

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.registry import LOSSES, POLICIES
from pipelines.core.types import Example
from pipelines.environment.core import Environment
from pipelines.recipe.config import Grpo
from pipelines.training import combinations, model, samples, trainer
from pipelines.training.generation_log import StepLog
from pipelines.training.grpo_trainer import GrpoTrainer
from pipelines.training.model import WeightSync, whole_weights
from pipelines.training.plan import Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.rollouts import make_rollouts, training_policy
from pipelines.training.rollouts_ahead import RolloutsAhead

CURVES = {  # the curve of each of TRL's numbers that is kept
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
}
CLIP_CURVES = {  # the same for TRL's own losses
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "cispo_clip_ratio": "clip_high",
}


def train(plan: Plan, examples: Sequence[Example], emit: Emit) -> GrpoTrainer:
    """Train a policy on examples, from the last checkpoint if there is one."""
    _require_trainable(plan, examples)
    recipe = plan.recipe
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    step_log = StepLog()
    curves = CURVES
    if LOSSES[recipe.grpo.loss].trl:
        curves = CURVES | CLIP_CURVES
    held_out: Sequence[Example] = ()
    if plan.held_out is not None:
        held_out = samples.read_plan_data(plan.held_out, Example)
    with Environment(recipe, workers=None) as environment:
        policy = training_policy(plan, network, tokenizer)
        rollouts = make_rollouts(plan, examples, policy, environment)
        sync = _weight_sync(plan)
        recorder = CurveRecorder(plan.out, plan.kind, emit, curves, step_log.take_seconds, rollouts.worst)
        grpo_trainer = GrpoTrainer(
            plan=plan,
            rollouts=rollouts,
            step_log=step_log,
            held_out=held_out,
            sync=sync,
            model=network,
            processing_class=tokenizer,
            peft_config=model.adapters(recipe.model.lora),
            train_dataset=questions_in_order(plan, examples),
            callbacks=[recorder],
            args=arguments(plan, len(examples)),
        )
        if recipe.grpo.staleness:
            weights = None
            if sync is None:
                _, weights = whole_weights(grpo_trainer)
            grpo_trainer.ahead = RolloutsAhead(plan, examples, weights)
        try:
            trainer.run(grpo_trainer, plan)
        finally:
            if grpo_trainer.ahead is not None:
                grpo_trainer.ahead.close()
        if sync is not None:
            sync.push(grpo_trainer)  # the last step's weights, which no rollout has asked for
    return grpo_trainer


def _require_trainable(plan: Plan, examples: Sequence[Example]) -> None:
    """Refuse a run without questions, or with settings that do not go together."""
    if not examples:
        raise DataError("there are no questions to train on", "Loosen difficulty.*, or name a pool under data.rl.")
    combinations.refuse_unsupported(plan.recipe)
    grpo = plan.recipe.grpo
    rows = grpo.questions_per_step * grpo.group
    if grpo.resample and rows // trainer.world_size() % grpo.group:
        raise RecipeError(
            f"grpo.resample needs whole groups on each of {trainer.world_size()} processes",
            "Make grpo.questions_per_step a multiple of the processes.",
        )


def _weight_sync(plan: Plan) -> WeightSync | None:
    """The way of the weights under training to the servers that sample; None if the network itself samples.

    Servers that take low-rank adapters alone are sent the adapters' base now.
    """
    recipe = plan.recipe
    maker = POLICIES[recipe.rollout.policy]
    send_weights = maker.send_weights
    if send_weights is None:
        return None
    adapters_alone = False
    if recipe.model.sends_adapters and maker.takes_adapters is not None:
        adapters_alone = maker.takes_adapters(recipe)
    if adapters_alone and trainer.is_main():
        send_weights(plan.checkpoint_in, recipe, None)

    def give(folder: Path, step: int) -> Sequence[str] | None:
        return send_weights(str(folder), recipe, step)

    return WeightSync(give, plan.out, adapters_alone, getattr(torch, recipe.model.compute_dtype))


def arguments(plan: Plan, questions: int) -> GRPOConfig:
    """TRL's configuration of a recipe's `grpo` section, for a run over so many questions."""
    grpo = plan.recipe.grpo
    rows = grpo.questions_per_step * grpo.group
    micro, accumulate = samples.split_batch(rows, grpo.micro_batch, trainer.world_size())
    n_steps = samples.grpo_steps(grpo, questions)
    # A loss that TRL does not have leaves TRL the penalty on leaving the reference: its mean is over all tokens then.
    loss_type = LOSSES[grpo.loss].trl or "dapo"
    epsilon_high = grpo.clip_high
    if loss_type == "cispo":  # TRL's takes the bound itself, its other losses the bound's distance from 1
        epsilon_high = 1 + grpo.clip_high
    return GRPOConfig(
        **trainer.common(plan, n_steps, _save_steps(grpo)),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_iterations=grpo.updates_per_rollout,
        num_generations=grpo.group,
        max_completion_length=grpo.sampling.episode_tokens,
        temperature=grpo.sampling.temperature,
        beta=grpo.beta,
        epsilon=grpo.clip_low,
        epsilon_high=epsilon_high,
        loss_type=loss_type,
        importance_sampling_level=grpo.level,
        shuffle_dataset=False,
    )


def _save_steps(grpo: Grpo) -> int:
    """Steps between checkpoints: a whole number of generations, for a checkpoint within one would lose its rollouts."""
    generations = math.ceil(grpo.save_steps / grpo.updates_per_rollout)
    return generations * grpo.updates_per_rollout


def questions_in_order(plan: Plan, examples: Sequence[Example]) -> datasets.Dataset:
    """The ids of every generation's questions, in order: one pass over it is the whole run."""
    grpo = plan.recipe.grpo
    n_steps = samples.grpo_steps(grpo, len(examples))
    generations = math.ceil(n_steps / grpo.updates_per_rollout)
    order = samples.schedule(len(examples), grpo.questions_per_step, generations, plan.recipe.seed, grpo.order)
    ids = [examples[index].id for index in order]
    return datasets.Dataset.from_dict({"prompt": ids})
