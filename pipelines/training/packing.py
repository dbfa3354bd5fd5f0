"""Rows of a batch as one flat row without padding, in which what several rows begin with is computed once.

Episodes of one question share its prompt, and often their first turns: their tokens make a tree. Everything in a model
but attention works on single tokens, so one forward over the tree's tokens gives every row what a forward of its own
would: the same log-probabilities, and the same gradients.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import FusedCausalLMOutput, flush_left

# Which rows of a batch are computed, with which others, and without which padding: pure functions on tensors.

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


NAME = "sqltrain_packed"  # of the attention, by which a model finds it
UNSCORED = -100  # the label of a token whose log-probability nobody wants
LONG = 1 << 20  # products of a row's queries and keys from which it is attended alone
SPARE = 1.5  # rows are attended together while padding makes their attention at most so much larger


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Which token sees which, with rows of like length together: R rows with Q tokens of their own and K keys each."""

    # where in the flat row the tokens are that each row itself brings, (R * Q,) of group after group; a shorter row's
    # are padded.
    queries: Tensor
    keys: Tensor  # where the tokens are that these see, (R * K,) of group after group.
    sizes: tuple[tuple[int, int, int], ...]  # (R, Q, K) of each group.
    # of each group (R, 1, Q, K) bool: which keys each token sees. A long row is a group of its own, whose mask is only
    # described, or None where the row brings all that it sees: kernels know what is causal.
    masks: tuple[Tensor | None, ...]
    order: Tensor  # (N,) where each token is in the groups' joined output.

    def __call__(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        """Each token sees what comes before it in its rows: (1, H, N, D), (1, H_kv, N, D) twice -> (1, N, H, D)."""
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
    """A batch of rows as one flat row of N tokens."""

    # input_ids, position_ids, labels: (1, N) the tokens, where each stands in its rows, and the one that follows it.
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    places: Tensor  # (B, C) for each completion token of the batch, where in the flat row its log-probability is.
    attention: Attention  # which of its tokens sees which.

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


def compute(model: Any, packed: Packed) -> Any:
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


def forward(model: Any, packed: Packed, mask: Tensor) -> Forward:
    """(B, C) log-probabilities and entropies of the completion tokens in `mask` (B, C), by a model with TRL's head."""
    output = compute(model, packed)
    entropies = None if output.entropy is None else packed.spread(output.entropy, mask)
    return packed.spread(output.log_probs, mask), entropies, None


class RowsModel:
    """A model as TRL's SFT loss calls it, with rows (B, T), that computes what the rows begin with once."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.computed = 0  # tokens of the flat rows so far

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **_: Any) -> FusedCausalLMOutput:
        """Log-probabilities, entropies and top-1 hits of the labels, (B, T - 1) each, 0 where a label is -100."""
        scored = labels[:, 1:] != UNSCORED  # the first token is foretold by nothing
        packed = pack(input_ids, attention_mask, input_ids.size(1) - 1, scored)
        self.computed += packed.input_ids.numel()
        output = compute(self._model, packed)
        return FusedCausalLMOutput(
            log_probs=packed.spread(output.log_probs, scored),
            entropy=packed.spread(output.entropy, scored),
            is_top1=packed.spread(output.is_top1, scored),
            label_mask=scored,
        )


def pack(input_ids: Tensor, attention_mask: Tensor, completion: int, scored: Tensor | None = None) -> Packed:
    """Lay rows out flat. A row's last token is computed nowhere: nothing follows it.

    Where a row leaves those before it, the last token that it shares with them stands there once more: a token of the
    flat row has one token that follows it.

    Args:
        input_ids, attention_mask: (B, P + C), prompts padded on the left, completions on the right; neither is empty.
        completion: C.
        scored: (B, C) which completion tokens' log-probabilities are wanted; None for all that are there.
    """
    order = sorting(input_ids, attention_mask)
    wanted = attention_mask[:, -completion:].bool() if scored is None else scored
    input_ids, attention_mask, wanted = input_ids[order], attention_mask[order], wanted[order]
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
    labels = torch.full_like(ids[own], UNSCORED)
    labels[places[wanted]] = input_ids[:, -completion:][wanted]

    # The attention of rows that bring their tokens from `first` to `end`, (B,) each, in groups that are mostly not
    # padding: each group's rows, by their numbers of (queries, keys).
    row_sizes = list(zip((end - first).tolist(), end.tolist(), strict=True))
    groups: list[list[int]] = []
    n_queries = n_keys = area = 0  # of the last group
    for row in sorted((row for row, size in enumerate(row_sizes) if size[0]), key=row_sizes.__getitem__, reverse=True):
        own_queries, own_keys = row_sizes[row]
        n_keys, area = max(n_keys, own_keys), area + own_queries * own_keys
        is_long = n_queries * n_keys >= LONG
        if groups and not is_long and (len(groups[-1]) + 1) * n_queries * n_keys <= SPARE * area:
            groups[-1].append(row)
        else:
            groups.append([row])
            n_queries, n_keys, area = own_queries, own_keys, own_queries * own_keys
    queries, keys, sizes, outputs, base = [], [], [], [], 0
    masks: list[Tensor | None] = []
    for members in groups:
        rows = torch.tensor(members, device=index.device)
        start, stop = first[rows].unsqueeze(1), end[rows].unsqueeze(1)  # (R, 1)
        steps = torch.arange(int((stop - start).max()), device=index.device)
        query_at = torch.minimum(start + steps, stop - 1)  # (R, Q): padding repeats the last token, and nobody takes it
        key_at = torch.arange(int(stop.max()), device=index.device)
        queries.append(index[rows].gather(1, query_at).flatten())
        keys.append(seen[rows, : len(key_at)].flatten())
        sizes.append((len(members), len(steps), len(key_at)))
        if len(steps) * len(key_at) < LONG:
            masks.append((key_at <= query_at.unsqueeze(2)).unsqueeze(1))
        else:
            masks.append(None if len(steps) == len(key_at) else causal_lower_right(len(steps), len(key_at)))
        outputs.append((base + torch.arange(query_at.numel(), device=index.device))[(steps < stop - start).flatten()])
        base += query_at.numel()
    padded, real = torch.cat(queries), torch.cat(outputs)
    joined_at = torch.empty_like(real).scatter(0, padded[real], real)
    attention = Attention(padded, torch.cat(keys), tuple(sizes), tuple(masks), joined_at)
    flat, positions = ids[own], at.expand_as(own)[own]
    return Packed(flat[None], positions[None], labels[None], places[order.argsort()], attention)


def _last_row(holds: Tensor) -> Tensor:
    """(B, T) the last row up to each one at which a condition (B, T) holds; it holds everywhere in the first."""
    rows = torch.arange(len(holds), device=holds.device).unsqueeze(1)
    return (rows * holds).cummax(0).values


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: Attention | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """What a model's attention layers call: attention over a flat row, or transformers' own where there is none."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    scaling, dropout = settings.get("scaling"), settings.get("dropout", 0.0)
    return packed(module, query, key, value, scaling=scaling, dropout=dropout), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


# Log-probabilities of labels under a language model's head on a CPU, tile by tile: its logits are never whole.

TILE = 1 << 18  # logits of one tile: 1 MiB of float32 stays in a core's cache
LEAST = 128  # tokens of one tile: a product of fewer reads the head's weights too often
# Up to this vocabulary TRL's own function serves SFT, whose losses it has decided to the last bit.
SMALL_VOCABULARY = 8192
Parts = tuple[Tensor | None, ...]


class LogProbs(torch.autograd.Function):
    """Each label's log-probability, the distribution's entropy, and whether the label is its most likely token, (N,)
    each.

    What TRL's `ChunkedLogProbFunction` computes, with a tenth of its passes over memory: without Triton its tiles are
    4,096 tokens by 32,768 columns. Entropies and hits are for watching: they have no gradient here.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, inv_t: float, outputs: tuple[str, ...]
    ) -> Parts:
        """From hidden states (N, H), a head's weight (V, H), labels (N,) and 1 / temperature."""
        log_probs = hidden.new_empty(len(hidden), dtype=torch.float32)
        normalizers = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if "entropy" in outputs else None
        hits = torch.empty_like(labels, dtype=torch.bool) if "is_top1" in outputs else None
        for rows in _tiles(hidden, weight):
            logits = (hidden[rows] @ weight.T).float().mul_(inv_t)
            if hits is not None:
                hits[rows] = logits.argmax(1) == labels[rows]
            normalizers[rows] = logits.logsumexp(1)
            log_ps = logits.sub_(normalizers[rows].unsqueeze(1))
            log_probs[rows] = log_ps.gather(1, labels[rows].unsqueeze(1)).squeeze(1)
            if entropies is not None:
                entropies[rows] = -(log_ps.exp() * log_ps).sum(1)
        ctx.save_for_backward(hidden, weight, labels, normalizers)
        ctx.inv_t = inv_t
        ctx.mark_non_differentiable(*(values for values in (entropies, hits) if values is not None))
        return log_probs, entropies, hits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Parts:
        """Each tile is made once more; the gradient of its logits is g (1[label] - p) / T.

        The head's gradient is summed in float32 whatever its products are computed in: rounded tile by tile, the sum
        would be biased.
        """
        hidden, weight, labels, normalizers = ctx.saved_tensors
        scales = (gradients[0] * ctx.inv_t).unsqueeze(1)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _tiles(hidden, weight):
            tile = (hidden[rows] @ weight.T).float().mul_(ctx.inv_t)
            tile = tile.sub_(normalizers[rows].unsqueeze(1)).exp_().mul_(-scales[rows])
            tile.scatter_add_(1, labels[rows].unsqueeze(1), scales[rows])
            grad_hidden[rows] = tile.to(weight.dtype) @ weight
            grad_weight.addmm_(tile.T, hidden[rows].float())
        return grad_hidden, grad_weight, None, None, None


class Head:
    """What TRL's fused head calls in the place of `ChunkedLogProbFunction`."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> Parts:
        """(log-probability, entropy, log sum of squares, mean logit, is top 1): ours for a plain head on a CPU."""
        known = {"log_probs", "entropy"} if len(weight) <= SMALL_VOCABULARY else {"log_probs", "entropy", "is_top1"}
        plain = bias is None and softcap is None and scale == 1.0 and set(outputs) <= known
        if hidden.device.type != "cpu" or not plain:
            parts: Parts = ChunkedLogProbFunction.apply(
                hidden, weight, bias, labels, temperature, chunk_size, softcap, scale, outputs
            )
            return parts
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        log_probs, entropies, hits = LogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, 1 / temperature, outputs
        )
        return log_probs, entropies, None, None, hits


def _tiles(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(LEAST, TILE // len(weight))
    return [slice(first, first + size) for first in range(0, len(hidden), size)]
