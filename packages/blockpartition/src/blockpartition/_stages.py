"""The devices that blocks are placed on."""

from __future__ import annotations

from dataclasses import dataclass

from ._grid import Number


@dataclass(frozen=True)
class Stage:
    """A device: a block of cost c takes c / speed, and may need `capacity` memory at most (None: any amount)."""

    speed: Number = 1
    capacity: Number | None = None
