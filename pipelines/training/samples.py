"""From trajectories to training samples: token ids, labels and masks, and which samples train together.

Importing it costs no torch: records are read before torch and TRL are imported.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from pipelines.core import frames
from pipelines.core.errors import RecipeError
from pipelines.core.types import Record, Trajectory, read_jsonl
from pipelines.recipe.config import Grpo
from pipelines.rollout.codec import ChatCodec, common_prefix

IGNORED = -100  # the label that cross-entropy skips
LIKE_ROWS = 24  # rows of one of GRPO's forwards with padding: the fewer, the more alike in length
WINDOW = 8  # micro-batches that are sorted together: padding stays low, and a batch still mixes the dataset


@dataclass(frozen=True)
class Sample:
    """One episode as a model reads it."""

    input_ids: tuple[int, ...]  # (T,) the prompt and all turns.
    labels: tuple[int, ...]  # (T,) the agent's own tokens, -100 elsewhere.
    agent_mask: tuple[int, ...]  # (T,) 1 where the agent spoke, else 0.
    turn_ends: tuple[int, ...]  # index just past the last agent token of each turn.


def make_sample(trajectory: Trajectory, codec: ChatCodec, skip_failed_turns: bool = False) -> Sample:
    """A sample whose tokens are the trajectory's own; a trajectory of text only is encoded turn by turn.

    Args:
        skip_failed_turns: turns whose statement did not run have no labels.
    """
    ids = list(trajectory.token_ids)
    mask = list(trajectory.agent_mask)
    ends = list(trajectory.turn_ends)
    if not ids:
        ids, mask, ends = _encode(trajectory, codec)
    labels = []
    for token, is_agents in zip(ids, mask, strict=True):
        labels.append(token if is_agents else IGNORED)
    if skip_failed_turns:
        starts = [0, *ends]
        for turn, start, end in zip(trajectory.turns, starts, ends, strict=False):
            if not turn.ran_well:
                labels[start:end] = [IGNORED] * (end - start)
    return Sample(tuple(ids), tuple(labels), tuple(mask), tuple(ends))


def _encode(trajectory: Trajectory, codec: ChatCodec) -> tuple[list[int], list[int], list[int]]:
    """The token ids of a trajectory's texts, the agent's mask, and the end of each turn."""
    ids = list(codec.prompt(trajectory.prompt))
    mask = [0] * len(ids)
    ends = []
    for number, turn in enumerate(trajectory.turns):
        if number:  # the environment's answer before this turn; after the last turn it would teach nothing
            ids += codec.observation(trajectory.turns[number - 1].observation or "")
            mask += [0] * (len(ids) - len(mask))
        ids += codec.agent(turn.text)
        mask += [1] * (len(ids) - len(mask))
        ends.append(len(ids))
    return ids, mask, ends


def track_mask(agent_mask: Sequence[int], turn_ends: Sequence[int], turns: int) -> list[int]:
    """(T,) the agent's tokens of the first `turns` turns (TRUST-SQL, 3.4: a track ends at its turn T_k)."""
    end = 0
    if turns and turn_ends:
        last_turn = min(turns, len(turn_ends)) - 1
        end = turn_ends[last_turn]
    mask = list(agent_mask[:end])
    n_later = len(agent_mask) - len(mask)
    return mask + [0] * n_later


def read_plan_data(path: Path, kind: type[Record]) -> list[Record]:
    """The trajectories or examples that a plan names, from Parquet or JSONL."""
    if path.suffix == ".parquet":
        return frames.from_frame(frames.read(path), kind)
    return list(read_jsonl(path, kind))


# Which samples train together: batches of like length, in an order that a seed fixes for the whole run.


def split_batch(batch: int, micro_batch: int, processes: int) -> tuple[int, int]:
    """The (samples of one forward, accumulated forwards) that make up one process's share of a batch."""
    if batch % processes:
        raise RecipeError(f"a batch of {batch} cannot be shared by {processes} processes", "Make it a multiple.")
    share = batch // processes
    micro = micro_rows(share, micro_batch)
    return micro, share // micro


def micro_rows(share: int, micro_batch: int) -> int:
    """Samples of a micro-batch: at most `micro_batch`, and as many in each of a process's share of a batch."""
    sizes = range(1, min(micro_batch, share) + 1)
    return max(size for size in sizes if share % size == 0)


def step_count(samples: int, epochs: float, batch: int) -> int:
    """Optimiser steps of a run: at least one."""
    # The decimal number that was written counts: the float of 1.1 is more.
    written_epochs = Fraction(str(epochs))
    steps = math.floor(samples * written_epochs / batch)
    return max(1, steps)


def grpo_steps(grpo: Grpo, questions: int) -> int:
    """Optimiser steps of GRPO over so many questions: those of its epochs, or `grpo.steps`."""
    if grpo.epochs is None:
        return grpo.steps
    written_epochs = Fraction(str(grpo.epochs))
    generations = math.ceil(written_epochs * questions / grpo.questions_per_step)
    return generations * grpo.updates_per_rollout


Runs = tuple[list[list[int]], list[int]]  # full runs of samples, and the samples left over


def order_by_length(lengths: Sequence[int], micro_batch: int, total: int, seed: int) -> list[int]:
    """Indices of `total` samples, so that each run of `micro_batch` holds samples of like length.

    Every sample is used once before any is used again, except for fewer than `micro_batch` that no run is left for:
    they come within the next pass.
    """
    window_size = micro_batch * WINDOW

    def runs_of_like_length(indices: list[int]) -> Runs:
        end = len(indices) - len(indices) % micro_batch
        runs: list[list[int]] = []
        for start in range(0, end, window_size):
            window_end = min(end, start + window_size)
            window = indices[start:window_end]
            window.sort(key=lengths.__getitem__)
            window_runs, _ = _full_runs(window, micro_batch)
            runs += window_runs
        return runs, indices[end:]

    return _shuffled_runs(len(lengths), total, seed, runs_of_like_length)


def order_by_group(groups: Sequence[int], micro_batch: int, total: int, seed: int) -> list[int]:
    """Indices of `total` samples, so that each run of `micro_batch` holds samples of one group.

    Left-over samples of several groups fill runs together, neighbours again being of one group. Runs are shuffled: an
    optimiser step mixes groups. Every sample is used once before any is used again, except for fewer than `micro_batch`
    that no run is left for: they come within the next pass.

    Args:
        groups: the group of each sample (see `prefix_groups`).
    """

    def runs_of_one_group(indices: list[int]) -> Runs:
        by_group: dict[int, list[int]] = {}
        for index in indices:
            by_group.setdefault(groups[index], []).append(index)
        runs = []
        rest = []
        for members in by_group.values():
            group_runs, group_rest = _full_runs(members, micro_batch)
            runs += group_runs
            rest += group_rest
        mixed_runs, waiting = _full_runs(rest, micro_batch)
        return runs + mixed_runs, waiting

    return _shuffled_runs(len(groups), total, seed, runs_of_one_group)


def _full_runs(indices: list[int], size: int) -> Runs:
    """Runs of `size` samples each, and the samples left over."""
    end = len(indices) - len(indices) % size
    runs = [indices[start : start + size] for start in range(0, end, size)]
    return runs, indices[end:]


def _shuffled_runs(count: int, total: int, seed: int, cut_runs: Callable[[list[int]], Runs]) -> list[int]:
    """Indices of `total` samples, pass after pass over `count` samples, in shuffled runs.

    Args:
        cut_runs: cuts shuffled samples into runs; those left over come first in the next pass.
    """
    indices: list[int] = []
    waiting: list[int] = []
    n_passes = math.ceil(total / max(1, count)) + 1
    for epoch in range(n_passes):
        rng = np.random.default_rng((seed, epoch))
        shuffled = rng.permutation(count).tolist()
        runs, waiting = cut_runs(waiting + shuffled)
        for number in rng.permutation(len(runs)):
            indices += runs[number]
    return indices[:total]


def prefix_groups(samples: Sequence[Sample]) -> list[int]:
    """For each sample, the number of its group: prompts of a group share most of what not all prompts share.

    Prompts of one database begin with the same instructions and schema; the instructions alone make no group.
    """
    numbers = range(len(samples))
    by_tokens = sorted(numbers, key=lambda index: samples[index].input_ids)
    shared = [0]  # tokens that each sample, in that order, shares with the one before it
    for before, index in itertools.pairwise(by_tokens):
        n_shared = common_prefix(samples[before].input_ids, samples[index].input_ids)
        shared.append(n_shared)
    instructions = min(shared[1:], default=0)
    groups = [0] * len(samples)
    group = 0
    for number, index in enumerate(by_tokens):
        prompt = samples[index].agent_mask.index(1)
        own_tokens = prompt - instructions
        shared_tokens = shared[number] - instructions
        if number and 2 * shared_tokens < own_tokens:
            group += 1
        groups[index] = group
    return groups


def schedule(pool: int, questions: int, generations: int, seed: int, order: str = "shuffled") -> list[int]:
    """Indices of the questions of each generation, one after the other: (generations * questions,).

    A question comes again only when all have come; none comes twice in one generation unless the pool is too small.
    By any `order` but "shuffled" the pool comes in it already.
    """
    total = generations * questions
    if order != "shuffled":
        return [number % pool for number in range(total)]
    indices: list[int] = []
    waiting: list[int] = []
    epoch = 0
    while len(indices) < total:
        while len(waiting) < questions:
            rng = np.random.default_rng((seed, epoch))
            fresh = rng.permutation(pool).tolist()
            is_waiting = set(waiting).__contains__
            waiting += sorted(fresh, key=is_waiting)  # questions that still wait come last
            epoch += 1
        indices += waiting[:questions]
        waiting = waiting[questions:]
    return indices


def padding_share(lengths: Sequence[int], indices: Sequence[int], micro_batch: int) -> float:
    """The share of tokens that are padding when each run of `micro_batch` is padded to its longest."""
    tokens = 0
    padded = 0
    for start in range(0, len(indices), micro_batch):
        run = [lengths[index] for index in indices[start : start + micro_batch]]
        tokens += sum(run)
        padded += max(run) * len(run)
    if not padded:
        return 0.0
    return 1.0 - tokens / padded
