"""The forward and backward of a micro-batch: on rows that have weight, without padding, in parts that fit a memory."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from pipelines.recipe.config_training import Grpo
from pipelines.training import packing, record
from pipelines.training.packing import (
    Forward,
    by_length,
    by_tokens,
    dense,
    joined,
    moving,
    only,
    scatter,
    shares,
    sorting,
)
from pipelines.training.plan import Plan
from pipelines.training.sft import LIKE_ROWS

# What a GRPO step knows beside its tensors: the forward pass that its tracks share, and where its time went.


@dataclass
class ForwardPass:
    """One computation of log-probabilities over a batch."""

    rows: Tensor | None = None  # (B,) which rows need a forward; None for all.
    kept: Forward | None = None  # what was computed: a second track costs no second forward.


@dataclass
class StepState:
    """The one owner of what lives longer than a call and shorter than a run."""

    seconds: dict[str, float] = field(default_factory=dict)  # of the current step, by what they were spent on.
    # tokens, and seconds of what another process did meanwhile: no part of them.
    beside: dict[str, float] = field(default_factory=dict)
    # what is logged with each step that trains on the current generation.
    watched: dict[str, float] = field(default_factory=dict)
    old: Tensor | None = None  # rows that the pass for the old log-probabilities needs; None for all.
    current: ForwardPass | None = None  # the pass of the micro-batch whose loss is being computed; None outside a loss.
    # (4,) of this process in this step: entropies and their tokens, the distances between trainer and sampler and
    # theirs; None before its first loss.
    sums: Tensor | None = None
    farthest: Tensor | None = None  # () the largest such distance; None as well.

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
    def loss(self, rows: Tensor) -> Iterator[ForwardPass]:
        """Inside, one forward over `rows` serves all tracks of a micro-batch."""
        self.current = ForwardPass(rows)
        try:
            yield self.current
        finally:
            self.current = None


class TrainingPass(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with another forward and backward: what the loss is, it leaves to others."""

    plan: Plan
    grpo: Grpo
    step_state: StepState
    beta: float

    def prepare_networks(self) -> None:
        """Let the networks attend over flat rows, where they can."""
        for network in (self.model, self.ref_model):
            if network is not None:
                packing.prepare(self.accelerator.unwrap_model(network))

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's loss. Of a micro-batch that is cut into parts, all but the last have their backward here."""
        *parts, last = self._parts(model, inputs)
        loss: Tensor
        before: float | Tensor = 0.0
        for part in parts:
            with unsynchronised(self.accelerator, model):
                loss = super().compute_loss(model, part, *args, **kwargs)
                self.accelerator.backward(loss)
            before = before + loss.detach()
        loss = super().compute_loss(model, last, *args, **kwargs)
        return loss + before

    def _parts(self, model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """A micro-batch in parts of `hardware.micro_tokens`, as many on every process: their losses add up to its own.

        Each has all rows, of which those of the other parts have no weight, and so no forward: TRL counts rows in some
        losses, and exchanges numbers of each row between processes.
        """
        most = self.plan.recipe.hardware.micro_tokens
        if most is None:
            return [inputs]
        packs = packing.suits(self.accelerator.unwrap_model(model))
        parts = by_tokens(*joined(inputs), moving(inputs, self.beta).nonzero().flatten(), most, packs)
        count = self._most(len(parts))
        parts += [parts[0][:0]] * (count - len(parts))
        return [inputs] if count == 1 else [inputs | only(inputs, rows) for rows in parts]

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> Forward:
        """The forward on rows that have weight: without padding, and what they begin with alike once.

        Where the model cannot be packed it is TRL's own, on rows of like length.
        """
        current = self.step_state.current or ForwardPass(self.step_state.old)
        if current.kept is not None:
            return current.kept
        packs = packing.suits(self.accelerator.unwrap_model(model)) and not kwargs.get("compute_aux_loss")
        size = min(batch_size or len(input_ids), len(input_ids) if packs else LIKE_ROWS)
        compute = functools.partial(super()._get_per_token_logps_and_entropies, model, **kwargs)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        if current.rows is not None:
            # One row at least keeps every process's backward alike.
            rows = rows[current.rows] if current.rows.any() else rows[:1]
        most = self.plan.recipe.hardware.micro_tokens
        if most is not None and self.step_state.current is None:  # a loss is given a part that is cut already
            batches, repeats = by_tokens(input_ids, attention_mask, rows, most, packs), 0  # no backward: none waits
            rows = torch.cat(batches)
        else:
            rows = rows[(sorting if packs else by_length)(input_ids[rows], attention_mask[rows])]
            batches, repeats = shares(rows, -(-len(input_ids) // size))
        forward = functools.partial(self._packed, model) if packs else functools.partial(dense, compute)
        parts = [forward(input_ids[part], attention_mask[part], logits_to_keep) for part in batches]
        result = scatter(parts[: len(parts) - repeats], rows, len(input_ids))
        for logps, _, _ in parts[len(parts) - repeats :]:
            result = (result[0] + 0.0 * logps.sum(), *result[1:])  # part of the graph: its backward runs too
        current.kept = result
        return result

    def _packed(self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int) -> Forward:
        packed = packing.pack(input_ids, attention_mask, completion)
        if self.step_state.current is not None:  # not the pass for the old log-probabilities, which has no backward
            self.step_state.count(record.COMPUTED, packed.input_ids.numel())
        with self.accelerator.autocast():
            return packing.forward(model, packed, attention_mask[:, -completion:])

    def _most(self, count: int) -> int:
        """The largest of the processes' counts."""
        if self.accelerator.num_processes == 1:
            return count
        counts: Tensor = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device))
        return int(counts.max())


@contextmanager
def unsynchronised(accelerator: Any, model: Any) -> Iterator[None]:
    """Inside, backwards add up gradients on each process by itself: the last one outside brings them together."""
    state = accelerator.gradient_state
    before = state.sync_gradients
    with accelerator.no_sync(model):
        state._set_sync_gradients(False)
        try:
            yield
        finally:
            state._set_sync_gradients(before)
