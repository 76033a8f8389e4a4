"""Random numbers that a forward draws and compares with a bound that none of them can pass.

Models with a layerdrop ask before every block ``if torch.rand([]) < self.layerdrop``, also where that is 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..values._leaves import storage_id, tensors_of
from ._sources import is_whole

_aten = torch.ops.aten

_COMPARISONS: dict[Any, Callable[[float, Any], bool]] = {
    _aten.lt.Scalar: operator.lt,
    _aten.le.Scalar: operator.le,
    _aten.gt.Scalar: operator.gt,
    _aten.ge.Scalar: operator.ge,
}


class Draws:
    """The memory of numbers that were drawn uniformly between two bounds."""

    def __init__(self) -> None:
        self._bounds: dict[int, tuple[float, float]] = {}

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note that an operation was called, and what it returned."""
        if func._schema.is_mutable:
            for tensor in tensors_of((args, kwargs)):
                self._bounds.pop(storage_id(tensor), None)
        if func in (_aten.rand.default, _aten.rand_like.default):
            self._bounds[storage_id(result)] = 0.0, 1.0
        elif func is _aten.uniform_.default and is_whole(result):
            given: list[float] = list(args[1:])
            low, high = given + [0.0, 1.0][len(given) :]
            self._bounds[storage_id(result)] = low, high

    def decides(self, func: Any, args: Any) -> bool:
        """Whether an operation is a comparison whose result does not depend on the numbers that were drawn."""
        compare = _COMPARISONS.get(func)
        if compare is None or not isinstance(args[0], Tensor):
            return False
        bounds = self._bounds.get(storage_id(args[0]))
        return bounds is not None and compare(bounds[0], args[1]) == compare(bounds[1], args[1])
