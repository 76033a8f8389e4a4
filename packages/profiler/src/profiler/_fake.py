"""Layers and batches that have shapes but no data, for counting without memory and without a device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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


def fake_layers(module: Iterable[nn.Module], mode: FakeTensorMode) -> Iterator[nn.Module]:
    """Copies of the layers in training mode that take no memory, whatever device the layers are on."""
    for layer in module:
        fakes = {id(x): fake(x, mode) for child in layer.modules() for x in _tensors(child)}
        yield copy.deepcopy(layer, fakes).train()


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for owner in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in owner.values() if isinstance(value, torch.Tensor))


def fake(x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake of `x` on the CPU: fake CUDA tensors with gradients abort a CPU build of torch."""
    with mode:
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
        if isinstance(x, nn.Parameter):
            return nn.Parameter(y, requires_grad=x.requires_grad)
        return y.requires_grad_(x.requires_grad)


def fake_batch(batch: Batch, mode: FakeTensorMode) -> Batch:
    def copied(x: torch.Tensor) -> torch.Tensor:
        return fake(x, mode)

    def faked(value: Any) -> Any:
        return map_tensors(copied, value)

    return batch.call(faked)


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
