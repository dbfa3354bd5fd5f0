"""The head's log-probabilities against the definition, and against TRL's own kernel."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from pipelines.training import packing

TOKENS, WIDTH, VOCABULARY = 150, 16, 70
OUTPUTS = ("log_probs", "entropy")


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, labels


def gradients(log_probs, *leaves):
    weights = torch.linspace(-1.0, 1.0, TOKENS)
    return torch.autograd.grad((log_probs * weights).sum(), leaves)


def apply(hidden, weight, labels, temperature=1.0, bias=None, outputs=OUTPUTS):
    return packing.Head.apply(hidden, weight, bias, labels, temperature, 32768, None, 1.0, outputs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tiles_give_what_whole_logits_give(inputs, temperature, monkeypatch):
    """150 tokens in tiles of 64: two whole ones and a rest."""
    monkeypatch.setattr(packing, "TILE", 1)
    hidden, weight, labels = inputs
    log_probs, entropy, *_ = apply(*inputs, temperature)
    whole = (hidden @ weight.T / temperature).log_softmax(1)
    wanted = whole.gather(1, labels.unsqueeze(1)).squeeze(1)
    assert torch.allclose(log_probs, wanted, atol=1e-5)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(1), atol=1e-5)
    for got, expected in zip(gradients(log_probs, hidden, weight), gradients(wanted, hidden, weight), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("change", ["bias", "bfloat16", "is_top1"])
def test_what_is_not_plain_is_trls_own(inputs, change):
    hidden, weight, labels = inputs
    options = {"bias": torch.ones(VOCABULARY)} if change == "bias" else {}
    if change == "is_top1":
        options["outputs"] = (*OUTPUTS, "is_top1")
    if change == "bfloat16":
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    got = apply(hidden, weight, labels, **options)
    bias, outputs = options.get("bias"), options.get("outputs", OUTPUTS)
    expected = ChunkedLogProbFunction.apply(hidden, weight, bias, labels, 1.0, 32768, None, 1.0, outputs)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


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
