"""Layers and batches that have shapes but no data, for counting without memory and without a device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from microbatch import Batch, map_tensors
from streams import add_note

from ._sandbox import computed_copies

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


def fake_mode() -> FakeTensorMode:
    """A mode in which operations compute shapes only."""
    # Imported late: it takes a while, and few calls need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


class FusedAttention(TorchFunctionMode):
    """Counts attention as a fused kernel of an accelerator computes it, which keeps no scores.

    The fake tensors are on a CPU, whose kernel keeps them if there is dropout, or if values and queries differ in
    width. (Fake CUDA tensors that require a gradient abort a build of PyTorch without CUDA.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _fused(*args, **kwargs)
        # It calls the function above, which is not seen in here.
        if func is functional.multi_head_attention_forward and not kwargs.get("need_weights", True):
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :])
        return func(*args, **kwargs)


_DROPOUT = [*signature(functional.multi_head_attention_forward).parameters].index("dropout_p")


def _fused(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **kwargs: Any
) -> Any:
    width = value.shape[-1]
    wide = functional.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    return functional.scaled_dot_product_attention(query, key, wide, attn_mask, 0.0, *rest, **kwargs)[..., :width]


def fake_layers(module: Iterable[nn.Module], mode: FakeTensorMode) -> Iterator[nn.Module]:
    """Copies of the layers in training mode that take no memory, whatever device the layers are on."""
    for layer in module:
        owners = [each for child in layer.modules() for each in (child._parameters, child._buffers, vars(child))]
        tensors = [value for owner in owners for value in owner.values() if isinstance(value, torch.Tensor)]
        yield copy.deepcopy(layer, {id(x): fake(x, mode) for x in tensors}).train()


def fake(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake of `x` on the CPU."""
    with mode:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        if isinstance(x, nn.Parameter):
            return nn.Parameter(y, requires_grad=x.requires_grad)
        return y.requires_grad_(x.requires_grad)


def fake_batch(batch: Batch, mode: FakeTensorMode) -> Batch:
    return batch.call(lambda value: map_tensors(lambda x: fake(x, mode), value))


@contextmanager
def explained() -> Iterator[None]:
    """A context that adds to errors what to do about a layer that reads values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        add_note(error, "the layer looks at values, and without a device there are none; use device='cpu'")
        raise


def materialised(layer: nn.Module) -> nn.Module:
    """A copy of `layer` with memory on the CPU, and zeros in it."""
    return copy.deepcopy(layer, computed_copies(layer)).to_empty(device="cpu").train()


def zeros_like(batch: Batch) -> Batch:
    def zeros(x: torch.Tensor) -> torch.Tensor:
        # With the same strides: a kernel that needs another layout would keep a copy.
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_().requires_grad_(x.requires_grad)

    return batch.call(lambda value: map_tensors(zeros, value))
