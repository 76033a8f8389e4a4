"""The storages behind tensors: views of one tensor share a storage, which counts once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from microbatch import flatten

from .memory import SPARSE_PARTS, has_memory, is_plain


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if is_traceable_wrapper_subclass(leaf):
                yield from storages([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
            elif leaf.layout in SPARSE_PARTS:
                yield from storages([getattr(leaf, part)() for part in SPARSE_PARTS[leaf.layout]])
            elif is_plain(leaf) or has_memory(leaf):
                yield leaf.untyped_storage()


def tensor_bytes(tree: Any) -> int:
    """Return the bytes of the tensors of `tree`, as if each were copied to a different device."""
    return sum(leaf.numel() * leaf.itemsize for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor))
