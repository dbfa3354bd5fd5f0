"""Which rows of a batch are computed, with which others, and without which padding: pure functions on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import flush_left

Forward = tuple[Tensor, Tensor | None, Tensor | None]  # log-probabilities (B, C), entropies (B, C), auxiliary loss


def moving(inputs: Mapping[str, Tensor], beta: float = 0.0) -> Tensor:
    """(B,) which rows can move the policy: some token of weight with an advantage that is not 0, or a KL penalty."""
    full = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    moves = full.bool().any(1) if beta else _paid(full, inputs["advantages"])
    if "schema_mask" in inputs:
        moves = moves | _paid(inputs["schema_mask"], inputs["schema_advantages"])
    return moves


def _paid(mask: Tensor, advantages: Tensor) -> Tensor:
    """(B,) which rows have a token under a track's mask (B, C) whose advantage is not 0: one a row, (B,), or (B, C)."""
    return (mask.bool() & (advantages != 0).view(len(mask), -1)).any(1)


def regroup(batches: Sequence[Mapping[str, Tensor]], weigh: Callable[[Mapping[str, Tensor]], Tensor]) -> list[Any]:
    """The same rows in as many micro-batches: those that move the policy first, and what begins alike together.

    All micro-batches of one optimiser step are summed, so which of them holds a row does not matter to the step.
    """
    whole = {
        name: torch.cat([batch[name] for batch in batches]) if value.ndim else value
        for name, value in batches[0].items()
    }
    order = sorting(*joined(whole))
    moves = weigh(whole)[order]
    order = torch.cat([order[moves], order[~moves]])
    return [
        {name: value[rows] if value.ndim else value for name, value in whole.items()}
        for rows in torch.split(order, len(order) // len(batches))
    ]


def by_tokens(input_ids: Tensor, attention_mask: Tensor, rows: Tensor, most: int, shares: bool) -> list[Tensor]:
    """Some `rows` of a batch (B, T), in parts of at most `most` tokens, or of one row.

    Rows that begin alike stay neighbours.

    Args:
        rows: (R,) which of the batch's.
        shares: whether what rows begin with is computed once.
    """
    if not len(rows):
        return [rows]
    rows = rows[sorting(input_ids[rows], attention_mask[rows])]
    mask, ids = flush_left(attention_mask[rows], input_ids[rows])
    lengths = mask.sum(1)
    n_shared = in_common(ids, lengths) if shares else torch.zeros_like(lengths)
    starts, tokens = [0], 0
    for place, (length, common) in enumerate(zip(lengths.tolist(), n_shared.tolist(), strict=True)):
        tokens += length - 1 - max(0, common - 1)
        if tokens > most and place > starts[-1]:
            starts.append(place)
            tokens = length - 1
    return list(torch.tensor_split(rows, starts[1:]))


def only(inputs: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """The masks of a micro-batch in which only some of its rows have weight, on any track."""
    masks = {"tool_mask": inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))}
    masks |= {name: inputs[name] for name in ("schema_mask",) if name in inputs}
    inside = torch.zeros_like(inputs["completion_mask"][:, :1]).index_fill(0, rows, 1)  # (B, 1)
    return {name: mask * inside for name, mask in masks.items()}


def in_common(ids: Tensor, lengths: Tensor) -> Tensor:
    """(B,) the tokens that each row (B, T), padded on the right, has in common with the start of the one before it."""
    inside = torch.arange(ids.size(1), device=ids.device) < lengths.unsqueeze(1)
    alike = (ids[1:] == ids[:-1]) & inside[1:] & inside[:-1]
    return torch.cat([lengths.new_zeros(1), alike.cumprod(1).sum(1)])


def joined(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts and completions of a batch, (B, P + C): their tokens, and which are there."""
    ids, mask = (
        torch.cat([inputs[f"{part}_{name}"] for part in ("prompt", "completion")], 1) for name in ("ids", "mask")
    )
    return ids, mask


def sorting(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) the order of rows (B, T) in which those that begin alike are neighbours."""
    rows = [
        [token for token, there in zip(*pair, strict=True) if there]
        for pair in zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    ]
    return torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=input_ids.device)


def by_length(_: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) the order of rows by their length, the shortest first."""
    return attention_mask.sum(1).argsort(stable=True)


def shares(rows: Tensor, count: int) -> tuple[list[Tensor], int]:
    """The rows of each of `count` forwards, and how many forwards at the end only repeat the first row.

    DistributedDataParallel and ZeRO-3 talk in each forward: a process with fewer of them would leave the others waiting
    for ever. So the count follows from what all processes have alike, and not from the rows that are left.
    """
    parts = list(torch.tensor_split(rows, min(count, len(rows))))
    repeats = count - len(parts)
    return parts + [rows[:1]] * repeats, repeats


def dense(compute: Callable[..., Forward], input_ids: Tensor, attention_mask: Tensor, completion: int) -> Forward:
    """`compute` on rows without the padding between and around them: (B, C) log-probabilities and entropies.

    Args:
        input_ids, attention_mask: (B, P + C), prompts padded on the left, completions on the right.
        completion: C.
    """
    prompts = attention_mask[:, :-completion].sum(1)  # (B,)
    mask, ids = flush_left(attention_mask, input_ids)
    keep = mask.size(1) - int(prompts.min())
    logps, entropies, extra = compute(input_ids=ids, attention_mask=mask, logits_to_keep=keep)
    places = (prompts - prompts.min()).unsqueeze(1) + torch.arange(completion, device=mask.device)  # (B, C)
    places, absent = places.clamp(max=keep - 1), attention_mask[:, -completion:] == 0

    def back(values: Tensor) -> Tensor:
        return values.gather(1, places).masked_fill(absent, 0.0)

    return back(logps), None if entropies is None else back(entropies), extra


def scatter(parts: Sequence[Forward], rows: Tensor, total: int) -> Forward:
    """The parts' values at their rows of a batch of `total`, 0 elsewhere."""

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(total, values.size(1)).index_copy(0, rows, values)

    entropies = [part[1] for part in parts if part[1] is not None]
    extras = [part[2] for part in parts if part[2] is not None]
    return (
        spread(torch.cat([part[0] for part in parts])),
        spread(torch.cat(entropies)) if entropies else None,
        torch.stack(extras).mean() if extras else None,
    )
