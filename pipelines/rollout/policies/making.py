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
from pipelines.rollout.policies.base import Policy


@register("transformers")
def local_policy(checkpoint: str, recipe: Recipe) -> Policy:
    """A checkpoint decoded in this process, on the device that the recipe's hardware names."""
    from pipelines.rollout.model_loading import load
    from pipelines.rollout.policies.transformers import TransformersPolicy

    place = device(recipe, processes.number)
    model, tokenizer = load(checkpoint, recipe.model)
    return TransformersPolicy(model.to(place), tokenizer, recipe.rollout.slots, recipe.rollout.deterministic)


def _give(checkpoint: str, recipe: Recipe, step: int | None) -> list[str]:
    from pipelines.rollout.policies.served import give

    return give(recipe.rollout.servers, checkpoint, step, recipe.grpo.partial == "carry")


@contextlib.contextmanager
def _serve(
    checkpoint: str, recipe: Recipe, folder: Path, say: Callable[[str], None], newest: Path | None
) -> Iterator[Serving]:
    """Servers of this machine's own where the recipe names none."""
    from pipelines.rollout.policies import replicas

    if recipe.rollout.servers:
        yield Serving(recipe)
        return
    plan = replicas.planned(recipe, trains=newest is not None)
    say(f"starting {len(plan.serving)} vLLM server{'s' if len(plan.serving) > 1 else ''} of {checkpoint}")
    with replicas.running(checkpoint, recipe, folder, plan, newest, say) as urls:
        rollout = recipe.rollout.model_copy(update={"servers": urls})
        yield Serving(recipe.model_copy(update={"rollout": rollout}), plan.training)


def _can_serve(recipe: Recipe, trains: bool) -> None:
    from pipelines.rollout.policies import replicas

    if not recipe.rollout.servers:
        replicas.planned(recipe, trains)


def _takes_adapters(recipe: Recipe) -> bool:
    from pipelines.rollout.policies.served import takes_adapters

    return takes_adapters(recipe.rollout.servers)


@register("vllm", give=_give, serve=_serve, can_serve=_can_serve, takes_adapters=_takes_adapters)
def served_policy(checkpoint: str, recipe: Recipe) -> Policy:
    """Servers of vLLM, which must hold the checkpoint."""
    from pipelines.rollout.policies.served import probe
    from pipelines.rollout.policies.vllm import VllmPolicy

    holds = functools.cache(lambda: probe(checkpoint, recipe.model))
    carries, adapters = recipe.grpo.partial == "carry", recipe.model.sends_adapters
    return VllmPolicy(recipe.rollout.servers, checkpoint, holds, carries, adapters, recipe.model.revision)


def teaching(recipe: Recipe) -> str:
    """The checkpoint of a teacher that is the policy itself."""
    if recipe.model.source == "tiny":
        raise RecipeError(
            "synthesis.teacher.kind=policy samples from the base model, and the tiny one has learned nothing",
            "Set model.source to a checkpoint: the folder model/ of a finished sft stage.",
        )
    return recipe.model.source


def device(recipe: Recipe, number: int) -> str:
    """Where a stage's worker process decodes: the GPUs are dealt out in turn.

    Args:
        number: of the process among the stage's, from 0.
    """
    import torch

    wanted, count = recipe.hardware.device, torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not count):
        return "cpu"
    if not count:
        raise ResourceError("this machine has no CUDA device", "Set hardware.device=auto, or cpu.")
    return f"cuda:{number % count}"


def policy(checkpoint: str, recipe: Recipe) -> Policy:
    """The policy that makes rollouts, as the recipe's rollout section names it."""
    made: Policy = POLICIES[recipe.rollout.policy].make(checkpoint, recipe, **recipe.rollout.options)
    return made


@contextlib.contextmanager
def serving(
    checkpoint: str, recipe: Recipe, folder: Path, say: Callable[[str], None], newest: Path | None = None
) -> Iterator[Serving]:
    """While a stage asks its policy: what generates runs, and holds the weights of the stage's checkpoint.

    Args:
        folder: the stage's work folder, for logs.
        say: told when something is started.
        newest: where GRPO puts the weights that it sends; None where nothing is trained.
    """
    maker = POLICIES[recipe.rollout.policy]
    with contextlib.ExitStack() as stack:
        served = Serving(recipe)
        if maker.serve is not None:
            served = stack.enter_context(maker.serve(checkpoint, recipe, folder, say, newest))
        if maker.give is not None and newest is None:
            maker.give(checkpoint, served.recipe, None)
        yield served
