"""The policy under training or evaluation, as the recipe's rollout section names it."""

from __future__ import annotations

from pipelines.config import Recipe
from pipelines.errors import ResourceError
from pipelines.rollout.policies.base import Policy
from pipelines.stages import shards


def local_policy(checkpoint: str, recipe: Recipe, slots: int | None = None) -> Policy:
    """A checkpoint decoded in this process, on the device that the recipe's hardware names.

    Raises:
        DataError: there is no model at that folder or hub name.
        ResourceError: there is no such device.
    """
    from pipelines.rollout.policies.transformers import TransformersPolicy
    from pipelines.training.model import load

    place = device(recipe, shards.number)
    model, tokenizer = load(checkpoint, recipe.model)
    rollout = recipe.rollout
    return TransformersPolicy(model.to(place), tokenizer, slots or rollout.slots, rollout.deterministic)


def device(recipe: Recipe, number: int) -> str:
    """Where a stage's worker process decodes: the GPUs are dealt out in turn.

    Args:
        number: of the process among the stage's, from 0.

    Raises:
        ResourceError: a GPU is asked for and there is none.
    """
    import torch

    wanted, count = recipe.hardware.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not count):
        return "cpu"
    if not count:
        raise ResourceError("this machine has no CUDA device", "Set hardware.device=auto, or cpu.")
    return f"cuda:{number % count}"


def policy(checkpoint: str, recipe: Recipe) -> Policy:
    """The policy that makes rollouts outside training: in process, or vLLM servers, which must hold the checkpoint.

    Raises:
        ResourceError: in a run of it, when a server holds other weights.
    """
    if recipe.rollout.policy == "transformers":
        return local_policy(checkpoint, recipe)
    from pipelines.rollout.policies.served import probe
    from pipelines.rollout.policies.vllm import VllmPolicy

    return VllmPolicy(recipe.rollout.servers, checkpoint, probe(checkpoint, recipe.model))


def prepare(checkpoint: str, recipe: Recipe) -> None:
    """Before a stage's processes start: give the recipe's vLLM servers the weights of its checkpoint.

    Raises:
        EndpointError: a server does not answer.
    """
    if recipe.rollout.policy == "vllm":
        from pipelines.rollout.policies.served import give

        give(recipe.rollout.servers, checkpoint)
