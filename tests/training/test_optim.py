"""Two optimisers behind one: each parameter moves as its own would move it, and one state holds both."""

import copy
import multiprocessing

import pytest
import torch
from torch import nn

from pipelines.core.errors import RecipeError
from pipelines.recipe.config import Optimizer
from pipelines.rollout.model_loading import load
from pipelines.training import muon as muon_step
from pipelines.training.muon import MuonAdamW, assign_to_ranks, matrices_and_rest
from pipelines.training.optimizers import muon

SETTINGS = Optimizer(kind="muon", lr=0.02, options={"lr_rest": 3e-3}, betas=(0.9, 0.95), weight_decay=0.01)


def parameters():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))


def fill(*values, seed):
    generator = torch.Generator().manual_seed(seed)
    for value in values:
        value.grad = torch.randn(value.shape, generator=generator).to(value.dtype)


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


class Network(nn.Module):
    """One matrix in a block and one outside; names as in a decoder."""

    def __init__(self, blocks):
        super().__init__()
        block = nn.ModuleDict({blocks: nn.ModuleList([nn.Linear(4, 6, bias=False)])})
        self.model, self.head = block, nn.Linear(6, 5, bias=False)


def blocks():
    torch.manual_seed(0)
    shapes, numbers = ((6, 4), (4, 4), (3, 9), (5, 2)), (torch.float32, torch.bfloat16, torch.float32, torch.float32)
    return [nn.Parameter(torch.randn(shape).to(kind)) for shape, kind in zip(shapes, numbers, strict=True)]


def three_steps(rank, ranks, folder):
    """Three steps of one process; the last matrix gets its first gradient after the first step."""
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    matrices = blocks()
    rest = nn.Parameter(torch.ones(5))
    optimizer, multiplied = MuonAdamW(matrices, [rest], SETTINGS, 3e-3), []
    once = muon_step.orthogonal

    def counted(updates, *settings):
        multiplied[-1] += len(updates)
        return once(updates, *settings)

    muon_step.orthogonal = counted
    for seed in range(3):
        fill(*matrices[: 4 if seed else 3], rest, seed=seed)
        multiplied.append(0)
        optimizer.step()
    muon_step.orthogonal = once
    optimizer.gather()
    torch.save([[*matrices, rest], optimizer.state_dict()["state"], multiplied], f"{folder}/{rank}of{ranks}.pt")


def test_each_process_steps_its_share_of_the_matrices_and_all_end_alike(tmp_path):
    """Alone and in two processes the same bits, of weights and of momentum, though each multiplies a share."""
    three_steps(0, 1, str(tmp_path))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=three_steps, args=(rank, 2, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    alone = torch.load(tmp_path / "0of1.pt", weights_only=False)
    shared = [torch.load(tmp_path / f"{rank}of2.pt", weights_only=False) for rank in range(2)]
    assert alone[2] == [3, 4, 4]
    assert [sum(counts) for counts in zip(*(part[2] for part in shared), strict=True)] == [3, 4, 4]
    assert all(min(part[2]) >= 1 for part in shared)
    for weights, state, _ in shared:
        assert all(torch.equal(one, other) for one, other in zip(weights, alone[0], strict=True))
        assert state.keys() == alone[1].keys()
        for key, values in alone[1].items():
            assert all(torch.equal(torch.as_tensor(state[key][name]), torch.as_tensor(values[name])) for name in values)


def test_the_shares_of_processes_cost_alike():
    """Products with themselves cost 4*4*6 = 96, 64, 3*3*9 = 81 and 2*2*5 = 20: 96 + 20 and 81 + 64."""
    matrices = blocks()
    first, second = assign_to_ranks(matrices, 2)
    assert [id(one) for one in first] == [id(matrices[0]), id(matrices[3])]
    assert [id(one) for one in second] == [id(matrices[2]), id(matrices[1])]
    assert [len(share) for share in assign_to_ranks(matrices, 6)] == [1, 1, 1, 1, 0, 0]


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else(checkpoint, recipe):
    network, _ = load(checkpoint, recipe.model)
    matrices, rest = matrices_and_rest(network)
    assert len(matrices) == 2 * 7  # q, k, v, o, gate, up, down of two layers
    names = {id(value): name for name, value in network.named_parameters()}
    assert {names[id(value)] for value in rest if value.ndim == 2} == {"model.embed_tokens.weight"}
    assert len(muon(network, SETTINGS).param_groups) == 2
    # Blocks of another name, blocks that are frozen, and blocks alone, as low-rank adapters are.
    other, frozen, alone = Network("h"), Network("layers"), Network("layers")
    frozen.model.requires_grad_(False)
    alone.head.requires_grad_(False)
    for network in (other, frozen):
        with pytest.raises(RecipeError, match=r"no matrices in blocks named \.layers\. Set optimizer\.kind=adamw"):
            muon(network, SETTINGS)
    with pytest.raises(RecipeError, match="no weights to train outside those matrices"):
        muon(alone, SETTINGS)
    assert [len(group["params"]) for group in muon(Network("layers"), SETTINGS).param_groups] == [1, 1]


def orthogonal(matrix):
    """Five steps of Newton and Schulz in float64 (Jordan et al., 2024)."""
    x = matrix.double() / matrix.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_a_cpu_without_bfloat16_multiplies_as_exactly_as_one_that_has_it():
    for seed in range(4):
        gradient = torch.randn(64, 96, generator=torch.Generator().manual_seed(seed))
        settings = ((3.4445, -4.775, 2.0315), 5, 1e-7)
        exact = orthogonal(gradient)
        plain, ours = (
            ((muon_step.orthogonal(gradient[None], *settings, rounds)[0].double() - exact).norm() / exact.norm()).item()
            for rounds in (False, True)
        )
        assert 0.005 < plain < 0.02  # bfloat16 has eight bits
        assert abs(ours - plain) < 0.001
