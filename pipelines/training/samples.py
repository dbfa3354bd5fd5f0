"""From trajectories to training samples: token ids, labels and masks, and which samples train together.

Importing it costs no torch: records are read before torch and TRL are imported.
"""

import itertools
import math
from collections.abc import Sequence
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
    turn_ends: tuple[int, ...]  # for each turn, the index just past its last agent token.


def sample(trajectory: Trajectory, codec: ChatCodec) -> Sample:
    """A sample whose tokens are the trajectory's own; a trajectory of text only is encoded turn by turn."""
    ids, mask, ends = list(trajectory.token_ids), list(trajectory.agent_mask), list(trajectory.turn_ends)
    if not ids:
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
    labels = tuple(token if spoken else IGNORED for token, spoken in zip(ids, mask, strict=True))
    return Sample(tuple(ids), labels, tuple(mask), tuple(ends))


def track_mask(agent_mask: Sequence[int], turn_ends: Sequence[int], turns: int) -> list[int]:
    """(T,) the agent's tokens of the first `turns` turns (TRUST-SQL, 3.4: a track ends at its turn T_k)."""
    end = turn_ends[min(turns, len(turn_ends)) - 1] if turns and turn_ends else 0
    return [mask if index < end else 0 for index, mask in enumerate(agent_mask)]


def records(path: Path, kind: type[Record]) -> list[Record]:
    """The trajectories or examples that a plan names, from Parquet or JSONL."""
    return frames.from_frame(frames.read(path), kind) if path.suffix == ".parquet" else list(read_jsonl(path, kind))


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
    return max(size for size in range(1, min(micro_batch, share) + 1) if share % size == 0)


def step_count(samples: int, epochs: float, batch: int) -> int:
    """Optimiser steps of a run: at least one."""
    return max(1, math.floor(samples * Fraction(str(epochs)) / batch))  # as it is written: the float of 1.1 is more


def grpo_steps(grpo: Grpo, questions: int) -> int:
    """Optimiser steps of GRPO over so many questions: those of its epochs, or `grpo.steps`."""
    if grpo.epochs is None:
        return grpo.steps
    return math.ceil(Fraction(str(grpo.epochs)) * questions / grpo.questions_per_step) * grpo.updates_per_rollout


def order(lengths: Sequence[int], micro_batch: int, total: int, seed: int) -> list[int]:
    """Indices of `total` samples, so that each run of `micro_batch` holds samples of like length.

    Every sample is used once before any is used again.
    """
    chosen: list[int] = []
    waiting: list[int] = []
    for epoch in range(math.ceil(total / max(1, len(lengths))) + 1):
        rng = np.random.default_rng((seed, epoch))
        indices = waiting + rng.permutation(len(lengths)).tolist()
        whole = len(indices) - len(indices) % micro_batch
        waiting = indices[whole:]
        batches: list[list[int]] = []
        for at in range(0, whole, micro_batch * WINDOW):
            near = sorted(indices[at : min(whole, at + micro_batch * WINDOW)], key=lambda index: lengths[index])
            batches += [near[start : start + micro_batch] for start in range(0, len(near), micro_batch)]
        chosen += [index for place in rng.permutation(len(batches)) for index in batches[place]]
    return chosen[:total]


def prefix_groups(samples: Sequence[Sample]) -> list[int]:
    """For each sample, the number of its group: prompts of a group share most of what not all prompts share.

    Prompts of one database begin with the same instructions and schema; the instructions alone make no group.
    """
    by_tokens = sorted(range(len(samples)), key=lambda index: samples[index].input_ids)
    shared = [0]  # for each sample in that order, the tokens that it shares with the one before it
    for before, index in itertools.pairwise(by_tokens):
        shared.append(common_prefix(samples[before].input_ids, samples[index].input_ids))
    instructions = min(shared[1:], default=0)
    groups = [0] * len(samples)
    group = 0
    for place, index in enumerate(by_tokens):
        prompt = samples[index].agent_mask.index(1)
        own = prompt - instructions
        if place and 2 * (shared[place] - instructions) < own:
            group += 1
        groups[index] = group
    return groups


def grouped_order(groups: Sequence[int], micro_batch: int, total: int, seed: int) -> list[int]:
    """Indices of `total` samples, so that each run of `micro_batch` holds samples of one group.

    What a group has over fills runs together with the rest of others, neighbours again being of one group. Runs are
    shuffled: an optimiser step mixes groups. Every sample is used once before any is used again.
    """
    chosen: list[int] = []
    waiting: list[int] = []
    for epoch in range(math.ceil(total / max(1, len(groups))) + 1):
        rng = np.random.default_rng((seed, epoch))
        by_group: dict[int, list[int]] = {}
        for index in waiting + rng.permutation(len(groups)).tolist():
            by_group.setdefault(groups[index], []).append(index)
        runs: list[list[int]] = []
        rest: list[int] = []
        for indices in by_group.values():
            whole = len(indices) - len(indices) % micro_batch
            runs += [indices[start : start + micro_batch] for start in range(0, whole, micro_batch)]
            rest += indices[whole:]
        whole = len(rest) - len(rest) % micro_batch
        runs += [rest[start : start + micro_batch] for start in range(0, whole, micro_batch)]
        waiting = rest[whole:]
        for place in rng.permutation(len(runs)):
            chosen += runs[place]
    return chosen[:total]


def schedule(pool: int, questions: int, generations: int, seed: int, order: str = "shuffled") -> list[int]:
    """Indices of the questions of each generation, one after the other: (generations * questions,).

    A question comes again only when all have come; none comes twice in one generation unless the pool is too small.
    By any `order` but "shuffled" the pool comes in it already.
    """
    if order != "shuffled":
        return [place % pool for place in range(generations * questions)]
    chosen: list[int] = []
    waiting: list[int] = []
    epoch = 0
    while len(chosen) < generations * questions:
        while len(waiting) < questions:
            fresh = np.random.default_rng((seed, epoch)).permutation(pool).tolist()
            waiting += sorted(fresh, key=set(waiting).__contains__)  # those that still wait come last
            epoch += 1
        chosen += waiting[:questions]
        waiting = waiting[questions:]
    return chosen


def padding_share(lengths: Sequence[int], indices: Sequence[int], micro_batch: int) -> float:
    """The share of tokens that are padding when each run of `micro_batch` is padded to its longest."""
    runs = [[lengths[index] for index in indices[at : at + micro_batch]] for at in range(0, len(indices), micro_batch)]
    padded = sum(max(run) * len(run) for run in runs)
    return 1.0 - sum(map(sum, runs)) / padded if padded else 0.0
