"""Micro-batches of GRPO: which rows need a forward, which of them share one, and how many fit in memory.

Pure functions on tensors. Letters in shapes: B rows of P prompt tokens, padded on the left, and C completion tokens,
padded on the right; T = P + C.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from trl.trainer.utils import flush_left

Batch = Mapping[str, Tensor]  # TRL's inputs of some rows, by name


class TokenScores(NamedTuple):
    """The result of a forward at the completion tokens of B rows, in the order in which TRL unpacks it."""

    logps: Tensor  # (B, C) log-probabilities.
    entropies: Tensor | None  # (B, C) entropies of the distributions that the tokens were drawn from.
    aux_loss: Tensor | None  # () the loss that balances experts; None unless it was computed.


def prompt_and_completion(inputs: Batch) -> tuple[Tensor, Tensor]:
    """The tokens of a batch's prompts and completions (B, P + C), and the mask of those that are no padding."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return ids, mask


def full_track_mask(inputs: Batch) -> Tensor:
    """(B, C) the tokens of a batch's full track: the completions' without observations and padding."""
    return inputs["completion_mask"] * inputs.get("tool_mask", 1)


def rows_with_gradient(inputs: Batch, beta: float = 0.0) -> Tensor:
    """(B,) which rows have a gradient: a trained token whose advantage is not 0, or a penalty with weight `beta`."""
    full_mask = full_track_mask(inputs)
    has_gradient = _has_advantage(full_mask, inputs["advantages"])
    if beta:
        has_gradient = full_mask.bool().any(1)
    if "schema_mask" in inputs:
        has_gradient = has_gradient | _has_advantage(inputs["schema_mask"], inputs["schema_advantages"])
    return has_gradient


def _has_advantage(mask: Tensor, advantages: Tensor) -> Tensor:
    """(B,) which rows have a token under a track's mask (B, C) whose advantage, (B,) or (B, C), is not 0."""
    is_not_zero = (advantages != 0).view(len(mask), -1)  # (B, 1) or (B, C)
    return (mask.bool() & is_not_zero).any(1)


def prefix_order(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) the order of rows (B, T) in which rows that begin alike are neighbours."""
    rows = []
    for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
        tokens = itertools.compress(ids, mask)
        rows.append(list(tokens))
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return torch.tensor(order, device=input_ids.device)


def shared_prefix_lengths(ids: Tensor, lengths: Tensor) -> Tensor:
    """(B,) the tokens that each row (B, T), padded on the right, shares with the start of the row before it."""
    columns = torch.arange(ids.size(1), device=ids.device)
    inside = columns < lengths.unsqueeze(1)
    is_equal = ids[1:] == ids[:-1]
    is_shared = is_equal & inside[1:] & inside[:-1]
    n_shared = is_shared.cumprod(1).sum(1)  # (B - 1,) up to the first token that differs
    return torch.cat([lengths.new_zeros(1), n_shared])


def regroup(batches: Sequence[Batch], has_gradient: Callable[[Batch], Tensor]) -> list[dict[str, Tensor]]:
    """The same rows in as many micro-batches: rows with a gradient first, and rows that begin alike together.

    All micro-batches of one optimiser step are summed, so which of them holds a row does not matter to the step.
    """
    generation: dict[str, Tensor] = {}
    for name, value in batches[0].items():
        generation[name] = value
        if value.ndim:  # a number without rows is that of the whole generation
            generation[name] = torch.cat([batch[name] for batch in batches])
    ids, mask = prompt_and_completion(generation)
    order = prefix_order(ids, mask)
    is_trained = has_gradient(generation)[order]
    order = torch.cat([order[is_trained], order[~is_trained]])
    batch_size = len(order) // len(batches)
    regrouped = []
    for rows in torch.split(order, batch_size):
        micro_batch = dict(generation)
        for name, value in generation.items():
            if value.ndim:
                micro_batch[name] = value[rows]
        regrouped.append(micro_batch)
    return regrouped


def split_by_tokens(
    input_ids: Tensor, attention_mask: Tensor, rows: Tensor, max_tokens: int, shares_prefixes: bool
) -> list[Tensor]:
    """Some `rows` of a batch (B, T), in parts of at most `max_tokens` tokens, or of one row.

    Rows that begin alike stay neighbours.

    Args:
        rows: (R,) numbers of rows of the batch.
        shares_prefixes: whether a prefix that neighbours share is computed once.
    """
    if not len(rows):
        return [rows]
    rows = rows[prefix_order(input_ids[rows], attention_mask[rows])]
    mask, ids = flush_left(attention_mask[rows], input_ids[rows])
    lengths = mask.sum(1)
    shared = torch.zeros_like(lengths)
    if shares_prefixes:
        shared = shared_prefix_lengths(ids, lengths)
    starts = [0]
    tokens = 0  # the current part's
    counts = zip(lengths.tolist(), shared.tolist(), strict=True)
    for number, (length, n_shared) in enumerate(counts):
        tokens += length - 1 - max(0, n_shared - 1)
        if tokens > max_tokens and number > starts[-1]:
            starts.append(number)
            tokens = length - 1
    return list(torch.tensor_split(rows, starts[1:]))


def split_rows_evenly(rows: Tensor, count: int) -> tuple[list[Tensor], int]:
    """The rows of each of `count` forwards, and how many forwards at the end only repeat the first row.

    DistributedDataParallel and ZeRO-3 talk in each forward: a process with fewer of them would leave the others waiting
    for ever. So the count follows from what all processes have alike, and not from the rows that are left.
    """
    n_parts = min(count, len(rows))
    parts = list(torch.tensor_split(rows, n_parts))
    repeats = count - len(parts)
    return parts + [rows[:1]] * repeats, repeats


def select_rows(inputs: Batch, rows: Tensor) -> dict[str, Tensor]:
    """The masks of a micro-batch in which only some of its rows have weight, on any track."""
    completion_mask = inputs["completion_mask"]  # (B, C)
    masks = {"tool_mask": inputs.get("tool_mask", torch.ones_like(completion_mask))}
    if "schema_mask" in inputs:
        masks["schema_mask"] = inputs["schema_mask"]
    no_rows = torch.zeros_like(completion_mask[:, :1])  # (B, 1)
    selected = no_rows.index_fill(0, rows, 1)
    return {name: mask * selected for name, mask in masks.items()}


def without_padding(
    compute: Callable[..., TokenScores], input_ids: Tensor, attention_mask: Tensor, completion: int
) -> TokenScores:
    """`compute` on rows without the padding between prompt and completion, and around them.

    Args:
        input_ids, attention_mask: (B, P + C), prompts padded on the left, completions on the right.
        completion: C.
    """
    prompt_lengths = attention_mask[:, :-completion].sum(1)  # (B,)
    shortest_prompt = int(prompt_lengths.min())
    mask, ids = flush_left(attention_mask, input_ids)
    keep = mask.size(1) - shortest_prompt
    logps, entropies, aux_loss = compute(input_ids=ids, attention_mask=mask, logits_to_keep=keep)
    first = (prompt_lengths - shortest_prompt).unsqueeze(1)  # (B, 1) columns of the first completion tokens
    columns = first + torch.arange(completion, device=mask.device)  # (B, C)
    columns = columns.clamp(max=keep - 1)  # columns past the end are padding
    is_padding = attention_mask[:, -completion:] == 0

    def at_completion(values: Tensor) -> Tensor:
        return values.gather(1, columns).masked_fill(is_padding, 0.0)

    if entropies is not None:
        entropies = at_completion(entropies)
    return TokenScores(at_completion(logps), entropies, aux_loss)


def scatter_rows(parts: Sequence[TokenScores], rows: Tensor, total: int) -> TokenScores:
    """The parts' values at their rows of a batch of `total` rows, 0 elsewhere."""

    def scatter(values: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(values))
        return joined.new_zeros(total, joined.size(1)).index_copy(0, rows, joined)

    logps = scatter([part.logps for part in parts])
    entropies = None
    part_entropies = [part.entropies for part in parts if part.entropies is not None]
    if part_entropies:
        entropies = scatter(part_entropies)
    aux_loss = None
    part_aux_losses = [part.aux_loss for part in parts if part.aux_loss is not None]
    if part_aux_losses:
        aux_loss = torch.stack(part_aux_losses).mean()
    return TokenScores(logps, entropies, aux_loss)
