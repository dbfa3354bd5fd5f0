"""The policies that a recipe may name, and where they decode; what is heavy is imported when one is made."""

from __future__ import annotations

import functools

from pipelines import processes
from pipelines.config import Recipe
from pipelines.errors import ResourceError
from pipelines.registry import POLICIES
from pipelines.registry import policy as register
from pipelines.rollout.policies.base import Policy


@register("transformers")
def local_policy(checkpoint: str, recipe: Recipe) -> Policy:
    """A checkpoint decoded in this process, on the device that the recipe's hardware names.

    Raises:
        DataError: there is no model at that folder or hub name.
        ResourceError: there is no such device.
    """
    from pipelines.loading import load
    from pipelines.rollout.policies.transformers import TransformersPolicy

    place = device(recipe, processes.number)
    model, tokenizer = load(checkpoint, recipe.model)
    return TransformersPolicy(model.to(place), tokenizer, recipe.rollout.slots, recipe.rollout.deterministic)


def _give(checkpoint: str, recipe: Recipe, must: bool) -> None:
    from pipelines.rollout.policies.served import give

    give(recipe.rollout.servers, checkpoint, must)


@register("vllm", give=_give)
def served_policy(checkpoint: str, recipe: Recipe) -> Policy:
    """Servers of vLLM, which must hold the checkpoint.

    Raises:
        ResourceError: no server is named; in a run of it, when a server holds other weights.
    """
    from pipelines.rollout.policies.served import probe
    from pipelines.rollout.policies.vllm import VllmPolicy

    return VllmPolicy(recipe.rollout.servers, checkpoint, functools.cache(lambda: probe(checkpoint, recipe.model)))


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
    """The policy that makes rollouts, as the recipe's rollout section names it.

    Raises:
        ResourceError: what it needs is not there.
    """
    return POLICIES[recipe.rollout.policy].make(checkpoint, recipe, **recipe.rollout.options)


def prepare(checkpoint: str, recipe: Recipe) -> None:
    """Before a stage's processes start: give the policy the weights of its checkpoint, if it takes any.

    Raises:
        EndpointError: a server does not answer.
    """
    give = POLICIES[recipe.rollout.policy].give
    if give is not None:
        give(checkpoint, recipe, False)
