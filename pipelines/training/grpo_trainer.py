"""A small subclass of TRL's GRPOTrainer over our own rollouts: TRL's code is called, never copied."""

import functools
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.utils import pad

from pipelines.core.types import Example
from pipelines.training import losses, record, settings
from pipelines.training import losses as advantages
from pipelines.training.packing import Forward, joined, moving, regroup
from pipelines.training.plan import HELD_OUT, HELD_OUT_COUNT, HELD_OUT_TURNS, Plan
from pipelines.training.rollouts import FULL, SCHEMA, Generation, PaidEpisode, Rollouts, cut, facts, format_errors
from pipelines.training.rollouts_ahead import Ahead
from pipelines.training.training_pass import ForwardPass, StepState, TrainingPass
from pipelines.training.weights import WeightSync, whole_weights

# What each turn of an episode is paid, and which tokens its advantage is for.

NAN = float("nan")


def payments(episodes: Sequence[PaidEpisode]) -> Tensor:
    """(N, T) what each turn is paid on the full track; NaN past an episode's end, and where it takes no part."""
    rows = [() if paid.rewards is None else paid.rewards.by_turn for paid in episodes]
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[NAN] * (longest - len(row))] for row in rows])


def on_tokens(advantages: Tensor, episodes: Sequence[PaidEpisode], width: int) -> Tensor:
    """(N, width) the advantage of each completion token's turn, 0 where there is no token.

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


NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "kl": "kl",
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "cispo_clip_ratio": "clip_high",
}


class GrpoTrainer(settings.TrainerMixin, TrainingPass):
    """TRL's trainer with dual tracks, a forward on rows that have weight, and what they begin with alike computed once.

    Args:
        plan: the recipe's `grpo` section says what the loss is.
        rollouts: makes and pays the episodes.
        step_state: what the run's recorder reads too.
        sync: brings the weights to the servers that sample; None when the network itself does.
        held_out: questions on which the policy is measured every `grpo.held_out_steps` steps.
    """

    _buffered_inputs: list[dict[str, Tensor]] | None

    def __init__(
        self,
        *,
        plan: Plan,
        rollouts: Rollouts,
        step_state: StepState,
        sync: WeightSync | None = None,
        held_out: Sequence[Example] = (),
        **kwargs: Any,
    ) -> None:
        self.plan, self.grpo, self.rollouts, self.step_state, self.sync = (
            plan,
            plan.recipe.grpo,
            rollouts,
            step_state,
            sync,
        )
        self.held_out = held_out
        self.ahead: Ahead | None = None  # samples the next generation while this one is trained on
        self.generation: Generation | None = None
        super().__init__(reward_funcs=[reward], rollout_func=rollout, **kwargs)
        self.prepare_networks()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's step, timed: `train_seconds` is what it takes beside the rollouts and their scoring."""
        spent, started = self.step_state, time.perf_counter()
        before = sum(spent.seconds.values())
        loss: Tensor = super().training_step(*args, **kwargs)
        rollout_seconds = sum(spent.seconds.values()) - before
        spent.spend("train_seconds", time.perf_counter() - started - rollout_seconds)
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch of a generation, with our advantages for its own, and with the schema track."""
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["advantages"] = self._advantages(FULL)
        if self.grpo.credit == "turn":
            assert self.generation is not None
            turns = on_tokens(self._turns(), self.generation.episodes, output["completion_ids"].size(1))
            output["advantages"] = turns.to(output["advantages"])
        if self.grpo.lambda_schema:
            output |= self._schema_track()
        self.step_state.old = None
        return output

    def _schema_track(self) -> dict[str, Tensor]:
        """Advantages (B,), mask (B, C) and token count of the schema track (TRUST-SQL, equations 4 and 5)."""
        assert self.generation is not None
        useful = self._useful(SCHEMA)
        masks = self.rollouts.masks(self.generation, SCHEMA, useful)
        mask = pad([torch.tensor(row) for row in masks], padding_value=0, padding_side="right").to(useful.device)
        return {
            "schema_advantages": self._advantages(SCHEMA),
            "schema_mask": mask,
            "schema_items": self.accelerator.gather(mask.sum()).sum(),
        }

    def _everyone(self, track: str, drawn: bool = False) -> Tensor:
        """(N,) the track's rewards over all processes, group by group; as first drawn, or as trained on."""
        assert self.generation is not None
        rewards: Tensor = self.accelerator.gather(self.generation.rewards(track, drawn).to(self.accelerator.device))
        return rewards

    def _useful(self, track: str) -> Tensor:
        """(B,) which of this process's episodes say anything on a track."""
        if track == FULL and self.grpo.credit == "turn":
            return self._turns().any(1)
        return self._local(advantages.useful(self._everyone(track), self.grpo.group, self.grpo.baseline))

    def _turns(self) -> Tensor:
        """(B, T) the advantages of the turns of this process's episodes."""
        assert self.generation is not None
        paid = payments(self.generation.episodes).to(self.accelerator.device)
        paid = self.accelerator.pad_across_processes(paid, dim=1, pad_index=NAN)
        return self._local(advantages.of_turns(self.accelerator.gather(paid), self.grpo.group))

    def _advantages(self, track: str) -> Tensor:
        """(B,) the advantages of this process's episodes on a track."""
        grpo = self.grpo
        return self._local(advantages.estimate(self._everyone(track), grpo.group, grpo.baseline, grpo.scale))

    def _local(self, values: Tensor) -> Tensor:
        """This process's rows of all processes'."""
        count = len(values) // self.accelerator.num_processes
        first = self.accelerator.process_index * count
        return values[first : first + count]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batches, regrouped after each generation so that rows that begin alike share one."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or self._buffered_inputs is None or self.grpo.loss == "bnpo":
            return inputs  # bnpo normalises each micro-batch by itself: which rows share one matters there
        self._buffered_inputs = regroup(self._buffered_inputs, functools.partial(moving, beta=self.beta))
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """L = L_full + lambda * L_schema (TRUST-SQL, equation 6): one forward, each track over its own tokens.

        The advantages of the two tracks must not be added first: once the ratio leaves 1 they clip apart.
        """
        rows = moving(inputs, self.beta)
        lengths = inputs["prompt_mask"].sum(1) + inputs["completion_mask"].sum(1)
        self.step_state.count(record.TRAINED, (lengths * rows).sum().item())
        with self.step_state.loss(rows) as current:
            logps = self._forward(model, inputs)[0]
            if current.rows is not None and "old_per_token_logps" in inputs:
                # Rows without a forward have 0 for each log-probability: against their old ones a ratio may overflow.
                known = current.rows.unsqueeze(1)
                inputs = inputs | {"old_per_token_logps": inputs["old_per_token_logps"].masked_fill(~known, 0.0)}
            weights = self._weights(logps.detach(), inputs)
            loss: Tensor = super()._compute_loss(model, inputs | weighed(inputs, "advantages", weights))
            if self.grpo.lambda_schema:
                inputs = inputs | weighed(inputs, "schema_advantages", weights)
                loss = loss + self.grpo.lambda_schema * self._schema_loss(logps, inputs)
            self._watch(inputs, current)
        return loss

    def _forward(self, model: Any, inputs: dict[str, Any]) -> Forward:
        """The forward of a micro-batch, which TRL's loss then finds done."""
        return self._get_per_token_logps_and_entropies(
            model,
            *joined(inputs),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )

    def _weights(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor | None:
        """(B, C) what makes good for a sampler that is not the policy; None where nothing has to be.

        As the weights are not negative, weighing the advantage weighs the clipped loss of its token.
        """
        cap, sampled = self.grpo.importance_cap, inputs.get("sampling_per_token_logps")
        differs = self.sync is not None or self.grpo.staleness  # the sampler may not be the policy
        if not differs or cap is None or sampled is None:
            return None
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if "schema_mask" in inputs:  # a row may teach the schema track alone
            mask = torch.maximum(mask, inputs["schema_mask"])
        old = inputs.get("old_per_token_logps", logps)
        return losses.sampler_weights(old, sampled, mask, cap, self.grpo.bounds, self.grpo.importance_level)

    def _schema_loss(self, logps: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The schema track's loss. The penalty on leaving the reference is paid once, by the full track."""
        grpo, mask = self.grpo, inputs["schema_mask"]
        weights = inputs["schema_advantages"]
        ratio = losses.ratios(logps, inputs.get("old_per_token_logps", logps.detach()), mask, grpo.level)
        weights = weights.view(len(weights), -1)  # (B, 1), or (B, C) when tokens differ
        losses_here = losses.per_token(grpo.loss, ratio, logps, weights, grpo.clip_low, grpo.clip_high)
        parts = self.current_gradient_accumulation_steps
        return losses.averaged(
            grpo.loss,
            losses_here,
            mask,
            items=inputs["schema_items"],
            longest=self.max_completion_length,
            parts=parts,
            share=self.accelerator.num_processes * self.args.steps_per_generation / parts,
        )

    def _watch(self, inputs: dict[str, Any], current: ForwardPass) -> None:
        """Entropy over the rows that had a forward; on the first pass, how far trainer and sampler are apart."""
        assert current.kept is not None
        logps, entropies, _ = current.kept
        assert entropies is not None
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if current.rows is not None:
            mask = mask * current.rows.unsqueeze(1)
        drift, compared = torch.zeros_like(logps), torch.zeros_like(mask)
        sampled = inputs.get("sampling_per_token_logps")
        first = self._step % (self.args.steps_per_generation * self.num_iterations) < self.args.steps_per_generation
        if sampled is not None and first:
            drift, compared = ((logps.detach() - sampled).abs() * mask).nan_to_num(0.0), mask
        sums = [(entropies.detach() * mask).sum(), mask.sum(), drift.sum(), compared.sum()]
        self.step_state.add(torch.stack([value.float() for value in sums]), drift.max())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log TRL's numbers beside those of the generation that they belong to, and of all the step's losses."""
        logs.update({f"own/{name}": value for name, value in self.step_state.watched.items()})
        for name in (
            HELD_OUT,
            HELD_OUT_TURNS,
            HELD_OUT_COUNT,
        ):  # measured once: not again with each step on the same generation
            self.step_state.watched.pop(name, None)
        mine, farthest = self.step_state.take_sums(self.accelerator.device)
        entropy, tokens, drift, compared = self.accelerator.reduce(mine, reduction="sum").tolist()
        farthest = self.accelerator.gather(farthest).max().item()
        if tokens:
            logs["own/entropy"] = entropy / tokens
        if compared:
            logs |= {"own/drift_mean": drift / compared, "own/drift_max": farthest}
        super().log(logs, start_time)

    def all_have(self, value: object) -> bool:
        """Whether no process has None here: what follows from it is done by all of them, or by none."""
        return not self._most(int(value is None))

    def observe(self, generation: Generation) -> list[list[int]]:
        """Take note of a generation; the mask of each episode's full track.

        Its numbers, summed up over all processes, are logged with each step that trains on it.
        """
        self.generation = generation
        for name, seconds in generation.seconds.items():
            self.step_state.spend(name, seconds)
        self.step_state.beside |= generation.beside
        sampled_tokens = sum(paid.trajectory.n_agent_tokens for paid in generation.drawn)
        self.step_state.count(record.SAMPLED, sampled_tokens)
        useful = self._useful(FULL)
        masks = self.rollouts.masks(generation, FULL, useful)
        # Rows whose advantage is 0 have no gradient: the pass for the old log-probabilities leaves them out too.
        self.step_state.old = None if self.beta or self.grpo.lambda_schema else useful
        self.step_state.watched |= self._sum_up(generation)
        if self.ahead is not None:
            ages = generation.ages(self.state.global_step) or [0]
            self.step_state.watched |= {"staleness": sum(ages) / len(ages), "staleness_max": float(max(ages))}
        return masks

    def sample(self, prompts: Sequence[str], index: int) -> Generation:
        """The episodes of a generation; with `grpo.staleness` those that follow are begun before it is trained on."""
        first = self.accelerator.process_index * len(prompts)
        generation = self.ahead.take(prompts) if self.ahead is not None else None
        if self.sync is not None:  # what was sampled by the weights before is here, or is carried over
            self.step_state.spend("sync_seconds", self.sync.push(self))
            self.rollouts.policy.follow(self.sync.places)
        self.measure()
        if generation is None:
            generation = self.rollouts.generate(prompts, index, first)
        if self.ahead is not None:
            generation.leave_out(self.state.global_step - self.grpo.staleness * self.num_iterations)
            self.rollouts.last = generation.drawn
            self._sample_ahead(self.ahead, index, first, len(prompts))
        return generation

    def _sample_ahead(self, ahead: Ahead, index: int, first: int, count: int) -> None:
        """Begin the generations after this one, up to `grpo.staleness` of them, that are not yet on their way.

        In process none is sampled ahead of a checkpoint: a resumed run, which has the checkpoint's weights alone, makes
        the same ones. Servers promise no such thing.
        """
        weights = None
        for following in range(max(index, ahead.last) + 1, index + self.grpo.staleness + 1):
            after = following * self.num_iterations
            if after >= self.state.max_steps or (self.sync is None and after % self.args.save_steps == 0):
                return
            ids = self._prompts(following)[first : first + count]
            if self.sync is not None:
                ahead.start(ids, following, first, self.state.global_step, places=self.sync.places)
                continue
            weights = weights or whole_weights(self)[1]
            ahead.start(ids, following, first, self.state.global_step, weights)

    def _prompts(self, index: int) -> list[str]:
        """The ids of a generation's episodes over all processes, in the order in which TRL will ask for them."""
        count = self.grpo.questions_per_step
        ids = self.train_dataset["prompt"][index * count : (index + 1) * count]
        return [name for name in ids for _ in range(self.grpo.group)]

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
        self.step_state.spend("held_out_seconds", time.perf_counter() - started)

    def _sum_up(self, generation: Generation) -> dict[str, float]:
        terms = [term.term for term in self.plan.recipe.rewards]
        by_name = facts(generation, terms)
        table = torch.tensor(list(by_name.values()), dtype=torch.float32, device=self.accelerator.device).T  # (N, F)
        table = self.accelerator.gather(table.contiguous())
        watched = {name: mean for name, mean in zip(by_name, table.nanmean(0).tolist(), strict=True) if mean == mean}
        right = table[:, list(by_name).index("ex")].nan_to_num(0.0)
        watched["pass_at_group"] = right.view(-1, self.grpo.group).amax(1).mean().item()
        alike = advantages.zero_variance(self._everyone(FULL, drawn=True), self.grpo.group)
        faults: Counter[str] = sum(gather_object([format_errors(generation)]), Counter())
        turns = max(1.0, watched["turns"] * len(generation.episodes) * self.accelerator.num_processes)
        shares = {f"fault_{name}": count / turns for name, count in sorted(faults.items())}
        everywhere = gather_object([generation.judge])
        judge = {name: sum(worker[name] for worker in everywhere) for name in generation.judge}
        return {**watched, **shares, **judge, "zero_variance": alike.float().mean().item()}


def rollout(prompts: list[str], trainer: GrpoTrainer) -> dict[str, Any]:
    """TRL's `rollout_func`: the prompts are example ids, repeated for each episode of their group."""
    index = trainer.state.global_step // trainer.num_iterations
    with _whole_weights(trainer):
        generation = trainer.sample(prompts, index)
    masks = trainer.observe(generation)
    pairs = [cut(paid.trajectory, trainer._tokenizer.pad_token_id) for paid in generation.episodes]
    prompt_ids, completion_ids = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    sampled = _sampled(generation, completion_ids)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": sampled if trainer.all_have(sampled) else None,
        "env_mask": masks,
        "paid": [None if paid.rewards is None else paid.reward(FULL) for paid in generation.episodes],
    }


def weighed(inputs: dict[str, Any], name: str, weights: Tensor | None) -> dict[str, Tensor]:
    """One track's advantages (B, C), weighed token by token; nothing to change where there are no weights."""
    return {} if weights is None else {name: inputs[name].view(len(weights), -1) * weights}


def reward(paid: Sequence[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: what the rollout already paid. None leaves an episode out of its group."""
    return list(paid)


def _whole_weights(trainer: GrpoTrainer) -> AbstractContextManager[Any]:
    """While episodes are made in process, ZeRO-3 must bring each process the weights that it keeps in parts."""
    if trainer.sync is not None or not trainer.is_deepspeed_enabled:
        return nullcontext()
    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator)  # type: ignore[no-any-return]


def _sampled(generation: Generation, completion_ids: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """The sampler's log-probabilities of each completion; None when some policy did not tell them."""
    if not all(paid.trajectory.logprobs for paid in generation.episodes if paid.outcome is not None):
        return None
    return [
        list(paid.trajectory.logprobs[-len(ids) :]) if paid.trajectory.logprobs else [0.0] * len(ids)
        for paid, ids in zip(generation.episodes, completion_ids, strict=True)
    ]
