"""Linear layers whose weights lie as the processor's products read them, while a model decodes on a CPU in bfloat16.

oneDNN multiplies blocks of weights, and makes them anew from plain weights at each product. Beside a few tokens that
takes as long as the product itself. PyTorch's own compiler lays weights out once in the same way; the results have the
same bits.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

USUAL_TOKENS = 32  # of a forward pass, for which the blocks are chosen
MOST_BYTES = 4 << 30  # of a second copy of the weights; a larger one may not fit beside the first


@contextlib.contextmanager
def packed_linear_layers(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model's linear layers multiply packed copies of their weights, without gradients.

    Nothing changes for a model on another device or of another dtype, or one too large for a copy.

    Args:
        dtype: of the products, to which weights and inputs are rounded.
    """
    layers = _layers_to_pack(model, dtype)
    try:
        for layer in layers:
            layer.forward = functools.partial(_product, _packed(layer, dtype), layer.bias, dtype)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _layers_to_pack(model: nn.Module, dtype: torch.dtype) -> list[nn.Linear]:
    """The plain linear layers on a CPU; none if they would not gain, or not fit."""
    if dtype != torch.bfloat16 or not can_pack():
        return []
    layers: list[nn.Linear] = []
    for module in model.modules():
        is_replaced = "forward" in vars(module)
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and not is_replaced:
            layers.append(module)
    n_weights = sum(layer.weight.numel() for layer in layers)
    if n_weights * dtype.itemsize > MOST_BYTES:
        return []
    return layers


def can_pack() -> bool:
    """Whether PyTorch has oneDNN, and the processor the instructions by which it multiplies packed weights."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]


def _packed(layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    plain = layer.weight.detach().to(dtype).contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(plain, USUAL_TOKENS)  # type: ignore[no-any-return]


def _product(packed: Tensor, bias: Tensor | None, dtype: torch.dtype, inputs: Tensor) -> Any:
    """`inputs` times packed weights, plus the bias."""
    rounded_bias = None if bias is None else bias.to(dtype)
    return torch.ops.mkldnn._linear_pointwise(inputs.to(dtype), packed, rounded_bias, "none", [], "")
