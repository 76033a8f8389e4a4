"""Which tensors share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Region(NamedTuple):
    """A part of a storage, in bytes. Two tensors may share memory only if their regions overlap."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        return self.storage == other.storage and max(self.start, other.start) < min(self.stop, other.stop)


def region(tensor: Tensor) -> Region:
    """The memory from the first to the last element of ``tensor``; empty if there is none."""
    if tensor.layout is not torch.strided:
        return Region(id(tensor), 0, 1)
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Region(storage_id(tensor), start, start + extent(tensor) * tensor.itemsize)


def extent(tensor: Tensor) -> int:
    """How many elements lie between the first and the last in memory, both included."""
    if tensor.is_contiguous():  # also if there are no elements
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without overlap; then a clone has the same strides."""
    return tensor.is_contiguous() or fills(tensor.shape, tensor.stride())


def fills(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of such a tensor fill its memory."""
    size = 1
    for step, length in sorted(zip(stride, shape, strict=True)) if 0 not in shape else ():
        if length != 1 and step != size:
            return False
        size *= length
    return True


def storage_id(tensor: Tensor) -> int:
    """Equal for tensors with the same storage, as long as both are alive."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def has_own_storages(tensors: Sequence[Tensor], others: Sequence[Tensor] = ()) -> bool:
    """Whether no two tensors have the same storage, nor one of the ``others``: a quick test that none share memory."""
    own = set(map(storage_id, tensors))
    return len(own) == len(tensors) and own.isdisjoint(map(storage_id, others))


def groups(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the tensors in groups whose regions overlap, directly or through others; in the given order."""
    found: list[list[int]] = []
    last = Region(0, 0, 0)
    regions = [region(each) for each in tensors]
    for where, k in sorted((where, k) for k, where in enumerate(regions) if where.start < where.stop):
        if where.overlaps(last):
            found[-1].append(k)
            last = last._replace(stop=max(last.stop, where.stop))
        else:
            found.append([k])
            last = where
    found += [[k] for k, where in enumerate(regions) if where.start == where.stop]
    # Not in the order of addresses: a recomputation must give the same order.
    return sorted(map(sorted, found))


def clusters(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in groups that share memory."""
    return [[tensors[k] for k in group] for group in groups(tensors)]


def clone(tensor: Tensor) -> Tensor:
    """A leaf like ``tensor``, in new memory."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
