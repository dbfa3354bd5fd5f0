"""The optimisers that a recipe may name; what needs torch is imported when one is made."""

from typing import Any

from pipelines.core.errors import RecipeError
from pipelines.core.registry import optimizer
from pipelines.recipe.config import Optimizer


@optimizer("adamw")
def adamw(network: Any, settings: Optimizer) -> None:
    """AdamW as transformers makes it of the settings; DeepSpeed may put its own in its place."""


@optimizer("muon", whole_matrices=True)
def muon(network: Any, settings: Optimizer, lr_rest: float | None = None) -> Any:
    """Muon for the matrices of the blocks, AdamW for the rest: for tiny models from scratch.

    Args:
        lr_rest: the rate of what Muon leaves to AdamW; None takes the settings' one rate.
    """
    from pipelines.training.muon import MuonAdamW, matrices_and_rest

    matrices, rest = matrices_and_rest(network)
    if not matrices or not rest:
        missing = "matrices in blocks named .layers." if not matrices else "weights to train outside those matrices"
        raise RecipeError(f"muon finds no {missing}", "Set optimizer.kind=adamw.")
    return MuonAdamW(matrices, rest, settings, lr_rest)
