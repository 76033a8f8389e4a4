"""The output of a pipe: its micro-batches put together, so that tensors that shared memory still do."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from microbatch import Batch, concatenate, gather, map_tensors

from ._aliases import Aliased, View, unpacked
from ._leaves import Activation
from ._sharing import SEEN, guarded, ties_of, unchangeable


def gathered(outputs: Sequence[Activation], batches: Sequence[Batch], spec: Any = None) -> Any:
    """The output, of the outputs of the last stage for each micro-batch.

    Tensors that share memory in a micro-batch are views of what its sources make together, where each row of a view
    lies in the same row of its source. Where that cannot be, they have memory of their own, and torch refuses to change
    those that require grad, since the plain model would change others as well.

    Args:
        outputs: one for each micro-batch.
        batches: the micro-batches that went in, of which only the rows count.
        spec: how leaves are put together, as :func:`microbatch.gather` takes it.
    """
    if len(outputs) == 1:
        outputs = [guarded(outputs[0])]
    values = [output.value for output in outputs]
    shared = any(output.ties or type(output.value) is Aliased for output in outputs)
    whole = gather(map(Batch, map(unpacked, values), map(_rows, batches)), spec)
    if len(outputs) == 1 or not shared:
        return whole
    packed = all(isinstance(value, Aliased) for value in values) and not any(SEEN in output.ties for output in outputs)
    together = _together(values) if packed and spec is None else None
    if together is not None:
        return together.value()
    flags = iter(_shared(outputs[0]))
    return map_tensors(lambda tensor: unchangeable(tensor) if next(flags) else tensor, whole)


_rows = attrgetter("rows")


def _together(values: Sequence[Aliased]) -> Aliased | None:
    """One value with the rows of all; None if their views do not go on from micro-batch to micro-batch."""
    first, *others = (_of_rows(value) for value in values)
    if first is None or any(each != first for each in others) or any(k is None for k, _ in values[0].plan.leaves):
        return None
    sources = [concatenate(column) for column in zip(*[value.sources for value in values], strict=True)]
    views = [
        view if view.shape is None else view._replace(shape=torch.Size([len(sources[view.source]), *view.shape]))
        for view in first[0]
    ]
    return Aliased(sources, values[0].plan._replace(views=views))


def _of_rows(value: Aliased) -> tuple[list[View], Any, Any] | None:
    """How each row of ``value`` is made; None if a view is not made row by row."""
    views = [_of_row(view, value.sources[view.source]) for view in value.plan.views]
    found = [view for view in views if view is not None]
    row = [(t.dtype, t.device, t.layout, type(t), t.shape[1:]) for t in value.sources]
    return (found, value.plan._replace(views=[]), row) if len(found) == len(views) else None


def _of_row(view: View, source: Tensor) -> View | None:
    """``view`` with the shape of one row; None if its rows do not lie in those of ``source``."""
    if not source.dim() or view.shape is None:
        return view if source.dim() else None
    row = prod(source.shape[1:])
    inner = [*zip(view.shape[1:], view.stride[1:], strict=True)]
    last = view.offset + sum((size - 1) * stride for size, stride in inner)
    alike = view.shape[:1] == source.shape[:1] and (view.shape[0] == 1 or view.stride[0] == row)
    if not (alike and source.is_contiguous() and last < row):
        return None
    # A dimension of one element has any stride.
    return view._replace(shape=view.shape[1:], stride=(row, *[stride if size != 1 else 0 for size, stride in inner]))


def _shared(output: Activation) -> list[bool]:
    """For each tensor in the value that ``output`` stands for, whether it shares memory with another one."""
    seen = [tie == SEEN for tie in ties_of(output)]
    if not isinstance(output.value, Aliased):
        return seen
    used = output.value.used
    return [seen[source] or used.count(source) > 1 for source in used]
