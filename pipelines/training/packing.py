"""Rows of a batch as one flat row without padding, in which what several rows begin with is computed once.

Episodes of one question share its prompt, and often their first turns: their tokens make a tree. Everything in a model
but attention works on single tokens, so one forward over the tree's tokens gives every row what a forward of its own
would: the same log-probabilities, and the same gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import flush_left

from pipelines.training.row_selection import Forward, in_common, sorting

NAME = "sqltrain_packed"  # of the attention, by which a model finds it
UNSCORED = -100  # the label of a token whose log-probability nobody wants
LONG = 1 << 20  # products of a row's queries and keys from which it is attended alone
SPARE = 1.5  # rows are attended together while padding makes their attention at most so much larger


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Which token sees which, with rows of like length together: R rows with Q tokens of their own and K keys each.

    Attributes:
        queries: where in the flat row the tokens are that each row itself brings, (R * Q,) of group after group;
            a shorter row's are padded.
        keys: where the tokens are that these see, (R * K,) of group after group.
        sizes: (R, Q, K) of each group.
        masks: of each group (R, 1, Q, K) bool: which keys each token sees. A long row is a group of its own, whose
            mask is only described, or None where the row brings all that it sees: kernels know what is causal.
        order: (N,) where each token is in the groups' joined output.
    """

    queries: Tensor
    keys: Tensor
    sizes: tuple[tuple[int, int, int], ...]
    masks: tuple[Tensor | None, ...]
    order: Tensor

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """Attention in which each token sees what comes before it in its rows.

        Args:
            query: (1, H, N, D); key, value: (1, H_kv, N, D).

        Returns:
            (1, N, H, D)
        """
        v = value[0].transpose(0, 1)  # (N, H_kv, D)
        q, k = (part[0].transpose(0, 1).to(v.dtype) for part in (query, key))  # float32 after a norm under autocast
        own = torch.split(q.index_select(0, self.queries), [size[0] * size[1] for size in self.sizes])
        n_keys = [size[0] * size[2] for size in self.sizes]
        seen = [torch.split(part.index_select(0, self.keys), n_keys) for part in (k, v)]
        outputs = []
        for size, mask, *parts in zip(self.sizes, self.masks, own, *seen, strict=True):
            by_row = (part.unflatten(0, (size[0], -1)).transpose(1, 2) for part in parts)
            output, _ = sdpa_attention_forward(module, *by_row, mask, is_causal=mask is None, **settings)
            outputs.append(output.flatten(0, 1))  # (R * Q, H, D)
        return torch.cat(outputs).index_select(0, self.order)[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A batch of rows as one flat row of N tokens.

    Attributes:
        input_ids, position_ids, labels: (1, N) the tokens, where each stands in its rows, and the one that follows it.
        places: (B, C) for each completion token of the batch, where in the flat row its log-probability is.
        attention: which of its tokens sees which.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    places: Tensor
    attention: Attention

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """(B, C) the flat row's values (1, N) at the completion tokens that are there, 0 elsewhere."""
        return values[0].index_select(0, self.places.flatten()).view_as(self.places).masked_fill(mask == 0, 0.0)


def suits(network: Any) -> bool:
    """Whether a model's attention can be that of flat rows: over everything that came before, in every layer."""
    config = network.config
    kinds = getattr(config, "layer_types", None)
    whole = set(kinds) == {"full_attention"} if kinds else getattr(config, "sliding_window", None) is None
    ours = config._attn_implementation in ("sdpa", NAME) and getattr(network, "_supports_attention_backend", False)
    return whole and bool(ours)


def prepare(network: Any) -> None:
    """Let a model attend over flat rows; what is not flat it attends as before."""
    if suits(network):
        network.config._attn_implementation = NAME


def forward(model: Any, packed: Packed, mask: Tensor) -> Forward:
    """(B, C) log-probabilities and entropies of completions, by a model with TRL's fused head.

    Args:
        mask: (B, C) which tokens of the completions are there.
    """
    out = model(
        input_ids=packed.input_ids,
        attention_mask=packed.input_ids.new_zeros(1, 1, 1, 1),  # of four dimensions: taken for a finished one
        position_ids=packed.position_ids,
        shift_labels=packed.labels,
        fused_lm_head=True,
        packed=packed.attention,
    )
    return packed.spread(out.log_probs, mask), None if out.entropy is None else packed.spread(out.entropy, mask), None


def pack(input_ids: Tensor, attention_mask: Tensor, completion: int) -> Packed:
    """Lay rows out flat. A row's last token is computed nowhere: nothing follows it.

    Where a row leaves those before it, the last token that it shares with them stands there once more: a token of the
    flat row has one token that follows it.

    Args:
        input_ids, attention_mask: (B, P + C), prompts padded on the left, completions on the right; neither is empty.
        completion: C.
    """
    order = sorting(input_ids, attention_mask)
    input_ids, attention_mask = input_ids[order], attention_mask[order]
    mask, ids = flush_left(attention_mask, input_ids)
    lengths = mask.sum(1)
    at = torch.arange(ids.size(1), device=ids.device)  # (T,)
    shared = in_common(ids, lengths)
    first, end = (shared - 1).clamp(min=0), lengths - 1
    own = (at >= first.unsqueeze(1)) & (at < end.unsqueeze(1))  # (B, T)
    index = (own.flatten().cumsum(0) - 1).view_as(own).clamp(min=0)
    seen = index.gather(0, _last_row(first.unsqueeze(1) <= at))  # (B, T) where each token's key is
    scored = index.roll(1, 1).gather(0, _last_row(shared.unsqueeze(1) <= at))  # (B, T) where each token is foretold

    at_completion = attention_mask[:, :-completion].sum(1, keepdim=True) + torch.arange(completion, device=ids.device)
    places = scored.gather(1, at_completion.clamp(max=ids.size(1) - 1))  # (B, C)
    there = attention_mask[:, -completion:].bool()
    labels = torch.full_like(ids[own], UNSCORED)
    labels[places[there]] = input_ids[:, -completion:][there]
    flat, positions, attention = ids[own], at.expand_as(own)[own], _attention(index, seen, first, end)
    return Packed(flat[None], positions[None], labels[None], places[order.argsort()], attention)


def _last_row(holds: Tensor) -> Tensor:
    """(B, T) the last row up to each one at which a condition (B, T) holds; it holds everywhere in the first."""
    rows = torch.arange(len(holds), device=holds.device).unsqueeze(1)
    return (rows * holds).cummax(0).values


def _attention(index: Tensor, seen: Tensor, first: Tensor, end: Tensor) -> Attention:
    """The attention of rows that bring their tokens from `first` to `end`, (B,) each.

    Args:
        index, seen: (B, T) where in the flat row a row's own token is; where the token is that its rows see.
    """
    queries, keys, sizes, places, base = [], [], [], [], 0
    masks: list[Tensor | None] = []
    for members in _alike(list(zip((end - first).tolist(), end.tolist(), strict=True))):
        rows = torch.tensor(members, device=index.device)
        start, stop = first[rows].unsqueeze(1), end[rows].unsqueeze(1)  # (R, 1)
        steps = torch.arange(int((stop - start).max()), device=index.device)
        at = torch.minimum(start + steps, stop - 1)  # (R, Q): padding repeats the last token, and nobody takes it
        key_at = torch.arange(int(stop.max()), device=index.device)
        queries.append(index[rows].gather(1, at).flatten())
        keys.append(seen[rows, : len(key_at)].flatten())
        sizes.append((len(members), len(steps), len(key_at)))
        if len(steps) * len(key_at) < LONG:
            masks.append((key_at <= at.unsqueeze(2)).unsqueeze(1))
        else:
            masks.append(None if len(steps) == len(key_at) else causal_lower_right(len(steps), len(key_at)))
        places.append((base + torch.arange(at.numel(), device=index.device))[(steps < stop - start).flatten()])
        base += at.numel()
    padded, real = torch.cat(queries), torch.cat(places)
    order = torch.empty_like(real).scatter(0, padded[real], real)
    return Attention(padded, torch.cat(keys), tuple(sizes), tuple(masks), order)


def _alike(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows, given by their numbers of (queries, keys), in groups whose attention is mostly not padding."""
    groups: list[list[int]] = []
    n_queries = n_keys = area = 0  # of the last group
    for row in sorted((row for row, size in enumerate(sizes) if size[0]), key=sizes.__getitem__, reverse=True):
        own_queries, own_keys = sizes[row]
        n_keys, area = max(n_keys, own_keys), area + own_queries * own_keys
        is_long = n_queries * n_keys >= LONG
        if groups and not is_long and (len(groups[-1]) + 1) * n_queries * n_keys <= SPARE * area:
            groups[-1].append(row)
        else:
            groups.append([row])
            n_queries, n_keys, area = own_queries, own_keys, own_queries * own_keys
    return groups


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Attention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layers call: attention over a flat row, or transformers' own where there is none."""
    if packed is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return packed(module, query, key, value, scaling=scaling, dropout=dropout), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
