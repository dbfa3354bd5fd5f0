"""Two optimisers behind one: each parameter moves as its own would move it, and one state holds both."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from pipelines.config import Optimizer
from pipelines.loading import load
from pipelines.training.optim import MuonAdamW, RoundedProducts, build, split

SETTINGS = Optimizer(kind="muon", lr=0.02, options={"lr_rest": 3e-3}, betas=(0.9, 0.95), weight_decay=0.01)


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))


def fill(*values: nn.Parameter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in values:
        value.grad = torch.randn(value.shape, generator=generator)


def test_each_parameter_moves_as_its_own_optimiser_would_move_it():
    matrix, vector = parameters()
    alone, apart = copy.deepcopy(matrix), copy.deepcopy(vector)
    both = MuonAdamW([matrix], [vector], SETTINGS, 3e-3)
    muon = torch.optim.Muon([alone], lr=0.02, weight_decay=0.01)
    adamw = torch.optim.AdamW([apart], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(3):
        fill(matrix, vector, seed=step)
        fill(alone, apart, seed=step)
        for optimizer in (both, muon, adamw):
            optimizer.step()
    assert torch.equal(matrix, alone)
    assert torch.equal(vector, apart)


def test_a_schedule_scales_both_rates_and_a_saved_state_goes_on_exactly():
    matrix, vector = parameters()
    optimizer = MuonAdamW([matrix], [vector], SETTINGS, 3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for step in range(2):
        fill(matrix, vector, seed=step)
        optimizer.step()
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.02 / 3, 3e-3 / 3])

    again, beside = copy.deepcopy(matrix), copy.deepcopy(vector)
    resumed = MuonAdamW([again], [beside], SETTINGS, 3e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for values, one in (((matrix, vector), optimizer), ((again, beside), resumed)):
        fill(*values, seed=9)
        one.step()
    assert torch.equal(matrix, again)
    assert torch.equal(vector, beside)


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else(checkpoint, recipe):
    network, _ = load(checkpoint, recipe.model)
    matrices, rest = split(network)
    assert len(matrices) == 2 * 7  # q, k, v, o, gate, up, down of two layers
    names = {id(value): name for name, value in network.named_parameters()}
    assert {names[id(value)] for value in rest if value.ndim == 2} == {"model.embed_tokens.weight"}
    assert len(build(network, SETTINGS).param_groups) == 2


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of Newton and Schulz in float64 (Jordan et al., 2024)."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_a_cpu_without_bfloat16_multiplies_as_exactly_as_one_that_has_it():
    for seed in range(4):
        gradient = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
        weights = [nn.Parameter(torch.zeros(64, 96)) for _ in range(2)]
        for weight, mode in zip(weights, (contextlib.nullcontext(), RoundedProducts()), strict=True):
            weight.grad = gradient.clone()
            with mode:
                torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
        exact = orthogonal(gradient)
        plain, ours = (((-weight.detach().double() - exact).norm() / exact.norm()).item() for weight in weights)
        assert 0.005 < plain < 0.02  # bfloat16 has eight bits
        assert abs(ours - plain) < 0.001


def test_products_of_other_numbers_are_left_as_they_are():
    left, right = torch.randn(8, 4), torch.randn(4, 8)
    with RoundedProducts():
        assert torch.equal(left @ right, torch.mm(left, right))
        product = left.bfloat16() @ right.bfloat16()
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, (left.bfloat16().float() @ right.bfloat16().float()).bfloat16())
