"""FLOP formulas: PyTorch's own, plus some that it lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch

Formula = Callable[..., int]
_aten = torch.ops.aten

# Namespaces of PyTorch's own operations, or of operations that only move data.
_KNOWN = re.compile(r"aten|prims?|.*c10d.*|fsdp|symm_mem|_dtensor|profiler|rng_prims|inductor|")
# Parts of the names of operations that multiply matrices, such as addmm, bmm, conv2d, lstm.
_PRODUCT = re.compile(
    r"\w{0,4}m[mv]|matmul|linear|bilinear|trilinear|conv(olution|\dd)?|dilated\dd|transpose\dd|attention"
    r"|rnn|lstm|gru|fft|cdist|gemm|einsum|v?dot"
)
# The matrix products of a recurrent cell on a GPU are separate operations.
_POINTWISE = frozenset({"upsample", "cell", "flatten", "combination"})


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the FLOPs of ``func``: 0 if it multiplies no matrices, None if it may but has no formula."""
    from torch.utils.flop_counter import flop_registry  # imported late, because it is slow to import

    packet = getattr(func, "_overloadpacket", func)
    if packet in _OWN:
        return _OWN[packet](*args)
    formula = flop_registry.get(_LIKE.get(packet, packet))
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    return None if _multiplies(packet) else 0


@cache
def _multiplies(packet: Any) -> bool:
    namespace, _, name = str(packet).rpartition(".")
    if not _KNOWN.fullmatch(namespace):
        return True
    words = name.split("_")
    return _POINTWISE.isdisjoint(words) and any(map(_PRODUCT.fullmatch, words))


def _product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> int:
    return 2 * a.numel() * prod(b.shape[1:])


def _grouped(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> int:
    """Count the products of groups, such as the rows of each expert with the expert's matrix.

    ``a`` has the shape (groups, m, k) and ``b`` (groups, k, n). A tensor whose m, n or k is divided into groups lacks
    the first dimension.
    """
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _recurrent(values: torch.Tensor, weights: torch.Tensor | Sequence[torch.Tensor], *rest: Any) -> int:
    """Count the products of each matrix with the values of each row at each time step.

    ``values`` has the shape (times, rows, features), or if packed, (sum of the rows' lengths, features).
    """
    given = [weights, rest[0]] if isinstance(weights, torch.Tensor) else weights
    vectors = values.numel() // max(1, values.shape[-1])
    return 2 * vectors * sum(matrix.numel() for matrix in given if matrix.dim() == 2)


def _recurrent_backward(*args: Any) -> int:
    """Count the products of a backward, where one operation computes the gradients of values and of matrices."""
    return 2 * _recurrent(*args)


def _map_operations(names: Sequence[str], value: Any) -> dict[Any, Any]:
    """Map the operations that this version of PyTorch has to ``value``."""
    return {getattr(_aten, name): value for name in names if hasattr(_aten, name)}


_OWN: dict[Any, Formula] = {
    **_map_operations(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _recurrent),
    **_map_operations(("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"), _recurrent_backward),
    **_map_operations(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    **_map_operations(("mv", "dot", "vdot", "_int_mm", "_scaled_mm_v2"), _product),
    **_map_operations(("addmv", "_addmm_activation"), lambda bias, a, b, *rest: _product(a, b)),
}
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Operations without a formula in PyTorch, mapped to an operation with the same formula."""
