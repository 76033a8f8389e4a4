"""Memory that is used again for messages of one form, and the tensors inside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from ._forms import Form

_ALIGN: Final = 16  # so that the data of any dtype are aligned


def places(sizes: Sequence[int], begin: int) -> tuple[list[int], int]:
    """The offsets of parts in a frame, and the end of the last.

    Args:
        sizes: the bytes of each part.
        begin: the offset after which the first part begins.
    """
    ends = [*accumulate(sizes, lambda end, size: -(-end // _ALIGN) * _ALIGN + size, initial=begin)]
    return [end - size for end, size in zip(ends[1:], sizes, strict=True)], ends[-1]


class Frame:
    """Memory that messages are sent from, or received into.

    Attributes:
        memory: the memory, for reading and writing.
        data: the same as a uint8 tensor, for sending.
    """

    __slots__ = ("data", "memory")

    def __init__(self, size: int) -> None:
        self.memory = bytearray(size)
        with torch.inference_mode(False):  # inference tensors could not be written to by runs outside of that mode
            self.data = torch.frombuffer(self.memory, dtype=torch.uint8)

    def tensors(self, form: Form, begin: int) -> list[Tensor | None]:
        """The tensors of ``form`` in this memory, from ``begin`` on; none of them is sparse."""
        starts = iter(places([size for size in form.sizes if size], begin)[0])
        with torch.inference_mode(False):
            storage = self.data.untyped_storage()
            dense: Any = form.tensors
            return [
                None if each is None else each.within(storage, next(starts) if each.sizes[0] else 0) for each in dense
            ]
