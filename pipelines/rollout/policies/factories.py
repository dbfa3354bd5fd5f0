"""The policies that a recipe may name, and where they decode; what is heavy is imported when one is made."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.core import processes
from pipelines.core.errors import RecipeError, ResourceError
from pipelines.core.registry import POLICIES, Serving
from pipelines.core.registry import policy as register
from pipelines.recipe.config import Recipe
from pipelines.rollout.policies import replicas, served_weights
from pipelines.rollout.policies.base import Policy

IN_PROCESS = "transformers"  # the policy that decodes in this process; under training it is the network itself


@register(IN_PROCESS)
def local_policy(checkpoint: str, recipe: Recipe) -> Policy:
    """A checkpoint decoded in this process, on the device that the recipe's hardware names."""
    from pipelines.rollout.model_loading import load
    from pipelines.rollout.policies.transformers import TransformersPolicy

    place = device(recipe, processes.number)
    model, tokenizer = load(checkpoint, recipe.model)
    return TransformersPolicy(model.to(place), tokenizer, recipe.rollout.slots, recipe.rollout.deterministic)


def _send_weights(checkpoint: str, recipe: Recipe, step: int | None) -> list[str]:
    """Have the recipe's servers load a checkpoint; the servers that did."""
    carries = recipe.grpo.partial == "carry"
    return served_weights.send_weights(recipe.rollout.servers, checkpoint, step, carries)


@register(
    "vllm",
    send_weights=_send_weights,
    serve=replicas.running_servers,
    check_servers=lambda recipe, trains: recipe.rollout.servers or replicas.planned_layout(recipe, trains),
    takes_adapters=lambda recipe: served_weights.takes_adapters(recipe.rollout.servers),
)
def served_policy(checkpoint: str, recipe: Recipe) -> Policy:
    """Servers of vLLM, which must hold the checkpoint."""
    from pipelines.rollout.policies.vllm import VllmPolicy

    probe = functools.cache(lambda: served_weights.probe(checkpoint, recipe.model))
    return VllmPolicy(
        recipe.rollout.servers,
        checkpoint,
        probe,
        carries=recipe.grpo.partial == "carry",
        adapters=recipe.model.sends_adapters,
        revision=recipe.model.revision,
    )


def teaching(recipe: Recipe) -> str:
    """The checkpoint of a teacher that is the policy itself."""
    if recipe.model.source == "tiny":
        raise RecipeError(
            "synthesis.teacher.kind=policy samples from the base model, and the tiny one has learned nothing",
            "Set model.source to a checkpoint: the folder model/ of a finished sft stage.",
        )
    return recipe.model.source


def device(recipe: Recipe, number: int) -> str:
    """The device on which a stage's worker process of that number, from 0, decodes: the GPUs are dealt out in turn."""
    import torch

    wanted = recipe.hardware.device
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not count):
        return "cpu"
    if not count:
        raise ResourceError("this machine has no CUDA device", "Set hardware.device=auto, or cpu.")
    return f"cuda:{number % count}"


def require_policy(recipe: Recipe, decodes: bool, trains: bool) -> None:
    """Refuse a recipe whose policy lacks a device or servers here.

    Args:
        decodes: whether stages that train nothing make rollouts with it.
        trains: whether GRPO trains it.
    """
    decodes_here = decodes and recipe.rollout.policy == IN_PROCESS
    if decodes_here and recipe.hardware.device == "cuda":
        device(recipe, 0)
    check_servers = POLICIES[recipe.rollout.policy].check_servers
    if check_servers is not None and (decodes or trains):
        check_servers(recipe, trains)


def policy(checkpoint: str, recipe: Recipe) -> Policy:
    """The policy that makes rollouts, as the recipe's rollout section names it."""
    made: Policy = POLICIES[recipe.rollout.policy].make(checkpoint, recipe, **recipe.rollout.options)
    return made


@contextlib.contextmanager
def serving(
    checkpoint: str, recipe: Recipe, folder: Path, say: Callable[[str], None], newest: Path | None = None
) -> Iterator[Serving]:
    """While a stage asks its policy: its servers run, and hold the weights of its checkpoint.

    Logs go to its work folder. `newest` is the folder of the weights that GRPO sends; None if nothing is trained.
    """
    maker = POLICIES[recipe.rollout.policy]
    with contextlib.ExitStack() as stack:
        serving = Serving(recipe)
        if maker.serve is not None:
            serving = stack.enter_context(maker.serve(checkpoint, recipe, folder, say, newest))
        if maker.send_weights is not None and newest is None:
            maker.send_weights(checkpoint, serving.recipe, None)
        yield serving
