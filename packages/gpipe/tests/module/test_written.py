"""Whichever tensor an operation goes by, it is seen that a storage was written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe.module._init._written import Written

WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.add_(1),
    "by data": lambda x: x.data.normal_(),
    "a view": lambda x: x[1:].zero_(),
    "an index": lambda x: x.__setitem__(0, 1.0),
    "out": lambda x: torch.ones(3, out=x),
    "several": lambda x: torch._foreach_add_([x, torch.ones(2)], 1.0),
    "init": nn.init.uniform_,
}
READS: dict[str, Callable[[Tensor], object]] = {
    "copy": lambda x: torch.ones(3).copy_(x),
    "clone": lambda x: x.clone().zero_(),
    "view": lambda x: x[1:],
    "sum": torch.sum,
}


def written(change: Callable[[Tensor], object]) -> bool:
    tensor = torch.ones(3)
    unwritten = {tensor.untyped_storage()._cdata}
    with torch.no_grad(), Written(unwritten):
        change(tensor)
    return not unwritten


@pytest.mark.parametrize("how", WRITES)
def test_writes(how: str) -> None:
    assert written(WRITES[how])


@pytest.mark.parametrize("how", READS)
def test_reads(how: str) -> None:
    assert not written(READS[how])
