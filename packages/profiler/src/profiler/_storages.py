"""The memory behind tensors: what two views share is one storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from microbatch import flatten


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in `tree`; one may occur several times."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from _storages_of(leaf)


def _storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    parts = _parts(tensor)
    if parts is None:
        yield tensor.untyped_storage()
    else:
        yield from storages(parts)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def tensor_bytes(tree: Any) -> int:
    """Bytes of the tensors of `tree`, as a copy to another device would have."""
    return sum(leaf.numel() * leaf.itemsize for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor))
