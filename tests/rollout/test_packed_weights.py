"""Linear layers whose weights are packed while a model decodes."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from pipelines.rollout import packed_weights
from pipelines.rollout.packed_weights import can_pack, packed_linear_layers

pytestmark = pytest.mark.skipif(not can_pack(), reason="no oneDNN, or a processor without bfloat16")
BF16 = torch.bfloat16


def network(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96, bias=False), nn.SiLU(), nn.Linear(96, 40)).to(dtype)


def replaced(model: nn.Module) -> list[bool]:
    return ["forward" in vars(module) for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 130])
def test_products_have_the_same_bits(tokens):
    model = network()
    inputs = torch.randn(2, tokens, 48, dtype=BF16)
    with torch.no_grad():
        plain = model(inputs)
        with packed_linear_layers(model, BF16):
            assert replaced(model) == [True, True]
            packed = model(inputs)
    assert torch.equal(plain, packed)
    assert packed.shape == (2, tokens, 40)
    assert replaced(model) == [False, False]


def test_a_processor_without_instructions_for_it_multiplies_plain_weights():
    """oneDNN is kept below them by its environment variable, which it reads once a process."""
    code = """
import torch
from pipelines.rollout.packed_weights import packed_linear_layers
layer = torch.nn.Linear(48, 96).bfloat16()
with torch.no_grad(), packed_linear_layers(layer, torch.bfloat16):
    print(tuple(layer(torch.ones(2, 48, dtype=torch.bfloat16)).shape), "forward" in vars(layer))
"""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "(2, 96) False\n", done.stderr


def test_float32_weights_under_autocast_have_the_same_bits():
    model = network(torch.float32)
    inputs = torch.randn(5, 48)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        plain = model(inputs)
        with packed_linear_layers(model, BF16):
            packed = model(inputs)
    assert torch.equal(plain, packed)
    assert packed.dtype == BF16


def test_weights_are_packed_as_they_are_then():
    model = network()
    inputs = torch.randn(3, 48, dtype=BF16)
    with torch.no_grad():
        for _ in range(2):
            with packed_linear_layers(model, BF16):
                packed = model(inputs)
            assert torch.equal(packed, model(inputs))
            model[0].weight.mul_(3)


def test_layers_are_as_they_were_after_an_error():
    model = network()
    with pytest.raises(ValueError, match="stop"), packed_linear_layers(model, BF16):
        raise ValueError("stop")
    assert replaced(model) == [False, False]


def test_float32_products_are_not_packed():
    model = network(torch.float32)
    with packed_linear_layers(model, torch.float32):
        assert replaced(model) == [False, False]


def test_a_layer_that_someone_else_replaced_is_left_alone():
    model = network()
    own = model[0].forward
    model[0].forward = own
    with packed_linear_layers(model, BF16):
        assert model[0].forward is own
    assert model[0].forward is own
    assert replaced(model) == [True, False]


def test_a_model_too_large_for_a_copy_is_not_packed(monkeypatch):
    """48 x 96 and 96 x 40 weights of two bytes: 16,896."""
    model = network()
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 16_896)
    with packed_linear_layers(model, BF16):
        assert replaced(model) == [True, True]
    monkeypatch.setattr(packed_weights, "MOST_BYTES", 16_895)
    with packed_linear_layers(model, BF16):
        assert replaced(model) == [False, False]
