"""Move layers to their devices: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch import swap_implementations


def move(block: nn.Module, device: torch.device) -> None:
    """Move all parameters and buffers in ``block``, and scales of packed weights, which may be no buffers."""
    from profiler.memory import attached  # imported here, so that importing gpipe stays quick

    place = torch.device("cpu") if device.type == "cpu" else device
    with identities_kept(block):
        block.to(place)
    for tensor in (each for module in block.modules() for each in attached(module)):
        if tensor.device != place and not tensor.is_meta:
            give_data(tensor, tensor.detach().to(place))


@contextmanager
def identities_kept(block: nn.Module) -> Iterator[None]:
    """A context in which parameters and buffers keep their identity when ``block`` is moved or changes its dtype.

    Torch replaces buffers, and parameters if they go to a device of another type. But those of a flattened model must
    remain the model's own, shared ones shared, and an optimizer's those that are trained.
    """
    held: list[dict[str, Any]] = [own for m in block.modules() for own in (m._parameters, m._buffers)]
    before = [(own, name, tensor) for own in held for name, tensor in own.items()]
    yield
    for own, name, tensor in before:
        found = own[name]
        if tensor is not None and found is not None and found is not tensor and not tensor.is_inference():
            give_data(tensor, found)
            if isinstance(tensor, nn.Parameter):
                tensor.grad = found.grad
            own[name] = tensor


def expect_movable(block: nn.Module, device: torch.device, partition: int) -> None:
    """Raise ValueError, naming the tensor, if ``block`` cannot be moved to ``device`` without loss of data."""
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
    """A context that restores everything in ``root`` if it raises: modules, parameters, buffers, and their devices."""
    every = [each for m in root.modules() for each in (vars(m), m._modules, m._parameters, m._buffers)]
    held = [each for each in every if isinstance(each, dict)]  # scripted modules have no dicts
    entries = [(each, dict(each)) for each in held]
    tensors = [(t, t.data, t.grad if t.is_leaf else None) for t in (*root.parameters(), *root.buffers())]
    # Moving a module keeps the identity of a parameter and of its gradient, and replaces the data of both.
    gradients = [(grad, grad.data) for _, _, grad in tensors if grad is not None]
    try:
        yield
    except BaseException:
        for each, before in entries:
            each.clear()
            each.update(before)
        for tensor, data, _ in tensors:
            if tensor.device != data.device:
                give_data(tensor, data)
        for gradient, data in gradients:
            gradient.data = data
        for tensor, _, grad in tensors:  # last: torch checks that both are on one device
            if grad is not None:
                tensor.grad = grad
        raise


def expect_same_device(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
    """Raise TypeError if ``fn``, which a module applies to all its ``tensors``, would move one to another device."""
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
        # The function is a closure of torch that only tensors can be asked about: one without elements costs nothing.
        there = fn(torch.empty(0, dtype=dtype, device=device)).device
        if there != device:
            raise moving_denied(f"{str(device)!r} to {str(there)!r}, as part of another module")


def device_map(
    layers: dict[str, torch.device], parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, str | torch.device]:
    """The device of each layer and parameter, by name. accelerate moves a model whose map has less than two entries."""
    places = layers | {name: parameter.device for name, parameter in parameters}
    # Torch knows no numbers of CPUs. The string "cpu" would be for offloaded weights, which peft moves.
    return {name: torch.device("cpu") if place.type == "cpu" else str(place) for name, place in places.items()}


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


def swap_data(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the device and data of ``other``. It keeps its identity, class, attributes and hooks.

    So parameters remain tied, and references to them remain valid.
    """
    # `tensor.data = ...` cannot change a tensor from or to meta.
    before, after = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    swap_implementations(tensor, other)
    if before:
        tensor._backward_hooks = None
        tensor._backward_hooks = before
    if after:
        tensor._post_accumulate_grad_hooks = after


def give_data(tensor: Tensor, other: Tensor) -> None:
    try:
        tensor.data = other
    except RuntimeError:  # torch allows this between the usual types of devices only
        swap_data(tensor, leaf_of(other, tensor.requires_grad))


def leaf_of(data: Tensor, requires_grad: bool) -> Tensor:
    """``data`` as a separate tensor, for :func:`swap_data`."""
    # Not by detach(), after which torch forbids `.data = ...`.
    return nn.Parameter(data, requires_grad=requires_grad)
