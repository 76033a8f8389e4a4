"""Restore the buffers that a model itself has changed, because each micro-batch or a replay runs an operation again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint._state import is_small


class Kept(NamedTuple):
    """A buffer, its version, and a copy of it."""

    buffer: Tensor
    version: int
    copy: Tensor


def kept(buffers: Iterable[Tensor]) -> list[Kept]:
    """Copy small ``buffers`` with data. Larger ones are tables, which forwards do not change."""
    return [Kept(each, each._version, each.detach().clone()) for each in buffers if is_small(each) and has_data(each)]


def has_data(tensor: Tensor) -> bool:
    return not tensor.is_meta and getattr(tensor, "fake_mode", None) is None


@torch.no_grad()
def restore(buffers: Iterable[Kept]) -> None:
    """Give changed buffers the values that they had."""
    for buffer, version, before in buffers:
        if buffer._version != version:
            buffer.copy_(before)
        elif not torch.equal(buffer, before):
            # Batch norm updates its statistics without a new version, so this must not create one either: the backward
            # would raise.
            buffer.data.copy_(before)
