"""A trained policy's weights as one plain state dict: gathered from all processes, adapters merged into a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

BASE = "base_model.model."  # what PEFT puts before a name
ADAPTER = "default"  # the name that PEFT gives to the only adapter


def whole_weights(trainer: Any) -> tuple[Any, dict[str, Tensor]]:
    """The base network, and the policy's weights by the base network's names; the policy itself is left as it is."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not hasattr(network, "peft_config"):
        return network, weights
    lora = network.peft_config[ADAPTER]
    return network.get_base_model(), merged(weights, lora.lora_alpha / lora.r)


def adapter_weights(trainer: Any) -> tuple[Any, dict[str, Tensor]]:
    """The network with its low-rank adapters, and its weights, of which it saves the adapters' alone."""
    return trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator.get_state_dict(trainer.model_wrapped)


def merged(weights: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """A base's weights with its low-rank adapters added, W + scaling * B A, in new tensors of the base's dtype.

    Merging in place and taking the adapters out again would round a bfloat16 base each time, and so change it.

    Args:
        weights: the state dict of a PEFT model, with `base_layer`, `lora_A` and `lora_B` of each adapted layer.
        scaling: alpha / rank.
    """
    plain = {}
    for name, value in weights.items():
        if ".lora_" in name:
            continue
        layer, _, part = name.rpartition(".base_layer.")
        down, up = (f"{layer}.lora_{side}.{ADAPTER}.weight" for side in "AB")
        if part == "weight" and down in weights:
            value = (value.float() + scaling * (weights[up].float() @ weights[down].float())).to(value.dtype)
        plain[name.removeprefix(BASE).replace(".base_layer.", ".")] = value
    return plain
