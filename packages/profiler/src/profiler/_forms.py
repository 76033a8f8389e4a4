"""The form of a value: a key that is the same for values that differ in the values of their tensors alone."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

import torch

from ._storages import storages


def form_of(value: Any) -> bytes | None:
    """The form of ``value``; None if something in it cannot be pickled.

    Two values have the same form if they are equal as pickle sees them, and their tensors have the same shapes, strides
    and dtypes and are shared in the same way.
    """
    text = io.BytesIO()
    try:
        _Forms(text).dump(value)
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
