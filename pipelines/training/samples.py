"""From trajectories to training samples: token ids, labels and the mask of what the agent said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.core.types import Trajectory

if TYPE_CHECKING:
    from pipelines.rollout.codec import ChatCodec


from pathlib import Path

from pipelines.core import frames
from pipelines.core.types import Example, Record, read_jsonl

IGNORED = -100  # the label that cross-entropy skips


@dataclass(frozen=True)
class Sample:
    """One episode as a model reads it."""

    input_ids: tuple[int, ...]  # (T,) the prompt and all turns.
    labels: tuple[int, ...]  # (T,) the agent's own tokens, -100 elsewhere.
    agent_mask: tuple[int, ...]  # (T,) 1 where the agent spoke, else 0.
    turn_ends: tuple[int, ...]  # for each turn, the index just past its last agent token.


def sample(trajectory: Trajectory, codec: ChatCodec) -> Sample:
    """A sample whose tokens are the trajectory's own; a trajectory of text only is encoded turn by turn."""
    if trajectory.token_ids:
        return _masked(trajectory.token_ids, trajectory.agent_mask, trajectory.turn_ends)
    ids = list(codec.prompt(trajectory.prompt))
    mask = [0] * len(ids)
    ends: list[int] = []
    before = ""
    for turn in trajectory.turns:
        if ends:  # what the environment answered; after the last turn it would teach nothing
            heard = codec.observation(before)
            ids += heard
            mask += [0] * len(heard)
        ids_said = codec.agent(turn.text)
        ids += ids_said
        mask += [1] * len(ids_said)
        ends.append(len(ids))
        before = turn.observation or ""
    return _masked(ids, mask, ends)


def track_mask(agent_mask: Sequence[int], turn_ends: Sequence[int], turns: int) -> list[int]:
    """(T,) the agent's tokens of the first `turns` turns (TRUST-SQL, 3.4: a track ends at its turn T_k)."""
    end = turn_ends[min(turns, len(turn_ends)) - 1] if turns and turn_ends else 0
    return [mask if index < end else 0 for index, mask in enumerate(agent_mask)]


def _masked(ids: Sequence[int], mask: Sequence[int], ends: Sequence[int]) -> Sample:
    labels = tuple(token if spoken else IGNORED for token, spoken in zip(ids, mask, strict=True))
    return Sample(tuple(ids), labels, tuple(mask), tuple(ends))


# The records that a plan names, from Parquet or JSONL.


def trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of a file."""
    return _records(path, Trajectory)


def examples(path: Path) -> list[Example]:
    """The examples of a file."""
    return _records(path, Example)


def _records(path: Path, kind: type[Record]) -> list[Record]:
    if path.suffix == ".parquet":
        return frames.from_frame(frames.read(path), kind)
    return list(read_jsonl(path, kind))
