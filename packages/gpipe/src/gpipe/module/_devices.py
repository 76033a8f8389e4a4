"""Move layers to their devices: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._swap import give_data


def move(block: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers in ``block``. Torch knows no numbers of CPUs."""
    with buffers_in_place(block):
        block.to("cpu" if device.type == "cpu" else device)


@contextmanager
def buffers_in_place(block: nn.Module) -> Iterator[None]:
    """A context in which buffers keep their identity when ``block`` is moved or changes its dtype, as parameters do.

    So those of a flattened model remain the model's own, in all layers that have them.
    """
    before = [(module._buffers, name, b) for module in block.modules() for name, b in module._buffers.items()]
    yield
    for own, name, buffer in before:
        found = own[name]
        if buffer is not None and found is not None and found is not buffer and not buffer.is_inference():
            give_data(buffer, found)
            own[name] = buffer


def expect_movable(block: nn.Module, device: torch.device, partition: int) -> None:
    """Raise ValueError, naming the tensor, if moving ``block`` to ``device`` would lose data, or there are none to
    move.
    """
    for name, tensor in chain(block.named_parameters(), block.named_buffers()):
        if tensor.is_meta != (device.type == "meta") and not is_lazy(tensor):
            raise ValueError(
                f"{name!r} of partition {partition} is on {str(tensor.device)!r} and cannot go to {str(device)!r}: "
                + (_NO_DATA if tensor.is_meta else _DATA_LOST)
            )


_DATA_LOST = "what is on 'meta' has no data; give a device that can hold it, such as 'cpu'"
_NO_DATA = (
    "there is no data to move; pass GPipe(..., init=...): 'reset' for the layers' own reset_parameters(), a function "
    "of a module, a state dict, or the path of a checkpoint; or call to_empty(device='cpu') and initialise it first"
)


@contextmanager
def untouched_on_failure(root: nn.Module) -> Iterator[None]:
    """A context that restores everything in ``root`` if it raises: modules, parameters, buffers, and their data."""
    undo = [step for module in root.modules() for step in _undo(module)]
    try:
        yield
    except BaseException:
        for step in undo:
            step()
        raise


def _undo(module: nn.Module) -> Iterator[Callable[[], None]]:
    yield _refill(vars(module))
    for own in (module._modules, module._parameters, module._buffers):
        yield _refill(own)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield _put_back(tensor)


def _refill(own: dict[str, Any]) -> Callable[[], None]:
    before = dict(own)

    def refill() -> None:
        # A pipe inside would otherwise check the change.
        dict.clear(own)
        dict.update(own, before)

    return refill


def _put_back(tensor: Tensor) -> Callable[[], None]:
    # Moving a module keeps the identity of a parameter and replaces its data, and those of its gradient.
    data, gradient = tensor.data, tensor.grad if tensor.is_leaf else None
    held = None if gradient is None else gradient.data

    def put_back() -> None:
        if tensor.device == data.device:
            return
        give_data(tensor, data)
        if gradient is not None and held is not None:
            gradient.data = held
            tensor.grad = gradient

    return put_back


def expect_same_device(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
    """Raise TypeError if ``fn``, which a module applies to all its ``tensors``, would move one to another device."""
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
        there = fn(torch.empty(0, dtype=dtype, device=device)).device
        if there != device:
            raise moving_denied(f"{str(device)!r} to {str(there)!r}, as part of another module")


def device_map(layers: dict[str, torch.device], parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The device of each layer and each parameter, by name.

    Parameters are included because accelerate moves a model whose map has less than two entries.
    """
    places = layers | {name: parameter.device for name, parameter in parameters}
    # Torch knows no numbers of CPUs.
    return {name: "cpu" if place.type == "cpu" else str(place) for name, place in places.items()}


def replicating_denied() -> RuntimeError:
    return RuntimeError(
        "nn.DataParallel cannot replicate a pipe, which computes on devices of its own; use the devices for more "
        "partitions, DistributedDataParallel for more processes, or with Hugging Face's Trainer let this process see "
        "only the devices of the pipe (CUDA_VISIBLE_DEVICES)"
    )


def moving_denied(how: str) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers by {how}, because GPipe manages device placement; pass devices=... "
        "when you make it, and move the modules around it separately"
    )
