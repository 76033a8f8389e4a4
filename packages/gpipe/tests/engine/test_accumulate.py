"""Gradients collected outside ``.grad`` match autograd's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe.engine._accumulate import GradientSums, find_leaves

from ..layers import DOUBLE, Overwrites


@pytest.mark.parametrize("by_function", [True, False])
def test_custom_function_may_overwrite_its_gradient(by_function: bool) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=DOUBLE))
    x = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    y = weight + (Overwrites.apply(x) if by_function else x)  # both get the same gradient
    gradients = GradientSums()
    (flowed,) = gradients.backward([y], [torch.ones_like(y)], find_leaves([y], [x]), [x])
    assert flowed is not None
    if by_function:
        assert flowed.tolist() == [2] * 4
    else:
        flowed.mul_(2)
    ((_, own),) = gradients.take()
    assert own.tolist() == [1] * 4


def test_leaves_sharing_a_gradient_have_separate_sums() -> None:
    """Both terms of a sum get the same tensor, so neither sum may accumulate into it."""
    a, b = (nn.Parameter(torch.ones(4, dtype=DOUBLE)) for _ in range(2))
    gradients = GradientSums()
    for k in (1, 2):
        y = a + b
        gradients.backward([y], [torch.full_like(y, k)], find_leaves([y]), [])
    sums = dict(gradients.take())
    assert [sums[a].tolist(), sums[b].tolist()] == [[3] * 4] * 2


class First(torch.autograd.Function):
    """The first of two tensors; it returns no gradient for the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def test_a_leaf_without_a_gradient_has_none() -> None:
    a, b = (nn.Parameter(torch.ones(4, dtype=DOUBLE)) for _ in range(2))
    gradients = GradientSums()
    y = First.apply(a, b)
    assert gradients.backward([y], [torch.ones_like(y)], find_leaves([y]), []) == []
    ((leaf, own),) = gradients.take()
    assert leaf is a
    assert own.tolist() == [1] * 4
