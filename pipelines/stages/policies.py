"""The policy under training or evaluation, as the recipe's rollout section names it."""

from __future__ import annotations

from pipelines.config import Recipe
from pipelines.rollout.policies.base import Policy


def local_policy(checkpoint: str, recipe: Recipe, slots: int | None = None) -> Policy:
    """A checkpoint decoded in this process.

    Raises:
        DataError: there is no model at that folder or hub name.
    """
    from pipelines.rollout.policies.transformers import TransformersPolicy
    from pipelines.training.model import load

    model, tokenizer = load(checkpoint, recipe.model)
    rollout = recipe.rollout
    return TransformersPolicy(model, tokenizer, slots or rollout.slots, rollout.deterministic)


def policy(checkpoint: str, recipe: Recipe) -> Policy:
    """The policy that makes rollouts outside training: in process, or a vLLM server that serves the checkpoint."""
    if recipe.rollout.policy == "transformers":
        return local_policy(checkpoint, recipe)
    from pipelines.rollout.policies.vllm import VllmPolicy

    return VllmPolicy(recipe.rollout.servers, checkpoint)
