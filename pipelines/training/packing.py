"""Rows of a batch as one flat row without padding, in which what several rows begin with is computed once.

Episodes of one question share its prompt, and often their first turns: their tokens make a tree. Everything in a model
but attention works on single tokens, so one forward over the tree's tokens gives every row what a forward of its own
would: the same log-probabilities, and the same gradients.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer.utils import FusedCausalLMOutput, flush_left

from pipelines.rollout.slots import suits_products
from pipelines.training.micro_batches import TokenScores, prefix_order, shared_prefix_lengths
from pipelines.training.short_attention import short_attention

NAME = "sqltrain_packed"  # the attention's name, by which a model finds it
UNSCORED = -100  # the label of a token whose log-probability nobody wants
LONG = 1 << 20  # products of a row's queries and keys from which it is attended alone
SPARE = 1.5  # rows are attended together while padding makes their attention at most so much larger


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Which token sees which. Rows of like length form a group of R rows with Q tokens of their own and K keys each."""

    # (R * Q,) positions in the flat row of the tokens that each row itself brings, group after group; shorter rows are
    # padded.
    queries: Tensor
    keys: Tensor  # (R * K,) positions in the flat row of the tokens that these see, group after group.
    sizes: tuple[tuple[int, int, int], ...]  # (R, Q, K) of each group.
    # (R, 1, Q, K) bool, for each group: which keys each token sees. A long row is a group of its own, whose mask is
    # only described, or None if the row brings all that it sees: kernels know what is causal.
    masks: tuple[Tensor | None, ...]
    order: Tensor  # (N,) the position of each token in the concatenated outputs of the groups.

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """Each token sees what comes before it in its rows: (1, H, N, D), (1, H_kv, N, D) twice -> (1, N, H, D).

        Args:
            settings: `scaling` and `dropout`.
        """
        v = value[0].transpose(0, 1)  # (N, H_kv, D)
        # Under autocast a norm leaves queries and keys in float32.
        q = query[0].transpose(0, 1).to(v.dtype)
        k = key[0].transpose(0, 1).to(v.dtype)
        n_queries = [rows * queries for rows, queries, _ in self.sizes]
        n_keys = [rows * keys for rows, _, keys in self.sizes]
        group_queries = torch.split(q.index_select(0, self.queries), n_queries)
        group_keys = torch.split(k.index_select(0, self.keys), n_keys)
        group_values = torch.split(v.index_select(0, self.keys), n_keys)
        by_group = zip(self.sizes, self.masks, group_queries, group_keys, group_values, strict=True)
        multiplies = suits_products(v.device, v.dtype) and not settings["dropout"]
        outputs = []
        for (n_rows, _, _), mask, *tensors in by_group:
            by_row = []
            for tensor in tensors:
                of_rows = tensor.view(n_rows, -1, *tensor.shape[1:])
                by_row.append(of_rows.transpose(1, 2))  # (R, H, Q or K, D)
            if multiplies and type(mask) is Tensor:  # a long row's mask is only described
                row_query, row_key, row_value = by_row
                output = short_attention(row_query, row_key, row_value, mask, settings["scaling"])
            else:
                output, _ = sdpa_attention_forward(module, *by_row, mask, is_causal=mask is None, **settings)
            outputs.append(output.flatten(0, 1))  # (R * Q, H, D)
        joined = torch.cat(outputs)
        return joined.index_select(0, self.order)[None]


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A batch of rows as one flat row of N tokens."""

    input_ids: Tensor  # (1, N) the tokens.
    position_ids: Tensor  # (1, N) the position of each token in its rows.
    labels: Tensor  # (1, N) the token that follows each one, -100 if its log-probability is not wanted.
    places: Tensor  # (B, C) the position in the flat row of each completion token's log-probability.
    attention: Attention  # which of the tokens sees which.

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """(B, C) the flat row's values (1, N) at the completion tokens in `mask` (B, C), 0 elsewhere."""
        at_completion = values[0].index_select(0, self.places.flatten()).view_as(self.places)
        return at_completion.masked_fill(mask == 0, 0.0)


def supports_packing(network: Any) -> bool:
    """Whether a model's attention can be that of flat rows: over everything that came before, in every layer."""
    config = network.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        sees_all = set(layer_types) == {"full_attention"}
    else:
        sees_all = getattr(config, "sliding_window", None) is None
    is_replaceable = bool(getattr(network, "_supports_attention_backend", False))
    uses_sdpa = config._attn_implementation in ("sdpa", NAME)
    return sees_all and is_replaceable and uses_sdpa


def use_packed_attention(network: Any) -> None:
    """Let a model that supports it attend over flat rows; other rows it attends as before."""
    if supports_packing(network):
        network.config._attn_implementation = NAME


def packed_output(model: Any, packed: Packed) -> Any:
    """The output of TRL's fused head over the flat row, (1, N): log-probabilities and what else it was asked for."""
    return model(
        input_ids=packed.input_ids,
        # Transformers takes a mask with four dimensions as it is, and makes none of its own.
        attention_mask=packed.input_ids.new_zeros(1, 1, 1, 1),
        position_ids=packed.position_ids,
        shift_labels=packed.labels,
        fused_lm_head=True,
        packed=packed.attention,
    )


def packed_scores(model: Any, packed: Packed, mask: Tensor) -> TokenScores:
    """Log-probabilities and entropies of the completion tokens in `mask` (B, C), by a model with TRL's head."""
    output = packed_output(model, packed)
    entropies = None
    if output.entropy is not None:
        entropies = packed.spread(output.entropy, mask)
    return TokenScores(packed.spread(output.log_probs, mask), entropies, None)


class PackedRowsModel:
    """A model as TRL's SFT loss calls it, with rows (B, T), that computes shared prefixes once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.computed = 0  # tokens of the flat rows so far

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> FusedCausalLMOutput:
        """Log-probabilities, entropies and top-1 hits of the labels, (B, T - 1) each, 0 where a label is -100."""
        scored = labels[:, 1:] != UNSCORED  # no token predicts the first one
        n_predicted = input_ids.size(1) - 1
        packed = pack(input_ids, attention_mask, n_predicted, scored)
        self.computed += packed.input_ids.numel()
        output = packed_output(self._model, packed)
        return FusedCausalLMOutput(
            log_probs=packed.spread(output.log_probs, scored),
            entropy=packed.spread(output.entropy, scored),
            is_top1=packed.spread(output.is_top1, scored),
            label_mask=scored,
        )


def pack(input_ids: Tensor, attention_mask: Tensor, completion: int, scored: Tensor | None = None) -> Packed:
    """Lay rows out flat. A row's last token is not computed: nothing follows it.

    Where a row leaves those before it, the last token that it shares with them is laid out once more: a token of the
    flat row has one token that follows it.

    Args:
        input_ids, attention_mask: (B, P + C), prompts padded on the left, completions on the right; neither is empty.
        completion: C.
        scored: (B, C) which completion tokens' log-probabilities are wanted; None for all but padding.
    """
    if scored is None:
        scored = attention_mask[:, -completion:].bool()
    order = prefix_order(input_ids, attention_mask)
    input_ids = input_ids[order]
    attention_mask = attention_mask[order]
    scored = scored[order]
    mask, ids = flush_left(attention_mask, input_ids)
    lengths = mask.sum(1)
    columns = torch.arange(ids.size(1), device=ids.device)  # (T,)

    # The columns that each row lays out itself, from `first` to before `end`, and their positions in the flat row.
    shared = shared_prefix_lengths(ids, lengths)
    first = (shared - 1).clamp(min=0)  # (B,)
    end = lengths - 1  # (B,)
    is_from_first = columns >= first.unsqueeze(1)  # (B, T)
    is_laid_out = is_from_first & (columns < end.unsqueeze(1))  # (B, T)
    n_laid_out = is_laid_out.flatten().cumsum(0)  # (B * T,) tokens up to each one
    flat = (n_laid_out - 1).clamp(min=0).view_as(is_laid_out)  # (B, T)
    # (B, T) position of each token's key
    keys = flat.gather(0, _last_row(is_from_first))
    # (B, T) position of the token that predicts each one
    is_past_shared = columns >= shared.unsqueeze(1)
    predictors = flat.roll(1, 1).gather(0, _last_row(is_past_shared))

    prompt_lengths = attention_mask[:, :-completion].sum(1, keepdim=True)
    completion_columns = prompt_lengths + torch.arange(completion, device=ids.device)  # (B, C)
    completion_columns = completion_columns.clamp(max=ids.size(1) - 1)  # columns past the end are padding
    places = predictors.gather(1, completion_columns)  # (B, C)
    tokens = ids[is_laid_out]
    positions = columns.expand_as(is_laid_out)[is_laid_out]
    labels = torch.full_like(tokens, UNSCORED)
    completion_ids = input_ids[:, -completion:]
    labels[places[scored]] = completion_ids[scored]
    return Packed(
        input_ids=tokens[None],
        position_ids=positions[None],
        labels=labels[None],
        places=places[order.argsort()],  # rows in the order in which they came
        attention=_attention(flat, keys, first, end),
    )


def _last_row(holds: Tensor) -> Tensor:
    """(B, T) the last row up to each one at which a condition (B, T) holds; it holds everywhere in the first."""
    rows = torch.arange(len(holds), device=holds.device).unsqueeze(1)
    return (rows * holds).cummax(0).values


def _attention(flat: Tensor, keys: Tensor, first: Tensor, end: Tensor) -> Attention:
    """The attention of rows that bring their tokens from column `first` to before `end`, (B,) each.

    Args:
        flat, keys: (B, T) positions in the flat row of each token, and of its key.
    """
    group_queries = []
    group_keys = []
    sizes = []
    masks = []
    outputs = []  # positions of the real tokens in the concatenated outputs of all groups
    offset = 0
    n_queries = end - first
    for members in _rows_of_like_size(n_queries.tolist(), end.tolist()):
        rows = torch.tensor(members, device=flat.device)
        start = first[rows].unsqueeze(1)  # (R, 1)
        stop = end[rows].unsqueeze(1)  # (R, 1)
        most_queries = int(n_queries[rows].max())
        most_keys = int(stop.max())
        steps = torch.arange(most_queries, device=flat.device)  # (Q,)
        key_columns = torch.arange(most_keys, device=flat.device)  # (K,)
        # Padding repeats the row's last token; its output is never read.
        query_columns = torch.minimum(start + steps, stop - 1)  # (R, Q)
        query_places = flat[rows].gather(1, query_columns)  # (R, Q)
        group_queries.append(query_places.flatten())
        group_keys.append(keys[rows, :most_keys].flatten())
        sizes.append((len(members), most_queries, most_keys))
        masks.append(_causal_mask(query_columns, key_columns))
        is_real = steps < stop - start  # (R, Q)
        real_places = is_real.flatten().nonzero().flatten()
        outputs.append(offset + real_places)
        offset += query_columns.numel()
    queries = torch.cat(group_queries)
    real = torch.cat(outputs)
    order = torch.empty_like(real).scatter(0, queries[real], real)
    return Attention(queries, torch.cat(group_keys), tuple(sizes), tuple(masks), order)


def _rows_of_like_size(n_queries: Sequence[int], n_keys: Sequence[int]) -> list[list[int]]:
    """Groups of rows that are mostly not padding when they are attended together, the longest rows first.

    A row without queries is in no group.
    """
    rows = [row for row, queries in enumerate(n_queries) if queries]
    rows.sort(key=lambda row: (n_queries[row], n_keys[row]), reverse=True)
    groups: list[list[int]] = []
    # The last group's longest row of queries and of keys, and the sum of its rows' products of them.
    most_queries = most_keys = area = 0
    for row in rows:
        most_keys = max(most_keys, n_keys[row])
        area += n_queries[row] * n_keys[row]
        row_area = most_queries * most_keys
        is_alike = False
        if groups and row_area < LONG:
            padded_area = row_area * (len(groups[-1]) + 1)
            is_alike = padded_area <= SPARE * area
        if is_alike:
            groups[-1].append(row)
        else:
            groups.append([row])
            most_queries = n_queries[row]
            most_keys = n_keys[row]
            area = most_queries * most_keys
    return groups


def _causal_mask(query_columns: Tensor, key_columns: Tensor) -> Tensor | None:
    """The mask of a group (R, 1, Q, K), described for a long row, and None if it is causal from the first key on."""
    n_queries = query_columns.size(1)
    n_keys = len(key_columns)
    if n_queries * n_keys < LONG:
        return (key_columns <= query_columns.unsqueeze(2)).unsqueeze(1)
    if n_queries == n_keys:
        return None
    mask: Tensor = causal_lower_right(n_queries, n_keys)
    return mask


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Attention | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """The attention that a model's layers call: over a flat row if one is given, else transformers' own."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    scaling = settings.get("scaling")
    if scaling is None:
        scaling = query.size(-1) ** -0.5
    dropout = settings.get("dropout", 0.0)
    return packed(module, query, key, value, scaling=scaling, dropout=dropout), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
