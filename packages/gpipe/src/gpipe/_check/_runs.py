"""A layer on the whole mini-batch, and on its micro-batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._findings import Finding
from ._rows import NoRowsError, cut, difference, dimension
from ._trial import Signal, Trial, attempt

Layer = TypeVar("Layer", bound=nn.Module)


class Task(NamedTuple):
    """A layer and what the plain model gives to it.

    Attributes:
        whole: of the whole mini-batch.
        parts: of each micro-batch.
        tolerance: relative differences up to this are rounding.
        is_last: whether nothing but the loss comes after the layer.
    """

    name: str
    layer: nn.Module
    whole: Signal
    parts: Sequence[Signal]
    tolerance: float
    is_last: bool = False

    def finding(self, code: str, message: str, evidence: str = "") -> Finding:
        return Finding(code, self.name, type(self.layer).__name__, message, evidence)


class Runs(NamedTuple):
    """A copy of a layer on the whole mini-batch, and one on its micro-batches, one after the other.

    Attributes:
        copies: the two.
        dims: for each tensor that they give on, the dimension of its rows; None if it is the same for all.
    """

    copies: tuple[nn.Module, nn.Module]
    whole: Trial
    parts: list[Trial]
    dims: list[int | None]

    def pairs(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Each tensor that the layer gives on, as pieces of the whole and as micro-batches."""
        for k, (whole, dim) in enumerate(zip(self.whole.output.tensors(), self.dims, strict=True)):
            parts = [part.output.tensors()[k] for part in self.parts]
            yield cut(whole, dim, parts), parts

    def difference(self) -> float:
        return max([difference(*pair) for pair in self.pairs()], default=0.0)

    def backward(self) -> None:
        """The backward of the whole, and those of the micro-batches, from the same gradients."""
        cotangents = [_cotangent(tensor, k) for k, tensor in enumerate(self.whole.roots)]
        self.whole.backward(cotangents)
        columns = zip(*[part.roots for part in self.parts], strict=True)
        shares = [_shares(*each) for each in zip(cotangents, self.dims, columns, strict=True)]
        for k, part in enumerate(self.parts):
            part.backward([share[k] for share in shares])


def run_both(task: Task, layer: nn.Module) -> Runs:
    """The forwards of copies of ``layer`` on the whole and on micro-batches.

    Raises:
        NoRowsError: what the micro-batches give does not make up what the whole gives.
        Whatever the layer raises.
    """
    copies = fresh(layer), fresh(layer)
    whole = attempt(copies[0], task.whole)
    parts = [attempt(copies[1], part) for part in task.parts]
    return Runs(copies, whole, parts, dims_of(whole, parts))


def fresh(layer: Layer) -> Layer:
    """A copy without gradients."""
    twin = copy.deepcopy(layer)
    twin.zero_grad()
    return twin


def dims_of(whole: Trial, parts: Sequence[Trial]) -> list[int | None]:
    columns = [part.output.tensors() for part in parts]
    if len({len(column) for column in columns} | {len(whole.output.tensors())}) > 1:
        raise NoRowsError("the micro-batches give on other numbers of tensors than the whole")
    return [dimension(tensor, parts) for tensor, *parts in zip(whole.output.tensors(), *columns, strict=True)]


def _cotangent(tensor: Tensor, k: int) -> Tensor:
    """A gradient with a value of its own for every element, so that none can make up for another."""
    generator = torch.Generator().manual_seed(k)
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return values.to(tensor.device, tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else None)


def _shares(cotangent: Tensor, dim: int | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of micro-batches. What is the same for all of them has equal shares in that of the whole."""
    return [cotangent / len(parts)] * len(parts) if dim is None else cut(cotangent, dim, parts)


def figure(apart: float) -> str:
    return "another shape, type or not-a-number" if math.isinf(apart) else f"{apart:.1e}"


def without_masks(model: Layer) -> Layer:
    """A copy in evaluation mode, of which only batch norm is as in training."""
    quiet = copy.deepcopy(model)
    for module in quiet.modules():
        module.training &= isinstance(module, _BatchNorm)
    return quiet
