"""Combine one value of each micro-batch into one."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ._alike import expect_tensors, unlike, weights
from ._batch import Batch
from ._rules import Mean, Sum
from ._tree import Place


def reduced(parts: Sequence[Any], rule: Mean | Sum, batches: Sequence[Batch], place: Place) -> Any:
    """The sum of `parts`, or their mean weighted by rows. Gradients flow back into each part."""
    if isinstance(parts[0], Tensor):
        _expect_one_shape(parts, rule, place)
    if len(parts) == 1:
        return parts[0]
    if isinstance(rule, Mean):
        parts = [part * weight for part, weight in zip(parts, weights(batches, place), strict=True)]
    return sum(parts[1:], start=parts[0])


def _expect_one_shape(parts: Sequence[Tensor], rule: Mean | Sum, place: Place) -> None:
    first = parts[0]
    expect_tensors(parts, place)
    if isinstance(rule, Mean) and not (first.is_floating_point() or first.is_complex()):
        raise TypeError(f"{place} is of dtype {first.dtype}, which has no Mean(); make it floating point, or Sum() it")
    for i, part in enumerate(parts):
        if part.shape != first.shape or part.device != first.device:
            raise unlike(first, part, i, place)
