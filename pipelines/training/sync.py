"""Brings the weights under training to the servers that sample from them, through a folder that both can read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]
from torch import Tensor

from pipelines.training.plan import SERVED
from pipelines.training.weights import adapter_weights, whole_weights


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
        """Bring the servers up to the trainer's step, unless they are; the seconds that it took.

        Raises:
            EndpointError: a server does not take the weights.
        """
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
