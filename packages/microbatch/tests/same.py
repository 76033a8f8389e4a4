"""Equality of values, down to what autograd knows of them."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor


def assert_same(actual: Any, expected: Any) -> None:
    """Same tree, same types, same data."""
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    assert type(actual) is type(expected)
    for mine, theirs in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert mine.layout is theirs.layout
        else:
            assert mine == theirs
