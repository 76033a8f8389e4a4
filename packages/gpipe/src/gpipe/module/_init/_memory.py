"""Allocate memory for tensors on ``meta``, which remain the same objects."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..._flatten._skeleton import is_placeholder
from .._swap import leaf_of, swap_data


class _Room(NamedTuple):
    meta: torch.UntypedStorage  # kept, or its address would be given out again
    room: Tensor


class Memory:
    """The memory of tensors that were on ``meta``. Tensors that share a storage on ``meta`` share one here too.

    Attributes:
        fresh: the tensors, by identity.
        unwritten: storages that hold nothing yet, by address.
    """

    def __init__(self) -> None:
        self.fresh: dict[int, Tensor] = {}
        self.unwritten: set[int] = set()
        self._rooms: dict[int, _Room] = {}

    def give(self, tensor: Tensor, device: torch.device) -> None:
        """Give ``tensor`` memory on ``device``, of its own size, strides and dtype."""
        room = self._room(tensor, device).view(tensor.dtype)
        view = torch.as_strided(room, tensor.size(), tensor.stride(), tensor.storage_offset())
        swap_data(tensor, leaf_of(view, tensor.requires_grad))
        if not is_placeholder(tensor):
            self.fresh[id(tensor)] = tensor

    def _room(self, tensor: Tensor, device: torch.device) -> Tensor:
        meta = tensor.untyped_storage()
        if meta._cdata not in self._rooms:
            room = torch.empty(meta.nbytes(), dtype=torch.uint8, device=device)
            # What an initialisation leaves out in part shall be seen; and placeholders are not-a-number.
            room.view(tensor.dtype).fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
            self._rooms[meta._cdata] = _Room(meta, room)
            self.unwritten.add(room.untyped_storage()._cdata)
        return self._rooms[meta._cdata].room

    def is_unwritten(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was given memory in which nothing has been written yet."""
        mine = id(tensor) in self.fresh and tensor.numel() > 0
        return mine and tensor.untyped_storage()._cdata in self.unwritten
