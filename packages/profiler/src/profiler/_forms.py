"""Compute a key that is the same for values that differ only in the data of their tensors."""

from __future__ import annotations

import io
import pickle
from types import FunctionType
from typing import Any

import torch

from ._storages import storages


def compute_form(value: Any) -> bytes | None:
    """Return the form of ``value``; None if something in it cannot be pickled.

    Two values have the same form if their pickles are equal, and their tensors have the same shapes, strides and
    dtypes, and share memory in the same way.
    """
    text = io.BytesIO()
    try:
        _Forms(text).dump(value)
    except Exception:  # pickling may raise any exception
        return None
    return text.getvalue()


class _Forms(pickle.Pickler):
    """Pickle the metadata of tensors instead of their values, with indices that show which tensors share memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)):
            return id(value)  # pickle stores only their names, and cannot store local ones
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        memory = [storage._cdata for storage in storages(value)]
        same = [self._numbers.setdefault(each, len(self._numbers)) for each in (id(value), *memory)]
        return type(value), tuple(value.shape), value.stride(), value.dtype, value.requires_grad, tuple(same)
