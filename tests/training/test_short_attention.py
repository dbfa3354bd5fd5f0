"""Attention of short rows by matrix products: PyTorch's values and gradients."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pipelines.training.short_attention import ShortAttention

R, H, H_KV, Q, K, D = 3, 6, 2, 5, 9, 4
SEES = torch.arange(K) <= torch.arange(Q).view(1, 1, Q, 1) + torch.tensor([0, 2, 4]).view(R, 1, 1, 1)
SCALE = 0.37


def tensors(dtype):
    generator = torch.Generator().manual_seed(3)
    sizes = ((R, H, Q, D), (R, H_KV, K, D), (R, H_KV, K, D))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def test_its_gradients_are_those_of_its_values():
    assert torch.autograd.gradcheck(lambda *inputs: ShortAttention.apply(*inputs, SEES, SCALE), tensors(torch.float64))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_it_computes_what_pytorch_does(dtype, tolerance):
    """bfloat16 has eight bits, so that a product is right to 1 in 256."""
    ours, theirs = tensors(dtype), tensors(torch.float64)
    output = ShortAttention.apply(*ours, SEES, SCALE)
    expected = scaled_dot_product_attention(*theirs, attn_mask=SEES, scale=SCALE, enable_gqa=True)
    weights = torch.randn(R, H, Q, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (output.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert output.dtype == dtype
    pairs = [(output, expected), *((one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))]
    for mine, other in pairs:
        assert (mine.double() - other).norm() <= tolerance * other.norm()


def test_a_hidden_key_has_no_part():
    query, key, value = tensors(torch.float32)
    before = ShortAttention.apply(query, key, value, SEES, SCALE)
    with torch.no_grad():
        key[0, :, 5:] = 1e4  # the last query of the first row sees keys 0 to 4
        value[0, :, 5:] = -1e4
    after = ShortAttention.apply(query, key, value, SEES, SCALE)
    assert torch.equal(before, after)
    after.sum().backward()
    assert not key.grad[0, :, 5:].any()
    assert not value.grad[0, :, 5:].any()
