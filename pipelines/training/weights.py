"""A trained policy's weights as one plain state dict: gathered from all processes, adapters merged into a copy."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from torch import Tensor

from pipelines.training.plan import SERVED

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


# Brings the weights under training to the servers that sample from them, through a folder that both can read.


class WeightSync:
    """Writes the policy's weights and gives them to what samples from them.

    Args:
        give: told the folder of the weights and their step; it says who took them.
        out: the run's folder; the weights go to `out/served/`.
        adapters: low-rank adapters alone are sent, to who has the base.
        dtype: what the servers hold weights in: rounded here, half as many bytes are written and read.

    Attributes:
        places: who has the weights that were last sent; None where nobody says.
    """

    def __init__(
        self,
        give: Callable[[Path, int], Sequence[str] | None],
        out: Path,
        adapters: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._give, self._adapters, self._dtype = give, adapters, dtype
        self.folder = out / SERVED
        self.places: Sequence[str] | None = None
        self._pushed: int | None = None

    def push(self, trainer: Any) -> float:
        """Bring the servers up to the trainer's step, unless they are; the seconds that it took."""
        started = time.perf_counter()
        if self._pushed != trainer.state.global_step:
            step, took = trainer.state.global_step, []
            self._write(trainer)
            trainer.accelerator.wait_for_everyone()  # every process has what was sampled by the weights before
            if trainer.accelerator.is_main_process:
                took = [self._give(self.folder, step)]
            took = took or [None]
            broadcast_object_list(took)
            self.places, self._pushed = took[0], step
        return time.perf_counter() - started

    def _write(self, trainer: Any) -> None:
        network, weights = (adapter_weights if self._adapters else whole_weights)(trainer)
        if trainer.accelerator.is_main_process:
            beside = self.folder.with_name(f"{SERVED}.partial")
            network.save_pretrained(beside, state_dict=rounded(weights, self._dtype))
            trainer.processing_class.save_pretrained(beside)
            shutil.rmtree(self.folder, ignore_errors=True)
            beside.rename(self.folder)


def rounded(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights with floating point numbers of no more bytes than `dtype`; names that share a tensor still do."""
    smaller: dict[tuple[int, torch.Size], Tensor] = {}
    plain = {}
    for name, value in weights.items():
        if value.is_floating_point() and value.element_size() > dtype.itemsize:
            shared = (value.data_ptr(), value.shape)
            if shared not in smaller:
                smaller[shared] = value.to(dtype)
            value = smaller[shared]
        plain[name] = value
    return plain
