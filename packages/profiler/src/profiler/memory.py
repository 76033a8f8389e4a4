"""Measure the memory of parameters and buffers, including tensor subclasses such as packed weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["attached", "has_memory", "held_bytes", "is_plain", "owned_bytes"]


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` holds only its values.

    Args:
        tensor: a tensor or parameter.

    Returns:
        False for an instance of a tensor subclass, unless it is a fake tensor or an uninitialized parameter.
    """
    is_known = type(tensor) in (Tensor, nn.Parameter) or nn.parameter.is_lazy(tensor)
    return is_known or getattr(tensor, "fake_mode", None) is not None


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory that `tensors` hold, including inner tensors and attributes of subclasses.

    Args:
        tensors: parameters or buffers. A repeated tensor counts once.

    Returns:
        The number of bytes. A view counts the bytes of its elements, but at most the bytes of its storage.
    """
    parts = {id(part): part for tensor in tensors for part in _parts(tensor)}
    return sum(map(_size, parts.values()))


def attached(module: nn.Module) -> Iterator[Tensor]:
    """Return the tensors in attributes of a module with integer parameters, such as their scales.

    Args:
        module: a module. Its children are not searched.

    Returns:
        An iterator over the tensors in attributes, and in dicts, lists and tuples there. It is empty if all parameters
        are floating-point or complex.
    """
    if all(parameter.is_floating_point() or parameter.is_complex() for parameter in module.parameters(recurse=False)):
        return iter(())
    registered = ("_parameters", "_buffers", "_modules")
    return _reached([value for name, value in vars(module).items() if name not in registered], set(), objects=False)


def owned_bytes(modules: Iterable[nn.Module]) -> list[dict[str, int]]:
    """Return the bytes of the parameters and buffers of each module.

    Args:
        modules: the modules, such as the layers of a model. Tensors that several of them share count for the first.

    Returns:
        For each module, the fields of a :class:`profiler.LayerProfile` that describe its tensors: ``trainable_bytes``,
        ``frozen_bytes``, ``buffer_bytes``, which include tensors attached to packed weights, and
        ``largest_parameter_bytes``, among trainable ones.
    """
    seen: set[int] = set()

    def first_seen(tensors: Iterable[Tensor]) -> list[Tensor]:
        new = [x for x in tensors if id(x) not in seen]
        seen.update(map(id, new))
        return new

    found = []
    for module in modules:
        parameters, buffers = first_seen(module.parameters()), first_seen(module.buffers())
        buffers += first_seen(x for child in module.modules() for x in attached(child))
        trainable = [held_bytes([p]) for p in parameters if p.requires_grad]
        found.append(
            {
                "trainable_bytes": sum(trainable),
                "frozen_bytes": held_bytes(parameters) - sum(trainable),
                "buffer_bytes": held_bytes(buffers),
                "largest_parameter_bytes": max(trainable, default=0),
            }
        )
    return found


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Return the plain tensors inside `tensor` and in its attributes."""
    return iter([tensor]) if is_plain(tensor) else _reached([tensor], set(), objects=True)


def _reached(values: Iterable[Any], seen: set[int], *, objects: bool) -> Iterator[Tensor]:
    for value in values:
        if id(value) in seen or isinstance(value, (nn.Module, type, torch.autograd.graph.Node)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if is_traceable_wrapper_subclass(value):
                yield from _reached(
                    [getattr(value, name) for name in value.__tensor_flatten__()[0]], seen, objects=True
                )
            else:
                if is_plain(value) or has_memory(value):
                    yield value
                yield from _reached(_attributes(value), seen, objects=True)
        elif isinstance(value, (dict, list, tuple)):
            entries = value.values() if isinstance(value, dict) else value
            yield from _reached(entries, seen, objects=objects)
        elif objects:
            yield from _reached(_attributes(value), seen, objects=True)


def _attributes(value: object) -> list[Any]:
    found = getattr(value, "__dict__", None)
    # The attributes of a fake tensor belong to its mode.
    is_fake = getattr(value, "fake_mode", None) is not None
    return [*found.values()] if isinstance(found, dict) and not callable(value) and not is_fake else []


def has_memory(tensor: Tensor) -> bool:
    """Return whether an instance of a tensor subclass holds values itself, and not only in its attributes.

    Args:
        tensor: the instance.

    Returns:
        True if it has storage, or is on ``meta``.
    """
    try:
        return tensor.is_meta or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a storage without memory
        return False


def _size(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor):
        return tensor.numel() * tensor.itemsize
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
