"""Which settings of `grpo` go together: each that would do nothing, or something else than it says, is refused."""

from __future__ import annotations

from collections.abc import Iterator

from pipelines.config import Recipe
from pipelines.errors import RecipeError
from pipelines.registry import POLICIES, REWARDS

IN_PROCESS = "transformers"  # the policy that is the network under training itself


def check(recipe: Recipe) -> None:
    """Look at the recipe's `grpo` section; nothing heavy is imported.

    Raises:
        RecipeError: two settings contradict one another; it says what to set.
    """
    for what, do in (*_estimator(recipe), *_corrections(recipe), *_ahead(recipe), *_parts(recipe)):
        raise RecipeError(what, do)


def _estimator(recipe: Recipe) -> Iterator[tuple[str, str]]:
    grpo = recipe.grpo
    if grpo.baseline == "batch" and grpo.scale == "group":
        yield (
            "grpo.baseline=batch learns from groups of equal rewards, whose own deviation, grpo.scale=group, is 0",
            "Set grpo.scale=batch (REINFORCE++) or grpo.scale=none.",
        )
    if grpo.lambda_schema and not any(term.track == "schema" for term in recipe.rewards):
        yield "grpo.lambda_schema is set, but no reward term pays the schema track", "Set track: schema."
    if grpo.credit == "turn":
        yield from _credit(recipe)
    if grpo.order != "shuffled" and "difficulty" not in recipe.stages:
        yield (
            f"grpo.order={grpo.order} takes the questions as the difficulty stage ranks them, and there is none",
            "Add difficulty to stages, or set grpo.order=shuffled.",
        )
    if grpo.baseline == "batch" and (grpo.drop_zero_variance or grpo.resample):
        yield (
            "grpo.baseline=batch learns from groups of equal rewards, too",
            "Set grpo.drop_zero_variance=false grpo.resample=0, which would leave them out.",
        )


def _credit(recipe: Recipe) -> Iterator[tuple[str, str]]:
    grpo = recipe.grpo
    if (grpo.baseline, grpo.scale, grpo.level) != ("others", "none", "token"):
        yield (
            "grpo.credit=turn holds each turn against the group's other episodes, and divides by nothing",
            "Set grpo.baseline=others grpo.scale=none grpo.level=token.",
        )
    if grpo.drop_zero_variance or grpo.resample:
        yield (
            "groups of equal rewards may still have been paid for other turns, from which grpo.credit=turn learns",
            "Set grpo.drop_zero_variance=false grpo.resample=0, which would leave them out.",
        )
    if not any(REWARDS[term.term].by_turn and term.track == "full" for term in recipe.rewards):
        yield (
            "grpo.credit=turn needs a reward term that is paid by turn; all of the recipe's are paid at the end",
            "Add one under rewards:, such as turn_faults, or set grpo.credit=episode.",
        )


def _corrections(recipe: Recipe) -> Iterator[tuple[str, str]]:
    grpo, ahead = recipe.grpo, recipe.rollout.policy == IN_PROCESS and recipe.grpo.staleness
    is_corrected = grpo.importance_cap is not None and (recipe.rollout.policy != IN_PROCESS or ahead)
    if not is_corrected and (grpo.bounds is not None or grpo.importance_level == "sequence"):
        name = "bounds" if grpo.bounds is not None else "importance_level"
        yield (
            f"grpo.{name} corrects for a sampler that is not the policy, and here nothing is corrected",
            "It acts with grpo.staleness or a served policy, and with a grpo.importance_cap.",
        )
    top_p = grpo.sampling.top_p
    if is_corrected and ahead and top_p < 1.0:
        yield (
            f"grpo.sampling.top_p={top_p} is not in the log-probabilities by which grpo.staleness corrects",
            "Set grpo.sampling.top_p=1, or grpo.importance_cap=null to correct nothing.",
        )


def _ahead(recipe: Recipe) -> Iterator[tuple[str, str]]:
    grpo, name = recipe.grpo, recipe.rollout.policy
    served = name != IN_PROCESS
    if served and POLICIES[name].give is None:
        yield (
            f"rollout.policy={name} cannot be sent the weights that GRPO trains",
            "Register it with give=..., or leave rollout.policy to evaluation.",
        )
    if grpo.staleness and not served and recipe.hardware.deepspeed:
        yield (
            "grpo.staleness samples ahead in a process of its own, with a copy of the weights that DeepSpeed cuts up",
            "Set rollout.policy=vllm, or leave hardware.deepspeed out.",
        )
    if grpo.partial == "carry" and not (served and grpo.staleness):
        yield (
            "grpo.partial=carry is for episodes on their way while servers get new weights, and here there are none",
            "Set rollout.policy=vllm and grpo.staleness, or grpo.partial=wait.",
        )
    if grpo.partial == "wait" and served and grpo.staleness > 1:
        yield (
            f"with grpo.staleness={grpo.staleness} servers would never be without episodes between two generations",
            "Set grpo.partial=carry, or grpo.staleness=1.",
        )


def _parts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.hardware.micro_tokens is not None and (recipe.hardware.deepspeed or recipe.grpo.loss == "bnpo"):
        yield (
            "hardware.micro_tokens cuts micro-batches that DeepSpeed counts, and that grpo.loss=bnpo averages over",
            "Lower grpo.micro_batch instead.",
        )
