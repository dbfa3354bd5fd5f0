"""The numbers that GRPO logs with each step: its generation's episodes, its losses, its tokens and its time."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]
from torch import Tensor

from pipelines.training import advantages
from pipelines.training.plan import HELD_OUT, HELD_OUT_COUNT, HELD_OUT_TURNS
from pipelines.training.record import OWN, SAMPLED
from pipelines.training.rollouts import FULL, Generation, PaidEpisode

NAN = float("nan")
LOGGED_ONCE = (HELD_OUT, HELD_OUT_TURNS, HELD_OUT_COUNT)  # numbers of the first step on a generation alone


def episode_metrics(generation: Generation, terms: Sequence[str]) -> dict[str, list[float]]:
    """Numbers of the episodes as first drawn, by name, one for each episode: NaN if an episode has none.

    Args:
        terms: reward terms of the recipe's panel; each is a number `term_NAME`.
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for paid, trained in zip(generation.drawn, generation.episodes, strict=True):
        row = _episode_row(paid, terms, is_replaced=paid is not trained)
        for name, value in row.items():
            columns[name].append(float(value))
    return dict(columns)


def _episode_row(paid: PaidEpisode, terms: Sequence[str], is_replaced: bool) -> dict[str, float]:
    """The numbers of one episode; `is_replaced` if its group was drawn once more for training."""
    trajectory = paid.trajectory
    turns = trajectory.turns
    is_correct: float = NAN
    if paid.outcome is not None:
        is_correct = paid.outcome.correct
    has_answer = trajectory.final_sql is not None
    is_single_statement: float = NAN
    if has_answer:
        is_single_statement = all(turn.status is None for turn in turns)  # the answer is its only statement
    row: dict[str, float] = {
        "reward": paid.reward(FULL),
        "ex": is_correct,
        "turns": len(turns),
        "tokens": sum(trajectory.agent_mask),
        "reasoning_chars": sum(len(turn.action.reasoning) for turn in turns),
        "format_errors": any(turn.action.format_error is not None for turn in turns),
        "no_answer": not has_answer,
        "sql_errors": any(turn.error_class for turn in turns),
        "single_statement": is_single_statement,
        "forced": trajectory.forced,
        "replaced": is_replaced,
        "broken": paid.outcome is None,
        "dropped": paid.outcome is not None and paid.rewards is None,
    }
    for term in terms:
        value = NAN
        if paid.rewards is not None:
            value = paid.rewards.by_term[term]
        row[f"term_{term}"] = value
    return row


def format_errors(generation: Generation) -> Counter[str]:
    """How often each format error was made, over all turns."""
    errors: Counter[str] = Counter()
    for paid in generation.drawn:
        for turn in paid.trajectory.turns:
            error = turn.action.format_error
            if error is not None:
                errors[error] += 1
    return errors


def generation_metrics(
    generation: Generation, group: int, terms: Sequence[str], drawn_rewards: Tensor, accelerator: Any
) -> dict[str, float]:
    """Numbers of a generation's episodes as first drawn, over all processes.

    Args:
        group: episodes of one question.
        terms: reward terms of the recipe's panel.
        drawn_rewards: (N,) full-track rewards over all processes, group by group.
    """
    columns = episode_metrics(generation, terms)
    metrics = _means_over_episodes(columns, group, accelerator)
    errors: Counter[str] = sum(gather_object([format_errors(generation)]), Counter())
    episodes = len(generation.episodes) * accelerator.num_processes
    turns = max(1.0, metrics["turns"] * episodes)
    for name, count in sorted(errors.items()):
        metrics[f"fault_{name}"] = count / turns

    judges = gather_object([generation.judge])
    for name in generation.judge:
        metrics[name] = sum(judge[name] for judge in judges)
    is_alike = advantages.zero_variance(drawn_rewards, group)
    metrics["zero_variance"] = is_alike.float().mean().item()
    return metrics


def _means_over_episodes(columns: Mapping[str, Sequence[float]], group: int, accelerator: Any) -> dict[str, float]:
    """The means of episodes' numbers over all processes, and the share of groups with a right answer."""
    names = list(columns)
    own_columns = list(columns.values())
    own_table = torch.tensor(own_columns, dtype=torch.float32, device=accelerator.device)  # (F, N)
    table = accelerator.gather(own_table.T.contiguous())  # (N, F)
    metrics: dict[str, float] = {}
    means = table.nanmean(0).tolist()
    for name, mean in zip(names, means, strict=True):
        if not math.isnan(mean):
            metrics[name] = mean
    ex_column = names.index("ex")
    is_right = table[:, ex_column].nan_to_num(0.0)
    has_right_answer = is_right.view(-1, group).amax(1)
    metrics["pass_at_group"] = has_right_answer.mean().item()
    return metrics


@dataclass
class StepLog:
    """The numbers of this process that wait to be logged with a step, or with each step on a generation."""

    # Seconds of this process in the current step, by their use.
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Tokens of the current step, and seconds of the sampling process; not included in `seconds`.
    counts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    # Numbers that are logged with each step that trains on the current generation.
    generation: dict[str, float] = field(default_factory=dict)
    # (4,) sums over this step's losses: entropies and their tokens, distances between trainer and sampler and their
    # tokens; None before its first loss.
    loss_sums: Tensor | None = None
    largest_drift: Tensor | None = None  # () the largest of these distances; None before the step's first loss.

    def take_seconds(self) -> dict[str, float]:
        """The seconds and counts of the step so far; the next step begins at zero."""
        taken = dict(self.seconds | self.counts)
        self.seconds.clear()
        self.counts.clear()
        return taken

    def add_generation(self, generation: Generation) -> None:
        """Add a generation's seconds and the tokens that it sampled."""
        for name, seconds in generation.seconds.items():
            self.seconds[name] += seconds
        self.counts |= generation.sampler_seconds
        for paid in generation.drawn:
            self.counts[SAMPLED] += sum(paid.trajectory.agent_mask)

    def add_loss(self, logps: Tensor, entropies: Tensor, mask: Tensor, sampled: Tensor | None) -> None:
        """Add a loss's entropies, and how far its log-probabilities are from the sampler's.

        Args:
            logps, entropies: (B, C) of the completion tokens.
            mask: (B, C) trained tokens of rows that had a forward.
            sampled: (B, C) the sampler's log-probabilities; None if they are not to be compared.
        """
        drift = torch.zeros_like(logps)
        compared = torch.zeros_like(mask)
        if sampled is not None:
            distance = (logps.detach() - sampled).abs()
            drift = (distance * mask).nan_to_num(0.0)
            compared = mask
        entropy = entropies.detach() * mask
        totals = [part.sum().float() for part in (entropy, mask, drift, compared)]
        sums = torch.stack(totals)
        largest = drift.max()
        if self.loss_sums is not None and self.largest_drift is not None:
            sums = self.loss_sums + sums
            largest = torch.maximum(self.largest_drift, largest)
        self.loss_sums = sums
        self.largest_drift = largest

    def take_numbers(self, accelerator: Any) -> dict[str, float]:
        """The numbers to log with this step, over all processes, by the names that the recorder keeps."""
        numbers = {f"{OWN}{name}": value for name, value in self.generation.items()}
        for name in LOGGED_ONCE:
            self.generation.pop(name, None)
        sums = torch.zeros(4, device=accelerator.device)
        largest = sums[0]
        if self.loss_sums is not None and self.largest_drift is not None:
            sums = self.loss_sums
            largest = self.largest_drift
        self.loss_sums = None
        self.largest_drift = None
        entropy, tokens, drift, compared = accelerator.reduce(sums, reduction="sum").tolist()
        largest_anywhere = accelerator.gather(largest).max().item()
        if tokens:
            numbers[f"{OWN}entropy"] = entropy / tokens
        if compared:
            numbers[f"{OWN}drift_mean"] = drift / compared
            numbers[f"{OWN}drift_max"] = largest_anywhere
        return numbers
