"""Flat rows and the head's tiles: the log-probabilities, entropies and gradients of plain rows, and of TRL's kernel."""

import copy
import itertools
import random

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config, Qwen3ForCausalLM
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import add_fused_lm_head

from pipelines.recipe.config import Model
from pipelines.training import fused_head, memory, packing
from pipelines.training.micro_batches import (
    regroup,
    rows_with_gradient,
    shared_prefix_lengths,
    without_padding,
)

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # two heads of queries share one of keys
    "head_dim": 8,
}
HELLO, WORLD = [7, 8, 9, 10, 11], [7, 8, 30, 31]
# (prompt, completion): groups whose prompts begin alike, episodes that begin alike, one that is the start of another,
# two that are the same, and one that shares nothing.
ROWS = [
    (HELLO, [20, 21, 22, 23]),
    (HELLO, [20, 21, 24]),
    (WORLD, [40]),
    (HELLO, [20, 21]),
    (HELLO, [20, 21, 24]),
    (WORLD, [41, 42, 43, 44, 45, 46]),
    ([50], [51, 52]),
    (HELLO[:3], [10, 11, 20, 21, 22, 25]),  # what is prompt there is completion here
]


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, pad_token_id=0, eos_token_id=1)).train()


def padded(rows):
    prompts, completions = ([torch.tensor(part) for part in column] for column in zip(*rows, strict=True))
    pairs = [
        (
            pad_sequence(side(prompts), batch_first=True, padding_side="left"),
            pad_sequence(side(completions), batch_first=True),
        )
        for side in (list, lambda parts: [torch.ones_like(part) for part in parts])
    ]
    ids, mask = (torch.cat(pair, dim=1) for pair in pairs)
    return ids, mask, max(map(len, completions))


def by_hand(network, rows, width):
    """(B, C) of whole logits, one row after the other."""
    values = []
    for prompt, completion in rows:
        logits = network(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        logps = logits.log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        told = logps.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        values.append([torch.nn.functional.pad(part, (0, width - len(completion))) for part in (told, entropy)])
    return [torch.stack(column) for column in zip(*values, strict=True)]


def gradient(network, logps, weights):
    network.zero_grad()
    (logps * weights).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in network.parameters()])


def agrees(network, rows):
    """Whether the packed forward of rows is the plain one, and so is its gradient for any weights of the tokens."""
    ids, mask, width = padded(rows)
    weights = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(1)) * mask[:, -width:]
    wanted = by_hand(network, rows, width)
    add_fused_lm_head(network, outputs=("log_probs", "entropy"))
    before = network.config._attn_implementation
    packing.use_packed_attention(network)
    got = packing.packed_scores(network, packing.pack(ids, mask, width), mask[:, -width:])
    assert torch.allclose(got[0], wanted[0], atol=1e-5)
    assert torch.allclose(got[1], wanted[1], atol=1e-5)
    expected = gradient(network, wanted[0], weights)
    assert (gradient(network, got[0], weights) - expected).norm() / expected.norm() < 1e-5
    network.config._attn_implementation = before


def test_a_packed_forward_is_the_plain_one(network):
    agrees(network, ROWS)
    agrees(network, ROWS[-2:])
    agrees(network, ROWS[2:3])


@pytest.mark.parametrize("seed", range(5))
def test_any_rows_can_be_packed(network, seed):
    """Few different tokens: rows begin alike, and repeat each other, in every way."""
    rng = random.Random(seed)
    rows = [
        [[rng.randrange(2, 4) for _ in range(rng.randint(1, longest))] for longest in (5, 9)]
        for _ in range(rng.randint(1, 16))
    ]
    agrees(network, rows)


def test_long_rows_are_attended_alone_without_a_mask(network, monkeypatch):
    monkeypatch.setattr(packing, "LONG", 12)  # rows of 3 tokens after 4, and longer
    agrees(network, ROWS)
    ids, mask, width = padded(ROWS)
    attention = packing.pack(ids, mask, width).attention
    by_size = dict(zip(attention.sizes, attention.masks, strict=True))
    assert by_size[1, 6, 6] is None  # the first row of HELLO brings all that it sees
    assert isinstance(by_size[1, 6, 9], CausalBias)


LONG_ROWS = [([2 + i % 50 for i in range(300)], [2 + (i * i + row) % 50 for i in range(1100)]) for row in range(2)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "dtype", "most"),
    [(ROWS, None, 1e-4), (LONG_ROWS, None, 1e-4), (ROWS, torch.bfloat16, 0.03), (LONG_ROWS, torch.bfloat16, 0.03)],
)
def test_a_gpu_computes_what_a_cpu_does(network, rows, dtype, most):
    """Log-probabilities and gradients, with TRL's kernel for the head; in bfloat16 long rows have flash kernels."""
    ids, mask, width = padded(rows)
    weights = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(1)) * mask[:, -width:]
    wanted = by_hand(network, rows, width)
    expected = gradient(network, wanted[0], weights)
    on_gpu = copy.deepcopy(network).cuda()
    add_fused_lm_head(on_gpu, outputs=("log_probs", "entropy"))
    packing.use_packed_attention(on_gpu)
    ids, mask = ids.cuda(), mask.cuda()
    with profile(acc_events=True) as profiled, torch.autocast("cuda", dtype, enabled=dtype is not None):
        got = packing.packed_scores(on_gpu, packing.pack(ids, mask, width), mask[:, -width:])
        found = gradient(on_gpu, got[0], weights.cuda()).cpu()
    for values, plain in zip(got, wanted, strict=False):
        assert (values.cpu() - plain).abs().max() < most * 10
    assert (found - expected).norm() / expected.norm() < most
    kernels = {event.key for event in profiled.key_averages()}
    flash = "aten::_scaled_dot_product_flash_attention" in kernels
    assert flash == (dtype is not None and rows is LONG_ROWS)


def test_what_rows_begin_with_is_computed_once():
    ids, mask, width = padded(ROWS)
    packed = packing.pack(ids, mask, width)
    flat = [
        *[7, 8, 9, 10, 11, 20],  # the first row in the order of tokens is the third of HELLO: 20, 21
        *[21, 22],  # 22, 23 leave it after 21, which has another token after it here
        22,
        21,
        *[8, 30, 31],  # WORLD leaves HELLO after 8
        *[31, 41, 42, 43, 44, 45],
        *[50, 51],
    ]
    assert packed.input_ids.tolist() == [flat]
    assert packed.position_ids.tolist() == [[*range(6), 6, 7, 7, 6, 1, 2, 3, 3, 4, 5, 6, 7, 8, 0, 1]]
    unscored = [packing.UNSCORED] * 2
    after = [*unscored, 10, 11, 20, 21, 22, 23, 25, 24, *unscored, 40, 41, 42, 43, 44, 45, 46, 51, 52]
    assert packed.labels.tolist() == [after]  # 10 and 11 are scored for the one row whose completion they are in
    # The second row's last token is the number that pads the first.
    assert shared_prefix_lengths(torch.tensor([[5, 0], [5, 0]]), torch.tensor([1, 2])).tolist() == [0, 1]


def test_micro_batches_hold_what_begins_alike():
    """Two groups of three in disorder, and a row of each that moves nothing."""
    rows = [(WORLD, [40]), (HELLO, [20]), (HELLO, [23]), (WORLD, [41]), (WORLD, [42, 43]), (HELLO, [21, 22])]
    ids, mask, width = padded(rows)
    whole = {
        "prompt_ids": ids[:, :-width],
        "prompt_mask": mask[:, :-width],
        "completion_ids": ids[:, -width:],
        "completion_mask": mask[:, -width:],
        "advantages": torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
        "num_items_in_batch": torch.tensor(8),
    }
    batches = [{name: value[at : at + 2] if value.ndim else value for name, value in whole.items()} for at in (0, 2, 4)]
    regrouped = regroup(batches, rows_with_gradient)
    found = [batch["completion_ids"].tolist() for batch in regrouped]
    assert found == [[[20, 0], [21, 22]], [[40, 0], [41, 0]], [[23, 0], [42, 43]]]
    assert [batch["advantages"].tolist() for batch in regrouped] == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    assert all(batch["num_items_in_batch"] == 8 for batch in regrouped)


@pytest.mark.parametrize(
    ("config", "suits"),
    [
        (LlamaConfig(**SIZES), True),
        (Qwen3Config(**SIZES, use_sliding_window=False, sliding_window=4), True),
        (MistralConfig(**SIZES, sliding_window=None), True),
        (MistralConfig(**SIZES, sliding_window=4), False),
        (Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1), False),
    ],
    ids=["llama", "window turned off", "mistral", "window", "window in some layers"],
)
def test_only_attention_over_all_that_came_before_can_be_flat(config, suits, tmp_path):
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    assert packing.supports_packing(network) == suits
    config.save_pretrained(tmp_path)
    assert memory.shape_of(Model(source=str(tmp_path))).window != suits
    if suits:
        agrees(network, ROWS)
    else:
        packing.use_packed_attention(network)
        assert network.config._attn_implementation == "sdpa"


TOKENS, WIDTH, VOCABULARY = 150, 16, 70
OUTPUTS = ("log_probs", "entropy")


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def gradients(log_probs, *leaves):
    return torch.autograd.grad((log_probs * torch.linspace(-1.0, 1.0, TOKENS)).sum(), leaves)


def apply(hidden, weight, labels, temperature=1.0, bias=None, outputs=OUTPUTS):
    return fused_head.FusedHead.apply(hidden, weight, bias, labels, temperature, 32768, None, 1.0, outputs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tiles_give_what_whole_logits_give(inputs, temperature, monkeypatch):
    """150 tokens in tiles of 64: two whole ones and a rest."""
    monkeypatch.setattr(fused_head, "TILE_LOGITS", 1)
    hidden, weight, labels = inputs
    log_probs, entropy, *_ = apply(*inputs, temperature)
    whole = (hidden @ weight.T / temperature).log_softmax(1)
    wanted = whole.gather(1, labels.unsqueeze(1)).squeeze(1)
    assert torch.allclose(log_probs, wanted, atol=1e-5)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(1), atol=1e-5)
    for got, expected in zip(gradients(log_probs, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("change", ["bias", "is_top1"])
def test_what_is_not_plain_is_trls_own(inputs, change):
    hidden, weight, labels = inputs
    options = {"bias": torch.ones(VOCABULARY)} if change == "bias" else {}
    if change == "is_top1":
        options["outputs"] = (*OUTPUTS, "is_top1")
    got = apply(hidden, weight, labels, **options)
    bias, outputs = options.get("bias"), options.get("outputs", OUTPUTS)
    expected = ChunkedLogProbFunction.apply(hidden, weight, bias, labels, 1.0, 32768, None, 1.0, outputs)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def test_hits_are_labels_that_are_the_likeliest_token(inputs, monkeypatch):
    monkeypatch.setattr(fused_head, "SMALL_VOCABULARY", 1)
    hidden, weight, labels = inputs
    log_probs, entropy, _, _, hits = apply(*inputs, outputs=(*OUTPUTS, "is_top1"))
    logits = hidden @ weight.T
    assert hits.tolist() == (logits.argmax(1) == labels).tolist()
    assert torch.allclose(log_probs, logits.log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1), atol=1e-5)
    assert entropy.shape == (TOKENS,)


def test_products_in_bfloat16_are_summed_in_float32(inputs):
    """Values are within bfloat16's three digits; the head's gradient stays float32."""
    hidden, weight, labels = inputs
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, *_ = apply(*inputs)
    whole = (hidden @ weight.T).log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
    assert torch.allclose(log_probs, whole, rtol=0.02, atol=0.05)
    of_hidden, of_weight = gradients(log_probs, hidden, weight)
    assert of_weight.dtype == torch.float32
    for got, expected in zip((of_hidden, of_weight), gradients(whole, hidden, weight), strict=True):
        assert (got - expected).norm() / expected.norm() < 0.02


def peak(step):
    """The most bytes that the allocator held at once during a step's forward and backward."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step().sum().backward()
    held = [event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(held))


def test_memory_grows_with_tokens_and_not_with_tokens_by_vocabulary():
    """From 256 to 1,024 tokens a vocabulary of 8,000 takes 24.6 MB more for each whole copy of its logits."""
    weight = torch.randn(8000, WIDTH, requires_grad=True)

    def growth(log_probs):
        peaks = []
        for tokens in (256, 1024):
            hidden, labels = torch.randn(tokens, WIDTH, requires_grad=True), torch.zeros(tokens, dtype=torch.long)
            weight.grad = torch.zeros_like(weight)
            peaks.append(peak(lambda hidden=hidden, labels=labels: log_probs(hidden, weight, labels)))
        return peaks[1] - peaks[0]

    def whole(hidden, weight, labels):
        return (hidden @ weight.T).log_softmax(1).gather(1, labels.unsqueeze(1))

    copy = (1024 - 256) * 8000 * 4
    assert growth(whole) > 2 * copy
    assert growth(lambda *inputs: apply(*inputs)[0]) < copy / 50


def test_rows_without_padding_get_their_own_values_back():
    ids, mask = torch.tensor([[0, 5, 6, 7, 8], [1, 2, 3, 4, 0]]), torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])

    def compute(input_ids, attention_mask, logits_to_keep):  # a token's value is the token
        return input_ids[:, -logits_to_keep:].float(), None, None

    assert without_padding(compute, ids, mask, 2)[0].tolist() == [[7, 8], [4, 0]]
