"""Multi-turn GRPO: a recipe's `grpo` section as a run of our trainer."""

from collections.abc import Sequence
from typing import Any

import datasets
import torch
from trl.trainer.grpo_config import GRPOConfig

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.registry import POLICIES
from pipelines.core.types import Example
from pipelines.databases.of_recipe import sql_engine
from pipelines.recipe.config import Recipe
from pipelines.rollout.policies.base import Policy
from pipelines.training import combinations, model, samples, settings, sft
from pipelines.training.combinations import IN_PROCESS
from pipelines.training.grpo_trainer import NAMES, GrpoTrainer
from pipelines.training.plan import Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.rollouts import build, in_process, served_policy
from pipelines.training.rollouts_ahead import Ahead
from pipelines.training.training_pass import StepState
from pipelines.training.weights import WeightSync, whole_weights


def train(plan: Plan, examples: Sequence[Example], emit: Emit) -> GrpoTrainer:
    """Train a policy on examples, from the last checkpoint when there is one."""
    if not examples:
        raise DataError("there are no questions to train on", "Loosen difficulty.*, or name a pool under data.rl.")
    recipe = plan.recipe
    _check(recipe)
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    step_state = StepState()
    with sql_engine(recipe) as sql:
        rollouts = build(plan, examples, _policy(plan, network, tokenizer), sql)
        trainer = GrpoTrainer(
            plan=plan,
            rollouts=rollouts,
            step_state=step_state,
            held_out=samples.examples(plan.held_out) if plan.held_out else (),
            sync=_sync(plan),
            model=network,
            processing_class=tokenizer,
            peft_config=model.adapters(recipe.model.lora),
            train_dataset=_dataset(plan, examples),
            callbacks=[
                CurveRecorder(
                    *(plan.out, plan.kind, emit, NAMES), take_spent=step_state.take_seconds, example=rollouts.worst
                )
            ],
            args=arguments(plan, len(examples)),
        )
        if recipe.grpo.staleness:
            trainer.ahead = Ahead(plan, examples, None if trainer.sync else whole_weights(trainer)[1])
        try:
            settings.run(trainer, plan)
        finally:
            if trainer.ahead is not None:
                trainer.ahead.close()
        if trainer.sync is not None:
            trainer.sync.push(trainer)  # the last step's, which no rollout has asked for
    return trainer


def _check(recipe: Recipe) -> None:
    """Refuse what would only fail, or silently do nothing, after the model is loaded."""
    combinations.check(recipe)
    grpo = recipe.grpo
    rows = grpo.questions_per_step * grpo.group // settings.world_size()
    if grpo.resample and rows % grpo.group:
        raise RecipeError(
            f"grpo.resample needs whole groups on each of {settings.world_size()} processes",
            "Make grpo.questions_per_step a multiple of the processes.",
        )


def _policy(plan: Plan, network: Any, tokenizer: Any) -> Policy:
    """What makes the rollouts: the network itself, or servers that its weights are sent to."""
    if plan.recipe.rollout.policy == IN_PROCESS:
        return in_process(plan.recipe, network, tokenizer)
    return served_policy(plan)


def _sync(plan: Plan) -> WeightSync | None:
    """What brings the weights to the policy; None where the network itself is the policy.

    Where low-rank adapters can be sent alone, the base that they belong to is sent now.
    """
    recipe, maker = plan.recipe, POLICIES[plan.recipe.rollout.policy]
    give = maker.give
    if give is None:
        return None
    alone = recipe.model.sends_adapters and maker.takes_adapters is not None and maker.takes_adapters(recipe)
    if alone and settings.is_main():
        give(plan.checkpoint_in, recipe, None)
    dtype = getattr(torch, recipe.model.compute_dtype)
    return WeightSync(lambda folder, step: give(str(folder), recipe, step), plan.out, alone, dtype)


def arguments(plan: Plan, questions: int) -> GRPOConfig:
    """TRL's configuration of a recipe's `grpo` section, for a run over so many questions."""
    grpo = plan.recipe.grpo
    rows = grpo.questions_per_step * grpo.group
    micro, accumulate = sft.split_batch(rows, grpo.micro_batch, settings.world_size())
    # A checkpoint between two updates of one generation would lose its rollouts: save after the last of them.
    save_steps = -(-grpo.save_steps // grpo.updates_per_rollout) * grpo.updates_per_rollout
    return GRPOConfig(
        **settings.common(plan, sft.grpo_steps(grpo, questions), save_steps),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_iterations=grpo.updates_per_rollout,
        num_generations=grpo.group,
        max_completion_length=grpo.sampling.episode_tokens,
        temperature=grpo.sampling.temperature,
        beta=grpo.beta,
        epsilon=grpo.clip_low,
        epsilon_high=1 + grpo.clip_high if grpo.loss == "cispo" else grpo.clip_high,
        loss_type=grpo.loss,
        importance_sampling_level=grpo.level,
        shuffle_dataset=False,
    )


def _dataset(plan: Plan, examples: Sequence[Example]) -> datasets.Dataset:
    """The ids of every generation's questions, in order: one pass over it is the whole run."""
    grpo = plan.recipe.grpo
    generations = -(-sft.grpo_steps(grpo, len(examples)) // grpo.updates_per_rollout)
    order = sft.schedule(len(examples), grpo.questions_per_step, generations, plan.recipe.seed, grpo.order)
    return datasets.Dataset.from_dict({"prompt": [examples[index].id for index in order]})
