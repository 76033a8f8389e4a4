"""Equality of values, including their autograd state."""

from typing import Any

import torch
from torch import Tensor

from microbatch import flatten


def assert_same(actual: Any, expected: Any) -> None:
    """Same tree, same types, same data."""
    (mines, tree), (others, other) = flatten(actual), flatten(expected)
    assert tree == other
    assert type(actual) is type(expected)
    for mine, theirs in zip(mines, others, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            assert mine.layout is theirs.layout
        else:
            assert mine == theirs
