"""Plan with weights on ``meta`` that bitsandbytes will pack in 4 or 8 bits once their values are there.

Each layer is replaced by one that has as many bytes as the packed layer, and computes as it does: weights are unpacked
for a product, in the forward and again in the backward, and freed after it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from profiler.memory import is_plain

from ..module._init._quantized import is_in_rows

_BLOCK_OF_SCALES = 256
"""The number of scales that share a scale of their own, if scales are compressed (``bnb_4bit_use_double_quant``)."""


def with_packed(model: nn.Module) -> nn.Module:
    """Return ``model``; if it has such weights, a copy with their replacements.

    Raises:
        ValueError: the size of a weight is known only once it is packed.
    """
    unsized = {id(p): name for name, p in model.named_parameters() if _is_unsized(p)}
    if not unsized:
        return model
    made: dict[int, Any] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if id(weight) in unsized and isinstance(layer, nn.Linear) and isinstance(weight, Tensor):
            sizes = _compute_packed_sizes(weight)
            if sizes is not None:
                made[id(layer)] = _Packed.like(layer, *sizes)
                del unsized[id(weight)]
    if unsized:
        name = next(iter(unsized.values()))
        raise ValueError(
            f"model: {name!r} is a {type(model.get_parameter(name)).__name__} on 'meta', whose size is known only once "
            "it is quantized; plan with a model that has its weights, on the host, such as "
            "from_pretrained(..., quantization_config=...)"
        )
    return copy.deepcopy(model, made)


def _is_unsized(parameter: nn.Parameter) -> bool:
    return parameter.is_meta and not is_plain(parameter) and not is_traceable_wrapper_subclass(parameter)


def _compute_packed_sizes(weight: Any) -> tuple[int, int] | None:
    """Return the bytes of a weight once it is packed, and of its scales; None if they are not known."""
    count, (rows, _) = weight.numel(), weight.shape
    if is_in_rows(weight):  # 8 bits, with a scale per row
        return count, 4 * rows
    if not hasattr(weight, "quant_type"):
        return None
    blocks = -(-count // weight.blocksize)
    if not weight.compress_statistics:
        return -(-count // 2), 4 * blocks
    return -(-count // 2), blocks + 4 * -(-blocks // _BLOCK_OF_SCALES)


class _Packed(nn.Module):
    """A linear layer whose weight is packed and frozen, without values."""

    def __init__(self, layer: nn.Linear, size: int, scales: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.compute_dtype = getattr(layer, "compute_dtype", None)
        # Like bitsandbytes, store packed weights as a column of bytes.
        self.weight = nn.Parameter(torch.empty(size, 1, dtype=torch.uint8, device="meta"), requires_grad=False)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.bias = copy.deepcopy(layer.bias)

    @classmethod
    def like(cls, layer: nn.Linear, size: int, scales: int) -> nn.Module:
        """Return one with the name of the layer's class, which plans use to identify a layer."""
        made: nn.Module = type(type(layer).__name__, (cls,), {})(layer, size, scales)
        return made

    def forward(self, x: Tensor) -> Tensor:
        computed = x if self.compute_dtype is None else x.to(self.compute_dtype)
        product: Tensor = _Product.apply(computed, self.out_features)  # type: ignore[no-untyped-call]
        return (product if self.bias is None else product + self.bias.to(product.dtype)).to(x.dtype)


class _Product(torch.autograd.Function):
    """The product with a frozen weight that is unpacked for the time of each product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape = rows, x.shape[-1]
        return x @ x.new_empty(ctx.shape).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ gradient.new_empty(ctx.shape), None
