"""Which layers are equal for a count that depends on shapes only."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

import torch
from torch import nn

from microbatch import Batch, flatten

from ._storages import storages


def situation(layer: nn.Module, value: Batch) -> bytes | None:
    """A key of all that a count without data depends on; None if other things may matter too, such as skips.

    Two layers have the same key if they are equal as pickle sees them, and their tensors have the same shapes, strides
    and dtypes and are shared in the same way.
    """
    if any(hasattr(child, "route_skips") for child in layer.modules()):
        return None
    text = io.BytesIO()
    try:
        _Forms(text).dump((layer, flatten(value.value)))
    except Exception:  # whatever an object raises that cannot be pickled
        return None
    return text.getvalue()


class _Forms(pickle.Pickler):
    """Writes the form of a tensor instead of its values, with the numbers of the tensor and of its memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            return id(value)  # pickle knows those by name only, and none that was defined inside of a function
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        memory = [storage._cdata for storage in storages(value)]
        same = [self._numbers.setdefault(each, len(self._numbers)) for each in (id(value), *memory)]
        return type(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad, tuple(same)
