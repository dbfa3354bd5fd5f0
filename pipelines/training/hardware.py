"""The check of libraries and devices before training: hours of earlier stages should not end at a missing one."""

import importlib.util
import json
from pathlib import Path

from pipelines.core.errors import RecipeError, ResourceError, first_line
from pipelines.core.registry import OPTIMIZERS
from pipelines.recipe.config import Recipe
from pipelines.recipe.recipes import CONF
from pipelines.rollout.policies.factories import device
from pipelines.training.samples import split_batch

COARSE_MASTERS = "bf16_master_weights_and_grads"  # DeepSpeed's setting to keep no float32 weights


def require_training_hardware(recipe: Recipe) -> None:
    """Refuse a recipe whose training lacks a library or a device on this machine.

    Raises:
        RecipeError: settings of the hardware that do not go together.
        ResourceError: a missing library or device; another Python (`hardware.python`) reports for itself.
    """
    bits = None
    if recipe.model.lora is not None:
        bits = recipe.model.lora.bits
    if recipe.hardware.deepspeed and bits:
        raise RecipeError("DeepSpeed shares out no base of 4 bits", "Leave out hardware.deepspeed or model.lora.bits.")
    rows = recipe.grpo.questions_per_step * recipe.grpo.group
    for stage, section, batch in (("sft", recipe.sft, recipe.sft.batch), ("grpo", recipe.grpo, rows)):
        if stage not in recipe.stages:
            continue
        deepspeed_file(recipe.hardware.deepspeed, section.optimizer.kind)
        if isinstance(recipe.hardware.processes, int):
            split_batch(batch, section.micro_batch, recipe.hardware.processes)
    if recipe.hardware.python is not None:
        return
    starts_elsewhere = bool(recipe.hardware.launch)  # in the environment of its launcher
    if recipe.hardware.deepspeed and not starts_elsewhere and importlib.util.find_spec("deepspeed") is None:
        hint = "Run: pip install 'sqltrain[gpu]'; or name the Python that has it as hardware.python."
        raise ResourceError("hardware.deepspeed: DeepSpeed is not installed", hint)
    if bits is not None:
        from pipelines.rollout.model_loading import require_bitsandbytes

        require_bitsandbytes()
    if recipe.hardware.processes == "gpu":
        on_cuda = recipe.hardware.model_copy(update={"device": "cuda"})
        device(recipe.model_copy(update={"hardware": on_cuda}), 0)
    if recipe.hardware.device == "cuda":
        device(recipe, 0)


def deepspeed_file(name: str | None, optimizer: str) -> str | None:
    """DeepSpeed's configuration: a file of one's own, or one of `infra/deepspeed/` by name ("zero2", "zero3").

    Args:
        name: `hardware.deepspeed`.
        optimizer: the kind of the optimiser that it is for.

    Raises:
        RecipeError: there is no such file, it is no JSON object, or it does not go with the optimiser.
    """
    if name is None:
        return None
    if OPTIMIZERS[optimizer].whole_matrices:
        raise RecipeError(f"{optimizer} needs whole matrices, and DeepSpeed cuts them up", "Set optimizer.kind=adamw.")
    folder = CONF.parent / "infra" / "deepspeed"
    path = folder / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        stems = sorted(file.stem for file in folder.glob("*.json"))
        names = ", ".join(stems)
        raise RecipeError(f"hardware.deepspeed: no such file {name}", f"Give a JSON file or one of: {names}.")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError(f"{path} is no JSON: {first_line(error)}", "Mend the file of hardware.deepspeed.") from None
    if not isinstance(settings, dict):
        raise RecipeError(f"{path} is no JSON object", "Mend the file of hardware.deepspeed.")
    bfloat16 = settings.get("bf16")
    if isinstance(bfloat16, dict) and bfloat16.get(COARSE_MASTERS):
        raise RecipeError(f"{path}: {COARSE_MASTERS} rounds small updates away", "Let ZeRO keep its float32 weights.")
    return str(path)
