"""What a GRPO step knows beside its tensors: the forward pass that its tracks share, and where its time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipelines.training.row_selection import Forward


@dataclass
class Pass:
    """One computation of log-probabilities over a batch.

    Attributes:
        rows: (B,) which rows need a forward; None for all.
        kept: what was computed: a second track costs no second forward.
    """

    rows: Tensor | None = None
    kept: Forward | None = None


@dataclass
class StepState:
    """The one owner of what lives longer than a call and shorter than a run.

    Attributes:
        seconds: of the current step, by what they were spent on.
        beside: tokens, and seconds of what another process did meanwhile: no part of them.
        watched: what is logged with each step that trains on the current generation.
        old: rows that the pass for the old log-probabilities needs; None for all.
        current: the pass of the micro-batch whose loss is being computed; None outside a loss.
        sums: (4,) of this process in this step: entropies and their tokens, the distances between trainer and sampler
            and theirs; None before its first loss.
        farthest: () the largest such distance; None as well.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    watched: dict[str, float] = field(default_factory=dict)
    old: Tensor | None = None
    current: Pass | None = None
    sums: Tensor | None = None
    farthest: Tensor | None = None

    def add(self, sums: Tensor, farthest: Tensor) -> None:
        """Take in the sums of one loss."""
        self.sums = sums if self.sums is None else self.sums + sums
        self.farthest = farthest if self.farthest is None else torch.maximum(self.farthest, farthest)

    def take_sums(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`sums` and `farthest` of this step; the next one begins at none."""
        sums, farthest, self.sums, self.farthest = self.sums, self.farthest, None, None
        none = torch.zeros(4, device=device)
        return none if sums is None else sums, none[0] if farthest is None else farthest

    def spend(self, on: str, seconds: float) -> None:
        """Add to the seconds of this step that went into one thing."""
        self.seconds[on] = self.seconds.get(on, 0.0) + seconds

    def count(self, what: str, tokens: float) -> None:
        """Add to the tokens of this step that something was done with."""
        self.beside[what] = self.beside.get(what, 0.0) + tokens

    def take_seconds(self) -> dict[str, float]:
        """The seconds of this step so far, and of others beside it; the next one begins at none."""
        taken, self.seconds, self.beside = self.seconds | self.beside, {}, {}
        return taken

    @contextmanager
    def loss(self, rows: Tensor) -> Iterator[Pass]:
        """Inside, one forward over `rows` serves all tracks of a micro-batch."""
        self.current = Pass(rows)
        try:
            yield self.current
        finally:
            self.current = None
