"""The check of libraries and devices before training: hours of earlier stages should not end at a missing one."""

from pipelines.core.errors import RecipeError
from pipelines.recipe.config import Recipe
from pipelines.rollout.policies.factories import device


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
    if recipe.hardware.python is not None:
        return
    if bits is not None:
        from pipelines.rollout.model_loading import require_bitsandbytes

        require_bitsandbytes()
    if recipe.hardware.processes == "gpu":
        on_cuda = recipe.hardware.model_copy(update={"device": "cuda"})
        device(recipe.model_copy(update={"hardware": on_cuda}), 0)
    if recipe.hardware.device == "cuda":
        device(recipe, 0)
