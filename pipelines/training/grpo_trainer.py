"""One step of GRPO, from the sampled group to the gradient: our overrides of TRL's trainer, in its call order.

TRL's code is called, never copied. For each micro-batch, transformers and TRL call:

1. `training_step`, which times what follows.
2. `_prepare_inputs`. With a generation's first micro-batch TRL calls 3 to 6, and cuts the generation into
   micro-batches, which are regrouped here.
3. `_generate_and_score_completions`, which calls `_rollout` as TRL's `rollout_func`: episodes are played and paid
   (`rollouts.py`), and what is logged of them is noted (`generation_log.py`).
4. `_get_per_token_logps_and_entropies` without a gradient: the old log-probabilities, if a generation has several
   updates, and those of a reference.
5. `reward`, which hands TRL the payments.
6. The rest of `_generate_and_score_completions`: our advantages take the place of TRL's (`advantages.py`).
7. `compute_loss`, which splits a micro-batch to fit in memory (`micro_batches.py`).
8. `_compute_loss`: the loss of each track (`losses.py`).
9. `_get_per_token_logps_and_entropies` with a gradient: the forward (`packing.py`).
10. `log`, after the last micro-batch of a step and the optimiser.
"""

import functools
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad

from pipelines.core.registry import LOSSES
from pipelines.core.types import Example
from pipelines.training import advantages, packing, record
from pipelines.training.generation_log import StepLog, generation_metrics
from pipelines.training.losses import TrackBatch, ratios, sampler_weights
from pipelines.training.micro_batches import (
    TokenScores,
    full_track_mask,
    prefix_order,
    prompt_and_completion,
    regroup,
    rows_with_gradient,
    scatter_rows,
    select_rows,
    split_by_tokens,
    split_rows_evenly,
    without_padding,
)
from pipelines.training.model import WeightSync, whole_weights
from pipelines.training.plan import HELD_OUT, HELD_OUT_COUNT, HELD_OUT_TURNS, Plan
from pipelines.training.rollouts import (
    FULL,
    SCHEMA,
    Generation,
    Rollouts,
    split_prompt,
    token_advantages,
    turn_payments,
)
from pipelines.training.rollouts_ahead import RolloutsAhead
from pipelines.training.samples import LIKE_ROWS
from pipelines.training.trainer import TrainerMixin

NAN = float("nan")


def reward(paid: Sequence[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the payments of a rollout. None leaves an episode out of its group."""
    return list(paid)


@dataclass
class LossForward:
    """The one forward of a micro-batch whose loss is being computed: TRL's loss and ours share its result."""

    rows: Tensor  # (B,) which rows need a forward.
    scores: TokenScores | None = None  # the result; None before it is computed.


class GrpoTrainer(TrainerMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer over our own episodes, with advantages and a loss for each track.

    A forward leaves out padding and rows without a gradient, computes shared prefixes once, and splits a micro-batch to
    fit in memory.
    """

    beta: float
    _buffered_inputs: list[dict[str, Tensor]] | None

    def __init__(
        self,
        *,
        plan: Plan,
        rollouts: Rollouts,
        step_log: StepLog,  # read by the run's recorder too
        sync: WeightSync | None = None,  # brings weights to the servers that sample; None if the network itself does
        held_out: Sequence[Example] = (),  # questions to measure the policy on, every `grpo.held_out_steps` steps
        **kwargs: Any,
    ) -> None:
        self.plan = plan
        self.grpo = plan.recipe.grpo
        self.loss = LOSSES[self.grpo.loss]
        self.rollouts = rollouts
        self.step_log = step_log
        self.sync = sync
        self.held_out = held_out
        self.ahead: RolloutsAhead | None = None  # samples the next generation while this one is trained on
        self.generation: Generation | None = None
        self._old_rows: Tensor | None = None  # (B,) rows that old log-probabilities are needed of; None for all
        self._loss_forward: LossForward | None = None  # set while a loss is computed
        super().__init__(
            reward_funcs=[reward], rollout_func=lambda prompts, trainer: trainer._rollout(prompts), **kwargs
        )
        self.require_no_balancing(plan.recipe.hardware.micro_tokens)
        for network in (self.model, self.ref_model):
            if network is not None:
                packing.use_packed_attention(self.accelerator.unwrap_model(network))

    # 1. The step of a micro-batch.

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's step, timed: `train_seconds` leaves out the rollouts and their scoring."""
        seconds = self.step_log.seconds
        started = time.perf_counter()
        before = sum(seconds.values())
        loss: Tensor = super().training_step(*args, **kwargs)
        rollout_seconds = sum(seconds.values()) - before
        seconds["train_seconds"] += time.perf_counter() - started - rollout_seconds
        return loss

    # 2. The generation, cut into micro-batches.

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batches, regrouped after each generation so that rows that begin alike share one."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        is_new = self._buffered_inputs is not before
        if self._buffered_inputs is None or not is_new or self.loss.by_micro_batch:
            return inputs
        has_gradient = functools.partial(rows_with_gradient, beta=self.beta)
        self._buffered_inputs = regroup(self._buffered_inputs, has_gradient)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # 3. The episodes.

    def _rollout(self, prompts: list[str]) -> dict[str, Any]:
        """TRL's `rollout_func`: the prompts are example ids, repeated for each episode of their group."""
        index = self.state.global_step // self.num_iterations
        context: Any = nullcontext()
        if self.sync is None and self.is_deepspeed_enabled:
            # Episodes are made in process: ZeRO-3 must bring each process the weights that it keeps in parts.
            context = unwrap_model_for_generation(self.model_wrapped, self.accelerator)
        with context:
            generation = self._generation(prompts, index)
        self.generation = generation
        self.step_log.add_generation(generation)
        has_signal = self._has_signal(FULL)
        # Rows whose advantage is 0 have no gradient: the pass for the old log-probabilities leaves them out too.
        self._old_rows = has_signal
        if self.beta or self.grpo.lambda_schema:
            self._old_rows = None
        self.step_log.generation |= self._generation_metrics(generation)
        masks = self.rollouts.masks(generation, FULL, has_signal)
        return self._rollout_output(generation, masks)

    def _rollout_output(self, generation: Generation, masks: list[list[int]]) -> dict[str, Any]:
        """A generation as TRL's `rollout_func` returns it; fields beside ids and log-probabilities are ours.

        Args:
            masks: the completion tokens of each episode that are trained on.
        """
        output: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "env_mask": masks, "paid": []}
        sampled = []
        is_known = True
        for paid in generation.episodes:
            prompt, completion = split_prompt(paid.trajectory, self._tokenizer.pad_token_id)
            payment = None
            if paid.rewards is not None:
                payment = paid.reward(FULL)
            output["prompt_ids"].append(prompt)
            output["completion_ids"].append(completion)
            output["paid"].append(payment)
            logprobs = [0.0] * len(completion)
            if paid.trajectory.logprobs:
                logprobs = list(paid.trajectory.logprobs[-len(completion) :])
            elif paid.outcome is not None:
                is_known = False
            sampled.append(logprobs)
        # All processes give the sampler's log-probabilities, or none does: some policies do not return them.
        is_missing = self.max_over_ranks(int(not is_known))
        output["logprobs"] = sampled
        if is_missing:
            output["logprobs"] = None
        return output

    def _generation(self, prompts: Sequence[str], index: int) -> Generation:
        """The episodes of a generation; with `grpo.staleness` the next ones are begun before it is trained on."""
        first = self.accelerator.process_index * len(prompts)
        generation = None
        if self.ahead is not None:
            generation = self.ahead.take(prompts)
        if self.sync is not None:  # episodes of the weights before have arrived, or are carried over
            self.step_log.seconds["sync_seconds"] += self.sync.push(self)
            self.rollouts.policy.follow_weights(self.sync.places)
        self._measure_held_out()
        if generation is None:
            generation = self.rollouts.generate(prompts, index, first)
        if self.ahead is not None:
            oldest_step = self.state.global_step - self.grpo.staleness * self.num_iterations
            generation.leave_out(oldest_step)
            self.rollouts.last = generation.drawn
            self._start_ahead(self.ahead, index, first, len(prompts))
        return generation

    def _start_ahead(self, ahead: RolloutsAhead, index: int, first: int, count: int) -> None:
        """Begin the generations after this one, up to `grpo.staleness` of them, that are not yet on their way.

        In process none is sampled ahead of a checkpoint of `grpo.save_steps`: a run that resumes there, with the
        checkpoint's weights alone, makes the same ones. Servers promise no such thing, and a run that was asked to stop
        between two of these checkpoints samples anew what was on its way.

        Args:
            index: this generation's number.
            first, count: this process's rows among those of all processes.
        """
        questions = self.grpo.questions_per_step
        weights = None
        places = None
        if self.sync is not None:
            places = self.sync.places
        first_to_start = max(index, ahead.last) + 1
        last_to_start = index + self.grpo.staleness
        for following in range(first_to_start, last_to_start + 1):
            step = following * self.num_iterations
            if step >= self.state.max_steps:
                break
            if self.sync is None and step % self.args.save_steps == 0:
                break
            if self.sync is None and weights is None:
                _, weights = whole_weights(self)
            start = following * questions
            rows: list[str] = []
            for name in self.train_dataset["prompt"][start : start + questions]:
                rows += [name] * self.grpo.group
            own_rows = rows[first : first + count]
            ahead.start(own_rows, following, first, self.state.global_step, weights, places)

    def _measure_held_out(self) -> None:
        """Measure the policy on the held-out questions when it is time: its accuracy is logged with this generation.

        The step alone decides: a resumed run measures where one that was never killed does.
        """
        self.step_log.generation = {}
        step = self.state.global_step
        every = self.grpo.held_out_steps
        is_due = step // every != (step - self.num_iterations) // every
        if not self.held_out or not is_due:
            return
        started = time.perf_counter()
        own_questions = self.held_out[self.accelerator.process_index :: self.accelerator.num_processes]
        own_counts = self.rollouts.measure(own_questions)
        counts = torch.tensor(own_counts, device=self.accelerator.device)
        right, verdicts, turns = self.accelerator.reduce(counts, reduction="sum").tolist()
        if verdicts:
            self.step_log.generation = {
                HELD_OUT: right / verdicts,
                HELD_OUT_TURNS: turns / verdicts,
                HELD_OUT_COUNT: verdicts,
            }
        self.step_log.seconds["held_out_seconds"] += time.perf_counter() - started

    def _generation_metrics(self, generation: Generation) -> dict[str, float]:
        """The numbers of a generation that are logged, over all processes."""
        terms = [term.term for term in self.plan.recipe.rewards]
        drawn_rewards = self._gathered_rewards(FULL, as_drawn=True)
        metrics = generation_metrics(generation, self.grpo.group, terms, drawn_rewards, self.accelerator)
        if self.ahead is not None:
            ages = generation.ages(self.state.global_step) or [0]
            metrics["staleness"] = sum(ages) / len(ages)
            metrics["staleness_max"] = float(max(ages))
        return metrics

    # 6. The advantages.

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch of a generation with our advantages, (B,) or (B, C), and with the schema track (TRUST-SQL,
        equations 4 and 5): its advantages (B,), mask (B, C) and token count.
        """
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self.generation is not None
        if self.grpo.credit == "turn":
            width = output["completion_ids"].size(1)
            by_token = token_advantages(self._turn_advantages(), self.generation.episodes, width)
            output["advantages"] = by_token.to(self.accelerator.device)
        else:
            output["advantages"] = self._episode_advantages(FULL)
        if self.grpo.lambda_schema:
            output |= self._schema_track(self.generation)
        self._old_rows = None
        return output

    def _schema_track(self, generation: Generation) -> dict[str, Tensor]:
        """The schema track of a generation, as TRL's batch holds it."""
        values = self._episode_advantages(SCHEMA)
        has_signal = self._has_signal(SCHEMA)
        masks = self.rollouts.masks(generation, SCHEMA, has_signal)
        rows = [torch.tensor(row) for row in masks]
        mask = pad(rows, padding_value=0, padding_side="right")
        mask = mask.to(self.accelerator.device)
        n_tokens = self.accelerator.gather(mask.sum()).sum()
        return {"schema_advantages": values, "schema_mask": mask, "schema_items": n_tokens}

    def _episode_advantages(self, track: str) -> Tensor:
        """(B,) the advantages of this process's episodes on a track."""
        rewards = self._gathered_rewards(track)
        values = advantages.estimate_advantages(rewards, self.grpo.group, self.grpo.baseline, self.grpo.scale)
        return self._own_rank_rows(values)

    def _turn_advantages(self) -> Tensor:
        """(B, T) the advantages of the turns of this process's episodes."""
        assert self.generation is not None
        payments = turn_payments(self.generation.episodes).to(self.accelerator.device)
        payments = self.accelerator.pad_across_processes(payments, dim=1, pad_index=NAN)
        all_payments = self.accelerator.gather(payments)
        values = advantages.turn_advantages(all_payments, self.grpo.group)
        return self._own_rank_rows(values)

    def _has_signal(self, track: str) -> Tensor:
        """(B,) which of this process's episodes have an advantage on a track."""
        if track == FULL and self.grpo.credit == "turn":
            return self._turn_advantages().any(1)
        rewards = self._gathered_rewards(track)
        has_signal = advantages.has_signal(rewards, self.grpo.group, self.grpo.baseline)
        return self._own_rank_rows(has_signal)

    def _gathered_rewards(self, track: str, as_drawn: bool = False) -> Tensor:
        """(N,) the track's rewards over all processes, group by group; as first drawn, or as trained on."""
        assert self.generation is not None
        rewards = self.generation.rewards(track, as_drawn).to(self.accelerator.device)
        gathered: Tensor = self.accelerator.gather(rewards)
        return gathered

    def _own_rank_rows(self, values: Tensor) -> Tensor:
        """This process's rows of all processes' rows."""
        count = len(values) // self.accelerator.num_processes
        first = self.accelerator.process_index * count
        return values[first : first + count]

    # 7. A micro-batch, split to fit in memory.

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's loss, part by part if `hardware.micro_tokens` splits the micro-batch."""
        compute = super().compute_loss
        parts = self._split_micro_batch(model, inputs)
        return self.in_parts(model, parts, lambda part: compute(model, part, *args, **kwargs))

    def _split_micro_batch(self, model: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """A micro-batch in parts of `hardware.micro_tokens`, as many on every process, whose losses add up to its own.

        Each part has all rows, but the rows of other parts have no weight, and so no forward: TRL counts rows in some
        losses, and exchanges numbers of each row between processes.
        """
        max_tokens = self.plan.recipe.hardware.micro_tokens
        if max_tokens is None:
            return [inputs]
        packs = packing.supports_packing(self.accelerator.unwrap_model(model))
        has_gradient = rows_with_gradient(inputs, self.beta)
        rows = has_gradient.nonzero().flatten()
        ids, mask = prompt_and_completion(inputs)
        parts = split_by_tokens(ids, mask, rows, max_tokens, packs)
        count = self.max_over_ranks(len(parts))
        parts += [parts[0][:0]] * (count - len(parts))
        if count == 1:
            return [inputs]
        return [inputs | select_rows(inputs, rows) for rows in parts]

    # 8. The loss.

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """L = L_full + lambda * L_schema (TRUST-SQL, equation 6): one forward, each track over its own tokens.

        The advantages of the two tracks must not be added first: once the ratio leaves 1 they clip apart.
        """
        rows = rows_with_gradient(inputs, self.beta)
        prompt_lengths = inputs["prompt_mask"].sum(1)
        lengths = prompt_lengths + inputs["completion_mask"].sum(1)
        trained_tokens = (lengths * rows).sum()
        self.step_log.counts[record.TRAINED] += trained_tokens.item()
        self._loss_forward = LossForward(rows)
        try:
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model,
                *prompt_and_completion(inputs),
                inputs["completion_ids"].size(1),
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled,
            )
            inputs = self._corrected(logps.detach(), inputs, rows)
            loss = self._full_loss(model, logps, inputs)
            if self.grpo.lambda_schema:
                loss = loss + self.grpo.lambda_schema * self._schema_loss(logps, inputs)
        finally:
            self._loss_forward = None
        assert entropies is not None
        mask = full_track_mask(inputs) * rows.unsqueeze(1)
        # Only the first pass over a generation tells how far trainer and sampler are apart: later ones have moved.
        steps = self.args.steps_per_generation
        is_first_pass = self._step % (steps * self.num_iterations) < steps
        sampled = None
        if is_first_pass:
            sampled = inputs.get("sampling_per_token_logps")
        self.step_log.add_loss(logps, entropies, mask, sampled)
        return loss

    def _corrected(self, logps: Tensor, inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
        """The inputs of the losses: old log-probabilities of rows with a forward, advantages weighed for the sampler.

        Args:
            logps: (B, C) log-probabilities of the forward, 0 for rows without one.
            rows: (B,) which rows had a forward.
        """
        corrected = dict(inputs)
        if "old_per_token_logps" in inputs:
            # The log-probabilities of rows without a forward are 0: against their old ones a ratio may overflow.
            old = inputs["old_per_token_logps"]
            corrected["old_per_token_logps"] = old.masked_fill(~rows.unsqueeze(1), 0.0)
        weights = self._sampler_weights(logps, corrected)
        if weights is None:
            return corrected
        by_token = inputs["advantages"].view(len(weights), -1)  # (B, 1) or (B, C)
        corrected["advantages"] = by_token * weights
        if self.grpo.lambda_schema:
            by_token = inputs["schema_advantages"].view(len(weights), -1)
            corrected["schema_advantages"] = by_token * weights
        return corrected

    def _sampler_weights(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor | None:
        """(B, C) weights that correct for a sampler that is not the policy; None if nothing is to correct.

        As they are not negative, weighing the advantage weighs the clipped loss of its token.
        """
        cap = self.grpo.importance_cap
        sampled = inputs.get("sampling_per_token_logps")
        may_differ = self.sync is not None or self.grpo.staleness > 0  # the sampler from the policy
        if not may_differ or cap is None or sampled is None:
            return None
        mask = full_track_mask(inputs)
        if "schema_mask" in inputs:  # a row may teach the schema track alone
            mask = torch.maximum(mask, inputs["schema_mask"])
        old = inputs.get("old_per_token_logps", logps)
        return sampler_weights(old, sampled, mask, cap, self.grpo.bounds, self.grpo.importance_level)

    def _full_loss(self, model: Any, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The full track's loss, with the penalty on leaving the reference and the balance of experts, both TRL's."""
        if self.loss.trl:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        mask = full_track_mask(inputs)
        track = self._track(logps, inputs, inputs["advantages"], mask, inputs["num_items_in_batch"])
        unpaid = {"advantages": torch.zeros_like(inputs["advantages"])}
        rest: Tensor = super()._compute_loss(model, inputs | unpaid)  # TRL's own objective is 0 without advantages
        objective: Tensor = self.loss.compute(track)
        return rest + objective

    def _schema_loss(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The schema track's loss. The penalty on leaving the reference is paid once, by the full track."""
        mask = inputs["schema_mask"]
        generation_tokens = inputs["schema_items"]
        track = self._track(logps, inputs, inputs["schema_advantages"], mask, generation_tokens)
        loss: Tensor = self.loss.compute(track)
        return loss

    def _track(
        self, logps: Tensor, inputs: dict[str, Any], values: Tensor, mask: Tensor, generation_tokens: Tensor
    ) -> TrackBatch:
        """A micro-batch's tokens on one track, as its loss takes them.

        Args:
            values: (B,) or (B, C) the track's advantages.
            mask: (B, C) the track's tokens.
        """
        micro_batches = self.current_gradient_accumulation_steps
        # Micro-batches of the generation, over all processes.
        of_generation = self.accelerator.num_processes * self.args.steps_per_generation
        old = inputs.get("old_per_token_logps", logps.detach())
        return TrackBatch(
            logps=logps,
            ratio=ratios(logps, old, mask, self.grpo.level),
            advantages=values.view(len(values), -1),
            mask=mask,
            clip_low=self.grpo.clip_low,
            clip_high=self.grpo.clip_high,
            generation_tokens=generation_tokens,
            longest_episode=self.max_completion_length,
            micro_batches=micro_batches,
            generation_share=of_generation / micro_batches,
        )

    # 9. The forward.

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> TokenScores:
        """The forward on rows that have weight, without padding, each shared prefix computed once.

        A model that cannot be packed has TRL's own, on rows of like length.
        """
        forward = self._loss_forward
        if forward is not None and forward.scores is not None:
            return forward.scores
        needed = self._old_rows if forward is None else forward.rows
        rows = torch.arange(len(input_ids), device=input_ids.device)
        if needed is not None:
            # Each process computes a row at least, so that the backward of all is alike.
            rows = rows[needed] if needed.any() else rows[:1]
        supports_packing = packing.supports_packing(self.accelerator.unwrap_model(model))
        packs = supports_packing and not kwargs.get("compute_aux_loss")
        compute_plain = functools.partial(super()._get_per_token_logps_and_entropies, model, **kwargs)
        batches, repeats = self._forward_batches(input_ids, attention_mask, rows, packs, batch_size)
        parts = []
        for batch in batches:
            ids = input_ids[batch]
            mask = attention_mask[batch]
            if packs:
                parts.append(self._packed_forward(model, ids, mask, logits_to_keep))
            else:
                parts.append(without_padding(compute_plain, ids, mask, logits_to_keep))
        count = len(parts) - repeats
        scores = scatter_rows(parts[:count], torch.cat(batches[:count]), len(input_ids))
        for repeated in parts[count:]:  # a repeated row stays in the graph, so that its backward runs too
            scores = scores._replace(logps=scores.logps + 0.0 * repeated.logps.sum())
        if forward is not None:
            forward.scores = scores
        return scores

    def _forward_batches(
        self, input_ids: Tensor, attention_mask: Tensor, rows: Tensor, packs: bool, batch_size: int | None
    ) -> tuple[list[Tensor], int]:
        """The rows of each forward, and how many forwards at the end only repeat the first row."""
        max_tokens = self.plan.recipe.hardware.micro_tokens
        if max_tokens is not None and self._loss_forward is None:  # a loss is given a part that is split already
            parts = split_by_tokens(input_ids, attention_mask, rows, max_tokens, packs)
            repeats = self.max_over_ranks(len(parts)) - len(parts)  # ZeRO-3 gathers weights in each forward
            return parts + [rows[:1]] * repeats, repeats
        size = batch_size or len(input_ids)
        if packs:
            order = prefix_order(input_ids[rows], attention_mask[rows])
        else:
            order = attention_mask[rows].sum(1).argsort(stable=True)
            size = min(size, LIKE_ROWS)
        count = -(-len(input_ids) // size)
        return split_rows_evenly(rows[order], count)

    def _packed_forward(self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int) -> TokenScores:
        """The forward of rows laid out as one flat row."""
        packed = packing.pack(input_ids, attention_mask, completion)
        if self._loss_forward is not None:
            self.step_log.counts[record.COMPUTED] += packed.input_ids.numel()
        with self.accelerator.autocast():
            return packing.packed_scores(model, packed, attention_mask[:, -completion:])

    # 10. The log of a step.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's numbers with those of the step's generation and of all its losses."""
        logs.update(self.step_log.take_numbers(self.accelerator))
        super().log(logs, start_time)
