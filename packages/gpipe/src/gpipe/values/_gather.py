"""The output of a pipe: its micro-batches put together, so that tensors that shared memory still do."""

from __future__ import annotations

from collections.abc import Sequence
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
    lies in the rows of its source. Where that cannot be, they have memory of their own, and torch refuses to change
    those that require grad, since the plain model would change others as well.

    Args:
        outputs: one for each micro-batch.
        batches: the micro-batches that went in, of which only the rows count.
        spec: how leaves are put together, as :func:`microbatch.gather` takes it.
    """
    if len(outputs) == 1:
        outputs = [guarded(outputs[0])]
    values = [output.value for output in outputs]
    shared = [output for output in outputs if output.ties or type(output.value) is Aliased]
    plain = map(unpacked, values) if shared else values
    whole = gather(map(Batch, plain, map(_rows, batches)), spec)
    if len(outputs) == 1 or not shared:
        return whole
    if spec is None and all(isinstance(value, Aliased) for value in values) and _by_rows(values):
        return _together(values)
    flags = iter(_shared(outputs[0]))
    return map_tensors(lambda tensor: unchangeable(tensor) if next(flags) else tensor, whole)


_rows = attrgetter("rows")


def _together(values: Sequence[Aliased]) -> Any:
    sources = [concatenate(column) for column in zip(*[value.sources for value in values], strict=True)]
    columns = zip(*[value.plan.views for value in values], strict=True)
    plan = values[0].plan
    return Aliased(sources, plan._replace(views=[_whole(column, values[0]) for column in columns])).value()


def _whole(column: Sequence[View], value: Aliased) -> View:
    """The view that those of all micro-batches are together."""
    first = column[0]
    if first.shape is None:
        return first
    rows = sum(view.shape[0] for view in column if view.shape is not None)
    stride = _strides(first, value)[0], *first.stride[1:]
    return first._replace(shape=torch.Size([rows, *first.shape[1:]]), stride=stride)


def _by_rows(values: Sequence[Aliased]) -> bool:
    """Whether sources and views go on from micro-batch to micro-batch."""
    first = values[0]
    return (
        all(constant is None for _, constant in first.plan.leaves)
        and all(_is_like(value, first) for value in values)
        and all(_lies_in_rows(view, value) for value in values for view in value.plan.views)
    )


def _is_like(value: Aliased, first: Aliased) -> bool:
    return (
        value.plan._replace(views=[]) == first.plan._replace(views=[])
        and [_but_rows(view, value) for view in value.plan.views]
        == [_but_rows(view, first) for view in first.plan.views]
        and [_row(source) for source in value.sources] == [_row(source) for source in first.sources]
    )


def _but_rows(view: View, value: Aliased) -> View:
    return view._replace(shape=view.shape and view.shape[1:], stride=_strides(view, value))


def _strides(view: View, value: Aliased) -> tuple[int, ...]:
    """The strides, where a dimension of length 1 has any: that of all rows for the first, else 0."""
    pairs = enumerate(zip(view.shape or (), view.stride, strict=True))
    return tuple([stride if size != 1 else 0 if d else _length(view, value) for d, (size, stride) in pairs])


def _length(view: View, value: Aliased) -> int:
    """How many elements like those of ``view`` its source has."""
    source = value.sources[view.source]
    return source.numel() * source.itemsize // (source.itemsize if view.dtype is None else view.dtype.itemsize)


def _row(tensor: Tensor) -> tuple[Any, ...]:
    """What tensors that are concatenated must have in common."""
    return tensor.dtype, tensor.device, tensor.layout, type(tensor), tensor.dim(), tensor.shape[1:]


def _lies_in_rows(view: View, value: Aliased) -> bool:
    """Whether the rows of ``view`` are as many equal parts of its source, and lie in one of them each."""
    source = value.sources[view.source]
    if view.shape is None or not source.dim():
        return bool(source.dim())
    if not view.shape or not source.is_contiguous():
        return False
    row, *strides = _strides(view, value)
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape[1:], strides, strict=True))
    return view.shape[0] * row == _length(view, value) and last < row


def _shared(output: Activation) -> list[bool]:
    """For each tensor in the value that ``output`` stands for, whether it shares memory with another one."""
    seen = [bool(tie & SEEN) for tie in ties_of(output)]
    if not isinstance(output.value, Aliased):
        return seen
    used = output.value.used
    return [seen[source] or used.count(source) > 1 for source in used]
