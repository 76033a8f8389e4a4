"""Gradients outside of ``.grad`` are those that autograd would put there."""

from __future__ import annotations

import torch
from torch import nn

from gpipe.engine._accumulate import GradientSums, below

from ..layers import DOUBLE, Overwrites


def test_a_function_of_ones_own_may_overwrite_its_gradient() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=DOUBLE))
    x = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    y = weight + Overwrites.apply(x)  # both get the same gradient
    gradients = GradientSums()
    (flowed,) = gradients.backward([y], [torch.ones_like(y)], below([y], [x]), [x])
    ((_, own),) = gradients.take()
    assert own.tolist() == [1] * 4
    assert flowed is not None
    assert flowed.tolist() == [2] * 4


def test_the_stage_before_may_overwrite_the_gradient_that_it_gets() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=DOUBLE))
    x = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    y = weight + x  # both get the same gradient
    gradients = GradientSums()
    (flowed,) = gradients.backward([y], [torch.ones_like(y)], below([y], [x]), [x])
    assert flowed is not None
    flowed.mul_(2)
    ((_, own),) = gradients.take()
    assert own.tolist() == [1] * 4
