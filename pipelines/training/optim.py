"""Muon on the matrices of the blocks and AdamW on the rest, as one optimiser that schedules and checkpoints as one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines.core.errors import RecipeError
from pipelines.recipe.config_training import Optimizer


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan et al., 2024) for hidden matrices, `torch.optim.AdamW` for embeddings and norms.

    Parameter groups and state belong to this optimiser and are lent to the two for each step, so that schedulers,
    `state_dict` and `load_state_dict` see one optimiser. Processes that train together have the same gradients, and
    Muon's products take long: each steps its own share of the matrices and sends the others what came out, bit for bit.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        optimizer: Optimizer,
        lr_rest: float | None = None,
    ) -> None:
        self._muon = torch.optim.Muon(list(matrices), lr=optimizer.lr, weight_decay=optimizer.weight_decay)
        self._adamw = torch.optim.AdamW(
            list(rest),
            lr=optimizer.lr if lr_rest is None else lr_rest,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None if closure is None else closure()
        matrices, *rest = self.param_groups
        moved = [parameter for parameter in matrices["params"] if parameter.grad is not None]
        rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if _is_shared() else (0, 1)
        of_ranks = shares(moved, ranks)
        with rounded_products() if _on_cpu(of_ranks[rank]) else nullcontext():
            self._lend(self._muon, [{**matrices, "params": of_ranks[rank]}])
        self._lend(self._adamw, rest)
        for owner, parameters in enumerate(of_ranks if ranks > 1 else ()):
            self._send(parameters, owner)
        return loss

    def _lend(self, part: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        part.param_groups, part.state = groups, self.state
        part.step()

    @torch.no_grad()
    def _send(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        """Give every process these parameters and their momentum as `rank` has them."""
        tensors: list[torch.Tensor] = []
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.data)
            tensors += [parameter.data, self.state[parameter]["momentum_buffer"]]
        if tensors:
            whole = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
            distributed.broadcast(whole, rank)
            if rank != distributed.get_rank():
                begin = 0
                for tensor in tensors:
                    part = whole[begin : begin + tensor.nbytes]
                    tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))  # a copy is aligned
                    begin += tensor.nbytes


def shares(matrices: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """The matrices of each process: the most costly first, each to the process that has the least to multiply so far.

    The cost of a matrix is that of its product with itself, (shorter side)^2 x longer side.
    """
    cost = [min(matrix.shape) ** 2 * max(matrix.shape) for matrix in matrices]
    load = [0] * ranks
    of_ranks: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    for at in sorted(range(len(matrices)), key=lambda at: -cost[at]):
        rank = load.index(min(load))
        load[rank] += cost[at]
        of_ranks[rank].append(matrices[at])
    return of_ranks


def _is_shared() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class RoundedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies bfloat16 matrices of the CPU in float32 and rounds what comes out.

    That is what a CPU with instructions for bfloat16 does. Without them PyTorch 2.13 multiplies number by number, which
    takes many times as long (`python benchmarks/muon.py`).
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if func in products and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            return func(*(matrix.float() for matrix in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def rounded_products() -> AbstractContextManager[Any]:
    """`RoundedProducts` where this CPU has no instructions for bfloat16."""
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    fast = has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return nullcontext() if fast else RoundedProducts()  # type: ignore[no-untyped-call]


def _on_cpu(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.device.type == "cpu" for parameter in parameters)


def build(network: nn.Module, optimizer: Optimizer, lr_rest: float | None = None) -> MuonAdamW:
    """The optimiser for a decoder: every 2-D weight inside its blocks goes to Muon.

    Args:
        lr_rest: the rate of what goes to AdamW; None takes the one rate.
    """
    matrices, rest = split(network)
    if not matrices or not rest:
        missing = "matrices in blocks named .layers." if not matrices else "weights to train outside those matrices"
        raise RecipeError(f"muon finds no {missing}", "Set optimizer.kind=adamw.")
    return MuonAdamW(matrices, rest, optimizer, lr_rest)


def split(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (matrices of the blocks, embeddings, heads, norms and biases)."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and ".layers." in name else rest).append(parameter)
    return matrices, rest


def arguments(optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser as transformers' TrainingArguments name it (Muon itself is made by `build`)."""
    schedule = {"constant": "constant_with_warmup"}.get(optimizer.schedule, optimizer.schedule)
    return {
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip,
        "lr_scheduler_type": schedule,
        "optim": "adamw_torch_fused",
    }
