"""How fast a step was, from its seconds and its tokens: tokens a second of one device, and the share of its peak."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Tokens of this process, beside the seconds of a step; what rows begin with alike is trained on in each, computed once.
TRAINED, COMPUTED, SAMPLED = "trained_tokens", "computed_tokens", "sampled_tokens"
SAMPLER = "sampler_seconds"  # of another thread or machine
WORK = ("generate_seconds", "train_seconds")  # in which the device computes; a step without them only trains
# Dense bfloat16 operations a second, from the vendors' data sheets; the longest name that the device's holds.
PEAKS = {
    **{"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12},
    **{"A100": 312e12, "A40": 149.7e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165.2e12},
}


class Meter:
    """Turns a step's seconds and tokens into rates.

    Args:
        network: what is trained; adapters alone cost 4 operations a parameter and token, all weights 6 (Kaplan et al.,
            2020), attention and what is computed again left out.
        device: the device's name, where it has one.
    """

    def __init__(self, network: Any, device: str | None = None) -> None:
        counts = list(sizes(network))
        whole, trained = sum(count for count, _ in counts), sum(count for count, moves in counts if moves)
        self.operations = 4 * whole + 2 * trained
        name = device if device is not None else _device()
        longest_first = sorted(PEAKS, key=len, reverse=True)
        known = (key for key in longest_first if re.search(rf"\b{key}(?!\d)", name))  # an L40 is no L4
        self.peak = PEAKS.get(next(known, ""))

    def rates(self, spent: Mapping[str, float]) -> dict[str, float]:
        """`trained_per_s`, `sampled_per_s`, `mfu` (the share of the device's peak in training) and `idle`.

        Args:
            spent: the seconds of a step by what they were spent on, and its tokens.
        """
        trained, sampled = spent.get(TRAINED, 0.0), spent.get(SAMPLED, 0.0)
        training_s, waited_s = spent.get("train_seconds", spent["seconds"]), spent.get("generate_seconds", 0.0)
        sampling_s = spent.get(SAMPLER, waited_s)  # of another sampler, for which this one waited
        rates: dict[str, float] = {}
        if trained and training_s:
            rates["trained_per_s"] = trained / training_s
            if self.peak is not None:
                rates["mfu"] = self.operations * spent.get(COMPUTED, trained) / training_s / self.peak
        if sampled and sampling_s:
            rates["sampled_per_s"] = sampled / sampling_s
        if all(name in spent for name in WORK) and spent["seconds"]:
            rates["idle"] = max(0.0, 1.0 - (training_s + (0.0 if SAMPLER in spent else waited_s)) / spent["seconds"])
        return rates


def sizes(network: Any) -> Iterator[tuple[int, bool]]:
    """Of each parameter: how many numbers it has, also where 4 bits hold each, and whether it is trained."""
    for value in network.parameters():
        packed = getattr(value, "quant_state", None)
        yield value.numel() if packed is None else packed.shape.numel(), value.requires_grad


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
