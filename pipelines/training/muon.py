"""Muon for the matrices of a model's blocks and AdamW for the rest, as one optimiser that processes share."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import distributed, nn

from pipelines.recipe.config import Optimizer


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan et al., 2024) for hidden matrices, `torch.optim.AdamW` for embeddings and norms.

    Parameter groups and state belong to this optimiser, so that schedulers, `state_dict` and `load_state_dict` see one.
    Processes that train together have the same gradients, and Muon's products take long: each steps its own share of
    the matrices, those of one shape together, and sends the others the result, bit for bit. The others have the
    momentum of its share after `gather` only.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        optimizer: Optimizer,
        lr_rest: float | None = None,
    ) -> None:
        if lr_rest is None:
            lr_rest = optimizer.lr
        decay = optimizer.weight_decay
        muon = torch.optim.Muon(list(matrices), lr=optimizer.lr, weight_decay=decay)
        self._adamw = torch.optim.AdamW(list(rest), lr=lr_rest, betas=optimizer.betas, weight_decay=decay)
        groups = [*muon.param_groups, *self._adamw.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            loss = closure()
        muon, *rest = self.param_groups
        self._adamw.param_groups = rest
        self._adamw.state = self.state
        self._adamw.step()
        rank, ranks = _rank_and_ranks()
        self._of_ranks = assign_to_ranks(muon["params"], ranks)
        by_shape = defaultdict(list)
        for parameter in self._of_ranks[rank]:
            if parameter.grad is not None:
                by_shape[parameter.shape, parameter.dtype].append(parameter)
        for parameters in by_shape.values():
            self._step_alike(parameters)
        if ranks > 1:
            for owner, parameters in enumerate(self._of_ranks):
                weights = [parameter.data for parameter in parameters]
                broadcast_from(owner, weights)
        return loss

    def _step_alike(self, parameters: Sequence[nn.Parameter]) -> None:
        """Muon's step of matrices of one shape."""
        muon = self.param_groups[0]
        momentum = muon["momentum"]
        updates = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            buffer = self._momentum(parameter).lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(buffer, momentum))
        rounds = slow_bfloat16(updates[0].device)
        stacked = torch.stack(updates)
        products = orthogonal(stacked, muon["ns_coefficients"], muon["ns_steps"], muon["eps"], rounds)
        rows, columns = parameters[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for parameter, product in zip(parameters, products, strict=True):
            parameter.mul_(1 - muon["lr"] * muon["weight_decay"])
            parameter.add_(product, alpha=-muon["lr"] * scale)

    def gather(self) -> None:
        """Give every process the momentum of all matrices, as a checkpoint has it."""
        if len(self._of_ranks) == 1:
            return
        for owner, parameters in enumerate(self._of_ranks):
            buffers = [self._momentum(parameter) for parameter in parameters]
            broadcast_from(owner, buffers)

    def _momentum(self, parameter: nn.Parameter) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.data)
        return state["momentum_buffer"]


def _rank_and_ranks() -> tuple[int, int]:
    """The number of this process, and how many train together."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def broadcast_from(owner: int, tensors: Sequence[torch.Tensor]) -> None:
    """Give every process the tensors as their owner has them."""
    if not tensors:
        return
    as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    flat = torch.cat(as_bytes)
    distributed.broadcast(flat, owner)
    if owner == distributed.get_rank():
        return
    sizes = [tensor.nbytes for tensor in tensors]
    pieces = torch.split(flat, sizes)
    for tensor, piece in zip(tensors, pieces, strict=True):
        aligned = piece.clone()
        tensor.copy_(aligned.view(tensor.dtype).reshape(tensor.shape))


def slow_bfloat16(device: torch.device) -> bool:
    """Whether this is a CPU without instructions for bfloat16: PyTorch 2.13 then multiplies number by number."""
    if device.type != "cpu":
        return False
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return not (has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def orthogonal(
    updates: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float, rounds: bool
) -> torch.Tensor:
    """Newton-Schulz iterations of `torch.optim.Muon` on matrices (M, R, C) at once: the same bits in less time.

    With `rounds`, products are taken in float32 and rounded to bfloat16, as a CPU with instructions for it does.
    """

    def to_bfloat16(product: torch.Tensor) -> torch.Tensor:
        rounded = product.bfloat16()
        if rounds:
            return rounded.float()
        return rounded

    a, b, c = coefficients
    is_tall = updates.size(1) > updates.size(2)
    x = updates.bfloat16()
    clamped_norms = [matrix.norm().clamp(min=eps) for matrix in x]
    norms = torch.stack(clamped_norms)
    x = to_bfloat16(x / norms[:, None, None])
    if is_tall:
        x = x.mT
    for _ in range(steps):
        gram = to_bfloat16(x @ x.mT)
        polynomial = to_bfloat16(torch.baddbmm(gram, gram, gram, beta=b, alpha=c))
        x = to_bfloat16(torch.baddbmm(x, polynomial, x, beta=a))
    if is_tall:
        return x.mT
    return x


def assign_to_ranks(matrices: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """The matrices of each process: the most costly first, each to the process that has the least to multiply so far.

    The cost of a matrix is that of its product with itself, (shorter side)^2 x longer side.
    """
    costs = []
    for matrix in matrices:
        shorter, longer = sorted(matrix.shape)
        costs.append(shorter**2 * longer)
    loads = [0] * ranks
    of_ranks: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    costliest_first = sorted(range(len(matrices)), key=lambda number: -costs[number])
    for number in costliest_first:
        rank = loads.index(min(loads))
        loads[rank] += costs[number]
        of_ranks[rank].append(matrices[number])
    return of_ranks


def matrices_and_rest(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (matrices of the blocks, embeddings, heads, norms and biases)."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 2 and ".layers." in name:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    return matrices, rest
