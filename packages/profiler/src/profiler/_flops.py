"""The floating-point operations of one operation: PyTorch's formulas, and some that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Formula = Callable[..., int]


def flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The floating-point operations of ``func`` with these arguments; 0 if there is no formula for it."""
    packet = getattr(func, "_overloadpacket", func)
    if (own := _own().get(packet)) is not None:
        return own(*args)
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


@cache
def _own() -> dict[Any, Formula]:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def attention(query: Any, key: Any, value: Any, *rest: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]

    def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any) -> int:
        found = sdpa_backward_flop_count(  # type: ignore[no-untyped-call]
            gradient.shape, query.shape, key.shape, value.shape
        )
        return int(found)

    formulas: dict[str, Formula] = {
        "mkldnn_rnn_layer": _recurrent,
        "mkldnn_rnn_layer_backward": _recurrent_backward,
        "_cudnn_rnn": _recurrent,
        "_cudnn_rnn_backward": _recurrent_backward,
        "miopen_rnn": _recurrent,
        "miopen_rnn_backward": _recurrent_backward,
        "_scaled_dot_product_flash_attention_for_cpu": attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    }
    aten = torch.ops.aten
    return {getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)}


def _recurrent(values: torch.Tensor, weights: torch.Tensor | Sequence[torch.Tensor], *rest: Any) -> int:
    """The products of each matrix with the values of each row at each time step.

    Args:
        values: of shape (times, rows, features), or without the padding (times of all rows, features).
        weights: the matrices and biases of all layers; or the matrix for the input of one, before that for its state.
    """
    given = [weights, rest[0]] if isinstance(weights, torch.Tensor) else weights
    vectors = values.numel() // max(1, values.shape[-1])
    return 2 * vectors * sum(matrix.numel() for matrix in given if matrix.dim() == 2)


def _recurrent_backward(*args: Any) -> int:
    """The products for the gradients of values and of matrices, which one operation computes."""
    return 2 * _recurrent(*args)
