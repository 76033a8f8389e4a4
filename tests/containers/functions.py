"""Custom functions as people write them, each with a gradient of its own kind."""

from __future__ import annotations

from typing import Any

import torch
from packages.gpipe.tests.layers import Blocks, Overwrites
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Cube(Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, square = ctx.saved_tensors
        return gradient * 3 * square + 0 * x


class Halves(Function):
    """Two outputs, one of which may be left unused; asks for None instead of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 0.5, x * 0.25

    @staticmethod
    def backward(ctx: Any, half: Tensor | None, quarter: Tensor | None) -> Tensor | None:
        parts = [g * w for g, w in ((half, 0.5), (quarter, 0.25)) if g is not None]
        return sum(parts[1:], parts[0]) if parts else None


class Marks(Function):
    """One output that nobody differentiates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        ctx.save_for_backward(positive)
        return x.clamp(min=0), positive

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (positive,) = ctx.saved_tensors
        return gradient * positive


class Dirty(Function):
    """Works in place, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Reverses(Function):
    """Gives a view of its input, and the gradient of another function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * -0.5


class Once(Function):
    """Cannot be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        ours = gradient * weight if ctx.needs_input_grad[0] else None
        theirs = (gradient * x).sum(tuple(range(x.dim() - 1))) if ctx.needs_input_grad[1] else None
        return ours, theirs


def halves(x: Tensor) -> Tensor:
    return Halves.apply(x)[0].sin()


def both_halves(x: Tensor) -> Tensor:
    half, quarter = Halves.apply(x)
    return half + quarter.cos()


def overwrites(x: Tensor) -> Tensor:
    """Changes a gradient that nobody else needs here: both neighbours give it one of their own."""
    return Overwrites.apply(x * 1.5) * 0.5


FUNCTIONS: dict[str, Any] = {
    "cube": lambda x: torch.tanh(Cube.apply(x)),
    "half": halves,
    "both halves": both_halves,
    "marks": lambda x: Marks.apply(x)[0],
    "dirty": lambda x: Dirty.apply(x * 0.9),
    "reverses": Reverses.apply,
    "stops": lambda x: Blocks.apply(x),
    "partly stops": lambda x: x + Blocks.apply(x.sin()),
    "overwrites": overwrites,
}
