"""The head's log-probabilities against the definition, and against TRL's own kernel."""

import pytest
import torch
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from pipelines.training import head

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
    return head.Head.apply(hidden, weight, bias, labels, temperature, 32768, None, 1.0, outputs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tiles_give_what_whole_logits_give(inputs, temperature, monkeypatch):
    """150 tokens in tiles of 64: two whole ones and a rest."""
    monkeypatch.setattr(head, "TILE", 1)
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


def test_no_tile_holds_all_logits(inputs):
    """Memory grows with tokens, and with the vocabulary, and not with their product."""
    assert {part.stop - part.start for part in head._tiles(torch.empty(1000, 1), torch.empty(152_000, 1))} == {64}
    assert {part.stop - part.start for part in head._tiles(torch.empty(1000, 1), torch.empty(1300, 1))} == {201}
