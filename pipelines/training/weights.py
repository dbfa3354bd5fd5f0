"""A trained policy's weights as one plain state dict: gathered from all processes, adapters merged into a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BASE = "base_model.model."  # what PEFT puts before a name
ADAPTER = "default"  # the name that PEFT gives to the only adapter


def whole_weights(trainer: Any) -> tuple[Any, dict[str, Tensor]]:
    """A network that saves the policy, and the policy's weights by its names; the policy itself is left as it is."""
    network = trainer.accelerator.unwrap_model(trainer.model)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not hasattr(network, "peft_config"):
        return network, weights
    lora = network.peft_config[ADAPTER]
    return plain(network.get_base_model()), merged(dequantized(network, weights), lora.lora_alpha / lora.r)


def plain(network: Any) -> Any:
    """The network itself, or, where it is quantized, an empty one that saves weights given in full."""
    if not getattr(network, "is_quantized", False):
        return network
    settings = network.config.to_dict()
    settings.pop("quantization_config")
    with torch.device("meta"):
        empty = type(network)(type(network.config).from_dict(settings))
    empty.generation_config = network.generation_config
    return empty


def dequantized(network: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with 4-bit matrices as the forward computes with them, and without their scales."""
    whole = dict(weights)
    for name, value in network.named_parameters():
        state = getattr(value, "quant_state", None)
        if state is None:
            continue
        from bitsandbytes.functional import dequantize_4bit

        for key in [key for key in whole if key.startswith(f"{name}.")]:
            del whole[key]
        whole[name] = dequantize_4bit(value.data, state)
    return whole


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
