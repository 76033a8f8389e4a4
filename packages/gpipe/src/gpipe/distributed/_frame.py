"""Memory for messages of one form that come and go many times, with the tensors of the form inside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from ._forms import Form

_ALIGN: Final = 16  # so that the data of any dtype can be looked at in place


def places(sizes: Sequence[int], begin: int) -> tuple[list[int], int]:
    """Where in a frame parts of these sizes begin, after ``begin``, and where the last one ends."""
    ends = [*accumulate(sizes, lambda end, size: -(-end // _ALIGN) * _ALIGN + size, initial=begin)]
    return [end - size for end, size in zip(ends[1:], sizes, strict=True)], ends[-1]


class Frame:
    """Memory that messages are sent from, or come into.

    Attributes:
        memory: that memory, to be read and written.
        data: the same as a tensor of bytes, to be sent.
    """

    __slots__ = ("data", "memory")

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        with torch.inference_mode(False):  # it will be written in runs outside of that mode too
            self.data = torch.frombuffer(self.memory, dtype=torch.uint8)

    def tensors(self, form: Form, begin: int) -> list[Tensor | None]:
        """The tensors of ``form`` in this memory, after ``begin``; none of them is sparse."""
        starts = iter(places([size for size in form.sizes if size], begin)[0])
        with torch.inference_mode(False):
            storage = self.data.untyped_storage()
            dense: Any = form.tensors
            return [
                None if each is None else each.within(storage, next(starts) if each.sizes[0] else 0) for each in dense
            ]
