"""Measure the memory of parameters and buffers, including tensor subclasses such as packed weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Memory = tuple[int, int, int]
"""The storage, and the offset and number of bytes in it."""

SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The methods that return the dense parts of a sparse tensor, by its layout."""

__all__ = ["attached", "has_memory", "held_bytes", "is_compressed", "is_plain", "owned_bytes"]


def is_compressed(tensor: Tensor) -> bool:
    """Return whether `tensor` is sparse in a compressed layout, such as CSR, which has no storage and no strides.

    Args:
        tensor: a tensor or parameter.

    Returns:
        False for dense tensors, and for the sparse layout COO.
    """
    return tensor.layout in SPARSE_PARTS and tensor.layout is not torch.sparse_coo


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
        tensors: parameters or buffers. Tensors with the same memory count once.

    Returns:
        The number of bytes. A view counts the bytes of its elements, but at most the bytes of its storage.
    """
    return _new_bytes(tensors, set())


def _new_bytes(tensors: Iterable[Tensor], counted: set[Memory]) -> int:
    """Return the bytes that are not ``counted`` yet, and add them there."""
    parts = {_identify_memory(each): each for tensor in tensors for part in _parts(tensor) for each in _dense(part)}
    new = parts.keys() - counted
    counted |= new
    return sum(_size(parts[memory]) for memory in new)


def attached(module: nn.Module) -> Iterator[Tensor]:
    """Return the tensors in attributes of a module with integer parameters, and of these, such as their scales.

    Args:
        module: a module. Its children are not searched.

    Returns:
        An iterator over the tensors in attributes, and in objects, dicts, lists and tuples there. Some may share the
        memory of a parameter. It is empty if all parameters are floating-point or complex.
    """
    own = [*module.parameters(recurse=False)]
    if all(parameter.is_floating_point() or parameter.is_complex() for parameter in own):
        return iter(())
    registered = ("_parameters", "_buffers", "_modules")
    values = [value for name, value in vars(module).items() if name not in registered]
    values += [value for parameter in own if not is_plain(parameter) for value in _attributes(parameter)]
    return _reach(values, set(map(id, own)), objects=True)


def owned_bytes(modules: Iterable[nn.Module]) -> list[dict[str, int]]:
    """Return the bytes of the parameters and buffers of each module.

    Args:
        modules: the modules, such as the layers of a model. Tensors that several of them share count for the first.

    Returns:
        For each module, the fields of a :class:`profiler.LayerProfile` that describe its tensors: ``trainable_bytes``,
        ``frozen_bytes``, ``buffer_bytes``, which include tensors attached to packed weights, and
        ``largest_parameter_bytes``, among trainable ones.
    """
    counted: set[Memory] = set()
    found = []
    for module in modules:
        parameters = [*module.parameters()]
        trainable = [_new_bytes([p], counted) for p in parameters if p.requires_grad]
        beside = [x for child in module.modules() for x in attached(child)]
        found.append(
            {
                "trainable_bytes": sum(trainable),
                "frozen_bytes": _new_bytes((p for p in parameters if not p.requires_grad), counted),
                "buffer_bytes": _new_bytes([*module.buffers(), *beside], counted),
                "largest_parameter_bytes": max(trainable, default=0),
            }
        )
    return found


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Return the plain tensors inside `tensor` and in its attributes."""
    return iter([tensor]) if is_plain(tensor) else _reach([tensor], set(), objects=True)


def _dense(tensor: Tensor) -> Sequence[Tensor]:
    """Return the indices and values of a sparse tensor; else `tensor` itself, also for a fake one."""
    is_fake = getattr(tensor, "fake_mode", None) is not None
    if is_fake or tensor.layout not in SPARSE_PARTS:
        return [tensor]
    with torch.no_grad():
        return [getattr(tensor, name)() for name in SPARSE_PARTS[tensor.layout]]


def _reach(values: Iterable[Any], seen: set[int], *, objects: bool) -> Iterator[Tensor]:
    for value in values:
        if id(value) in seen or isinstance(value, (nn.Module, type, torch.autograd.graph.Node)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if is_traceable_wrapper_subclass(value):
                yield from _reach([getattr(value, name) for name in value.__tensor_flatten__()[0]], seen, objects=True)
            else:
                if is_plain(value) or has_memory(value):
                    yield value
                yield from _reach(_attributes(value), seen, objects=True)
        elif isinstance(value, (dict, list, tuple)):
            entries = value.values() if isinstance(value, dict) else value
            yield from _reach(entries, seen, objects=objects)
        elif objects:
            yield from _reach(_attributes(value), seen, objects=True)


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


def _identify_memory(tensor: Tensor) -> Memory:
    """Identify the memory of a tensor while the tensor exists."""
    if _has_no_storage(tensor):
        return id(tensor), 0, 0
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes


def _size(tensor: Tensor) -> int:
    if _has_no_storage(tensor):
        return tensor.numel() * tensor.itemsize
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _has_no_storage(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor)
