"""Losses as people write them: of all or some leaves, in place, counted, with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from packages.gpipe.tests.layers import DOUBLE
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Head(nn.Module):
    """What the loss has for itself."""

    def __init__(self, function: Callable[[Head, Any, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 1.5, dtype=DOUBLE))
        self.function = function

    def forward(self, output: Any, target: Any) -> Any:
        return self.function(self, output, target)


class LossKind(NamedTuple):
    """
    Attributes:
        compute: from parameters of the model, the head, an output and a target to the loss.
        reduction: how the losses of micro-batches make up that of the mini-batch.
        is_module: whether the loss is a module, so that the pipe knows its parameters.
        in_place: it changes its output.
    """

    compute: Callable[[Sequence[Tensor], Head, Any, Tensor], Any]
    reduction: str = "mean"
    is_module: bool = False
    in_place: bool = False


def each_row(output: Any, target: Tensor, leaves: slice = slice(None)) -> Tensor:
    """The loss of each row, in which every number of the output counts, and none as much as another."""
    counting = [leaf for leaf in pytree.tree_leaves(output) if _counts(leaf)][leaves]
    return target * sum((_row_sums(leaf, 1.0 + k) for k, leaf in enumerate(counting)), torch.zeros((), dtype=DOUBLE))


def _counts(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _row_sums(leaf: Tensor, scale: float) -> Tensor:
    real = leaf.real * 0.7 + leaf.imag.square() if leaf.is_complex() else leaf
    rows = real.to(DOUBLE)[:, None].flatten(1)
    weights = torch.linspace(0.5, scale, rows.shape[1], dtype=DOUBLE) if rows.shape[1] else torch.zeros(0, dtype=DOUBLE)
    return (rows * weights).sum(1)


def _in_place(output: Any) -> Any:
    for leaf in [leaf for leaf in pytree.tree_leaves(output) if _counts(leaf)][:1]:
        leaf.mul_(2)
    return output


def _decay(parameters: Sequence[Tensor]) -> Tensor:
    return sum((p.square().sum() for p in parameters if p.dtype == DOUBLE), torch.zeros((), dtype=DOUBLE))


def _counted(losses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return losses.sum(), (target > 0.5).sum()


LOSSES: dict[str, LossKind] = {
    "mean": LossKind(lambda own, head, output, target: each_row(output, target).mean()),
    "sum": LossKind(lambda own, head, output, target: each_row(output, target).sum(), "sum"),
    "last leaf": LossKind(lambda own, head, output, target: each_row(output, target, slice(-1, None)).mean()),
    "square": LossKind(lambda own, head, output, target: each_row(output, target).square().mean()),
    "in place": LossKind(lambda own, head, output, target: each_row(_in_place(output), target).mean(), in_place=True),
    "counted": LossKind(lambda own, head, output, target: _counted(each_row(output, target), target)),
    "counted in numbers": LossKind(
        lambda own, head, output, target: (each_row(output, target).sum(), len(target)),
    ),
    "head": LossKind(lambda own, head, output, target: (each_row(output, target) * head.weight).mean()),
    "module": LossKind(
        lambda own, head, output, target: (each_row(output, target) * head.weight).mean(), is_module=True
    ),
    "counted head": LossKind(
        lambda own, head, output, target: _counted(each_row(output, target) * head.weight, target)
    ),
    "counted module": LossKind(
        lambda own, head, output, target: _counted(each_row(output, target) * head.weight, target), is_module=True
    ),
    "decay": LossKind(lambda own, head, output, target: each_row(output, target).mean() + 0.01 * _decay(own)),
    "counted decay": LossKind(
        lambda own, head, output, target: _counted(each_row(output, target) + 0.01 * _decay(own), target)
    ),
}


def whole(kind: LossKind, found: Sequence[Any], rows: Sequence[int]) -> Tensor:
    """The loss of a mini-batch from those of its micro-batches, as somebody without a pipe computes it."""
    if isinstance(found[0], tuple):
        total: Tensor = sum(each for each, _ in found) / sum(count for _, count in found)
        return total
    weights = [1.0 if kind.reduction == "sum" else count / sum(rows) for count in rows]
    return torch.stack([each * weight for each, weight in zip(found, weights, strict=True)]).sum()
