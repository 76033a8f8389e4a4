"""Move layers to their devices, all or none."""

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
    place = torch.device("cpu") if device.type == "cpu" else device
    with _attached_moved(block, place), identities_kept(block):
        block.to(place)


def move_to_host(block: nn.Module, device: torch.device) -> None:
    """Move the parameters in ``block`` to the host, and everything else that its modules hold to ``device``."""
    move(block, torch.device("cpu"))
    place = torch.device("cpu") if device.type == "cpu" else device
    for buffer in block.buffers():
        if buffer.device != place:
            give_data(buffer, buffer.detach().to(place))
    with _attached_moved(block, place):
        pass


@contextmanager
def _attached_moved(block: nn.Module, place: torch.device) -> Iterator[None]:
    """Move the tensors in attributes of packed weights and of their modules, such as scales, but no parameters.

    Some libraries keep a weight in an attribute as well. It has the memory of the parameter before and afterwards.
    """
    if all(each.is_floating_point() or each.is_complex() for each in block.parameters()):
        yield
        return
    from profiler.memory import attached  # imported here, because plain models do not need it

    def others() -> Iterator[Tensor]:
        kept = {id(parameter) for parameter in block.parameters()}
        found = (tensor for module in block.modules() for tensor in attached(module))
        return (tensor for tensor in found if id(tensor) not in kept and not tensor.is_meta)

    weights = {_memory(parameter): parameter for parameter in block.parameters()}
    same = [(tensor, weights[_memory(tensor)]) for tensor in others() if _memory(tensor) in weights]
    yield
    for tensor, weight in same:
        give_data(tensor, weight.detach())
    for tensor in others():
        if tensor.device != place:
            give_data(tensor, tensor.detach().to(place))


def _memory(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.dtype


@contextmanager
def identities_kept(block: nn.Module) -> Iterator[None]:
    """Preserve the identity of parameters and buffers while ``block`` is moved or cast to a different dtype.

    Torch replaces buffers, and also parameters if the device type changes. Here they must stay the objects that the
    model, other partitions and optimizers refer to.
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
    """Raise ValueError if a tensor in ``block`` has no data to move to ``device``, or would lose its data there."""
    for name, tensor in chain(block.named_parameters(), block.named_buffers()):
        if tensor.is_meta != (device.type == "meta") and not is_lazy(tensor):
            raise ValueError(
                f"{name!r} of partition {partition} is on {str(tensor.device)!r} and cannot be moved to "
                f"{str(device)!r}: " + (_NO_DATA if tensor.is_meta else _DATA_LOST)
            )


def expect_shapes(block: nn.Module, partition: int) -> None:
    """Raise ValueError if a parameter in ``block`` is lazy, as its copy on a device needs a shape."""
    for name, parameter in block.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{name!r} of partition {partition} has no shape yet, but offload=True copies it to its device before "
                "it is used; call the model once, with a sample, before creating a pipe from it"
            )


_DATA_LOST = "tensors on 'meta' have no values; pass a device that can hold them, such as 'cpu'"
_NO_DATA = (
    "there is no data to move; pass GPipe(..., init=...): 'reset' for the layers' own reset_parameters(), a function "
    "of a module, a state dict, or the path of a checkpoint; or call to_empty(device='cpu') and initialize it first"
)


@contextmanager
def untouched_on_failure(root: nn.Module) -> Iterator[None]:
    """If the body raises, restore everything in ``root``: modules, parameters, buffers, and their devices."""
    every = [each for m in root.modules() for each in (vars(m), m._modules, m._parameters, m._buffers)]
    held = [each for each in every if isinstance(each, dict)]  # scripted modules have no dicts
    entries = [(each, dict(each)) for each in held]
    tensors = [(t, t.data, t.grad if t.is_leaf else None) for t in (*root.parameters(), *root.buffers())]
    # Moving a module keeps a parameter and its gradient as objects, and replaces the data of both.
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
        for tensor, _, grad in tensors:  # last, because torch checks that both are on the same device
            if grad is not None:
                tensor.grad = grad
        raise


def expect_same_device(fn: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
    """Raise TypeError if ``fn``, as passed to ``nn.Module._apply``, would move one of the ``tensors``."""
    for dtype, device in {(tensor.dtype, tensor.device) for tensor in tensors}:
        # A closure of torch shows its effect only on a tensor. An empty one costs nothing.
        there = fn(torch.empty(0, dtype=dtype, device=device)).device
        if there != device:
            raise moving_denied(f"{str(device)!r} to {str(there)!r}, as part of another module")


def device_map(
    layers: dict[str, torch.device], parameters: Iterable[tuple[str, Tensor]]
) -> dict[str, str | torch.device]:
    """Map names of layers and parameters to devices. accelerate moves a model whose map has fewer than two entries."""
    places = layers | {name: parameter.device for name, parameter in parameters}
    # Without an index for CPUs, and not the string "cpu", which marks offloaded weights: peft would move them.
    return {name: torch.device("cpu") if place.type == "cpu" else str(place) for name, place in places.items()}


def replicating_denied() -> RuntimeError:
    return RuntimeError(
        "nn.DataParallel cannot replicate a pipe, which already has its own devices; use the other devices for more "
        "partitions, use DistributedDataParallel with more processes, or with Hugging Face's Trainer make only the "
        "pipe's devices visible to this process (CUDA_VISIBLE_DEVICES)"
    )


def moving_denied(how: str) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers by {how}, because GPipe manages device placement; pass devices=... "
        "when creating it, and move the modules around it separately"
    )


def swap_data(tensor: Tensor, other: Tensor) -> None:
    """Give ``tensor`` the device and data of ``other``; it keeps its identity, class, attributes and hooks.

    Parameters thus remain tied, and references to them remain valid.
    """
    # `tensor.data = ...` cannot move a tensor from or to meta.
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
    except RuntimeError:  # torch allows this only between common device types
        swap_data(tensor, create_leaf(other, tensor.requires_grad))


def create_leaf(data: Tensor, requires_grad: bool) -> Tensor:
    """Return ``data`` as a separate leaf tensor, for :func:`swap_data`."""
    # Not detach(): torch forbids `.data = ...` on its result.
    return nn.Parameter(data, requires_grad=requires_grad)
