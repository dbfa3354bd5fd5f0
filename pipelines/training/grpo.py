"""Multi-turn GRPO: a recipe's `grpo` section as a run of a small subclass of TRL's GRPOTrainer over our own rollouts.

TRL's code is called, never copied.
"""

import functools
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.registry import LOSSES, POLICIES
from pipelines.core.types import Example
from pipelines.environment.core import Environment
from pipelines.training import advantages, combinations, losses, model, packing, record, samples, trainer
from pipelines.training.combinations import IN_PROCESS
from pipelines.training.model import WeightSync, whole_weights
from pipelines.training.packing import Forward, by_tokens, joined, moving
from pipelines.training.plan import HELD_OUT, HELD_OUT_COUNT, HELD_OUT_TURNS, Plan
from pipelines.training.record import CurveRecorder, Emit
from pipelines.training.rollouts import (
    FULL,
    SCHEMA,
    Ahead,
    Generation,
    PaidEpisode,
    Rollouts,
    build,
    cut,
    facts,
    format_errors,
    in_process,
    served_policy,
)

NAN = float("nan")
NAMES = {  # of numbers in curves, by TRL's
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "cispo_clip_ratio": "clip_high",
}


def payments(episodes: Sequence[PaidEpisode]) -> Tensor:
    """(N, T) payments of turns on the full track; NaN past an episode's end, and if it takes no part."""
    rows = [() if paid.rewards is None else paid.rewards.by_turn for paid in episodes]
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[NAN] * (longest - len(row))] for row in rows])


def on_tokens(advantages: Tensor, episodes: Sequence[PaidEpisode], width: int) -> Tensor:
    """(N, width) the advantage of each completion token's turn, 0 past the last token.

    Args:
        advantages: (N, T) of turns.
        width: tokens of the longest completion.
    """
    spread = torch.zeros(len(episodes), width)
    for row, (paid, values) in enumerate(zip(episodes, advantages.tolist(), strict=True)):
        ends, length = paid.trajectory.turn_ends, len(paid.trajectory.token_ids)
        first = length - len(cut(paid.trajectory, 0)[1])
        turns = [bisect_right(ends, place) for place in range(first, length)]
        paid_turns = min(len(ends), len(values))  # an episode that takes no part may have more turns than those that do
        tokens = [values[turn] if turn < paid_turns else 0.0 for turn in turns]
        spread[row, : len(tokens)] = torch.tensor(tokens)
    return spread


@dataclass
class ForwardPass:
    """One computation of log-probabilities over a batch."""

    rows: Tensor | None = None  # (B,) which rows need a forward; None for all.
    kept: Forward | None = None  # the result: a second track costs no second forward.


@dataclass
class StepState:
    """State of a step beside its tensors, which lives longer than a call and shorter than a run."""

    # of the current step, by what they were spent on.
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # tokens, and seconds of another process meanwhile: no part of them.
    beside: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # numbers that are logged with each step that trains on the current generation.
    watched: dict[str, float] = field(default_factory=dict)
    old: Tensor | None = None  # rows that the pass for the old log-probabilities needs; None for all.
    current: ForwardPass | None = None  # the pass of the micro-batch whose loss is being computed; None outside a loss.
    # (4,) of this process in this step: entropies and their tokens, the distances between trainer and sampler and
    # theirs; None before its first loss.
    sums: Tensor | None = None
    farthest: Tensor | None = None  # () the largest such distance; None as well.

    def take_seconds(self) -> dict[str, float]:
        """The seconds of this step so far, and of others beside it; the next one begins at none."""
        taken = dict(self.seconds | self.beside)
        self.seconds.clear()
        self.beside.clear()
        return taken


class GrpoTrainer(trainer.TrainerMixin, GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with dual tracks, and a forward on the rows that have weight, without padding and what they begin
    with alike computed once, in parts that fit a memory.
    """

    beta: float
    _buffered_inputs: list[dict[str, Tensor]] | None

    def __init__(
        self,
        *,
        plan: Plan,
        rollouts: Rollouts,
        step_state: StepState,  # read by the run's recorder too
        sync: WeightSync | None = None,  # brings weights to the servers that sample; None when the network itself does
        held_out: Sequence[Example] = (),  # on which the policy is measured every `grpo.held_out_steps` steps
        **kwargs: Any,
    ) -> None:
        self.plan, self.grpo, self.rollouts, self.step_state = plan, plan.recipe.grpo, rollouts, step_state
        self.sync, self.held_out = sync, held_out
        self.loss = LOSSES[self.grpo.loss]
        self.ahead: Ahead | None = None  # samples the next generation while this one is trained on
        self.generation: Generation | None = None
        super().__init__(reward_funcs=[reward], rollout_func=rollout, **kwargs)
        for network in (self.model, self.ref_model):
            if network is not None:
                packing.prepare(self.accelerator.unwrap_model(network))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's step, timed: `train_seconds` is its time beside the rollouts and their scoring."""
        spent, started = self.step_state, time.perf_counter()
        before = sum(spent.seconds.values())
        loss: Tensor = super().training_step(*args, **kwargs)
        rollout_seconds = sum(spent.seconds.values()) - before
        spent.seconds["train_seconds"] += time.perf_counter() - started - rollout_seconds
        return loss

    # Rollouts, and the advantages of their episodes.

    def sample(self, prompts: Sequence[str], index: int) -> Generation:
        """The episodes of a generation; with `grpo.staleness` those that follow are begun before it is trained on."""
        first = self.accelerator.process_index * len(prompts)
        generation = self.ahead.take(prompts) if self.ahead is not None else None
        if self.sync is not None:  # what was sampled by the weights before is here, or is carried over
            self.step_state.seconds["sync_seconds"] += self.sync.push(self)
            self.rollouts.policy.follow_weights(self.sync.places)
        self.measure()
        if generation is None:
            generation = self.rollouts.generate(prompts, index, first)
        if self.ahead is None:
            return generation
        generation.leave_out(self.state.global_step - self.grpo.staleness * self.num_iterations)
        self.rollouts.last = generation.drawn

        # Begin the generations after this one, up to `grpo.staleness` of them, that are not yet on their way. In
        # process none is sampled ahead of a checkpoint: a resumed run, which has the checkpoint's weights alone, makes
        # the same ones. Servers promise no such thing.
        count, weights = self.grpo.questions_per_step, None
        for following in range(max(index, self.ahead.last) + 1, index + self.grpo.staleness + 1):
            after = following * self.num_iterations
            if after >= self.state.max_steps or (self.sync is None and after % self.args.save_steps == 0):
                break
            asked = self.train_dataset["prompt"][following * count : (following + 1) * count]
            ids = [name for name in asked for _ in range(self.grpo.group)][first : first + len(prompts)]
            if self.sync is None:
                weights = weights or whole_weights(self)[1]
            places = None if self.sync is None else self.sync.places
            self.ahead.start(ids, following, first, self.state.global_step, weights, places)
        return generation

    def measure(self) -> None:
        """Measure the policy on the held-out questions when it is time: its accuracy is logged with this generation."""
        self.step_state.watched = {}
        step, every = self.state.global_step, self.grpo.held_out_steps
        if not self.held_out or step // every == (step - self.num_iterations) // every:
            return  # the step alone decides: a resumed run measures where one never killed does
        started = time.perf_counter()
        mine = self.held_out[self.accelerator.process_index :: self.accelerator.num_processes]
        counts = torch.tensor(self.rollouts.measure(mine), device=self.accelerator.device)
        right, verdicts, turns = self.accelerator.reduce(counts, reduction="sum").tolist()
        if verdicts:
            shares = {HELD_OUT: right / verdicts, HELD_OUT_TURNS: turns / verdicts, HELD_OUT_COUNT: verdicts}
            self.step_state.watched |= shares
        self.step_state.seconds["held_out_seconds"] += time.perf_counter() - started

    def observe(self, generation: Generation) -> list[list[int]]:
        """Take note of a generation; the mask of each episode's full track.

        Its numbers, summed up over all processes, are logged with each step that trains on it.
        """
        self.generation = generation
        for name, seconds in generation.seconds.items():
            self.step_state.seconds[name] += seconds
        self.step_state.beside |= generation.beside
        self.step_state.beside[record.SAMPLED] += sum(sum(paid.trajectory.agent_mask) for paid in generation.drawn)
        useful = self._useful(FULL)
        # Rows whose advantage is 0 have no gradient: the pass for the old log-probabilities leaves them out too.
        self.step_state.old = None if self.beta or self.grpo.lambda_schema else useful

        by_name = facts(generation, [term.term for term in self.plan.recipe.rewards])
        table = torch.tensor(list(by_name.values()), dtype=torch.float32, device=self.accelerator.device).T  # (N, F)
        table = self.accelerator.gather(table.contiguous())
        watched = {name: mean for name, mean in zip(by_name, table.nanmean(0).tolist(), strict=True) if mean == mean}
        right = table[:, list(by_name).index("ex")].nan_to_num(0.0)
        watched["pass_at_group"] = right.view(-1, self.grpo.group).amax(1).mean().item()
        faults: Counter[str] = sum(gather_object([format_errors(generation)]), Counter())
        turns = max(1.0, watched["turns"] * len(generation.episodes) * self.accelerator.num_processes)
        watched |= {f"fault_{name}": count / turns for name, count in sorted(faults.items())}
        everywhere = gather_object([generation.judge])
        watched |= {name: sum(process[name] for process in everywhere) for name in generation.judge}
        alike = advantages.zero_variance(self._everyone(FULL, drawn=True), self.grpo.group)
        watched["zero_variance"] = alike.float().mean().item()
        if self.ahead is not None:
            ages = generation.ages(self.state.global_step) or [0]
            watched |= {"staleness": sum(ages) / len(ages), "staleness_max": float(max(ages))}
        self.step_state.watched |= watched
        return self.rollouts.masks(generation, FULL, useful)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch of a generation, with our advantages for its own, and with the schema track (TRUST-SQL,
        equations 4 and 5): its advantages (B,), mask (B, C) and token count.
        """
        grpo = self.grpo
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        assert self.generation is not None
        if grpo.credit == "turn":
            turns = on_tokens(self._turns(), self.generation.episodes, output["completion_ids"].size(1))
            output["advantages"] = turns.to(self.accelerator.device)
        for track in (() if grpo.credit == "turn" else (FULL,)) + ((SCHEMA,) if grpo.lambda_schema else ()):
            values = advantages.estimate_advantages(self._everyone(track), grpo.group, grpo.baseline, grpo.scale)
            output["advantages" if track == FULL else "schema_advantages"] = self._local(values)
        if grpo.lambda_schema:
            useful = self._useful(SCHEMA)
            masks = self.rollouts.masks(self.generation, SCHEMA, useful)
            mask = pad([torch.tensor(row) for row in masks], padding_value=0, padding_side="right").to(useful.device)
            output |= {"schema_mask": mask, "schema_items": self.accelerator.gather(mask.sum()).sum()}
        self.step_state.old = None
        return output

    def _everyone(self, track: str, drawn: bool = False) -> Tensor:
        """(N,) the track's rewards over all processes, group by group; as first drawn, or as trained on."""
        assert self.generation is not None
        rewards: Tensor = self.accelerator.gather(self.generation.rewards(track, drawn).to(self.accelerator.device))
        return rewards

    def _local(self, values: Tensor) -> Tensor:
        """This process's rows of all processes'."""
        count = len(values) // self.accelerator.num_processes
        first = self.accelerator.process_index * count
        return values[first : first + count]

    def _turns(self) -> Tensor:
        """(B, T) the advantages of the turns of this process's episodes."""
        assert self.generation is not None
        paid = payments(self.generation.episodes).to(self.accelerator.device)
        paid = self.accelerator.pad_across_processes(paid, dim=1, pad_index=NAN)
        return self._local(advantages.turn_advantages(self.accelerator.gather(paid), self.grpo.group))

    def _useful(self, track: str) -> Tensor:
        """(B,) which of this process's episodes have an advantage on a track."""
        if track == FULL and self.grpo.credit == "turn":
            return self._turns().any(1)
        return self._local(advantages.has_signal(self._everyone(track), self.grpo.group, self.grpo.baseline))

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batches, regrouped after each generation so that rows that begin alike share one."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or self._buffered_inputs is None or self.loss.by_micro_batch:
            return inputs
        self._buffered_inputs = packing.regroup(self._buffered_inputs, functools.partial(moving, beta=self.beta))
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    # The forward and the loss of a micro-batch.

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """TRL's loss, part by part where `hardware.micro_tokens` cuts the micro-batch."""
        compute = super().compute_loss
        return self.in_parts(model, self._parts(model, inputs), lambda part: compute(model, part, *args, **kwargs))

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
        count = self.most(len(parts))
        parts += [parts[0][:0]] * (count - len(parts))
        return [inputs] if count == 1 else [inputs | packing.only(inputs, rows) for rows in parts]

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

        A model that cannot be packed has TRL's own, on rows of like length.
        """
        is_loss = self.step_state.current is not None  # the pass for the old log-probabilities has no backward
        current = self.step_state.current or ForwardPass(self.step_state.old)
        if current.kept is not None:
            return current.kept
        packs = packing.suits(self.accelerator.unwrap_model(model)) and not kwargs.get("compute_aux_loss")
        size = min(batch_size or len(input_ids), len(input_ids) if packs else samples.LIKE_ROWS)
        own = functools.partial(super()._get_per_token_logps_and_entropies, model, **kwargs)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        if current.rows is not None:
            # One row at least keeps every process's backward alike.
            rows = rows[current.rows] if current.rows.any() else rows[:1]
        most = self.plan.recipe.hardware.micro_tokens
        if most is not None and not is_loss:  # a loss is given a part that is cut already
            batches, repeats = by_tokens(input_ids, attention_mask, rows, most, packs), 0  # no backward: none waits
            rows = torch.cat(batches)
        else:
            by_length = attention_mask[rows].sum(1).argsort(stable=True)
            rows = rows[packing.sorting(input_ids[rows], attention_mask[rows]) if packs else by_length]
            batches, repeats = packing.shares(rows, -(-len(input_ids) // size))
        parts: list[Forward] = []
        for part in batches:
            ids, mask = input_ids[part], attention_mask[part]
            if not packs:
                parts.append(packing.dense(own, ids, mask, logits_to_keep))
                continue
            packed = packing.pack(ids, mask, logits_to_keep)
            if is_loss:
                self.step_state.beside[record.COMPUTED] += packed.input_ids.numel()
            with self.accelerator.autocast():
                parts.append(packing.forward(model, packed, mask[:, -logits_to_keep:]))
        result = packing.scatter(parts[: len(parts) - repeats], rows, len(input_ids))
        for logps, _, _ in parts[len(parts) - repeats :]:
            result = (result[0] + 0.0 * logps.sum(), *result[1:])  # part of the graph: its backward runs too
        current.kept = result
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """L = L_full + lambda * L_schema (TRUST-SQL, equation 6): one forward, each track over its own tokens.

        The advantages of the two tracks must not be added first: once the ratio leaves 1 they clip apart.
        """
        grpo, rows = self.grpo, moving(inputs, self.beta)
        lengths = inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)
        self.step_state.beside[record.TRAINED] += (lengths * rows).sum().item()
        self.step_state.current = ForwardPass(rows)  # one forward over `rows`, which TRL's loss then finds done
        try:
            width, aux = inputs["completion_ids"].size(1), self.aux_loss_enabled
            logps, entropies, _ = self._get_per_token_logps_and_entropies(
                model, *joined(inputs), width, compute_entropy=True, compute_aux_loss=aux
            )
            if "old_per_token_logps" in inputs:
                # Rows without a forward have 0 for each log-probability: against their old ones a ratio may overflow.
                known = inputs["old_per_token_logps"].masked_fill(~rows.unsqueeze(1), 0.0)
                inputs = inputs | {"old_per_token_logps": known}
            weights = self._weights(logps.detach(), inputs)
            if weights is not None:
                for name in ("advantages", *(["schema_advantages"] if grpo.lambda_schema else [])):
                    inputs = inputs | {name: inputs[name].view(len(weights), -1) * weights}
            loss = self._full_loss(model, logps, inputs)
            if grpo.lambda_schema:
                loss = loss + grpo.lambda_schema * self._schema_loss(logps, inputs)
        finally:
            self.step_state.current = None

        # Entropy over the rows that had a forward; on the first pass, how far trainer and sampler are apart.
        assert entropies is not None
        sampled = inputs.get("sampling_per_token_logps")
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1) * rows.unsqueeze(1)
        drift, compared = torch.zeros_like(logps), torch.zeros_like(mask)
        first = self._step % (self.args.steps_per_generation * self.num_iterations) < self.args.steps_per_generation
        if sampled is not None and first:
            drift, compared = ((logps.detach() - sampled).abs() * mask).nan_to_num(0.0), mask
        values = [(entropies.detach() * mask).sum(), mask.sum(), drift.sum(), compared.sum()]
        sums, state = torch.stack([value.float() for value in values]), self.step_state
        state.sums = sums if state.sums is None else state.sums + sums
        state.farthest = drift.max() if state.farthest is None else torch.maximum(state.farthest, drift.max())
        return loss

    def _weights(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor | None:
        """(B, C) weights that correct for a sampler that is not the policy; None if nothing is to correct.

        As they are not negative, weighing the advantage weighs the clipped loss of its token.
        """
        cap, sampled = self.grpo.importance_cap, inputs.get("sampling_per_token_logps")
        may_differ = self.sync is not None or self.grpo.staleness  # the sampler from the policy
        if not may_differ or cap is None or sampled is None:
            return None
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if "schema_mask" in inputs:  # a row may teach the schema track alone
            mask = torch.maximum(mask, inputs["schema_mask"])
        old = inputs.get("old_per_token_logps", logps)
        return losses.sampler_weights(old, sampled, mask, cap, self.grpo.bounds, self.grpo.importance_level)

    def _full_loss(self, model: Any, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The full track's loss, with the penalty on leaving the reference and the balance of experts, both TRL's."""
        if self.loss.trl:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        track = self._track(logps, inputs, inputs["advantages"], mask, inputs["num_items_in_batch"])
        unpaid = {"advantages": torch.zeros_like(inputs["advantages"])}
        rest: Tensor = super()._compute_loss(model, inputs | unpaid)  # TRL's own objective is 0 without advantages
        return rest + self.loss.compute(track)

    def _schema_loss(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The schema track's loss. The penalty on leaving the reference is paid once, by the full track."""
        mask = inputs["schema_mask"]
        generation_tokens = inputs["schema_items"]
        track = self._track(logps, inputs, inputs["schema_advantages"], mask, generation_tokens)
        loss: Tensor = self.loss.compute(track)
        return loss

    def _track(
        self, logps: Tensor, inputs: dict[str, Any], advantages: Tensor, mask: Tensor, generation_tokens: Tensor
    ) -> losses.TrackBatch:
        """A micro-batch's tokens on one track, as its loss takes them."""
        micro_batches = self.current_gradient_accumulation_steps
        old = inputs.get("old_per_token_logps", logps.detach())
        return losses.TrackBatch(
            logps=logps,
            ratio=losses.ratios(logps, old, mask, self.grpo.level),
            advantages=advantages.view(len(advantages), -1),
            mask=mask,
            clip_low=self.grpo.clip_low,
            clip_high=self.grpo.clip_high,
            generation_tokens=generation_tokens,
            longest_episode=self.max_completion_length,
            micro_batches=micro_batches,
            generation_share=self.accelerator.num_processes * self.args.steps_per_generation / micro_batches,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's numbers beside those of the generation that they belong to, and of all the step's losses."""
        state, none = self.step_state, torch.zeros(4, device=self.accelerator.device)
        logs.update({f"own/{name}": value for name, value in state.watched.items()})
        for name in (HELD_OUT, HELD_OUT_TURNS, HELD_OUT_COUNT):  # once: not again with each step on the generation
            state.watched.pop(name, None)
        mine = none if state.sums is None else state.sums
        far = none[0] if state.farthest is None else state.farthest
        state.sums = state.farthest = None
        entropy, tokens, drift, compared = self.accelerator.reduce(mine, reduction="sum").tolist()
        farthest = self.accelerator.gather(far).max().item()
        if tokens:
            logs["own/entropy"] = entropy / tokens
        if compared:
            logs |= {"own/drift_mean": drift / compared, "own/drift_max": farthest}
        super().log(logs, start_time)


def reward(paid: Sequence[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the rollout's payments. None leaves an episode out of its group."""
    return list(paid)


def rollout(prompts: list[str], trainer: GrpoTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: the prompts are example ids, repeated for each episode of their group."""
    index = trainer.state.global_step // trainer.num_iterations
    # While episodes are made in process, ZeRO-3 must bring each process the weights that it keeps in parts.
    is_cut = trainer.sync is None and trainer.is_deepspeed_enabled
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) if is_cut else nullcontext():
        generation = trainer.sample(prompts, index)
    masks = trainer.observe(generation)
    episodes = generation.episodes
    pairs = [cut(paid.trajectory, trainer._tokenizer.pad_token_id) for paid in episodes]
    # The sampler's log-probabilities are given by all processes, or by none: some policies do not return them.
    is_known = all(paid.trajectory.logprobs for paid in episodes if paid.outcome is not None)
    sampled = [
        list(paid.trajectory.logprobs[-len(ids) :]) if paid.trajectory.logprobs else [0.0] * len(ids)
        for paid, (_, ids) in zip(episodes, pairs, strict=True)
    ]
    return {
        "prompt_ids": [prompt for prompt, _ in pairs],
        "completion_ids": [completion for _, completion in pairs],
        "logprobs": None if trainer.most(int(not is_known)) else sampled,
        "env_mask": masks,
        "paid": [None if paid.rewards is None else paid.reward(FULL) for paid in episodes],
    }


def train(plan: Plan, examples: Sequence[Example], emit: Emit) -> GrpoTrainer:
    """Train a policy on examples, from the last checkpoint if there is one."""
    if not examples:
        raise DataError("there are no questions to train on", "Loosen difficulty.*, or name a pool under data.rl.")
    recipe, maker = plan.recipe, POLICIES[plan.recipe.rollout.policy]
    combinations.check(recipe)
    grpo = recipe.grpo
    if grpo.resample and grpo.questions_per_step * grpo.group // trainer.world_size() % grpo.group:
        raise RecipeError(
            f"grpo.resample needs whole groups on each of {trainer.world_size()} processes",
            "Make grpo.questions_per_step a multiple of the processes.",
        )
    network, tokenizer = model.load_to_train(plan.checkpoint_in, recipe.model)
    step_state = StepState()
    with Environment(recipe, workers=None) as environment:
        is_served = recipe.rollout.policy != IN_PROCESS
        policy = served_policy(plan) if is_served else in_process(recipe, network, tokenizer)
        rollouts = build(plan, examples, policy, environment)
        sync, give = None, maker.send_weights
        if give is not None:  # servers sample; if they take low-rank adapters alone, these' base is sent now
            alone = recipe.model.sends_adapters and maker.takes_adapters is not None and maker.takes_adapters(recipe)
            if alone and trainer.is_main():
                give(plan.checkpoint_in, recipe, None)
            dtype = getattr(torch, recipe.model.compute_dtype)
            sync = WeightSync(lambda folder, step: give(str(folder), recipe, step), plan.out, alone, dtype)
        recorder = CurveRecorder(plan.out, plan.kind, emit, NAMES, step_state.take_seconds, rollouts.worst)
        made = GrpoTrainer(
            plan=plan,
            rollouts=rollouts,
            step_state=step_state,
            held_out=samples.records(plan.held_out, Example) if plan.held_out else (),
            sync=sync,
            model=network,
            processing_class=tokenizer,
            peft_config=model.adapters(recipe.model.lora),
            train_dataset=_dataset(plan, examples),
            callbacks=[recorder],
            args=arguments(plan, len(examples)),
        )
        if grpo.staleness:
            made.ahead = Ahead(plan, examples, None if sync else whole_weights(made)[1])
        try:
            trainer.run(made, plan)
        finally:
            if made.ahead is not None:
                made.ahead.close()
        if sync is not None:
            sync.push(made)  # the last step's, which no rollout has asked for
    return made


def arguments(plan: Plan, questions: int) -> GRPOConfig:
    """TRL's configuration of a recipe's `grpo` section, for a run over so many questions."""
    grpo = plan.recipe.grpo
    rows = grpo.questions_per_step * grpo.group
    micro, accumulate = samples.split_batch(rows, grpo.micro_batch, trainer.world_size())
    loss_type = LOSSES[grpo.loss].trl or "dapo"  # without a loss of TRL's it averages what else it computes, as DAPO
    # A checkpoint between two updates of one generation would lose its rollouts: save after the last of them.
    save_steps = -(-grpo.save_steps // grpo.updates_per_rollout) * grpo.updates_per_rollout
    return GRPOConfig(
        **trainer.common(plan, samples.grpo_steps(grpo, questions), save_steps),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate,
        num_iterations=grpo.updates_per_rollout,
        num_generations=grpo.group,
        max_completion_length=grpo.sampling.episode_tokens,
        temperature=grpo.sampling.temperature,
        beta=grpo.beta,
        epsilon=grpo.clip_low,
        epsilon_high=1 + grpo.clip_high if loss_type == "cispo" else grpo.clip_high,
        loss_type=loss_type,
        importance_sampling_level=grpo.level,
        shuffle_dataset=False,
    )


def _dataset(plan: Plan, examples: Sequence[Example]) -> datasets.Dataset:
    """The ids of every generation's questions, in order: one pass over it is the whole run."""
    grpo = plan.recipe.grpo
    generations = -(-samples.grpo_steps(grpo, len(examples)) // grpo.updates_per_rollout)
    order = samples.schedule(len(examples), grpo.questions_per_step, generations, plan.recipe.seed, grpo.order)
    return datasets.Dataset.from_dict({"prompt": [examples[index].id for index in order]})
