"""What each turn of an episode is paid, and which tokens its advantage is for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from pipelines.training.rollouts import PaidEpisode, cut

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
